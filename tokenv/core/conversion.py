"""Conversion of values to the types of annotations, for dataclasses and for constructors of any package.

An annotation may be ``bool``, ``int``, ``float``, ``str``, ``Path``, ``None``, a ``Literal``, a union, list, tuple or
dictionary of these, or a dataclass. A value with another annotation, or none, is not changed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from tokenv.core.errors import UserError, suggest

T = TypeVar("T")
Limit = Annotated[float, "or .inf"]  # a number or infinity
Figure = Annotated[float, "measured"]  # any float: a measured number may be infinite or NaN
Plain = Annotated[Any, "plain"]  # a value of YAML or JSON
Section = dict[str, Plain]  # the name of a class, and its options
# Types of a dataclass's fields by name; evaluating its annotations takes long.
type_hints: Callable[[type], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))
SECTION_TEXTS = ("name", "pretrained", "tokenizer")  # of these options, those that take any text

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "null"}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
WORDS |= {
    Limit: "a number or .inf",
    Figure: "a number",
    Plain: "a number, text, true or false, null, or a list or section of these",
}


def check_keys(values: Mapping[str, Any], where: str, kind: type, prefix: str = "") -> None:
    """Check that a dataclass has all keys.

    Args:
        values: nested dictionaries, which need not be complete.
        where: file or command line of the keys, for the message.
        kind: dataclass.
        prefix: prefix of the keys, for the message.

    Raises:
        UserError: names the file, the key and the nearest known one.
    """
    known = type_hints(kind)
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {prefix}{key}: {suggest(str(key), known)}")
        if known[key] == Section and not isinstance(value, Mapping):
            raise UserError(
                f"{where}: {prefix}{key} = {value!r}: expected a section such as {prefix}{key}.name={value}"
            )
        if is_dataclass(known[key]):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: {prefix}{key} = {value!r}: expected a section with keys of its own")
            check_keys(value, where, known[key], f"{prefix}{key}.")


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a checked dataclass from nested dictionaries.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range; the message names its
            key.
    """
    check_keys(values, "configuration", kind, prefix)
    hints = type_hints(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{prefix}{item.name} is missing: expected {in_words(hints[item.name])}")
    return kind(**{key: convert(value, hints[key], f"{prefix}{key}") for key, value in values.items()})


def hint_at(kind: type, key: str) -> Any:
    """Return the annotation of a dotted key, such as ``data.source``; Any where there is none.

    The keys of a field ``config`` are on the level of its dataclass, as on the command line. The metadata of a field
    with a dictionary give its type: ``holds``, or ``each`` for that of its values (``Self``: this dataclass); or
    ``hint``, a function from the key within the dictionary to its annotation.

    Args:
        kind: dataclass of the key.
        key: names, separated by dots.
    """
    first, _, rest = key.partition(".")
    hints = type_hints(kind)
    if first not in hints and is_dataclass(hints.get("config")):
        return hint_at(hints["config"], key)
    hint = hints.get(first, Any)
    if not rest:
        return hint
    if hint == Section:
        return str if rest in SECTION_TEXTS else Any
    inner = next(filter(is_dataclass, (hint, *get_args(hint))), None)
    metadata: Mapping[str, Any] = next((item.metadata for item in fields(kind) if item.name == first), {})
    if "hint" in metadata:
        return metadata["hint"](rest)
    if "each" in metadata:
        inner = kind if metadata["each"] is Self else metadata["each"]
        _, dot, rest = rest.partition(".")
        if not dot:
            return inner
    inner = metadata.get("holds", inner)
    return hint_at(inner, rest) if is_dataclass(inner) and rest else Any  # type: ignore[arg-type]


def parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function by name, with annotations resolved where possible.

    Those of a class are those of its ``__init__``: before Python 3.11.4, ``inspect.signature`` prefers an inherited
    ``__new__``, such as that of a TensorDictModule, which takes anything.
    """
    if isinstance(target, type):
        constructor: Any = target.__init__  # type: ignore[misc]
        if constructor is not object.__init__:
            _, *own = _signature(constructor).parameters.items()
            return dict(own)
    return _signature(target).parameters


def _signature(target: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(target, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError):  # names which only type checkers import
        return inspect.signature(target)


def convert(value: Any, hint: Any, key: str) -> Any:
    """Convert a value to the type of an annotation: 1e6 to a whole number, 1 to a float, ``true`` to ``on``.

    Args:
        value: value of YAML, JSON or the command line.
        hint: annotation.
        key: key of the value, for the message.

    Raises:
        UserError: the value does not fit; the message says what was expected.
    """
    if is_dataclass(hint):
        if type(value) is hint:
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"{key} = {value!r}: expected {in_words(hint)}")
        return from_dict(hint, value, f"{key}.")  # type: ignore[arg-type]
    if get_origin(hint) in (Union, UnionType) and isinstance(value, Mapping):
        for part in filter(is_dataclass, get_args(hint)):
            return from_dict(part, value, f"{key}.")  # type: ignore[arg-type]
    if get_origin(hint) is list and is_dataclass(part := get_args(hint)[0]) and isinstance(value, list | tuple):
        return [convert(each, part, f"{key}[{number}]") for number, each in enumerate(value)]
    hint = Section if hint == Plain and isinstance(value, Mapping) else hint
    if get_origin(hint) is dict and isinstance(value, Mapping) and _has_text_keys(value):
        return {name: convert(each, get_args(hint)[1], f"{key}.{name}") for name, each in value.items()}
    try:
        return _read(value, hint)
    except (ValueError, OverflowError):
        infinite = hint is float and isinstance(value, float) and not math.isfinite(value)
        large = hint is int and isinstance(value, int | float) and abs(value) >= 2**63
        words = "a finite number" if infinite else "a whole number below 2**63" if large else in_words(hint)
        raise UserError(f"{key} = {value!r}: expected {words}") from None


def _read(value: Any, hint: Any) -> Any:
    """Convert a value, or raise a ValueError without a message."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if hint == Plain:
        return _plain(value)
    if hint == Figure:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _refuse()
    if hint == Limit or kind in (int, float):
        return _number(value, hint)
    if kind in (Union, UnionType):
        return _union(value, [part for part in parts if not is_dataclass(part) or type(value) is part])
    if kind is Literal:
        return _choice(value, parts)
    if kind in (list, tuple, Sequence):
        return _list(value, parts, tuple if kind is tuple else list)
    if kind is Path:
        return Path(value) if isinstance(value, str | Path) else _refuse()
    if kind in (bool, str, NoneType, dict, Mapping):
        return (
            value if isinstance(value, kind) and (kind not in (dict, Mapping) or _has_text_keys(value)) else _refuse()
        )
    return value


def _refuse() -> Any:
    raise ValueError


def _has_text_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in value)


