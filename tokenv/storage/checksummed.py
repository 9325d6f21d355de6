"""Files that tell themselves whether they still are what was written, and of what: their digest stands in them.

A file beside them, as checkpoints have, would be of another moment wherever a kill falls between the two.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenv.core.errors import UserError
from tokenv.storage import regular_files
from tokenv.storage.atomic import replacing_file, write_atomically

OF, DIGEST = "of", "sha256"


def write_json(path: Path, values: Mapping[str, Any], of: Any, *, indent: int | None = None) -> None:
    """Write values that ``read_json`` can tell are whole, complete or not at all.

    Args:
        path: in an existing folder.
        values: by name, neither of them ``of`` nor ``sha256``.
        of: what they belong to: anything that JSON can hold.
        indent: as ``json.dumps`` takes it.
    """
    owned = dict(values) | {OF: fingerprint(of)}
    write_atomically(path, json.dumps(owned | {DIGEST: fingerprint(owned)}, indent=indent))


def read_json(path: Path, of: Any, *, digest: bool = False) -> dict[str, Any]:
    """Read what ``write_json`` wrote.

    Args:
        path: of the file.
        of: what it must belong to.
        digest: whether to refuse a file without a digest, such as one of an earlier version.

    Raises:
        OSError: the file cannot be read.
        UserError: it is not what was written, or belongs to something else than ``of``.
    """
    try:
        values = regular_files.read_json(path)
    except regular_files.UnreadableFileError as error:
        raise UserError(f"{error}: {_ADVICE}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: expected a JSON mapping: {_ADVICE}")
    told = values.pop(DIGEST, None)
    if told is not None or digest:
        _check(told, fingerprint(values), values.get(OF), of, path)
    return {name: value for name, value in values.items() if name != OF}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, of: Any) -> None:
    """Write tensors that ``load_tensors`` can tell are whole, complete or not at all.

    Args:
        tensors: by name.
        path: in an existing folder.
        of: what they belong to: anything that JSON can hold.
    """
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    told = {OF: fingerprint(of), DIGEST: _digest(kept, fingerprint(of))}
    with replacing_file(path) as scratch:
        save_file(kept, scratch, metadata=told)


def load_tensors(path: Path, of: Any) -> dict[str, torch.Tensor]:
    """Read what ``save_tensors`` wrote, onto the CPU; a file of an earlier version has no digest, and passes.

    Raises:
        UserError: it is not what was written, or belongs to something else than ``of``.
    """
    try:
        regular_files.check_regular(path)
        with safe_open(path, "pt") as file:
            told: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, regular_files.UnreadableFileError) as error:
        raise UserError(f"{path} is damaged, no safetensors: {error}: {_ADVICE}") from None
    if DIGEST in told:
        _check(told[DIGEST], _digest(tensors, told.get(OF, "")), told.get(OF), of, path)
    return tensors


def fingerprint(values: Any) -> str:
    """A digest of what JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor], of: str) -> str:
    digest = hashlib.sha256(of.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_ADVICE = "delete it, and what it held is measured again"


def _check(told: Any, found: str, owner: Any, of: Any, whence: Path) -> None:
    if told != found:
        raise UserError(f"{whence} is damaged: its SHA-256 is {found}, expected {told!r}: {_ADVICE}")
    if owner != fingerprint(of):
        raise UserError(f"{whence}: of another run, or measured with other options: {_ADVICE}")
