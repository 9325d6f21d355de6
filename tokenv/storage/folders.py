"""Where checkpoints lie and what their state is, for those who need no tensors: nothing here imports torch."""

import json
from pathlib import Path
from typing import Any

from tokenv.errors import MissingFileError, UserError

PREFIX = "step-"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if all((path / name).is_file() for name in FILES))


def find(run: str | Path, which: str = "latest") -> Path:
    """A checkpoint of a run folder.

    Args:
        run: run folder (``runs/7``), its checkpoint folder, or one checkpoint.
        which: ``latest`` or ``best`` (lowest validation loss).

    Raises:
        MissingFileError: there is no complete checkpoint.
        UserError: ``which`` is neither.
    """
    if which not in ("latest", "best"):
        raise UserError(f"checkpoint = {which!r}: expected latest or best")
    run = Path(run)
    if (run / "state.json").is_file():
        return run
    folder = run if run.name == "checkpoints" else run / "checkpoints"
    found = complete(folder)
    if not found:
        there = run.parent.glob(f"*/checkpoints/{PREFIX}*") if run.parent.is_dir() else ()
        near = sorted({str(path.parents[1]) for path in there})
        hint = f"; runs with checkpoints are {', '.join(near)}" if near else ""
        raise MissingFileError(f"no complete checkpoint in {folder}: expected a run folder such as runs/1{hint}")
    if which == "best":
        return best(found) or found[-1]
    return found[-1]


def load_state(path: Path) -> dict[str, Any]:
    """Only the state, for those who need no parameters: a model's may be large."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state


def best(found: list[Path]) -> Path | None:
    """The one with the lowest validation loss, if any was validated."""
    states = {path: load_state(path) for path in found}
    scores = {path: state.get(state.get("unit", "bits_per_byte")) for path, state in states.items()}
    scored = {path: score for path, score in scores.items() if score is not None}
    return min(scored, key=lambda path: scored[path]) if scored else None
