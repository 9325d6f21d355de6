"""An agent that another model was trained with, at work on a new one."""

from collections.abc import Callable
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import Agent
from tokenv.agents.step_state import StepState
from tokenv.core import keys


class Reads(Protocol):
    """What reads one symbol after the other."""

    def read(self, symbol_B: Tensor, position_B: Tensor) -> Tensor:
        """[B, *symbol_shape], [B] -> encodings [B, D]."""

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows."""


class Encodes(Protocol):
    """What ``PretrainedAgent`` asks of an encoder, which is a module; see ``tokenv.lm.encoder.Encoder``."""

    def encode(self, symbol_BN: Tensor) -> Tensor:
        """[B, N, *symbol_shape] -> [B, N, D]."""

    def early_entropy(self, x: Tensor) -> Tensor:
        """[.., D] -> [..]."""


class PretrainedAgent(Agent):
    """An agent together with the encoder that it was trained on, so that it knows nothing of the model at work.

    It reads symbols, encodes them itself, and decides as it did for its old model (ReinPatch, arXiv 2603.26097,
    detaches its patcher from the backbone for this end). Its encoder costs one more forward pass of these layers.

    Acting at one position (``forward``) remembers what was read: positions must come in order, as in
    ``tokenv.agents.step_state.StepState``. TorchRL's ``get_dist`` is not there: stored single observations cannot be
    encoded.

    Args:
        agent: what decides.
        encoder: what it reads through; a module.
        reader: makes what encodes symbol by symbol, for a number of rows.
        frozen: whether nothing of it learns; else estimator and rate target train both policy and encoder.
    """

    def __init__(self, agent: Agent, encoder: Encodes, reader: Callable[[int], Reads], *, frozen: bool = True) -> None:
        super().__init__()
        self.agent, self.encoder, self.frozen = agent, encoder, frozen
        own = (keys.SYMBOL, keys.POSITION, keys.DECISION_MASK)
        made = (*own, keys.ENCODING, keys.EARLY_ENTROPY)
        self.in_keys = [*own, *(key for key in agent.in_keys if key not in made)]
        self.out_keys = list(agent.out_keys)
        self.window, self.pooling, self.whole = agent.window, agent.pooling, agent.whole
        self.rates = agent.rates
        self.learns = agent.learns and not frozen
        self._make_reader, self._reader = reader, (0, reader(0))
        self._order = StepState()
        if frozen:
            self.requires_grad_(requires_grad=False)
            self.train(False)

    @property
    def autoregressive(self) -> bool:
        """As the agent's."""
        return self.agent.autoregressive

    def train(self, mode: bool = True) -> "PretrainedAgent":
        """Frozen, it stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def _observe(self, observation: TensorDictBase, encoding: Tensor) -> TensorDictBase:
        fine = torch.promote_types(encoding.dtype, torch.float32)  # as the environment's observations
        own = observation.copy().set(keys.ENCODING, encoding.to(fine))
        if keys.EARLY_ENTROPY in self.agent.in_keys:
            own.set(keys.EARLY_ENTROPY, self.encoder.early_entropy(encoding))
        return own

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once, as the agent does."""
        return self.agent.draw(self._observe(observation, self.encoder.encode(observation[keys.SYMBOL])), noise)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Log-probabilities and their like of given boundaries, in parallel: int64 [.., B, T]."""
        return self.agent.score(self._observe(observation, self.encoder.encode(observation[keys.SYMBOL])), action)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row; observations are [B].

        Raises:
            ValueError: a row is at any other position.
        """
        symbol_B, position_B = tensordict[keys.SYMBOL], tensordict[keys.POSITION]
        self._order.exchange(position_B, position_B)
        if self._reader[0] != len(position_B):
            self._reader = len(position_B), self._make_reader(len(position_B))
        own = self._observe(tensordict, self._reader[1].read(symbol_B, position_B))
        return tensordict.update(self.agent(own).select(*self.out_keys))

    def repeat_rows(self, times: int) -> None:
        """See ``Agent``; what the encoder remembers is repeated, too."""
        super().repeat_rows(times)
        rows, reader = self._reader
        reader.repeat(times)
        self._reader = rows * times, reader
