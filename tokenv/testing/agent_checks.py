"""``check_agent``: what every agent must keep to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import Agent, Policy
from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.expectations import all_boundaries, forcing_noise
from tokenv.env.observation import Observer
from tokenv.lm.unet import UNet
from tokenv.testing.fixture import RATE, WIDTH, Checker, builder, tiny_lm

BATCH, LENGTH, SAMPLES = 3, 12, 2
SHORT = 6  # symbols of a sequence whose boundaries are enumerated
NOTHING = 1e-5  # what TorchRL and torch leave of an entropy of 0 in single precision


class _World:
    """A tiny model in float64, sequences, and what an agent sees of them."""

    def __init__(self, length: int, batch: int = BATCH) -> None:
        generator = torch.Generator().manual_seed(length)
        with torch.random.fork_rng():
            torch.manual_seed(length)
            self.lm: UNet = tiny_lm()
            with torch.no_grad():
                self.lm.early_head.weight.normal_()
        self.symbol_BN = torch.randint(256, (batch, length), generator=generator)
        self.noise = torch.rand(SAMPLES, batch, length - 1, generator=generator, dtype=torch.float64)

    def observation(
        self, agent: Agent, symbol_BN: Tensor | None = None, length_B: Tensor | None = None
    ) -> TensorDictBase:
        """Of whole sequences: batch size [B, T]."""
        symbol_BN = self.symbol_BN if symbol_BN is None else symbol_BN
        batch, length = symbol_BN.shape
        position_BN = torch.arange(length).expand(batch, -1)
        length_B = torch.full((batch,), length) if length_B is None else length_B
        decides_BN = (position_BN > 0) & (position_BN < length_B[:, None])
        with torch.no_grad():
            encoding_BND = self.lm.encode(symbol_BN)
            told = None if agent.rates is None else torch.full(decides_BN.shape, agent.rates.mean)
            seen = Observer.of(agent).static_observation(
                self.lm, symbol_BN, encoding_BND, position_BN, decides_BN, told
            )
        return seen[:, :-1]


def check_agent(agent: str | Callable[..., Any], *, reads_ahead: bool = False, **options: Any) -> None:
    """Check an agent against everything that rollouts, stepping, training and generating rely on.

    That its answers have the right keys, shapes and ranges, with one and with several samples; that the first symbol
    always ends a token and padding never does, and neither has a probability to speak of; that the same noise gives the
    same boundaries, K samples those of K draws, and a sequence those that it has alone; that decisions do not depend on
    what comes later, nor on padding; that acting position by position gives what a draw gives; that its state can be
    saved and loaded. Of an agent that learns, that a gradient reaches its parameters and that ``score`` says the same
    of boundaries as ``draw``; of a ``Policy`` also, by enumeration in float64, that the probabilities of all boundaries
    that it can draw sum to 1, and, unless it reads ahead, that ``get_dist`` agrees with them.

    Args:
        agent: a registered name, or a class or function that builds an ``Agent``.
        reads_ahead: for one whose boundaries do depend on later symbols, such as ``bpe``: causality is not asked for,
            but that it refuses to act position by position.
        options: for the constructor; ``width``, ``rate``, ``seq_len`` and ``codec`` are given where it asks for them.

    Raises:
        AssertionError: names what is wrong, and what to do.
        ValueError: the name or an option is unknown.
    """
    failure = Checker("agent", agent)
    for length, check in ((LENGTH, _check_draws), (SHORT, _check_policy)):
        world = _World(length)
        context = {"width": WIDTH, "rate": RATE, "seq_len": length, "codec": world.lm.codec}
        build = builder("agent", agent, registry.AGENTS, options, context)
        build()  # what cannot be built is the user's, who reads it as it is
        build = _ready(build, world)
        check(failure, build, world, reads_ahead)


def _ready(build: Callable[[], Any], world: _World) -> Callable[[], Agent]:
    """Builds in evaluation mode, after one draw in training mode, which some agents adapt to."""

    def made() -> Agent:
        agent: Agent = build().train()
        agent.draw(world.observation(agent), world.noise[0])
        return agent.eval()

    return made


def _check_draws(failure: Checker, build: Callable[[], Agent], world: _World, reads_ahead: bool) -> None:
    with failure.during(f"draw(), of {BATCH} sequences of {LENGTH} symbols, so batch size {[BATCH, LENGTH - 1]},"):
        agent = build()
        single = agent.draw(world.observation(agent), world.noise[0])
    _check_answer(failure, agent, single, world.observation(agent), "one noise")
    with failure.during(f"draw() with the noise of {SAMPLES} samples, {list(world.noise.shape)},"):
        several = agent.draw(world.observation(agent), world.noise)
    _check_answer(failure, agent, several, world.observation(agent), f"{SAMPLES} samples")
    for k, noise_BT in enumerate(world.noise):
        alone = agent.draw(world.observation(agent), noise_BT)
        failure.need(_same(several[k], alone), f"sample {k} of {SAMPLES} is not what its noise alone gives")
    failure.need(_same(build().draw(world.observation(agent), world.noise[0]), single), _two_draws())
    _check_rows(failure, agent, world, single)
    if not reads_ahead:
        _check_causality(failure, agent, world, single)
    _check_padding(failure, agent, world)
    _check_state(failure, build, world)
    if reads_ahead:
        _check_refuses_to_step(failure, agent, world)
        return
    for begin in ("", ", begun anew"):  # an agent that remembers must forget at position 0
        with failure.during(f"forward(), position by position{begin},"):
            stepped = _stepped(agent, world)
        wrong = f"position by position{begin} it draws other boundaries than at once for the same noise"
        failure.need(torch.equal(stepped[keys.ACTION], single[keys.ACTION]), wrong)
        probabilities = "position by position the probabilities are other than at once"
        failure.need(_close(stepped[keys.BOUNDARY_PROB], single[keys.BOUNDARY_PROB]), probabilities)


def _two_draws() -> str:
    return "the same noise gave two draws: draw no numbers of its own, let the noise decide"


def _same(one: TensorDictBase, other: TensorDictBase) -> bool:
    return torch.equal(one[keys.ACTION], other[keys.ACTION]) and _close(
        one[keys.BOUNDARY_PROB], other[keys.BOUNDARY_PROB]
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12)


def _check_answer(failure: Checker, agent: Agent, td: TensorDict, seen: TensorDictBase, what: str) -> None:
    shape = (BATCH, LENGTH - 1) if what == "one noise" else (SAMPLES, BATCH, LENGTH - 1)
    for key in {*Agent.out_keys, *agent.out_keys}:
        failure.need(key in td, f"draw() of {what} answers without {key!r}, one of its out_keys")
        found = tuple(td[key].shape)
        failure.need(found == shape, f"draw() of {what} gives {key} the shape {found}: expected the noise's, {shape}")
        failure.need(bool(td[key].isfinite().all()), f"{key} is not finite")
    action, prob, forced = td[keys.ACTION], td[keys.BOUNDARY_PROB], (seen[keys.POSITION] == 0).expand(shape)
    failure.need(action.dtype == torch.int64, f"action is of type {action.dtype}: expected torch.int64")
    failure.need(bool(((action == 0) | (action == 1)).all()), "action holds other numbers than 0 and 1")
    failure.need(bool(((prob >= 0) & (prob <= 1)).all()), "boundary_prob is outside [0, 1]")
    failure.need(bool((td[keys.ACTION_LOG_PROB] <= 0).all()), "action_log_prob is above 0")
    failure.need(bool((td[keys.ENTROPY] >= -NOTHING).all()), "entropy is negative")
    failure.need(
        bool((action[forced] == 1).all()),
        "the first symbol does not end a token: answer forced_action(observation) where decision_mask is False",
    )
    for key in (keys.ACTION_LOG_PROB, keys.ENTROPY):
        failure.need(
            bool((td[key][forced].abs() < NOTHING).all()), f"{key} is not 0 at the first symbol, where nobody decides"
        )
    failure.need(
        bool((prob[forced] == 1).all()), "boundary_prob is not 1 at the first symbol, which always ends a token"
    )


def _check_rows(failure: Checker, agent: Agent, world: _World, drawn: TensorDict) -> None:
    for row in range(BATCH):
        one = slice(row, row + 1)
        alone = agent.draw(world.observation(agent, world.symbol_BN[one]), world.noise[0, one])
        same = _same(alone, drawn[one])
        failure.need(same, "a sequence's boundaries depend on the other sequences of its batch: look at one row alone")


def _check_padding(failure: Checker, agent: Agent, world: _World) -> None:
    length_B = torch.tensor([LENGTH, LENGTH - 4, 2])
    padding_BN = torch.arange(LENGTH) >= length_B[:, None]
    with failure.during("draw() of sequences with padding"):
        drawn = [
            agent.draw(world.observation(agent, symbol_BN, length_B), world.noise[0])
            for symbol_BN in (world.symbol_BN, torch.where(padding_BN, world.symbol_BN ^ 1, world.symbol_BN))
        ]
    for key in (keys.ACTION, keys.ACTION_LOG_PROB, keys.ENTROPY, keys.BOUNDARY_PROB):
        outside = drawn[0][key][padding_BN[:, :-1]]
        failure.need(
            bool((outside.abs() < NOTHING).all()),
            f"{key} is not 0 in the padding: answer so where decision_mask is False",
        )
    failure.need(_same(*drawn), "symbols in the padding move the boundaries: look at decision_mask")


def _check_causality(failure: Checker, agent: Agent, world: _World, drawn: TensorDict) -> None:
    for cut in range(1, LENGTH):
        symbol_BN = world.symbol_BN.clone()
        symbol_BN[:, cut:] ^= 1
        other = agent.draw(world.observation(agent, symbol_BN), world.noise[0])
        failure.need(
            _same(other[:, :cut], drawn[:, :cut]),
            f"boundaries depend on later symbols: another symbol {cut} changes an earlier decision; if that is meant, "
            "say reads_ahead=True",
        )


def _check_state(failure: Checker, build: Callable[[], Agent], world: _World) -> None:
    used, fresh = build(), build()
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.add_(0.1)
    with failure.during("load_state_dict(state_dict())"):
        fresh.load_state_dict(used.state_dict())
    first, second = (each.draw(world.observation(each), world.noise[0]) for each in (used, fresh))
    failure.need(_same(first, second), "a state_dict does not bring its state back: register parameters and buffers")


def _stepped(agent: Agent, world: _World) -> TensorDictBase:
    """One position after the other, as an environment steps; batch size [B, T]."""
    seen, observer = world.observation(agent), Observer.of(agent)
    last_actions_Bw = observer.initial_last_actions(BATCH, torch.device("cpu"))
    count_B = torch.zeros(BATCH, dtype=torch.int64)
    acted = []
    for i in range(LENGTH - 1):
        now = seen[:, i].clone()
        now.update({keys.LAST_ACTIONS: last_actions_Bw, keys.TOKEN_COUNT: count_B, keys.NOISE: world.noise[0, :, i]})
        answer = agent(now)
        last_actions_Bw = observer.append_action(last_actions_Bw, answer[keys.ACTION])
        count_B = count_B + answer[keys.ACTION]
        acted.append(answer.select(keys.ACTION, keys.BOUNDARY_PROB))
    return torch.stack(acted, 1)


def _check_refuses_to_step(failure: Checker, agent: Agent, world: _World) -> None:
    try:
        _stepped(agent, world)
    except ValueError:
        return
    failure.need(False, "reads ahead, and acts position by position all the same: refuse that with a ValueError")


def _check_policy(failure: Checker, build: Callable[[], Agent], world: _World, reads_ahead: bool) -> None:
    agent = build()
    seen, noise = world.observation(agent), world.noise[0]
    if not agent.learns:
        return
    drawn = agent.draw(seen, noise)
    with failure.during("score() of the boundaries that it has drawn"):
        scored = agent.score(seen, drawn[keys.ACTION])
    for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY_PROB, keys.ENTROPY):
        failure.need(_close(scored[key], drawn[key]), f"score() of drawn boundaries gives another {key} than draw()")
    carriers = [drawn[key] for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY, keys.BOUNDARY_LOGITS) if key in drawn]
    trained = [parameter for parameter in agent.parameters() if parameter.requires_grad]
    total = sum((each.square().sum() for each in carriers), torch.zeros(()))
    grads = torch.autograd.grad(total, trained, allow_unused=True) if total.requires_grad and trained else ()
    failure.need(
        any(g is not None and bool(g.any()) for g in grads),
        "says that it learns, but no gradient of action_log_prob, boundary or boundary_logits reaches a parameter",
    )
    if isinstance(agent, Policy):
        _check_probabilities(failure, agent, world)
        if not reads_ahead:  # else a single observation does not say enough
            _check_dist(failure, agent, seen, drawn)


def _check_probabilities(failure: Checker, agent: Policy, world: _World) -> None:
    """The boundaries that can be drawn of one sequence: where a noise of 0 or 1 forces what it can."""
    patterns = all_boundaries(SHORT)[:, 0]
    seen = world.observation(agent, world.symbol_BN[:1])
    with failure.during("draw() with a noise of 0 and 1, which forces boundaries,"):
        drawn = agent.draw(seen, forcing_noise(patterns).unsqueeze(1))
    _, first = drawn[keys.ACTION].flatten(1).unique(dim=0, return_inverse=True)
    chosen = [int((first == i).nonzero()[0]) for i in range(int(first.max()) + 1)]
    log_prob_C = drawn[keys.ACTION_LOG_PROB].sum((1, 2))[chosen]
    total = log_prob_C.exp().sum().item()
    failure.need(
        abs(total - 1) < 1e-9,
        f"the probabilities of all boundaries that it can draw sum to {total:.6f}: action_log_prob is not theirs, or "
        "the noise u does not decide a = [p > u]",
    )


def _check_dist(failure: Checker, agent: Policy, seen: TensorDictBase, drawn: TensorDict) -> None:
    """TorchRL's losses score stored observations one by one."""
    action_BT = drawn[keys.ACTION]
    stored = seen.copy().update(Observer.of(agent).past(action_BT))
    with failure.during("get_dist() of stored observations"):
        log_prob_BT = agent.get_dist(stored).log_prob(action_BT)
    same = _close(log_prob_BT, drawn[keys.ACTION_LOG_PROB])
    failure.need(same, "get_dist() gives drawn boundaries another log-probability than draw()")
