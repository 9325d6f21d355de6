"""Contracts between rooms: what a rollout requires of an agent, and an estimator of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from tensordict import TensorDict, TensorDictBase
    from torch import Tensor

    from tokenv.core.rates import RateRange

RELAXED_POOLINGS = ("select", "deviation")  # values of ``model.pooling`` with relaxed passes


@dataclass(frozen=True)
class Sampling:
    """Options of a rollout which an estimator requires.

    Attributes:
        num_samples: number K of boundary samples per sequence, which share one encoder pass and form a leading
            dimension; None gives one sample without this dimension.
        reward_only: whether samples after the first are decoded without gradient and have weight 0
            (``sample_weight``) in the language model's loss.
        couple: hook which makes the samples' noise dependent: ``Stage.couple`` of ``tokenv.estimators.base``.
        propose: hook which draws the actions instead of the agent: ``Stage.propose``.
        relax: hook which makes the boundaries read by the pooling differentiable: ``Stage.relax``.
        relaxations: hook which returns further, relaxed boundaries, whose likelihoods are computed:
            ``Stage.relaxations``.
        teacher: agent whose boundaries the policy is scored with, as ``demonstration_log_prob``; the policy's own
            boundaries are drawn and decoded all the same.
        early_exit: whether to compute the early exit's likelihoods and the rewards relative to them.
        detach_encoder: whether the agent's outputs for its own boundaries carry no gradient into the encoder; those
            for the teacher's boundaries do.
    """

    num_samples: int | None = None
    reward_only: bool = False
    couple: Callable[[Tensor, Tensor, torch.Generator | None], Tensor] | None = None
    propose: Callable[[Tensor], Tensor | None] | None = None
    relax: Callable[[TensorDictBase, Tensor, Tensor], Tensor] | None = None
    relaxations: (
        Callable[[TensorDictBase, Tensor, Tensor, torch.Generator | None], Tensor] | None
    ) = None
    teacher: BoundaryAgent | None = None
    early_exit: bool = True
    detach_encoder: bool = False

    @property
    def samples(self) -> int:
        """Number of samples per sequence."""
        return self.num_samples or 1


class ObservationReader(Protocol):
    """Requirements of an observer on an agent."""

    in_keys: list[str]
    window: int
    rates: RateRange | None


class BoundaryAgent(ObservationReader, Protocol):
    """Requirements of a rollout on an agent; see ``tokenv.agents.base.Agent``."""

    non_causal: bool
    stochastic: bool
    fixed_count: bool

    @property
    def autoregressive(self) -> bool:
        """Whether a decision depends on earlier ones."""

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences."""

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the output of ``draw`` for given boundaries."""


class StepAgent(ObservationReader, Protocol):
    """Requirements of generation on an agent; see ``tokenv.agents.base.Agent``."""

    def step(self, observation: Mapping[str, Tensor]) -> TensorDictBase | Mapping[str, Tensor]:
        """Read an observation and its noise, return ``action`` and ``boundary_prob``."""

    def repeat_rows(self, times: int) -> None:
        """Repeat each row of the agent's state ``times`` times."""


class Estimator(Protocol):
    """Requirements on a policy and a model; see ``tokenv.estimators.base.Chain``."""

    sampling: Sampling
    requires_factorised_policy: bool


def check_compatible(estimator: Estimator, agent: BoundaryAgent, pooling: str) -> None:
    """Raise an error unless an estimator is valid for a policy and a model.

    Args:
        estimator: estimator which trains the agent.
        agent: trained policy.
        pooling: value of ``model.pooling``.

    Raises:
        ValueError: the estimator is biased for policies which read their past, and this one does; or it requires
            relaxed passes, which this pooling does not support.
    """
    if estimator.requires_factorised_policy and agent.autoregressive:
        raise ValueError(
            f"estimator: it is biased for policies whose decisions depend on earlier ones, and this "
            f"{type(agent).__name__} agent's do: set agent.window=0 for the learned agent, or choose an estimator that "
            "is valid for every policy, such as estimator.name=rloo"
        )
    if estimator.sampling.propose is not None:
        check_scores(agent, "this estimator draws boundaries in the agent's place")
    if estimator.sampling.relaxations is not None and pooling not in RELAXED_POOLINGS:
        expected = " or ".join(RELAXED_POOLINGS)
        raise ValueError(
            f"model.pooling = {pooling!r}: this estimator's relaxed passes need {expected}"
        )


def check_scores(agent: BoundaryAgent, why: str) -> None:
    """Raise an error unless an agent gives the boundaries which another one has drawn a log-probability.

    Args:
        agent: agent which is to score them.
        why: reason to score them, the beginning of the message.

    Raises:
        ValueError: it draws from no distribution, or one number of boundaries alone has a positive probability.
    """
    name = type(agent).__name__
    if not agent.stochastic:
        problem = f"an agent {name} draws from no distribution in which they have a probability"
    elif agent.fixed_count:
        problem = f"to an agent {name} any other number of boundaries than its own is impossible"
    else:
        return
    raise ValueError(
        f"{why}, and {problem}: expected an agent with a stochastic policy and a free count, such as learned or nawrot"
    )


def check_causal(agent: BoundaryAgent, *, history_given: bool) -> None:
    """Raise an error if an agent would read symbols before they are predicted.

    Args:
        agent: agent which draws the boundaries.
        history_given: whether only symbols after the last decision are predicted (``Codec.trailing``).

    Raises:
        ValueError: the agent reads symbols which are to be predicted.
    """
    if agent.non_causal and not history_given:
        raise ValueError(
            f"this {type(agent).__name__} agent reads the whole history before it draws a boundary, and here every "
            "symbol of the history is predicted from those before it: it would look ahead. Expected direct forecasts, "
            "which predict nothing of their history (of series: codec.direct=True with codec.horizon=H and "
            "data.options.context = data.seq_len - H), or an agent that draws while it reads, such as "
            "exact_count or learned"
        )
