"""What an agent sees: the one place where observations are built, for whole sequences and for single symbols.

A new key of the observation is a name in ``tokenv.core.keys`` and a line or two here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded

from tokenv.core import keys
from tokenv.core.contracts import ObservationReader
from tokenv.lm.unet import UNet


@dataclass(frozen=True)
class Observer:
    """Builds observations.

    Attributes:
        window: earlier actions w that they hold.
        early_entropy: whether they hold the entropy of p_early(x_{i+1} | x_<=i) in nats.
        target_rate: whether they hold the rate that the sequence is asked for.
    """

    window: int
    early_entropy: bool = False
    target_rate: bool = False

    @classmethod
    def of(cls, agent: ObservationReader) -> Observer:
        """What an agent needs."""
        return cls(agent.window, keys.EARLY_ENTROPY in agent.in_keys, keys.TARGET_RATE in agent.in_keys)

    def extended_for(self, agent: ObservationReader) -> Observer:
        """The same, with the early entropy and the rate if the agent reads them."""
        return replace(
            self,
            early_entropy=self.early_entropy or keys.EARLY_ENTROPY in agent.in_keys,
            target_rate=self.target_rate or keys.TARGET_RATE in agent.in_keys,
        )

    def static_observation(
        self,
        lm: UNet,
        symbol: Tensor,
        encoding: Tensor,
        position: Tensor,
        decision_mask: Tensor,
        target_rate: Tensor | None = None,
    ) -> TensorDict:
        """What stands at symbols, whatever was decided before.

        Args:
            lm: the model.
            symbol: x_i, [.., *symbol_shape].
            encoding: X_i, [.., D], in the model's precision; observed in float32 where that is lower.
            position: i, [..].
            decision_mask: False where nobody decides, [..].
            target_rate: that the sequence is asked for, [..]; held if there is one.
        """
        tensors = {
            keys.SYMBOL: symbol,
            keys.ENCODING: encoding.to(torch.promote_types(encoding.dtype, torch.float32)),
            keys.POSITION: position,
            keys.DECISION_MASK: decision_mask,
        }
        if self.early_entropy:
            tensors[keys.EARLY_ENTROPY] = lm.early_entropy(encoding)
        if self.target_rate and target_rate is not None:
            tensors[keys.TARGET_RATE] = target_rate
        return TensorDict(tensors, batch_size=decision_mask.shape)

    def past(self, action: Tensor) -> dict[str, Tensor]:
        """What was decided before each symbol: actions of all N symbols, [.., N]."""
        length = action.shape[-1]
        earlier = [F.pad(action, (j, 0))[..., :length] for j in range(1, self.window + 1)]
        last = torch.stack(earlier, -1) if earlier else action.new_zeros((*action.shape, 0))
        return {keys.TOKEN_COUNT: action.cumsum(-1) - action, keys.LAST_ACTIONS: last.float()}

    def initial_last_actions(self, batch: int, device: torch.device) -> Tensor:
        """The last actions before the first symbol, [B, w]."""
        return torch.zeros(batch, self.window, device=device)

    def append_action(self, last_actions_Bw: Tensor, action_B: Tensor) -> Tensor:
        """The last actions, newest first, after one more: [B, w], [B] -> [B, w]."""
        return torch.cat([action_B[:, None].float(), last_actions_Bw], 1)[:, : self.window]

    def specs(self, lm: UNet, batch: int, length: int, number: Unbounded) -> Composite:
        """TorchRL's specs of observations in a batch.

        Args:
            lm: the model.
            batch: sequences B.
            length: symbols N of each.
            number: the spec of a likelihood, of shape [B]; its dtype is also that of X_i.
        """
        device, codec = number.device, lm.codec
        count = Bounded(0, length, (batch,), dtype=torch.int64, device=device)
        specs = {
            keys.SYMBOL: Unbounded((batch, *codec.symbol_shape), dtype=codec.symbol_dtype, device=device),
            keys.ENCODING: Unbounded((batch, lm.config.width), dtype=number.dtype, device=device),
            keys.LAST_ACTIONS: Bounded(0, 1, (batch, self.window), dtype=torch.float32, device=device),
            keys.POSITION: count,
            keys.TOKEN_COUNT: count.clone(),
            keys.DECISION_MASK: Binary(shape=(batch,), dtype=torch.bool, device=device),
            keys.LOG_LIKELIHOOD[1]: number,
            keys.LOG_LIKELIHOOD_EARLY[1]: number.clone(),
        }
        if self.early_entropy:
            specs[keys.EARLY_ENTROPY] = number.clone()
        if self.target_rate:
            specs[keys.TARGET_RATE] = Bounded(0, 1, (batch,), dtype=torch.float32, device=device)
        return Composite(specs, shape=(batch,))
