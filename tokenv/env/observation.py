"""Observations of agents: the one place where they are built, for whole sequences and for single symbols.

A new observation key is a name in ``tokenv.core.keys`` and an entry of ``STATIC_KEYS`` or ``HISTORY_KEYS`` here.
One-pass rollouts, stepping, generation, rescoring and specs read these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, TensorSpec, Unbounded

from tokenv.core import keys
from tokenv.core.contracts import ObservationReader
from tokenv.lm.unet import UNet


@dataclass(frozen=True)
class SymbolContext:
    """Symbols which a model has read, at any leading dimensions [..].

    Attributes:
        lm: model.
        symbol: x_i, [.., *symbol_shape].
        encoding: X_i in the model's precision, [.., D].
        position: i, [..].
        decision_mask: False where no decision is made, [..].
        target_rate: target rate of the sequence, [..]; None if there is none.
    """

    lm: UNet
    symbol: Tensor
    encoding: Tensor
    position: Tensor
    decision_mask: Tensor
    target_rate: Tensor | None


@dataclass(frozen=True)
class SpecContext:
    """Sizes of a batch of observations.

    Attributes:
        lm: model.
        length: symbols N of a sequence.
        window: earlier actions w which are observed.
        number: spec of a likelihood, shape [B]; its dtype is also that of X_i.
    """

    lm: UNet
    length: int
    window: int
    number: Unbounded

    def bounded(self, high: int, dtype: torch.dtype, *shape: int) -> Bounded:
        """Return the spec of numbers from 0 to ``high``, shape [B, *shape]."""
        return Bounded(
            0, high, (*self.number.shape, *shape), dtype=dtype, device=self.number.device
        )

    def unbounded(self, dtype: torch.dtype, *shape: int) -> Unbounded:
        """Return the spec of arbitrary numbers, shape [B, *shape]."""
        return Unbounded((*self.number.shape, *shape), dtype=dtype, device=self.number.device)


@dataclass(frozen=True)
class StaticKey:
    """Observation which does not depend on boundaries.

    Attributes:
        compute: its value at symbols; None leaves it out.
        spec: its TorchRL spec.
        optional: whether observations hold it only where an agent reads it.
    """

    compute: Callable[[SymbolContext], Tensor | None]
    spec: Callable[[SpecContext], TensorSpec]
    optional: bool = False


@dataclass(frozen=True)
class HistoryKey:
    """Observation which depends on earlier boundaries.

    Attributes:
        initial: value at the first symbols of B sequences, from B, w and the device: [B, ..].
        append: value at the next symbol, from that at this one and the action: [B, ..], [B] -> [B, ..].
        parallel: values at all symbols, from all actions and w: [.., N] -> [.., N, ..].
        spec: its TorchRL spec.
        optional: whether observations hold it only where an agent reads it.
    """

    initial: Callable[[int, int, torch.device], Tensor]
    append: Callable[[Tensor, Tensor], Tensor]
    parallel: Callable[[Tensor, int], Tensor]
    spec: Callable[[SpecContext], TensorSpec]
    optional: bool = False


def _encoding(at: SymbolContext) -> Tensor:
    """Return X_i in float32 or finer."""
    return at.encoding.to(torch.promote_types(at.encoding.dtype, torch.float32))


def _append_action(last_actions_Bw: Tensor, action_B: Tensor) -> Tensor:
    width = last_actions_Bw.shape[1]
    if width:
        return torch.cat([action_B[:, None].float(), last_actions_Bw[:, :-1]], 1)
    return last_actions_Bw


def _last_actions(action: Tensor, window: int) -> Tensor:
    earlier = [F.pad(action, (j, 0))[..., : action.shape[-1]] for j in range(1, window + 1)]
    if earlier:
        return torch.stack(earlier, -1).float()
    return action.new_zeros((*action.shape, 0)).float()


STATIC_KEYS = {
    keys.SYMBOL: StaticKey(
        lambda at: at.symbol,
        lambda of: of.unbounded(of.lm.codec.symbol_dtype, *of.lm.codec.symbol_shape),
    ),
    keys.ENCODING: StaticKey(
        _encoding, lambda of: of.unbounded(of.number.dtype, of.lm.config.width)
    ),
    keys.POSITION: StaticKey(lambda at: at.position, lambda of: of.bounded(of.length, torch.int64)),
    keys.DECISION_MASK: StaticKey(
        lambda at: at.decision_mask,
        lambda of: Binary(shape=of.number.shape, dtype=torch.bool, device=of.number.device),
    ),
    keys.EARLY_ENTROPY: StaticKey(
        lambda at: at.lm.early_entropy(at.encoding), lambda of: of.number.clone(), optional=True
    ),
    keys.TARGET_RATE: StaticKey(
        lambda at: at.target_rate,
        lambda of: of.bounded(1, torch.float32),
        optional=True,
    ),
}
HISTORY_KEYS = {
    keys.LAST_ACTIONS: HistoryKey(
        initial=lambda batch, window, device: torch.zeros(batch, window, device=device),
        append=_append_action,
        parallel=_last_actions,
        spec=lambda of: of.bounded(1, torch.float32, of.window),
    ),
    keys.TOKEN_COUNT: HistoryKey(
        initial=lambda batch, window, device: torch.zeros(batch, dtype=torch.long, device=device),
        append=lambda count_B, action_B: count_B + action_B,
        parallel=lambda action, window: action.cumsum(-1) - action,
        spec=lambda of: of.bounded(of.length, torch.int64),
    ),
}


def _optional_keys(names: Container[str] | None = None) -> frozenset[str]:
    """Return those of the names which are optional observation keys; None for all optional keys."""
    every: dict[str, StaticKey | HistoryKey] = {**STATIC_KEYS, **HISTORY_KEYS}
    return frozenset(
        name for name, key in every.items() if key.optional and (names is None or name in names)
    )


@dataclass(frozen=True)
class Observer:
    """Builder of observations.

    Attributes:
        window: earlier actions w which observations hold.
        optional: optional observation keys which they hold.

    Raises:
        ValueError: a name is not an optional observation key.
    """

    window: int
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        known = _optional_keys()
        if not self.optional <= known:
            raise ValueError(
                f"optional_keys = {[*self.optional]}: expected some of {', '.join(sorted(known))}"
            )

    @classmethod
    def of(cls, agent: ObservationReader) -> Observer:
        """Return the observer of what an agent reads."""
        return cls(agent.window, _optional_keys(agent.in_keys))

    @classmethod
    def of_rollout(cls, tensordict: TensorDictBase) -> Observer:
        """Return the observer of the static keys which a stored rollout holds."""
        return cls(0, _optional_keys(tensordict.keys()))

    def extended_for(self, agent: ObservationReader) -> Observer:
        """Return this observer with the optional keys which an agent reads besides."""
        return replace(self, optional=self.optional | _optional_keys(agent.in_keys))

    @property
    def has_target_rate(self) -> bool:
        """Whether observations hold the target rate."""
        return keys.TARGET_RATE in self.optional

    @property
    def static_keys(self) -> dict[str, StaticKey]:
        """The keys which do not depend on boundaries."""
        return {
            name: key
            for name, key in STATIC_KEYS.items()
            if not key.optional or name in self.optional
        }

    @property
    def history_keys(self) -> dict[str, HistoryKey]:
        """The keys which depend on earlier boundaries."""
        return {
            name: key
            for name, key in HISTORY_KEYS.items()
            if not key.optional or name in self.optional
        }

    def static_values(self, at: SymbolContext) -> dict[str, Tensor]:
        """Return the observations at symbols which do not depend on boundaries, [.., ..] each."""
        tensors = {name: key.compute(at) for name, key in self.static_keys.items()}
        return {name: value for name, value in tensors.items() if value is not None}

    def static_observation(
        self,
        lm: UNet,
        symbol: Tensor,
        encoding: Tensor,
        position: Tensor,
        decision_mask: Tensor,
        target_rate: Tensor | None = None,
    ) -> TensorDict:
        """Return ``static_values`` as a TensorDict of batch size [..]; the arguments are those of ``SymbolContext``."""
        at = SymbolContext(lm, symbol, encoding, position, decision_mask, target_rate)
        return TensorDict(self.static_values(at), batch_size=decision_mask.shape)

    def history(self, action: Tensor) -> dict[str, Tensor]:
        """Return the observations of earlier boundaries at all N symbols, from their actions [.., N]."""
        return {name: key.parallel(action, self.window) for name, key in self.history_keys.items()}

    def initial_history(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the observations of earlier boundaries at the first symbols of B sequences, [B, ..] each."""
        return {
            name: key.initial(batch, self.window, device) for name, key in self.history_keys.items()
        }

    def append_action(self, history: dict[str, Tensor], action_B: Tensor) -> dict[str, Tensor]:
        """Return the observations of earlier boundaries at the next symbols, after actions [B]."""
        return {
            name: self.history_keys[name].append(value, action_B) for name, value in history.items()
        }

    def reset_history(self, history: dict[str, Tensor], rows_B: Tensor) -> dict[str, Tensor]:
        """Return the observations of earlier boundaries after the rows which are True, bool [B], have started anew."""
        initial = self.initial_history(len(rows_B), rows_B.device)
        return {
            name: initial[name].where(rows_B.view(-1, *(1,) * (value.dim() - 1)), value)
            for name, value in history.items()
        }

    def specs(self, lm: UNet, length: int, number: Unbounded) -> Composite:
        """Return TorchRL's specs of a batch of observations and of the symbol's likelihoods; see ``SpecContext``."""
        sizes = SpecContext(lm, length, self.window, number)
        held: dict[str, StaticKey | HistoryKey] = {**self.static_keys, **self.history_keys}
        likelihoods = {keys.LOG_LIKELIHOOD[1]: number, keys.LOG_LIKELIHOOD_EARLY[1]: number.clone()}
        return Composite(
            {name: key.spec(sizes) for name, key in held.items()} | likelihoods, shape=number.shape
        )
