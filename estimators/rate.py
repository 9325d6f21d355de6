"""What keeps the boundary rate near its target."""

from tensordict import TensorDictBase

from estimators.base import Part
from estimators.statistics import masked_mean
from tokenv import keys


class LogitPressure(Part):
    """An even push on all logits, up or down.

    ``L = mean(l) detach(mean(p) - target)`` (arXiv 2602.13940, eq. 24), with means over all decisions of the batch.

    Not an estimate of any gradient of the reward: it moves the policy to the target rate, whatever that costs.
    Cost: O(T) elementwise.

    Args:
        rate: target boundaries per symbol, in (0, 1).

    Raises:
        ValueError: ``rate`` outside (0, 1).
    """

    in_keys = [keys.BOUNDARY_LOGITS, keys.BOUNDARY_PROB, keys.DECISION_MASK]
    out_keys = [keys.LOSS_RATE]

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"rate = {rate}: expected boundaries per symbol in (0, 1), such as 0.2")
        self.rate = rate

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L."""
        mask = tensordict[keys.DECISION_MASK]
        excess = masked_mean(tensordict[keys.BOUNDARY_PROB].detach(), mask) - self.rate
        return tensordict.set(keys.LOSS_RATE, tensordict[keys.BOUNDARY_LOGITS] * excess * mask)
