"""Published boundary predictors: that of dynamic token pooling (Nawrot et al. 2023), and H-Net's router."""

import math

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import (
    Agent,
    BoundaryDistribution,
    Observation,
    Policy,
    StepState,
    agent_output,
    forced_action,
)
from tokenv.core import keys
from tokenv.core.errors import check_value
from tokenv.core.rates import FIXED_RATE

MARGIN = 1e-4  # distance from 0 and 1 of the probability whose logit is written


class Nawrot(Policy):
    """Dynamic token pooling's predictor (Nawrot et al. 2023, arXiv 2211.09761): independent Bernoulli decisions.

    ``l_i = Linear(GELU(Linear(X_i)))``, ``a_i = [l_i > logit(u_i)]``. With the published relaxed sample
    ``soft_i = sigmoid((l_i - logit(u_i)) / tau)`` (estimator ``gumbel``) this is ``[soft_i > 1/2]``, so the value of a
    straight-through tensor with the same logits and noise are these actions. (``logit(u)`` and ``-logit(u)`` are
    equally distributed; the sign is ours: P(a = 1 | l) = P(u < sigmoid(l)).)

    Args:
        width: model width D; the hidden layer is 4 D wide.
        rate: target boundary rate; probabilities start near it.

    Raises:
        ValueError: ``rate`` outside (0, 1).
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]

    def __init__(self, width: int, rate: float = 0.2) -> None:
        super().__init__()
        check_value("agent.rate", rate, FIXED_RATE)
        last = nn.Linear(4 * width, 1)
        # Small, so that probabilities start near the rate; not zero, so that the first layer learns from the start.
        nn.init.normal_(last.weight, std=0.1 / math.sqrt(4 * width))
        nn.init.constant_(last.bias, math.log(rate / (1 - rate)))
        self.predictor = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), last)

    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Return the distribution of the actions for observations of any batch shape (TorchRL's actor interface)."""
        encoding = tensordict[keys.ENCODING].to(next(self.predictor.parameters()).dtype)
        logits = self.predictor(encoding).squeeze(-1)
        return BoundaryDistribution(
            logits, tensordict[keys.DECISION_MASK], forced_action(tensordict)
        )

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; the actions are those of ``forward`` for the same noise."""
        dist = self.get_dist(observation)
        return dist.to_tensordict(dist.from_noise(noise))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs of ``draw`` for given actions, [B, T] or [K, B, T]."""
        return self.get_dist(observation).to_tensordict(action)


class HNet(Agent):
    """H-Net's router (Hwang et al. 2025, arXiv 2507.07955): a boundary where neighbouring bytes differ.

    ``p_t = clamp((1 - cos(W_q X_{t-1}, W_k X_t)) / 2, 0, 1)``, ``a_t = [p_t > 1/2]``; p = 1 at the first symbol.
    Deterministic: noise is ignored, ``action_log_prob`` and ``entropy`` are 0. It learns through ``boundary``, which
    the smoothing pooling reads (``model.pooling=smooth``), and a rate target: use the estimator ``path`` and the ratio
    loss.

    An observation holds X_t and not X_{t-1}. ``draw`` and ``score`` read whole sequences; acting at one position
    (``forward``) stores the encodings of the previous position in a ``StepState``.

    Args:
        width: model width D.
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]
    out_keys = [*Agent.out_keys, keys.BOUNDARY_LOGITS, keys.BOUNDARY]
    trainable = True
    pooling = "smooth"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        for linear in (self.query, self.key):
            nn.init.eye_(linear.weight)
        self._state = StepState()

    def _probability(self, observation: Observation, previous: Tensor) -> Tensor:
        encoding = observation[keys.ENCODING].to(self.key.weight.dtype)
        cosine = F.cosine_similarity(
            self.query(previous.to(encoding.dtype)), self.key(encoding), dim=-1
        )
        forced = forced_action(observation).to(encoding.dtype)
        return torch.where(observation[keys.DECISION_MASK], ((1 - cosine) / 2).clamp(0, 1), forced)

    @staticmethod
    def _output(prob: Tensor, action: Tensor) -> TensorDict:
        prob = prob.expand(action.shape)
        further = {
            keys.BOUNDARY: prob,
            keys.BOUNDARY_LOGITS: prob.clamp(MARGIN, 1 - MARGIN).logit(),
        }
        return agent_output(action, prob, **further)

    def _probabilities(self, observation: TensorDictBase) -> Tensor:
        encoding = observation[keys.ENCODING]
        # The first symbol's neighbour is arbitrary: its probability is forced.
        previous = torch.cat([encoding[..., :1, :], encoding[..., :-1, :]], -2)
        return self._probability(observation, previous)

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; all K samples are equal."""
        prob = self._probabilities(observation)
        return self._output(prob, (prob > 0.5).long().expand(noise.shape))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs of ``draw`` for given actions, [B, T] or [K, B, T]."""
        return self._output(self._probabilities(observation), action)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row.

        Raises:
            ValueError: a row is at any other position.
        """
        output = self.step(tensordict)
        return tensordict.update(self._output(output[keys.BOUNDARY], output[keys.ACTION]))

    def step(self, observation: Observation) -> Observation:
        """Act at one position; see ``Agent``."""
        encoding = observation[keys.ENCODING]
        position = observation[keys.POSITION]
        prob = self._probability(observation, self._state.exchange(encoding, position))
        return {keys.ACTION: (prob > 0.5).long(), keys.BOUNDARY_PROB: prob, keys.BOUNDARY: prob}
