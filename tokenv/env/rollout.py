"""Whole episodes in one pass: encode once, draw all boundaries, one pass through middle and decoder.

The result is what stepping through ``TokenizationEnv`` would return for the same noise (the project's central test),
but it carries gradients and costs what an ordinary forward pass costs. ``rollout`` has four stages: who decides where
(``_Sequences``), what is decided (``_decide``), what the model then predicts (``_predict``), and the record of it all
(``_record``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent, Sampling, check_causal
from tokenv.core.distributed import SINGLE_PROCESS, current_group, local_rows
from tokenv.env.observation import Observer
from tokenv.env.target_rate import rate_or_mean, resolve_target_rate, to_device_async
from tokenv.lm.unet import UNet

ONE_SAMPLE = Sampling()
OBSERVED = (keys.LOG_LIKELIHOOD[1], keys.LOG_LIKELIHOOD_EARLY[1])  # of the symbol itself: part of observations


@dataclass(frozen=True)
class _Sequences:
    """Sequences and who decides where.

    Attributes:
        symbol_BN: the symbols.
        length_B: symbols of each sequence; what follows is padding.
        position_BN: 0 to N - 1 in every row.
        valid_BT: whether the prediction made at i is of a symbol, not of padding.
        decision_mask_BN: nobody decides at the first symbol, nor where nothing is left to predict, nor among symbols
            that are predicted at once.
        known: leading symbols that the decoder reads: T, or those before the ones that are predicted at once.
    """

    symbol_BN: Tensor
    length_B: Tensor
    position_BN: Tensor
    valid_BT: Tensor
    decision_mask_BN: Tensor
    known: int

    @classmethod
    def of(cls, lm: UNet, symbol_BN: Tensor, length_B: Tensor | None) -> _Sequences:
        (batch, length), ahead = symbol_BN.shape[:2], lm.config.horizon if lm.config.direct else 0
        if ahead and (length <= ahead or length_B is not None):
            raise ValueError(
                f"sequences of {length} symbols with model.direct: expected more than model.horizon = {ahead}, and all "
                "of one length"
            )
        position_N = torch.arange(length, device=symbol_BN.device)
        if length_B is None:
            length_B = torch.full((batch,), length, device=symbol_BN.device)
        valid_BT = position_N[1:] < length_B[:, None]
        known = length - (ahead or 1)
        decision_mask_BN = F.pad(valid_BT, (0, 1)) & (position_N > 0) & (position_N < known)
        return cls(symbol_BN, length_B, position_N.expand(batch, -1), valid_BT, decision_mask_BN, known)

    @property
    def target_BT(self) -> Tensor:
        """The symbol that is predicted at i."""
        return self.symbol_BN[:, 1:]


def rollout(
    lm: UNet,
    agent: BoundaryAgent,
    symbol_BN: Tensor,
    sampling: Sampling = ONE_SAMPLE,
    *,
    noise: Tensor | None = None,
    length_B: Tensor | None = None,
    generator: torch.Generator | None = None,
    observer: Observer | None = None,
    rate: float | Tensor | None = None,
) -> TensorDictBase:
    """Let an agent draw the boundaries of whole sequences, and reward it.

    Args:
        lm: the model.
        agent: draws the boundaries.
        symbol_BN: the sequences, [B, N, *symbol_shape].
        sampling: what an estimator asks for: ``estimator.sampling``.
        noise: uniform numbers in (0, 1) that decide the actions, [B, T] or [K, B, T]; drawn where not given. 0
            forces a boundary, 1 forces none.
        length_B: symbols of each sequence where they differ; what follows is padding.
        generator: of the noise, which is drawn where the generator is; None for torch's own, where the sequences are.
            It draws for the whole batch, of which the sequences may be some rows (``tokenv.core.distributed``).
        observer: what the observations hold; None for what the agent reads.
        rate: that the sequences are asked for, one number or [B], of an agent that is told it; None draws every
            sequence's from the agent's range, with ``generator`` and after the noise. All samples share it.

    Returns:
        A TensorDict of batch size [B, T] or [K, B, T], T = N - 1. Step i holds the observation at symbol i, the
        noise, the agent's outputs, and under ``next`` the observation at symbol i + 1 with ``log_likelihood`` and
        ``log_likelihood_early`` of that symbol (nats), and their difference as ``reward`` (eq. 15).
        ``log_likelihood_early`` and ``reward`` are missing where ``sampling`` asks for no early exit.
        Gradients flow through the agent's outputs and through the ``next`` log-likelihoods; rewards and
        everything else are detached. Decision mask, likelihoods and rewards are zero in the padding, and ``done``
        holds from each sequence's own end on. With ``model.direct`` the ``log_likelihood`` of the last H symbols is
        what the direct head said of each at the end of the history, and that of the history is 0; the early exit,
        which no boundary moves, goes on from step to step.

    Raises:
        ValueError: the agent would look ahead; with ``model.direct``, sequences without a history, or of several
            lengths.
    """
    check_causal(agent, direct=lm.config.direct)
    observer = (observer or Observer.of(agent)).extended_for(agent)
    sequences = _Sequences.of(lm, symbol_BN, length_B)
    decision_mask_BT = sequences.decision_mask_BN[:, :-1]
    noise = _coupled_noise(decision_mask_BT, sampling, noise, generator)
    rate_B = resolve_target_rate(observer, agent.rates, rate, len(symbol_BN), symbol_BN.device, generator)
    x_BND = lm.encode(symbol_BN)
    static_observation = _observe(lm, observer, sequences, x_BND, rate_B)
    drawn = _decide(agent, static_observation[:, :-1], noise, sampling)
    predicted = _predict(lm, x_BND[:, :-1], sequences, drawn, sampling, generator)
    return _record(observer, static_observation.detach(), sequences, drawn, predicted)


def observe(lm: UNet, agent: BoundaryAgent, symbol_BN: Tensor, rate: float | Tensor | None = None) -> TensorDictBase:
    """What an agent decides by in whole sequences [B, N, *symbol_shape], before any decision: the encoder's pass alone.

    Args:
        lm: the model.
        agent: who will decide.
        symbol_BN: the sequences.
        rate: that the agent is told, as in ``rollout``; None for the mean of its range, if it has one.

    Returns:
        A TensorDict of batch size [B, T], T = N - 1, which is what ``agent.draw`` reads.
    """
    observer = Observer.of(agent)
    rate_B = resolve_target_rate(
        observer, agent.rates, rate_or_mean(rate, agent.rates), len(symbol_BN), symbol_BN.device
    )
    return _observe(lm, observer, _Sequences.of(lm, symbol_BN, None), lm.encode(symbol_BN), rate_B)[:, :-1]


def _observe(lm: UNet, observer: Observer, sequences: _Sequences, x_BND: Tensor, rate_B: Tensor | None) -> TensorDict:
    """Observations at all N symbols, but for what was decided before: [B, N]."""
    symbol_BN, position_BN = sequences.symbol_BN, sequences.position_BN
    rate_BN = None if rate_B is None else rate_B[:, None].expand(position_BN.shape)
    return observer.static_observation(lm, symbol_BN, x_BND, position_BN, sequences.decision_mask_BN, rate_BN)


def _coupled_noise(
    decision_mask_BT: Tensor, sampling: Sampling, given: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Noise given, or drawn for the whole batch, so that it does not depend on who holds which rows: [.., B, T]."""
    device, group = decision_mask_BT.device, current_group() if given is None else SINGLE_PROCESS
    place = device if generator is None else generator.device
    if given is None:
        samples = () if sampling.num_samples is None else (sampling.num_samples,)
        rows, steps = decision_mask_BT.shape
        noise = torch.rand(*samples, rows * group.size, steps, device=place, generator=generator)
    else:
        noise = given.to(place)
    if sampling.couple is not None:
        noise = sampling.couple(noise, group.gather(decision_mask_BT).to(place), generator)
    return to_device_async(noise if given is not None else local_rows(noise), device)


