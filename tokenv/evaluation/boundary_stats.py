"""Compute what a policy draws in held-out text, at one checkpoint and over training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.evaluation.evaluator import concat_columns, held_out_rollouts
from tokenv.evaluation.loaded_run import LoadedRun, load_run
from tokenv.storage import checkpoints

CLASSES = ("space", "line break", "letter", "digit", "punctuation", "control", "UTF-8 lead", "UTF-8 continuation")
CONTEXT = 3  # bytes of a context, the one that may end a token last
LEAST = 20  # times that a context must occur to be told of


@dataclass(frozen=True)
class BoundaryStats:
    """Figures of many sequences; the first byte of each, after which everybody draws a boundary, is left out.

    Attributes:
        classes: class of byte to its share of all bytes, and the boundaries per byte of it.
        tokens: the most frequent tokens and their number.
        contexts: bytes after whose last one boundaries are most probable: mean probability and number.
    """

    classes: dict[str, tuple[float, float]]
    tokens: list[tuple[bytes, int]]
    contexts: list[tuple[bytes, float, int]]


def compute_boundary_stats(symbol_BT: Tensor, action_BT: Tensor, prob_BT: Tensor, most: int = 20) -> BoundaryStats:
    """Count.

    Args:
        symbol_BT: bytes.
        action_BT: 1 where a token ends.
        prob_BT: of a boundary after each byte.
        most: tokens and contexts to name.
    """
    return BoundaryStats(
        classes=_by_class(symbol_BT[:, 1:].flatten(), action_BT[:, 1:].flatten()),
        tokens=_tokens(symbol_BT, action_BT).most_common(most),
        contexts=_contexts(symbol_BT, prob_BT, most),
    )


def class_of() -> Tensor:
    """Index into ``CLASSES`` of every byte: [256]."""
    found = []
    for byte in range(256):
        character = chr(byte)
        if byte >= 0x80:
            name = "UTF-8 lead" if byte >= 0xC0 else "UTF-8 continuation"
        elif character == "\n":
            name = "line break"
        elif character in " \t":
            name = "space"
        elif character.isalnum():
            name = "digit" if character.isdigit() else "letter"
        else:
            name = "punctuation" if character.isprintable() else "control"
        found.append(CLASSES.index(name))
    return torch.tensor(found)


def _by_class(symbol_N: Tensor, action_N: Tensor) -> dict[str, tuple[float, float]]:
    class_N = class_of()[symbol_N.long()]
    count = torch.bincount(class_N, minlength=len(CLASSES)).double()
    drawn = torch.bincount(class_N, action_N.double(), minlength=len(CLASSES))
    return {
        name: ((count[i] / count.sum()).item(), (drawn[i] / count[i]).item())
        for i, name in enumerate(CLASSES)
        if count[i] > 0
    }


def _tokens(symbol_BT: Tensor, action_BT: Tensor) -> Counter[bytes]:
    """Whole tokens: neither the first byte's nor what follows a sequence's last boundary."""
    found: Counter[bytes] = Counter()
    for symbol_T, action_T in zip(symbol_BT.tolist(), action_BT.tolist(), strict=True):
        start = 1
        for i, ends in enumerate(action_T):
            if ends and i > 0:
                found[bytes(symbol_T[start : i + 1])] += 1
                start = i + 1
    return found


def _contexts(symbol_BT: Tensor, prob_BT: Tensor, most: int) -> list[tuple[bytes, float, int]]:
    if symbol_BT.shape[1] < CONTEXT:
        return []
    windows = symbol_BT.long().unfold(1, CONTEXT, 1).flatten(0, 1)
    prob_N = prob_BT[:, CONTEXT - 1 :].flatten().double()
    kind_KC, kind_N, count_K = windows.unique(dim=0, return_inverse=True, return_counts=True)
    mean_K = torch.zeros(len(kind_KC), dtype=torch.float64).index_add_(0, kind_N, prob_N) / count_K
    mean_K = mean_K.where(count_K >= LEAST, -1.0)
    order = mean_K.argsort(descending=True, stable=True)[:most]
    return [
        (bytes(kind_KC[k].tolist()), mean_K[k].item(), int(count_K[k])) for k in order.tolist() if count_K[k] >= LEAST
    ]


MOST = 8  # checkpoints that are looked at, the first and the last among them


def boundary_stats_of_run(trained: LoadedRun, batch: SequenceBatch) -> BoundaryStats:
    """Habits of a model in held-out sequences of text."""
    drawn = held_out_rollouts(trained.parts, batch, batch_size=trained.config.validation.batch_size)
    of = concat_columns(
        [{"action": td[keys.ACTION].cpu(), "prob": td[keys.BOUNDARY_PROB].float().cpu()} for td in drawn]
    )
    return compute_boundary_stats(batch.symbol_BN[:, :-1], of["action"], of["prob"])


def boundary_stats_over_training(trained: LoadedRun, batch: SequenceBatch) -> dict[int, BoundaryStats]:
    """Training symbols to the habits that a run then had, as far as its checkpoints were kept and are sound.

    Args:
        trained: the run's last model.
        batch: held-out sequences of text, the same for all.
    """
    kept = checkpoints.list_complete(trained.path.parent)
    last = len(kept) - 1
    some = sorted({round(i * last / (MOST - 1)) for i in range(MOST)}) if last >= MOST else range(last + 1)
    found = {}
    for path in (kept[i] for i in some):
        try:
            earlier = trained if path == trained.path else load_run(str(path), fall_back=False)
        except UserError:  # damaged
            continue
        found[earlier.state.symbols] = boundary_stats_of_run(earlier, batch)
    return found
