"""Sequences, noise and a scripted agent for tests of episodes."""

import torch
from tensordict import TensorDict

from tokenv.agents.base import Agent, forced_action
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet


def small_lm():
    return UNet(UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=4))


def symbols_of_row(length, rows, row=None):
    """Return twelve sequences, or the successive ones of one of ``rows`` rows."""
    symbol_BN = torch.randint(256, (12, length), generator=torch.Generator().manual_seed(0))
    return symbol_BN if row is None else symbol_BN[row::rows]


def seeded_source(length, seed):
    """Return fifty sequences which depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorSource(torch.randint(256, (50, length), generator=generator))


def forced_first(mask):
    """Return a mask as actions, the first of which are boundaries."""
    action_BT = torch.tensor(mask)
    action_BT[:, 0] = 1
    return action_BT


def random_noise(*shape):
    return torch.rand(shape, dtype=torch.float64)


class Scripted(Agent):
    """Agent which draws a boundary where the noise is above one half."""

    in_keys = [keys.POSITION, keys.DECISION_MASK, keys.NOISE]

    def _act(self, observation, noise):
        action = torch.where(
            observation[keys.DECISION_MASK], (noise > 0.5).long(), forced_action(observation)
        )
        zero = torch.zeros_like(noise)
        return {
            keys.ACTION: action,
            keys.ACTION_LOG_PROB: zero,
            keys.BOUNDARY_PROB: action.to(noise.dtype),
            keys.ENTROPY: zero,
        }

    def draw(self, observation, noise):
        return TensorDict(self._act(observation, noise), batch_size=noise.shape)

    def forward(self, tensordict):
        return tensordict.update(self._act(tensordict, tensordict[keys.NOISE]))


class Noise(torch.nn.Module):
    """Module which passes column i of given noise to the agent at position i."""

    in_keys = [keys.POSITION]
    out_keys = [keys.NOISE]

    def __init__(self, noise_BT):
        super().__init__()
        self.noise_BT = noise_BT

    def forward(self, tensordict):
        return tensordict.set(
            keys.NOISE, self.noise_BT.gather(1, tensordict[keys.POSITION][:, None])[:, 0]
        )
