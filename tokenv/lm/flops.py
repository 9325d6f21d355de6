"""What training costs, by the paper's rule (table 2).

A matrix parameter costs 6 floating-point operations (2 forward, 4 backward) for every byte, or token, that it is
applied to. Embedding lookups are free, attention scores are not counted.
"""

from dataclasses import dataclass

from torch import nn

from tokenv.lm.unet import UNet

FLOPS_PER_PARAMETER, FORWARD_FLOPS_PER_PARAMETER = 6, 2


def matrix_parameters(*modules: nn.Module) -> int:
    """Entries of all matrices that multiply something; neither embeddings nor norms."""
    linear = (part for module in modules for part in module.modules() if isinstance(part, nn.Linear))
    return sum(part.weight.numel() for part in linear)


def _byte_matrices(lm: UNet) -> int:
    """Entries of the matrices that are applied to every byte after the boundaries are drawn."""
    everywhere = lm.config.horizon and not lm.config.direct  # else it is asked once a sequence
    direct = [lm.direct_head] if everywhere else []
    return matrix_parameters(lm.pooling, lm.up, lm.head, *direct)


def given_flops(lm: UNet, num_bytes: int, num_tokens: int) -> int:
    """Cost of a training run with given boundaries: no policy, and no early exit, which only the policy needs."""
    per_byte = matrix_parameters(lm.codec, lm.down) + _byte_matrices(lm)
    return FLOPS_PER_PARAMETER * (per_byte * num_bytes + matrix_parameters(lm.mid) * num_tokens)


def reading_flops(lm: UNet, rate: float, policy: nn.Module) -> float:
    """Cost of reading or writing a symbol, by the same rule: forward passes alone, without the early exit.

    ``2 (P_byte + P_policy + rate P_token)``: linear in the rate.

    Args:
        lm: the model.
        rate: tokens per symbol.
        policy: who draws the boundaries.
    """
    per_symbol = matrix_parameters(lm.codec, lm.down, policy) + _byte_matrices(lm)
    return FORWARD_FLOPS_PER_PARAMETER * (per_symbol + rate * matrix_parameters(lm.mid))


def rate_of_flops(lm: UNet, flops: float, policy: nn.Module) -> float:
    """The rate at which ``reading_flops`` is so much; outside (0, 1) where none is."""
    least = reading_flops(lm, 0.0, policy)
    return (flops - least) / (FORWARD_FLOPS_PER_PARAMETER * matrix_parameters(lm.mid))


@dataclass(frozen=True)
class Passes:
    """Passes that one update makes through a batch.

    Args:
        learning: samples of the boundaries that go forward and backward through middle and decoder.
        reward_only: further samples that go forward only, a third of the cost.
        relaxed: passes in which every byte is a token, forward and backward.
        replays: passes through encoder and policy only, forward and backward.
        head: passes through the policy alone, forward and backward.
        frozen: whether the model stays as it is: nothing goes backward to the encoder, and through the rest no
            parameter's gradient, only those of the boundaries.
    """

    learning: int = 1
    reward_only: int = 0
    relaxed: int = 0
    replays: int = 0
    head: int = 0
    frozen: bool = False


def policy_flops(policy: nn.Module) -> int:
    """Cost of the boundary policy for every byte that it reads; one that does not learn goes forward only."""
    learns = any(p.requires_grad for p in policy.parameters())
    return matrix_parameters(policy) * (FLOPS_PER_PARAMETER if learns else FORWARD_FLOPS_PER_PARAMETER)


def update_flops(lm: UNet, num_bytes: int, tokens_per_sample: int, policy_flops: int, passes: Passes) -> int:
    """Cost of updates with several passes; ``training_flops`` for ``Passes()``.

    Args:
        lm: the model.
        num_bytes: bytes (symbols) trained on.
        tokens_per_sample: tokens drawn in them, by one sample.
        policy_flops: of the boundary policy, for every byte.
        passes: what is done with them.
    """
    encoding, through = (
        (FORWARD_FLOPS_PER_PARAMETER, 2 * FORWARD_FLOPS_PER_PARAMETER) if passes.frozen else (FLOPS_PER_PARAMETER,) * 2
    )
    encoder = (encoding * matrix_parameters(lm.codec, lm.down) + policy_flops) * num_bytes
    early = encoding * matrix_parameters(lm.early_head) * num_bytes
    mid, byte_level = matrix_parameters(lm.mid), _byte_matrices(lm) * num_bytes
    late = mid * tokens_per_sample + byte_level
    learning = through * (late * passes.learning + (mid * num_bytes + byte_level) * passes.relaxed)
    forward_only = FORWARD_FLOPS_PER_PARAMETER * late * passes.reward_only
    head = policy_flops * num_bytes * passes.head
    return encoder * (1 + passes.replays) + head + early + learning + forward_only


def training_flops(lm: UNet, num_bytes: int, num_tokens: int, policy_flops: int = 0) -> int:
    """Cost of a training run, early exit included.

    Args:
        lm: the model; may lie on ``torch.device("meta")``.
        num_bytes: bytes (symbols) trained on.
        num_tokens: tokens drawn in them.
        policy_flops: of the boundary policy, for every byte: 6 * (w + 1) * D for ours.

    Returns:
        Floating-point operations of forward and backward pass.
    """
    learning = FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) + policy_flops
    return given_flops(lm, num_bytes, num_tokens) + learning * num_bytes


def policy_share(lm: UNet, num_bytes: int, num_tokens: int, policy_flops: int) -> float:
    """What the boundary policy adds, as a fraction of the same training run with given boundaries."""
    return policy_flops * num_bytes / given_flops(lm, num_bytes, num_tokens)


def early_exit_share(lm: UNet, num_bytes: int, num_tokens: int) -> float:
    """What the early exit, the policy's baseline, adds as a fraction of the same run with given boundaries."""
    return FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) * num_bytes / given_flops(lm, num_bytes, num_tokens)
