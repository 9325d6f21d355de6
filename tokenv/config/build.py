"""Build codecs and agents from sections of a configuration, and load agents and language models of earlier runs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenv.agents.base import Agent
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.config import registry
from tokenv.config.files import LOADED, LoadedAgent, TrainedAgent
from tokenv.core import checkpoints, keys, trust
from tokenv.core.conversion import parameters
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.lm.codecs.base import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import EncoderStepper
from tokenv.lm.unet import Encoder, UNet

ENCODER_PREFIXES = ("lm.codec.", "lm.down.", "lm.early_norm.", "lm.early_head.")


def build_codec(section: Mapping[str, Any], model: UNetConfig, of_data: Mapping[str, Any]) -> Codec:
    """Build the codec of a model.

    Args:
        section: ``name`` of the codec and its options.
        model: configuration of the model.
        of_data: arguments from the data, passed if the codec's constructor takes them.

    Raises:
        UserError: the name or an option is unknown, or a value out of range.
    """
    known = parameters(registry.find("codec", section["name"], registry.CODECS))
    taken = {name: value for name, value in of_data.items() if name in known}
    context = {"width": model.width, "softcap": model.output_softcap}
    return registry.build("codec", {**taken, **section}, registry.CODECS, **context)


def build_agent(section: Mapping[str, Any], key: str = "agent", /, **context: Any) -> Agent:
    """Build an agent.

    Args:
        key: key of the section, for messages.
        section: ``name`` of the agent and its options; for a loaded agent as ``inherit_section`` returns it.
        context: further arguments, passed if the agent's constructor takes them.

    Raises:
        MissingFileError: the checkpoint of an earlier run does not exist.
        UserError: the name or an option is unknown, or a value out of range.
    """
    if section["name"] != LOADED:
        return registry.build(key, section, registry.AGENTS, **context)
    options = vars(LoadedAgent.of(section))
    return registry.construct(f"{key} {LOADED!r}", load_pretrained_agent, options, **context)


def is_trainable(section: Mapping[str, Any]) -> bool:
    """Return whether an agent has a policy which is trained, as its class says; nothing is built.

    Args:
        section: see ``build_agent``.

    Raises:
        UserError: the name is unknown.
    """
    frozen = section["name"] == LOADED and LoadedAgent.of(section).frozen
    return not frozen and _declares(section, "trainable", unknown=True)


def reads_ahead(section: Mapping[str, Any]) -> bool:
    """Return whether an agent says that it reads symbols which are still to be predicted; nothing is built.

    Args:
        section: see ``build_agent``.

    Raises:
        UserError: the name is unknown.
    """
    return _declares(section, "reads_ahead", unknown=False)


def can_imitate(section: Mapping[str, Any]) -> bool:
    """Return whether an agent gives any boundaries a log-probability (``check_scores``); nothing is built.

    Args:
        section: see ``build_agent``.

    Raises:
        UserError: the name is unknown.
    """
    has_law = _declares(section, "stochastic", unknown=True)
    return has_law and not _declares(section, "fixed_count", unknown=False)


def _declares(section: Mapping[str, Any], attribute: str, *, unknown: bool) -> bool:
    """Return an attribute of the class of an agent; ``unknown`` for a function which builds one and cannot say."""
    if section["name"] == LOADED:
        section = LoadedAgent.of(section).trained.agent
    target = registry.find("agent", section["name"], registry.AGENTS)
    return bool(getattr(target, attribute, unknown))


def load_pretrained_agent(
    pretrained: str,
    trained: TrainedAgent,
    rate: float,
    rates: RateRange | None,
    seq_len: int,
    codec: Codec,
    compute_dtype: torch.dtype | None,
    read_files: bool,
    train_tokenizer: Any,
    frozen: bool = True,
) -> PretrainedAgent:
    """Build an agent of an earlier run.

    Args:
        pretrained: checkpoint of the earlier run.
        trained: configuration of the agent in the earlier run.
        rate: rate of the new run, or the mean of its range.
        rates: range of the new run's rates, if it has one.
        seq_len: sequence length of the new run.
        codec: codec of the new run.
        compute_dtype: precision of the encoder's activations.
        read_files: whether its parameters are read from that checkpoint; else they are arbitrary.
        train_tokenizer: function which agents may call to train a tokenizer.
        frozen: whether it is not trained further.

    Raises:
        UserError: the agent was trained for another rate or another kind of symbols, or has no parameters.
    """
    old_rate = trained.rate
    new_rate = rates or rate
    if old_rate != new_rate:
        expected = f"rate={old_rate:g}"
        if isinstance(old_rate, RateRange):
            expected = f"rate.min={old_rate.min:g} rate.max={old_rate.max:g}"
        raise UserError(
            f"rate = {new_rate:g}: the agent that agent.pretrained = {pretrained!r} names was trained for another; "
            f"expected {expected}"
        )
    own_codec = build_codec(trained.codec, trained.model, trained.codec_options)
    if own_codec.symbol_shape != codec.symbol_shape or own_codec.symbol_dtype != codec.symbol_dtype:
        raise UserError(
            f"agent.pretrained = {pretrained!r}: its agent reads symbols of shape {own_codec.symbol_shape} and type "
            f"{own_codec.symbol_dtype}, but those of this run's data have {codec.symbol_shape} and "
            f"{codec.symbol_dtype}: load an agent that was trained on data of this kind"
        )
    context = {
        "rate": rate,
        "rates": rates,
        "seq_len": seq_len,
        "train_tokenizer": train_tokenizer,
        "read_files": False,  # all that it needs is in its checkpoint
    }
    agent = registry.build(
        "agent", trained.agent, registry.AGENTS, width=trained.model.width, **context
    )
    reads_early_exit = keys.EARLY_ENTROPY in agent.in_keys
    encoder = Encoder(trained.model, own_codec, compute_dtype, early_exit=reads_early_exit)
    if not agent.state_dict():
        name = trained.agent["name"]
        raise UserError(
            f"agent.pretrained = {pretrained!r}: its agent {name!r} has no trained parameters: set agent.name={name}"
        )
    result = PretrainedAgent(agent, encoder, partial(EncoderStepper, encoder), frozen=frozen)
    if read_files and torch.get_default_device().type != "meta":
        tensors = _load_agent_tensors(Path(pretrained))
        own = result.state_dict()
        tensors = {name: value for name, value in tensors.items() if name in own}
        checkpoints.check_tensors(tensors, own, pretrained)
        result.load_state_dict(tensors)
    return result


def _load_agent_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a ``PretrainedAgent`` from a checkpoint, by its names."""
    trust.check_path(str(path))
    tensors, state = checkpoints.load_model(path)
    of_agent = {
        name.removeprefix("agent."): value
        for name, value in tensors.items()
        if name.startswith("agent.")
    }
    if state["config"]["agent"]["name"] == LOADED:
        return of_agent
    of_encoder = {
        f"encoder.{name.removeprefix('lm.')}": value
        for name, value in tensors.items()
        if name.startswith(ENCODER_PREFIXES)
    }
    return {f"agent.{name}": value for name, value in of_agent.items()} | of_encoder


