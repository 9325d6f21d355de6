"""How well a model predicts held-out sequences, and where its boundaries fall."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.core.distributed import SINGLE_PROCESS, Group
from tokenv.core.rates import Rate
from tokenv.core.sequences import SequenceBatch
from tokenv.env.random_inputs import derive_seed, sample_target_rates
from tokenv.env.rollout import observe, rollout
from tokenv.lm.codecs.base import Codec


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures.

    Attributes:
        unit: what the losses are measured in: the codec's, such as ``bits_per_byte``.
        loss: mean over all predicted symbols, or values.
        standard_error: of that mean, documents being the independent units.
        loss_early: the same from the early exit; None where the run has no use for one.
        boundary_rate: boundaries per symbol, as drawn.
        entropy: of the policy, in nats per decision.
        boundary_f1: F1 of the drawn boundaries against the true ones, where the corpus knows them.
        boundary_precision: share of drawn boundaries that are true.
        boundary_recall: share of true boundaries that are drawn.
    """

    unit: str
    loss: float
    standard_error: float
    loss_early: float | None
    boundary_rate: float
    entropy: float
    boundary_f1: float | None = None
    boundary_precision: float | None = None
    boundary_recall: float | None = None

    def metrics(self) -> dict[str, Any]:
        """All figures by the names they are logged under: the losses by their unit's."""
        values = asdict(self)
        unit = values.pop("unit")
        names = {"loss": unit, "loss_early": f"{unit}_early"}
        return {names.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_metrics(cls, values: dict[str, Any], unit: str) -> "Evaluation":
        """What ``metrics`` was called on."""
        names = {unit: "loss", f"{unit}_early": "loss_early"}
        return cls(unit, **{names.get(name, name): value for name, value in values.items()})


def clustered_standard_error(value_B: Tensor, cluster_B: Tensor) -> float:
    """Return the standard error of ``value_B.mean()`` when values of one cluster depend on one another.

    ``sqrt(sum_c (sum_{b in c} (v_b - mean))^2 / (1 - h_c)) / B``, h_c being the share of the values that cluster c has:
    the bias-reduced estimator CR2 (Bell & McCaffrey 2002; Imbens & Kolesar 2016). Of C clusters of one size it is
    ``sqrt(C / (C - 1) * sum_c (sum_{b in c} (v_b - mean))^2) / B`` (Liang & Zeger 1986).

    Args:
        value_B: the values, [B].
        cluster_B: the cluster of every value, integers [B].

    Returns:
        The standard error; NaN for one cluster.
    """
    share_C, index_B = _cluster_shares(cluster_B)
    if len(share_C) < 2:
        return math.nan
    deviation_B = value_B.double() - value_B.double().mean()
    total_C = torch.zeros_like(share_C).index_add_(0, index_B, deviation_B)
    return math.sqrt((total_C.square() / (1 - share_C)).sum().item()) / len(value_B)


def clustered_degrees_of_freedom(cluster_B: Tensor) -> float:
    """Return the degrees of freedom of ``clustered_standard_error`` (Satterthwaite's, after Bell & McCaffrey 2002).

    With ``w_c = h_c^2 / (1 - h_c)``, ``1 / (sum_c h_c^2 + (sum_c w_c)^2 - sum_c w_c^2)``: twice the squared mean of the
    estimated variance over its variance, for independent values of one variance. C clusters of one size have C - 1,
    unequal ones fewer.

    Args:
        cluster_B: the cluster of every value, integers [B].

    Returns:
        At least 1; NaN for one cluster.
    """
    share_C, _ = _cluster_shares(cluster_B)
    if len(share_C) < 2:
        return math.nan
    weight_C = share_C.square() / (1 - share_C)
    return 1 / (share_C.square().sum() + weight_C.sum().square() - weight_C.square().sum()).item()


def _cluster_shares(cluster_B: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the values that the C clusters have, float64 [C], and the index of every value's cluster, [B]."""
    _, index_B, count_C = cluster_B.unique(return_inverse=True, return_counts=True)
    return count_C.double() / len(cluster_B), index_B


def shift_noise(noise: Tensor, logit_bias: float | Tensor) -> Tensor:
    """Uniform numbers that decide as ``noise`` would if all logits were larger by ``logit_bias``: of its shape.

    Every decision is ``a = [l > logit(u)]``, and ``[l + c > logit(u)] = [l > logit(u) - c]``.
    """
    return torch.sigmoid(torch.logit(noise) - logit_bias)


class EvalSampler:
    """Rolls out one batch after the other with successive noise; see ``eval_mode``."""

    def __init__(
        self, parts: Components, seed: int, threshold: bool, logit_bias: float, rate: float | None, doubt: float
    ) -> None:
        self._parts, self._threshold, self._logit_bias, self._doubt = parts, threshold, logit_bias, doubt
        self._rates: Rate | None = parts.agent.rates if rate is None else rate
        self._device, self._seed = parts.lm.head.weight.device, seed
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._rate_generator = torch.Generator().manual_seed(derive_seed(seed))

    @torch.no_grad()
    def __call__(
        self, symbol_BN: Tensor, length_B: Tensor | None = None, *, noise_BT: Tensor | None = None
    ) -> TensorDictBase:
        """Roll out symbols [B, N, ..] on the model's device.

        Args:
            symbol_BN: the symbols.
            length_B: their lengths, where they differ.
            noise_BT: uniform numbers that decide, as ``noise_of`` draws them; None draws the next ones.
        """
        noise, there = self._noise(symbol_BN, noise_BT), symbol_BN.to(self._device)
        rate_B = self._asked(symbol_BN)
        if self._doubt:
            noise = shift_noise(noise, self._doubt * self._early_entropy(there)[:, :-1])
        how: dict[str, Any] = {"noise": noise, "length_B": length_B, "rate": rate_B}
        sampling = Sampling(early_exit=self._parts.early_exit)
        work = partial(rollout, self._parts.lm, self._parts.agent, there, sampling, **how)
        td: TensorDictBase = self._parts.whole(work)
        return td

    @torch.no_grad()
    def observe(self, symbol_BN: Tensor) -> TensorDictBase:
        """What the agent would decide by in a rollout of the same symbols, and its noise: the encoder's pass alone."""
        noise, there = self._noise(symbol_BN), symbol_BN.to(self._device)
        see = partial(observe, self._parts.lm, self._parts.agent, there, rate=self._asked(symbol_BN))
        td: TensorDictBase = self._parts.whole(see)
        return td.set(keys.NOISE, noise)

    def pass_over(self, symbol_BN: Tensor) -> None:
        """Leave these symbols to somebody else: what follows is as if they had been rolled out here."""
        self._noise(symbol_BN)
        self._asked(symbol_BN)

    def noise_of(self, lengths: Sequence[int]) -> list[Tensor]:
        """Draw the noise of one text's sequences of N symbols as if there were no other text: [N - 1] each."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        return [torch.rand(length - 1, device=self._device, generator=generator) for length in lengths]

    def _early_entropy(self, symbol_BN: Tensor) -> Tensor:
        lm = self._parts.lm
        entropy_BN: Tensor = self._parts.whole(lambda: lm.early_entropy(lm.encode(symbol_BN)))
        return entropy_BN

    def _asked(self, symbol_BN: Tensor) -> Tensor | None:
        """Drawn rates are a sequence's own, however many share its pass."""
        if self._rates is None:
            return None
        return sample_target_rates(self._rates, len(symbol_BN), self._device, self._rate_generator)

    def _noise(self, symbol_BN: Tensor, given_BT: Tensor | None = None) -> Tensor:
        shape = symbol_BN.shape[0], symbol_BN.shape[1] - 1
        if self._threshold:
            noise = torch.full(shape, 0.5, device=self._device)
        elif given_BT is not None:
            noise = given_BT
        else:
            noise = torch.rand(*shape, device=self._device, generator=self._generator)
        return shift_noise(noise, self._logit_bias) if self._threshold or self._logit_bias else noise


@contextmanager
def eval_mode(
    parts: Components,
    *,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
    doubt: float = 0.0,
) -> Iterator[EvalSampler]:
    """Evaluation mode, and rollouts without gradients; afterwards the parts are in the mode they were in.

    Args:
        parts: model and agent.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        logit_bias: added to the logits of all decisions; see ``tokenv.evaluation.calibration``. What the policy says
            of its probabilities stays without it.
        rate: that an agent is told, if it is told one; None draws every sequence's from its range.
        doubt: added to a decision's logit for each nat of the early exit's entropy there. It is of the symbol that
            follows, given what is known: no decision looks ahead for it.

    Yields:
        A function from symbols [B, N, ..], and their lengths [B] where they differ, to a rollout on the model's device.
    """
    was_training = parts.lm.training
    parts.train(False)
    try:
        yield EvalSampler(parts, seed, threshold, logit_bias, rate, doubt)
    finally:
        parts.train(was_training)


def held_out_rollouts(
    parts: Components,
    batch: SequenceBatch,
    *,
    batch_size: int,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
    doubt: float = 0.0,
    progress: bool = False,
    turn: tuple[int, int] = (0, 1),
) -> Iterator[TensorDictBase]:
    """Roll out held-out sequences, some at a time; the arguments are those of ``evaluate`` and ``eval_mode``.

    With a ``turn`` (r, W) only every W-th batch, from the r-th on, each as it is among all.

    Yields:
        Rollouts of batch size [B, T] without gradients, in the sequences' order.
    """
    rank, world = turn
    starts = range(0, len(batch), batch_size)
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "logit_bias": logit_bias, "rate": rate}
    with eval_mode(parts, doubt=doubt, **how) as draw:
        bar = tqdm(starts, desc="validation", unit="batch", leave=False, disable=not progress)
        for number, start in enumerate(bar):
            some = batch.symbol_BN[start : start + batch_size]
            if number % world == rank:
                yield draw(some)
            else:
                draw.pass_over(some)


def sequence_sums(td: TensorDictBase, codec: Codec) -> dict[str, Tensor]:
    """What the losses of a rollout's sequences are made of.

    Returns:
        ``late`` and, if there is an early exit, ``early``: negative log-likelihood per symbol, in the codec's unit;
        ``loss_mask``, where a symbol is not always one likelihood: how many it has, per symbol. Float64 [B] each, on
        the CPU.
    """
    of = {"late": keys.LOG_LIKELIHOOD, "early": keys.LOG_LIKELIHOOD_EARLY}
    sums = {name: _per_symbol(-td[key]) / codec.nats_per_unit for name, key in of.items() if key in td}
    counted_BT = codec.loss_mask(td["next", keys.SYMBOL])
    return sums if counted_BT is None else sums | {"counted": _per_symbol(counted_BT)}


def concat_columns(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Figures of some sequences at a time, behind one another: at least one mapping, all of the same keys."""
    return {name: torch.cat([column[name] for column in columns]) for name in columns[0]}


def sequence_losses(sums: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Each sequence's share in the loss and in the early exit's, of all that ``sequence_sums`` says of it.

    Returns:
        Float64 [B] each; None where there is no early exit. Their means are the losses over all that has a
        likelihood, and the means' standard errors those of the losses (linearised where they are ratios).
    """
    counted_B = sums.get("counted")
    late_B, early_B = (
        None if name not in sums else sums[name] if counted_B is None else _shares(sums[name], counted_B)
        for name in ("late", "early")
    )
    assert late_B is not None
    return late_B, early_B


def _per_symbol(x_BT: Tensor) -> Tensor:
    return x_BT.double().mean(-1).cpu()


def _shares(total_B: Tensor, counted_B: Tensor) -> Tensor:
    """Values whose mean is the ratio of the means, and whose standard error is the ratio's (linearised): [B]."""
    ratio = total_B.mean() / counted_B.mean()
    return ratio + (total_B - ratio * counted_B) / counted_B.mean()


def evaluate(
    parts: Components,
    batch: SequenceBatch,
    *,
    batch_size: int,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
    tolerance: int = 0,
    progress: bool = False,
    group: Group = SINGLE_PROCESS,
    shard: int = 1,
) -> Evaluation:
    """Score held-out sequences.

    Args:
        parts: model and agent; left in the mode they were in.
        batch: the sequences.
        batch_size: sequences of one pass.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        logit_bias: see ``eval_mode``.
        rate: see ``eval_mode``.
        tolerance: symbols that a boundary may be off a true one and still count as found.
        progress: show a bar.
        group: processes that hold the same model and do this together, each some of the batches, over a CPU group.
        shard: successive ranks that keep one model between them, and so do the same batches.
    """
    codec = parts.lm.codec
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "logit_bias": logit_bias, "rate": rate}
    rollouts = held_out_rollouts(
        parts, batch, batch_size=batch_size, progress=progress, turn=(group.rank // shard, group.size // shard), **how
    )
    mine = [
        sequence_sums(td, codec)
        | {
            "action": td[keys.ACTION].cpu(),
            "decides": td[keys.DECISION_MASK].cpu(),
            "entropy": td[keys.ENTROPY].double().mean(-1).cpu(),
        }
        for td in rollouts
    ]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*group.all_gather_object(mine)[::shard]))
    whole = concat_columns([columns for columns in in_turn if columns is not None])
    action_BT, decides_BT = whole["action"], whole["decides"]
    late_B, early_B = sequence_losses(whole)
    scores = {}
    if batch.gold_BN is not None:
        gold_BT = batch.gold_BN[:, :-1] & decides_BT
        scores = boundary_scores(action_BT[:, 1:].bool(), gold_BT[:, 1:], tolerance)
    return Evaluation(
        unit=codec.unit,
        loss=late_B.mean().item(),
        standard_error=clustered_standard_error(late_B, batch.document_B),
        loss_early=None if early_B is None else early_B.mean().item(),
        boundary_rate=realised_rate(action_BT, decides_BT),
        entropy=whole["entropy"].mean().item(),
        **scores,
    )


