"""Reading comparisons: YAML files, and the words of a command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tokenv.compare.options import CompareOptions, as_lists
from tokenv.compare.settings import flat
from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE, config_path, load_yaml, merge
from tokenv.config.schema import Config

Words: TypeAlias = tuple[dict[str, Any], list[str]]


def read_words(words: Sequence[str], parse: Callable[[list[str]], Words]) -> Words:
    """The words of a command line, of which ``methods.NAME.key=value`` may name a method with dots or equals signs.

    Args:
        words: as typed.
        parse: Sacred's reading of words without such names: nested values, and names of files.

    Returns:
        The same as ``parse``.

    Raises:
        ValueError: a file that is named is none.
    """
    _, files = parse(list(words))
    methods_of = (load_yaml(config_path(file)).get("methods") for file in files)
    names = [str(name) for methods in methods_of if isinstance(methods, dict) for name in methods]
    names.sort(key=len, reverse=True)  # the longest that fits, where one name begins like another
    plain: list[str] = []
    found: dict[str, Any] = {}
    for word in words:
        rest = {name: word.removeprefix(f"methods.{name}.") for name in names}
        name = next((name for name in names if rest[name] != word and "=" in rest[name]), None)
        if name is None:
            plain.append(word)
        else:
            changes, _ = parse([rest[name]])
            found = merge(found, {name: changes})
    updates, files = parse(plain)
    return (merge(updates, {"methods": found}) if found else updates), files


def resolve_comparison(names: list[str], updates: dict[str, Any]) -> CompareOptions:
    """Options from comparison files and the command line.

    Args:
        names: files or names of comparisons, later ones overriding earlier ones.
        updates: nested values of the command line, which override all files.

    Raises:
        UserError: an unknown file, key or value.
    """
    values: dict[str, Any] = {}
    for name in names:
        path = config_path(name)
        read = load_yaml(path)
        check_keys(read, str(path), CompareOptions)
        values = merge(values, _named(read))
    check_keys(updates, COMMAND_LINE, CompareOptions)
    values = merge(values, _named(updates))
    values = _nested(values)
    options = make(CompareOptions, as_lists(values))
    check_keys(options.common, "common", Config)
    options.parts()
    return options


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with ``tune``'s keys dotted, which the command line reads as nested."""
    if not isinstance(values.get("tune"), dict):
        return dict(values)
    return {**values, "tune": flat(values["tune"])}


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """The same with method names as text, where YAML or the command line read a number."""
    methods = values.get("methods")
    return values | {"methods": {str(k): v for k, v in methods.items()}} if isinstance(methods, dict) else values
