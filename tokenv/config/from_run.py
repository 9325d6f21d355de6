"""What of a configuration comes from an earlier run.

Its agent (``agent.load=runs/3 agent.frozen=true``), or its language model (``start.model=runs/3 start.frozen=true``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenv.config.convert import Section, make, renamed
from tokenv.config.schema import Config
from tokenv.errors import UserError
from tokenv.lm.config import UNetConfig
from tokenv.rates import RateRange
from tokenv.storage import folders

LOADED = "loaded"  # the agent of an earlier run, as the configuration names it


@dataclass(frozen=True)
class TrainedAgent:
    """How the agent of an earlier run was built.

    Args:
        rate: of its run.
        channels: values of one symbol, of series.
        codec: of its run.
        model: of its run.
        agent: of its run.
    """

    rate: float | RateRange
    channels: int
    codec: Section
    model: UNetConfig
    agent: Section


@dataclass(frozen=True)
class LoadedAgent:
    """The agent section of a run that loads its agent; see ``complete_section``.

    Args:
        load: the checkpoint that it was read from.
        trained: how it was built.
        frozen: whether nothing of it learns.

    Raises:
        UserError: the agent is itself a loaded one, or has no name.
    """

    load: str
    trained: TrainedAgent
    frozen: bool = True

    def __post_init__(self) -> None:
        for name in (self.trained.agent.get("name"), self.trained.codec.get("name")):
            if not isinstance(name, str) or name == LOADED:
                raise UserError(f"agent.trained names {name!r}: expected the agent and the codec of an earlier run")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> LoadedAgent:
        """Check a section.

        Raises:
            UserError: a key is missing or unknown, or a value has the wrong type; the message names it.
        """
        return make(cls, {key: value for key, value in section.items() if key != "name"}, "agent.")


def complete_section(section: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The agent section of a run that loads its agent: all that building it takes, so that the other run may go.

    Args:
        section: of the configuration, with ``load``.
        asked: what of it was given on the command line, not in a file.

    Raises:
        MissingFileError: there is no such run.
        UserError: another option is given, or ``frozen`` is no truth value.
    """
    if "trained" in section and ("trained" in asked or "load" not in asked):
        LoadedAgent.of(section)
        return dict(section)
    for key in asked:
        if key not in ("name", "load", "frozen"):
            raise UserError(f"agent.{key}: beside agent.load expected only agent.frozen; all else is the loaded run's")
    frozen = section.get("frozen", True)
    if not isinstance(frozen, bool):
        raise UserError(f"agent.frozen = {frozen!r}: expected true (nothing of it learns) or false")
    path, config = _best(section["load"])
    trained = config.agent.get("trained") or {
        "rate": config.as_dict()["rate"],
        "channels": config.data.series.channels,
        "codec": config.codec,
        "model": asdict(config.model),
        "agent": config.agent,
    }
    return {"name": LOADED, "load": str(path.resolve()), "frozen": frozen, "trained": trained}


def start_from(values: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run that starts from another's language model: its model and codec sections are taken.

    Args:
        values: of the configuration, with ``start.model``.
        asked: what of it was given on the command line, not in a file.

    Raises:
        MissingFileError: there is no such run.
        UserError: another model or codec is asked for.
    """
    path, config = _best(values["start"]["model"])
    taken = {"model": asdict(config.model), "codec": config.codec}
    for section, theirs in taken.items():
        for key, value in asked.get(section, {}).items():
            own = make(Config, {"data": asdict(config.data), "codec": config.codec, section: {**theirs, key: value}})
            if getattr(own, section) != getattr(config, section):
                raise UserError(
                    f"{section}.{key} = {value!r}: the run that start.model names has {theirs.get(key)!r}, and its "
                    "model and codec sections are taken; leave this out, or start from another run"
                )
    return {**values, **taken, "start": {**values["start"], "model": str(path.resolve())}}


def _best(run: Any) -> tuple[Path, Config]:
    path = folders.find(str(run), "best")
    return path, make(Config, renamed(Config, folders.load_state(path)["config"]))
