"""What gradient estimators descend, as a number: for all that train with them, check them or measure them."""

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.estimators.statistics import masked_mean_share


def mean_over_decisions(td: TensorDictBase, key: NestedKey) -> Tensor:
    """Mean of a loss over all decisions, 0 where nobody has written it; of a shared batch this process's part: []."""
    return masked_mean_share(td[key], td[keys.DECISION_MASK]) if key in td else td[keys.LOG_LIKELIHOOD].new_zeros(())


def policy_objective(td: TensorDictBase) -> Tensor:
    """What an estimator descends, per decision: its loss, and where boundaries are relaxed the model's own loss, too.

    Args:
        td: a rollout that the estimator has been applied to, [.., B, T].

    Returns:
        A scalar. If the estimator is unbiased, the expectation of its gradient with respect to policy and encoder
        is that of ``-1/decisions sum_{b,t} E_a[log p(x_{t+1} | x_<=t, a_<=t)]``.
    """
    loss = mean_over_decisions(td, keys.LOSS_POLICY)
    if keys.BOUNDARY in td:
        loss = loss - td[keys.LOG_LIKELIHOOD].sum() / td[keys.DECISION_MASK].sum()
    return loss
