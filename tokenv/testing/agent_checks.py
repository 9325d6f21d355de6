"""``check_agent``: check the properties which rollouts, stepping, training and generation rely on."""

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
from tokenv.testing.fixture import RATE, WIDTH, Checker, has_gradient, tiny_lm

BATCH = 3
LENGTH = 12
SAMPLES = 2
SHORT = 6  # symbols of a sequence whose boundaries are enumerated
TOLERANCE = 1e-5  # of TorchRL's and torch's entropies of 0 in single precision


class _AgentProblem:
    """Tiny model in float64, sequences, and the observations which an agent receives."""

    def __init__(self, length: int, batch: int = BATCH) -> None:
        generator = torch.Generator().manual_seed(length)
        with torch.random.fork_rng():
            torch.manual_seed(length)
            self.lm: UNet = tiny_lm()
            with torch.no_grad():
                self.lm.early_head.weight.normal_()
        self.symbol_BN = torch.randint(256, (batch, length), generator=generator)
        self.noise = torch.rand(
            SAMPLES, batch, length - 1, generator=generator, dtype=torch.float64
        )

    def observation(
        self, agent: Agent, symbol_BN: Tensor | None = None, length_B: Tensor | None = None
    ) -> TensorDictBase:
        """Return the observations of whole sequences: batch size [B, T]."""
        symbol_BN = self.symbol_BN if symbol_BN is None else symbol_BN
        batch, length = symbol_BN.shape
        position_BN = torch.arange(length).expand(batch, -1)
        length_B = torch.full((batch,), length) if length_B is None else length_B
        decides_BN = (position_BN > 0) & (position_BN < length_B[:, None])
        with torch.no_grad():
            encoding_BND = self.lm.encode(symbol_BN)
            rate_BN = (
                None if agent.rates is None else torch.full(decides_BN.shape, agent.rates.mean)
            )
            observation = Observer.of(agent).static_observation(
                self.lm, symbol_BN, encoding_BND, position_BN, decides_BN, rate_BN
            )
        return observation[:, :-1]


def check_agent(
    agent: str | Callable[..., Any], *, reads_ahead: bool | None = None, **options: Any
) -> list[str]:
    """Check an agent against everything that rollouts, stepping, training and generating rely on.

    Its output must have the right keys, shapes and ranges, with one and with several samples. The first symbol must
    always end a token and padding never, both with log-probability 0. The same noise must give the same boundaries, K
    samples those of K draws, and a sequence those which it has alone. Decisions must not depend on later symbols or on
    padding, acting position by position must give the boundaries of one draw, and the state must be saved and loaded.
    If the agent learns, a gradient must reach its parameters and ``score`` must agree with ``draw``. If it is a
    ``Policy``, the probabilities of all boundaries which it can draw must sum to 1, by enumeration in float64, and,
    unless it reads ahead, ``get_dist`` must agree with them.

    Args:
        agent: a registered name, or a class or function that builds an ``Agent``.
        reads_ahead: whether the boundaries depend on later symbols, as those of ``bpe``: then causality is not
            required, but the agent must reject acting position by position. None for what the agent declares.
        options: arguments of the constructor; ``width``, ``rate``, ``seq_len`` and ``codec`` are passed if required.

    Returns:
        Properties which were not checked, and the reasons; empty if everything was.

    Raises:
        AssertionError: a property does not hold; the message names it and the remedy.
        ValueError: the name or an option is unknown.
    """
    for length, check in ((LENGTH, _check_draws), (SHORT, _check_policy)):
        problem = _AgentProblem(length)
        context = {"width": WIDTH, "rate": RATE, "seq_len": length, "codec": problem.lm.codec}
        checker = Checker("agent", agent, registry.AGENTS, options, context)
        # errors of the constructor are the user's and are not reported as failed checks
        built = checker.build()
        if reads_ahead is None:
            reads_ahead = built.reads_ahead
        check(checker, problem, reads_ahead)
    unchecked = []
    if reads_ahead:
        unchecked.append("causality, and acting position by position: it reads ahead")
    if not isinstance(built, Policy):
        unchecked.append("that the probabilities of all boundaries sum to 1: it is no Policy")
    return unchecked


def _build_adapted(checker: Checker, problem: _AgentProblem) -> Agent:
    """Build an agent in evaluation mode, after one draw in training mode, to which some agents adapt."""
    agent: Agent = checker.build().train()
    agent.draw(problem.observation(agent), problem.noise[0])
    return agent.eval()


