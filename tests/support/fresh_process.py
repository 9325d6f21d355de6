"""Run commands in processes forked from one that has imported tokenv, which takes longer than most commands."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from blank_pictures import blank_png

from tokenv.cli.main import main
from tokenv.plotting import figures

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tokenv.cli.train", "tokenv.compare.report.page"])


def command(
    words: Sequence[str], folder: Path, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command line of tokenv in ``folder``, with ``path`` before the folders Python imports from."""
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs, name) for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=run, args=(list(words), folder, path, files))
        process.start()
        process.join()
        stdout, stderr = (file.read_text() for file in files)
    return subprocess.CompletedProcess(list(words), process.exitcode, stdout, stderr)


def run(words: list[str], folder: Path, path: Sequence[Path], files: list[Path]) -> None:
    """Run a command line in this process, the child, without pictures; append its stdout and stderr to two files."""
    torch.set_num_threads(1)
    figures.png = blank_png
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(folder)
    sys.path[:0] = [str(each) for each in path]
    main(words)
