"""Cost of training in FLOPs: the linear layers by the paper's rule (table 2), and attention.

A matrix parameter costs 6 floating-point operations (2 forward, 4 backward) for every byte, or token, which it is
applied to. In an attention layer of width D, every pair of a query and a key which it sees costs the same per entry of
2 D: D products for the score, D for the weighted value. Keys are those inside the window (byte level), or all earlier
tokens of the sequence (token level), so that packing and masked blocks change nothing. Embedding lookups (of bytes and
of ``model.elapsed``), norms and softmax are not counted. All N bytes of a sequence are counted for all byte-level
modules, although the last one, which predicts nothing, is only encoded. Policies which learn are counted with 6 also
where their input carries no gradient and 4 would suffice; so is the first layer of relaxed passes.

The paper leaves attention out. ``attention=False`` gives its figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from tokenv.lm.unet import UNet

Count = TypeVar("Count", int, Tensor)
FLOPS_PER_PARAMETER = 6
FORWARD_FLOPS_PER_PARAMETER = 2


def matrix_parameters(*modules: nn.Module) -> int:
    """Return the number of entries of all linear layers' matrices, without embeddings and norms."""
    linear = (
        child for module in modules for child in module.modules() if isinstance(child, nn.Linear)
    )
    return sum(child.weight.numel() for child in linear)


def causal_pairs(length: Count) -> Count:
    """Return the pairs of a query and a key which causal attention sees in a sequence: ``sum_i i``."""
    return length * (length + 1) // 2


def window_pairs(length: int, window: int) -> int:
    """Return the pairs of a query and a key which sliding-window attention sees in a sequence: ``sum_i min(i, w)``."""
    reach = min(length, window)
    return causal_pairs(reach) + (length - reach) * reach


@dataclass(frozen=True)
class Batch:
    """Sequences of symbols.

    Args:
        sequences: number of sequences.
        length: symbols of each, N.
    """

    sequences: int
    length: int

    @property
    def symbols(self) -> int:
        """Number of symbols of all sequences."""
        return self.sequences * self.length

    def pairs(self, window: int | None = None) -> int:
        """Return the pairs of a query and a key which attention between symbols sees."""
        pairs = causal_pairs(self.length) if window is None else window_pairs(self.length, window)
        return self.sequences * pairs


@dataclass(frozen=True)
class Tokens:
    """Tokens of the token-level layers, and the pairs of a query and a key which attention between them sees.

    Args:
        learning: tokens of all samples from which the model learns.
        forward: tokens of all other samples, which have a forward pass only.
        learning_pairs: pairs of the former.
        forward_pairs: pairs of the latter.
    """

    learning: int
    forward: int = 0
    learning_pairs: int = 0
    forward_pairs: int = 0


@dataclass(frozen=True)
class Passes:
    """Passes of one update through a batch.

    Args:
        learning: samples of the boundaries with a forward and a backward pass through middle and decoder.
        reward_only: other samples, with a forward pass only, a third of the cost.
        relaxed: passes in which every byte is a token, forward and backward.
        pathwise: such passes with gradients of the boundaries alone, not of parameters: two thirds of the cost.
        replays: passes through encoder and policy only, forward and backward.
        head: passes through the policy alone, forward and backward.
        frozen: whether the model is frozen: there is no backward pass through the encoder, and through the rest one
            with gradients of the boundaries alone.
        early_exit: FLOPs for each parameter of the early exit's head.
        estimator: FLOPs of the estimator's own networks per symbol, in all samples.
    """

    learning: int = 1
    reward_only: int = 0
    relaxed: int = 0
    pathwise: int = 0
    replays: int = 0
    head: int = 0
    frozen: bool = False
    early_exit: int = FLOPS_PER_PARAMETER
    estimator: int = 0

    def tokens(self, batch: Batch, rate: float) -> Tokens:
        """Return the tokens of all samples, if each sequence has ``rate`` tokens per symbol."""
        per_sequence = rate * batch.length
        count = round(batch.sequences * per_sequence)
        pairs = round(batch.sequences * per_sequence * (per_sequence + 1) / 2)
        return Tokens(
            self.learning * count,
            self.reward_only * count,
            self.learning * pairs,
            self.reward_only * pairs,
        )


