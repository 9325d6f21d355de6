"""Digests of a checkpoint's files: whether they still are what was saved. Nothing here imports torch."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenv.core.errors import UserError
from tokenv.storage.atomic import write_atomically
from tokenv.storage.regular_files import UnreadableFileError, open_regular, read_json

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


def write_digests(folder: Path, names: Sequence[str] = FILES) -> None:
    """Write the digests of files beside them: of a checkpoint's, or of a model's that is saved alone."""
    digests = {name: file_digest(folder / name) for name in names}
    write_atomically(folder / DIGESTS, json.dumps(digests, indent=1))


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
    if not os.path.lexists(told):
        return None
    try:
        digests = read_json(told)
        if not isinstance(digests, dict) or not set(names) <= set(digests):
            return told, f"damaged: expected the digests of {', '.join(names)}"
        for name in names:
            if not os.path.lexists(checkpoint / name):
                return checkpoint / name, "it is not there"
            found = file_digest(checkpoint / name)
            if found != digests[name]:
                return checkpoint / name, f"damaged, or of another run: SHA-256 {found}, expected {digests[name]!r}"
    except UnreadableFileError as error:
        return error.path, error.reason
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest_sound(checkpoint: Path) -> Path | None:
    """Of a checkpoint's neighbours; of those without digests none, for nothing is known of them."""
    others = sorted(checkpoint.parent.glob(f"{PREFIX}*/{DIGESTS}"), reverse=True)
    return next((path.parent for path in others if path.parent != checkpoint and _wrong(path.parent) is None), None)
