"""Conversion of values to the types of annotations."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenv.core.conversion import Limit, Plain, Section, convert, from_dict, parameters
from tokenv.core.errors import UserError

HINTS = [
    bool,
    int,
    float,
    str,
    Path,
    None,
    int | None,
    Literal["auto", "on", "off"],
    Limit,
    Plain,
    Section,
]
HINTS += [
    list[int],
    tuple[str, ...],
    tuple[int, str],
    list,
    dict[str, int],
    dict,
    str | float,
    list[str] | str,
]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (True, bool, True),
        (3, int, 3),
        (1e6, int, 1_000_000),
        (1, float, 1.0),
        ("3e-1", float, 0.3),
        ("inf", Limit, math.inf),
        ("3", str, "3"),
        ("a/b", Path, Path("a/b")),
        (None, int | None, None),
        (None, Optional[float], None),  # noqa: UP045
        (2.0, int | None, 2),
        ("3", str | float, "3"),
        (3, str | float, 3.0),
        (True, Literal["auto", "on", "off"], "on"),
        (False, Literal["auto", "on", "off"], "off"),
        (2, Literal[1, 2], 2),
        ((1, 2.0), list[int], [1, 2]),
        ([1, 2.0], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1], Sequence[float], [1.0]),
        ({"a": 1e1}, dict[str, int], {"a": 10}),
        ({"a": {"b": (1, None)}}, Section, {"a": {"b": [1, None]}}),
    ],
)
def test_valid_values_are_converted(value: Any, hint: Any, expected: Any) -> None:
    converted = convert(value, hint, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (1, bool, "key = 1: expected true or false"),
        ("yes", bool, "key = 'yes': expected true or false"),
        (True, int, "key = True: expected a whole number"),
        ("64", int, "key = '64': expected a whole number"),
        (math.inf, int, "key = inf: expected a whole number"),
        (math.nan, float, "key = nan: expected a finite number"),
        (10**400, float, "expected a number"),
        ("1:30", float, "key = '1:30': expected a number"),
        (3, str, "key = 3: expected text"),
        ("", None | int, "key = '': expected null or a whole number"),
        (True, int | None, "key = True: expected a whole number or null"),
        (True, Literal["a", "b", "c"], "key = True: expected a, b or c"),
        (True, Literal[1, 2], "key = True: expected 1 or 2"),
        ("ab", list[str], "key = 'ab': expected texts, in a list such as [a, b]"),
        ([1, "a"], list[int], "key = [1, 'a']: expected whole numbers, in a list"),
        ([1], tuple[int, str], "key = [1]: expected a whole number, text, in a list"),
        ({"a": "b"}, dict[str, int], "key.a = 'b': expected a whole number"),
        ({1: 1}, dict[str, int], "key = {1: 1}: expected a section whose keys are texts"),
    ],
)
def test_invalid_values_are_rejected(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        convert(value, hint, "key")
    assert message in str(raised.value)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.complex_numbers()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@given(ANYTHING, st.sampled_from(HINTS))
def test_any_value_is_converted_or_rejected_with_one_message(value: Any, hint: Any) -> None:
    with suppress(UserError):  # and nothing else
        converted = convert(value, hint, "key")
        # and what is converted stays as it is
        assert repr(convert(converted, hint, "key")) == repr(converted)


@pytest.mark.parametrize("hint", [Any, object, Callable[[int], int], "a name unknown", bytes])
def test_values_of_unknown_annotations_are_not_changed(hint: Any) -> None:
    thing = object()
    assert convert(thing, hint, "key") is thing


@dataclass
class Inner:
    size: int = 1


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)


def test_dataclasses_are_built_from_sections() -> None:
    assert from_dict(Outer, {"inner": {"size": 2.0}}) == Outer(Inner(2))
    with pytest.raises(UserError, match=r"unknown key inner\.sise: did you mean 'size'"):
        from_dict(Outer, {"inner": {"sise": 2}})
    with pytest.raises(UserError, match=r"inner = 3: expected a section"):
        from_dict(Outer, {"inner": 3})
    with pytest.raises(UserError, match=r"inner\.size = 'big': expected a whole number"):
        from_dict(Outer, {"inner": {"size": "big"}})


class Anything:
    def __new__(cls, *args: Any, **kwargs: Any) -> "Anything":
        return super().__new__(cls)


class Rated(Anything):
    def __init__(self, rate: float, bias: bool = True) -> None:
        self.rate = rate
        self.bias = bias


def test_parameters_of_a_class_are_those_of_its_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = inspect.signature

    def signature_of_python_3_11_2(target: Callable[..., Any], **options: Any) -> inspect.Signature:
        if target is Rated:
            return newest(Anything.__new__, **options)
        return newest(target, **options)

    monkeypatch.setattr(inspect, "signature", signature_of_python_3_11_2)
    accepted = parameters(Rated)
    assert list(accepted) == ["rate", "bias"]
    assert accepted["rate"].annotation is float
    assert accepted["bias"].default is True
    assert list(parameters(lambda width, rate: None)) == ["width", "rate"]
