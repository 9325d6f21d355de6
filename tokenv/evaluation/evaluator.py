"""Evaluate a model on held-out sequences: its loss, its boundary rate, and where its boundaries fall."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from tensordict import TensorDictBase
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.clustered_errors import clustered_standard_error
from tokenv.core.contracts import BoundaryAgent, Sampling
from tokenv.core.distributed import SINGLE_PROCESS, Group
from tokenv.core.rates import Rate
from tokenv.core.sequences import SequenceBatch
from tokenv.env.random_inputs import derive_seed, sample_target_rates
from tokenv.env.rollout import observe, rollout
from tokenv.evaluation.boundary_metrics import draw_references, enrichment_sums, rates_by_class
from tokenv.evaluation.run_state import Evaluation
from tokenv.lm.codecs.base import Codec

MIN_CONTEXT = 63  # predicted symbols of a sequence below which it has no in-context score
SYMBOLS_PER_PASS = 8192  # symbols of one forward pass where no batch size is set


@dataclass(frozen=True)
class EvalOptions:
    """Options of all functions which evaluate a model.

    Attributes:
        batch_size: sequences per forward pass; None for ``SYMBOLS_PER_PASS`` symbols, but at least one sequence.
        seed: seed of the sampled boundaries, and of the symbols where these are sampled, too.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        rate: target rate in boundaries per symbol, for an agent which was trained for a range of rates. None samples a
            rate from that range for each held-out sequence, and takes the range's mean for texts and forecasts.
        logit_bias: number added to the logits of all decisions; see ``tokenv.evaluation.calibration``. The boundary
            probabilities of a rollout do not include it.
        entropy_weight: number added to a decision's logit for each nat of the early exit's entropy at that position.
            This is the entropy of the next symbol given the known ones, so that no decision depends on later symbols.
        tolerance: positions which a drawn boundary may be off a true one and still match it.
        progress: show a progress bar.
        imitation: score the policy with the boundaries of the teacher too, if the run has one.
    """

    batch_size: int | None = None
    seed: int = 0
    threshold: bool = False
    rate: float | None = None
    logit_bias: float = 0.0
    entropy_weight: float = 0.0
    tolerance: int = 0
    progress: bool = False
    imitation: bool = False

    def sequences_per_pass(self, length: int) -> int:
        """Return the number of sequences of ``length`` symbols which share a forward pass."""
        return self.batch_size or max(1, SYMBOLS_PER_PASS // length)


DEFAULTS = EvalOptions()


@dataclass(frozen=True)
class SequenceScores:
    """Scores of B held-out sequences with T decisions each, on the CPU.

    Attributes:
        loss_B: contribution of each sequence to the loss in the codec's unit, float64. Its mean is the loss over all
            predicted symbols or values, and the standard error of that mean is the loss's (linearised for a ratio).
        loss_early_B: the same for the early exit; None if it is not trained.
        entropy_B: entropy of the policy in nats per decision, float64.
        action_BT: drawn boundaries, 0 or 1.
        decision_mask_BT: whether the agent decides there, bool.
        boundary_prob_BT: boundary probabilities without a logit bias, float32.
        extra: further values by name, as ``evaluate_sequences`` was requested to measure.
    """

    loss_B: Tensor
    loss_early_B: Tensor | None
    entropy_B: Tensor
    action_BT: Tensor
    decision_mask_BT: Tensor
    boundary_prob_BT: Tensor
    extra: Mapping[str, Tensor]

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.loss_B.mean().item()

    @property
    def boundary_rate(self) -> float:
        """Drawn boundaries per position which may have one."""
        return self.action_BT.sum().item() / num_boundary_sites(self.decision_mask_BT)


def shift_noise(noise: Tensor, logit_bias: float | Tensor) -> Tensor:
    """Return noise of the same shape which decides as ``noise`` would if all logits were larger by ``logit_bias``.

    Each decision is ``a = [l > logit(u)]``, and ``[l + c > logit(u)] = [l > logit(u) - c]``.
    """
    return torch.sigmoid(torch.logit(noise) - logit_bias)


class EvalSampler:
    """Roll out one batch after another, each with the next noise of the seed; see ``eval_mode``."""

    def __init__(self, components: Components, options: EvalOptions) -> None:
        self._components = components
        self._options = options
        self._rates: Rate | None = components.agent.rates if options.rate is None else options.rate
        self._device = components.lm.head.weight.device
        self._generator = torch.Generator(self._device).manual_seed(options.seed)
        self._rate_generator = torch.Generator().manual_seed(derive_seed(options.seed))

    @torch.no_grad()
    def __call__(
        self, symbol_BN: Tensor, length_B: Tensor | None = None, *, noise_BT: Tensor | None = None
    ) -> TensorDictBase:
        """Roll out symbols [B, N, ..] on the model's device.

        Args:
            symbol_BN: symbols.
            length_B: lengths of the sequences; None if all have N symbols.
            noise_BT: uniform random numbers which decide, see ``text_noise``; None draws the next ones.
        """
        components = self._components
        lm = components.lm
        symbol_BN = symbol_BN.to(self._device)
        noise = self._noise(symbol_BN, noise_BT)
        rate_B = self._target_rates(symbol_BN)
        if self._options.entropy_weight:
            entropy_BN = lm.early_entropy(lm.encode(symbol_BN))
            noise = shift_noise(noise, self._options.entropy_weight * entropy_BN[:, :-1])
        sampling = Sampling(early_exit=components.early_exit)
        if self._options.imitation and components.imitation is not None:
            sampling = replace(sampling, teacher=components.imitation.sampling.teacher)
        return rollout(
            lm, components.agent, symbol_BN, sampling, noise=noise, length_B=length_B, rate=rate_B
        )

    @torch.no_grad()
    def observe(self, symbol_BN: Tensor, *, noise_BT: Tensor | None = None) -> TensorDictBase:
        """Return the observations and the noise of a rollout of the same symbols; only the encoder runs."""
        components = self._components
        symbol_BN = symbol_BN.to(self._device)
        noise = self._noise(symbol_BN, noise_BT)
        rate_B = self._target_rates(symbol_BN)
        td = observe(components.lm, components.agent, symbol_BN, rate=rate_B)
        return td.set(keys.NOISE, noise)

    @torch.no_grad()
    def boundaries(self, symbol_BN: Tensor, *, noise_BT: Tensor | None = None) -> Tensor:
        """Draw the boundaries of a rollout of the same symbols, bool [B, T]; only encoder and policy run."""
        td = self.observe(symbol_BN, noise_BT=noise_BT)
        return self._components.agent.draw(td, td[keys.NOISE])[keys.ACTION].bool()

    def skip(self, symbol_BN: Tensor) -> None:
        """Draw and drop the noise of these symbols, so that the next batch has the noise as if they were rolled out."""
        self._noise(symbol_BN)
        self._target_rates(symbol_BN)

    def text_noise(self, lengths: Sequence[int]) -> list[Tensor]:
        """Draw the noise of one text's sequences of N symbols, the same for any other texts: [N - 1] each."""
        generator = torch.Generator(self._device).manual_seed(self._options.seed)
        return [
            torch.rand(length - 1, device=self._device, generator=generator) for length in lengths
        ]

    def _target_rates(self, symbol_BN: Tensor) -> Tensor | None:
        """Return the target rate of each sequence; a sampled one does not depend on the batch size."""
        if self._rates is None:
            return None
        return sample_target_rates(self._rates, len(symbol_BN), self._device, self._rate_generator)

    def _noise(self, symbol_BN: Tensor, noise_BT: Tensor | None = None) -> Tensor:
        shape = (symbol_BN.shape[0], symbol_BN.shape[1] - 1)
        options = self._options
        if options.threshold:
            noise_BT = torch.full(shape, 0.5, device=self._device)
        elif noise_BT is None:
            noise_BT = torch.rand(*shape, device=self._device, generator=self._generator)
        if options.threshold or options.logit_bias:
            return shift_noise(noise_BT, options.logit_bias)
        return noise_BT


