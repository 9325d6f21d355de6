"""Agents which follow a fixed rule on the text."""

import functools
import math
from abc import abstractmethod

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import (
    Agent,
    Observation,
    StepState,
    agent_output,
    deterministic_output,
    forced_or,
)
from tokenv.core import keys
from tokenv.core.distributed import current_group
from tokenv.core.errors import DECAY, check_value, choice
from tokenv.core.rates import FIXED_RATE
from tokenv.core.sequences import elapsed_symbols

# Edges of alternating ranges of spacelike and other bytes: blank to '/' | digits | : to @ | A-Z | [ to ` | a-z |
# { to DEL | UTF-8 continuation bytes | the first bytes of UTF-8 characters.
SPACELIKE_EDGES = (0x30, 0x3A, 0x41, 0x5B, 0x61, 0x7B, 0x80, 0xC0)
MODES = ("global", "monotonic")


class Rule(Agent):
    """``a_i = rule(v_i, v_{i-1})`` for some value v of every position. Deterministic: noise is ignored.

    Acting at one position (``forward``) stores the value of the previous position in a ``StepState``.

    Args:
        longest: most symbols of a token: one that the rule leaves longer is cut into pieces of so many, its last piece
            excepted; 0 for no limit. Acting at one position then also stores the symbols since the rule's boundary.

    Raises:
        ValueError: a negative ``longest``.
    """

    def __init__(self, longest: int = 0) -> None:
        super().__init__()
        if longest < 0:
            raise ValueError(
                f"agent.longest = {longest}: expected a token's most symbols, such as 6, or 0 for no limit"
            )
        self.longest = longest
        self._state = StepState()
        self._since = StepState()

    @abstractmethod
    def _value(self, observation: Observation) -> Tensor:
        """Return v, [..]."""

    @abstractmethod
    def _boundary(self, value: Tensor, previous: Tensor) -> Tensor:
        """Apply the rule: v_i and v_{i-1}, [..] each -> bool [..]."""

    def _cut_all(self, boundary: Tensor, position: Tensor) -> Tensor:
        """Cut the tokens of whole sequences which are too long: bool [.., T], positions [.., T] -> bool [.., T]."""
        if not self.longest:
            return boundary
        return elapsed_symbols(boundary | (position == 0)) % self.longest == 0

    def _cut_next(self, boundary: Tensor, position: Tensor) -> Tensor:
        """Cut at one position, as ``_cut_all`` does: bool [..], positions [..] -> bool [..]."""
        if not self.longest:
            return boundary
        previous = self._since.previous(position, position)
        since = (previous + 1).masked_fill(boundary | (position == 0), 0)
        self._since.exchange(since, position)
        return since % self.longest == 0

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once; all K samples are equal."""
        value = self._value(observation)
        # The first symbol's neighbour is arbitrary: its boundary is forced.
        previous = torch.cat([value[..., :1], value[..., :-1]], -1)
        boundary = self._cut_all(self._boundary(value, previous), observation[keys.POSITION])
        return deterministic_output(observation, boundary.expand(noise.shape), noise.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row.

        Raises:
            ValueError: a row is at any other position.
        """
        output = self.step(tensordict)
        return tensordict.update(agent_output(output[keys.ACTION], output[keys.BOUNDARY_PROB]))

    def step(self, observation: Observation) -> Observation:
        """Act at one position; see ``Agent``."""
        value = self._value(observation)
        noise = observation.get(keys.NOISE)
        position = observation[keys.POSITION]
        boundary = self._boundary(value, self._state.exchange(value, position))
        boundary = self._cut_next(boundary, position)
        action = forced_or(observation, boundary)
        dtype = torch.get_default_dtype() if noise is None else noise.dtype
        return {keys.ACTION: action, keys.BOUNDARY_PROB: action.to(dtype)}


@functools.cache  # a copy to an accelerator waits for it
def _spacelike_edges(device: torch.device) -> Tensor:
    return torch.tensor(SPACELIKE_EDGES, device=device)


class Whitespace(Rule):
    """SpaceByte's rule (Slagle 2024, arXiv 2404.14408): a boundary at the first byte after a word.

    ``a_i = [x_i is spacelike and x_{i-1} is not]``, and at the first byte always. A byte is spacelike if it is neither
    an ASCII letter or digit nor a UTF-8 continuation byte: 0x00-0x2F, 0x3A-0x40, 0x5B-0x60, 0x7B-0x7F, 0xC0-0xFF (and
    special symbols from 256 on). The rate is determined by the text.

    Args:
        longest: most bytes of a token: one that the rule leaves longer is cut into pieces of so many, its last piece
            excepted, which raises the rate; 0 for no limit.

    Raises:
        ValueError: a negative ``longest``.
    """

    in_keys = [keys.SYMBOL, keys.POSITION, keys.DECISION_MASK]

    def _value(self, observation: Observation) -> Tensor:
        symbol = observation[keys.SYMBOL]
        return (
            torch.bucketize(symbol.contiguous(), _spacelike_edges(symbol.device), right=True) % 2
            == 0
        )

    def _boundary(self, value: Tensor, previous: Tensor) -> Tensor:
        return value & ~previous


