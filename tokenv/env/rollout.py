"""Whole episodes in one pass: encode once, draw all boundaries, run middle and decoder once.

The result is what stepping through ``TokenizationEnv`` returns for the same noise (the central test of the project),
but it carries gradients and costs an ordinary forward pass. The four stages are: where decisions are made
(``Sequences``), what is decided (``_decide``), what is then predicted (``_predict``), and the record (``_record``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Generator, Tensor

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent, Sampling, check_causal
from tokenv.core.rewards import relative_log_likelihood
from tokenv.env.observation import Observer
from tokenv.env.random_inputs import couple_noise, rate_or_mean, resolve_target_rate
from tokenv.lm.unet import UNet

ONE_SAMPLE = Sampling()
# of the symbol which is observed
OBSERVED_LIKELIHOODS = (keys.LOG_LIKELIHOOD[1], keys.LOG_LIKELIHOOD_EARLY[1])
AUXILIARY = (keys.LOG_LIKELIHOOD_AUXILIARY[1], keys.AUXILIARY_COUNT[1])


@dataclass(frozen=True)
class Sequences:
    """Sequences, and the positions at which decisions are made.

    Attributes:
        symbol_BN: symbols.
        length_B: symbols of each sequence; the rest of a row is padding.
        position_BN: 0 to N - 1 in every row.
        valid_BT: whether the prediction made at i is of a symbol, not of padding.
        decision_mask_BN: False at the first symbol, and where the next one is not predicted from this one.
        known: leading symbols which the decoder reads: T, or fewer if the codec has trailing symbols.
    """

    symbol_BN: Tensor
    length_B: Tensor
    position_BN: Tensor
    valid_BT: Tensor
    decision_mask_BN: Tensor
    known: int

    @classmethod
    def of(cls, lm: UNet, symbol_BN: Tensor, length_B: Tensor | None) -> Sequences:
        """Compute positions and masks; raise a ValueError if the sequences do not fit trailing symbols."""
        batch, length = symbol_BN.shape[:2]
        trailing = lm.codec.trailing
        if trailing and (length <= trailing or length_B is not None):
            raise ValueError(
                f"sequences of {length} symbols: expected more than the {trailing} last ones, which the codec predicts "
                "at once, and all of one length"
            )
        position_N = torch.arange(length, device=symbol_BN.device)
        if length_B is None:
            length_B = torch.full((batch,), length, device=symbol_BN.device)
        valid_BT = position_N[1:] < length_B[:, None]
        known = length - max(trailing, 1)
        decision_mask_BN = F.pad(valid_BT, (0, 1)) & (position_N > 0) & (position_N < known)
        return cls(
            symbol_BN,
            length_B,
            position_N.expand(batch, -1),
            valid_BT,
            decision_mask_BN,
            known,
        )


def rollout(
    lm: UNet,
    agent: BoundaryAgent,
    symbol_BN: Tensor,
    sampling: Sampling = ONE_SAMPLE,
    *,
    noise: Tensor | None = None,
    length_B: Tensor | None = None,
    generator: Generator | None = None,
    observer: Observer | None = None,
    rate: float | Tensor | None = None,
) -> TensorDictBase:
    """Let an agent draw the boundaries of whole sequences, and compute its rewards.

    Args:
        lm: model.
        agent: agent which draws the boundaries.
        symbol_BN: sequences, [B, N, *symbol_shape].
        sampling: requirements of an estimator: ``estimator.sampling``.
        noise: uniform numbers which decide the actions, [B, T] or [K, B, T]; 0 forces a boundary, 1 forces none. None
            draws them in (0, 1), for the whole batch of which the sequences may be some rows
            (``tokenv.core.distributed``).
        length_B: symbols of each sequence if they differ; the rest of a row is padding.
        generator: random generator of the noise, which is drawn on its device; None for torch's own.
        observer: builder of the observations; None for one of what the agent reads.
        rate: target rate, one number or [B], for an agent which reads it; None draws one for each sequence, shared by
            its samples, from the agent's range, after the noise.

    Returns:
        A TensorDict of batch size [B, T] or [K, B, T], T = N - 1. Step i holds the observation at symbol i, the noise,
        the agent's outputs, and under ``next`` the observation at symbol i + 1 with ``log_likelihood`` of that symbol
        (nats); unless ``sampling`` requires no early exit, also ``log_likelihood_early`` and ``reward``, the difference
        (eq. 15). Gradients flow through the agent's outputs and the ``next`` log-likelihoods; all else is detached.
        Decision mask, likelihoods and rewards are 0 in the padding, and ``done`` is True from each sequence's end on.
        If the codec has trailing symbols, their ``log_likelihood`` is the auxiliary head's at the end of what is known
        before them, and that of the known ones is 0; the early exit still predicts one symbol after the other.

    Raises:
        ValueError: the agent would look ahead; trailing symbols with sequences too short or of several lengths.
    """
    check_causal(agent, history_given=lm.codec.trailing > 0)
    observer = (observer or Observer.of(agent)).extended_for(agent)
    if sampling.teacher is not None:
        observer = observer.extended_for(sampling.teacher)
    sequences = Sequences.of(lm, symbol_BN, length_B)
    noise = couple_noise(
        sequences.decision_mask_BN[:, :-1],
        sampling,
        noise,
        generator,
    )
    rate_B = resolve_target_rate(
        observer,
        agent.rates,
        rate,
        len(symbol_BN),
        symbol_BN.device,
        generator,
    )
    x_BND = lm.encode(symbol_BN)
    observation = _observe(lm, observer, sequences, x_BND, rate_B)
    drawn = _decide(agent, observation[:, :-1], noise, sampling)
    predicted = _predict(
        lm,
        x_BND[:, :-1],
        sequences,
        drawn,
        sampling,
        generator,
    )
    return _record(observer, observation, sequences, drawn, predicted)


def observe(
    lm: UNet, agent: BoundaryAgent, symbol_BN: Tensor, rate: float | Tensor | None = None
) -> TensorDictBase:
    """Return the input of ``agent.draw`` for whole sequences, batch size [B, T], T = N - 1: one encoder pass.

    See ``rollout`` for the arguments; ``rate=None`` is the mean of the agent's range, if it has one.
    """
    observer = Observer.of(agent)
    rate = rate_or_mean(rate, agent.rates)
    rate_B = resolve_target_rate(
        observer,
        agent.rates,
        rate,
        len(symbol_BN),
        symbol_BN.device,
    )
    return _observe(
        lm,
        observer,
        Sequences.of(lm, symbol_BN, None),
        lm.encode(symbol_BN),
        rate_B,
    )[:, :-1]


def _observe(
    lm: UNet,
    observer: Observer,
    sequences: Sequences,
    x_BND: Tensor,
    rate_B: Tensor | None,
) -> TensorDict:
    """Return the observations at all N symbols without those of earlier boundaries, batch size [B, N]."""
    position_BN = sequences.position_BN
    if rate_B is None:
        rate_BN = None
    else:
        rate_BN = rate_B[:, None].expand(position_BN.shape)
    at = (sequences.symbol_BN, x_BND, position_BN, sequences.decision_mask_BN, rate_BN)
    return observer.static_observation(lm, *at)


def _decide(
    agent: BoundaryAgent, observation: TensorDictBase, noise: Tensor, sampling: Sampling
) -> TensorDict:
    """Return the agent's outputs at T symbols, and the noise; batch size [.., B, T]."""
    decision_mask_BT = observation[keys.DECISION_MASK]
    seen = observation
    if sampling.detach_encoder:
        seen = observation.detach()
    proposed = None
    if sampling.propose is not None:
        proposed = sampling.propose(noise)
    if proposed is None:
        drawn = agent.draw(seen, noise)
    else:
        is_first_BT = observation[keys.POSITION] == 0
        proposed = torch.where(decision_mask_BT, proposed, is_first_BT.long())
        drawn = agent.score(seen, proposed)
    if sampling.teacher is not None:
        with torch.no_grad():
            demonstrated = sampling.teacher.draw(observation, noise)[keys.ACTION]
        drawn.set(
            keys.DEMONSTRATION_LOG_PROB,
            agent.score(observation, demonstrated)[keys.ACTION_LOG_PROB],
        )
    if sampling.relax is not None:
        drawn.set(keys.BOUNDARY, sampling.relax(drawn, decision_mask_BT, noise))
    if sampling.reward_only:
        weight = torch.zeros_like(drawn[keys.ACTION_LOG_PROB])
        weight[0] = 1.0
        drawn.set(keys.SAMPLE_WEIGHT, weight)
    return drawn.set(keys.NOISE, noise)