@contextmanager
def eval_mode(components: Components, options: EvalOptions = DEFAULTS) -> Iterator[EvalSampler]:
    """Switch to evaluation mode, and back to the former mode at the end.

    Args:
        components: model and agent.
        options: noise and rate of the rollouts.

    Yields:
        A function which rolls out symbols [B, N, ..] without gradients.
    """
    was_training = components.lm.training
    components.train(False)
    try:
        yield EvalSampler(components, options)
    finally:
        components.train(was_training)


def held_out_rollouts(
    components: Components,
    batch: SequenceBatch,
    options: EvalOptions = DEFAULTS,
    *,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[TensorDictBase]:
    """Roll out held-out sequences batch by batch.

    Args:
        components: model and agent; they keep their mode.
        batch: held-out sequences.
        options: how to roll them out.
        shard: (r, W) takes every W-th batch from the r-th on, each with the same noise as among all.

    Yields:
        Rollouts of batch size [B, T] without gradients, in the sequences' order.
    """
    rank, world = shard
    size = options.sequences_per_pass(batch.symbol_BN.shape[1])
    with eval_mode(components, options) as draw:
        starts = range(0, len(batch), size)
        bar = tqdm(
            starts, desc="validation", unit="batch", leave=False, disable=not options.progress
        )
        for number, start in enumerate(bar):
            symbol_BN = batch.symbol_BN[start : start + size]
            if number % world == rank:
                yield draw(symbol_BN)
            else:
                draw.skip(symbol_BN)


def evaluate_sequences(
    components: Components,
    batch: SequenceBatch,
    options: EvalOptions = DEFAULTS,
    *,
    measure: Callable[[TensorDictBase], Mapping[str, Tensor]] = lambda _: {},
    group: Group = SINGLE_PROCESS,
    shard: int = 1,
) -> SequenceScores:
    """Score each held-out sequence.

    Args:
        components: model and agent; they keep their mode.
        batch: held-out sequences.
        options: how to roll them out.
        measure: further values [B, ..] of a rollout by name.
        group: processes with the same model which share the batches, connected over the CPU.
        shard: number of successive ranks which hold one model together, and therefore work on the same batches.
    """
    codec = components.lm.codec
    rank = group.rank // shard, group.size // shard
    own = [
        {
            **_loss_sums(td, codec),
            "entropy_B": _mean_per_symbol(td[keys.ENTROPY]),
            "action_BT": td[keys.ACTION].cpu(),
            "decision_mask_BT": td[keys.DECISION_MASK].cpu(),
            "boundary_prob_BT": td[keys.BOUNDARY_PROB].float().cpu(),
            **{name: value.cpu() for name, value in measure(td).items()},
        }
        for td in held_out_rollouts(components, batch, options, shard=rank)
    ]
    in_order = itertools.chain.from_iterable(
        itertools.zip_longest(*group.all_gather_object(own)[::shard])
    )
    batches = [columns for columns in in_order if columns is not None]
    columns = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
    loss_B, loss_early_B = sequence_losses(
        columns.pop("loss"), columns.pop("loss_early", None), columns.pop("count", None)
    )
    known = {
        name: columns.pop(name)
        for name in ("entropy_B", "action_BT", "decision_mask_BT", "boundary_prob_BT")
    }
    return SequenceScores(loss_B, loss_early_B, **known, extra=columns)


def evaluate(
    components: Components,
    batch: SequenceBatch,
    options: EvalOptions = DEFAULTS,
    *,
    references: Mapping[str, BoundaryAgent] = MappingProxyType({}),
    group: Group = SINGLE_PROCESS,
    shard: int = 1,
) -> Evaluation:
    """Evaluate a model on held-out sequences.

    Args:
        components: model and agent; they keep their mode.
        batch: held-out sequences.
        options: how to roll them out.
        references: agents by name with whose boundaries those that are drawn are compared.
        group: processes with the same model which share the batches, connected over the CPU.
        shard: number of successive ranks which hold one model together.
    """
    options = replace(options, imitation=True)
    codec = components.lm.codec

    def measure(td: TensorDictBase) -> dict[str, Tensor]:
        scored = _imitation_bits(td) | _in_context_scores(td, codec) | enrichment_sums(td, codec)
        return scored | draw_references(references, td)

    scores = evaluate_sequences(
        components, batch, options, measure=measure, group=group, shard=shard
    )
    matches: dict[str, float] = {}
    if batch.gold_BN is not None:
        gold_BT = batch.gold_BN[:, :-1] & scores.decision_mask_BT
        matches = agreement_scores(scores.action_BT, gold_BT, options.tolerance)
    by_name = {}
    classes = rates_by_class(codec, batch.symbol_BN[:, :-1], scores.action_BT)
    for name, (_, rate) in classes.items():
        by_name[f"boundary_rate_{name.replace(' ', '_')}"] = rate
    for name in references:
        agreement = agreement_scores(scores.action_BT, scores.extra[name])
        by_name[f"{name}_precision"] = agreement["boundary_precision"]
        by_name[f"{name}_f1"] = agreement["boundary_f1"]
    return Evaluation(
        unit=codec.unit,
        loss=scores.loss,
        standard_error=clustered_standard_error(scores.loss_B, batch.document_B),
        loss_early=_mean_if_measured(scores.loss_early_B),
        boundary_rate=scores.boundary_rate,
        entropy=scores.entropy_B.mean().item(),
        imitation_bits=_mean_if_measured(scores.extra.get("imitation_bits_B")),
        in_context_score=_mean_if_measured(scores.extra.get("in_context_score_B")),
        enrichment_ratio=_enrichment_ratio(scores),
        by_name=by_name,
        **matches,
    )


def _enrichment_ratio(scores: SequenceScores) -> float | None:
    """Return the ratio of the sums of ``enrichment_sums``; None without boundaries."""
    if "loss_after_B" not in scores.extra:
        return None
    shifted = scores.extra["loss_shifted_B"].sum().item()
    if shifted == 0:
        return None
    return scores.extra["loss_after_B"].sum().item() / shifted


def _mean_if_measured(values_B: Tensor | None) -> float | None:
    return None if values_B is None else values_B.mean().item()


def in_context_scores(loss_BT: Tensor) -> Tensor:
    """Return how much lower the loss is late in each sequence than early: [B, T] -> [B].

    Mean over 32 symbols from 7/128 of the sequence's length on, less that from 63/128 on: from 224 and 2016 of 4096, as
    the authors of arXiv 2602.13940 log it with the opposite sign (after Olsson et al. 2022, arXiv 2209.11895). In
    sequences below 256 symbols the means are over an eighth of them.
    """
    length = loss_BT.shape[-1] + 1
    early = 7 * length // 128
    late = 63 * length // 128
    count = min(32, length // 8)
    return loss_BT[:, early : early + count].mean(-1) - loss_BT[:, late : late + count].mean(-1)


def _in_context_scores(td: TensorDictBase, codec: Codec) -> dict[str, Tensor]:
    """Return the scores in the codec's unit, float64 [B]; nothing if symbols are not predicted one by one, or few."""
    if codec.loss_mask(td["next", keys.SYMBOL]) is not None or td.shape[-1] < MIN_CONTEXT:
        return {}
    loss_BT = -td[keys.LOG_LIKELIHOOD].double() / codec.nats_per_unit
    return {"in_context_score_B": in_context_scores(loss_BT).cpu()}


def _imitation_bits(td: TensorDictBase) -> dict[str, Tensor]:
    """Return the bits per symbol, [B], which a teacher's boundaries cost if the policy predicts them."""
    log_prob_BT = td.get(keys.DEMONSTRATION_LOG_PROB)
    if log_prob_BT is None:
        return {}
    return {"imitation_bits_B": _mean_per_symbol(-log_prob_BT) / math.log(2)}


def _loss_sums(td: TensorDictBase, codec: Codec) -> dict[str, Tensor]:
    """Return the losses of a rollout's sequences per symbol, float64 [B] on the CPU.

    Returns:
        ``loss`` and, if there is an early exit, ``loss_early``, in the codec's unit; ``count``, the number of
        likelihoods per symbol, if that is not always one.
    """
    likelihoods = {"loss": keys.LOG_LIKELIHOOD, "loss_early": keys.LOG_LIKELIHOOD_EARLY}
    sums = {
        name: _mean_per_symbol(-td[key]) / codec.nats_per_unit
        for name, key in likelihoods.items()
        if key in td
    }
    count_BT = codec.loss_mask(td["next", keys.SYMBOL])
    if count_BT is not None:
        sums["count"] = _mean_per_symbol(count_BT)
    return sums


def sequence_losses(
    loss_B: Tensor, early_B: Tensor | None, count_B: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the contributions of sequences to the loss and to the early exit's: see ``SequenceScores``.

    Args:
        loss_B: loss per symbol of each sequence.
        early_B: the same for the early exit; None without one.
        count_B: likelihoods per symbol; None for one each.
    """
    if count_B is None:
        return loss_B, early_B
    if early_B is not None:
        early_B = _ratio_contributions(early_B, count_B)
    return _ratio_contributions(loss_B, count_B), early_B


def _mean_per_symbol(x_BT: Tensor) -> Tensor:
    return x_BT.double().mean(-1).cpu()


def _ratio_contributions(total_B: Tensor, count_B: Tensor) -> Tensor:
    """Return values [B] whose mean is the ratio of the means, and whose standard error the ratio's (linearised)."""
    ratio = total_B.mean() / count_B.mean()
    return ratio + (total_B - ratio * count_B) / count_B.mean()


def num_boundary_sites(decision_mask: Tensor) -> int:
    """Return the number of symbols which may have a boundary: all decided ones, and each sequence's first; [.., T]."""
    return int(decision_mask.sum().item()) + decision_mask[..., 0].numel()


def boundary_scores(drawn: Tensor, gold: Tensor, tolerance: int = 0) -> dict[str, float]:
    """Return precision, recall and F1 of drawn boundaries against true ones.

    Args:
        drawn: drawn boundaries, bool [.., T].
        gold: true boundaries, bool of the same shape.
        tolerance: positions which a boundary may be off the true one it is matched with. Matching is one to one and
            finds the largest possible number of pairs.
    """
    hits = (drawn & gold).sum().item() if not tolerance else _matches(drawn, gold, tolerance)
    precision = hits / max(drawn.sum().item(), 1)
    recall = hits / max(gold.sum().item(), 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"boundary_precision": precision, "boundary_recall": recall, "boundary_f1": f1}


def agreement_scores(
    action_BT: Tensor, reference_BT: Tensor, tolerance: int = 0
) -> dict[str, float]:
    """Return ``boundary_scores`` without the first symbols, after which every agent draws a boundary."""
    return boundary_scores(action_BT[:, 1:].bool(), reference_BT[:, 1:].bool(), tolerance)


def _matches(drawn: Tensor, gold: Tensor, tolerance: int) -> int:
    """Return the largest number of pairs at most ``tolerance`` apart; matching the earliest that fit is optimal."""
    hits = 0
    for drawn_T, gold_T in zip(drawn.flatten(0, -2), gold.flatten(0, -2), strict=True):
        left, right = (where_T.nonzero().flatten().tolist() for where_T in (drawn_T, gold_T))
        i = j = 0
        while i < len(left) and j < len(right):
            if abs(left[i] - right[j]) <= tolerance:
                hits += 1
                i += 1
                j += 1
            elif left[i] < right[j]:
                i += 1
            else:
                j += 1
    return hits
