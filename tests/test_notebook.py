"""The notebook in docs/ runs from its first cell to its last, and what is stored in it is of that kind."""

import copy
from pathlib import Path

import notebook
import pytest


def kinds(book: dict[str, object]) -> list[list[list[str]]]:
    """Of every cell's outputs: what there is."""
    return [
        [sorted(output.get("data", {"stream": 0})) for output in cell.get("outputs", [])]
        for cell in book["cells"]
    ]


def test_every_cell_runs_and_its_answer_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = notebook.read()
    again = copy.deepcopy(stored)
    notebook.run(again)
    assert kinds(again) == kinds(stored), (
        "cells have changed: python tests/support/notebook.py stores their answers"
    )
    assert sum(map(bool, kinds(again))) >= 6


def test_a_cell_that_fails_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        notebook.run({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
