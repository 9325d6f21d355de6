"""The reward of a step, for the environment and for the estimators which state it."""

from torch import Tensor


def relative_log_likelihood(log_likelihood: Tensor, log_likelihood_early: Tensor) -> Tensor:
    """Return a symbol's reward: how much more likely it is with tokens than by the early exit, in nats, detached.

    ``R_i = log p(x_i | x_<i, a_<i) - log p_early(x_i | x_<i)`` (Dauncey & Wattenhofer 2026, arXiv 2602.13940, eq. 15).

    Args:
        log_likelihood: log p of the symbols, [..].
        log_likelihood_early: log p_early of the same symbols, [..].

    Returns:
        [.., 1], as TorchRL's rewards.
    """
    return (log_likelihood - log_likelihood_early).detach().unsqueeze(-1)
