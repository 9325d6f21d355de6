"""What is read from a stored run on a CPU is computed in float32, on machines which train in bfloat16, too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import settings

import tokenv
from tokenv import Model
from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.config.hardware import for_inference
from tokenv.config.schema import HardwareConfig
from tokenv.core.errors import UserError
from tokenv.evaluation.loaded_run import load_run
from tokenv.training.trainer import train


@pytest.fixture
def _fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


def trained(folder: Path, precision: str) -> Path:
    values = settings(
        train={"symbols": 512}, hardware={"precision": precision}, checkpoint={"every_symbols": 512}
    )
    train(resolve([], values), folder / "checkpoints", lambda *_: None)
    return folder


@pytest.mark.usefixtures("_fast_bfloat16")
def test_training_is_in_bfloat16_and_reading_in_float32(tmp_path: Path) -> None:
    values = settings(hardware={"precision": "auto"})
    assert build_components(resolve([], values)).lm.compute_dtype == torch.bfloat16
    run = trained(tmp_path, "auto")
    assert load_run(str(run)).components.lm.compute_dtype == torch.float32
    assert load_run(str(run)).config.hardware.precision == "auto"
    model = tokenv.load(run)
    texts = [bytes(range(7 * i, 7 * i + 31)) for i in range(9)]
    alone = [model.log_likelihood(text) for text in texts]
    assert model.log_likelihood(texts) == pytest.approx(alone, rel=1e-6)
    probabilities = model.spans(texts[0]).probabilities
    saved = Model.from_pretrained(model.save_pretrained(tmp_path / "saved"))
    assert saved.lm.compute_dtype == torch.float32
    assert saved.spans(texts[0]).probabilities == probabilities


def test_who_asks_for_bfloat16_gets_it(tmp_path: Path) -> None:
    run = trained(tmp_path, "bfloat16")
    assert tokenv.load(run).lm.compute_dtype == torch.bfloat16
    assert tokenv.load(run, precision="float32").lm.compute_dtype == torch.float32
    assert tokenv.load(run, precision="auto").lm.compute_dtype == torch.float32
    assert tokenv.load(run, precision="float64").lm.head.weight.dtype == torch.float64
    with pytest.raises(UserError, match=r"float16.*expected one of auto, float32"):
        tokenv.load(run, precision="float16")  # type: ignore[arg-type]


def test_other_devices_choose_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenv.config.hardware.resolve_device", torch.device)
    config = HardwareConfig(device="cuda")
    assert for_inference(config) == config
    assert for_inference(replace(config, device="cpu")).precision == "float32"
