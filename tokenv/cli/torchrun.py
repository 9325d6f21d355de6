"""``tokenv train`` in several processes: all train, the first one writes and speaks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tokenv.cli.options import TrainOptions
from tokenv.cli.sacred import Command
from tokenv.compare.config import flatten
from tokenv.config.registry import plugins
from tokenv.core.distributed import LostRankError
from tokenv.core.errors import RunFailedError
from tokenv.storage import checkpoints
from tokenv.training.process_group import Ranks, RanksError
from tokenv.training.trainer import train


def run_distributed(command: Command, arguments: list[str], ranks: Ranks) -> Any:
    """Run a command that trains as one of several ranks, of which the first keeps the run.

    Args:
        command: trains.
        arguments: what follows its name on the command line; the same in all processes.
        ranks: the processes.

    Returns:
        What it found, on the first rank; None elsewhere.

    Raises:
        SystemExit: on other ranks than the first, where that says why.
    """

    def resolve(names: list[str], updates: dict[str, Any]) -> TrainOptions:
        options: TrainOptions = ranks.run_on_all_ranks(lambda: command.resolve(names, updates))
        ranks.assert_consistent(_facts(options))
        return options

    def instead(options: TrainOptions) -> Callable[[], Any] | None:
        other = command.instead(options)
        if ranks.is_first:
            return other
        return partial(_follow, options, ranks) if other is None else lambda: None

    ours = replace(command, resolve=resolve, instead=instead)
    with _one_voice(ranks):
        return ours.run(arguments)


def _follow(options: TrainOptions, ranks: Ranks) -> None:
    """Train, and leave it to the first rank to write down what comes out."""
    resume = None if options.resume is None else checkpoints.load(Path(options.resume))
    train(options.config, Path(), lambda *_: None, resume=resume, ranks=ranks)


def _facts(options: TrainOptions) -> dict[str, Any]:
    """What all ranks must have in common, by name."""
    values = options.config.as_dict()
    ours = [find_spec(room) for room in ("tokenv", "tokenv.agents", "tokenv.estimators")]
    files = [path for spec in ours if spec and spec.origin for path in sorted(Path(spec.origin).parent.rglob("*.py"))]
    files += [path for plugin in plugins(values) for path in plugin.files]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return flatten(values) | {
        "resume": None if options.resume is None else Path(options.resume).name,
        "the digest of the code": code,
        "torch": torch.__version__,
    }


@contextmanager
def _one_voice(ranks: Ranks) -> Iterator[None]:
    """What all ranks raise alike is told by the first; what another alone raises is told there, too.

    The others then end with status 0, for torchrun ends all as soon as one fails, and the first may still be writing.
    """
    try:
        yield
    except LostRankError:
        if ranks.is_first:
            raise
        raise SystemExit(1) from None
    except (KeyboardInterrupt, RunFailedError, RanksError):
        if ranks.is_first:
            raise
        raise SystemExit(0) from None