def load_pretrained_lm(lm: UNet, checkpoint: str, *, needs_early_exit: bool = False) -> None:
    """Load a language model's parameters from an earlier run.

    Args:
        lm: model whose parameters are replaced.
        checkpoint: checkpoint of the earlier run.
        needs_early_exit: whether its early exit must have been trained.

    Raises:
        MissingFileError: the checkpoint does not exist.
        UserError: it is of another model, or its early exit was not trained and must have been.
    """
    trust.check_path(checkpoint)
    tensors, state = checkpoints.load_model(Path(checkpoint))
    loaded = {
        name.removeprefix("lm."): value for name, value in tensors.items() if name.startswith("lm.")
    }
    expected = lm.state_dict()
    odd = checkpoints.mismatched_tensors(loaded, expected)
    if odd:
        there = checkpoints.describe(loaded.get(odd[0]), "none")
        here = checkpoints.describe(expected.get(odd[0]), "none")
        raise UserError(
            f"init_from = {checkpoint!r}: {odd[0]} is {there} there and {here} in this run ({len(odd)} such): "
            "expected a run of the same model and codec, on data of as many channels"
        )
    if needs_early_exit and not any(name.endswith("_early") for name in state["history"]):
        raise UserError(
            f"init_from = {checkpoint!r}: its early exit was not trained, and freeze_lm=True with this estimator needs "
            "it for the rewards: expected a run that was trained with loss.early=0.1"
        )
    lm.load_state_dict(loaded)