class Entropy(Rule):
    """BLT's rule (Pagnoni et al. 2024, arXiv 2412.09871): a boundary where the entropy of the next byte is high.

    With H_i the entropy of p(x_{i+1} | x_<=i) in nats, ``a_i = [H_i > theta]`` (global) or
    ``a_i = [H_i - H_{i-1} > theta]`` (monotonic), and at the first byte always. BLT trains a model of its own for H;
    here it is the early exit's (``early_entropy``, which rollouts compute, and environments with it among their
    ``optional_keys``).

    theta follows the (1 - rate) quantile of what it is compared with: after each draw of whole sequences in training
    mode, ``theta <- momentum theta + (1 - momentum) quantile`` over all decisions. Before the first draw it is
    infinite, and only the first symbols draw boundaries. The state dict holds it.

    Args:
        rate: boundaries per decision.
        mode: ``global`` or ``monotonic``.
        momentum: momentum of theta, in [0, 1).

    Raises:
        ValueError: ``rate`` outside (0, 1), ``momentum`` outside [0, 1), or another ``mode``.
    """

    in_keys = [keys.EARLY_ENTROPY, keys.POSITION, keys.DECISION_MASK]

    def __init__(self, rate: float = 0.2, mode: str = "global", momentum: float = 0.9) -> None:
        super().__init__()
        check_value("agent.rate", rate, FIXED_RATE)
        check_value("agent.mode", mode, choice(*MODES))
        check_value("agent.momentum", momentum, DECAY)
        self.rate = rate
        self.mode = mode
        self.momentum = momentum
        self.theta: Tensor = nn.Buffer(torch.tensor(math.inf))

    def _value(self, observation: Observation) -> Tensor:
        value = observation.get(keys.EARLY_ENTROPY, None)
        if value is None:
            raise ValueError(
                "the observation has no early_entropy, which agent.name=entropy reads: make the environment with "
                'optional_keys=["early_entropy"]'
            )
        return value

    def _compared(self, value: Tensor, previous: Tensor) -> Tensor:
        return value if self.mode == "global" else value - previous

    def _boundary(self, value: Tensor, previous: Tensor) -> Tensor:
        return self._compared(value, previous) > self.theta

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once, all K samples equal; in training mode, then update theta."""
        drawn = super().draw(observation, noise)
        if self.training:
            value = self._value(observation)
            batch = current_group()
            compared = batch.gather(self._compared(value, value.roll(1, -1)))
            self._update_threshold(compared[batch.gather(observation[keys.DECISION_MASK])])
        return drawn

    @torch.no_grad()
    def _update_threshold(self, compared: Tensor) -> None:
        if not len(compared):
            return
        quantile = torch.quantile(compared, 1 - self.rate).to(self.theta)
        previous = torch.where(self.theta.isinf(), quantile, self.theta)
        self.theta.copy_(self.momentum * previous + (1 - self.momentum) * quantile)


class Events(Agent):
    """A boundary at a fixed delay after every event of a series, an event being a jump.

    ``|x_i - x_{i-1}| > threshold`` in the frame's scale, in any channel, is an event if the last one is at least
    ``refractory`` steps back (a dead time, as in spike and heartbeat detectors). The first step counts as one.
    Deterministic: noise is ignored. Acting at one position stores the steps since the last event in a ``StepState``.

    Args:
        threshold: least jump, in standard deviations of the sequence's context.
        refractory: least steps between two events.
        delay: steps from an event to its boundary.
        period: steps between further boundaries until the next event; 0 for none.

    Raises:
        ValueError: ``threshold`` not positive, ``refractory`` below 1, or a negative ``delay`` or ``period``.
    """

    in_keys = [keys.SYMBOL, keys.POSITION, keys.DECISION_MASK]

    def __init__(
        self, threshold: float = 2.5, refractory: int = 15, delay: int = 0, period: int = 0
    ) -> None:
        super().__init__()
        if not threshold > 0 or refractory < 1 or delay < 0 or period < 0:
            raise ValueError(
                f"agent.threshold = {threshold}, agent.refractory = {refractory}, agent.delay = {delay}, "
                f"agent.period = {period}: expected a positive threshold, at least 1 step between events, and no "
                "negative number"
            )
        self.threshold = threshold
        self.refractory = refractory
        self.delay = delay
        self.period = period
        self._state = StepState()

    def _jump(self, observation: TensorDictBase) -> Tensor:
        """Return whether the series jumps, [..]; never where a value is missing."""
        symbol = observation[keys.SYMBOL]
        if not symbol.is_floating_point():
            raise ValueError(
                "agent.name=events reads the values of a series, not bytes: set data.kind=series"
            )
        value = symbol[..., 0]
        scale = symbol[..., 2]
        last = symbol[..., 4]
        return ((value - last).abs() > self.threshold * scale).any(-1)

    def _since_event(self, jump: Tensor, previous: Tensor, position: Tensor) -> Tensor:
        """Return the steps since the last event, given those one step earlier; [..] each."""
        event = (position == 0) | jump & (previous + 1 >= self.refractory)
        return torch.where(event, 0, previous + 1)

    def _boundary(self, since: Tensor) -> Tensor:
        after = since - self.delay
        return (after >= 0) & (after % self.period == 0) if self.period else after == 0

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries, all K samples equal; step after step, because an event depends on the one before."""
        jump = self._jump(observation)
        position = observation[keys.POSITION]
        since = [torch.zeros_like(position[..., 0])]
        for i in range(1, position.shape[-1]):
            since.append(self._since_event(jump[..., i], since[-1], position[..., i]))
        boundary = self._boundary(torch.stack(since, -1))
        return deterministic_output(observation, boundary.expand(noise.shape), noise.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act at one position, the one after the last call's or 0 in every row.

        Raises:
            ValueError: a row is at any other position.
        """
        position = tensordict[keys.POSITION]
        noise = tensordict.get(keys.NOISE)
        since = self._since_event(
            self._jump(tensordict), self._state.previous(position, position), position
        )
        self._state.exchange(since, position)
        dtype = torch.get_default_dtype() if noise is None else noise.dtype
        return tensordict.update(deterministic_output(tensordict, self._boundary(since), dtype))
