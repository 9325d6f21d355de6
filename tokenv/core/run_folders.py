"""Checkpoints in run folders, and the digests of their files, for code without tensors: nothing here imports torch."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenv.core import trust
from tokenv.core.atomic import write_atomically
from tokenv.core.errors import MissingFileError, UserError

PREFIX = "step-"  # of a checkpoint's folder
STATE = "state.json"
FILES = ("model.safetensors", "optimizer.safetensors", STATE)
DIGESTS = "digests.json"


class DamagedError(UserError):
    """File of a checkpoint which is not what was saved.

    Args:
        file: damaged file in the checkpoint's folder.
        reason: what is wrong with it.

    Attributes:
        problem: file and reason.
        intact: newest intact checkpoint of the same run, if there is one.
    """

    def __init__(self, file: Path, reason: str) -> None:
        self.problem = f"{file}: {reason}"
        self.intact = _newest_intact(file.parent)
        hint = "no other checkpoint of the run is known to be intact"
        if self.intact is not None:
            hint = (
                f"the newest intact checkpoint is {self.intact}: name that one "
                f"(resume={self.intact} goes on from it)"
            )
        super().__init__(f"{self.problem}; {hint}")


def source_name(file: Path) -> str:
    """Return the name under which a store keeps a source file: with the digest of its content."""
    return f"{file.stem}_{file_digest(file)[:32]}{file.suffix}"


def write_digests(folder: Path, names: Sequence[str] = FILES) -> None:
    """Write the digests of a checkpoint's files, or of a saved model's, beside them."""
    digests = {name: file_digest(folder / name) for name in names}
    write_atomically(folder / DIGESTS, json.dumps(digests, indent=1))


def verify(checkpoint: Path, names: Sequence[str] = FILES) -> None:
    """Compare files with their digests.

    Raises:
        MissingFileError: there is no such folder.
        DamagedError: a file is not what was saved.
    """
    if not checkpoint.is_dir():
        raise MissingFileError(
            f"{checkpoint}: there is no such folder: name a run or a checkpoint which exists"
        )
    damage = _find_damage(checkpoint, names)
    if damage is not None:
        raise DamagedError(*damage)


def _find_damage(checkpoint: Path, names: Sequence[str] = FILES) -> tuple[Path, str] | None:
    """Return the first file which is not what was saved, and the reason; None if all are intact."""
    digests_file = checkpoint / DIGESTS
    if not os.path.lexists(digests_file):
        return digests_file, "it is not there"
    try:
        digests = trust.read_json(digests_file)
        if not isinstance(digests, dict) or not set(names) <= set(digests):
            return digests_file, f"damaged: expected the digests of {', '.join(names)}"
        for name in names:
            if not os.path.lexists(checkpoint / name):
                return checkpoint / name, "it is not there"
            actual = file_digest(checkpoint / name)
            if actual != digests[name]:
                return (
                    checkpoint / name,
                    f"damaged, or of another run: SHA-256 {actual}, expected {digests[name]!r}",
                )
    except trust.UnreadableFileError as error:
        return error.path, error.reason
    return None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with trust.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest_intact(checkpoint: Path) -> Path | None:
    """Return the newest other checkpoint of the run with intact files."""
    for other in sorted(checkpoint.parent.glob(f"{PREFIX}*"), reverse=True):
        if other != checkpoint and _find_damage(other) is None:
            return other
    return None


def list_complete(folder: Path) -> list[Path]:
    """Return all complete checkpoints in a checkpoint folder, oldest first."""
    return sorted(
        path for path in folder.glob(f"{PREFIX}*") if all((path / name).is_file() for name in FILES)
    )


def list_all(run: str | Path) -> list[Path]:
    """Return all complete checkpoints of a run folder or checkpoint folder, oldest first, or the given checkpoint."""
    run = Path(run)
    if (run / STATE).is_file():
        return [run]
    return list_complete(_checkpoint_folder(run))


def _checkpoint_folder(run: Path) -> Path:
    if run.name == "checkpoints":
        return run
    return run / "checkpoints"


def find(run: str | Path, which: str = "latest") -> Path:
    """Return a checkpoint of a run folder.

    Args:
        run: run folder (``runs/7``), its checkpoint folder, or one checkpoint.
        which: ``latest`` or ``best`` (lowest validation loss).

    Raises:
        MissingFileError: there is no complete checkpoint.
        DamagedError: the best one is requested, and a state with a validation loss is damaged.
        UserError: ``which`` is neither.
    """
    if which not in ("latest", "best"):
        raise UserError(
            f"checkpoint = {which!r}: expected latest or best, or name one as run={run}/checkpoints/…"
        )
    run = Path(run)
    if run.is_file():
        raise MissingFileError(f"{run} is a file: expected a run folder such as runs/1{_hint(run)}")
    checkpoints = list_all(run)
    if checkpoints == [run]:
        return run
    if not checkpoints:
        raise MissingFileError(
            f"no complete checkpoint in {_checkpoint_folder(run)}: expected a run folder such as runs/1{_hint(run)}"
        )
    if which == "latest":
        return checkpoints[-1]
    return best_checkpoint(checkpoints) or checkpoints[-1]


def _hint(run: Path) -> str:
    """Return the end of a message: the same name under runs/, or all runs which have checkpoints."""
    candidate = Path("runs") / run.name
    if run.name and list_complete(candidate / "checkpoints"):
        return f": did you mean {candidate}?"
    runs: set[str] = set()
    for folder in (run.parent, Path("runs")):
        runs.update(str(path.parents[1]) for path in folder.glob(f"*/checkpoints/{PREFIX}*"))
    if not runs:
        return ""
    return f"; runs with checkpoints are {', '.join(sorted(runs))}"


def load_state(path: Path) -> dict[str, Any]:
    """Load a checkpoint's state without its parameters, which may be large.

    Raises:
        DamagedError: the file is not what was saved, or no state.
        UserError: its configuration names code which the user has not allowed: see ``tokenv.core.trust``.
    """
    state = _read_state(path)
    if not isinstance(state.get("config"), dict):
        raise DamagedError(
            path / STATE, f"config = {state.get('config')!r}: expected a run's configuration"
        )
    trust.check(state["config"], path / STATE)
    return state


def best_checkpoint(checkpoints: list[Path], *, skip_damaged: bool = False) -> Path | None:
    """Return the checkpoint with the lowest validation loss, if any was validated.

    Raises:
        DamagedError: a state is not what was saved, and ``skip_damaged`` is not set.
    """
    losses = {}
    for path in checkpoints:
        try:
            state = _read_state(path)
        except DamagedError:
            if skip_damaged:
                continue
            raise
        loss = state.get(str(state.get("unit", "bits_per_byte")))
        if isinstance(loss, int | float):
            losses[path] = loss
    return min(losses, key=losses.__getitem__, default=None)


def _read_state(path: Path) -> dict[str, Any]:
    """Read a state without checking its contents.

    Raises:
        DamagedError: the file is not what was saved, or no JSON mapping.
    """
    verify(path, [STATE])
    try:
        state = trust.read_json(path / STATE)
    except trust.UnreadableFileError as error:
        raise DamagedError(error.path, error.reason) from None
    if not isinstance(state, dict):
        raise DamagedError(path / STATE, "expected a JSON mapping, a run's state")
    return state
