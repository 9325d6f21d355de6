"""What YAML files and words of a command line may hold: numbers, texts, true, false, null, lists and sections."""

from __future__ import annotations

import ast
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from tokenv.config.conversion import hint_at
from tokenv.core.errors import UserError

DEEPEST, MOST = 32, 100_000  # levels and values: more is a mistake or an attack, and would exhaust stack or memory
LARGEST = 2**1023  # whole numbers beyond it are no float any more


def check_plain(value: Any, where: str) -> Any:
    """A value as it is, if it is of what configurations are made of.

    Args:
        value: as a parser gave it; its keys may still be anything that can be a key.
        where: file or key, for the message.

    Raises:
        UserError: it holds anything else, is nested too deeply or is too large.
    """
    level, seen = [value], 0
    for _ in range(DEEPEST):
        below: list[Any] = []
        for each in level:
            _check_one(each, where)
            if isinstance(each, Mapping):
                below += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple):
                below += each
            if seen + len(below) > MOST:
                raise UserError(f"{where} holds more than {MOST:,} values: expected a configuration")
        if not below:
            return value
        seen += len(below)
        level = below
    raise UserError(f"{where} is nested more than {DEEPEST} levels deep: expected a configuration")


def _check_one(value: Any, where: str) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        raise UserError(f"{where}: a number of {value.bit_length():,} bits: expected one below 1e308")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{where} = {value[:80]!r}: expected text without NUL characters")
    if isinstance(value, str) and not _is_text(value):
        raise UserError(f"{where} = {value[:80]!a}: expected Unicode text; other bytes can come from a file")
    if not (value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping)):
        raise UserError(
            f"{where} = {value!r}: expected a number, text, true or false, null, or a list or section of these"
        )


def _is_text(value: str) -> bool:
    """Whether it has bytes: Unicode does, and so have bytes that were typed and are no UTF-8 (PEP 383)."""
    try:
        value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def read_words(words: Sequence[str], kind: type | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read the words of a command line as nested values, and the names and files among them.

    ``a.b=VALUE`` sets key b of section a. Where that key takes text, VALUE is taken literally; where it takes a list of
    texts, so are its elements. Elsewhere VALUE is read as a Python literal, and is text if it is none; ``true``,
    ``false`` and ``null`` are as in YAML.

    Args:
        words: as typed.
        kind: dataclass whose annotations say which keys take text; None reads every value as a literal.

    Raises:
        UserError: a value is none of a configuration's, or a word goes into what another word has made a value.
    """
    values: dict[str, Any] = {}
    names = []
    for word in words:
        name, equals, text = word.partition("=")
        key = name.strip()
        if equals:
            hint = Any if kind is None else hint_at(kind, key)
            _set(values, key, check_plain(_read(text, hint, key), key))
        elif key:
            names.append(key)
    return values, names


def _read(text: str, hint: Any, key: str) -> Any:
    accepted = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not TEXT_LISTS.isdisjoint(accepted):
        return _texts(text)
    if {str, Path}.isdisjoint(accepted):
        return _literal(text.strip(), key)
    return None if text == "null" and NoneType in accepted else text


TEXT_LISTS = {list[str], tuple[str, ...]}


def _texts(text: str) -> list[str] | str:
    """Read ``[a, 'b, c']`` as two texts; what has no brackets, or a quotation without an end, is one text."""
    inside = text.strip()
    if not (inside.startswith("[") and inside.endswith("]")):
        return text
    lexer = shlex.shlex(inside[1:-1], posix=True)
    lexer.whitespace, lexer.escape, lexer.commenters, lexer.whitespace_split = ",", "", "", True
    try:
        return [each.strip() for each in lexer]
    except ValueError:
        return text


def _literal(text: str, key: str) -> Any:
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a backslash, of a path perhaps
            return ast.literal_eval(text)
    except (RecursionError, MemoryError):
        raise UserError(f"{key} is nested too deeply: expected a plain value, a list or a section") from None
    except (ValueError, SyntaxError, TypeError):
        return text


YAML_WORDS = {"true": True, "false": False, "null": None}


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    if len(sections) > DEEPEST or not all((*sections, last)):
        raise UserError(f"{key[:80]!r} is no key: expected words with dots between, such as train.symbols=1e6")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"{key} is given, and {section} = {values!r}, too: drop one of them")
    values[last] = value
