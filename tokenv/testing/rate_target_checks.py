"""``check_rate_target``: check the properties which training relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.core.expectations import mean_over_decisions
from tokenv.testing.fixture import BATCH, CONTEXT, LENGTH, RATE, Checker, TinyProblem

LOW, HIGH = 0.05, 0.9  # rates far on either side of the target
LONG, MANY = 50, 20  # symbols and sequences, so that the drawn rate is close to the policy's


class _SamplingRequest:
    """Request of a rollout with a number of samples."""

    def __init__(self, num_samples: int | None) -> None:
        self.sampling = Sampling(num_samples=num_samples)


def check_rate_target(target: str | Callable[..., Any], **options: Any) -> None:
    """Check a rate target against everything that training relies on.

    It must write a finite ``loss_rate`` of the rollout's shape, with one and with several samples; give the same loss
    for the same rollout; ignore padding and positions without a decision; and be saved and loaded with its state. Its
    gradient must push the policy's logits down if the rate is above the target, up if it is below, and less near the
    target than far from it.

    Args:
        target: a registered name, or a class or function that builds a ``RateTarget``.
        options: arguments of the constructor; ``rate``, ``width`` and ``seq_len`` are passed if it requires them.

    Raises:
        AssertionError: a property does not hold; the message names it and the remedy.
        ValueError: the name or an option is unknown.
    """
    checker = Checker("rate_target", target, registry.RATE_TARGETS, options, CONTEXT)
    checker.build()
    for num_samples in (None, 3):
        request, problem = _SamplingRequest(num_samples), TinyProblem.create(2)
        shape = (BATCH, LENGTH - 1) if num_samples is None else (num_samples, BATCH, LENGTH - 1)
        with checker.context(f"a rollout of batch size {list(shape)}"):
            _check_loss(checker, problem.rollout(request))
            _check_padding(checker, problem, request)
            _check_state(checker, problem, request)
    with checker.context(f"a rollout of batch size {[MANY, LONG - 1]}"):
        _check_direction(checker)


def _check_loss(checker: Checker, td: TensorDictBase) -> None:
    once, again = (checker.build()(td.clone()) for _ in range(2))
    checker.require(keys.LOSS_RATE in once, "writes no 'loss_rate': set it in the rollout that it is given")
    loss = once[keys.LOSS_RATE]
    checker.require(loss.shape == td.shape, f"loss_rate has shape {tuple(loss.shape)}, the rollout {tuple(td.shape)}")
    checker.require_finite("loss_rate", loss)
    checker.require(loss.requires_grad, "loss_rate has no gradient: use boundary_logits with their graph")
    same = torch.equal(loss, again[keys.LOSS_RATE])
    checker.require(same, "the same rollout gave two losses: draw no numbers")


def _check_padding(checker: Checker, problem: TinyProblem, request: _SamplingRequest) -> None:
    tds = [checker.build()(problem.padded_rollout(request, shift)) for shift in (0, 1)]
    losses = [mean_over_decisions(td, keys.LOSS_RATE) for td in tds]
    checker.require(
        torch.allclose(losses[0], losses[1], rtol=1e-9, atol=1e-12),
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    outside = tds[0][keys.LOSS_RATE][~tds[0][keys.DECISION_MASK].expand(tds[0].shape)]
    checker.require(
        not bool(outside.any()), "loss_rate is not 0 where decision_mask is False: multiply it by decision_mask"
    )


def _check_state(checker: Checker, problem: TinyProblem, request: _SamplingRequest) -> None:
    used, fresh = checker.build(), checker.build()
    used(problem.rollout(request))
    checker.require_restored(used, fresh, lambda target: target(problem.rollout(request, seed=1))[keys.LOSS_RATE])


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
    td = problem.rollout(_SamplingRequest(None), symbol_BN=problem.symbol_BN[:1, :1].expand(MANY, LONG))
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    td[keys.BOUNDARY_LOGITS] = td[keys.BOUNDARY_LOGITS] + shift
    (slope,) = torch.autograd.grad(mean_over_decisions(target(td), keys.LOSS_RATE), shift, materialize_grads=True)
    return slope
