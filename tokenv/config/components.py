"""The components of a run: model, agent, estimator and rate target, built from its configuration."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from tensordict.nn import TensorDictModuleBase

from tokenv.agents.base import Agent
from tokenv.config import registry
from tokenv.config.build import build_agent, build_codec, load_pretrained_lm
from tokenv.config.hardware import (
    BatchAssignment,
    check_training,
    resolve_device,
    resolve_precision,
    uses_activation_checkpointing,
)
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.callbacks import build_callbacks
from tokenv.core.contracts import (
    RELAXED_POOLINGS,
    BoundaryAgent,
    Sampling,
    check_causal,
    check_compatible,
    check_scores,
)
from tokenv.core.devices import compiles, has_own_memory
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange, mean_rate
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.tokenizer import train_bpe
from tokenv.estimators.base import Chain, chain
from tokenv.estimators.surrogates import Imitation, Kickstart
from tokenv.lm.codecs.base import Codec
from tokenv.lm.flops import (
    FLOPS_PER_PARAMETER,
    FORWARD_FLOPS_PER_PARAMETER,
    Passes,
    matrix_parameters,
    policy_flops,
)
from tokenv.lm.unet import UNet


@dataclass
class Components:
    """The components of a run.

    Attributes:
        lm: U-Net.
        agent: agent which draws the boundaries.
        estimator: chain from rewards to ``loss_policy``; None for an agent which does not learn.
        rate_target: stateless module which computes ``loss_rate``; None for an agent which does not learn.
        imitation: chain which trains the agent first, in place of estimator and rate target; None for no imitation.
        frozen: whether the U-Net is not trained.
        early_exit: whether a pass computes the early exit's likelihoods.
        trains_early_exit: whether the early exit's loss has a weight.
        detach_encoder: whether policy and rate loss train the agent alone.
    """

    lm: UNet
    agent: Agent
    estimator: Chain | None
    rate_target: TensorDictModuleBase | None
    imitation: Chain | None = None
    frozen: bool = False
    early_exit: bool = True
    trains_early_exit: bool = True
    detach_encoder: bool = False

    def imitating(self) -> Self:
        """Return the same components with the imitation in place of the estimator and of the rate target."""
        return replace(self, estimator=self.imitation, rate_target=None, imitation=None)

    @property
    def sampling(self) -> Sampling:
        """Sampling which the estimator requires of a rollout."""
        sampling = Sampling() if self.estimator is None else self.estimator.sampling
        return replace(sampling, early_exit=self.early_exit, detach_encoder=self.detach_encoder)

    @property
    def further_steps(self) -> list[bool]:
        """Further gradient steps on one rollout: whether each is of the policy alone."""
        if self.estimator is None:
            return []
        return [False] * (self.estimator.num_epochs - 1) + [True] * self.estimator.head_epochs

    @property
    def passes(self) -> Passes:
        """Passes of one update."""
        sampling = self.sampling
        learning = 1 if sampling.reward_only else sampling.samples
        all_tokens = sampling.relax is not None and self.lm.config.pooling in RELAXED_POOLINGS
        # gradients reach the model through relaxed boundaries only
        if self.frozen and sampling.relax is None:
            learning = 0
        relaxed = learning if all_tokens else 0
        pathwise = 0 if sampling.relaxations is None else 2
        estimator = self._teacher_flops
        if self.estimator is not None:
            estimator += self.estimator.flops * sampling.samples
        return Passes(
            learning=learning - relaxed,
            reward_only=sampling.samples - learning,
            frozen=self.frozen,
            relaxed=relaxed,
            pathwise=pathwise,
            replays=self.further_steps.count(False),
            head=self.further_steps.count(True),
            early_exit=self._early_exit_flops,
            estimator=estimator,
        )

    @property
    def _early_exit_flops(self) -> int:
        """FLOPs per parameter of the early exit's head: for its likelihoods, and for its entropy where that is read."""
        trained = FORWARD_FLOPS_PER_PARAMETER
        if self.trains_early_exit and not self.frozen:
            trained = FLOPS_PER_PARAMETER
        flops = 0
        if self.early_exit:
            flops += trained
        readers = (self.agent, self.sampling.teacher)
        if any(keys.EARLY_ENTROPY in each.in_keys for each in readers if each is not None):
            flops += FORWARD_FLOPS_PER_PARAMETER
        return flops

    @property
    def _teacher_flops(self) -> int:
        """FLOPs of a teacher for every symbol, and of the policy, which is evaluated once more without gradient."""
        teacher = self.sampling.teacher
        if not isinstance(teacher, Agent):
            return 0
        return policy_flops(teacher) + FORWARD_FLOPS_PER_PARAMETER * matrix_parameters(self.agent)

    @property
    def has_cross_step_state(self) -> bool:
        """Whether agent or estimator update buffers in every pass which the next one reads."""
        return _has_cross_step_state(_present(self.agent, self.estimator, self.imitation))

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Components with parameters or buffers, by the prefix of their names."""
        named: dict[str, torch.nn.Module | None] = {
            "lm": self.lm,
            "agent": self.agent,
            "estimator": self.estimator,
            "imitation": self.imitation,
        }
        return {owner: module for owner, module in named.items() if module is not None}

    @property
    def _saved_modules(self) -> dict[str, torch.nn.Module]:
        """Components whose state is saved: not the imitation if the estimator holds the same teacher."""
        saved = self.modules
        if self.sampling.teacher is not None:
            saved.pop("imitation", None)
        return saved

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return all trained parameters by name, with the prefix ``lm.``, ``agent.`` or ``estimator.``."""
        return {
            f"{owner}.{name}": parameter
            for owner, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers of all components."""
        return {
            f"{owner}.{k}": v
            for owner, module in self._saved_modules.items()
            for k, v in module.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a result of ``state_dict``.

        Raises:
            UserError: a component rejects its state, such as a damaged tokenizer.
        """
        for owner, module in self._saved_modules.items():
            own = {
                k.removeprefix(f"{owner}."): v
                for k, v in state.items()
                if k.startswith(f"{owner}.")
            }
            try:
                module.load_state_dict(own)
            except ValueError as error:
                raise UserError(f"the checkpoint's {owner} cannot be loaded: {error}") from error

    def train(self, mode: bool = True) -> None:
        """Set all components to training (or evaluation) mode."""
        for module in self.modules.values():
            module.train(mode)


def build_components(
    config: Config, device: torch.device | None = None, *, read_files: bool = True, world: int = 1
) -> Components:
    """Build model, agent, estimator and rate target, with parameters drawn from ``config.seed``.

    Args:
        config: configuration of the run.
        device: device to build on; None for the configuration's own.
        read_files: read the parameters and tokenizers which ``agent.pretrained``, ``agent.tokenizer`` and ``init_from``
            name; not where a checkpoint brings them, because paths in a stored run are never opened. On the meta device
            there are no parameters.
        world: number of processes which share the run.

    Raises:
        MissingFileError: the checkpoint which ``agent.pretrained`` or ``init_from`` names does not exist.
        UserError: a name or an option in the configuration is unknown, or a value out of range.
    """
    device = resolve_device(config.hardware.device) if device is None else device
    precision = resolve_precision(config.hardware.precision, device)
    torch.manual_seed(config.seed)
    with device:
        codec = _build_codec(config)
        lm = UNet(config.model, codec, compute_dtype=precision)
        agent, estimator, rate_target, imitation = _build_learners(
            config, codec, precision, read_files=read_files
        )
    if precision == torch.float64:
        for module in _present(lm, agent, estimator, imitation):
            module.double()
    reads_early_exit = estimator is not None and estimator.reads_early_exit
    if config.init_from is not None and read_files and device.type != "meta":
        load_pretrained_lm(
            lm, config.init_from, needs_early_exit=config.freeze_lm and reads_early_exit
        )
    if config.freeze_lm:
        lm.requires_grad_(requires_grad=False)
    rows = _rows_per_device(config, _present(agent, estimator, imitation), world)
    samples = 1 if estimator is None else estimator.sampling.samples
    if uses_activation_checkpointing(config, samples=samples, rows=rows):
        lm.enable_activation_checkpointing()
    _configure_lm(lm, agent, config, device)
    teacher = None if imitation is None else imitation.sampling.teacher
    rewarded = agent.trainable and (teacher is None or config.imitation.fraction < 1)
    observed = {key for each in (agent, teacher) if each is not None for key in each.in_keys}
    rewards_read_it = rewarded and reads_early_exit
    trains_early_exit = rewards_read_it or keys.EARLY_ENTROPY in observed
    if config.loss.early is not None:
        trains_early_exit = config.loss.early > 0
    return Components(
        lm,
        agent,
        estimator,
        rate_target,
        imitation,
        frozen=config.freeze_lm,
        early_exit=rewards_read_it or trains_early_exit,
        trains_early_exit=trains_early_exit,
        detach_encoder=config.loss.detach_encoder,
    )


def _configure_lm(lm: UNet, agent: Agent, config: Config, device: torch.device) -> None:
    """Switch on sequence packing and compilation as ``config.hardware`` says."""
    hardware = config.hardware
    compiled = hardware.compile == "on" or (hardware.compile == "auto" and compiles(device))
    if hardware.sequence_packing == "on" or (hardware.sequence_packing == "auto" and compiled):
        lm.pack_tokens()
    if hardware.small_flex_blocks:
        lm.use_small_flex_blocks()
    if compiled:
        lm.compile_layers()
        agent.compile_draw()


def _present(*modules: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [module for module in modules if module is not None]


def _has_cross_step_state(learners: list[torch.nn.Module]) -> bool:
    return any(
        module.training and any(True for _ in module.buffers(recurse=False))
        for learner in learners
        for module in learner.modules()
    )


def _rows_per_device(config: Config, learners: list[torch.nn.Module], world: int) -> int:
    """Return the number of sequences of a pass which share the memory of one device."""
    assignment = BatchAssignment.of(
        config.train, world=world, split_each_pass=_has_cross_step_state(learners)
    )
    fsdp_size = config.hardware.fsdp_size
    if world % fsdp_size and world > 1:
        raise UserError(
            f"hardware.fsdp_size = {fsdp_size} with {world} processes: expected a number that divides them, or 1 for a "
            "whole copy of the model in each"
        )
    device = resolve_device(config.hardware.device)
    return len(assignment.rows) if has_own_memory(device) else config.train.batch_size


def check_components(config: Config, world: int = 1, *, read_files: bool = True) -> None:
    """Check that all components can be built and fit in memory, before work starts; no model is built.

    Args:
        config: configuration of the run.
        world: number of processes which share it.
        read_files: see ``build_components``.

    Raises:
        MissingFileError: a file which an option names does not exist.
        UserError: a name or an option in the configuration is unknown, a value is out of range, the run cannot fit
            in memory, or so many processes cannot share it.
    """
    check_training(config, rows=1)
    device = torch.device("meta")
    with device:
        codec = _build_codec(config)
        build_callbacks(config, codec)
        precision = resolve_precision(config.hardware.precision, device)
        agent, estimator, _, imitation = _build_learners(
            config, codec, precision, read_files=read_files
        )
    learners = _present(agent, estimator, imitation)
    rows = _rows_per_device(config, learners, world)
    parameters = sum(parameter.numel() for module in learners for parameter in module.parameters())
    samples = 1 if estimator is None else estimator.sampling.samples
    check_training(config, parameters=parameters, samples=samples, rows=rows)


def _build_codec(config: Config) -> Codec:
    codec = build_codec(config.codec, config.model, config.data.options.codec_options)
    config.data.options.check_run(config, codec)
    return codec


def _build_learners(
    config: Config, codec: Codec, precision: torch.dtype, *, read_files: bool
) -> tuple[Agent, Chain | None, TensorDictModuleBase | None, Chain | None]:
    """Build agent, estimator, rate target and imitation, in this order, in which their parameters are drawn."""

    def train_tokenizer(vocabulary_size: int) -> Path:
        return train_bpe(load_corpus(config.data), vocabulary_size)

    rates = config.rate if isinstance(config.rate, RateRange) else None
    context = {
        "width": config.model.width,
        "rate": mean_rate(config.rate),
        "seq_len": config.data.seq_len,
    }
    of_estimators = context | {
        "vocabulary": 0 if codec.symbol_dtype.is_floating_point else codec.num_parameters
    }
    of_agents = context | {
        # one symbol after the last decision
        "seq_len": config.data.seq_len - max(codec.trailing - 1, 0),
        "rates": rates,
        "train_tokenizer": train_tokenizer,
        "codec": codec,
        "compute_dtype": precision,
        "read_files": read_files,
    }
    agent = build_agent(config.agent, **of_agents)
    estimator = registry.build("estimator", config.estimator, registry.ESTIMATORS, **of_estimators)
    rate_target = registry.build(
        "rate_target", config.rate_target, registry.RATE_TARGETS, **context
    )
    if rates is not None:
        _check_rate_range(config, agent, rate_target)
    if agent.pooling not in (None, config.model.pooling):
        raise UserError(
            f"agent.name = {config.agent['name']!r} with model.pooling = {config.model.pooling!r}: expected "
            f"model.pooling={agent.pooling}, which this agent requires"
        )
    try:
        check_causal(agent, history_given=codec.trailing > 0)
        if agent.trainable:
            check_compatible(estimator, agent, config.model.pooling)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not agent.trainable and config.freeze_lm:
        raise UserError(
            f"freeze_lm = True with agent.name = {config.agent['name']!r}, which does not learn either: expected "
            "freeze_lm=False, or an agent with a policy; to measure the model as it is, tokenv evaluate"
        )
    if not agent.trainable:
        if config.imitation.teacher:
            raise UserError(
                f"imitation.teacher with agent.name = {config.agent['name']!r}, which does not learn: expected an "
                "agent with a policy, such as learned, or no teacher (imitation.teacher={})"
            )
        return agent, None, None, None
    if not config.imitation.teacher:
        return agent, estimator, rate_target, None
    teacher = _build_teacher(config, agent, of_agents)
    if config.loss.imitation:
        estimator = chain(
            *estimator.stages, Kickstart(teacher), num_samples=estimator.sampling.num_samples
        )
    return agent, estimator, rate_target, chain(Imitation(teacher))


def _build_teacher(config: Config, agent: Agent, of_agents: dict[str, Any]) -> BoundaryAgent:
    """Build the agent which another one imitates."""
    try:
        check_scores(agent, f"imitation.teacher with agent.name = {config.agent['name']!r}")
    except ValueError as error:
        raise UserError(str(error)) from error
    return build_agent(config.imitation.teacher, "imitation.teacher", **of_agents)


def build_references(config: Config, corpus: Corpus) -> dict[str, BoundaryAgent]:
    """Build the agents by name with whose boundaries a validation compares those of the policy.

    They are those which the kind of data names, and BPE's if ``validation.bpe_vocabulary`` asks for it.
    """
    sections = [{"name": name} for name in config.data.options.references]
    vocabulary = config.validation.bpe_vocabulary
    if vocabulary:
        sections.append({"name": "bpe", "vocabulary_size": vocabulary})
    context = {
        "rate": mean_rate(config.rate),
        "seq_len": config.data.seq_len,
        "train_tokenizer": partial(train_bpe, corpus),
    }
    return {section["name"]: build_agent(section, **context) for section in sections}


def _check_rate_range(config: Config, agent: Agent, rate_target: TensorDictModuleBase) -> None:
    """Check that agent and rate target can follow a range of rates."""
    if agent.rates is None:
        raise UserError(
            f"rate = {config.rate:g}: agent {config.agent['name']!r} has one rate at most: expected one number, such "
            "as rate=0.2, or an agent that is conditioned on its rate: learned, exact_count, uniform or random"
        )
    if agent.trainable and config.loss.rate and not getattr(rate_target, "varies", False):
        raise UserError(
            f"rate = {config.rate:g}: rate target {config.rate_target['name']!r} has one rate: expected one that reads "
            f"{keys.TARGET_RATE}, such as rate_target.name=logit_pressure, or loss.rate=0"
        )
