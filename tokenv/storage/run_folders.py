"""Where checkpoints lie and what their state is, for those who need no tensors: nothing here imports torch."""

from pathlib import Path
from typing import Any

from tokenv.core.errors import MissingFileError, UserError
from tokenv.storage import trust
from tokenv.storage.checksums import FILES, PREFIX, DamagedError, verify
from tokenv.storage.regular_files import UnreadableFileError, read_json

STATE = "state.json"


def list_complete(folder: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if all((path / name).is_file() for name in FILES))


def list_all(run: str | Path) -> list[Path]:
    """All complete checkpoints of a run folder or checkpoint folder, oldest first; one checkpoint is itself all."""
    run = Path(run)
    if (run / STATE).is_file():
        return [run]
    return list_complete(_folder(run))


def _folder(run: Path) -> Path:
    return run if run.name == "checkpoints" else run / "checkpoints"


def find(run: str | Path, which: str = "latest") -> Path:
    """A checkpoint of a run folder.

    Args:
        run: run folder (``runs/7``), its checkpoint folder, or one checkpoint.
        which: ``latest`` or ``best_checkpoint`` (lowest validation loss).

    Raises:
        MissingFileError: there is no complete checkpoint.
        DamagedError: the best one is asked for, and a state that would tell is damaged.
        UserError: ``which`` is neither.
    """
    if which not in ("latest", "best"):
        raise UserError(f"checkpoint = {which!r}: expected latest or best")
    run = Path(run)
    found = list_all(run)
    if found == [run]:
        return run
    if not found:
        raise MissingFileError(
            f"no complete checkpoint in {_folder(run)}: expected a run folder such as runs/1{_hint(run)}"
        )
    if which == "best":
        return best_checkpoint(found) or found[-1]
    return found[-1]


def _hint(run: Path) -> str:
    """Which run may have been meant, as the end of a message: the same name under runs/, or those that are there."""
    meant = Path("runs") / run.name
    if run.name and list_complete(meant / "checkpoints"):
        return f": did you mean {meant}?"
    places = (run.parent, Path("runs"))
    near = sorted({str(path.parents[1]) for place in places for path in place.glob(f"*/checkpoints/{PREFIX}*")})
    return f"; runs with checkpoints are {', '.join(near)}" if near else ""


def load_state(path: Path) -> dict[str, Any]:
    """Only the state, for those who need no parameters: a model's may be large.

    Raises:
        DamagedError: it is not what was saved, or no state.
        UserError: its configuration names code that the user has not named: see ``tokenv.storage.trust``.
    """
    state = _read(path)
    if not isinstance(state.get("config"), dict):
        raise DamagedError(path / STATE, f"config = {state.get('config')!r}: expected a run's configuration")
    trust.check(state["config"], path / STATE)
    return state


def best_checkpoint(found: list[Path], *, pass_over_damaged: bool = False) -> Path | None:
    """The one with the lowest validation loss, if any was validated.

    Raises:
        DamagedError: a state is not what was saved, and ``pass_over_damaged`` is not set.
    """
    scored = {}
    for path in found:
        try:
            state = _read(path)
        except DamagedError:
            if pass_over_damaged:
                continue
            raise
        score = state.get(str(state.get("unit", "bits_per_byte")))
        if isinstance(score, int | float):
            scored[path] = score
    return min(scored, key=scored.__getitem__) if scored else None


def _read(path: Path) -> dict[str, Any]:
    """The state as it stands there, whatever it says.

    Raises:
        DamagedError: it is not what was saved, or no JSON mapping.
    """
    verify(path, [STATE])
    try:
        state = read_json(path / STATE)
    except UnreadableFileError as error:
        raise DamagedError(error.path, error.reason) from None
    if not isinstance(state, dict):
        raise DamagedError(path / STATE, "expected a JSON mapping, a run's state")
    return state
