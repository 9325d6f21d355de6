"""What the rooms promise each other: what a rollout asks of an agent, what an estimator asks of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict, TensorDictBase
    from torch import Tensor

    from tokenv.core.rates import RateRange


class NoiseCoupler(Protocol):
    """Makes the noise of samples dependent; see ``tokenv.estimators.base.Stage.couple``."""

    def __call__(self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None) -> Tensor:
        """[K, B, T], [B, T] -> [K, B, T]."""


class ActionProposer(Protocol):
    """Draws actions instead of the agent; see ``tokenv.estimators.base.Stage.propose``."""

    def __call__(self, noise: Tensor) -> Tensor | None:
        """[.., B, T] -> int64 [.., B, T]; None leaves the drawing to the agent."""


class Relaxation(Protocol):
    """Makes the boundaries that the pooling reads differentiable; see ``tokenv.estimators.base.Stage.relax``."""

    def __call__(self, drawn: TensorDictBase, decision_mask: Tensor, noise: Tensor) -> Tensor:
        """Float [.., B, T]."""


class AuxiliaryRelaxations(Protocol):
    """Gives further, relaxed boundaries; see ``tokenv.estimators.base.Stage.relaxations``."""

    def __call__(
        self, drawn: TensorDictBase, decision_mask: Tensor, noise: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Float [.., B, T, R]."""


@dataclass(frozen=True)
class Sampling:
    """What an estimator asks of a rollout.

    Attributes:
        num_samples: K samples of the boundaries of every sequence share one encoder pass and come as a leading
            dimension; None gives one sample and no such dimension.
        reward_only: samples after the first are decoded without gradient, and weigh nothing (``sample_weight``) in
            the language model's loss.
        couple: makes the samples' noise dependent.
        propose: draws the actions instead of the agent.
        relax: makes the boundaries that the pooling reads differentiable.
        relaxations: further, relaxed boundaries whose likelihoods are wanted.
        teacher: agent whose boundaries the policy is scored with, as ``demonstration_log_prob``; the policy's own
            boundaries are drawn and decoded all the same.
        early_exit: whether the early exit's likelihoods are computed, and with them the rewards relative to it.
    """

    num_samples: int | None = None
    reward_only: bool = False
    couple: NoiseCoupler | None = None
    propose: ActionProposer | None = None
    relax: Relaxation | None = None
    relaxations: AuxiliaryRelaxations | None = None
    teacher: BoundaryAgent | None = None
    early_exit: bool = True

    @property
    def samples(self) -> int:
        """Samples of every sequence."""
        return self.num_samples or 1


class ObservationReader(Protocol):
    """What an observer asks of an agent."""

    in_keys: list[str]
    window: int
    rates: RateRange | None


class BoundaryAgent(ObservationReader, Protocol):
    """What a rollout asks of an agent; see ``tokenv.agents.base.Agent``."""

    whole: bool

    @property
    def autoregressive(self) -> bool:
        """Whether a decision depends on earlier ones."""

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries of all sequences."""

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """What ``draw`` gives, for boundaries that are given."""


class StepAgent(ObservationReader, Protocol):
    """What writing on asks of an agent; see ``tokenv.agents.base.Agent``."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read an observation and its noise, write ``action`` and ``boundary_prob``."""

    def repeat_rows(self, times: int) -> None:
        """Let each row stand for ``times`` rows from here on."""


class Estimator(Protocol):
    """What training asks of an estimator; see ``tokenv.estimators.base.Chain``."""

    sampling: Sampling
    unbiased: bool
    requires_factorised_policy: bool
    num_epochs: int
    head_epochs: int
    trains_through: Literal["loss", "likelihood"]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """From a rollout to its losses."""

    def replay(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same once more, for a rollout that was scored again."""


def check_compatible(estimator: Estimator, agent: BoundaryAgent, pooling: str) -> None:
    """Refuse an estimator that is not valid for a policy or a model.

    Args:
        estimator: what is to train the agent.
        agent: the policy.
        pooling: ``model.pooling``.

    Raises:
        ValueError: it is biased for policies that read their past, and this one does; or it needs relaxed passes,
            which this pooling does not have.
    """
    if estimator.requires_factorised_policy and agent.autoregressive:
        raise ValueError(
            f"this estimator is biased for policies whose decisions depend on earlier ones, and this "
            f"{type(agent).__name__} agent's do: give the learned agent window=0, or choose an estimator that is "
            "valid for every policy, such as rloo or branch"
        )
    if estimator.sampling.relaxations is not None and pooling != "select":
        raise ValueError(f"model.pooling = {pooling!r}: this estimator's relaxed passes need 'select'")


def check_causal(agent: BoundaryAgent, *, direct: bool) -> None:
    """Refuse an agent that would look ahead.

    Args:
        agent: draws the boundaries.
        direct: whether only what follows the last decision is predicted (``model.direct``).

    Raises:
        ValueError: the agent reads symbols that are to be predicted.
    """
    if agent.whole and not direct:
        raise ValueError(
            f"this {type(agent).__name__} agent reads the whole history before it draws a boundary, and here every "
            "symbol of the history is predicted from those before it: it would look ahead. Expected direct forecasts, "
            "which predict nothing of their history (model.direct=True with model.horizon=H and "
            "data.series.context = data.seq_len - H), or an agent that draws while it reads, such as strict or learned"
        )