@dataclass(frozen=True)
class _Products:
    """Multiplications of a forward pass, each with one addition.

    Args:
        linear: those with a parameter.
        attention: those of queries, keys and values.
    """

    linear: int = 0
    attention: int = 0

    def __add__(self, other: _Products) -> _Products:
        return _Products(self.linear + other.linear, self.attention + other.attention)

    def __mul__(self, times: int) -> _Products:
        return _Products(self.linear * times, self.attention * times)

    @property
    def forward(self) -> int:
        """FLOPs of a forward pass."""
        return FORWARD_FLOPS_PER_PARAMETER * (self.linear + self.attention)

    @property
    def both(self) -> int:
        """FLOPs of a forward and a backward pass."""
        return FLOPS_PER_PARAMETER * (self.linear + self.attention)

    @property
    def without_parameters(self) -> int:
        """FLOPs of a forward pass, and of a backward pass without gradients of parameters."""
        return 2 * FORWARD_FLOPS_PER_PARAMETER * self.linear + FLOPS_PER_PARAMETER * self.attention


class _Model:
    """Products of the parts of a model.

    Args:
        lm: model.
        batch: sequences.
        attention: whether to count attention.
    """

    def __init__(self, lm: UNet, batch: Batch, attention: bool) -> None:
        self._lm = lm
        self._batch = batch
        self._per_pair = 2 * lm.config.width * attention

    def _layers(self, layers: nn.ModuleList, positions: int, pairs: int) -> _Products:
        return _Products(
            matrix_parameters(layers) * positions, self._per_pair * len(layers) * pairs
        )

    def byte_layers(self, layers: nn.ModuleList) -> _Products:
        """Count byte-level decoder layers."""
        return self._layers(layers, self._batch.symbols, self._batch.pairs(self._lm.config.window))

    def token_layers(self, tokens: int, pairs: int) -> _Products:
        """Count the token-level layers."""
        return self._layers(self._lm.mid, tokens, pairs)

    @property
    def encoder(self) -> _Products:
        """Embedding of the codec, and the layers before the boundaries."""
        embedding = _Products(matrix_parameters(self._lm.codec) * self._batch.symbols)
        return embedding + self.byte_layers(self._lm.down)

    @property
    def decoder(self) -> _Products:
        """Modules which are applied to every byte after the boundaries are drawn."""
        lm = self._lm
        heads = [lm.pooling, lm.head]
        if lm.auxiliary_head is not None and not lm.codec.trailing:  # else once per sequence
            heads.append(lm.auxiliary_head)
        return _Products(matrix_parameters(*heads) * self._batch.symbols) + self.byte_layers(lm.up)

    @property
    def every_byte_a_token(self) -> _Products:
        """Token-level layers of a relaxed pass."""
        return self.token_layers(self._batch.symbols, self._batch.pairs())


def policy_flops(policy: nn.Module) -> int:
    """Cost of the boundary policy for every byte that it reads; one that does not learn goes forward only."""
    learns = any(p.requires_grad for p in policy.parameters())
    factor = FLOPS_PER_PARAMETER if learns else FORWARD_FLOPS_PER_PARAMETER
    return matrix_parameters(policy) * factor


