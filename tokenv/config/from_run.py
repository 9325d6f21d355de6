"""The part of a configuration that comes from an earlier run: ``agent.load=runs/3 agent.frozen=true``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
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
    path = folders.find(str(section["load"]), "best")
    config = make(Config, renamed(Config, folders.load_state(path)["config"]))
    trained = config.agent.get("trained") or {
        "rate": config.rate,
        "channels": config.data.series.channels,
        "codec": config.codec,
        "model": asdict(config.model),
        "agent": config.agent,
    }
    return {"name": LOADED, "load": str(path.resolve()), "frozen": frozen, "trained": trained}
