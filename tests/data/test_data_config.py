"""Data settings are checked when they are made."""

import subprocess
import sys

import pytest

from tokenv.data.config import DataConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source", ""),
        ("source", "hub:"),
        ("hub_split", ""),
        ("column", ""),
        ("cut", "line"),
        ("seq_len", 1),
        ("seq_len", "512"),
        ("seq_len", True),
        ("validation", 0.0),
        ("validation", 1),
        ("validation", "0.1"),
        ("validation", float("nan")),
        ("validation_source", "hub:owner/name"),
        ("seed", -1),
        ("shuffle_buffer", 0),
        ("lexicon_size", 1),
        ("words_documents", 0),
    ],
)
def test_invalid_values_raise_a_message_with_the_expected_values(name, value):
    with pytest.raises(ValueError, match=rf"data\.{name} (=|is) .*expected ") as caught:
        DataConfig(**{name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_defaults_are_valid():
    assert DataConfig().source == "python"


def test_importing_the_settings_loads_nothing_heavy():
    code = "import sys, tokenv.data.config; print(sorted({'torch', 'datasets', 'numpy'} & set(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == "[]"
