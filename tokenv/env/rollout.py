"""Whole episodes in one pass: encode once, draw all boundaries, one pass through middle and decoder.

The result is what stepping through ``TokenizationEnv`` would return for the same noise (the project's central test),
but it carries gradients and costs what an ordinary forward pass costs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.lm.unet import UNet


class DrawsBoundaries(Protocol):
    """What a rollout asks of an agent; see ``tokenv.agents.base.Agent``."""

    in_keys: list[str]
    window: int

    @property
    def autoregressive(self) -> bool:
        """Whether a decision depends on earlier ones."""

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences."""

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` gives, for boundaries that are given."""


def _at_all_symbols(
    symbol_BN: Tensor,
    encoding_BND: Tensor,
    decision_mask_BN: Tensor,
    action: Tensor,
    likelihoods: dict[str, Tensor],
    window: int,
    entropy_BN: Tensor | None,
) -> TensorDict:
    """Observations at all N symbols, given the T = N - 1 actions and likelihoods; batch size [.., N]."""
    position_N = torch.arange(symbol_BN.shape[1], device=symbol_BN.device)
    tensors = {
        keys.SYMBOL: symbol_BN,
        keys.ENCODING: encoding_BND.detach(),
        keys.POSITION: position_N.expand(decision_mask_BN.shape),
        keys.DECISION_MASK: decision_mask_BN,
    }
    if entropy_BN is not None:
        tensors[keys.EARLY_ENTROPY] = entropy_BN
    samples = action.shape[:-2]
    observation = {name: x.expand(*samples, *x.shape) for name, x in tensors.items()}
    action = F.pad(action, (0, 1))
    length = action.shape[-1]
    observation[keys.TOKEN_COUNT] = action.cumsum(-1) - action
    earlier = [F.pad(action, (j, 0))[..., :length] for j in range(1, window + 1)]
    observation[keys.LAST_ACTIONS] = (
        torch.stack(earlier, -1).float() if earlier else action.new_zeros((*action.shape, 0)).float()
    )
    observation |= {name: F.pad(x, (1, 0)) for name, x in likelihoods.items()}
    return TensorDict(observation, batch_size=action.shape)


def _read_out(lm: UNet, x_BTD: Tensor, action: Tensor, boundary: Tensor | None = None) -> Tensor:
    """What the output heads read, of all samples: actions [.., B, T] -> [.., B, T, D]."""
    samples = action.shape[:-2]
    flat = None if boundary is None else boundary.flatten(0, -2)
    y = lm.read_out(x_BTD.expand(*samples, *x_BTD.shape).flatten(0, -3), action.flatten(0, -2), flat)
    return y.view(*action.shape, -1)


def _log_likelihood(lm: UNet, y: Tensor, target_BT: Tensor) -> Tensor:
    """Log p(x_{i+1} | x_<=i, a_<=i) of all samples: [.., B, T, D] -> [.., B, T]."""
    return lm.codec.log_prob(lm.head(y), target_BT.expand(*y.shape[:-3], *target_BT.shape))


def _direct(lm: UNet, y: Tensor, symbol_BN: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The direct head's log-likelihood of the next H symbols, and their number: [.., B, T, D] -> [.., B, T] each.

    Both are 0 where the sequence has no H symbols more.
    """
    steps = valid_BT.shape[1] - lm.config.horizon + 1
    target_BSH = symbol_BN[:, 1:].unfold(1, lm.config.horizon, 1).movedim(-1, 2)
    whole_BS = valid_BT[:, -steps:]
    samples = y.shape[:-3]
    symbol_BS = symbol_BN[:, :steps]
    log_prob = lm.codec.log_prob_ahead(
        lm.direct(y[..., :steps, :]),
        symbol_BS.expand(*samples, *symbol_BS.shape),
        target_BSH.expand(*samples, *target_BSH.shape),
    ).sum(-1)
    counted = lm.codec.counted(target_BSH)
    count_BS = whole_BS * (lm.config.horizon if counted is None else counted.sum(-1))
    rest = (0, valid_BT.shape[1] - steps)
    count = F.pad(count_BS, rest).expand(y.shape[:-1])
    return F.pad(log_prob.where(whole_BS, 0.0), rest), count


def rollout(
    lm: UNet,
    agent: DrawsBoundaries,
    symbol_BN: Tensor,
    *,
    window: int | None = None,
    early_entropy: bool = False,
    noise: Tensor | None = None,
    num_samples: int | None = None,
    length_B: Tensor | None = None,
    generator: torch.Generator | None = None,
    reward_only: bool = False,
    independent: bool = False,
    couple: Callable[..., Tensor] | None = None,
    propose: Callable[..., Tensor | None] | None = None,
    relax: Callable[..., Tensor] | None = None,
    relaxations: Callable[..., Tensor] | None = None,
) -> TensorDictBase:
    """Let an agent draw the boundaries of whole sequences, and reward it.

    The options from ``reward_only`` on are an estimator's wishes: ``rollout(..., **estimator.rollout_options())``.

    Args:
        lm: the model.
        agent: draws the boundaries.
        symbol_BN: the sequences, [B, N, *symbol_shape].
        window: how many earlier actions the observations hold; None for as many as the agent reads.
        early_entropy: whether the observations hold ``early_entropy``; they do in any case if the agent reads it.
        noise: uniform numbers in (0, 1) that decide the actions, [B, T] or [K, B, T]; drawn where not given. 0
            forces a boundary, 1 forces none.
        num_samples: K samples of the boundaries of every sequence share one encoder pass and come as a leading
            dimension; None gives one sample and no such dimension.
        length_B: symbols of each sequence where they differ; what follows is padding.
        generator: of the noise, on the device of the sequences.
        reward_only: samples after the first are decoded without gradient, and weigh nothing (``sample_weight``) in
            the language model's loss.
        independent: refuse an agent whose decisions depend on earlier ones.
        couple: makes the samples' noise dependent; for the four hooks see ``tokenv.estimators.base.Part``.
        propose: draws the actions instead of the agent.
        relax: makes the boundaries that the pooling reads differentiable.
        relaxations: further, relaxed boundaries whose likelihoods are wanted.

    Returns:
        A TensorDict of batch size [B, T] or [K, B, T], T = N - 1. Step i holds the observation at symbol i, the
        noise, the agent's outputs, and under ``next`` the observation at symbol i + 1 with ``log_likelihood`` and
        ``log_likelihood_early`` of that symbol (nats), and their difference as ``reward`` (eq. 15).
        Gradients flow through the agent's outputs and through the ``next`` log-likelihoods; rewards and
        everything else are detached. Decision mask, likelihoods and rewards are zero in the padding, and ``done``
        holds from each sequence's own end on.

    Raises:
        ValueError: the estimator is not valid for this agent or model.
    """
    if independent and agent.autoregressive:
        raise ValueError(
            f"this estimator is biased for policies whose decisions depend on earlier ones, and this "
            f"{type(agent).__name__} agent's do: give the learned agent window=0, or choose an estimator that is "
            "valid for every policy, such as rloo or branch"
        )
    if relaxations is not None and lm.config.pooling != "select":
        raise ValueError(f"model.pooling = {lm.config.pooling!r}: this estimator's relaxed passes need 'select'")
    batch, length = symbol_BN.shape[:2]
    position_N = torch.arange(length, device=symbol_BN.device)
    if length_B is None:
        length_B = torch.full((batch,), length, device=symbol_BN.device)
    valid_BT = position_N[1:] < length_B[:, None]  # the prediction made at i is of a symbol, not of padding
    # Nobody decides at the first symbol, nor where nothing is left to predict.
    decision_mask_BN = F.pad(valid_BT, (0, 1)) & (position_N > 0)
    decision_mask_BT = decision_mask_BN[:, :-1]
    if noise is None:
        samples = () if num_samples is None else (num_samples,)
        noise = torch.rand(*samples, batch, length - 1, device=symbol_BN.device, generator=generator)
    if couple is not None:
        noise = couple(noise, decision_mask_BT, generator)

    encoding_BND = lm.encode(symbol_BN)
    x_BTD = encoding_BND[:, :-1]
    decisions = TensorDict(
        {
            keys.SYMBOL: symbol_BN[:, :-1],
            keys.ENCODING: x_BTD,
            keys.POSITION: position_N[:-1].expand(batch, -1),
            keys.DECISION_MASK: decision_mask_BT,
        },
        batch_size=(batch, length - 1),
    )
    entropy_BN = None
    if early_entropy or keys.EARLY_ENTROPY in agent.in_keys:
        entropy_BN = lm.early_entropy(encoding_BND)
        decisions.set(keys.EARLY_ENTROPY, entropy_BN[:, :-1])
    proposed = None if propose is None else propose(noise)
    if proposed is None:
        drawn = agent.draw(decisions, noise)
    else:
        drawn = agent.score(decisions, torch.where(decision_mask_BT, proposed, (position_N[:-1] == 0).long()))
    action = drawn[keys.ACTION]
    if relax is not None:
        drawn.set(keys.BOUNDARY, relax(drawn, decision_mask_BT, noise))
    boundary = drawn.get(keys.BOUNDARY, None)

    target_BT = symbol_BN[:, 1:]
    y = _read_out(lm, x_BTD, action[:1] if reward_only else action, None if reward_only else boundary)
    late = _log_likelihood(lm, y, target_BT)
    if reward_only:
        with torch.no_grad():
            further = _log_likelihood(lm, _read_out(lm, x_BTD, action[1:]), target_BT)
        late = torch.cat([late, further])
    late = late.where(valid_BT, 0.0)
    early = lm.codec.log_prob(lm.early_exit(x_BTD), target_BT).where(valid_BT, 0.0).expand(action.shape)
    likelihoods = {keys.LOG_LIKELIHOOD[1]: late, keys.LOG_LIKELIHOOD_EARLY[1]: early}
    more: dict[str, Any] = {}
    if relaxations is not None:
        soft = relaxations(drawn, decision_mask_BT, noise, generator)
        each = [_log_likelihood(lm, _read_out(lm, x_BTD.detach(), action, s), target_BT) for s in soft.unbind(-1)]
        more[keys.LOG_LIKELIHOOD_RELAXED[1]] = torch.stack(each, -1).where(valid_BT.unsqueeze(-1), 0.0)
    if 0 < lm.config.horizon < length:
        # Samples that only earn a reward have none, and weigh nothing.
        total, count = _direct(lm, y, symbol_BN, valid_BT)
        padding = (0, 0, 0, 0, 0, len(action) - len(total)) if reward_only else (0, 0)
        more |= {keys.LOG_LIKELIHOOD_DIRECT[1]: F.pad(total, padding), keys.DIRECT_COUNT[1]: F.pad(count, padding)}

    window = agent.window if window is None else window
    observation = _at_all_symbols(symbol_BN, encoding_BND, decision_mask_BN, action, likelihoods, window, entropy_BN)
    done = (position_N[1:] >= length_B[:, None] - 1).expand(action.shape).unsqueeze(-1)
    following = observation[..., 1:].update(
        {"reward": (late - early).detach().unsqueeze(-1), "done": done, "terminated": done} | more
    )
    root = observation[..., :-1].detach().update(drawn)
    root.update({keys.NOISE: noise, "done": torch.zeros_like(done), "terminated": torch.zeros_like(done)})
    if reward_only:
        first = torch.zeros_like(late)
        first[0] = 1.0
        root.set(keys.SAMPLE_WEIGHT, first)
    return root.set("next", following)


def rescore(lm: UNet, agent: DrawsBoundaries, tensordict: TensorDictBase) -> TensorDictBase:
    """Score a rollout's actions again, after model or agent have changed: encoder and policy only.

    Args:
        lm: the model.
        agent: the policy.
        tensordict: a detached rollout.

    Returns:
        The rollout with fresh encodings and agent outputs, which carry gradients, and the earlier log-probabilities
        as ``old_log_prob``. Likelihoods and whatever an estimator wrote stay.
    """
    again = tensordict.clone(recurse=False)
    if keys.OLD_LOG_PROB not in again:
        again.set(keys.OLD_LOG_PROB, again[keys.ACTION_LOG_PROB].detach())
    one_sample = tensordict[(0,) * (tensordict.dim() - 2)]
    encoding_BTD = lm.encode(one_sample[keys.SYMBOL])
    observation = one_sample.select(keys.SYMBOL, keys.POSITION, keys.DECISION_MASK).set(keys.ENCODING, encoding_BTD)
    if keys.EARLY_ENTROPY in tensordict:
        observation.set(keys.EARLY_ENTROPY, lm.early_entropy(encoding_BTD))
        again.set(keys.EARLY_ENTROPY, observation[keys.EARLY_ENTROPY].expand(tensordict.shape))
    again.update(agent.score(observation, tensordict[keys.ACTION]))
    return again.set(keys.ENCODING, encoding_BTD.detach().expand(*tensordict.shape, -1))
