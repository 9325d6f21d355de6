"""The boundary predictor of dynamic token pooling (Nawrot et al. 2023, arXiv 2211.09761)."""

import math

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import BoundaryDistribution, Policy, forced_action
from tokenv.core import keys


class Nawrot(Policy):
    """Independent Bernoulli decisions: ``l_i = Linear(GELU(Linear(X_i)))``, ``a_i = [l_i > logit(u_i)]``.

    With the published relaxed sample ``soft_i = sigmoid((l_i - logit(u_i)) / tau)`` (estimator ``gumbel``) this is
    ``[soft_i > 1/2]``, so a straight-through tensor made of the same logits and noise has these actions as its value.
    (``logit(u)`` and ``-logit(u)`` are equally distributed; the sign is ours: P(a = 1 | l) = P(u < sigmoid(l)).)

    Args:
        width: model width D; the hidden layer is 4 D wide.
        rate: target boundary rate; probabilities start near it.

    Raises:
        ValueError: ``rate`` outside (0, 1).
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]

    def __init__(self, width: int, rate: float = 0.2) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"agent.rate = {rate}: expected boundaries per symbol in (0, 1), such as 0.2")
        last = nn.Linear(4 * width, 1)
        # Small, so that probabilities start near the rate; not zero, so that the first layer learns from the start.
        nn.init.normal_(last.weight, std=0.1 / math.sqrt(4 * width))
        nn.init.constant_(last.bias, math.log(rate / (1 - rate)))
        self.predictor = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), last)

    def get_dist(self, tensordict: TensorDictBase) -> BoundaryDistribution:
        """The distribution of the actions, given observations of any batch shape (TorchRL's actor face)."""
        encoding = tensordict[keys.ENCODING].to(self.predictor[0].weight.dtype)
        logits = self.predictor(encoding).squeeze(-1)
        return BoundaryDistribution(logits, tensordict[keys.DECISION_MASK], forced_action(tensordict))

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; the same actions as one position after the other for the same noise."""
        dist = self.get_dist(observation)
        return dist.answer(dist.from_noise(noise))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` answers, for given actions, [B, T] or [K, B, T]."""
        return self.get_dist(observation).answer(action)
