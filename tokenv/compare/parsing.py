"""Reading comparisons: YAML files, and the words of a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tokenv.compare.config import CompareOptions, as_lists
from tokenv.compare.settings import flat
from tokenv.config.conversion import check_keys, from_dict
from tokenv.config.files import COMMAND_LINE, config_path, load_yaml, merge
from tokenv.config.literals import read_words
from tokenv.config.schema import Config
from tokenv.core.errors import UserError

CONFIG_KEYS, COMPARISON_KEYS = ({item.name for item in fields(kind)} for kind in (Config, CompareOptions))


def read_comparison_words(words: Sequence[str], kind: type) -> tuple[dict[str, Any], list[str]]:
    """Read the words of a command line; in ``methods.NAME.key=value``, NAME may hold dots and equals signs.

    Args:
        words: as typed.
        kind: dataclass of a comparison's options.

    Returns:
        Nested values, and names of files, as ``read_words`` does.

    Raises:
        UserError: a file that is named is none, or a value is none of a configuration's.
    """
    _, files = read_words(words, kind)
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
            changes, _ = read_words([rest[name]], Config)
            found = merge(found, {name: changes})
    updates, files = read_words(plain, kind)
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
        if "methods" not in read and read.keys() <= CONFIG_KEYS and not read.keys() <= COMPARISON_KEYS:
            raise UserError(
                f"{name} is the configuration of one run, and a comparison needs methods: write a YAML file such as "
                f"{{base: {name}, methods: {{learned: {{}}, uniform: {{agent: {{name: uniform}}}}}}}}, or take the "
                f"methods of another comparison: tokenv compare with compare-quick base={name}"
            )
        check_keys(read, str(path), CompareOptions)
        values = merge(values, _named(read))
    check_keys(updates, COMMAND_LINE, CompareOptions)
    values = merge(values, _named(updates))
    values = _nested(values)
    options = from_dict(CompareOptions, as_lists(values))
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
