"""Ranges of options: what they accept, and the one form of their message."""

from typing import Any

import numpy as np
import pytest

from tokenv.core.errors import COUNT, COUNT_OR_NULL, DECAY, UserError, check_value


@pytest.mark.parametrize("value", [1, 3, np.int64(3)])
def test_whole_numbers_of_any_library_are_counts(value: Any) -> None:
    check_value("samples", value, COUNT)
    check_value("samples", value, COUNT_OR_NULL)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, np.float64(2.0)])
def test_other_values_are_none(value: Any) -> None:
    with pytest.raises(UserError) as raised:
        check_value("samples", value, COUNT)
    assert str(raised.value) == f"samples = {value!r}: expected a whole number of at least 1"


def test_only_optional_counts_may_be_missing() -> None:
    check_value("num_samples", None, COUNT_OR_NULL)
    with pytest.raises(UserError, match=r"decay = 1\.0: expected a number in \[0, 1\)"):
        check_value("decay", 1.0, DECAY)
