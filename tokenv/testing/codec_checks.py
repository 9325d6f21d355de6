"""``check_codec``: check the properties which models, training and generation rely on."""

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
from tokenv.testing.fixture import (
    BATCH,
    LENGTH,
    RATE,
    STANDARD_ERRORS,
    WIDTH,
    Checker,
    has_gradient,
    max_standard_errors,
    tiny_lm,
)

DRAWS = 4000
DIRECTIONS = 16
# arguments of constructors which require them
CONTEXT = {"width": WIDTH, "softcap": 30.0, "channels": 1}


def check_codec(codec: str | Callable[..., Any], **options: Any) -> list[str]:
    """Check a codec against everything that the model, training and generating rely on.

    Embeddings and log-probabilities must have the right shapes and types and be finite; the same generator must give
    the same symbols; a gradient must reach the codec's parameters; its state must be saved and loaded; and ``sample``
    must draw from the distribution of ``log_prob``: the score of drawn symbols has mean 0,
    ``E[d log p(x) / d parameters] = 0``, within 5 standard errors of 4,000 draws, probabilities of discrete symbols
    sum to 1, and an ``entropy`` is ``-E[log p(x)]``. (For densities, a factor which does not depend on the parameters
    goes unnoticed.) Then a small model reads its symbols, and stepping must give the log-likelihoods of one pass.

    The codec is tried with its own symbols: it must be able to sample without ``after``.

    Args:
        codec: a registered name, or a class or function that builds a ``Codec``.
        options: arguments of the constructor; ``width``, ``softcap`` and ``channels`` are passed if it requires them.

    Returns:
        Properties which were not checked, and the reasons; empty if everything was.

    Raises:
        AssertionError: a property does not hold; the message names it and the remedy.
        ValueError: the name or an option is unknown.
    """
    checker = Checker("codec", codec, registry.CODECS, options, CONTEXT)
    built: Codec = checker.build()
    for attribute in ("symbol_shape", "symbol_dtype", "num_parameters"):
        checker.require(
            hasattr(built, attribute), f"has no {attribute}: see tokenv.lm.codecs.base.Codec"
        )
    theta_P = 0.5 * torch.randn(built.num_parameters, generator=_generator(0), dtype=torch.float64)
    with checker.context(f"sample() of parameters {[DRAWS, built.num_parameters]}"):
        symbol_S = _check_sample(checker, built, theta_P.expand(DRAWS, -1))
    with checker.context(f"log_prob() of {DRAWS} symbols that it has drawn itself"):
        _check_log_prob(checker, built, theta_P, symbol_S)
    with checker.context("embed() of symbols that it has drawn itself"):
        _check_embed(checker, symbol_S)
    with checker.context("a model with it"):
        _check_model(checker, built, symbol_S[: BATCH * LENGTH].unflatten(0, (BATCH, LENGTH)))
    if built.symbol_dtype.is_floating_point:
        return [
            "that the density integrates to 1: a factor which does not depend on the parameters goes unnoticed"
        ]
    return []


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_sample(checker: Checker, codec: Codec, parameters_SP: Tensor) -> Tensor:
    drawn = [codec.sample(parameters_SP, generator=_generator(seed)) for seed in (0, 0, 1)]
    shape = (DRAWS, *codec.symbol_shape)
    checker.require(
        tuple(drawn[0].shape) == shape and drawn[0].dtype == codec.symbol_dtype,
        f"sample() gives {drawn[0].dtype} of shape {tuple(drawn[0].shape)}: expected {codec.symbol_dtype} of {shape}",
    )
    same = torch.equal(drawn[0], drawn[1])
    checker.require(
        same,
        "the same generator gave other symbols: draw from the generator that sample() is given",
    )
    checker.require(
        not torch.equal(drawn[0], drawn[2]),
        "two generators gave the same symbols: sample() draws nothing",
    )
    modes = [
        codec.sample(parameters_SP, temperature=0.0, generator=_generator(seed)) for seed in (0, 1)
    ]
    checker.require(
        torch.equal(*modes), "sample(temperature=0) draws: expected the most probable symbol"
    )
    return drawn[0]


