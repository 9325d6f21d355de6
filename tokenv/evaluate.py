"""How well a model predicts held-out sequences, and where its boundaries fall."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from tqdm import tqdm

from tokenv import keys
from tokenv.build import Parts
from tokenv.data.pieces import SequenceBatch
from tokenv.rollout import rollout


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures.

    Attributes:
        bits_per_byte: mean over all predicted symbols.
        standard_error: of that mean, documents being the independent units.
        bits_per_byte_early: the same from the early exit.
        boundary_rate: boundaries per symbol, as drawn.
        entropy: of the policy, in nats per decision.
        boundary_f1: F1 of the drawn boundaries against the true ones, where the corpus knows them.
        boundary_precision: share of drawn boundaries that are true.
        boundary_recall: share of true boundaries that are drawn.
    """

    bits_per_byte: float
    standard_error: float
    bits_per_byte_early: float
    boundary_rate: float
    entropy: float
    boundary_f1: float | None = None
    boundary_precision: float | None = None
    boundary_recall: float | None = None


def clustered_standard_error(value_B: Tensor, cluster_B: Tensor) -> float:
    """Standard error of ``value_B.mean()`` when values of one cluster depend on one another.

    ``sqrt(C / (C - 1) * sum_c (sum_{b in c} (v_b - mean))^2) / B`` for C clusters (Liang & Zeger 1986); NaN for one.
    """
    _, index_B = cluster_B.unique(return_inverse=True)
    clusters = int(index_B.max()) + 1
    if clusters < 2:
        return math.nan
    deviation_B = value_B.double() - value_B.double().mean()
    total_C = torch.zeros(clusters, dtype=torch.float64).index_add_(0, index_B, deviation_B)
    return math.sqrt(clusters / (clusters - 1) * total_C.square().sum().item()) / len(value_B)


@torch.no_grad()
def held_out_rollouts(
    parts: Parts,
    batch: SequenceBatch,
    *,
    batch_size: int,
    seed: int = 0,
    threshold: bool = False,
    progress: bool = False,
) -> Iterator[TensorDictBase]:
    """Roll out held-out sequences, some at a time; the arguments are those of ``evaluate``.

    Yields:
        Rollouts of batch size [B, T] without gradients, in the sequences' order.
    """
    was_training = parts.lm.training
    parts.train(False)
    device = parts.lm.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    starts = range(0, len(batch), batch_size)
    for start in tqdm(starts, desc="validation", unit="batch", leave=False, disable=not progress):
        symbol_BN = batch.symbol_BN[start : start + batch_size].to(device)
        noise = torch.full((symbol_BN.shape[0], symbol_BN.shape[1] - 1), 0.5, device=device) if threshold else None
        yield rollout(parts.lm, parts.agent, symbol_BN, noise=noise, generator=generator)
    parts.train(was_training)


def sequence_bits(td: TensorDictBase, key: NestedKey = keys.LOG_LIKELIHOOD) -> Tensor:
    """Bits per byte of every sequence of a rollout: float64 [B], on the CPU."""
    return -td[key].double().mean(-1).cpu() / math.log(2)


def evaluate(
    parts: Parts,
    batch: SequenceBatch,
    *,
    batch_size: int,
    seed: int = 0,
    threshold: bool = False,
    progress: bool = False,
) -> Evaluation:
    """Score held-out sequences.

    Args:
        parts: model and agent; left in the mode they were in.
        batch: the sequences.
        batch_size: sequences of one pass.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        progress: show a bar.
    """
    columns: dict[str, list[Tensor]] = {"bits": [], "early": [], "actions": [], "entropy": []}
    rollouts = held_out_rollouts(parts, batch, batch_size=batch_size, seed=seed, threshold=threshold, progress=progress)
    for td in rollouts:
        columns["bits"].append(sequence_bits(td))
        columns["early"].append(sequence_bits(td, keys.LOG_LIKELIHOOD_EARLY))
        columns["actions"].append(td[keys.ACTION].cpu())
        columns["entropy"].append(td[keys.ENTROPY].double().mean(-1).cpu())
    bits_B, early_B, action_BT, entropy_B = (torch.cat(column) for column in columns.values())
    scores = {}
    if batch.gold_BN is not None:
        scores = boundary_scores(action_BT[:, 1:].bool(), batch.gold_BN[:, 1:-1])
    return Evaluation(
        bits_per_byte=bits_B.mean().item(),
        standard_error=clustered_standard_error(bits_B, batch.document_B),
        bits_per_byte_early=early_B.mean().item(),
        boundary_rate=action_BT.double().mean().item(),
        entropy=entropy_B.mean().item(),
        **scores,
    )


def boundary_scores(drawn: Tensor, gold: Tensor) -> dict[str, float]:
    """Precision, recall and F1 of drawn against true boundaries, bool tensors of one shape."""
    hits = (drawn & gold).sum().item()
    precision, recall = hits / max(drawn.sum().item(), 1), hits / max(gold.sum().item(), 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"boundary_precision": precision, "boundary_recall": recall, "boundary_f1": f1}
