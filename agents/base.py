"""The base of all agents, which draw the boundaries of whole sequences at once, or of one position at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, constraints
from torchrl.envs.utils import ExplorationType, exploration_type

from tokenv.core import keys
from tokenv.core.rates import RateRange

Observation: TypeAlias = TensorDictBase | Mapping[str, Tensor]  # of one position in ``Agent.step``


def forced_action(observation: Observation) -> Tensor:
    """Return the actions where no decision is made: 1 at the first symbol, 0 in the padding. int64 [.., T]."""
    return (observation[keys.POSITION] == 0).long()


def agent_output(
    action: Tensor,
    prob: Tensor,
    log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    **further: Tensor,
) -> TensorDict:
    """Return the outputs of an agent as a TensorDict of the action's shape.

    Args:
        action: int64 [..].
        prob: boundary probabilities, [..].
        log_prob: log-probabilities of the actions in nats, [..]; None for 0.
        entropy: entropies in nats, [..]; None for 0.
        further: further outputs by their keys, such as ``boundary_logits``.
    """
    outputs = {
        keys.ACTION: action,
        keys.ACTION_LOG_PROB: torch.zeros_like(prob) if log_prob is None else log_prob,
        keys.BOUNDARY_PROB: prob,
        keys.ENTROPY: torch.zeros_like(prob) if entropy is None else entropy,
    }
    return TensorDict(outputs | further, batch_size=action.shape)


def draw_noise(tensordict: Observation) -> Tensor:
    """Return the noise of single positions, [..]; draw it if the observation holds none."""
    noise = tensordict.get(keys.NOISE)
    position = tensordict[keys.POSITION]
    return torch.rand(position.shape, device=position.device) if noise is None else noise


def takes_mode() -> bool:
    """Return whether TorchRL's exploration type asks for the most probable actions instead of drawn ones."""
    return exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE)


def forced_or(observation: Observation, boundary: Tensor) -> Tensor:
    """Return the actions, int64: ``boundary``, overridden where no decision is made."""
    return torch.where(observation[keys.DECISION_MASK], boundary.long(), forced_action(observation))


def deterministic_output(
    observation: TensorDictBase, boundary: Tensor, dtype: torch.dtype
) -> TensorDict:
    """Return the outputs of a deterministic agent.

    Args:
        observation: ``position`` and ``decision_mask`` of batch size [..].
        boundary: bool [K, ..] or [..]; overridden where no decision is made.
        dtype: precision of the probabilities.

    Returns:
        ``action``, ``boundary_prob`` (0 or 1), ``action_log_prob`` and ``entropy`` (0), of the boundary's shape.
    """
    action = forced_or(observation, boundary)
    return agent_output(action, action.to(dtype))


def boundary_count(rate: float, seq_len: int, rates: RateRange | None = None) -> tuple[int, int]:
    """Return the number of positions for a boundary in a sequence of N symbols, and the number floor(N * rate) to draw.

    Of a range of rates, the number is that of the least rate.

    A boundary at the last symbol would predict nothing, so the positions are 0 (forced) to N - 2, and at most N - 1
    boundaries are drawn.

    Raises:
        ValueError: ``rate`` outside (0, 1], or so low that not even the first symbol draws a boundary.
    """
    if rates is not None:
        rate = rates.min
    if not 0 < rate <= 1:
        raise ValueError(
            f"agent.rate = {rate}: expected boundaries per symbol in (0, 1], such as 0.2"
        )
    positions = max(seq_len - 1, 1)
    # the small number undoes the rounding of products as 10 * 0.3
    count = min(int(seq_len * rate + 1e-9), positions)
    if count < 1:
        raise ValueError(
            f"agent.rate = {rate} draws no boundary in {seq_len} symbols: expected at least 1 / {seq_len}"
        )
    return positions, count


def boundary_counts(rate: Tensor, seq_len: int) -> Tensor:
    """Return the numbers floor(N * rate), at least 1, for the rates of several sequences: float [..] -> int64 [..]."""
    correction = 1 + 1e-6  # undoes the rounding of float32, in which observations hold rates
    return (seq_len * correction * rate.double()).floor().long().clamp(1, max(seq_len - 1, 1))


