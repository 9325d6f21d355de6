"""``check_estimator`` and ``check_rate_target``: check what training and gradient measurements rely on."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.contracts import Sampling, check_compatible
from tokenv.core.conversion import parameters
from tokenv.core.expectations import mean_over_decisions, policy_objective
from tokenv.testing.enumeration import Enumeration, Shape, has_state
from tokenv.testing.fixture import (
    BATCH,
    CONTEXT,
    LENGTH,
    RATE,
    STANDARD_ERRORS,
    Checker,
    TinyProblem,
    has_gradient,
    max_standard_errors,
)

GROUP, GROUPS = 100, 60  # draws of an estimator which draws numbers of its own
EXACT = 1e-9  # largest relative error of an enumerated expectation
CALLS = (1, 5)  # of a stateful estimator
# The first of these with at most MAX_ENUMERATED combinations of the samples' boundaries is enumerated as a whole.
JOINT_SHAPES = [Shape(2, 5), Shape(2, 4), Shape(4, 3), Shape(2, 3), Shape(1, 4), Shape(1, 3)]
MAX_ENUMERATED = 2**13
# Of these, one sample of one text is enumerated at a time.
LARGE_SHAPES = [Shape(1, 7), Shape(4, 11), Shape(4, 10, unequal=True), Shape(2, 4), Shape(3, 7)]
# An estimator which these find biased must be unbiased as a whole with each of the following which is small enough.
SETTLING_SHAPES = [
    Shape(4, 3),
    Shape(4, 4),
    Shape(4, 5),
    Shape(2, 6, unequal=True),
    Shape(2, 6),
    Shape(2, 8),
]
# the same limit of an estimator with a state, which is copied for each combination
MAX_COPIED = 2**8
# draws of all boundaries: for the direction of a bias, and for its mean in this direction
EXPLORED, TESTED = 3, 9
CERTAIN = 10.0  # standard errors of a mean of so few draws which prove a bias
LOW, HIGH = 0.05, 0.9  # rates far on either side of the target
LONG, MANY = 50, 20  # symbols and sequences, so that the drawn rate is close to the policy's


def check_estimator(
    estimator: str | Callable[..., Any], *, windows: tuple[int, ...] = (0, 2), **options: Any
) -> list[str]:
    """Check an estimator against everything that training and measuring rely on.

    It must declare its keys and write a finite ``loss_policy`` of the rollout's shape; give the same loss for the same
    noise; ignore padding; pass a gradient to the policy; be saved and loaded with its state; and reject policies which
    read their past, or be right for them. If it declares itself unbiased, its expected gradient must be the true one.
    This is enumerated in float64, to 1e-9, for any number of samples: over all boundaries of all samples of two short
    texts, and over all boundaries of one sample at a time of up to four texts of up to ten decisions, of equal and of
    unequal lengths, in the first and the fifth call. Where that is not possible, because the estimator draws numbers of
    its own, its samples make up for one another's bias, or it fails with texts of that size, the mean of 6,000 draws
    must lie within 5 standard errors of the truth, and this is returned as unchecked.

    Args:
        estimator: a registered name, or a class or function that builds a ``Chain``.
        windows: windows w of the policies it is tried with.
        options: arguments of the constructor; ``width``, ``rate`` and ``seq_len`` are passed if it requires them.

    Returns:
        Properties which were not checked exactly, and the reasons; empty if everything was.

    Raises:
        AssertionError: a property does not hold; the message names it and the remedy.
        ValueError: the name or an option is unknown.
    """
    checker = Checker("estimator", estimator, registry.ESTIMATORS, options, CONTEXT)
    unchecked = []
    for window in windows:
        problem = TinyProblem.create(window)
        if checker.build().requires_factorised_policy and window:
            _check_rejects(checker, problem)
            continue
        with checker.context(
            f"a rollout that it is applied to (policy with window {window}, {BATCH} sequences)"
        ):
            _check_loss(checker, problem)
            _check_determinism(checker, problem)
            _check_padding(checker, problem)
            _check_state(checker, problem)
            if checker.build().unbiased:
                sampled = _check_unbiased(checker, problem)
                if sampled:
                    unchecked.append(
                        f"window {window}: the expected gradient was compared with the mean of {GROUPS * GROUP} draws, "
                        f"within {STANDARD_ERRORS:g} standard errors, and not enumerated: {sampled}"
                    )
            else:
                unchecked.append(
                    f"window {window}: the expected gradient, {_reason_for_bias(checker)}"
                )
    return unchecked


def _reason_for_bias(checker: Checker) -> str:
    """Return why an estimator is not compared with the truth: discounting may be the only reason."""
    function = checker.component
    if isinstance(function, str):
        function = registry.find("estimator", function, registry.ESTIMATORS)
    if "gamma" in parameters(function) and checker.options.get("gamma") != 1.0:
        options = dict(checker.options) | {"gamma": 1.0}
        if (
            Checker("estimator", checker.component, registry.ESTIMATORS, options, CONTEXT)
            .build()
            .unbiased
        ):
            return "for discounting biases it: check it with gamma=1.0, too"
    return "for it declares itself biased (a part says unbiased = False)"


def _objective(td: TensorDictBase) -> Tensor:
    """Return the summed loss, averaged over samples, plus the model's loss where boundaries are relaxed."""
    return policy_objective(td) * td[keys.DECISION_MASK].sum() / td.shape[:-2].numel()


