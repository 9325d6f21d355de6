"""Conversion of values to the types of annotations, for dataclasses and for constructors of any package.

An annotation may be ``bool``, ``int``, ``float``, ``str``, ``Path``, ``None``, a ``Literal``, a union, list, tuple or
dictionary of these, or a dataclass. A value with another annotation, or none, is not changed.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tokenv.core.errors import UserError, suggest

T = TypeVar("T")
Limit = Annotated[float, "or .inf"]  # a number or infinity
Figure = Annotated[float, "measured"]  # any float: a measured number may be infinite or NaN
Plain = Annotated[Any, "plain"]  # a value of YAML or JSON
Section = dict[str, Plain]  # the name of a class, and its options
# Types of a dataclass's fields by name; evaluating its annotations takes long.
type_hints: Callable[[type], dict[str, Any]] = functools.cache(
    functools.partial(get_type_hints, include_extras=True)
)
# a section with the name of a class, or this name alone, which stands for it
Named = Annotated[Section, "named"]
SECTION_TEXTS = ("name", "pretrained", "tokenizer")  # of these options, those that take any text

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Limit: "a number or .inf",
    Figure: "a number",
    Plain: "a number, text, true or false, null, or a list or section of these",
}
LISTS: dict[Any, str] = {  # by the type of their values
    int: "whole numbers, in a list such as [0, 1, 2]",
    float: "numbers, in a list such as [0.1, 0.2]",
    str: "texts, in a list such as [a, b]",
    Named: "names, in a list such as [a, b], or [{name: a, option: 1}]",
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
            inner = ""
            if isinstance(value, Mapping) and value:
                inner = f".{next(iter(value))}"
            hint = _suggest_key(str(key), kind, inner)
            raise UserError(f"{where}: unknown key {prefix}{key}{inner}: {hint}")
        if known[key] == Section and not isinstance(value, Mapping):
            raise UserError(
                f"{where}: {prefix}{key} = {value!r}: expected a section such as {prefix}{key}.name={value}"
            )
        if is_dataclass(known[key]):
            if not isinstance(value, Mapping):
                inner = next(iter(type_hints(known[key])))
                raise UserError(
                    f"{where}: {prefix}{key} = {value!r}: expected a section with keys of its own, such as "
                    f"{prefix}{key}.{inner}"
                )
            check_keys(value, where, known[key], f"{prefix}{key}.")


def _suggest_key(key: str, kind: type, inner: str) -> str:
    """Return a hint for an unknown key of a dataclass: the sections which have it, or the nearest known key.

    ``inner`` is what follows the key, such as ``.symbols`` of ``train.symbols``.
    """
    sections = []
    for item in fields(kind):
        section = item.metadata.get("holds", type_hints(kind)[item.name])
        if is_dataclass(section) and key in type_hints(section):  # type: ignore[arg-type]
            sections.append(f"{item.name}.{key}{inner}")
    if sections:
        return f"did you mean {' or '.join(sections)}?"
    return suggest(key, type_hints(kind))


def from_dict(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a checked dataclass from nested dictionaries.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range; the message names its
            key.
    """
    check_keys(values, "configuration", kind, prefix)
    hints = type_hints(kind)
    converted = {}
    for item in fields(kind):  # type: ignore[arg-type]
        expected = item.metadata.get("expected")
        if item.name in values:
            converted[item.name] = convert(
                values[item.name], hints[item.name], f"{prefix}{item.name}", expected
            )
        elif item.default is MISSING and item.default_factory is MISSING:
            expected = expected or in_words(hints[item.name])
            raise UserError(f"{prefix}{item.name} is missing: expected {expected}")
    return kind(**converted)


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
        if rest in SECTION_TEXTS:
            return str
        return Any
    inner = next(filter(is_dataclass, (hint, *get_args(hint))), None)
    metadata: Mapping[str, Any] = next(
        (item.metadata for item in fields(kind) if item.name == first), {}
    )
    if "hint" in metadata:
        return metadata["hint"](rest)
    if "each" in metadata:
        inner = metadata["each"]
        if inner is Self:
            inner = kind
        _, dot, rest = rest.partition(".")
        if not dot:
            return inner
    inner = metadata.get("holds", inner)
    if is_dataclass(inner) and rest:
        return hint_at(inner, rest)  # type: ignore[arg-type]
    return Any


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
    # names which only type checkers import
    except (NameError, AttributeError, SyntaxError, TypeError):
        return inspect.signature(target)


