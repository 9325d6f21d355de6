"""H-Net's router (Hwang et al. 2025, arXiv 2507.07955): a boundary where neighbouring bytes differ."""

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import Agent, forced_action
from tokenv.agents.step_state import StepState
from tokenv.core import keys

MARGIN = 1e-4  # logits are those of a p that stays this far from 0 and 1


class HNet(Agent):
    """``p_t = clamp((1 - cos(W_q X_{t-1}, W_k X_t)) / 2, 0, 1)``, ``a_t = [p_t > 1/2]``; p = 1 at the first symbol.

    Deterministic: noise is ignored, ``action_log_prob`` and ``entropy`` are 0. It learns through ``boundary``, which
    the smoothing pooling reads (``model.pooling=smooth``), and a rate target: use the estimator ``path`` and the ratio
    loss.

    An observation holds X_t and not X_{t-1}. ``draw`` and ``score`` see whole sequences; acting at one position
    (``forward``) remembers the encodings of the position before: see ``tokenv.agents.step_state.StepState``.

    Args:
        width: model width D.
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]
    out_keys = [*Agent.out_keys, keys.BOUNDARY_LOGITS, keys.BOUNDARY]
    learns = True
    pooling = "smooth"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        for linear in (self.query, self.key):
            nn.init.eye_(linear.weight)
        self._memory = StepState()

    def _probability(self, observation: TensorDictBase, previous: Tensor) -> Tensor:
        encoding = observation[keys.ENCODING].to(self.key.weight.dtype)
        cosine = F.cosine_similarity(self.query(previous.to(encoding.dtype)), self.key(encoding), dim=-1)
        forced = forced_action(observation).to(encoding.dtype)
        return torch.where(observation[keys.DECISION_MASK], ((1 - cosine) / 2).clamp(0, 1), forced)

    @staticmethod
    def _answer(prob: Tensor, action: Tensor) -> TensorDict:
        prob = prob.expand(action.shape)
        return TensorDict(
            {
                keys.ACTION: action,
                keys.ACTION_LOG_PROB: torch.zeros_like(prob),
                keys.BOUNDARY_PROB: prob,
                keys.BOUNDARY: prob,
                keys.BOUNDARY_LOGITS: prob.clamp(MARGIN, 1 - MARGIN).logit(),
                keys.ENTROPY: torch.zeros_like(prob),
            },
            batch_size=action.shape,
        )

    def _probabilities(self, observation: TensorDictBase) -> Tensor:
        encoding = observation[keys.ENCODING]
        # The first symbol's neighbour is arbitrary: its probability is forced.
        previous = torch.cat([encoding[..., :1, :], encoding[..., :-1, :]], -2)
        return self._probability(observation, previous)

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Decide all boundaries at once; K samples are K times the same."""
        prob = self._probabilities(observation)
        return self._answer(prob, (prob > 0.5).long().expand(noise.shape))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` answers, for given actions, [B, T] or [K, B, T]."""
        return self._answer(self._probabilities(observation), action)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row.

        Raises:
            ValueError: a row is at any other position.
        """
        encoding, position = tensordict[keys.ENCODING], tensordict[keys.POSITION]
        prob = self._probability(tensordict, self._memory.exchange(encoding, position))
        return tensordict.update(self._answer(prob, (prob > 0.5).long()))
