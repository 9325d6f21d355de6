"""From advantages to a loss whose gradient is the estimate."""

from tensordict import TensorDictBase

from estimators.base import Part
from tokenv import keys


class ScoreFunction(Part):
    """The score-function (REINFORCE) surrogate.

    ``L_i = -log pi(a_i | x_<=i, a_<i) detach(A_i)`` (Williams 1992; arXiv 2602.13940, eq. 18).

    Bias: none, if the advantage is an unbiased credit less a baseline that does not depend on a_i; for every
    policy, autoregressive or not. Cost: one forward and one backward pass, shared with the language model's.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., T], 0 where nobody decides."""
        return tensordict.set(keys.LOSS_POLICY, -tensordict[keys.ACTION_LOG_PROB] * tensordict[keys.ADVANTAGE].detach())
