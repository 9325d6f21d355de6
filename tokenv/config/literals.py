"""Values in YAML files and on a command line: numbers, texts, true, false, null, lists and sections."""

import ast
import copy
import functools
import io
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import YAMLError

from tokenv.core.conversion import hint_at
from tokenv.core.errors import UserError

# more is a mistake or an attack, and would exhaust stack or memory
MAX_LEVELS, MAX_VALUES = 32, 100_000
CONFIGURATION_SUFFIXES = (".yaml", ".yml", ".json")
# but those which stand for typed bytes that are not UTF-8 (PEP 383)
LONE_SURROGATE = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
MAX_INT = 2**1023  # larger whole numbers cannot become floats


def check_plain(value: Any, where: str) -> Any:
    """Return a value unchanged if a configuration may contain it.

    Args:
        value: result of a parser, whose keys may be of any type.
        where: file or key, for the message.

    Raises:
        UserError: it contains anything else, is nested too deeply or is too large.
    """
    level = [value]
    count = 0
    for _ in range(MAX_LEVELS):
        below: list[Any] = []
        for each in level:
            _check_one(each, where)
            if isinstance(each, Mapping):
                below += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple):
                below += each
            if count + len(below) > MAX_VALUES:
                raise UserError(
                    f"{where} holds more than {MAX_VALUES:,} values: expected a configuration"
                )
        if not below:
            return value
        count += len(below)
        level = below
    raise UserError(
        f"{where} is nested more than {MAX_LEVELS} levels deep: expected a configuration"
    )


def _check_one(value: Any, where: str) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INT:
        raise UserError(
            f"{where}: a number of {value.bit_length():,} bits: expected one below 1e308"
        )
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{where} = {value[:80]!r}: expected text without NUL characters")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise UserError(
            f"{where} = {value[:80]!a}: expected Unicode text; other bytes can come from a file"
        )
    if not (value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping)):
        raise UserError(
            f"{where} = {value!r}: expected a number, text, true or false, null, or a list or section of these"
        )


class _Constructor(SafeConstructor):
    """Constructor which reads dates as texts."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a text in YAML 1.2: 1e1 and 1_000 are numbers; on, yes and 1:30 are text.

    Args:
        text: the text.
        where: file or key, for the message.

    Raises:
        UserError: it is not valid YAML, gives a key twice, or contains what a configuration may not.
    """
    return copy.deepcopy(_parse_yaml(text, where))


@functools.lru_cache(maxsize=64)  # every run of a comparison begins with the same files
def _parse_yaml(text: str, where: str) -> Any:
    stream = io.StringIO(text)
    stream.name = where  # which messages give
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        value = reader.load(stream)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        raise UserError(f"{where}, line {line}: {error.problem}: drop one") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: expected a configuration") from None
    # all but the first are raised for a wrong !!tag
    except (YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {error}") from error
    return check_plain(value, where)


def read_words(words: Sequence[str], kind: type | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read the words of a command line as nested values, and names of configurations or files.

    ``a.b=VALUE`` sets key b of section a. If that key takes text, VALUE is taken literally; if it takes a list of
    texts, its elements are. Otherwise VALUE is read as a Python literal, as a list or section of YAML such as
    ``[{name: shrink}]``, or as text if it is neither; ``true``, ``false`` and ``null`` are as in YAML. A word which
    is the path of a configuration file is one, also if a folder's name holds ``=``.

    Args:
        words: words of the command line.
        kind: dataclass whose annotations say which keys take text; None reads every value as a literal.

    Returns:
        Nested values, and the other words.

    Raises:
        UserError: a configuration cannot contain a value, or one word sets a key and another word a key within it.
    """
    values: dict[str, Any] = {}
    names = []
    for word in words:
        name, equals, text = word.partition("=")
        key = name.strip()
        if equals and not _is_configuration_file(word):
            hint = Any if kind is None else hint_at(kind, key)
            _set(values, key, check_plain(_read(text, hint, key), key))
        elif word.strip():
            names.append(word.strip())
    return values, names


def _is_configuration_file(word: str) -> bool:
    path = Path(word.strip())
    with suppress(OSError):  # the word is too long for a path
        return path.suffix in CONFIGURATION_SUFFIXES and path.is_file()
    return False


def _read(text: str, hint: Any, key: str) -> Any:
    accepted = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not TEXT_LISTS.isdisjoint(accepted):
        return _texts(text)
    if {str, Path}.isdisjoint(accepted):
        return _literal(text.strip(), key)
    return None if text == "null" and NoneType in accepted else text


TEXT_LISTS = {list[str], tuple[str, ...]}


def _texts(text: str) -> list[str] | str:
    """Read ``[a, 'b, c']`` as two texts; a text without brackets, or with an open quotation, is one text."""
    inside = text.strip()
    if not (inside.startswith("[") and inside.endswith("]")):
        return text
    lexer = shlex.shlex(inside[1:-1], posix=True)
    lexer.whitespace = ","
    lexer.escape = ""
    lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        return [each.strip() for each in lexer]
    except ValueError:
        return text


def _literal(text: str, key: str) -> Any:
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    try:
        # of a backslash, which may be of a path
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return ast.literal_eval(text)
    except (RecursionError, MemoryError):
        raise UserError(
            f"{key} is nested too deeply: expected a plain value, a list or a section"
        ) from None
    except (ValueError, SyntaxError, TypeError):
        if text.startswith(("[", "{")):
            with suppress(UserError):  # then it is text, of which the message about its key tells
                return parse_yaml(text, key)
        return text


YAML_WORDS = {"true": True, "false": False, "null": None}


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    if len(sections) > MAX_LEVELS or not all((*sections, last)):
        raise UserError(
            f"{key[:80]!r} is not a key: expected words with dots between, such as train.symbols=1e6, without blanks"
        )
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"{key} is given, and {section} = {values!r}, too: drop one of them")
    values[last] = value
