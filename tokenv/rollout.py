"""Whole episodes in one pass: encode once, draw all boundaries, one pass through middle and decoder.

The result is what stepping through ``TokenizationEnv`` would return for the same noise (the project's central test),
but it carries gradients and costs what an ordinary forward pass costs.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.lm.unet import UNet


class DrawsBoundaries(Protocol):
    """What a rollout asks of an agent; see ``agents.base.Agent``."""

    window: int

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences."""


def _at_all_symbols(
    symbol_BN: Tensor,
    encoding_BND: Tensor,
    decision_mask_BN: Tensor,
    action: Tensor,
    likelihoods: dict[str, Tensor],
    window: int,
) -> TensorDict:
    """Observations at all N symbols, given the T = N - 1 actions and likelihoods; batch size [.., N]."""
    position_N = torch.arange(symbol_BN.shape[1], device=symbol_BN.device)
    tensors = {
        keys.SYMBOL: symbol_BN,
        keys.ENCODING: encoding_BND.detach(),
        keys.POSITION: position_N.expand(decision_mask_BN.shape),
        keys.DECISION_MASK: decision_mask_BN,
    }
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


def rollout(
    lm: UNet,
    agent: DrawsBoundaries,
    symbol_BN: Tensor,
    *,
    window: int | None = None,
    noise: Tensor | None = None,
    num_samples: int | None = None,
    length_B: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TensorDictBase:
    """Let an agent draw the boundaries of whole sequences, and reward it.

    Args:
        lm: the model.
        agent: draws the boundaries.
        symbol_BN: the sequences, [B, N, *symbol_shape].
        window: how many earlier actions the observations hold; None for as many as the agent reads.
        noise: uniform numbers in (0, 1) that decide the actions, [B, T] or [K, B, T]; drawn where not given.
        num_samples: K samples of the boundaries of every sequence share one encoder pass and come as a leading
            dimension; None gives one sample and no such dimension.
        length_B: symbols of each sequence where they differ; what follows is padding.
        generator: of the noise, on the device of the sequences.

    Returns:
        A TensorDict of batch size [B, T] or [K, B, T], T = N - 1. Step i holds the observation at symbol i, the
        noise, the agent's outputs, and under ``next`` the observation at symbol i + 1 with ``log_likelihood`` and
        ``log_likelihood_early`` of that symbol (nats), and their difference as ``reward`` (eq. 15).
        Gradients flow through the agent's outputs and through both ``next`` log-likelihoods; rewards and
        everything else are detached. Decision mask, likelihoods and rewards are zero in the padding, and ``done``
        holds from each sequence's own end on.
    """
    batch, length = symbol_BN.shape[:2]
    position_N = torch.arange(length, device=symbol_BN.device)
    if length_B is None:
        length_B = torch.full((batch,), length, device=symbol_BN.device)
    valid_BT = position_N[1:] < length_B[:, None]  # the prediction made at i is of a symbol, not of padding
    # Nobody decides at the first symbol, nor where nothing is left to predict.
    decision_mask_BN = F.pad(valid_BT, (0, 1)) & (position_N > 0)
    if noise is None:
        samples = () if num_samples is None else (num_samples,)
        noise = torch.rand(*samples, batch, length - 1, device=symbol_BN.device, generator=generator)

    encoding_BND = lm.encode(symbol_BN)
    x_BTD = encoding_BND[:, :-1]
    decisions = TensorDict(
        {
            keys.SYMBOL: symbol_BN[:, :-1],
            keys.ENCODING: x_BTD,
            keys.POSITION: position_N[:-1].expand(batch, -1),
            keys.DECISION_MASK: decision_mask_BN[:, :-1],
        },
        batch_size=(batch, length - 1),
    )
    drawn = agent.draw(decisions, noise)
    action = drawn[keys.ACTION]

    samples = action.shape[:-2]
    parameters = lm.decode(x_BTD.expand(*samples, *x_BTD.shape).flatten(0, -3), action.flatten(0, -2))
    target = symbol_BN[:, 1:]
    targets = target.expand(*samples, *target.shape).flatten(0, len(samples))
    late = lm.codec.log_prob(parameters, targets).view(action.shape).where(valid_BT, 0.0)
    early = lm.codec.log_prob(lm.early_exit(x_BTD), target).where(valid_BT, 0.0).expand(action.shape)

    likelihoods = {keys.LOG_LIKELIHOOD[1]: late, keys.LOG_LIKELIHOOD_EARLY[1]: early}
    window = agent.window if window is None else window
    observation = _at_all_symbols(symbol_BN, encoding_BND, decision_mask_BN, action, likelihoods, window)
    done = (position_N[1:] >= length_B[:, None] - 1).expand(action.shape).unsqueeze(-1)
    following = observation[..., 1:].update(
        {"reward": (late - early).detach().unsqueeze(-1), "done": done, "terminated": done}
    )
    root = observation[..., :-1].detach().update(drawn)
    root.update({keys.NOISE: noise, "done": torch.zeros_like(done), "terminated": torch.zeros_like(done)})
    return root.set("next", following)
