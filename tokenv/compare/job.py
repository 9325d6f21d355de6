"""One run of a comparison, in a process of its own: train it, or go on with it, then measure it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import yaml

from tokenv.cli.main import run_command
from tokenv.compare.assess import assess
from tokenv.compare.store import find_run
from tokenv.config.files import resolve


def work(config_file: str, store: str, passages: str, bpe_vocabulary: str) -> None:
    """Have a finished run of a configuration in the store, and its assessment beside it.

    Args:
        config_file: YAML of the complete run.
        store: folder of Sacred runs.
        passages: see ``assess``.
        bpe_vocabulary: see ``assess``.
    """
    config = resolve([], yaml.safe_load(Path(config_file).read_text()))
    run = find_run(config, Path(store))
    if run is None or not run.finished:
        run_command("train", ["with", config_file if run is None else f"resume={run.folder}", "-F", store])
        run = find_run(config, Path(store))
        assert run is not None
    assess(run.folder, passages=int(passages), bpe_vocabulary=int(bpe_vocabulary))


if __name__ == "__main__":
    # A shell's background job ignores Ctrl-C, and so do its children; the comparison stops us by that very signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work(*sys.argv[1:])
