"""k places among N, drawn with given odds: the conditional Bernoulli law, exactly.

Independent decisions with odds ``w_i = exp(l_i)``, given that k of them are 1 (Chen & Liu 1997, Statistica Sinica 7,
875-892; Chen, Dempster & Liu 1994). All that is needed of it are sums over all subsets of a suffix,

    ``R(c, i) = sum of prod_{j in S} w_j over S among the places from i on with |S| = c``
    ``R(c, i) = R(c, i + 1) + w_i R(c - 1, i + 1)``,

for a subset of k places has the probability ``prod_{j in S} w_j / R(k, 0)``, and, drawn from left to right with c left,
``P(a_i = 1 | earlier) = w_i R(c - 1, i + 1) / R(c, i)``. Adding one number to all l_i changes nothing.
"""

import torch
from torch import Tensor

NEVER = -1e30  # log of a sum without a term, and log odds of what cannot be; finite, so that gradients are numbers


def log_sums(log_odds: Tensor, most: int) -> Tensor:
    """``log R(c, i)`` of all suffixes and counts c up to ``most``: a loop over T of vectors of ``most + 1``.

    Args:
        log_odds: l, [.., T]; ``NEVER`` where nothing can be drawn.
        most: largest count.

    Returns:
        [.., T + 1, most + 1], of the precision of l; about ``NEVER`` or less where no subset has that many places.
    """
    never = torch.full_like(log_odds[..., :1], NEVER)
    row = torch.cat([torch.zeros_like(never), never.expand(*never.shape[:-1], most)], -1)
    rows = [row]
    for here in log_odds.split(1, -1)[::-1]:
        row = torch.logaddexp(row, torch.cat([never, row[..., :-1] + here], -1))
        rows.append(row)
    return torch.stack(rows[::-1], -2)


def decision_logits(log_odds: Tensor, after: Tensor, left: Tensor) -> Tensor:
    """Log odds of every decision, drawn from left to right: ``l_i + log R(c - 1, i + 1) - log R(c, i + 1)``.

    They mean nothing where there is nothing to decide: where no place is left to be drawn, or all are.

    Args:
        log_odds: l, [.., B, T].
        after: ``log R(., i + 1)`` of every place, [.., B, T, most + 1].
        left: c, how many are left to be drawn at each place, int64 [.., K, B, T] with more leading dimensions or none.

    Returns:
        Of the shape of ``left``.
    """
    after = after.expand(*left.shape, after.shape[-1])
    with_one, without = (after.gather(-1, c.unsqueeze(-1)).squeeze(-1) for c in ((left - 1).clamp(min=0), left))
    return log_odds + with_one - without
