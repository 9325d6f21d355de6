"""Run ``tests/accelerator`` in a process of its own, because torch cannot take back the backend which they register."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("accelerator")


@pytest.mark.slow  # `.ci/run` runs the first
@pytest.mark.parametrize("marks", ["not slow", "slow"])
def test_everything_runs_on_a_pretended_accelerator(marks: str) -> None:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        str(FOLDER),
    ]
    environment = {**os.environ, "TOKENV_PRETENDED_ACCELERATOR": "1"}
    done = subprocess.run(
        words, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