def _total_loss(estimator: Any, td: TensorDictBase) -> Tensor:
    td = estimator(td)
    return td[keys.LOSS_POLICY] - td[keys.LOG_LIKELIHOOD]


def _check_rejects(checker: Checker, problem: TinyProblem) -> None:
    try:
        check_compatible(checker.build(), problem.agent, problem.lm.config.pooling)
    except ValueError:
        return
    checker.require(False, "declares itself independent, but a policy with a past was not refused")


def _check_loss(checker: Checker, problem: TinyProblem) -> None:
    estimator = checker.build()
    td = problem.rollout(estimator)
    shape = td.shape
    td = estimator(td)
    checker.require(
        keys.LOSS_POLICY in td,
        "writes no 'loss_policy' and relaxes no boundary, so nothing trains the policy: end the chain with a surrogate "
        'such as ScoreFunction(), or say trains_through = "likelihood" where the agent\'s own boundaries carry the '
        "gradient",
    )
    loss = td[keys.LOSS_POLICY]
    checker.require(
        loss.shape == shape,
        f"loss_policy has shape {tuple(loss.shape)}, the rollout {tuple(shape)}",
    )
    checker.require_finite("loss_policy", loss)
    # The agent's own boundaries carry a gradient only for some agents, and this one's do not.
    if estimator.trains_through == "loss" or estimator.sampling.relax is not None:
        checker.require(
            has_gradient(_objective(td), problem.agent.parameters()),
            "no gradient reaches the policy: use action_log_prob or boundary_logits with their graph",
        )


def _check_determinism(checker: Checker, problem: TinyProblem) -> None:
    first, second = (
        _total_loss(each, problem.rollout(each)) for each in (checker.build(), checker.build())
    )
    checker.require(
        torch.equal(first, second),
        "the same noise gave two losses: draw numbers in a hook, from the generator it is given",
    )