def _number(value: Any, hint: Any) -> int | float:
    number = float(value) if isinstance(value, str) and hint is not int else value  # Sacred reads inf as text
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError
    if hint is int:
        return int(number) if number == int(number) and abs(number) < 2**63 else _refuse()
    return float(number) if math.isfinite(number) or (hint == Limit and number == number) else _refuse()


def _union(value: Any, parts: Sequence[Any]) -> Any:
    for part in sorted(parts, key=lambda part: type(value) is not (get_origin(part) or part)):  # its own type first
        with suppress(ValueError, OverflowError):
            return _read(value, part)
    return _refuse()


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    if isinstance(value, bool) and value not in choices:
        value = "on" if value else "off"
    return value if any(type(value) is type(choice) and value == choice for choice in choices) else _refuse()


def _list(value: Any, parts: Sequence[Any], kind: type) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError
    hints = [part for part in parts if part is not Ellipsis] or [Any]
    if kind is list or Ellipsis in parts or not parts:
        hints = hints * len(value)
    return kind(_read(each, hint) for each, hint in zip(value, hints, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and _has_text_keys(value):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else _refuse()


def in_words(hint: Any) -> str:
    """Describe the values of an annotation in words."""
    kind = get_origin(hint) or hint
    parts = [part for part in get_args(hint) if part is not Ellipsis]
    if hint in WORDS:
        return WORDS[hint]
    if is_dataclass(hint):
        return f"a section of {' and '.join(item.name for item in fields(hint))}"
    if kind in (Union, UnionType):
        return _either(map(in_words, parts))
    if kind is Literal:
        return _either(map(str, parts))
    if kind in (list, tuple, Sequence):
        each = [PLURALS.get(part) or in_words(part) for part in parts] if len(parts) == 1 else map(in_words, parts)
        return ", ".join([*each, "in a list such as [a, b]"])
    return "a section whose keys are texts" if kind in (dict, Mapping) else str(hint)


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
