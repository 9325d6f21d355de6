"""What of a configuration comes from an earlier run.

Its agent (``agent.load=runs/3 agent.frozen=true``), or its language model (``start.model=runs/3 start.frozen=true``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenv.config.convert import make, renamed
from tokenv.config.schema import Config
from tokenv.errors import UserError
from tokenv.storage import folders

LOADED = "loaded"  # the agent of an earlier run, as the configuration names it


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
