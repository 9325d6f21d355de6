"""Stages, of which estimators consist, and the chain, which checks that they fit together.

A stage reads some keys of a rollout ([B, T] or [K, B, T]: dimension -1 is time, -2 the batch, -3 the samples; further
leading dimensions are independent rollouts) and writes others. An estimator is a chain of stages, as an optax
optimizer is a chain of gradient transformations::

    reinforce = chain(EarlyExit(), Discount(gamma=0.99), BatchCentre(), ScoreFunction())

Stages which change how boundaries are drawn (antithetic pairs, off-policy actions, relaxed boundaries) override one of
the hooks ``couple``, ``propose``, ``relax`` and ``relaxations``; ``Chain.sampling`` passes them to the rollout.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent, Sampling
from tokenv.core.errors import COUNT_OR_NULL, check_value

NestedKey = str | tuple[str, ...]
Route = Literal["loss", "likelihood"]

ROLLOUT_KEYS: frozenset[NestedKey] = frozenset(
    {
        keys.SYMBOL,
        keys.ENCODING,
        keys.LAST_ACTIONS,
        keys.POSITION,
        keys.TOKEN_COUNT,
        keys.DECISION_MASK,
        keys.NOISE,
        keys.ACTION,
        keys.ACTION_LOG_PROB,
        keys.BOUNDARY_LOGITS,
        keys.BOUNDARY_PROB,
        keys.ENTROPY,
        keys.LOG_LIKELIHOOD,
        keys.LOG_LIKELIHOOD_EARLY,
        keys.REWARD,
        keys.DONE,
        keys.NEXT_SYMBOL,
        keys.NEXT_ENCODING,
    }
)
HOOKS = ("couple", "propose", "relax", "relaxations")


class Stage(TensorDictModuleBase, ABC):
    """One step from rewards to a loss.

    Attributes:
        in_keys: keys which it reads; a chain rejects a stage whose keys have not been written.
        out_keys: keys which it writes.
        unbiased: whether it keeps the gradient's expectation; a chain is unbiased if all of its stages are.
        requires_factorised_policy: whether it is valid only for policies which ignore their own past (window 0); a run
            with another policy is rejected.
        samples: least number K of samples per sequence.
        even: whether K must be even.
        reward_only: whether the samples after the first serve rewards only: the language model does not learn from
            them, so that they cost a forward pass without a backward pass.
        num_epochs: gradient steps on one rollout.
        head_epochs: further steps of the agent alone on each rollout, after these; see ``ClippedSurrogate``.
        trains_through: ``loss`` for stages whose ``loss_policy`` carries the policy's gradient, ``likelihood`` for
            those in which ``log_likelihood`` carries it.
    """

    in_keys: list[Any]
    out_keys: list[Any]
    unbiased: bool = True
    requires_factorised_policy: bool = False
    samples: int = 1
    even: bool = False
    reward_only: bool = False
    num_epochs: int = 1
    head_epochs: int = 0
    trains_through: Route = "loss"

    @abstractmethod
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read ``in_keys`` of a rollout, write ``out_keys`` into it, and return it."""

    @property
    def teacher(self) -> BoundaryAgent | None:
        """Agent whose boundaries the policy is scored with in a rollout; None for no such agent."""
        return None

    @property
    def flops(self) -> int:
        """FLOPs of its own networks per symbol of a sample, forward and backward: 6 per matrix parameter."""
        linear = (module for module in self.modules() if isinstance(module, torch.nn.Linear))
        return 6 * sum(module.weight.numel() for module in linear)

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Turn independent uniform numbers [K, B, T] into dependent ones, each still uniform.

        0 forces a boundary and 1 forces none.
        """
        raise NotImplementedError

    def propose(self, noise: Tensor) -> Tensor | None:
        """Return actions of another policy to be scored, int64 of the noise's shape; None lets the agent draw."""
        raise NotImplementedError

    def relax(self, drawn: TensorDictBase, decision_mask: Tensor, noise: Tensor) -> Tensor:
        """Return boundaries which the pooling reads instead of the drawn actions: float [.., T], with a gradient."""
        raise NotImplementedError

    def relaxations(
        self,
        drawn: TensorDictBase,
        decision_mask: Tensor,
        noise: Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return R relaxed boundaries whose likelihoods are computed besides: float [.., T, R], with a gradient.

        Random numbers must be drawn with ``tokenv.core.distributed.uniform_like``, because its rows may be some of a
        batch.
        """
        raise NotImplementedError


class Chain(TensorDictModuleBase):
    """Stages applied one after the other.

    Every chain which trains a policy writes ``loss_policy``, so that the training loop is the same for all::

        td = estimator(env.one_pass(agent, estimator.sampling))
        loss = -td["next", "log_likelihood"].mean() + td["loss_policy"].mean()

    If ``trains_through`` is ``likelihood`` (the straight-through family) it is zero and without gradient: the
    policy's gradient flows through the language model's loss, and the weight ``loss.policy`` has no effect. The
    ``loss_critic`` of a stage is added to ``loss_policy`` with a value of zero, so that the same loop trains the stage.

    Args:
        stages: stages in order.
        num_samples: samples K of the boundaries per sequence in a rollout; None for one sample without a dimension of
            its own.

    Attributes:
        sampling: requirements of the chain on a rollout.
        unbiased: whether the expected gradient is the true one.
        requires_factorised_policy: whether only policies which ignore their own past are valid.
        num_epochs: gradient steps on one rollout.
        head_epochs: further steps of the agent alone on each rollout; see ``ClippedSurrogate``.
        reads_early_exit: whether a stage reads the early exit's likelihood, or the rollout's reward, which is relative
            to it.
        flops: FLOPs of the stages' own networks per symbol of a sample.
        trains_through: ``loss`` if ``loss_policy`` carries the policy's gradient, ``likelihood`` if only the
            log-likelihood does.

    Raises:
        ValueError: there is no stage, a stage reads a key which neither a rollout nor an earlier stage writes or needs
            more samples than there are, or two stages override the same hook.
    """

    def __init__(self, *stages: Stage, num_samples: int | None = None) -> None:
        super().__init__()
        if not stages:
            raise ValueError(
                "chain() without stages: expected at least one, such as ScoreFunction()"
            )
        check_value("num_samples", num_samples, COUNT_OR_NULL)
        self.stages = list(stages)
        self.sampling = Sampling(
            num_samples=num_samples,
            reward_only=num_samples is not None and any(stage.reward_only for stage in stages),
            teacher=_find_teacher(stages),
            **{name: _find_hook(name, stages) for name in HOOKS},
        )
        known = set(ROLLOUT_KEYS)
        if self.sampling.relaxations is not None:
            known.add(keys.LOG_LIKELIHOOD_RELAXED)
        if self.sampling.teacher is not None:
            known.add(keys.DEMONSTRATION_LOG_PROB)
        for number, stage in enumerate(stages):
            _check_samples(stage, num_samples)
            for key in stage.in_keys:
                if key not in known:
                    raise ValueError(_missing(key, number, stages))
            known |= set(stage.out_keys)
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage)  # so that the state of a stage is saved and moved
        self.in_keys = sorted(
            {key for stage in stages for key in stage.in_keys} & ROLLOUT_KEYS, key=str
        )
        written = {key for stage in stages for key in stage.out_keys}
        relaxed = self.sampling.relax is not None or any(
            stage.trains_through == "likelihood" for stage in stages
        )
        self.trains_through: Route = (
            "likelihood" if relaxed and keys.LOSS_POLICY not in written else "loss"
        )
        if relaxed:
            written.add(keys.LOSS_POLICY)
        self.out_keys = sorted(written, key=str)
        from_rollout: set[NestedKey] = set()  # keys of the rollout, not of an earlier stage
        for number, stage in enumerate(stages):
            from_rollout |= set(stage.in_keys).difference(
                *(earlier.out_keys for earlier in stages[:number])
            )
        self.reads_early_exit = bool(from_rollout & {keys.LOG_LIKELIHOOD_EARLY, keys.REWARD})
        self.flops = sum(stage.flops for stage in stages)
        self.unbiased = all(stage.unbiased for stage in stages)
        self.requires_factorised_policy = any(stage.requires_factorised_policy for stage in stages)
        self.num_epochs = max(stage.num_epochs for stage in stages)
        self.head_epochs = max(stage.head_epochs for stage in stages)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply all stages to a rollout, in place."""
        for stage in self.stages:
            tensordict = _apply(stage, tensordict)
        if self.trains_through == "likelihood":
            tensordict.set(keys.LOSS_POLICY, torch.zeros_like(tensordict[keys.BOUNDARY_PROB]))
        if {keys.LOSS_CRITIC, keys.LOSS_POLICY} <= set(self.out_keys):
            critic = tensordict[keys.LOSS_CRITIC]
            tensordict.set(
                keys.LOSS_POLICY, tensordict[keys.LOSS_POLICY] + (critic - critic.detach())
            )
        return tensordict

    def replay(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the loss of a rollout which was scored again; credits stay unchanged."""
        for stage in self.stages:
            if keys.LOSS_POLICY in stage.out_keys:
                tensordict = _apply(stage, tensordict)
        return tensordict


def _apply(stage: Stage, tensordict: TensorDictBase) -> TensorDictBase:
    """Apply a stage; an exception gets a note which names it."""
    try:
        return stage(tensordict)
    except Exception as error:
        error.add_note(f"raised in the stage {type(stage).__name__}")
        raise


def chain(*stages: Stage, num_samples: int | None = None) -> Chain:
    """Chain stages into an estimator; see ``Chain``."""
    return Chain(*stages, num_samples=num_samples)


def _find_hook(name: str, stages: tuple[Stage, ...]) -> Any:
    """Return the method which overrides a hook in one of the stages; None if no stage does."""
    owners = [stage for stage in stages if getattr(type(stage), name) is not getattr(Stage, name)]
    if len(owners) > 1:
        first, second = (type(stage).__name__ for stage in owners[:2])
        raise ValueError(
            f"chain: {first} and {second} both decide how boundaries are drawn ({name}): keep one of them"
        )
    return getattr(owners[0], name) if owners else None


def _find_teacher(stages: tuple[Stage, ...]) -> BoundaryAgent | None:
    teachers = [stage.teacher for stage in stages if stage.teacher is not None]
    if len(teachers) > 1:
        raise ValueError("chain: two stages have a teacher each: keep one of them")
    return teachers[0] if teachers else None


def _check_samples(stage: Stage, num_samples: int | None) -> None:
    name = type(stage).__name__
    samples = num_samples or 1
    if samples < stage.samples:
        raise ValueError(
            f"num_samples = {num_samples}: {name} compares samples of one sequence and needs "
            f"num_samples={stage.samples} or more"
        )
    if stage.even and samples % 2:
        raise ValueError(
            f"num_samples = {num_samples}: {name} draws pairs, so the number must be even"
        )


def _missing(key: NestedKey, number: int, stages: tuple[Stage, ...]) -> str:
    name = type(stages[number]).__name__
    later = [type(stage).__name__ for stage in stages[number + 1 :] if key in stage.out_keys]
    hint = f"move {later[0]} before it" if later else "put a stage which writes it before this one"
    if not later and key == keys.ADVANTAGE:
        hint = "put a stage which writes it, such as Discount(), before this one"
    return f"chain: stage {number} ({name}) reads {key!r}, which neither a rollout nor an earlier stage writes: {hint}"
