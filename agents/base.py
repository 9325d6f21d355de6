"""What every agent does: draw the boundaries of whole sequences at once, or of one position at a time."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, constraints
from torchrl.envs.utils import ExplorationType, exploration_type

from tokenv.agents.step_state import StepState
from tokenv.core import keys
from tokenv.core.rates import RateRange


def forced_action(observation: TensorDictBase) -> Tensor:
    """What is drawn where nobody decides: a boundary at the first symbol, none in the padding. int64 [.., T]."""
    return (observation[keys.POSITION] == 0).long()


def deterministic_output(observation: TensorDictBase, boundary: Tensor, dtype: torch.dtype) -> TensorDict:
    """What a deterministic agent answers.

    Args:
        observation: ``position`` and ``decision_mask`` of batch size [..].
        boundary: bool [K, ..] or [..]; overridden where nobody decides.
        dtype: of the probabilities.

    Returns:
        ``action``, ``boundary_prob`` (0 or 1), ``action_log_prob`` and ``entropy`` (0), of the boundary's shape.
    """
    action = torch.where(observation[keys.DECISION_MASK], boundary.long(), forced_action(observation))
    prob = action.to(dtype)
    return TensorDict(
        {
            keys.ACTION: action,
            keys.ACTION_LOG_PROB: torch.zeros_like(prob),
            keys.BOUNDARY_PROB: prob,
            keys.ENTROPY: torch.zeros_like(prob),
        },
        batch_size=action.shape,
    )


def boundary_count(rate: float, seq_len: int) -> tuple[int, int]:
    """Places for a boundary in a sequence of N symbols, and the exact number floor(N * rate) to be drawn.

    The last symbol's boundary would predict nothing, so the places are symbols 0 (forced) to N - 2, and N - 1
    boundaries are the most.

    Raises:
        ValueError: ``rate`` outside (0, 1], or so low that not even the first symbol draws a boundary.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"agent.rate = {rate}: expected boundaries per symbol in (0, 1], such as 0.2")
    places = max(seq_len - 1, 1)
    count = min(int(seq_len * rate + 1e-9), places)  # the tiny number undoes the rounding of 10 * 0.3 and its like
    if count < 1:
        raise ValueError(f"agent.rate = {rate} draws no boundary in {seq_len} symbols: expected at least 1 / {seq_len}")
    return places, count


def boundary_counts(rate: Tensor, seq_len: int) -> Tensor:
    """The numbers floor(N * rate), at least 1, of sequences with rates of their own: float [..] -> int64 [..]."""
    undo = 1 + 1e-6  # the rounding of float32, in which observations hold rates
    return (seq_len * undo * rate.double()).floor().long().clamp(1, max(seq_len - 1, 1))


class BoundaryDistribution(Distribution):
    """Bernoulli decisions with logits l, some of them forced (probability 1, so log-probability and entropy 0).

    Unlike ``torch.distributions.Bernoulli`` it takes and gives integer actions of the logits' own shape.

    Args:
        logits: [..].
        decision_mask: False where the action is forced.
        forced: the action there.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # torch declares it so

    def __init__(self, logits: Tensor, decision_mask: Tensor, forced: Tensor) -> None:
        self.logits, self.decision_mask, self.forced = logits, decision_mask, forced
        super().__init__(logits.shape, validate_args=False)

    def _choose(self, drawn: Tensor) -> Tensor:
        return torch.where(self.decision_mask, drawn.long(), self.forced)

    def from_noise(self, noise: Tensor) -> Tensor:
        """The action that uniform numbers decide: ``a = [l > logit(u)]``, so that P(a = 1) = sigmoid(l)."""
        return self._choose(self.logits > torch.logit(noise))

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Draw actions of shape ``sample_shape + logits.shape``."""
        with torch.no_grad():
            return self.from_noise(
                torch.rand(*sample_shape, *self.logits.shape, device=self.logits.device, dtype=self.logits.dtype)
            )

    @property
    def mode(self) -> Tensor:
        """The more probable action."""
        return self._choose(self.logits > 0)

    deterministic_sample = mode  # TorchRL's name

    @property
    def mean(self) -> Tensor:
        """Boundary probability; 0 or 1 where forced."""
        return torch.where(self.decision_mask, self.logits.sigmoid(), self.forced.to(self.logits.dtype))

    def log_prob(self, value: Tensor) -> Tensor:
        """``log pi(a) = a l - log(1 + exp(l))`` in nats, with the logits' shape."""
        log_prob = value * self.logits - F.softplus(self.logits)
        return torch.where(self.decision_mask, log_prob, 0.0)

    def entropy(self) -> Tensor:
        """In nats, with the logits' shape."""
        entropy = F.softplus(self.logits) - self.logits * self.logits.sigmoid()
        return torch.where(self.decision_mask, entropy, 0.0)

    def answer(self, action: Tensor) -> TensorDict:
        """What a policy answers that draws from this: the action, its log-probability and their like, [.., B, T]."""
        dist = BoundaryDistribution(self.logits.expand(action.shape), self.decision_mask, self.forced)
        return TensorDict(
            {
                keys.ACTION: action,
                keys.ACTION_LOG_PROB: dist.log_prob(action),
                keys.BOUNDARY_PROB: dist.mean.detach(),
                keys.BOUNDARY_LOGITS: dist.logits,
                keys.ENTROPY: dist.entropy(),
            },
            batch_size=action.shape,
        )


