"""What estimators are made of: parts, and the chain that checks that they fit together.

A part reads some keys of a rollout ([B, T] or [K, B, T]: dimension -1 is time, -2 the batch, -3 the samples) and
writes others. An estimator is a chain of parts, as an optax optimizer is a chain of gradient transformations::

    reinforce = chain(EarlyExit(), Discount(gamma=0.99), BatchCentre(), ScoreFunction())
"""

from abc import ABC, abstractmethod
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from tokenv import keys

NestedKey = str | tuple[str, ...]

ROLLOUT_KEYS: frozenset[NestedKey] = frozenset(
    {
        keys.SYMBOL,
        keys.ENCODING,
        keys.LAST_ACTIONS,
        keys.POSITION,
        keys.TOKEN_COUNT,
        keys.DECISION_MASK,
        keys.NOISE,
        keys.ACTION,
        keys.ACTION_LOG_PROB,
        keys.BOUNDARY_LOGITS,
        keys.BOUNDARY_PROB,
        keys.ENTROPY,
        keys.LOG_LIKELIHOOD,
        keys.LOG_LIKELIHOOD_EARLY,
        keys.REWARD,
        keys.DONE,
    }
)


class Part(TensorDictModuleBase, ABC):
    """One step from rewards to a loss.

    Attributes:
        in_keys: what it reads; a chain refuses a part whose keys nobody has written.
        out_keys: what it writes.
    """

    in_keys: list[Any]
    out_keys: list[Any]

    @abstractmethod
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read ``in_keys`` of a rollout, write ``out_keys`` into it, and give it back."""


class Chain(TensorDictModuleBase):
    """Parts applied one after the other.

    Args:
        parts: in order.
        num_samples: samples K of the boundaries per sequence that the chain wants in a rollout; None for one
            sample without a dimension of its own.

    Raises:
        ValueError: there is no part, or a part reads a key that neither a rollout nor an earlier part writes.
    """

    def __init__(self, *parts: Part, num_samples: int | None = None) -> None:
        super().__init__()
        if not parts:
            raise ValueError("chain() without parts: expected at least one, such as ScoreFunction()")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples = {num_samples}: expected None or at least 1")
        known = set(ROLLOUT_KEYS)
        for number, part in enumerate(parts):
            for key in part.in_keys:
                if key not in known:
                    raise ValueError(_missing(key, number, parts))
            known |= set(part.out_keys)
        self.parts, self.num_samples = list(parts), num_samples
        for number, part in enumerate(parts):
            self.add_module(str(number), part)  # so that a part's own state is saved and moved
        self.in_keys = sorted({key for part in parts for key in part.in_keys} & ROLLOUT_KEYS, key=str)
        self.out_keys = sorted({key for part in parts for key in part.out_keys}, key=str)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply all parts to a rollout, in place."""
        for part in self.parts:
            tensordict = part(tensordict)
        return tensordict


def chain(*parts: Part, num_samples: int | None = None) -> Chain:
    """Chain parts into an estimator; see ``Chain``."""
    return Chain(*parts, num_samples=num_samples)


def _missing(key: NestedKey, number: int, parts: tuple[Part, ...]) -> str:
    name = type(parts[number]).__name__
    later = [type(part).__name__ for part in parts[number + 1 :] if key in part.out_keys]
    hint = f"move {later[0]} before it" if later else "put a part that writes it before this one"
    if not later and key == keys.ADVANTAGE:
        hint = "put a part that writes it, such as Discount(), before this one"
    return f"chain: part {number} ({name}) reads {key!r}, which neither a rollout nor an earlier part writes: {hint}"