class BoundaryDistribution(Distribution):
    """Bernoulli decisions with logits l, some of them forced (probability 1, so log-probability and entropy 0).

    Unlike those of ``torch.distributions.Bernoulli`` the actions are integers of the logits' shape.

    Args:
        logits: l, [..].
        decision_mask: False where the action is forced.
        forced: forced actions.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # torch declares a dictionary

    def __init__(self, logits: Tensor, decision_mask: Tensor, forced: Tensor) -> None:
        self.logits = logits
        self.decision_mask = decision_mask
        self.forced = forced
        # all that the base class would do
        self._batch_shape, self._event_shape = logits.shape, torch.Size()

    def _choose(self, drawn: Tensor) -> Tensor:
        return torch.where(self.decision_mask, drawn.long(), self.forced)

    def from_noise(self, noise: Tensor) -> Tensor:
        """Return the actions which uniform numbers decide: ``a = [l > logit(u)]``, so that P(a = 1) = sigmoid(l)."""
        return self._choose(self.logits > torch.logit(noise))

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Draw actions of shape ``sample_shape + logits.shape``."""
        with torch.no_grad():
            return self.from_noise(
                torch.rand(
                    *sample_shape,
                    *self.logits.shape,
                    device=self.logits.device,
                    dtype=self.logits.dtype,
                )
            )

    @property
    def mode(self) -> Tensor:
        """The more probable action."""
        return self._choose(self.logits > 0)

    deterministic_sample = mode  # TorchRL's name

    @property
    def mean(self) -> Tensor:
        """Boundary probability; 0 or 1 where forced."""
        return torch.where(
            self.decision_mask, self.logits.sigmoid(), self.forced.to(self.logits.dtype)
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return ``log pi(a) = a l - log(1 + exp(l))`` in nats, with the logits' shape."""
        log_prob = value * self.logits - F.softplus(self.logits)
        return torch.where(self.decision_mask, log_prob, 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, with the logits' shape."""
        entropy = F.softplus(self.logits) - self.logits * self.logits.sigmoid()
        return torch.where(self.decision_mask, entropy, 0.0)

    def to_tensordict(self, action: Tensor) -> TensorDict:
        """Return the outputs of a policy with this distribution: action, log-probability and the rest, [.., B, T]."""
        dist = BoundaryDistribution(
            self.logits.expand(action.shape), self.decision_mask, self.forced
        )
        logits = {keys.BOUNDARY_LOGITS: dist.logits}
        return agent_output(
            action, dist.mean.detach(), dist.log_prob(action), dist.entropy(), **logits
        )


def check_exact_count(
    dist: BoundaryDistribution, action: Tensor, name: str, count: int | str
) -> None:
    """Check that a policy with an exact count can draw these boundaries.

    Args:
        dist: distribution of every decision, given the earlier ones.
        action: actions to be scored.
        name: name of the agent.
        count: number of boundaries which it draws.

    Raises:
        ValueError: an action differs from the forced one.
    """
    if (~dist.decision_mask & (action != dist.forced)).any():
        raise ValueError(
            f"the {name} agent draws {count} boundaries in every sequence, and these are more or fewer: "
            "choose an estimator that learns from the policy's own draws, or agent.name=learned"
        )


class StepState:
    """Values of earlier positions, for agents which compare neighbours or decide something at the start of a sequence.

    An observation holds one position only, so an agent which acts at one position at a time must read the positions of
    every row in order from 0 on (0 at any time starts a row anew), and steps through one batch at a time.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None  # values and positions

    def exchange(self, value: Tensor, position: Tensor) -> Tensor:
        """Return the values of the previous positions, and store these (detached) for the next call.

        Args:
            value: values at ``position``, [.., *shape].
            position: positions, [..].

        Returns:
            The values one position earlier, [.., *shape]; arbitrary at position 0.

        Raises:
            ValueError: a row is neither at the position after the last call's nor at 0.
        """
        previous = self.previous(value, position)
        self._last = value.detach().clone(), position.clone()
        return previous

    def latch(self, value: Tensor, position: Tensor) -> Tensor:
        """Return the values which were passed at position 0 of each row, [.., *shape].

        Args:
            value: values, of which only those at position 0 are read, [.., *shape].
            position: positions, [..].

        Raises:
            ValueError: as ``exchange``.
        """
        start = (position == 0).view(*position.shape, *(1,) * (value.dim() - position.dim()))
        initial = value.detach().where(start, self.previous(value, position))
        self._last = initial, position.clone()
        return initial

    def repeat(self, times: int) -> None:
        """Repeat the values of each row ``times`` times, side by side."""
        if self._last is not None:
            value, position = self._last
            self._last = value.repeat_interleave(times, 0), position.repeat_interleave(times, 0)

    def previous(self, value: Tensor, position: Tensor) -> Tensor:
        """Return the values of the previous positions, and store nothing; see ``exchange``."""
        previous = value.detach(), position.new_full(position.shape, -1)
        if self._last is not None and self._last[1].shape == position.shape:
            previous = self._last
        if bool(((position > 0) & (position != previous[1] + 1)).any()):
            raise ValueError(
                f"position = {position.tolist()} after {previous[1].tolist()}: this agent reads the position before, "
                "so it expected the next position or 0 in every row; step through sequences from their start, or pass "
                "whole sequences to draw"
            )
        return previous[0]


class Agent(TensorDictModuleBase, ABC):
    """Base class of agents, which draw boundaries.

    ``draw``, for whole sequences in one pass, and ``forward``, for one position (a TorchRL policy, which reads an
    observation and writes ``action``), must agree for equal ``noise``.

    Attributes:
        in_keys: observation keys which it reads.
        window: number w of earlier actions which it reads; 0 for a policy which ignores its past.
        trainable: whether it has a policy which an estimator can train.
        stochastic: whether it learns a distribution, by which ``score`` gives any boundaries a log-probability.
            Without one all log-probabilities are 0, which is no likelihood: it cannot imitate.
        fixed_count: whether all sequences of one length have as many boundaries, so that others have probability 0.
        pooling: the ``model.pooling`` which it requires; None for any.
        rates: range of target rates which it is trained for, if ``target_rate`` is among its ``in_keys``; else None. A
            constructor with an argument ``rates`` receives the run's range.
        non_causal: whether a decision reads all symbols of the history, later ones too, so that none of them may be
            predicted (``tokenv.core.contracts.check_causal``).
        reads_ahead: whether a decision depends on later symbols although they are predicted, so that the likelihood
            given its boundaries is not that of a causal model. Comparisons mark such agents.
    """

    in_keys: list[str]
    out_keys = [keys.ACTION, keys.ACTION_LOG_PROB, keys.BOUNDARY_PROB, keys.ENTROPY]
    window: int = 0
    trainable: bool = False
    stochastic: bool = False
    fixed_count: bool = False
    pooling: str | None = None
    rates: RateRange | None = None
    non_causal: bool = False
    reads_ahead: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let ``step`` call ``forward`` in a subclass which overrides ``forward`` alone."""
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and "step" not in vars(cls):
            cls.step = Agent.step  # type: ignore[method-assign]

    @abstractmethod
    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences.

        Args:
            observation: ``symbol``, ``encoding``, ``position`` and ``decision_mask`` of batch size [B, T].
            noise: uniform numbers in (0, 1), [B, T] or, for K samples, [K, B, T].

        Returns:
            ``action``, ``action_log_prob``, ``boundary_prob`` and ``entropy`` (and ``boundary_logits``, if the agent
            has them) with the noise's shape; gradients flow into the encoding.
        """

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs of ``draw`` for given boundaries, int64 [.., B, T].

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
        """Act at one position: read an observation (and ``noise``, if present), write ``action`` and other outputs."""

    def step(self, observation: Mapping[str, Tensor]) -> Observation:
        """Act at one position as ``forward`` does: the same ``action``, ``boundary_prob`` and ``boundary``, if any.

        Generation calls it. Agents override it together with ``forward`` where that saves most of the time.

        Args:
            observation: what ``forward`` reads, ``noise`` included, [B, ..] each.
        """
        tensordict = TensorDict(dict(observation), batch_size=observation[keys.POSITION].shape)
        # a copy: the agent cannot change symbols or likelihoods
        acted: TensorDictBase = self(tensordict.clone())
        return acted

    def compile_draw(self) -> None:
        """Compile the functions by which boundaries are drawn, if there are any; the actions stay the same."""
        for child in self.children():
            if isinstance(child, Agent):
                child.compile_draw()

    def repeat_rows(self, times: int) -> None:
        """Repeat the state of each row ``times`` times, side by side.

        An agent whose state is not in a ``StepState`` overrides this method.
        """
        for module in self.modules():
            for value in vars(module).values():
                if isinstance(value, StepState):
                    value.repeat(times)


class Policy(Agent):
    """An agent which learns: its decisions are drawn from a ``BoundaryDistribution``."""

    out_keys = [*Agent.out_keys, keys.BOUNDARY_LOGITS]
    dist_sample_keys = [keys.ACTION]  # key of the actions in TorchRL's losses,
    log_prob_keys = [keys.ACTION_LOG_PROB]  # and of their log-probabilities
    trainable = True
    stochastic = True

    @abstractmethod
    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Return the distribution of the actions for observations of any batch shape (TorchRL's actor interface)."""

    def _decide(self, observation: Observation) -> tuple[BoundaryDistribution, Tensor]:
        dist = self.get_dist(observation)
        noise = observation.get(keys.NOISE)
        if takes_mode():
            return dist, dist.mode
        return dist, dist.sample() if noise is None else dist.from_noise(noise)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position; TorchRL's exploration type decides between a draw and the most probable action."""
        dist, action = self._decide(tensordict)
        return tensordict.update(dist.to_tensordict(action))

    def step(self, observation: Mapping[str, Tensor]) -> Observation:
        """Act at one position; see ``Agent``."""
        dist, action = self._decide(observation)
        return {keys.ACTION: action, keys.BOUNDARY_PROB: dist.mean}
