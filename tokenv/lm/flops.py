"""Cost of training in FLOPs, by the paper's rule (table 2).

A matrix parameter costs 6 floating-point operations (2 forward, 4 backward) for every byte, or token, which it is
applied to. Embedding lookups and attention scores are not counted. All N bytes of a sequence are counted for all
byte-level modules, although the last one, which predicts nothing, is only encoded. Policies which learn are counted
with 6 also where their input carries no gradient and 4 would suffice; so is the first layer of relaxed passes.
"""

from dataclasses import dataclass

from torch import nn

from tokenv.lm.unet import UNet

FLOPS_PER_PARAMETER, FORWARD_FLOPS_PER_PARAMETER = 6, 2


def matrix_parameters(*modules: nn.Module) -> int:
    """Return the number of entries of all linear layers' matrices, without embeddings and norms."""
    linear = (child for module in modules for child in module.modules() if isinstance(child, nn.Linear))
    return sum(child.weight.numel() for child in linear)


def _byte_matrices(lm: UNet) -> int:
    """Return the number of entries of the matrices which are applied to every byte after the boundaries are drawn."""
    at_every_byte = lm.config.horizon and not lm.config.direct  # else once per sequence
    direct = [lm.direct_head] if at_every_byte else []
    return matrix_parameters(lm.pooling, lm.up, lm.head, *direct)


def given_flops(lm: UNet, num_bytes: int, num_tokens: int) -> int:
    """Return the cost of training with given boundaries: no policy, and no early exit, which only the policy needs."""
    per_byte = matrix_parameters(lm.codec, lm.down) + _byte_matrices(lm)
    return FLOPS_PER_PARAMETER * (per_byte * num_bytes + matrix_parameters(lm.mid) * num_tokens)


def reading_flops(lm: UNet, rate: float, policy: nn.Module) -> float:
    """Return the cost of reading or generating a symbol: forward passes only, without the early exit.

    ``2 (P_byte + P_policy + rate P_token)``: linear in the rate.

    Args:
        lm: model.
        rate: tokens per symbol.
        policy: policy which draws the boundaries.
    """
    per_symbol = matrix_parameters(lm.codec, lm.down, policy) + _byte_matrices(lm)
    return FORWARD_FLOPS_PER_PARAMETER * (per_symbol + rate * matrix_parameters(lm.mid))


def rate_of_flops(lm: UNet, flops: float, policy: nn.Module) -> float:
    """Return the rate at which ``reading_flops`` is ``flops``; outside (0, 1) if there is none."""
    least = reading_flops(lm, 0.0, policy)
    return (flops - least) / (FORWARD_FLOPS_PER_PARAMETER * matrix_parameters(lm.mid))


@dataclass(frozen=True)
class Tokens:
    """Tokens of the token-level layers.

    Args:
        learning: tokens of all samples from which the model learns.
        forward: tokens of all other samples, which have a forward pass only.
    """

    learning: int
    forward: int = 0


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

    def tokens(self, per_sample: int) -> Tokens:
        """Return the tokens of all samples, if each has ``per_sample``."""
        return Tokens(self.learning * per_sample, self.reward_only * per_sample)


def policy_flops(policy: nn.Module) -> int:
    """Cost of the boundary policy for every byte that it reads; one that does not learn goes forward only."""
    learns = any(p.requires_grad for p in policy.parameters())
    return matrix_parameters(policy) * (FLOPS_PER_PARAMETER if learns else FORWARD_FLOPS_PER_PARAMETER)


def update_flops(
    lm: UNet, num_bytes: int, tokens: Tokens, policy_flops: int, passes: Passes, *, recompute: bool = False
) -> int:
    """Cost of updates with several passes; ``training_flops`` for ``Passes()``. The optimizer's step is not in it.

    Args:
        lm: model.
        num_bytes: bytes (symbols) trained on.
        tokens: tokens drawn in them.
        policy_flops: FLOPs of the boundary policy per byte.
        passes: passes through the batch.
        recompute: whether to count the forward passes of layers in the backward pass (activation checkpointing).
    """
    forward, both = FORWARD_FLOPS_PER_PARAMETER, FLOPS_PER_PARAMETER
    encoding, through = (forward, 2 * forward) if passes.frozen else (both, both)
    encoder = (encoding * matrix_parameters(lm.codec, lm.down) + policy_flops) * num_bytes
    early = passes.early_exit * matrix_parameters(lm.early_head) * num_bytes
    mid, byte_level = matrix_parameters(lm.mid), _byte_matrices(lm) * num_bytes
    every_byte = mid * num_bytes + byte_level
    learning = through * (mid * tokens.learning + byte_level * passes.learning + every_byte * passes.relaxed)
    pathwise = 2 * forward * every_byte * passes.pathwise
    forward_only = forward * (mid * tokens.forward + byte_level * passes.reward_only)
    others = (policy_flops * passes.head + passes.estimator) * num_bytes
    again = 0
    if recompute:
        down, up = matrix_parameters(lm.down) * num_bytes, matrix_parameters(lm.up) * num_bytes
        relaxed = passes.relaxed + passes.pathwise
        encodings = 0 if passes.frozen else down * (1 + passes.replays)
        again = forward * (encodings + mid * tokens.learning + up * passes.learning + (mid * num_bytes + up) * relaxed)
    return encoder * (1 + passes.replays) + early + learning + pathwise + forward_only + others + again


def training_flops(lm: UNet, num_bytes: int, num_tokens: int, policy_flops: int = 0) -> int:
    """Return the cost of a training run, with the early exit.

    Args:
        lm: model; may be on ``torch.device("meta")``.
        num_bytes: bytes (symbols) trained on.
        num_tokens: tokens drawn in them.
        policy_flops: FLOPs of the boundary policy per byte: 6 * (w + 1) * D for ``Learned``.

    Returns:
        Floating-point operations of forward and backward pass.
    """
    learning = FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) + policy_flops
    return given_flops(lm, num_bytes, num_tokens) + learning * num_bytes


def policy_share(lm: UNet, num_bytes: int, num_tokens: int, policy_flops: int) -> float:
    """Return the cost of the boundary policy, as a fraction of the same training run with given boundaries."""
    return policy_flops * num_bytes / given_flops(lm, num_bytes, num_tokens)


def early_exit_share(lm: UNet, num_bytes: int, num_tokens: int) -> float:
    """Return the cost of the early exit, the policy's baseline, as a fraction of training with given boundaries."""
    return FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) * num_bytes / given_flops(lm, num_bytes, num_tokens)