def _check_log_prob(checker: Checker, codec: Codec, theta_P: Tensor, symbol_S: Tensor) -> None:
    parameters_SP = theta_P.expand(DRAWS, -1).clone().requires_grad_()
    log_prob_S = codec.log_prob(parameters_SP, symbol_S)
    shape = tuple(log_prob_S.shape)
    checker.require(
        shape == (DRAWS,), f"log_prob() has shape {shape}: expected one number a symbol, {(DRAWS,)}"
    )
    checker.require_finite("log_prob() of drawn symbols", log_prob_S)
    dtype = codec.log_prob(parameters_SP.detach().bfloat16(), symbol_S).dtype
    checker.require(
        dtype in (torch.float32, torch.float64),
        f"log_prob() of bfloat16 parameters is of type {dtype}: compute in float32 or finer, with parameters.float()",
    )
    (score_SP,) = torch.autograd.grad(log_prob_S.sum(), parameters_SP)
    direction_XP = torch.randn(
        DIRECTIONS, len(theta_P), generator=_generator(2), dtype=torch.float64
    )
    worst = max_standard_errors(score_SP @ torch.cat([direction_XP, theta_P[None]]).T)
    checker.require(
        worst < STANDARD_ERRORS,
        f"sample() does not draw what log_prob() says: the mean of its score is {worst:.1f} standard errors off 0; "
        "either draws from another distribution, or the probabilities do not sum to 1",
    )
    log_prob_S = log_prob_S.detach()
    if not symbol_S.dtype.is_floating_point:
        _check_sum(checker, log_prob_S, symbol_S)
    if type(codec).entropy is not Codec.entropy:
        off = max_standard_errors((-log_prob_S - codec.entropy(theta_P))[:, None])
        wrong = f"entropy() is {off:.1f} standard errors off the mean of -log_prob() of {DRAWS} drawn symbols"
        checker.require(off < STANDARD_ERRORS, wrong)


def _check_sum(checker: Checker, log_prob_S: Tensor, symbol_S: Tensor) -> None:
    """Check that probabilities of drawn symbols sum to 1, less the share drawn once (Good and Turing's estimate)."""
    flat = symbol_S.reshape(len(symbol_S), -1)
    _, index_S, count_X = flat.unique(dim=0, return_inverse=True, return_counts=True)
    prob_X = torch.zeros(len(count_X), dtype=log_prob_S.dtype).index_copy(
        0, index_S, log_prob_S.exp()
    )
    total = float(prob_X.sum())
    unseen = float((count_X == 1).sum()) / DRAWS
    checker.require(
        total < 1 + 1e-6 and total > 1 - unseen - STANDARD_ERRORS / DRAWS**0.5,
        f"the probabilities of all symbols that it draws sum to {total:.4f}: expected 1",
    )


def _check_embed(checker: Checker, symbol_S: Tensor) -> None:
    used = checker.build()
    fresh = checker.build()
    embedded = used.embed(symbol_S)
    shape = tuple(embedded.shape)
    checker.require(
        shape == (DRAWS, WIDTH), f"embed() has shape {shape}: expected [.., D], {(DRAWS, WIDTH)}"
    )
    checker.require_finite("embed()", embedded)
    checker.require(
        bool((embedded != embedded[:1]).any()), "embed() gives the same vector for all symbols"
    )
    trained = any(parameter.requires_grad for parameter in used.parameters())
    reached = has_gradient(embedded.square().sum(), used.parameters())
    checker.require(reached or not trained, "no gradient of embed() reaches the codec's parameters")
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.add_(0.1)
    checker.require_restored(used, fresh, lambda each: each.embed(symbol_S))


def _check_model(checker: Checker, codec: Codec, symbol_BN: Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = tiny_lm(codec)
    agent = Uniform(RATE, LENGTH)
    with torch.no_grad():
        one_pass = rollout(lm, agent, symbol_BN)
        stepped = TokenizationEnv(lm, TensorSource(symbol_BN), BATCH).rollout(LENGTH - 1, agent)
    for key in (keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY):
        one = one_pass[key].double()
        other = stepped[key].double()
        checker.require_finite(f"{key} of a model with it", one)
        checker.require(
            torch.allclose(one, other, rtol=1e-9, atol=1e-9),
            f"{key} differs between stepping and one pass: embed() and log_prob() must treat every symbol alone",
        )
