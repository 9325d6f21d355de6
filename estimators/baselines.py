"""What is subtracted from an action's credit because it would have come anyway."""

from tensordict import TensorDictBase

from estimators.base import Part
from estimators.statistics import mean_over_batch
from tokenv import keys


class BatchCentre(Part):
    """Centre the advantage over the batch, position by position.

    ``A_{i,b} = G_{i,b} - mean_b' G_{i,b'}`` (arXiv 2602.13940, eq. 17).

    Bias: the mean includes the sequence itself, which scales the expected gradient by (B - 1) / B at positions that
    B sequences reach; its direction stays the true one. With one sequence nothing is left. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        mean = mean_over_batch(advantage, tensordict[keys.DECISION_MASK])
        return tensordict.set(keys.ADVANTAGE, advantage - mean)