def _decide(agent: BoundaryAgent, decisions: TensorDictBase, noise: Tensor, sampling: Sampling) -> TensorDict:
    """What the agent answers at T symbols, and the noise that decided; batch size [.., B, T]."""
    decision_mask_BT = decisions[keys.DECISION_MASK]
    proposed = None if sampling.propose is None else sampling.propose(noise)
    if proposed is None:
        drawn = agent.draw(decisions, noise)
    else:
        forced_BT = (decisions[keys.POSITION] == 0).long()
        drawn = agent.score(decisions, torch.where(decision_mask_BT, proposed, forced_BT))
    if sampling.relax is not None:
        drawn.set(keys.BOUNDARY, sampling.relax(drawn, decision_mask_BT, noise))
    if sampling.reward_only:
        first = torch.zeros_like(drawn[keys.ACTION_LOG_PROB])
        first[0] = 1.0
        drawn.set(keys.SAMPLE_WEIGHT, first)
    return drawn.set(keys.NOISE, noise)


def _predict(
    lm: UNet,
    x_BTD: Tensor,
    sequences: _Sequences,
    drawn: TensorDictBase,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    """Log-likelihoods of the next symbols under the drawn boundaries, by name under ``next``; [.., B, T] each."""
    read_BLD, valid_BT = x_BTD[:, : sequences.known], sequences.valid_BT
    action, boundary = drawn[keys.ACTION][..., : sequences.known], drawn.get(keys.BOUNDARY, None)
    if sampling.reward_only:
        y = _read_out(lm, read_BLD, action[:1])
        with torch.no_grad():
            further = _log_likelihood(lm, _read_out(lm, read_BLD, action[1:]), sequences)
        late = torch.cat([_log_likelihood(lm, y, sequences), further])
    else:
        y = _read_out(lm, read_BLD, action, None if boundary is None else boundary[..., : sequences.known])
        late = _log_likelihood(lm, y, sequences)
    predicted = {keys.LOG_LIKELIHOOD[1]: late.where(valid_BT, 0.0)}
    if sampling.early_exit:
        early_BT = lm.early_log_prob(x_BTD, sequences.target_BT)
        predicted[keys.LOG_LIKELIHOOD_EARLY[1]] = early_BT.where(valid_BT, 0.0).expand(late.shape)
    if sampling.relaxations is not None:
        soft = sampling.relaxations(drawn, sequences.decision_mask_BN[:, :-1], drawn[keys.NOISE], generator)
        read_BLD, soft = read_BLD.detach(), soft[..., : sequences.known, :]
        each = [_log_likelihood(lm, _read_out(lm, read_BLD, action, s), sequences) for s in soft.unbind(-1)]
        predicted[keys.LOG_LIKELIHOOD_RELAXED[1]] = torch.stack(each, -1).where(valid_BT.unsqueeze(-1), 0.0)
    if not lm.config.direct and 0 < lm.config.horizon < sequences.symbol_BN.shape[1]:
        # Samples that only earn a reward have none, and weigh nothing.
        total, count = _direct(lm, y, sequences)
        padding = (0, 0, 0, 0, 0, len(action) - len(total)) if sampling.reward_only else (0, 0)
        predicted |= {
            keys.LOG_LIKELIHOOD_DIRECT[1]: F.pad(total, padding),
            keys.DIRECT_COUNT[1]: F.pad(count, padding),
        }
    return predicted


def _read_out(lm: UNet, x_BTD: Tensor, action: Tensor, boundary: Tensor | None = None) -> Tensor:
    """What the output heads read, of all samples: actions [.., B, T] -> [.., B, T, D]."""
    samples = action.shape[:-2]
    flat = None if boundary is None else boundary.flatten(0, -2)
    y = lm.decode_hidden(x_BTD.expand(*samples, *x_BTD.shape).flatten(0, -3), action.flatten(0, -2), flat)
    return y.view(*action.shape, -1)


def _log_likelihood(lm: UNet, y: Tensor, sequences: _Sequences) -> Tensor:
    """Of all samples: [.., B, T, D] -> [.., B, T].

    ``log p(x_{i+1} | x_<=i, a_<=i)``, or with ``model.direct`` ``log p(x_{i+1} | x_<L, a_<L)`` of all that follows the
    L known symbols, and 0 before.
    """
    if not lm.config.direct:
        target_BT = sequences.target_BT
        return lm.log_prob(y, target_BT.expand(*y.shape[:-3], *target_BT.shape))
    last_B, target_BH = sequences.symbol_BN[:, sequences.known - 1], sequences.symbol_BN[:, sequences.known :]
    return F.pad(_ahead(lm, y[..., -1, :], last_B, target_BH), (sequences.known - 1, 0))


def _ahead(lm: UNet, y: Tensor, symbol: Tensor, target: Tensor) -> Tensor:
    """The direct head's log-likelihoods of the H symbols after some: [K, .., D], [..], [.., H] -> [K, .., H]."""
    samples = y.shape[: y.dim() - 1 - (target.dim() - 1 - len(lm.codec.symbol_shape))]
    return lm.codec.log_prob_horizon(
        lm.direct(y), symbol.expand(*samples, *symbol.shape), target.expand(*samples, *target.shape)
    )


def _direct(lm: UNet, y: Tensor, sequences: _Sequences) -> tuple[Tensor, Tensor]:
    """The direct head's log-likelihood of the next H symbols, and their number: [.., B, T, D] -> [.., B, T] each.

    Both are 0 where the sequence has no H symbols more.
    """
    valid_BT = sequences.valid_BT
    steps = valid_BT.shape[1] - lm.config.horizon + 1
    target_BSH = sequences.target_BT.unfold(1, lm.config.horizon, 1).movedim(-1, 2)
    whole_BS = valid_BT[:, -steps:]
    log_prob = _ahead(lm, y[..., :steps, :], sequences.symbol_BN[:, :steps], target_BSH).sum(-1)
    loss_mask = lm.codec.loss_mask(target_BSH)
    count_BS = whole_BS * (lm.config.horizon if loss_mask is None else loss_mask.sum(-1))
    rest = (0, valid_BT.shape[1] - steps)
    count = F.pad(count_BS, rest).expand(y.shape[:-1])
    return F.pad(log_prob.where(whole_BS, 0.0), rest), count


def _record(
    observer: Observer,
    static_observation: TensorDictBase,
    sequences: _Sequences,
    drawn: TensorDictBase,
    predicted: dict[str, Tensor],
) -> TensorDictBase:
    """Observations, decisions and what came of them, as TorchRL records an episode; batch size [.., B, T]."""
    action = drawn[keys.ACTION]
    observed = [name for name in OBSERVED if name in predicted]
    observation = static_observation.expand(*action.shape[:-2], *static_observation.shape).clone(recurse=False)
    observation.update(observer.past(F.pad(action, (0, 1))))
    # At symbol i + 1 the likelihoods are that symbol's; the first is given.
    observation.update({name: F.pad(predicted[name], (1, 0)) for name in observed})
    position_T = sequences.position_BN[:, 1:]
    done = (position_T >= sequences.length_B[:, None] - 1).expand(action.shape).unsqueeze(-1)
    following = observation[..., 1:].update({"done": done, "terminated": done})
    if len(observed) == len(OBSERVED):
        late, early = (predicted[name] for name in OBSERVED)
        following.set("reward", (late - early).detach().unsqueeze(-1))
    following.update({name: x for name, x in predicted.items() if name not in OBSERVED})
    root = observation[..., :-1].detach().update(drawn)
    root.update({"done": torch.zeros_like(done), "terminated": torch.zeros_like(done)})
    return root.set("next", following)


def rescore(lm: UNet, agent: BoundaryAgent, tensordict: TensorDictBase) -> TensorDictBase:
    """Score a rollout's actions again, after model or agent have changed: encoder and policy only.

    Args:
        lm: the model.
        agent: the policy.
        tensordict: a detached rollout.

    Returns:
        The rollout with fresh encodings and agent outputs, which carry gradients, and the earlier log-probabilities
        as ``old_log_prob``. Likelihoods and whatever an estimator wrote stay.
    """
    one_sample = _one_sample(tensordict)
    observer = Observer(0, keys.EARLY_ENTROPY in tensordict, keys.TARGET_RATE in tensordict)
    observation = observer.static_observation(
        lm,
        one_sample[keys.SYMBOL],
        lm.encode(one_sample[keys.SYMBOL]),
        one_sample[keys.POSITION],
        one_sample[keys.DECISION_MASK],
        one_sample.get(keys.TARGET_RATE, None),
    )
    fresh = observation.detach().expand(tensordict.shape)
    again = _score_again(agent, observation, tensordict)
    return again.update(fresh.select(keys.ENCODING, keys.EARLY_ENTROPY, strict=False))


def rescore_head(agent: BoundaryAgent, tensordict: TensorDictBase) -> TensorDictBase:
    """Score a rollout's actions again, after the agent alone has changed: it reads the stored encodings.

    Where the model has not changed either this is ``rescore``, without a pass through the encoder and without a
    gradient into it. See ``head_epochs`` of ``tokenv.estimators.surrogates.ClippedSurrogate``.

    Args:
        agent: the policy.
        tensordict: a detached rollout.

    Returns:
        The rollout with fresh agent outputs, which carry gradients into the agent alone, and the earlier
        log-probabilities as ``old_log_prob``. Everything else stays.
    """
    seen = (
        *(keys.SYMBOL, keys.ENCODING, keys.POSITION, keys.DECISION_MASK),
        *(keys.EARLY_ENTROPY, keys.TARGET_RATE),
    )
    return _score_again(agent, _one_sample(tensordict).select(*seen, strict=False).detach(), tensordict)


def _one_sample(tensordict: TensorDictBase) -> TensorDictBase:
    """Of the samples of a text, which share its observations, the first: [.., B, T] -> [B, T]."""
    return tensordict[(0,) * (tensordict.dim() - 2)]


def _score_again(agent: BoundaryAgent, observation: TensorDictBase, tensordict: TensorDictBase) -> TensorDictBase:
    again = tensordict.clone(recurse=False)
    if keys.OLD_LOG_PROB not in again:
        again.set(keys.OLD_LOG_PROB, again[keys.ACTION_LOG_PROB].detach())
    return again.update(agent.score(observation, tensordict[keys.ACTION]))
