"""Agents of earlier runs for new ones: ``agent.load=runs/3 agent.frozen=true``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.loaded import Loaded
from tokenv import checkpoint as checkpoints
from tokenv import registry
from tokenv.build import build_codec
from tokenv.config import Config, make
from tokenv.lm.codec import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.encoder import Encoder
from tokenv.lm.incremental import Reader

NAME = "loaded"
ENCODERS_OWN = ("lm.codec.", "lm.down.", "lm.early_norm.", "lm.early_head.")


def complete_section(section: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The agent section of a run that loads its agent: all that building it takes, so that the other run may go.

    Args:
        section: of the configuration, with ``load``.
        asked: what of it was given on the command line, not in a file.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: another option is given, or ``frozen`` is no truth value.
    """
    if "trained" in section and ("trained" in asked or "load" not in asked):
        return dict(section)
    for key in asked:
        if key not in ("name", "load", "frozen"):
            raise ValueError(f"agent.{key}: beside agent.load expected only agent.frozen; all else is the loaded run's")
    frozen = section.get("frozen", True)
    if not isinstance(frozen, bool):
        raise ValueError(f"agent.frozen = {frozen!r}: expected true (nothing of it learns) or false")
    path = checkpoints.find(str(section["load"]), "best")
    config = make(Config, checkpoints.load_state(path)["config"])
    trained = config.agent.get("trained") or {
        "rate": config.rate,
        "channels": config.data.series.channels,
        "codec": config.codec,
        "model": asdict(config.model),
        "agent": config.agent,
    }
    return {"name": NAME, "load": str(path.resolve()), "frozen": frozen, "trained": trained}


def loaded(
    load: str,
    trained: Mapping[str, Any],
    rate: float,
    seq_len: int,
    codec: Codec,
    compute_dtype: torch.dtype | None,
    pretrained: bool,
    train_tokenizer: Any,
    frozen: bool = True,
) -> Loaded:
    """Build an agent of an earlier run.

    Args:
        load: its checkpoint.
        trained: how it was built; see ``complete_section``.
        rate: of the new run.
        seq_len: of the new run.
        codec: of the new run.
        compute_dtype: precision of the encoder's activations.
        pretrained: read its parameters from ``load``; else they are anything.
        train_tokenizer: for agents that ask for it.
        frozen: whether nothing of it learns.

    Raises:
        ValueError: the agent was trained for another rate or another kind of symbols, or has learned nothing.
    """
    if trained["rate"] != rate:
        raise ValueError(
            f"rate = {rate:g}: the agent that agent.load = {load!r} names was trained for another; expected "
            f"rate={trained['rate']:g}"
        )
    model = UNetConfig(**trained["model"])
    own = build_codec(trained["codec"], model, trained["channels"])
    if own.symbol_shape != codec.symbol_shape or own.symbol_dtype != codec.symbol_dtype:
        raise ValueError(
            f"agent.load = {load!r}: its agent reads symbols of shape {own.symbol_shape} and type {own.symbol_dtype}, "
            f"but those of this run's data have {codec.symbol_shape} and {codec.symbol_dtype}: load an agent that was "
            "trained on data of this kind"
        )
    encoder = Encoder(model, own, compute_dtype)
    context = {"width": model.width, "rate": rate, "seq_len": seq_len, "train_tokenizer": train_tokenizer}
    agent = registry.build("agent", trained["agent"], registry.AGENTS, **context)
    if not agent.state_dict():
        name = trained["agent"]["name"]
        raise ValueError(f"agent.load = {load!r}: its agent {name!r} has learned nothing: set agent.name={name}")
    made = Loaded(agent, encoder, partial(Reader, encoder), frozen=frozen)
    if pretrained:
        made.load_state_dict(_tensors(Path(load)))
    return made


def _tensors(path: Path) -> dict[str, Tensor]:
    """What of a checkpoint a ``Loaded`` agent holds, by its names."""
    tensors, state = checkpoints.load_model(path)
    of_agent = {name.removeprefix("agent."): value for name, value in tensors.items() if name.startswith("agent.")}
    if state["config"]["agent"]["name"] == NAME:
        return of_agent
    of_encoder = {
        f"encoder.{name.removeprefix('lm.')}": value for name, value in tensors.items() if name.startswith(ENCODERS_OWN)
    }
    return {f"agent.{name}": value for name, value in of_agent.items()} | of_encoder