def _predict(
    lm: UNet,
    x_BTD: Tensor,
    sequences: Sequences,
    drawn: TensorDict,
    sampling: Sampling,
    generator: Generator | None,
) -> dict[str, Tensor]:
    """Return the log-likelihoods of the next symbols under the drawn boundaries, by name; [.., B, T] each."""
    known = sequences.known
    valid_BT = sequences.valid_BT
    symbol_BN = sequences.symbol_BN
    x_BLD = x_BTD[:, :known]
    action = drawn[keys.ACTION][..., :known]
    boundary = drawn.get(keys.BOUNDARY, None)
    if sampling.reward_only:
        y = lm.decode_samples(x_BLD, action[:1])
        with torch.no_grad():
            others = lm.sequence_log_prob(lm.decode_samples(x_BLD, action[1:]), symbol_BN)
        log_prob = torch.cat([lm.sequence_log_prob(y, symbol_BN), others])
    else:
        if boundary is not None:
            boundary = boundary[..., :known]
        y = lm.decode_samples(x_BLD, action, boundary)
        log_prob = lm.sequence_log_prob(y, symbol_BN)
    predicted = {keys.LOG_LIKELIHOOD[1]: log_prob.where(valid_BT, 0.0)}
    if sampling.early_exit:
        early_BT = lm.early_log_prob(x_BTD, symbol_BN[:, 1:]).where(valid_BT, 0.0)
        predicted[keys.LOG_LIKELIHOOD_EARLY[1]] = early_BT.expand(log_prob.shape)
    if sampling.relaxations is not None:
        relaxed = sampling.relaxations(
            drawn,
            sequences.decision_mask_BN[:, :-1],
            drawn[keys.NOISE],
            generator,
        )
        each = []
        # Counts from the drawn boundaries would jump between their values, where relaxations must be continuous.
        every = torch.ones_like(action)
        for boundary in relaxed[..., :known, :].unbind(-1):
            y_relaxed = lm.decode_samples(x_BLD.detach(), every, boundary)
            each.append(lm.sequence_log_prob(y_relaxed, symbol_BN))
        log_prob_relaxed = torch.stack(each, -1)
        predicted[keys.LOG_LIKELIHOOD_RELAXED[1]] = log_prob_relaxed.where(
            valid_BT.unsqueeze(-1), 0.0
        )
    auxiliary = None
    if lm.auxiliary_head is not None and not lm.codec.trailing:
        auxiliary = lm.codec.auxiliary_log_prob(lm.auxiliary_head, y, symbol_BN, valid_BT)
    if auxiliary is not None:
        # Samples which only serve rewards have no such likelihood, and no weight.
        padding = [0, 0]
        if sampling.reward_only:
            padding += [0, 0, 0, len(action) - 1]
        for name, x in zip(AUXILIARY, auxiliary, strict=True):
            predicted[name] = F.pad(x, padding)
    return predicted


