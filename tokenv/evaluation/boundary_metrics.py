"""Compute metrics of the boundaries which a policy draws in held-out sequences, and notice when they become worse."""

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent
from tokenv.evaluation.run_state import History
from tokenv.lm.codecs.base import Codec
from tokenv.plotting.console import warn

ENRICHMENT = "train/boundary_enrichment"
COLLAPSED = 0.5  # share of the enrichment at the end of an imitation below which it has collapsed
WINDOW = 0.25  # share of the imitation over whose updates the enrichment is averaged


def draw_references(
    references: Mapping[str, BoundaryAgent], td: TensorDictBase
) -> dict[str, Tensor]:
    """Draw the boundaries of deterministic agents in a rollout's sequences: [B, T] each, by name."""
    noise_BT = torch.zeros(td.shape, device=td.device)
    return {name: agent.draw(td, noise_BT)[keys.ACTION] for name, agent in references.items()}


def enrichment_sums(td: TensorDictBase, codec: Codec) -> dict[str, Tensor]:
    """Return the two sums whose ratio is the boundary enrichment of sequences.

    The enrichment is the loss of the symbols after a boundary, relative to that after the same boundaries shifted
    circularly, averaged over all shifts: above 1 where tokens end before symbols which are hard to predict. SOMBRERO
    (Neitemeier et al. 2026, arXiv 2601.22805) reports such a ratio. A boundary falls on each decision in one of the
    shifts, so that their mean is the number of boundaries times the mean loss.

    Returns:
        ``loss_after_B`` and ``loss_shifted_B``, float64 [B] on the CPU; empty for a codec with masked symbols.
    """
    if codec.loss_mask(td["next", keys.SYMBOL]) is not None:
        return {}
    decides_BT = td[keys.DECISION_MASK]
    loss_BT = -td[keys.LOG_LIKELIHOOD].double() * decides_BT
    ends_BT = td[keys.ACTION].bool() & decides_BT
    mean_B = loss_BT.sum(-1) / decides_BT.sum(-1).clamp(min=1)
    return {
        "loss_after_B": (loss_BT * ends_BT).sum(-1).cpu(),
        "loss_shifted_B": (mean_B * ends_BT.sum(-1)).cpu(),
    }


def rates_by_class(
    codec: Codec | type[Codec], symbol_BT: Tensor, action_BT: Tensor
) -> dict[str, tuple[float, float]]:
    """Return the share of all symbols, and the boundaries per symbol, of each class which occurs.

    Args:
        codec: codec, which may have no classes.
        symbol_BT: symbols; the first of each sequence are left out.
        action_BT: 1 where a token ends.
    """
    if not codec.symbol_classes:
        return {}
    class_N = codec.classify(symbol_BT[:, 1:].flatten())
    count = torch.bincount(class_N, minlength=len(codec.symbol_classes)).double()
    drawn = torch.bincount(class_N, action_BT[:, 1:].flatten().double(), minlength=len(count))
    return {
        name: ((count[i] / count.sum()).item(), (drawn[i] / count[i]).item())
        for i, name in enumerate(codec.symbol_classes)
        if count[i] > 0
    }


def warn_of_collapse(history: History, imitated: int) -> None:
    """Print a warning if ``enrichment_collapse`` has one."""
    message = enrichment_collapse(history, imitated)
    if message:
        warn(message)


def enrichment_collapse(history: History, imitated: int) -> str:
    """Return a warning if boundaries which were imitated have lost their enrichment; otherwise an empty text.

    The mean of ``train/boundary_enrichment`` over the newest updates is compared with that over as many symbols at
    the end of the imitation, a quarter of it.

    Args:
        history: metrics of a run by name.
        imitated: training symbols of the imitation.
    """
    symbols, values = history.get(ENRICHMENT, ([], []))
    if not symbols:
        return ""
    span = WINDOW * imitated
    newest = symbols[-1]
    if newest < imitated + span:
        return ""
    start = _mean_between(symbols, values, imitated - span, imitated)
    now = _mean_between(symbols, values, newest - span, newest)
    if not start > 0 or not now < COLLAPSED * start:
        return ""
    return (
        f"boundary_enrichment fell from {start:.2f} at the end of the imitation to {now:.2f}: boundaries no longer "
        "precede symbols that are hard to predict; compare other seeds, a shorter estimator.gamma or a weaker loss.rate"
    )


def _mean_between(symbols: list[int], values: list[float], low: float, high: float) -> float:
    chosen = [value for at, value in zip(symbols, values, strict=True) if low < at <= high]
    return sum(chosen) / max(len(chosen), 1)