def realised_rate(action: Tensor, decides: Tensor) -> float:
    """Boundaries per symbol at which there may be one: those that are decided, and every sequence's first; [.., T]."""
    return action.sum().item() / num_decision_sites(decides)


def num_decision_sites(decides: Tensor) -> int:
    """Symbols at which there may be a boundary: those that are decided, and every sequence's first; bool [.., T]."""
    return int(decides.sum().item()) + decides[..., 0].numel()


def boundary_scores(drawn: Tensor, gold: Tensor, tolerance: int = 0) -> dict[str, float]:
    """Precision, recall and F1 of drawn against true boundaries.

    Args:
        drawn: bool [.., T].
        gold: bool, of the same shape.
        tolerance: positions that a boundary may be off the true one it is matched with. Matching is one to one, and
            finds as many pairs as there can be.
    """
    hits = (drawn & gold).sum().item() if not tolerance else _matches(drawn, gold, tolerance)
    precision, recall = hits / max(drawn.sum().item(), 1), hits / max(gold.sum().item(), 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"boundary_precision": precision, "boundary_recall": recall, "boundary_f1": f1}


def _matches(drawn: Tensor, gold: Tensor, tolerance: int) -> int:
    """Most pairs at most ``tolerance`` apart: on a line, the two earliest unmatched that fit can always be one."""
    hits = 0
    for drawn_T, gold_T in zip(drawn.flatten(0, -2), gold.flatten(0, -2), strict=True):
        left, right = (where_T.nonzero().flatten().tolist() for where_T in (drawn_T, gold_T))
        i = j = 0
        while i < len(left) and j < len(right):
            if abs(left[i] - right[j]) <= tolerance:
                hits, i, j = hits + 1, i + 1, j + 1
            elif left[i] < right[j]:
                i += 1
            else:
                j += 1
    return hits
