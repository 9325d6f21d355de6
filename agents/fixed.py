"""Baseline agents, which neither learn nor read the text."""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import (
    Agent,
    Observation,
    StepState,
    agent_output,
    boundary_count,
    boundary_counts,
    deterministic_output,
    draw_noise,
    forced_action,
)
from tokenv.core import keys
from tokenv.core.errors import check_value, choice
from tokenv.core.rates import RateRange

ROUNDINGS = ("down", "random")
ALIGNMENTS = ("start", "end")


def _output(action: Tensor, prob: Tensor) -> TensorDict:
    """Return the outputs of an agent which draws with given probabilities: [..], [..]."""
    log_prob = torch.where(action.bool(), prob, 1 - prob).log()
    return agent_output(action, prob, log_prob, torch.distributions.Bernoulli(prob).entropy())


class _Fixed(Agent):
    """Common to agents which draw a given number of boundaries per sequence.

    Acting at one position with ``rounding="random"`` stores the number of every row in a ``StepState``.

    Args:
        rate: boundaries per symbol.
        seq_len: symbols N of a sequence.
        rounding: ``down`` draws exactly floor(N * rate) boundaries, the first symbol's included, in every sequence.
            ``random`` draws floor((N - 1) * rate + u_0), u_0 being the noise at the first symbol, where no decision is
            made: the mean over sequences is then the rate itself, per symbol which predicts another, as that of a
            calibrated policy (``tokenv.evaluation.calibration``).
        rates: range of the target rates, one for each sequence, which then replace ``rate``.

    Raises:
        ValueError: ``rate`` outside (0, 1], or so low that not even the first symbol draws a boundary; or another
            ``rounding``.
    """

    in_keys = [keys.POSITION, keys.TOKEN_COUNT, keys.DECISION_MASK]

    def __init__(
        self, rate: float, seq_len: int, rounding: str = "down", rates: RateRange | None = None
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.num_positions, self.count = boundary_count(rate, seq_len, rates)
        check_value("agent.rounding", rounding, choice(*ROUNDINGS))
        self.rounding = rounding
        self.mean = self.num_positions * rate
        self.fixed_count = rounding == "down" and rates is None
        self._state = StepState()
        if rates is not None:
            self.rates = rates
            self.in_keys = [*self.in_keys, keys.TARGET_RATE]

    def _probability(self, position: Tensor, token_count: Tensor, count: Tensor) -> Tensor:
        """Return P(a_i = 1) given the number of boundaries before i, and that of the whole sequence."""
        raise NotImplementedError

    def _count(self, first_noise: Tensor, observation: Observation) -> Tensor:
        """Return the number of boundaries of the whole sequence, int64 of the noise's shape."""
        rate = (
            None if self.rates is None else observation[keys.TARGET_RATE].expand(first_noise.shape)
        )
        if self.rounding == "down":
            if rate is not None:
                return boundary_counts(rate, self.seq_len)
            return torch.full_like(first_noise, self.count, dtype=torch.long)
        mean = self.mean if rate is None else self.num_positions * rate
        return (mean + first_noise).floor().long().clamp(1, self.num_positions)

    def _act(
        self, observation: Observation, token_count: Tensor, count: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        decision_mask = observation[keys.DECISION_MASK]
        forced = forced_action(observation)
        prob = self._probability(observation[keys.POSITION], token_count, count).to(noise.dtype)
        prob = torch.where(decision_mask, prob, forced.to(noise.dtype)).expand(noise.shape)
        return (noise < prob).long(), prob

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw one position after the other, because the count so far matters; no matrix product is involved."""
        count = self._count(noise[..., 0], observation[..., 0])
        so_far = torch.zeros_like(count)
        actions = []
        probs = []
        for i in range(noise.shape[-1]):
            action, prob = self._act(observation[..., i], so_far, count, noise[..., i])
            so_far = so_far + action
            actions.append(action)
            probs.append(prob)
        return _output(torch.stack(actions, -1), torch.stack(probs, -1))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position.

        Raises:
            ValueError: with ``rounding="random"``, a row is neither at the position after the last call's nor at 0.
        """
        output = self.step(tensordict)
        return tensordict.update(_output(output[keys.ACTION], output[keys.BOUNDARY_PROB]))

    def step(self, observation: Observation) -> Observation:
        """Act at one position; see ``Agent``."""
        noise = draw_noise(observation)
        count = self._count(noise, observation)
        if self.rounding == "random":
            count = self._state.latch(count, observation[keys.POSITION])
        action, prob = self._act(observation, observation[keys.TOKEN_COUNT], count, noise)
        return {keys.ACTION: action, keys.BOUNDARY_PROB: prob}


class Uniform(_Fixed):
    """Evenly spaced boundaries, as many as ``rounding`` says (paper, section 4).

    Args:
        rate: boundaries per symbol; see ``_Fixed`` for ``seq_len``, ``rounding`` and ``rates``.
        align: ``start`` draws a boundary at the first symbol of each segment of equal length. ``end`` draws the
            boundaries after the first symbol's at the last symbol of each of one segment less, so that the last
            position is a boundary: patches of a history then end where a direct forecast begins.

    Raises:
        ValueError: see ``_Fixed``; or another ``align``.
    """

    def __init__(
        self,
        rate: float,
        seq_len: int,
        rounding: str = "down",
        align: str = "start",
        rates: RateRange | None = None,
    ) -> None:
        super().__init__(rate, seq_len, rounding, rates)
        check_value("agent.align", align, choice(*ALIGNMENTS))
        self.align = align

    def _probability(self, position: Tensor, token_count: Tensor, count: Tensor) -> Tensor:
        segments, start = (count, position) if self.align == "start" else (count - 1, position + 1)
        return start * segments // self.num_positions > (start - 1) * segments // self.num_positions

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all positions at once: nothing depends on the count so far."""
        count = self._count(noise[..., :1], observation[..., :1])
        return _output(*self._act(observation, torch.zeros_like(count), count, noise))


class Random(_Fixed):
    """Boundaries at uniformly random positions, as many as ``rounding`` says, drawn without replacement."""

    def _probability(self, position: Tensor, token_count: Tensor, count: Tensor) -> Tensor:
        return (count - token_count) / (self.num_positions - position).clamp(min=1)


class RandomRate(Agent):
    """Independent boundaries at a rate which is drawn for each sequence, uniformly between two bounds.

    ``rate = low + (high - low) u_0``, ``a_i = [u_i < rate]``: the noise at the first symbol, where no decision is made,
    determines the rate of the sequence, so that boundaries are a function of the noise and every sample of a text has
    its own rate. A language model which is trained in this way works at all these rates: a start for comparing
    estimators.

    Acting at one position stores the rate of every row in a ``StepState``.

    Args:
        low: smallest rate in boundaries per symbol.
        high: largest rate.

    Raises:
        ValueError: not 0 <= ``low`` <= ``high`` <= 1.
    """

    in_keys = [keys.POSITION, keys.DECISION_MASK]

    def __init__(self, low: float = 0.05, high: float = 0.4) -> None:
        super().__init__()
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"agent.low = {low}, agent.high = {high}: expected boundaries per symbol with 0 <= low <= high <= 1, "
                "such as 0.05 and 0.4"
            )
        self.low = low
        self.high = high
        self._state = StepState()

    def _rate(self, first_noise: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * first_noise

    @staticmethod
    def _act(observation: Observation, rate: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        prob = torch.where(
            observation[keys.DECISION_MASK], rate, forced_action(observation).to(noise.dtype)
        )
        return (noise < prob).long(), prob

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once."""
        return _output(*self._act(observation, self._rate(noise[..., :1]), noise))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row.

        Raises:
            ValueError: a row is at any other position.
        """
        output = self.step(tensordict)
        return tensordict.update(_output(output[keys.ACTION], output[keys.BOUNDARY_PROB]))

    def step(self, observation: Observation) -> Observation:
        """Act at one position; see ``Agent``."""
        noise = draw_noise(observation)
        rate = self._state.latch(self._rate(noise), observation[keys.POSITION])
        action, prob = self._act(observation, rate, noise)
        return {keys.ACTION: action, keys.BOUNDARY_PROB: prob}


class NoBoundaries(Agent):
    """No boundary but the first symbol's: one token, with hardly any information.

    With attention over the whole sequence (``model.window`` of ``data.seq_len``) the U-Net is then a plain
    byte-level transformer of down_layers + up_layers layers, an external baseline.
    """

    in_keys = [keys.POSITION, keys.DECISION_MASK]

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw no boundary at any position."""
        return deterministic_output(
            observation, torch.zeros_like(noise, dtype=torch.bool), noise.dtype
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Draw no boundary at one position."""
        return tensordict.update(
            self.draw(tensordict, torch.zeros_like(tensordict[keys.POSITION], dtype=torch.float))
        )
