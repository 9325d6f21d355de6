"""From a configuration to the things it names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from tokenv.agents.base import Agent
from tokenv.config import registry
from tokenv.config.batch_assignment import BatchAssignment
from tokenv.config.build import build_agent, build_codec, load_pretrained_lm
from tokenv.config.hardware import check_training, recomputes, resolve_device, resolve_precision
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.contracts import Sampling, check_causal, check_compatible
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange, mean_rate
from tokenv.data.corpus import load_corpus
from tokenv.data.text.tokenizer import train_bpe
from tokenv.estimators.base import Chain
from tokenv.lm.codecs.base import Codec
from tokenv.lm.flops import FLOPS_PER_PARAMETER, FORWARD_FLOPS_PER_PARAMETER, Passes
from tokenv.lm.unet import UNet


def _at_once(work: Callable[[], Any]) -> Any:
    return work()


@dataclass
class Components:
    """What learns, and from what.

    Attributes:
        lm: the U-Net.
        agent: draws the boundaries.
        estimator: rewards to ``loss_policy``; None for an agent that does not learn.
        rate_target: keeps the rate, as ``loss_rate``, and has no state; None for an agent that does not learn.
        frozen: whether the U-Net stays as it is.
        early_exit: whether a pass computes the early exit's likelihoods.
        trains_early_exit: whether its loss has a weight.
        whole: runs a pass while all of the U-Net's parameters are there; see ``tokenv.training.fsdp``.
    """

    lm: UNet
    agent: Agent
    estimator: Chain | None
    rate_target: TensorDictModuleBase | None
    frozen: bool = False
    early_exit: bool = True
    trains_early_exit: bool = True
    whole: Callable[[Callable[[], Any]], Any] = _at_once

    @property
    def sampling(self) -> Sampling:
        """What the estimator asks of a rollout."""
        wanted = Sampling() if self.estimator is None else self.estimator.sampling
        return replace(wanted, early_exit=self.early_exit)

    @property
    def num_epochs(self) -> int:
        """Gradient steps on one rollout."""
        return 1 if self.estimator is None else self.estimator.num_epochs

    @property
    def head_epochs(self) -> int:
        """Further gradient steps of the policy alone on one rollout, its encodings kept."""
        return 0 if self.estimator is None else self.estimator.head_epochs

    @property
    def passes(self) -> Passes:
        """Passes of one update."""
        wanted = self.sampling
        learning = 1 if wanted.reward_only else wanted.samples
        everything_is_a_token = wanted.relax is not None and self.lm.config.pooling == "select"
        if self.frozen and wanted.relax is None:  # gradients reach the model through relaxed boundaries only
            learning = 0
        return Passes(
            learning=0 if everything_is_a_token else learning,
            reward_only=wanted.samples - learning,
            frozen=self.frozen,
            relaxed=learning if everything_is_a_token else 0,
            pathwise=0 if wanted.relaxations is None else 2,
            replays=self.num_epochs - 1,
            head=self.head_epochs,
            early_exit=self._early_exit_flops,
            estimator=0 if self.estimator is None else self.estimator.flops * wanted.samples,
        )

    @property
    def _early_exit_flops(self) -> int:
        """FLOPs for each parameter of the early exit's head: its likelihoods', and its entropy's, if it is read."""
        trained = FLOPS_PER_PARAMETER if self.trains_early_exit and not self.frozen else FORWARD_FLOPS_PER_PARAMETER
        entropy = FORWARD_FLOPS_PER_PARAMETER if keys.EARLY_ENTROPY in self.agent.in_keys else 0
        return (trained if self.early_exit else 0) + entropy

    @property
    def has_cross_step_state(self) -> bool:
        """Whether agent or estimator learn something of every pass that the next one reads, other than by descent."""
        return _has_cross_step_state([self.agent] if self.estimator is None else [self.agent, self.estimator])

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """What has parameters or buffers, by the name that theirs begin with."""
        named: dict[str, torch.nn.Module | None] = {"lm": self.lm, "agent": self.agent, "estimator": self.estimator}
        return {owner: module for owner, module in named.items() if module is not None}

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Everything that is trained, by a name that says whose it is: ``lm.``, ``agent.`` or ``estimator.``."""
        return {
            f"{owner}.{name}": parameter
            for owner, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all parts."""
        return {f"{owner}.{k}": v for owner, module in self.modules.items() for k, v in module.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what ``state_dict`` gave.

        Raises:
            UserError: a part refuses what it kept beside its tensors, such as a damaged tokenizer.
        """
        for owner, module in self.modules.items():
            mine = {k.removeprefix(f"{owner}."): v for k, v in state.items() if k.startswith(f"{owner}.")}
            try:
                module.load_state_dict(mine)
            except ValueError as error:
                raise UserError(f"the checkpoint's {owner} cannot be loaded: {error}") from error

    def train(self, mode: bool = True) -> None:
        """Training (or evaluation) mode for all parts."""
        for module in self.modules.values():
            module.train(mode)


def build_components(
    config: Config, device: torch.device | None = None, *, pretrained: bool = True, world: int = 1
) -> Components:
    """Build model, agent, estimator and rate target, with parameters drawn from ``config.seed``.

    Args:
        config: the run.
        device: where to build; None for the configuration's own device.
        pretrained: read the parameters that ``agent.pretrained`` and ``init_from`` name; not where all parameters are
            replaced anyway. On the meta device there are none.
        world: processes that share the run.

    Raises:
        MissingFileError: the checkpoint that ``agent.pretrained`` or ``init_from`` names is gone.
        UserError: a name or an option in the configuration is unknown, or a value out of range.
    """
    device = resolve_device(config.hardware.device) if device is None else device
    precision = resolve_precision(config.hardware.precision, device)
    pretrained = pretrained and device.type != "meta"
    torch.manual_seed(config.seed)
    with device:
        codec = build_codec(config.codec, config.model, config.data.series.channels)
        lm = UNet(config.model, codec, compute_dtype=precision)
        agent, estimator, rate_target = _build_learners(config, codec, precision, pretrained)
    if precision == torch.float64:
        for module in (lm, agent, estimator):
            if module is not None:
                module.double()
    if config.init_from is not None and pretrained:
        reads = estimator is not None and estimator.reads_early_exit
        load_pretrained_lm(lm, config.init_from, needs_early_exit=config.freeze_lm and reads)
    if config.freeze_lm:
        lm.requires_grad_(requires_grad=False)
    rows = _rows(config, [agent] if estimator is None else [agent, estimator], world)
    if recomputes(config, samples=1 if estimator is None else estimator.sampling.samples, rows=rows):
        lm.enable_activation_checkpointing()
    compiled = config.hardware.compile == "on" or (config.hardware.compile == "auto" and device.type == "cuda")
    if config.hardware.sequence_packing == "on" or (config.hardware.sequence_packing == "auto" and compiled):
        lm.pack_tokens()
    if config.hardware.small_flex_blocks:
        lm.use_small_flex_blocks()
    if compiled:
        lm.compile_layers()
        agent.compile_draw()
    reads = estimator is not None and estimator.reads_early_exit
    wanted = agent.learns or keys.EARLY_ENTROPY in agent.in_keys
    trained = wanted if config.loss.early is None else config.loss.early > 0
    return Components(
        lm,
        agent,
        estimator,
        rate_target,
        frozen=config.freeze_lm,
        early_exit=reads or trained,
        trains_early_exit=trained,
    )


def _has_cross_step_state(modules: list[torch.nn.Module]) -> bool:
    every = [each for module in modules for each in module.modules()]
    return any(each.training and any(True for _ in each.buffers(recurse=False)) for each in every)


def _rows(config: Config, modules: list[torch.nn.Module], world: int) -> int:
    """Sequences of a pass that share one device's memory."""
    slots, shard = (
        BatchAssignment.of(config.train, world=world, together=_has_cross_step_state(modules)),
        config.hardware.fsdp_size,
    )
    if world % shard and world > 1:
        raise UserError(
            f"hardware.fsdp_size = {shard} with {world} processes: expected a number that divides them, or 1 for a "
            f"whole "
            "copy of the model in each"
        )
    return len(slots.rows) if resolve_device(config.hardware.device).type == "cuda" else config.train.batch_size


def check_components(config: Config, world: int = 1) -> None:
    """Refuse what agents, estimators and rate targets cannot take, before work starts; no model is built.

    Args:
        config: the run.
        world: processes that share it.

    Raises:
        MissingFileError: a file that an option names is not there.
        UserError: a name or an option in the configuration is unknown, a value is out of range, the whole cannot fit
            in memory, or so many processes cannot share it.
    """
    check_training(config, rows=1)
    device = torch.device("meta")
    with device:
        codec = build_codec(config.codec, config.model, config.data.series.channels)
        precision = resolve_precision(config.hardware.precision, device)
        agent, estimator, _ = _build_learners(config, codec, precision, pretrained=False)
    modules: list[torch.nn.Module] = [agent] if estimator is None else [agent, estimator]
    rows = _rows(config, modules, world)
    parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    samples = 1 if estimator is None else estimator.sampling.samples
    check_training(config, parameters=parameters, samples=samples, rows=rows)


def _build_learners(
    config: Config, codec: Codec, precision: torch.dtype, pretrained: bool
) -> tuple[Agent, Chain | None, TensorDictModuleBase | None]:
    """Agent, estimator and rate target, in this order, for parameters are drawn in it."""

    def train_tokenizer(vocabulary_size: int) -> Path:
        return train_bpe(load_corpus(config.data), vocabulary_size)

    rates = config.rate if isinstance(config.rate, RateRange) else None
    context = {"width": config.model.width, "rate": mean_rate(config.rate), "seq_len": config.data.seq_len}
    agent = build_agent(
        config.agent,
        **context | {"seq_len": config.cut_len},
        rates=rates,
        train_tokenizer=train_tokenizer,
        codec=codec,
        compute_dtype=precision,
        read_parameters=pretrained,
    )
    estimator = registry.build("estimator", config.estimator, registry.ESTIMATORS, **context)
    rate_target = registry.build("rate_target", config.rate_target, registry.RATE_TARGETS, **context)
    if rates is not None:
        _check_varies(config, agent, rate_target)
    if agent.pooling not in (None, config.model.pooling):
        raise UserError(
            f"agent.name = {config.agent['name']!r} with model.pooling = {config.model.pooling!r}: expected "
            f"model.pooling={agent.pooling}, which this agent is made for"
        )
    try:
        check_causal(agent, direct=config.model.direct)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not agent.learns and config.freeze_lm:
        raise UserError(
            f"freeze_lm = True with agent.name = {config.agent['name']!r}, which does not learn either: expected "
            "freeze_lm=False, or an agent with a policy; to measure the model as it is, tokenv evaluate"
        )
    if not agent.learns:
        return agent, None, None
    try:
        check_compatible(estimator, agent, config.model.pooling)
    except ValueError as error:
        raise UserError(str(error)) from error
    return agent, estimator, rate_target


def _check_varies(config: Config, agent: Agent, rate_target: TensorDictModuleBase) -> None:
    """Refuse a range of rates where nobody would heed it."""
    if agent.rates is None:
        raise UserError(
            f"rate = {config.rate:g}: agent {config.agent['name']!r} has one rate at most: expected one number, such "
            "as rate=0.2, or an agent that is told its rate: learned, strict, uniform or random"
        )
    if agent.learns and config.loss.rate and not getattr(rate_target, "varies", False):
        raise UserError(
            f"rate = {config.rate:g}: rate target {config.rate_target['name']!r} has one rate: expected one that reads "
            f"{keys.TARGET_RATE}, such as rate_target.name=logit_pressure, or loss.rate=0"
        )