def check_exact_count(dist: BoundaryDistribution, action: Tensor, name: str, count: int | str) -> None:
    """Refuse boundaries that a policy with an exact count would never draw.

    Args:
        dist: of every decision, given the earlier ones.
        action: what is to be scored.
        name: of the agent.
        count: how many it draws.

    Raises:
        ValueError: a forced decision is another.
    """
    if (~dist.decision_mask & (action != dist.forced)).any():
        raise ValueError(
            f"the {name} agent draws {count} boundaries in every sequence, and these are more or fewer: "
            "choose an estimator that learns from the policy's own draws, or agent.name=learned"
        )


class Agent(TensorDictModuleBase, ABC):
    """Draws boundaries.

    Two faces must agree for equal ``noise``: ``draw`` for whole sequences in one pass, and ``forward`` for one
    position (a TorchRL policy: it reads an observation and writes ``action``).

    Attributes:
        in_keys: what it reads of an observation.
        window: number w of earlier actions it reads; 0 for a policy that ignores its past.
        learns: whether it has a policy to be trained by an estimator.
        pooling: the ``model.pooling`` that it is made for; None for any.
        rates: those that an agent is trained for which is told them, by ``target_rate`` among its ``in_keys``; None for
            one that is not. A constructor that takes ``rates`` is given the run's range.
        whole: whether a decision reads all symbols that are decided at, later ones too, so that none of them may be
            predicted (``tokenv.core.contracts.check_causal``).
    """

    in_keys: list[str]
    out_keys = [keys.ACTION, keys.ACTION_LOG_PROB, keys.BOUNDARY_PROB, keys.ENTROPY]
    window: int = 0
    learns: bool = False
    pooling: str | None = None
    rates: RateRange | None = None
    whole: bool = False

    @abstractmethod
    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences.

        Args:
            observation: ``symbol``, ``encoding``, ``position`` and ``decision_mask`` of batch size [B, T].
            noise: uniform numbers in (0, 1), [B, T] or, for K samples, [K, B, T].

        Returns:
            ``action``, ``action_log_prob``, ``boundary_prob`` and ``entropy`` (and ``boundary_logits`` where there
            are some) with the noise's shape; gradients flow into the encoding.
        """

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` gives, but for given boundaries: int64 [.., B, T]. Only policies can.

        Raises:
            ValueError: this agent has no policy.
        """
        raise ValueError(
            f"{type(self).__name__} draws boundaries and has no policy to score them with: choose an agent that learns"
        )

    @property
    def autoregressive(self) -> bool:
        """Whether a decision depends on earlier ones."""
        return self.window > 0

    @abstractmethod
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position: read an observation (and ``noise``, where given), write ``action`` and its like."""

    def compile_draw(self) -> None:
        """From now on draw through compiled functions, where there is something to compile: the same actions."""
        for child in self.children():
            if isinstance(child, Agent):
                child.compile_draw()

    def repeat_rows(self, times: int) -> None:
        """Go on acting for ``times`` rows, side by side, in place of each: what was remembered of it holds for all.

        An agent that remembers otherwise than in a ``tokenv.agents.step_state.StepState`` of its own repeats that, too.
        """
        for module in self.modules():
            for value in vars(module).values():
                if isinstance(value, StepState):
                    value.repeat(times)


class Policy(Agent):
    """An agent that learns: its decisions are drawn from a ``BoundaryDistribution``."""

    out_keys = [*Agent.out_keys, keys.BOUNDARY_LOGITS]
    dist_sample_keys = [keys.ACTION]  # where TorchRL's losses look for what was drawn,
    log_prob_keys = [keys.ACTION_LOG_PROB]  # and for its log-probability
    learns = True

    @abstractmethod
    def get_dist(self, tensordict: TensorDictBase) -> BoundaryDistribution:
        """The distribution of the actions, given observations of any batch shape (TorchRL's actor face)."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position; TorchRL's exploration type decides between a draw and the more probable action."""
        dist, noise = self.get_dist(tensordict), tensordict.get(keys.NOISE)
        if exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            action = dist.mode
        else:
            action = dist.sample() if noise is None else dist.from_noise(noise)
        return tensordict.update(dist.answer(action))
