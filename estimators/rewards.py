"""What a prediction is worth."""

from tensordict import TensorDictBase

from tokenv import keys
from tokenv.estimators.base import Part


class Likelihood(Part):
    """The plain reward: ``R_{i+1} = log p(x_{i+1} | x_<=i, a_<=i)``, detached (arXiv 2602.13940, eq. 12).

    Bias: none. Cost: none. Its variance holds all that makes a text easy or hard, whatever the boundaries.
    """

    in_keys = [keys.LOG_LIKELIHOOD]
    out_keys = [keys.REWARD]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")``: [.., T, 1] in nats."""
        return tensordict.set(keys.REWARD, tensordict[keys.LOG_LIKELIHOOD].detach().unsqueeze(-1))


class EarlyExit(Part):
    """Reward relative to the model's own early exit.

    ``R_{i+1} = log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)``, detached (Dauncey & Wattenhofer
    2026, arXiv 2602.13940, eq. 15). Subtracts what any boundaries would have earned.

    Bias: none. The early exit sees no boundary, so what it subtracts does not depend on the actions.
    Cost: the early-exit head; the environment's own reward is this, and the part makes a chain say so.
    """

    in_keys = [keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY]
    out_keys = [keys.REWARD]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")``: [.., T, 1] in nats."""
        reward = tensordict[keys.LOG_LIKELIHOOD] - tensordict[keys.LOG_LIKELIHOOD_EARLY]
        return tensordict.set(keys.REWARD, reward.detach().unsqueeze(-1))
