"""Digests of a checkpoint's files: whether they still are what was saved. Nothing here imports torch."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenv.errors import UserError

PREFIX = "step-"  # of a checkpoint's folder
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
DIGESTS = "digests.json"


class DamagedError(UserError):
    """A file of a checkpoint is not what was saved.

    Args:
        file: the damaged one, in the checkpoint's folder.
        why: what is wrong with it.

    Attributes:
        what: the file and what is wrong with it.
        sound: the newest checkpoint of the same run with which nothing is wrong, if there is one.
    """

    def __init__(self, file: Path, why: str) -> None:
        self.what, self.sound = f"{file}: {why}", _newest_sound(file.parent)
        hint = "no other checkpoint of the run is known to be sound"
        if self.sound is not None:
            hint = f"the newest sound checkpoint is {self.sound}: name that one (resume={self.sound} goes on from it)"
        super().__init__(f"{self.what}; {hint}")


def write_digests(checkpoint: Path) -> None:
    """Write the digests of a checkpoint's files beside them."""
    digests = {name: file_digest(checkpoint / name) for name in FILES}
    (checkpoint / DIGESTS).write_text(json.dumps(digests, indent=1))


def verify(checkpoint: Path, names: Sequence[str] = FILES) -> None:
    """Hold files against their digests; a checkpoint of an earlier version has none, and passes.

    Raises:
        DamagedError: a file is not what was saved.
    """
    wrong = _wrong(checkpoint, names)
    if wrong is not None:
        raise DamagedError(*wrong)


def _wrong(checkpoint: Path, names: Sequence[str] = FILES) -> tuple[Path, str] | None:
    """The first file that is not what was saved, and why; None where all are."""
    told = checkpoint / DIGESTS
    if not told.is_file():
        return None
    try:
        digests = json.loads(told.read_bytes())
    except (ValueError, RecursionError) as error:
        return told, f"damaged, no JSON: {error}"
    if not isinstance(digests, dict) or sorted(digests) != sorted(FILES):
        return told, f"damaged: expected the digests of {', '.join(FILES)}"
    for name in names:
        if not (checkpoint / name).is_file():
            return checkpoint / name, "it is not there"
        found = file_digest(checkpoint / name)
        if found != digests[name]:
            return checkpoint / name, f"damaged, or of another run: SHA-256 {found}, expected {digests[name]!r}"
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest_sound(checkpoint: Path) -> Path | None:
    """Of a checkpoint's neighbours; of those without digests none, for nothing is known of them."""
    others = sorted(checkpoint.parent.glob(f"{PREFIX}*/{DIGESTS}"), reverse=True)
    return next((path.parent for path in others if path.parent != checkpoint and _wrong(path.parent) is None), None)
