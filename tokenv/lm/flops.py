"""What training costs, by the paper's rule (table 2).

A matrix parameter costs 6 floating-point operations (forward and backward) for every byte, or token, that it is
applied to. Embedding lookups are free, attention scores are not counted.
"""

from torch import nn

from tokenv.lm.unet import UNet

FLOPS_PER_PARAMETER = 6


def matrix_parameters(*modules: nn.Module) -> int:
    """Entries of all matrices that multiply something; neither embeddings nor norms."""
    linear = (part for module in modules for part in module.modules() if isinstance(part, nn.Linear))
    return sum(part.weight.numel() for part in linear)


def given_flops(lm: UNet, num_bytes: int, num_tokens: int) -> int:
    """Cost of a training run with given boundaries: no policy, and no early exit, which only the policy needs."""
    per_byte = matrix_parameters(lm.codec, lm.down, lm.up, lm.head)
    return FLOPS_PER_PARAMETER * (per_byte * num_bytes + matrix_parameters(lm.mid) * num_tokens)


def training_flops(lm: UNet, num_bytes: int, num_tokens: int, policy_parameters: int = 0) -> int:
    """Cost of a training run, early exit included.

    Args:
        lm: the model; may lie on ``torch.device("meta")``.
        num_bytes: bytes (symbols) trained on.
        num_tokens: tokens drawn in them.
        policy_parameters: matrix parameters of the boundary policy, (w + 1) * D for ours; applied to every byte.

    Returns:
        Floating-point operations of forward and backward pass.
    """
    learning = matrix_parameters(lm.early_head) + policy_parameters
    return given_flops(lm, num_bytes, num_tokens) + FLOPS_PER_PARAMETER * learning * num_bytes


def policy_share(lm: UNet, num_bytes: int, num_tokens: int, policy_parameters: int) -> float:
    """What the boundary policy adds, as a fraction of the same training run with given boundaries."""
    return FLOPS_PER_PARAMETER * policy_parameters * num_bytes / given_flops(lm, num_bytes, num_tokens)


def early_exit_share(lm: UNet, num_bytes: int, num_tokens: int) -> float:
    """What the early exit, the policy's baseline, adds as a fraction of the same run with given boundaries."""
    return FLOPS_PER_PARAMETER * matrix_parameters(lm.early_head) * num_bytes / given_flops(lm, num_bytes, num_tokens)
