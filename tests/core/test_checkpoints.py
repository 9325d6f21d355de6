"""Checkpoints, and files that are replaced: complete or not there at all, whenever the process is killed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenv.core import atomic, checkpoints

TENSORS = {"lm.w": torch.ones(1)}


class Killed(BaseException):
    pass


def save(folder: Path, step: int, loss: float | None = None, keep: int = 2) -> Path:
    state = {"step": step, "bits_per_byte": loss}
    return checkpoints.save(folder, checkpoints.Checkpoint(TENSORS, TENSORS, state), keep=keep)


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.list_complete(folder)]


def test_last_and_best_checkpoints_remain(tmp_path: Path) -> None:
    for step, bits in enumerate([3.0, 1.0, None, 2.0, 2.5, 2.4]):
        save(tmp_path / "checkpoints", step, bits)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000004", "step-00000005"]
    assert checkpoints.find(tmp_path, "best").name == "step-00000001"
    assert checkpoints.find(tmp_path).name == "step-00000005"
    assert checkpoints.find(checkpoints.find(tmp_path)) == checkpoints.find(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoints.find(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="expected latest or best"):
        checkpoints.find(tmp_path, "newest")


def test_a_kill_while_deleting_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    remove = shutil.rmtree
    for step in (1, 2):
        save(folder, step)

    def killed_in_the_middle(path: Path, **options: Any) -> None:
        if not path.exists():
            return
        (path / "state.json").unlink()
        raise Killed

    # a new one; one in its place
    for step, left in ((3, ["step-00000002", "step-00000003"]), (3, ["step-00000002"])):
        with monkeypatch.context() as patch:
            patch.setattr(atomic.shutil, "rmtree", killed_in_the_middle)
            with pytest.raises(Killed):
                save(folder, step)
        assert names(folder) == left
        assert checkpoints.find(tmp_path, "best").name == left[-1]
        remove(next(folder.glob(".deleted-*")))
        shutil.rmtree(folder / ".partial-step-00000003", ignore_errors=True)
    save(folder, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]


def test_partial_files_of_killed_processes_are_deleted_and_block_nothing(tmp_path: Path) -> None:
    """Earlier versions deleted under the checkpoint's own name."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step)
    for left in (".partial-step-00000007", ".deleted-step-00000000"):
        (folder / left).mkdir()
        (folder / left / "model.safetensors").write_bytes(b"half")
    (folder / "step-00000001" / "state.json").unlink()
    assert checkpoints.find(tmp_path, "best").name == "step-00000002"
    save(folder, 3)
    assert names(folder) == ["step-00000002", "step-00000003"]
    assert not list(folder.glob(".*"))


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_atomically(path, "old")

    def killed_in_the_middle() -> None:
        with atomic.replacing_file(path) as scratch:
            scratch.write_text("ne")
            raise Killed

    with pytest.raises(Killed):
        killed_in_the_middle()
    assert path.read_text() == "old"
    atomic.write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_whole_state_of_an_optimizer_is_loaded_onto_its_parameters_device(
    dtype: torch.dtype,
) -> None:
    """A fused optimizer on a GPU reads its count of steps there; the count keeps float32."""
    saved = {name: torch.ones(2) for name in ("weight/exp_avg", "weight/exp_avg_sq")}
    saved["weight/step"] = torch.tensor(3.0)
    parameter = torch.nn.Parameter(torch.empty(2, device="meta", dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], fused=False)
    checkpoints.load_optimizer(optimizer, {"weight": parameter}, saved)
    state = optimizer.state[parameter]
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
    assert state["step"].dtype == torch.float32
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