def _check_draws(checker: Checker, problem: _AgentProblem, reads_ahead: bool) -> None:
    with checker.context(
        f"draw(), of {BATCH} sequences of {LENGTH} symbols, so batch size {[BATCH, LENGTH - 1]},"
    ):
        agent = _build_adapted(checker, problem)
        single = agent.draw(problem.observation(agent), problem.noise[0])
    _check_output(checker, agent, single, problem.observation(agent), "one noise")
    with checker.context(
        f"draw() with the noise of {SAMPLES} samples, {list(problem.noise.shape)},"
    ):
        several = agent.draw(problem.observation(agent), problem.noise)
    _check_output(checker, agent, several, problem.observation(agent), f"{SAMPLES} samples")
    for k, noise_BT in enumerate(problem.noise):
        alone = agent.draw(problem.observation(agent), noise_BT)
        checker.require(
            _same(several[k], alone), f"sample {k} of {SAMPLES} is not what its noise alone gives"
        )
    again = _build_adapted(checker, problem).draw(problem.observation(agent), problem.noise[0])
    checker.require(
        _same(again, single),
        "the same noise gave two draws: draw no numbers of its own, let the noise decide",
    )
    _check_rows(checker, agent, problem, single)
    if not reads_ahead:
        _check_causality(checker, agent, problem, single)
    _check_padding(checker, agent, problem)
    _check_state(checker, problem)
    if reads_ahead:
        _check_rejects_stepping(checker, agent, problem)
        return
    for restart in ("", ", begun anew"):  # an agent with a state must reset it at position 0
        with checker.context(f"forward(), position by position{restart},"):
            stepped = _step(agent, problem)
        wrong = f"position by position{restart} it draws other boundaries than at once for the same noise"
        checker.require(torch.equal(stepped[keys.ACTION], single[keys.ACTION]), wrong)
        probabilities = "position by position the probabilities are other than at once"
        checker.require(
            _close(stepped[keys.BOUNDARY_PROB], single[keys.BOUNDARY_PROB]), probabilities
        )


def _same(one: TensorDictBase, other: TensorDictBase) -> bool:
    return torch.equal(one[keys.ACTION], other[keys.ACTION]) and _close(
        one[keys.BOUNDARY_PROB], other[keys.BOUNDARY_PROB]
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12)


def _check_output(
    checker: Checker, agent: Agent, td: TensorDict, observation: TensorDictBase, noise: str
) -> None:
    shape = (BATCH, LENGTH - 1) if noise == "one noise" else (SAMPLES, BATCH, LENGTH - 1)
    for key in {*Agent.out_keys, *agent.out_keys}:
        checker.require(
            key in td, f"draw() of {noise} answers without {key!r}, one of its out_keys"
        )
        actual = tuple(td[key].shape)
        checker.require(
            actual == shape,
            f"draw() of {noise} gives {key} the shape {actual}: expected the noise's, {shape}",
        )
        checker.require_finite(str(key), td[key])
    action = td[keys.ACTION]
    prob = td[keys.BOUNDARY_PROB]
    forced = (observation[keys.POSITION] == 0).expand(shape)
    checker.require(
        action.dtype == torch.int64, f"action is of type {action.dtype}: expected torch.int64"
    )
    checker.require(
        bool(((action == 0) | (action == 1)).all()), "action holds other numbers than 0 and 1"
    )
    checker.require(bool(((prob >= 0) & (prob <= 1)).all()), "boundary_prob is outside [0, 1]")
    checker.require(bool((td[keys.ACTION_LOG_PROB] <= 0).all()), "action_log_prob is above 0")
    checker.require(bool((td[keys.ENTROPY] >= -TOLERANCE).all()), "entropy is negative")
    checker.require(
        bool((action[forced] == 1).all()),
        "the first symbol does not end a token: answer forced_action(observation) where decision_mask is False",
    )
    for key in (keys.ACTION_LOG_PROB, keys.ENTROPY):
        checker.require(
            bool((td[key][forced].abs() < TOLERANCE).all()),
            f"{key} is not 0 at the first symbol, whose boundary is forced",
        )
    checker.require(
        bool((prob[forced] == 1).all()),
        "boundary_prob is not 1 at the first symbol, which always ends a token",
    )


def _check_rows(checker: Checker, agent: Agent, problem: _AgentProblem, drawn: TensorDict) -> None:
    for row in range(BATCH):
        one = slice(row, row + 1)
        alone = agent.draw(
            problem.observation(agent, problem.symbol_BN[one]), problem.noise[0, one]
        )
        checker.require(
            _same(alone, drawn[one]),
            "a sequence's boundaries depend on the other sequences of its batch: look at one row alone",
        )


def _check_padding(checker: Checker, agent: Agent, problem: _AgentProblem) -> None:
    length_B = torch.tensor([LENGTH, LENGTH - 4, 2])
    padding_BN = torch.arange(LENGTH) >= length_B[:, None]
    with checker.context("draw() of sequences with padding"):
        drawn = [
            agent.draw(problem.observation(agent, symbol_BN, length_B), problem.noise[0])
            for symbol_BN in (
                problem.symbol_BN,
                torch.where(padding_BN, problem.symbol_BN ^ 1, problem.symbol_BN),
            )
        ]
    for key in (keys.ACTION, keys.ACTION_LOG_PROB, keys.ENTROPY, keys.BOUNDARY_PROB):
        outside = drawn[0][key][padding_BN[:, :-1]]
        checker.require(
            bool((outside.abs() < TOLERANCE).all()),
            f"{key} is not 0 in the padding: answer so where decision_mask is False",
        )
    checker.require(
        _same(*drawn), "symbols in the padding move the boundaries: look at decision_mask"
    )


