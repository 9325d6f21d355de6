"""``check_codec``: what every codec must keep to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenv.agents.fixed import Uniform
from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.sequences import TensorSource
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.codecs.base import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.testing.fixture import BATCH, LENGTH, RATE, WIDTH, Checker, builder

DRAWS, DIRECTIONS = 4000, 16
STANDARD_ERRORS = 5.0


def check_codec(codec: str | Callable[..., Any], **options: Any) -> None:
    """Check a codec against everything that the model, training and generating rely on.

    That embeddings and log-probabilities have the right shapes and types and are finite; that the same generator gives
    the same symbols; that a gradient reaches the codec's parameters; that its state can be saved and loaded; and that
    ``sample`` draws what ``log_prob`` says: the score of drawn symbols has no mean, ``E[d log p(x) / d parameters] =
    0``, within 5 standard errors of 4,000 draws, probabilities of discrete symbols sum to 1, and an ``entropy`` is
    ``-E[log p(x)]``. (Of densities, a factor that does not depend on the parameters goes unseen.) Then a small model
    reads its symbols, and stepping must give the log-likelihoods of one pass.

    Symbols to try it with are its own: it must be able to sample without ``after``.

    Args:
        codec: a registered name, or a class or function that builds a ``Codec``.
        options: for the constructor; ``width``, ``softcap`` and ``channels`` are given where it asks for them.

    Raises:
        AssertionError: names what is wrong, and what to do.
        ValueError: the name or an option is unknown.
    """
    failure = Checker("codec", codec)
    build = builder("codec", codec, registry.CODECS, options, {"width": WIDTH, "softcap": 30.0, "channels": 1})
    made: Codec = build()
    for attribute in ("symbol_shape", "symbol_dtype", "num_parameters"):
        failure.need(hasattr(made, attribute), f"has no {attribute}: see tokenv.lm.codecs.base.Codec")
    theta_P = 0.5 * torch.randn(made.num_parameters, generator=_generator(0), dtype=torch.float64)
    with failure.during(f"sample() of parameters {[DRAWS, made.num_parameters]}"):
        symbol_S = _check_sample(failure, made, theta_P.expand(DRAWS, -1))
    with failure.during(f"log_prob() of {DRAWS} symbols that it has drawn itself"):
        _check_log_prob(failure, made, theta_P, symbol_S)
    with failure.during("embed() of symbols that it has drawn itself"):
        _check_embed(failure, build, symbol_S)
    with failure.during("a model with it"):
        _check_model(failure, made, symbol_S[: BATCH * LENGTH].unflatten(0, (BATCH, LENGTH)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_sample(failure: Checker, codec: Codec, parameters_SP: Tensor) -> Tensor:
    drawn = [codec.sample(parameters_SP, generator=_generator(seed)) for seed in (0, 0, 1)]
    shape = (DRAWS, *codec.symbol_shape)
    failure.need(
        tuple(drawn[0].shape) == shape and drawn[0].dtype == codec.symbol_dtype,
        f"sample() gives {drawn[0].dtype} of shape {tuple(drawn[0].shape)}: expected {codec.symbol_dtype} of {shape}",
    )
    same = torch.equal(drawn[0], drawn[1])
    failure.need(same, "the same generator gave other symbols: draw from the generator that sample() is given")
    failure.need(not torch.equal(drawn[0], drawn[2]), "two generators gave the same symbols: sample() draws nothing")
    sure = [codec.sample(parameters_SP, temperature=0.0, generator=_generator(seed)) for seed in (0, 1)]
    failure.need(torch.equal(*sure), "sample(temperature=0) draws: expected the most probable symbol")
    return drawn[0]


def _check_log_prob(failure: Checker, codec: Codec, theta_P: Tensor, symbol_S: Tensor) -> None:
    parameters_SP = theta_P.expand(DRAWS, -1).clone().requires_grad_()
    log_prob_S = codec.log_prob(parameters_SP, symbol_S)
    found = tuple(log_prob_S.shape)
    failure.need(found == (DRAWS,), f"log_prob() has shape {found}: expected one number a symbol, {(DRAWS,)}")
    failure.need(bool(log_prob_S.isfinite().all()), "log_prob() of drawn symbols is not finite")
    coarse = codec.log_prob(parameters_SP.detach().bfloat16(), symbol_S).dtype
    failure.need(
        coarse in (torch.float32, torch.float64),
        f"log_prob() of bfloat16 parameters is of type {coarse}: compute in float32 or finer, with parameters.float()",
    )
    (score_SP,) = torch.autograd.grad(log_prob_S.sum(), parameters_SP)
    along = torch.randn(DIRECTIONS, len(theta_P), generator=_generator(2), dtype=torch.float64)
    worst = _off(score_SP @ torch.cat([along, theta_P[None]]).T)
    failure.need(
        worst < STANDARD_ERRORS,
        f"sample() does not draw what log_prob() says: the mean of its score is {worst:.1f} standard errors off 0; "
        "either draws from another distribution, or the probabilities do not sum to 1",
    )
    log_prob_S = log_prob_S.detach()
    if not symbol_S.dtype.is_floating_point:
        _check_sum(failure, log_prob_S, symbol_S)
    if type(codec).entropy is not Codec.entropy:
        off = _off((-log_prob_S - codec.entropy(theta_P))[:, None])
        wrong = f"entropy() is {off:.1f} standard errors off the mean of -log_prob() of {DRAWS} drawn symbols"
        failure.need(off < STANDARD_ERRORS, wrong)


def _off(value_SX: Tensor) -> float:
    """How many standard errors the means are off 0, at most."""
    error_X = value_SX.std(0) / len(value_SX) ** 0.5
    return float((value_SX.mean(0).abs() / error_X.clamp(min=1e-12)).max())


def _check_sum(failure: Checker, log_prob_S: Tensor, symbol_S: Tensor) -> None:
    """Of the symbols that were drawn; what was not seen is about the share that was seen once (Good and Turing)."""
    _, place_S, count_X = symbol_S.flatten(1 if symbol_S.dim() > 1 else 0).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    prob_X = torch.zeros(len(count_X), dtype=log_prob_S.dtype).index_copy(0, place_S, log_prob_S.exp())
    total, unseen = float(prob_X.sum()), float((count_X == 1).sum()) / DRAWS
    failure.need(
        total < 1 + 1e-6 and total > 1 - unseen - STANDARD_ERRORS / DRAWS**0.5,
        f"the probabilities of all symbols that it draws sum to {total:.4f}: expected 1",
    )


def _check_embed(failure: Checker, build: Callable[[], Any], symbol_S: Tensor) -> None:
    used, fresh = build(), build()
    embedded = used.embed(symbol_S)
    found = tuple(embedded.shape)
    failure.need(found == (DRAWS, WIDTH), f"embed() has shape {found}: expected [.., D], {(DRAWS, WIDTH)}")
    failure.need(bool(embedded.isfinite().all()), "embed() is not finite")
    failure.need(bool((embedded != embedded[:1]).any()), "embed() gives the same vector for all symbols")
    trained = [parameter for parameter in used.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(embedded.square().sum(), trained, allow_unused=True) if trained else ()
    reached = any(g is not None and bool(g.any()) for g in grads)
    failure.need(reached or not trained, "no gradient of embed() reaches the codec's parameters")
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.add_(0.1)
    fresh.load_state_dict(used.state_dict())
    same = torch.equal(fresh.embed(symbol_S), used.embed(symbol_S))
    failure.need(same, "a state_dict does not bring its state back: register parameters and buffers")


def _check_model(failure: Checker, codec: Codec, symbol_BN: Tensor) -> None:
    size = UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = UNet(size, codec).double()
    agent = Uniform(RATE, LENGTH)
    with torch.no_grad():
        at_once = rollout(lm, agent, symbol_BN)
        stepped = TokenizationEnv(lm, TensorSource(symbol_BN), BATCH).rollout(LENGTH - 1, agent)
    for key in (keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY):
        one, other = at_once[key].double(), stepped[key].double()
        failure.need(bool(one.isfinite().all()), f"{key} of a model with it is not finite")
        failure.need(
            torch.allclose(one, other, rtol=1e-9, atol=1e-9),
            f"{key} differs between stepping and one pass: embed() and log_prob() must treat every symbol alone",
        )