def update_flops(
    lm: UNet,
    batch: Batch,
    tokens: Tokens,
    policy_flops: int,
    passes: Passes,
    *,
    recompute: bool = False,
    attention: bool = True,
) -> int:
    """Return the cost of updates with several passes, without the step of the optimizer.

    Args:
        lm: model.
        batch: sequences trained on.
        tokens: tokens drawn in them.
        policy_flops: FLOPs of the boundary policy per byte.
        passes: passes through the batch.
        recompute: whether to count the forward passes of layers in the backward pass (activation checkpointing).
        attention: whether to count attention.
    """
    model = _Model(lm, batch, attention)
    every_byte = model.every_byte_a_token + model.decoder
    learning_tokens = model.token_layers(tokens.learning, tokens.learning_pairs)
    learning = learning_tokens + model.decoder * passes.learning + every_byte * passes.relaxed
    reward_only = (
        model.token_layers(tokens.forward, tokens.forward_pairs)
        + model.decoder * passes.reward_only
    )
    pathwise = every_byte * passes.pathwise
    flops = reward_only.forward + pathwise.without_parameters
    if passes.frozen:
        encoder = model.encoder.forward
        flops += learning.without_parameters
    else:
        encoder = model.encoder.both
        flops += learning.both
    encodings = 1 + passes.replays
    flops += (encoder + policy_flops * batch.symbols) * encodings
    per_symbol = (
        passes.early_exit * matrix_parameters(lm.early_head)
        + policy_flops * passes.head
        + passes.estimator
    )
    flops += per_symbol * batch.symbols
    if recompute:
        up = model.byte_layers(lm.up)
        relaxed = (model.every_byte_a_token + up) * (passes.relaxed + passes.pathwise)
        again = learning_tokens + up * passes.learning + relaxed
        if not passes.frozen:
            again += model.byte_layers(lm.down) * encodings
        flops += again.forward
    return flops


def given_flops(lm: UNet, batch: Batch, tokens: Tokens, *, attention: bool = True) -> int:
    """Return the cost of training with given boundaries: no policy, and no early exit, which only the policy needs."""
    return update_flops(lm, batch, tokens, 0, Passes(early_exit=0), attention=attention)


def policy_share(lm: UNet, batch: Batch, tokens: Tokens, policy_flops: int) -> float:
    """Return the cost of the boundary policy, as a fraction of the same training run with given boundaries."""
    return policy_flops * batch.symbols / given_flops(lm, batch, tokens)


def early_exit_share(lm: UNet, batch: Batch, tokens: Tokens) -> float:
    """Return the cost of the early exit, the policy's baseline, as a fraction of training with given boundaries."""
    early = FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) * batch.symbols
    return early / given_flops(lm, batch, tokens)


def reading_flops(lm: UNet, rate: float, policy: nn.Module, length: int) -> float:
    """Return the cost of reading or generating a symbol: forward passes only, without the early exit.

    It is a quadratic function of the rate, ``a + b rate + c rate^2``, for a token attends to all earlier ones.

    Args:
        lm: model.
        rate: tokens per symbol.
        policy: policy which draws the boundaries.
        length: symbols of a sequence, N.
    """
    constant, linear, quadratic = _reading_polynomial(lm, policy, length)
    return constant + rate * (linear + rate * quadratic)


def rate_of_flops(lm: UNet, flops: float, policy: nn.Module, length: int) -> float:
    """Return the rate at which ``reading_flops`` is ``flops``; outside (0, 1) if there is none."""
    constant, linear, quadratic = _reading_polynomial(lm, policy, length)
    missing = flops - constant
    discriminant = linear**2 + 4 * quadratic * missing
    if discriminant < 0:
        return -math.inf
    return 2 * missing / (linear + math.sqrt(discriminant))


def _reading_polynomial(lm: UNet, policy: nn.Module, length: int) -> tuple[float, float, float]:
    """Return a, b and c of ``reading_flops``."""
    forward = FORWARD_FLOPS_PER_PARAMETER
    model = _Model(lm, Batch(1, length), attention=True)
    byte_level = model.encoder + model.decoder
    constant = byte_level.forward / length + forward * matrix_parameters(policy)
    attention = lm.config.width * len(lm.mid)
    linear = matrix_parameters(lm.mid) + attention
    return constant, forward * linear, forward * attention * length