def _check_causality(
    checker: Checker, agent: Agent, problem: _AgentProblem, drawn: TensorDict
) -> None:
    for cut in range(1, LENGTH):
        symbol_BN = problem.symbol_BN.clone()
        symbol_BN[:, cut:] ^= 1
        other = agent.draw(problem.observation(agent, symbol_BN), problem.noise[0])
        checker.require(
            _same(other[:, :cut], drawn[:, :cut]),
            f"boundaries depend on later symbols: another symbol {cut} changes an earlier decision; if that is meant, "
            "declare it: reads_ahead = True",
        )


def _check_state(checker: Checker, problem: _AgentProblem) -> None:
    used = _build_adapted(checker, problem)
    fresh = _build_adapted(checker, problem)
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.add_(0.1)
    with checker.context("load_state_dict(state_dict())"):
        checker.require_restored(used, fresh, lambda agent: _decisions(agent, problem))


def _decisions(agent: Agent, problem: _AgentProblem) -> Tensor:
    drawn = agent.draw(problem.observation(agent), problem.noise[0])
    return torch.stack([drawn[key].double() for key in (keys.ACTION, keys.BOUNDARY_PROB)])


def _step(agent: Agent, problem: _AgentProblem) -> TensorDictBase:
    """Act position by position, as in an environment; batch size [B, T]."""
    observations = problem.observation(agent)
    observer = Observer.of(agent)
    history = observer.initial_history(BATCH, torch.device("cpu"))
    outputs = []
    for i in range(LENGTH - 1):
        output = agent(
            observations[:, i].clone().update({**history, keys.NOISE: problem.noise[0, :, i]})
        )
        history = observer.append_action(history, output[keys.ACTION])
        outputs.append(output.select(keys.ACTION, keys.BOUNDARY_PROB))
    return torch.stack(outputs, 1)


def _check_rejects_stepping(checker: Checker, agent: Agent, problem: _AgentProblem) -> None:
    try:
        _step(agent, problem)
    except ValueError:
        return
    checker.require(
        False,
        "reads ahead, and acts position by position all the same: refuse that with a ValueError",
    )


def _check_policy(checker: Checker, problem: _AgentProblem, reads_ahead: bool) -> None:
    agent = _build_adapted(checker, problem)
    observation = problem.observation(agent)
    noise = problem.noise[0]
    if not agent.trainable:
        return
    drawn = agent.draw(observation, noise)
    with checker.context("score() of the boundaries that it has drawn"):
        scored = agent.score(observation, drawn[keys.ACTION])
    for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY_PROB, keys.ENTROPY):
        checker.require(
            _close(scored[key], drawn[key]),
            f"score() of drawn boundaries gives another {key} than draw()",
        )
    checker.require(
        agent.stochastic or not drawn[keys.ACTION_LOG_PROB].any(),
        "has log-probabilities other than 0, but does not declare stochastic = True, so that it may not imitate",
    )
    carriers = [
        drawn[key]
        for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY, keys.BOUNDARY_LOGITS)
        if key in drawn
    ]
    total = sum((each.square().sum() for each in carriers), torch.zeros(()))
    checker.require(
        has_gradient(total, agent.parameters()),
        "says that it learns, but no gradient of action_log_prob, boundary or boundary_logits reaches a parameter",
    )
    if isinstance(agent, Policy):
        _check_probabilities(checker, agent, problem)
        if not reads_ahead:  # otherwise a single observation does not suffice
            _check_dist(checker, agent, observation, drawn)


def _check_probabilities(checker: Checker, agent: Policy, problem: _AgentProblem) -> None:
    """Check that the probabilities of all boundaries of a sequence sum to 1; noise of 0 or 1 forces each of them."""
    patterns = all_boundaries(SHORT)[:, 0]
    observation = problem.observation(agent, problem.symbol_BN[:1])
    with checker.context("draw() with a noise of 0 and 1, which forces boundaries,"):
        drawn = agent.draw(observation, forcing_noise(patterns).unsqueeze(1))
    _, first = drawn[keys.ACTION].flatten(1).unique(dim=0, return_inverse=True)
    chosen = [int((first == i).nonzero()[0]) for i in range(int(first.max()) + 1)]
    log_prob_C = drawn[keys.ACTION_LOG_PROB].sum((1, 2))[chosen]
    total = log_prob_C.exp().sum().item()
    checker.require(
        abs(total - 1) < 1e-9,
        f"the probabilities of all boundaries that it can draw sum to {total:.6f}: action_log_prob is not theirs, or "
        "the noise u does not decide a = [p > u]",
    )


def _check_dist(
    checker: Checker, agent: Policy, observation: TensorDictBase, drawn: TensorDict
) -> None:
    """Check ``get_dist``, with which TorchRL's losses score stored observations one by one."""
    action_BT = drawn[keys.ACTION]
    stored = observation.copy().update(Observer.of(agent).history(action_BT))
    with checker.context("get_dist() of stored observations"):
        log_prob_BT = agent.get_dist(stored).log_prob(action_BT)
    same = _close(log_prob_BT, drawn[keys.ACTION_LOG_PROB])
    checker.require(same, "get_dist() gives drawn boundaries another log-probability than draw()")
