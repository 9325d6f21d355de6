"""Files which contain their own checksum and the fingerprint of their owner.

A separate file, as checkpoints have, would not match if the process were killed between the two writes.
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
from tokenv.storage import trust
from tokenv.storage.atomic import replacing_file, write_atomically

OWNER, DIGEST = "of", "sha256"
_ADVICE = "delete it, and what it held is measured again"


def write_json(path: Path, values: Mapping[str, Any], owner: Any, *, indent: int | None = None) -> None:
    """Write values which ``read_json`` can verify, complete or not at all.

    Args:
        path: path in an existing folder.
        values: values by name, which is neither ``of`` nor ``sha256``.
        owner: JSON-serialisable description of what the values belong to.
        indent: see ``json.dumps``.
    """
    owned = dict(values) | {OWNER: fingerprint(owner)}
    write_atomically(path, json.dumps(owned | {DIGEST: fingerprint(owned)}, indent=indent))


def read_json(path: Path, owner: Any, *, require_digest: bool = False) -> dict[str, Any]:
    """Read and verify a file of ``write_json``.

    Args:
        path: path of the file.
        owner: description of what the values must belong to.
        require_digest: whether to reject a file without a digest, such as one of an earlier version.

    Raises:
        OSError: the file cannot be read.
        UserError: it is not what was written, or belongs to another owner.
    """
    try:
        values = trust.read_json(path)
    except trust.UnreadableFileError as error:
        raise UserError(f"{error}: {_ADVICE}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: expected a JSON mapping: {_ADVICE}")
    stored = values.pop(DIGEST, None)
    if stored is not None or require_digest:
        _check(stored, fingerprint(values), values.get(OWNER), owner, path)
    return {name: value for name, value in values.items() if name != OWNER}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, owner: Any) -> None:
    """Write tensors which ``load_tensors`` can verify, complete or not at all.

    Args:
        tensors: tensors by name.
        path: path in an existing folder.
        owner: JSON-serialisable description of what the tensors belong to.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {OWNER: fingerprint(owner), DIGEST: _digest(on_cpu, fingerprint(owner))}
    with replacing_file(path) as scratch:
        save_file(on_cpu, scratch, metadata=metadata)


def load_tensors(path: Path, owner: Any) -> dict[str, torch.Tensor]:
    """Load and verify tensors of ``save_tensors`` onto the CPU; a file of an earlier version has no digest and passes.

    Raises:
        UserError: it is not what was written, or belongs to another owner.
    """
    try:
        trust.check_regular(path)
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, trust.UnreadableFileError) as error:
        raise UserError(f"{path} is damaged, no safetensors: {error}: {_ADVICE}") from None
    if DIGEST in metadata:
        digest = _digest(tensors, metadata.get(OWNER, ""))
        _check(metadata[DIGEST], digest, metadata.get(OWNER), owner, path)
    return tensors


def fingerprint(values: Any) -> str:
    """Return a digest of JSON-serialisable values which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor], owner: str) -> str:
    digest = hashlib.sha256(owner.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check(stored: Any, actual: str, stored_owner: Any, owner: Any, path: Path) -> None:
    if stored != actual:
        raise UserError(f"{path} is damaged: its SHA-256 is {actual}, expected {stored!r}: {_ADVICE}")
    if stored_owner != fingerprint(owner):
        raise UserError(f"{path}: of another run, or measured with other options: {_ADVICE}")
