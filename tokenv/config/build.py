"""Codecs and agents from the sections that name them; an agent, or the language model, may be an earlier run's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenv.agents.base import Agent
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.config import registry
from tokenv.config.files import LOADED, LoadedAgent, TrainedAgent
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.lm.codecs.base import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.encoder import Encoder
from tokenv.lm.incremental import EncoderStepper
from tokenv.lm.unet import UNet
from tokenv.storage import checkpoints

ENCODERS_OWN = ("lm.codec.", "lm.down.", "lm.early_norm.", "lm.early_head.")


def build_codec(section: Mapping[str, Any], model: UNetConfig, channels: int) -> Codec:
    """Build what a model reads and predicts.

    Args:
        section: ``name`` of the codec and its options.
        model: size of the model.
        channels: values of one symbol, of series.

    Raises:
        UserError: the name or an option is unknown, or a value out of range.
    """
    context = {"width": model.width, "softcap": model.output_softcap, "channels": channels}
    codec: Codec = registry.build("codec", section, registry.CODECS, **context)
    return codec


def build_agent(section: Mapping[str, Any], **context: Any) -> Agent:
    """Build who draws the boundaries.

    Args:
        section: ``name`` of the agent and its options; as ``complete_section`` gives it for an earlier run's.
        context: what the run knows and an agent may ask for.

    Raises:
        MissingFileError: the checkpoint of an earlier run is gone.
        UserError: the name or an option is unknown, or a value out of range.
    """
    if section["name"] != LOADED:
        agent: Agent = registry.build("agent", section, registry.AGENTS, **context)
        return agent
    loaded = LoadedAgent.of(section)
    options = {item.name: getattr(loaded, item.name) for item in fields(loaded)}
    made: PretrainedAgent = registry.construct(f"agent {LOADED!r}", load_pretrained_agent, options, **context)
    return made


def is_trainable(section: Mapping[str, Any]) -> bool:
    """Whether an agent has a policy to be trained: what its class says, for nothing is built to know it.

    Args:
        section: see ``build_agent``.

    Raises:
        UserError: the name is unknown.
    """
    if section["name"] == LOADED:
        loaded = LoadedAgent.of(section)
        return not loaded.frozen and is_trainable(loaded.trained.agent)
    # A function that builds one cannot say; its agent is then held to learn.
    return bool(getattr(registry.find("agent", section["name"], registry.AGENTS), "learns", True))


def load_pretrained_agent(
    pretrained: str,
    trained: TrainedAgent,
    rate: float,
    rates: RateRange | None,
    seq_len: int,
    codec: Codec,
    compute_dtype: torch.dtype | None,
    read_parameters: bool,
    train_tokenizer: Any,
    frozen: bool = True,
) -> PretrainedAgent:
    """Build an agent of an earlier run.

    Args:
        pretrained: checkpoint of the earlier run.
        trained: how it was built.
        rate: of the new run, or the mean of its range.
        rates: its range, if it has one.
        seq_len: of the new run.
        codec: of the new run.
        compute_dtype: precision of the encoder's activations.
        read_parameters: read its parameters from that checkpoint; else they are anything.
        train_tokenizer: for agents that ask for it.
        frozen: whether nothing of it learns.

    Raises:
        UserError: the agent was trained for another rate or another kind of symbols, or has learned nothing.
    """
    before, model = trained.rate, trained.model
    if before != (now := rates or rate):
        wanted = f"rate={before:g}"
        if isinstance(before, RateRange):
            wanted = f"rate.min={before.min:g} rate.max={before.max:g}"
        raise UserError(
            f"rate = {now:g}: the agent that agent.pretrained = {pretrained!r} names was trained for another; "
            f"expected {wanted}"
        )
    own = build_codec(trained.codec, model, trained.channels)
    if own.symbol_shape != codec.symbol_shape or own.symbol_dtype != codec.symbol_dtype:
        raise UserError(
            f"agent.pretrained = {pretrained!r}: its agent reads symbols of shape {own.symbol_shape} and type "
            f"{own.symbol_dtype}, "
            f"but those of this run's data have {codec.symbol_shape} and {codec.symbol_dtype}: load an agent that was "
            "trained on data of this kind"
        )
    encoder = Encoder(model, own, compute_dtype)
    context = {
        **{"width": model.width, "rate": rate, "rates": rates},
        **{"seq_len": seq_len, "train_tokenizer": train_tokenizer},
    }
    agent = registry.build("agent", trained.agent, registry.AGENTS, **context)
    if not agent.state_dict():
        name = trained.agent["name"]
        raise UserError(
            f"agent.pretrained = {pretrained!r}: its agent {name!r} has learned nothing: set agent.name={name}"
        )
    made = PretrainedAgent(agent, encoder, partial(EncoderStepper, encoder), frozen=frozen)
    if read_parameters:
        tensors = _tensors(Path(pretrained))
        checkpoints.check_tensors(tensors, made.state_dict(), pretrained)
        made.load_state_dict(tensors)
    return made


def _tensors(path: Path) -> dict[str, Tensor]:
    """What of a checkpoint a ``PretrainedAgent`` agent holds, by its names."""
    tensors, state = checkpoints.load_model(path)
    of_agent = {name.removeprefix("agent."): value for name, value in tensors.items() if name.startswith("agent.")}
    if state["config"]["agent"]["name"] == LOADED:
        return of_agent
    of_encoder = {
        f"encoder.{name.removeprefix('lm.')}": value for name, value in tensors.items() if name.startswith(ENCODERS_OWN)
    }
    return {f"agent.{name}": value for name, value in of_agent.items()} | of_encoder


def load_pretrained_lm(lm: UNet, start: str, *, needs_early_exit: bool = False) -> None:
    """Read a language model's parameters from an earlier run's.

    Args:
        lm: the model.
        start: the checkpoint.
        needs_early_exit: whether its early exit must have been trained.

    Raises:
        MissingFileError: it is gone.
        UserError: its model is another, or its early exit was not trained and must have been.
    """
    tensors, state = checkpoints.load_model(Path(start))
    found = {name.removeprefix("lm."): value for name, value in tensors.items() if name.startswith("lm.")}
    odd = checkpoints.odd_tensors(found, wanted := lm.state_dict())
    if odd:
        there, here = (_shape(of.get(odd[0])) for of in (found, wanted))
        raise UserError(
            f"init_from = {start!r}: {odd[0]} has shape {there} there and {here} in this run ({len(odd)} such): "
            "expected a run of the same model and codec, on data of as many channels"
        )
    if needs_early_exit and not any(name.endswith("_early") for name in state["history"]):
        raise UserError(
            f"init_from = {start!r}: its early exit was not trained, and freeze_lm=True with this estimator needs "
            "it for the rewards: expected a run that was trained with loss.early=0.1"
        )
    lm.load_state_dict(found)


def _shape(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
