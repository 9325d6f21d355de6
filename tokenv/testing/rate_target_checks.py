"""``check_rate_target``: what every rate target must keep to."""

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
from tokenv.testing.fixture import BATCH, CONTEXT, LENGTH, RATE, Checker, TinyProblem, builder

LOW, HIGH = 0.05, 0.9  # rates far on either side of the target
LONG, MANY = 50, 20  # symbols and sequences, so that what is drawn keeps to the policy's rate


class _RateRequest:
    """What a rollout is made for: so many samples."""

    def __init__(self, num_samples: int | None) -> None:
        self.sampling = Sampling(num_samples=num_samples)


def check_rate_target(target: str | Callable[..., Any], **options: Any) -> None:
    """Check a rate target against everything that training relies on.

    That it writes a finite ``loss_rate`` of the rollout's shape, with one and with several samples; that the same
    rollout gives the same loss; that padding never matters, nor positions where nobody decides; that its state can be
    saved and loaded; and that its gradient pushes the policy's logits down where the rate is above the target, up where
    it is below, and less where it is near than where it is far.

    Args:
        target: a registered name, or a class or function that builds a ``RateTarget``.
        options: for the constructor; ``rate``, ``width`` and ``seq_len`` are given where it asks for them.

    Raises:
        AssertionError: names what is wrong, and what to do.
        ValueError: the name or an option is unknown.
    """
    failure = Checker("rate_target", target)
    build = builder("rate_target", target, registry.RATE_TARGETS, options, CONTEXT)
    build()
    for num_samples in (None, 3):
        asks, world = _RateRequest(num_samples), TinyProblem.make(2)
        shape = (BATCH, LENGTH - 1) if num_samples is None else (num_samples, BATCH, LENGTH - 1)
        with failure.during(f"a rollout of batch size {list(shape)}"):
            _check_loss(failure, build, world.rollout(asks))
            _check_padding(failure, build, world, asks)
            _check_state(failure, build, world, asks)
    with failure.during(f"a rollout of batch size {[MANY, LONG - 1]}"):
        _check_direction(failure, build)


def _check_loss(failure: Checker, build: Callable[[], Any], td: TensorDictBase) -> None:
    once, again = (build()(td.clone()) for _ in range(2))
    failure.need(keys.LOSS_RATE in once, "writes no 'loss_rate': set it in the rollout that it is given")
    loss = once[keys.LOSS_RATE]
    failure.need(loss.shape == td.shape, f"loss_rate has shape {tuple(loss.shape)}, the rollout {tuple(td.shape)}")
    failure.need(bool(loss.isfinite().all()), "loss_rate is not finite")
    failure.need(loss.requires_grad, "loss_rate has no gradient: use boundary_logits with their graph")
    same = torch.equal(loss, again[keys.LOSS_RATE])
    failure.need(same, "the same rollout gave two losses: draw no numbers")


def _check_padding(failure: Checker, build: Callable[[], Any], world: TinyProblem, asks: _RateRequest) -> None:
    length_B = torch.tensor([LENGTH, LENGTH - 2])
    padding_BN = torch.arange(LENGTH) >= length_B[:, None]
    found = []
    for change in (0, 1):
        symbol_BN = torch.where(padding_BN, (world.symbol_BN + change) % 256, world.symbol_BN)
        found.append(build()(world.rollout(asks, symbol_BN=symbol_BN, length_B=length_B)))
    losses = [mean_over_decisions(td, keys.LOSS_RATE) for td in found]
    failure.need(
        torch.allclose(losses[0], losses[1], rtol=1e-9, atol=1e-12),
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    td = found[0]
    outside = td[keys.LOSS_RATE][~td[keys.DECISION_MASK].expand(td.shape)]
    failure.need(not bool(outside.any()), "loss_rate is not 0 where nobody decides: multiply it by decision_mask")


def _check_state(failure: Checker, build: Callable[[], Any], world: TinyProblem, asks: _RateRequest) -> None:
    used, fresh = build(), build()
    used(world.rollout(asks))
    fresh.load_state_dict(used.state_dict())
    first, second = (each(world.rollout(asks, seed=1))[keys.LOSS_RATE] for each in (used, fresh))
    failure.need(torch.equal(first, second), "a state_dict does not bring its state back: register buffers")


def _check_direction(failure: Checker, build: Callable[[], Any]) -> None:
    pushes = {rate: _push(build, rate).item() for rate in (LOW, RATE, HIGH)}
    failure.need(
        pushes[HIGH] > 0,
        f"does not push the logits down at a rate of {HIGH} and a target of {RATE}: the loss must grow with them there",
    )
    failure.need(
        pushes[LOW] < 0,
        f"does not push the logits up at a rate of {LOW} and a target of {RATE}: the loss must fall with them there",
    )
    failure.need(
        abs(pushes[RATE]) < min(-pushes[LOW], pushes[HIGH]),
        f"pushes no less where the rate is at its target of {RATE} than at {LOW} and {HIGH}",
    )


def _push(build: Callable[[], Any], rate: float) -> Tensor:
    """Derivative of the loss where all logits rise together, of a policy that draws boundaries at this rate."""
    world = TinyProblem.make(0, rate)
    with torch.no_grad():
        world.agent.projection.weight.zero_()
    td = world.rollout(_RateRequest(None), symbol_BN=world.symbol_BN[:1, :1].expand(MANY, LONG))
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    td[keys.BOUNDARY_LOGITS] = td[keys.BOUNDARY_LOGITS] + shift
    (push,) = torch.autograd.grad(mean_over_decisions(build()(td), keys.LOSS_RATE), shift, materialize_grads=True)
    return push
