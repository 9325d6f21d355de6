"""Compute which boundaries a policy draws in held-out data: statistics of text, and excerpts of series."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.evaluation.boundary_metrics import rates_by_class
from tokenv.evaluation.evaluator import EvalOptions, evaluate_sequences
from tokenv.evaluation.loaded_run import LoadedRun, load_run
from tokenv.lm.codecs.base import ByteCodec

CLASSES = ByteCodec.symbol_classes
CONTEXT = 3  # bytes of a context; the last one may end a token
MIN_COUNT = 20  # occurrences below which a context is left out
MAX_CHECKPOINTS = 8  # checkpoints to compare over training, including the first and the last


@dataclass(frozen=True)
class BoundaryStats:
    """Statistics of many sequences without the first byte of each, after which there is always a boundary.

    Attributes:
        classes: share of all bytes, and boundaries per byte, of each class of bytes.
        tokens: most frequent tokens with their number.
        contexts: bytes after which boundaries are most probable, with the mean probability and the number.
    """

    classes: dict[str, tuple[float, float]]
    tokens: list[tuple[bytes, int]]
    contexts: list[tuple[bytes, float, int]]


def compute_boundary_stats(
    symbol_BT: Tensor, action_BT: Tensor, prob_BT: Tensor, most: int = 20
) -> BoundaryStats:
    """Compute statistics of boundaries.

    Args:
        symbol_BT: bytes.
        action_BT: drawn boundaries, 1 where a token ends.
        prob_BT: probability of a boundary after each byte.
        most: maximum number of tokens and of contexts.
    """
    return BoundaryStats(
        classes=rates_by_class(ByteCodec, symbol_BT, action_BT),
        tokens=_tokens(symbol_BT, action_BT).most_common(most),
        contexts=_contexts(symbol_BT, prob_BT, most),
    )


def _tokens(symbol_BT: Tensor, action_BT: Tensor) -> Counter[bytes]:
    """Count complete tokens, without the first byte and what follows the last boundary of a sequence."""
    counts: Counter[bytes] = Counter()
    for symbol_T, action_T in zip(symbol_BT.tolist(), action_BT.tolist(), strict=True):
        start = 1
        for i, ends in enumerate(action_T):
            if ends and i > 0:
                counts[bytes(symbol_T[start : i + 1])] += 1
                start = i + 1
    return counts


def _contexts(symbol_BT: Tensor, prob_BT: Tensor, most: int) -> list[tuple[bytes, float, int]]:
    if symbol_BT.shape[1] < CONTEXT:
        return []
    windows = symbol_BT.long().unfold(1, CONTEXT, 1).flatten(0, 1)
    prob_N = prob_BT[:, CONTEXT - 1 :].flatten().double()
    kind_KC, kind_N, count_K = windows.unique(dim=0, return_inverse=True, return_counts=True)
    mean_K = torch.zeros(len(kind_KC), dtype=torch.float64).index_add_(0, kind_N, prob_N) / count_K
    mean_K = mean_K.where(count_K >= MIN_COUNT, -1.0)
    order = mean_K.argsort(descending=True, stable=True)[:most]
    frequent = [k for k in order.tolist() if count_K[k] >= MIN_COUNT]
    return [(bytes(kind_KC[k].tolist()), mean_K[k].item(), int(count_K[k])) for k in frequent]


def boundary_stats_of_run(trained: LoadedRun, batch: SequenceBatch) -> BoundaryStats:
    """Compute the statistics of a model's boundaries in held-out sequences of text."""
    options = EvalOptions(trained.config.validation.batch_size)
    scores = evaluate_sequences(trained.components, batch, options)
    return compute_boundary_stats(
        batch.symbol_BN[:, :-1], scores.action_BT, scores.boundary_prob_BT
    )


def boundary_stats_over_training(
    trained: LoadedRun, batch: SequenceBatch
) -> dict[int, BoundaryStats]:
    """Compute the statistics at the intact checkpoints of a run, or at ``MAX_CHECKPOINTS`` of them.

    Args:
        trained: last model of the run.
        batch: held-out sequences of text, the same for all checkpoints.

    Returns:
        Statistics by number of training symbols.
    """
    paths = checkpoints.list_complete(trained.path.parent)
    last = len(paths) - 1
    intervals = MAX_CHECKPOINTS - 1
    if last > intervals:
        paths = [paths[round(i * last / intervals)] for i in range(MAX_CHECKPOINTS)]
    stats = {}
    for path in paths:
        try:
            earlier = trained if path == trained.path else load_run(str(path), fall_back=False)
        except UserError:  # damaged
            continue
        stats[earlier.state.symbols] = boundary_stats_of_run(earlier, batch)
    return stats