def convert(value: Any, hint: Any, key: str, expected: str | None = None) -> Any:
    """Convert a value to the type of an annotation: 1e6 to a whole number, 1 to a float, ``true`` to ``on``.

    Args:
        value: value of YAML, JSON or the command line.
        hint: annotation.
        key: key of the value, for the message.
        expected: range of the value in words, for the message; None for the annotation in words.

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
    if (
        get_origin(hint) is list
        and is_dataclass(part := get_args(hint)[0])
        and isinstance(value, list | tuple)
    ):
        return [convert(each, part, f"{key}[{number}]") for number, each in enumerate(value)]
    if hint == Plain and isinstance(value, Mapping):
        hint = Section
    if get_origin(hint) is dict and isinstance(value, Mapping) and _has_text_keys(value):
        return {
            name: convert(each, get_args(hint)[1], f"{key}.{name}") for name, each in value.items()
        }
    try:
        return _read(value, hint)
    except (ValueError, OverflowError):
        words = expected or in_words(hint)
        if hint is float and isinstance(value, float) and not math.isfinite(value):
            words = "a finite number"
        elif hint is int and isinstance(value, int | float) and abs(value) >= 2**63:
            words = "a whole number below 2**63"
        raise UserError(f"{key} = {value!r}: expected {words}") from None


def _read(value: Any, hint: Any) -> Any:
    """Convert a value, or raise a ValueError without a message."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if hint == Plain:
        return _plain(value)
    if hint == Named:
        return _named(value)
    if hint == Figure:
        _require(isinstance(value, int | float) and not isinstance(value, bool))
        return float(value)
    if hint == Limit or kind in (int, float):
        return _number(value, hint)
    if kind in (Union, UnionType):
        return _union(
            value, [part for part in parts if not is_dataclass(part) or type(value) is part]
        )
    if kind is Literal:
        return _choice(value, parts)
    if kind in (list, tuple, Sequence):
        if kind is Sequence:
            kind = list
        return _list(value, parts, kind)
    if kind is Path:
        _require(isinstance(value, str | Path))
        return Path(value)
    if kind in (bool, str, NoneType):
        _require(isinstance(value, kind))
    if kind in (dict, Mapping):
        _require(isinstance(value, kind) and _has_text_keys(value))
    return value


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _has_text_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in value)


def _number(value: Any, hint: Any) -> int | float:
    number = value
    if isinstance(value, str) and hint is not int:  # Sacred reads inf as text
        number = float(value)
    _require(isinstance(number, int | float) and not isinstance(number, bool))
    if hint is int:
        _require(number == int(number) and abs(number) < 2**63)
        return int(number)
    _require(math.isfinite(number) or (hint == Limit and number == number))
    return float(number)


def _union(value: Any, parts: Sequence[Any]) -> Any:
    # its own type first
    for part in sorted(parts, key=lambda part: type(value) is not (get_origin(part) or part)):
        with suppress(ValueError, OverflowError):
            return _read(value, part)
    raise ValueError


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    if isinstance(value, bool) and value not in choices:
        value = {True: "on", False: "off"}[value]
    _require(any(type(value) is type(choice) and value == choice for choice in choices))
    return value


def _list(value: Any, parts: Sequence[Any], kind: type) -> Any:
    _require(isinstance(value, list | tuple))
    hints = [part for part in parts if part is not Ellipsis] or [Any]
    if kind is list or Ellipsis in parts or not parts:
        hints = hints * len(value)
    return kind(_read(each, hint) for each, hint in zip(value, hints, strict=True))


def _named(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    _require(isinstance(value, Mapping) and isinstance(value.get("name"), str))
    return dict(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and _has_text_keys(value):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    _require(value is None or isinstance(value, bool | int | float | str))
    return value


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
        if len(parts) == 1 and parts[0] in LISTS:
            return LISTS[parts[0]]
        return ", ".join([*map(in_words, parts), "in a list such as [a, b]"])
    if kind in (dict, Mapping):
        return "a section whose keys are texts"
    return str(hint)


def _either(words: Iterable[str]) -> str:
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} or {last}"