def _record(
    observer: Observer,
    static: TensorDict,
    sequences: Sequences,
    drawn: TensorDict,
    predicted: dict[str, Tensor],
) -> TensorDictBase:
    """Return observations, decisions and rewards as TorchRL records an episode; batch size [.., B, T]."""
    action = drawn[keys.ACTION]
    observed = [name for name in OBSERVED_LIKELIHOODS if name in predicted]
    observation = static.detach().expand(*action.shape[:-2], *static.shape)
    observation = observation.clone(recurse=False)
    observation.update(observer.history(F.pad(action, (0, 1))))
    # The likelihoods at symbol i + 1 are those of that symbol; the first symbol is given.
    observation.update({name: F.pad(predicted[name], (1, 0)) for name in observed})
    last_B1 = sequences.length_B[:, None] - 1
    done = sequences.position_BN[:, 1:] >= last_B1
    done = done.expand(action.shape).unsqueeze(-1)
    following = observation[..., 1:].update({"done": done, "terminated": done})
    if len(observed) == len(OBSERVED_LIKELIHOODS):
        log_prob, early = (predicted[name] for name in OBSERVED_LIKELIHOODS)
        following.set("reward", relative_log_likelihood(log_prob, early))
    following.update({name: x for name, x in predicted.items() if name not in OBSERVED_LIKELIHOODS})
    root = observation[..., :-1].detach().update(drawn)
    root.update({"done": torch.zeros_like(done), "terminated": torch.zeros_like(done)})
    return root.set("next", following)
