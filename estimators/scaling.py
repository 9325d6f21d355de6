"""Keeping advantages of a size that an optimiser likes."""

from tensordict import TensorDictBase

from tokenv import keys
from tokenv.estimators.base import Part
from tokenv.estimators.statistics import masked_mean


class Standardise(Part):
    """Divide the advantage by its standard deviation over all decisions of the batch, after centring it.

    ``A <- (A - mean A) / (std A + epsilon)``, as implementations of PPO do (Schulman et al. 2017, arXiv 1707.06347).

    Bias: one factor for all decisions, random but nearly constant in large batches; the batch's mean and deviation
    contain the sample itself, which bends the direction by O(1 / decisions). Cost: O(T) elementwise.

    Args:
        epsilon: added to the standard deviation, in nats.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Standardise ``advantage``: [.., T]."""
        advantage, mask = tensordict[keys.ADVANTAGE], tensordict[keys.DECISION_MASK]
        centred = advantage - masked_mean(advantage, mask)
        deviation = masked_mean(centred.square(), mask).sqrt()
        return tensordict.set(keys.ADVANTAGE, centred / (deviation + self.epsilon))


class Clip(Part):
    """Cut advantages off at plus and minus ``limit``.

    Bias: towards zero where credits are large, in exchange for fewer outliers. Cost: O(T) elementwise.

    Args:
        limit: in the advantage's units (nats, or standard deviations after ``Standardise``).

    Raises:
        ValueError: ``limit`` is not positive.
    """

    in_keys = [keys.ADVANTAGE]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def __init__(self, limit: float = 5.0) -> None:
        super().__init__()
        if not limit > 0:
            raise ValueError(f"limit = {limit}: expected a positive number, such as 5")
        self.limit = limit

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Clip ``advantage``: [.., T]."""
        return tensordict.set(keys.ADVANTAGE, tensordict[keys.ADVANTAGE].clamp(-self.limit, self.limit))