def _check_padding(checker: Checker, problem: TinyProblem) -> None:
    tds = []
    for shift in (0, 1):
        estimator = checker.build()
        tds.append(estimator(problem.padded_rollout(estimator, shift)))
    if estimator.trains_through == "likelihood":
        return
    outside = ~tds[0][keys.DECISION_MASK]
    first, second = (td[keys.LOSS_POLICY] for td in tds)
    checker.require(
        torch.allclose(first[~outside], second[~outside], rtol=1e-9, atol=1e-12),
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    checker.require(
        not has_gradient(first[outside].sum(), problem.parameters),
        "loss_policy has a gradient where decision_mask is False: multiply it by decision_mask",
    )


def _check_state(checker: Checker, problem: TinyProblem) -> None:
    used = checker.build()
    fresh = checker.build()
    used(problem.rollout(used))
    checker.require_restored(
        used, fresh, lambda each: _total_loss(each, problem.rollout(each, seed=1))
    )


def _check_unbiased(checker: Checker, problem: TinyProblem) -> str:
    """Check that the expected gradient is the true one; return what could only be sampled, or an empty text."""
    sampling = checker.build().sampling
    if any(hook is not None for hook in (sampling.couple, sampling.propose, sampling.relaxations)):
        _check_mean(checker, problem)
        return "it draws numbers of its own"
    samples = sampling.samples
    most = _most_combinations(checker)
    for shape in JOINT_SHAPES:
        if shape.combinations(samples) <= most:
            _check_jointly(checker, problem, shape, samples)
            break
    for shape in LARGE_SHAPES:
        enumeration = Enumeration(problem, shape, samples, seed=1)
        for call in CALLS:
            where = f"{samples} samples of {shape}, call {call}"
            try:
                estimator = checker.build(seq_len=shape.length)
                enumeration.warm_up(estimator, call - 1)
                bias = enumeration.conditional_bias(estimator)
            except Exception as error:  # it may have been made for one size of texts or batches
                _check_mean(checker, problem)
                return f"with {where} it fails with {error!r}"
            if not math.isfinite(bias):
                _check_mean(checker, problem)
                return f"with {where} its loss is not finite"
            if bias > EXACT:
                _check_conditional_mean(checker, problem, shape, call)
                return _settle(checker, problem, where, bias)
    return ""


def _most_combinations(checker: Checker) -> int:
    return MAX_COPIED if has_state(checker.build()) else MAX_ENUMERATED


def _check_jointly(checker: Checker, problem: TinyProblem, shape: Shape, samples: int) -> None:
    estimator = checker.build(seq_len=shape.length)
    bias = Enumeration(problem, shape, samples, seed=0).joint_bias(estimator)
    checker.require(
        bias < EXACT,
        f"declares itself unbiased, but its expected gradient is off by {bias:.2g} of the true one ({samples} samples "
        f"of {shape})",
    )


def _check_conditional_mean(
    checker: Checker, problem: TinyProblem, shape: Shape, call: int
) -> None:
    """Check the mean, over draws of all boundaries, of expectations over one sample's, in the direction of some.

    It is the expected gradient of every estimator, also of one which is right only on average over other samples. An
    estimator with a state is left alone: it would be copied too often.
    """
    if has_state(checker.build()):
        return
    samples = checker.build().sampling.samples
    weight_KB = torch.ones(samples, shape.texts, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    symbol_BN = torch.randint(256, (shape.texts, shape.length), generator=generator)
    errors = []
    for seed in range(EXPLORED + TESTED):
        enumeration = Enumeration(problem, shape, samples, seed, symbol_BN)
        estimator = checker.build(seq_len=shape.length)
        enumeration.warm_up(estimator, call - 1)
        errors.append(enumeration.conditional_error(estimator, weight_KB))
    error_SX = torch.stack(errors)
    direction_X = error_SX[:EXPLORED].mean(0)
    along_S = error_SX[EXPLORED:] @ direction_X
    standard_error = (along_S.std() / TESTED**0.5).clamp(min=1e-300)
    off = float(along_S.mean() / standard_error)
    bias = float(error_SX.mean(0).norm() / enumeration.true_gradient(weight_KB.sum(0)).norm())
    checker.require(
        off < CERTAIN,
        f"declares itself unbiased, but its expected gradient is off by about {bias:.2g} of the true one ({samples} "
        f"samples of {shape}, call {call})",
    )


def _settle(checker: Checker, problem: TinyProblem, where: str, bias: float) -> str:
    """Enumerate jointly what can be, for an estimator which is biased given the other samples' boundaries."""
    samples = checker.build().sampling.samples
    most = _most_combinations(checker)
    for shape in SETTLING_SHAPES:
        if shape.combinations(samples) <= most:
            _check_jointly(checker, problem, shape, samples)
    _check_mean(checker, problem)
    return (
        f"with {where}, the gradient of one sample's loss is off by {bias:.2g} of the true one given all other "
        "boundaries, so that only the others' losses could make up for it"
    )


def _check_mean(checker: Checker, problem: TinyProblem) -> None:
    """Compare the mean of many draws with the true gradient."""
    estimator = checker.build()
    enumeration = Enumeration(problem, Shape(BATCH, LENGTH), 1, seed=0, symbol_BN=problem.symbol_BN)
    true = enumeration.true_gradient(torch.ones(BATCH, dtype=torch.float64))
    draws = torch.stack([_mean_gradient(estimator, problem, seed) for seed in range(GROUPS)])
    worst = max_standard_errors(draws - true)
    checker.require(
        worst < STANDARD_ERRORS,
        f"declares itself unbiased, but the mean of {GROUPS * GROUP} draws is {worst:.1f} standard errors off",
    )


def _mean_gradient(estimator: Any, problem: TinyProblem, seed: int) -> Tensor:
    """Return the mean gradient of ``GROUP`` draws, computed as one large batch."""
    td = problem.rollout(estimator, seed=seed, symbol_BN=problem.symbol_BN.repeat(GROUP, 1))
    return problem.gradient(_objective(estimator(td)) / GROUP)


def check_rate_target(target: str | Callable[..., Any], **options: Any) -> list[str]:
    """Check a rate target against everything that training relies on.

    It must write a finite ``loss_rate`` of the rollout's shape, with one and with several samples; give the same loss
    for the same rollout; ignore padding and positions without a decision; and be saved and loaded with its state. Its
    gradient must push the policy's logits down if the rate is above the target, up if it is below, and less near the
    target than far from it.

    Args:
        target: a registered name, or a class or function that builds a ``RateTarget``.
        options: arguments of the constructor; ``rate``, ``width`` and ``seq_len`` are passed if it requires them.

    Returns:
        Properties which were not checked, and the reasons; empty if everything was.

    Raises:
        AssertionError: a property does not hold; the message names it and the remedy.
        ValueError: the name or an option is unknown.
    """
    checker = Checker("rate_target", target, registry.RATE_TARGETS, options, CONTEXT)
    checker.build()
    for num_samples in (None, 3):
        request = SimpleNamespace(sampling=Sampling(num_samples=num_samples))
        problem = TinyProblem.create(2)
        shape = (BATCH, LENGTH - 1) if num_samples is None else (num_samples, BATCH, LENGTH - 1)
        with checker.context(f"a rollout of batch size {list(shape)}"):
            _check_rate_loss(checker, problem.rollout(request))
            _check_rate_padding(checker, problem, request)
            _check_rate_state(checker, problem, request)
    with checker.context(f"a rollout of batch size {[MANY, LONG - 1]}"):
        _check_direction(checker)
    return []


def _check_rate_loss(checker: Checker, td: TensorDictBase) -> None:
    once, again = (checker.build()(td.clone()) for _ in range(2))
    checker.require(
        keys.LOSS_RATE in once, "writes no 'loss_rate': set it in the rollout that it is given"
    )
    loss = once[keys.LOSS_RATE]
    checker.require(
        loss.shape == td.shape,
        f"loss_rate has shape {tuple(loss.shape)}, the rollout {tuple(td.shape)}",
    )
    checker.require_finite("loss_rate", loss)
    checker.require(
        loss.requires_grad, "loss_rate has no gradient: use boundary_logits with their graph"
    )
    checker.require(
        torch.equal(loss, again[keys.LOSS_RATE]),
        "the same rollout gave two losses: draw no numbers",
    )


def _check_rate_padding(checker: Checker, problem: TinyProblem, request: SimpleNamespace) -> None:
    tds = [checker.build()(problem.padded_rollout(request, shift)) for shift in (0, 1)]
    losses = [mean_over_decisions(td, keys.LOSS_RATE) for td in tds]
    checker.require(
        torch.allclose(losses[0], losses[1], rtol=1e-9, atol=1e-12),
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    outside = tds[0][keys.LOSS_RATE][~tds[0][keys.DECISION_MASK].expand(tds[0].shape)]
    checker.require(
        not bool(outside.any()),
        "loss_rate is not 0 where decision_mask is False: multiply it by decision_mask",
    )


def _check_rate_state(checker: Checker, problem: TinyProblem, request: SimpleNamespace) -> None:
    used = checker.build()
    fresh = checker.build()
    used(problem.rollout(request))
    checker.require_restored(
        used, fresh, lambda target: target(problem.rollout(request, seed=1))[keys.LOSS_RATE]
    )


def _check_direction(checker: Checker) -> None:
    slopes = {rate: _loss_slope(checker.build(), rate).item() for rate in (LOW, RATE, HIGH)}
    checker.require(
        slopes[HIGH] > 0,
        f"does not push the logits down at a rate of {HIGH} and a target of {RATE}: the loss must grow with them there",
    )
    checker.require(
        slopes[LOW] < 0,
        f"does not push the logits up at a rate of {LOW} and a target of {RATE}: the loss must fall with them there",
    )
    checker.require(
        abs(slopes[RATE]) < min(-slopes[LOW], slopes[HIGH]),
        f"pushes no less where the rate is at its target of {RATE} than at {LOW} and {HIGH}",
    )


def _loss_slope(target: Any, rate: float) -> Tensor:
    """Return the derivative of the loss by a shift of all logits, for a policy which draws at this rate."""
    problem = TinyProblem.create(0, rate)
    with torch.no_grad():
        problem.agent.projection.weight.zero_()
    request = SimpleNamespace(sampling=Sampling())
    td = problem.rollout(request, symbol_BN=problem.symbol_BN[:1, :1].expand(MANY, LONG))
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    td[keys.BOUNDARY_LOGITS] = td[keys.BOUNDARY_LOGITS] + shift
    (slope,) = torch.autograd.grad(
        mean_over_decisions(target(td), keys.LOSS_RATE), shift, materialize_grads=True
    )
    return slope
