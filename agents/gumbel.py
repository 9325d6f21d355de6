"""The boundary predictor of dynamic token pooling (Nawrot et al. 2023, arXiv 2211.09761)."""

import math

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from tokenv import keys
from tokenv.agents.base import Agent, BoundaryDistribution, forced_action


class Nawrot(Agent):
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
    out_keys = [*Agent.out_keys, keys.BOUNDARY_LOGITS]
    dist_sample_keys = [keys.ACTION]  # where TorchRL's losses look for what was drawn,
    log_prob_keys = [keys.ACTION_LOG_PROB]  # and for its log-probability
    learns = True

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

    @staticmethod
    def _answer(dist: BoundaryDistribution, action: Tensor) -> TensorDict:
        logits = dist.logits.expand(action.shape)
        dist = BoundaryDistribution(logits, dist.decision_mask, dist.forced)
        return TensorDict(
            {
                keys.ACTION: action,
                keys.ACTION_LOG_PROB: dist.log_prob(action),
                keys.BOUNDARY_PROB: dist.mean.detach(),
                keys.BOUNDARY_LOGITS: logits,
                keys.ENTROPY: dist.entropy(),
            },
            batch_size=action.shape,
        )

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; the same actions as one position after the other for the same noise."""
        dist = self.get_dist(observation)
        return self._answer(dist, dist.from_noise(noise))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` answers, for given actions, [B, T] or [K, B, T]."""
        return self._answer(self.get_dist(observation), action)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position; TorchRL's exploration type decides between a draw and the more probable action."""
        dist = self.get_dist(tensordict)
        noise = tensordict.get(keys.NOISE)
        if exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            action = dist.mode
        else:
            action = dist.sample() if noise is None else dist.from_noise(noise)
        return tensordict.update(self._answer(dist, action))
