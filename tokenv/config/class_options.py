"""Options of the classes which a configuration names, with their defaults, and what naming another class gives up."""

from collections.abc import Mapping
from typing import Any

from tokenv.config.files import LOADED
from tokenv.config.registry import SECTIONS, Registry, find, section_of
from tokenv.core.conversion import parameters

# arguments which the run passes, unless they are given
OF_RUN = ("rate", "rates", "vocabulary", "train_tokenizer")


def complete_options(section: str, options: Mapping[str, Any], table: Registry) -> dict[str, Any]:
    """Return the options of a class, those which are not given by their defaults.

    Args:
        section: section of the configuration, such as ``estimator``.
        options: ``name`` of the class and the given options.
        table: registry of names.

    Raises:
        UserError: the name is unknown.
    """
    if options["name"] == LOADED:
        return dict(options)
    defaults = {
        name: parameter.default
        for name, parameter in parameters(find(section, options["name"], table)).items()
        if parameter.default is not parameter.empty and name not in OF_RUN
    }
    return defaults | dict(options)


def with_class_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, with all options of the classes which it names.

    Args:
        values: nested values of a complete configuration.

    Raises:
        UserError: a name is unknown.
    """
    resolved = dict(values)
    for section, table in SECTIONS.items():
        outer, _, inner = section.rpartition(".")
        options = section_of(values, section)
        if "name" not in options:
            continue
        complete = complete_options(section, options, table)
        if outer:
            resolved[outer] = {**resolved[outer], inner: complete}
        else:
            resolved[inner] = complete
    return resolved


def options_given_up(base: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return in sentences which options of a base are lost where another class is named that knows them, too.

    Naming another class drops the options of the base (``tokenv.config.files.merge``): the class has its own defaults.

    Args:
        base: nested values of the configuration which is changed.
        own: nested values of the changed configuration.

    Raises:
        UserError: a name is unknown.
    """
    sentences = []
    for section, table in SECTIONS.items():
        before = section_of(base, section)
        after = section_of(own, section)
        name = after.get("name")
        if name is None or before.get("name") in (None, name):
            continue
        complete = complete_options(section, after, table)
        for key, value in before.items():
            if key in complete and key not in after and complete[key] != value:
                lost = f"{key}={value} of the base ({name}'s own: {complete[key]})"
                sentences.append(f"{section} {name} gives up {lost}")
    return sentences
