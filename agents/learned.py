"""The windowed Bernoulli policy which the estimators train (paper, section 2.5, eq. 19-23)."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import expit, logit
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import BoundaryDistribution, Observation, Policy, forced_action, takes_mode
from tokenv.core import keys
from tokenv.core.devices import shares_memory_with_numpy
from tokenv.core.errors import NOT_NEGATIVE, POSITIVE, check_value
from tokenv.core.rates import FIXED_RATE, RateRange


class RateFiLM(nn.Module):
    """Gains and shifts of a policy's outputs as functions of the rate (FiLM, Perez et al. 2018, arXiv 1709.07871).

    ``(g, h) = V tanh(U z + b)`` with ``z = (logit(rate) - m) / r``, -1 and 1 at the ends of the range; V starts at 0,
    so that gains and shifts start at 0.

    Args:
        rates: range of the target rates.
        outputs: number of the policy's outputs.
        hidden: hidden units.
    """

    def __init__(self, rates: RateRange, outputs: int, hidden: int = 16) -> None:
        super().__init__()
        low, high = (math.log(rate / (1 - rate)) for rate in (rates.min, rates.max))
        self.centre = (low + high) / 2
        self.half_width = (high - low) / 2
        self.hidden = nn.Linear(1, hidden)
        self.last = nn.Linear(hidden, 2 * outputs, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, rate: Tensor) -> tuple[Tensor, Tensor]:
        """Return gains and shifts, [.., outputs] each, for rates [..]."""
        z = (torch.logit(rate) - self.centre) / self.half_width
        gain, shift = self.last(torch.tanh(self.hidden(z.unsqueeze(-1)))).chunk(2, -1)
        return gain, shift


# reading from a GPU whether the iteration has converged costs more than a few rounds
ROUNDS_PER_CHECK = 4
COMPILED_ROUNDS = 16  # one kernel each


class Learned(Policy):
    """Boundary logits from the byte representation and the last w boundaries.

    ``l_raw_i = W_0 X_i + sum_{j=1..w} a_{i-j} (W_j X_i)`` (eq. 21), ``l = softcap(l_raw / scale + logit(rate))``
    (eq. 22, 23; no softcap in evaluation), ``a_i ~ Bernoulli(sigmoid(l_i))``.

    With ``rates`` it reads the target rate of every sequence: with z a normalised rate (``RateFiLM``), ``W_j X_i``
    becomes ``(1 + g_j(z)) W_j X_i + scale h_j(z)``, and ``logit(rate)`` is that of the target. g and h are learned and
    start at 0, where this is the policy of one rate.

    Args:
        width: model width D.
        rate: target boundary rate; probabilities start near it.
        window: earlier boundaries w >= 0 which a decision reads.
        scale: divisor of the raw logits (16 in the paper).
        softcap: bound of the training logits: 6 in the authors' released code, so that probabilities in training stay
            between 0.0025 and 0.9975; the paper gives no value.
        projection_bias: whether the projections have a bias, as in the authors' released code; the paper has none.
        zero_init: whether probabilities start exactly at the rate, instead of near it.
        rates: range of the target rates, which then replace ``rate``.

    Raises:
        ValueError: ``rate`` outside (0, 1), negative ``window``, ``scale`` or ``softcap`` not positive.
    """

    in_keys = [keys.ENCODING, keys.LAST_ACTIONS, keys.POSITION, keys.DECISION_MASK]

    def __init__(
        self,
        width: int,
        rate: float = 0.2,
        window: int = 8,
        scale: float = 16.0,
        softcap: float = 6.0,
        zero_init: bool = False,
        rates: RateRange | None = None,
        projection_bias: bool = False,
    ) -> None:
        super().__init__()
        check_value("agent.rate", rate, FIXED_RATE)
        check_value("agent.window", window, NOT_NEGATIVE)
        check_value("agent.scale", scale, POSITIVE)
        check_value("agent.softcap", softcap, POSITIVE)
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.bias = math.log(rate / (1 - rate))
        self._compiled_rounds: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.projection = nn.Linear(width, window + 1, bias=projection_bias)
        if zero_init:
            for parameter in self.projection.parameters():
                nn.init.zeros_(parameter)
        if rates is not None:
            self.rates = rates
            self.bias = 0.0
            self.in_keys = [*self.in_keys, keys.TARGET_RATE]
            self.film = RateFiLM(rates, window + 1)

    def _project(self, encoding: Tensor) -> Tensor:
        """Return all W_j X_i in one matrix product: [.., D] -> [.., w + 1]."""
        weight = self.projection.weight
        return F.linear(encoding.to(weight.dtype), weight, self.projection.bias)

    def _condition_on_rate(self, observation: Observation) -> Tensor:
        """Return all W_j X_i, modulated by the target rate if the policy reads one: [.., w + 1]."""
        projected = self._project(observation[keys.ENCODING])
        if self.rates is None:
            return projected
        gain, shift = self.film(observation[keys.TARGET_RATE].to(projected.dtype))
        start = F.pad(self._initial_logit(observation).unsqueeze(-1), (0, self.window))
        return projected * (1 + gain) + self.scale * (shift + start)

    def _initial_logit(self, observation: Observation) -> Tensor:
        """Return the logits of the target rates, at which the logits of the policy start: [..]."""
        return torch.logit(observation[keys.TARGET_RATE].to(self.projection.weight.dtype))

    def _logits(self, projected: Any, earlier: Iterable[Any]) -> Any:
        """Return the logits: [.., w + 1] and the actions a_{i-1}, ..., a_{i-w}, each [..] -> [..]; tensors or arrays.

        The sum is a loop of elementwise operations, so that its rounding, hence every drawn action, is the same
        for one position and for all of them.
        """
        raw = projected[..., 0]
        for j, action in enumerate(earlier, 1):
            raw = raw + projected[..., j] * action
        scaled = raw / self.scale + self.bias
        return self.softcap * torch.tanh(scaled / self.softcap) if self.training else scaled

    def _earlier(self, action_T: Tensor) -> list[Tensor]:
        """Return a_{i-1}, ..., a_{i-w} of every position; 0 before the start."""
        length = action_T.shape[-1]
        return [F.pad(action_T, (j, 0))[..., :length] for j in range(1, self.window + 1)]

    @torch.no_grad()
    def _solve_actions(
        self, projected: Tensor, noise: Tensor, observation: TensorDictBase
    ) -> Tensor:
        """Solve ``a_i = [l_i(a_{i-1}, ..., a_{i-w}) > logit(u_i)]`` for all i at once.

        The system is triangular, so it has exactly one solution, to which Jacobi iteration converges: after r rounds at
        least the first r actions are right. A neighbour rarely changes a decision, so a few rounds suffice.

        Compiled rounds only give the starting point: the result has converged in the arithmetic of
        ``_distribution_given``.
        """
        system = (
            projected,
            torch.logit(noise),
            observation[keys.DECISION_MASK],
            forced_action(observation),
        )
        action = system[-1].expand(noise.shape)
        rounds = ROUNDS_PER_CHECK
        if self._compiled_rounds is not None:
            action = self._compiled_rounds(action, COMPILED_ROUNDS, *system)[0]
            rounds = 1
        for _ in range(0, noise.shape[-1] + 1, rounds):
            action, previous = self._jacobi_rounds(action, rounds, *system)
            if torch.equal(action, previous):
                return action
        raise AssertionError("Jacobi iteration must converge within N rounds: the logits hold NaN")

    def _jacobi_rounds(
        self,
        action: Tensor,
        count: int,
        projected: Tensor,
        threshold: Tensor,
        decision_mask: Tensor,
        forced: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the actions after ``count`` rounds of Jacobi iteration, and those before the last round."""
        previous = action
        for _ in range(count):
            previous = action
            drawn = self._logits(projected, self._earlier(previous)) > threshold
            action = torch.where(decision_mask, drawn.long(), forced)
        return action, previous

    def compile_draw(self) -> None:
        """Compile most of the rounds of Jacobi iteration; see ``_solve_actions``."""
        self._compiled_rounds = torch.compile(self._jacobi_rounds, dynamic=False)

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; the actions are those of ``forward`` for the same noise."""
        projected = self._condition_on_rate(observation)
        action = self._solve_actions(projected.detach(), noise, observation)
        return self._distribution_given(projected, action, observation).to_tensordict(action)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs for given boundaries, int64 [.., B, T], in parallel."""
        return self._distribution_given(
            self._condition_on_rate(observation), action, observation
        ).to_tensordict(action)

    def _distribution_given(
        self, projected: Tensor, action: Tensor, observation: TensorDictBase
    ) -> BoundaryDistribution:
        """Return the distribution of every decision, given all earlier ones."""
        logits = self._logits(projected, self._earlier(action)).expand(action.shape)
        return BoundaryDistribution(
            logits, observation[keys.DECISION_MASK], forced_action(observation)
        )

    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Return the distribution of the actions for observations of any batch shape (TorchRL's actor interface).

        Raises:
            ValueError: the observations hold fewer earlier actions than the policy reads.
        """
        earlier = tensordict[keys.LAST_ACTIONS].unbind(-1)[: self.window]
        if len(earlier) < self.window:
            raise ValueError(
                f"observations hold {len(earlier)} earlier actions and the policy reads {self.window}: "
                f"make the environment with window={self.window} or more"
            )
        logits = self._logits(self._condition_on_rate(tensordict), earlier)
        return BoundaryDistribution(
            logits, tensordict[keys.DECISION_MASK], forced_action(tensordict)
        )

    def step(self, observation: Mapping[str, Tensor]) -> Observation:
        """Act at one position; see ``Agent``. On a CPU numpy computes it, which few numbers cost less than torch."""
        weight = self.projection.weight
        if (
            type(self) is not Learned
            or self.training
            or self.rates is not None
            or observation.get(keys.NOISE) is None
            or takes_mode()
            or not shares_memory_with_numpy(weight.device)
        ):
            return super().step(observation)
        names = keys.ENCODING, keys.LAST_ACTIONS, keys.NOISE, keys.POSITION, keys.DECISION_MASK
        x_BD, last_Bw, noise_B, position_B, mask_B = (
            observation[name].detach().numpy() for name in names
        )
        weight_wD = weight.detach().numpy()
        projected = x_BD.astype(weight_wD.dtype, copy=False) @ weight_wD.T
        if self.projection.bias is not None:
            projected = projected + self.projection.bias.detach().numpy()
        logits = self._logits(projected, last_Bw.T[: self.window])
        forced_B = position_B == 0
        action_B = np.where(mask_B, logits > logit(noise_B), forced_B).astype(np.int64)
        prob_B = np.where(mask_B, expit(logits), forced_B.astype(logits.dtype))
        return {
            keys.ACTION: torch.from_numpy(action_B),
            keys.BOUNDARY_PROB: torch.from_numpy(prob_B),
        }
