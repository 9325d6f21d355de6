"""An agent which was trained with another model, used with a new one."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import Agent, Observation, StepState
from tokenv.core import keys


class StepEncoder(Protocol):
    """Encoder of one symbol after the other; see ``tokenv.lm.incremental.EncoderStepper``."""

    def read(self, symbol_B: Tensor, position_B: Tensor) -> Tensor:
        """Return encodings: [B, *symbol_shape], [B] -> [B, D]."""

    def repeat(self, times: int) -> None:
        """Repeat the state of each row ``times`` times."""


class SequenceEncoder(Protocol):
    """Encoder of whole sequences, which is a module; see ``tokenv.lm.unet.Encoder``."""

    def encode(self, symbol_BN: Tensor) -> Tensor:
        """Return encodings: [B, N, *symbol_shape] -> [B, N, D]."""

    def early_entropy(self, x: Tensor) -> Tensor:
        """Return the entropy of the early exit in nats: [.., D] -> [..]."""


class PretrainedAgent(Agent):
    """An agent with the encoder which it was trained on, so that it is independent of the model.

    It reads symbols, encodes them itself, and decides as it did for its old model (ReinPatch, arXiv 2603.26097,
    detaches its patcher from the backbone for this purpose). Its encoder costs one more forward pass of these layers.

    Acting at one position (``forward``) has a state: positions must come in order, as for a ``StepState``. There is no
    ``get_dist`` of TorchRL's, because stored single observations cannot be encoded.

    Args:
        agent: agent which decides.
        encoder: module which encodes the symbols for it.
        reader: function from a number of rows to an encoder of one symbol after the other.
        frozen: whether its parameters stay fixed; else estimator and rate target train both policy and encoder.
    """

    def __init__(
        self,
        agent: Agent,
        encoder: SequenceEncoder,
        reader: Callable[[int], StepEncoder],
        *,
        frozen: bool = True,
    ) -> None:
        super().__init__()
        self.agent = agent
        self.encoder = encoder
        self.frozen = frozen
        required = (keys.SYMBOL, keys.POSITION, keys.DECISION_MASK)
        computed = (keys.ENCODING, keys.EARLY_ENTROPY)
        self.in_keys = [
            *required,
            *(key for key in agent.in_keys if key not in (*required, *computed)),
        ]
        self.out_keys = list(agent.out_keys)
        self.window = agent.window
        self.pooling = agent.pooling
        self.non_causal = agent.non_causal
        self.rates = agent.rates
        self.reads_ahead = agent.reads_ahead
        self.stochastic = agent.stochastic
        self.fixed_count = agent.fixed_count
        self.trainable = agent.trainable and not frozen
        self._make_reader = reader
        self._reader = (0, reader(0))
        self._order = StepState()
        if frozen:
            self.requires_grad_(requires_grad=False)
            self.train(False)

    @property
    def autoregressive(self) -> bool:
        """Whether a decision of the agent depends on earlier ones."""
        return self.agent.autoregressive

    def train(self, mode: bool = True) -> "PretrainedAgent":
        """Set the training mode; a frozen agent stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def _computed(self, encoding: Tensor) -> dict[str, Tensor]:
        """Return the observations which depend on the encodings of the agent's own encoder."""
        # as in the environment's observations
        fine = torch.promote_types(encoding.dtype, torch.float32)
        computed = {keys.ENCODING: encoding.to(fine)}
        if keys.EARLY_ENTROPY in self.agent.in_keys:
            computed[keys.EARLY_ENTROPY] = self.encoder.early_entropy(encoding)
        return computed

    def _observe(self, observation: TensorDictBase) -> TensorDictBase:
        return observation.copy().update(
            self._computed(self.encoder.encode(observation[keys.SYMBOL]))
        )

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once, as the agent does."""
        return self.agent.draw(self._observe(observation), noise)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs for given boundaries, int64 [.., B, T], in parallel."""
        return self.agent.score(self._observe(observation), action)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row; observations are [B].

        Raises:
            ValueError: a row is at any other position.
        """
        observation = tensordict.copy().update(self._read(tensordict))
        return tensordict.update(self.agent(observation).select(*self.out_keys))

    def step(self, observation: Mapping[str, Tensor]) -> Observation:
        """Act at one position; see ``Agent``."""
        return self.agent.step({**observation, **self._read(observation)})

    def _read(self, observation: Observation) -> dict[str, Tensor]:
        """Read the next symbols, and return what ``_computed`` does."""
        symbol_B = observation[keys.SYMBOL]
        position_B = observation[keys.POSITION]
        self._order.exchange(position_B, position_B)
        if self._reader[0] != len(position_B):
            self._reader = len(position_B), self._make_reader(len(position_B))
        return self._computed(self._reader[1].read(symbol_B, position_B))

    def repeat_rows(self, times: int) -> None:
        """Repeat the state of each row; see ``Agent``. The state of the encoder is repeated, too."""
        super().repeat_rows(times)
        rows, reader = self._reader
        reader.repeat(times)
        self._reader = rows * times, reader
