"""Files with a digest of their own: no flipped bit changes what is read, and no other run's file is taken."""

import json
import random
from pathlib import Path

import pytest
import torch
from damage import flip_bit

from tokenv.core.checkpoints import (
    DamagedError,
    load_measured_tensors,
    load_tensors,
    read_json,
    save_measured_tensors,
    write_json,
)
from tokenv.core.errors import UserError

VALUES = {"loss": [1.25, 2.5, float("inf")], "text": "é", "nested": {"a": None, "b": [1, True]}}
TENSORS = {"policy": torch.arange(6.0).reshape(2, 3), "logits": torch.ones(1, 4)}


def test_no_flipped_bit_changes_values(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    noticed = 0
    write_json(path, VALUES, {"seed": 1})
    assert read_json(path, {"seed": 1}) == VALUES
    bits = 8 * path.stat().st_size
    for bit in range(bits):
        flip_bit(path, bit)
        try:
            values = read_json(path, {"seed": 1})
        except UserError:
            noticed += 1
        else:
            assert all(values[name] == value for name, value in VALUES.items())
        flip_bit(path, bit)
    assert noticed > 0.9 * bits


def test_no_flipped_bit_changes_tensors(tmp_path: Path) -> None:
    path = tmp_path / "values.safetensors"
    save_measured_tensors(TENSORS, path, {"seed": 1})
    bits = 8 * path.stat().st_size
    for bit in random.Random(0).sample(range(bits), min(bits, 1500)):
        flip_bit(path, bit)
        with pytest.raises(UserError):
            load_measured_tensors(path, {"seed": 1})
        flip_bit(path, bit)
    tensors = load_measured_tensors(path, {"seed": 1})
    assert tensors is not None
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_files_of_another_owner_are_rejected(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", VALUES, {"seed": 1, "rate": 0.2})
    assert read_json(tmp_path / "a.json", {"rate": 0.2, "seed": 1}) == VALUES
    save_measured_tensors(TENSORS, tmp_path / "a.safetensors", 1)
    for read, name in ((read_json, "a.json"), (load_measured_tensors, "a.safetensors")):
        with pytest.raises(
            UserError,
            match=rf"{name}(\.json)?: of another run, or measured with other options: delete it",
        ):
            read(tmp_path / name, {"seed": 2})


def test_a_file_without_its_digest_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(VALUES))
    with pytest.raises(UserError, match=r"a\.json is damaged: its SHA-256 is .*, expected None"):
        read_json(tmp_path / "a.json", 3)
    save_measured_tensors(TENSORS, tmp_path / "a.safetensors", 3)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(UserError, match=r"a\.safetensors is damaged"):
        load_measured_tensors(tmp_path / "a.safetensors", 3)
    assert load_measured_tensors(tmp_path / "b.safetensors", 3) is None


@pytest.mark.parametrize("content", ["", "[", "[1]", "3", "[" * 100_000])
def test_json_without_a_mapping_is_one_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a.json is damaged"):
        read_json(tmp_path / "a.json", 1)
    (tmp_path / "a.safetensors").write_text(content)
    with pytest.raises(DamagedError, match=r"a.safetensors: damaged, no safetensors"):
        load_tensors(tmp_path / "a.safetensors")
