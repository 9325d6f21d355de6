"""What runs on an accelerator gives the CPU's results and mixes no devices; and what the pretended one notices."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from asgi import request
from fake_accelerator import NAME, DeviceError, FakeAccelerator
from ranks import in_processes, updates
from tiny import settings
from torch import Tensor
from torchrl.envs.utils import check_env_specs

import tokenv
from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.evaluation.loaded_run import LoadedRun
from tokenv.evaluation.run_state import RunState
from tokenv.lab.config import VarianceOptions
from tokenv.lab.variance_study import run_variance_study
from tokenv.library.handlers import ModelCache
from tokenv.library.server import build_application
from tokenv.lm.segments import segment
from tokenv.series.frames import SeriesModel
from tokenv.training.process_group import Ranks
from tokenv.training.trainer import train

DEVICES = ("cpu", NAME)
TEXT = "some words and more of them " * 2


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator() as accelerator:
        yield accelerator


@pytest.mark.parametrize(
    "work",
    [
        lambda x, y: x + y,
        lambda x, y: y.add_(x[0]),
        lambda x, y: y[0].add_(x[0]),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x[0], y[0]]),
        lambda x, y: x.index_select(0, y.long()),
        lambda x, y: torch.where(y > 0, x, x),
        lambda x, y: y[x.long()],
        lambda x, y: x.index_put_((x.long(),), y),
        lambda x, y: torch.nn.functional.mse_loss(x.requires_grad_(), y),
        lambda x, y: torch.rand(2, device=x.device, generator=torch.Generator()),
    ],
)
def test_two_devices_are_refused(work: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(DeviceError, match=r"on the CPU at"), FakeAccelerator() as accelerator:
        work(torch.ones(3, device=accelerator.device), torch.ones(3))


def test_numbers_and_indices_of_the_cpu_are_read(accelerator: FakeAccelerator) -> None:
    x = torch.arange(4.0, device=accelerator.device)
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([1, 2])].tolist() == [1, 2]
    assert torch.rand(2, device=x.device, generator=torch.Generator(x.device)).device == x.device


def test_waits_are_counted_where_they_are(accelerator: FakeAccelerator) -> None:
    x = torch.arange(4.0).pin_memory().to(accelerator.device, non_blocking=True)
    total = x.sum()
    assert not accelerator.waits
    assert total.item() == 6
    assert bool(x[1] > 0)
    assert torch.equal(x[x > 1], x[2:])
    x[x > 1] = 0
    assert x.nonzero().cpu().tolist() == [[1]]
    x.copy_(torch.ones(4))
    expected = {
        "_local_scalar_dense": 2,
        "equal": 1,
        "mask": 2,
        "nonzero": 1,
        "copy to the host": 1,
    }
    assert accelerator.waits == {f"{name} at ": count for name, count in expected.items()} | {
        "copy to the device at ": 1
    }
    accelerator.waits.clear()
    segment(torch.ones(2, 3, dtype=torch.long, device=accelerator.device))
    ((place, count),) = accelerator.waits.items()
    assert place.startswith("copy to the host at tokenv/lm/segments.py:")
    assert count == 1


def test_a_copy_has_not_arrived_before_a_wait(accelerator: FakeAccelerator) -> None:
    early = torch.ones(2, device=accelerator.device).to("cpu", non_blocking=True)
    assert early.tolist() == [-1, -1]
    torch.get_device_module(accelerator.device).synchronize()
    assert early.tolist() == [1, 1]


Runs = dict[str, tuple[Path, dict[tuple[str, int], float]]]


def run(folder: Path, device: str, **hardware: Any) -> tuple[Path, dict[tuple[str, int], float]]:
    """Train on a device; return the run's folder, and the metrics which do not depend on time."""
    metrics: dict[tuple[str, int], float] = {}
    sections = {
        "model": {"elapsed": True},
        "train": {"symbols": 768},
        "hardware": {"device": device} | hardware,
    }
    config = resolve([], settings(**sections))
    train(
        config, folder / "checkpoints", lambda name, value, at: metrics.update({(name, at): value})
    )
    return folder, {key: value for key, value in metrics.items() if "per_second" not in key[0]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with FakeAccelerator():
        return {device: run(tmp_path_factory.mktemp(device), device) for device in DEVICES}


def test_training_equals_that_on_the_cpu(
    runs: Runs, tmp_path: Path, accelerator: FakeAccelerator
) -> None:
    expected = runs["cpu"][1]
    assert runs[NAME][1] == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
    recomputed = run(tmp_path, NAME, activation_checkpointing="on")[1]
    losses = {key: value for key, value in expected.items() if "flops" not in key[0]}
    assert {key: recomputed[key] for key in losses} == pytest.approx(
        losses, rel=1e-3, abs=1e-5, nan_ok=True
    )


def test_a_stored_run_answers_as_on_the_cpu(runs: Runs, accelerator: FakeAccelerator) -> None:
    folder = runs[NAME][0]
    model = tokenv.load(folder)
    expected = tokenv.load(folder, device="cpu")
    assert model.lm.head.weight.device == accelerator.device
    for options in ({"seed": 3}, {"rate": 0.3}):
        spans = model.spans(TEXT, **options)
        others = expected.spans(TEXT, **options)
        assert spans.tokens == others.tokens
        assert spans.bits_per_byte == pytest.approx(others.bits_per_byte)
    assert model.generate(TEXT, 12, seed=3) == expected.generate(TEXT, 12, seed=3)


def test_the_page_answers_as_the_library(runs: Runs, accelerator: FakeAccelerator) -> None:
    pytest.importorskip("starlette")
    folder = str(runs[NAME][0])
    app = build_application(ModelCache([folder], "latest"), seed=3)
    status, _, text = asyncio.run(request(app, "/spans", json.dumps({"text": TEXT}).encode()))
    assert status == 200
    (answer,) = json.loads(text)["runs"]
    assert answer["spans"] == tokenv.load(folder, checkpoint="latest").spans(TEXT, seed=3).as_dict()


@pytest.mark.parametrize("direct", [False, True])
def test_forecasts_equal_those_on_the_cpu(
    direct: bool, series_settings: dict[str, Any], accelerator: FakeAccelerator
) -> None:
    value = torch.arange(60.0).sin().tolist()
    frame = pd.DataFrame({"unique_id": "a", "ds": range(60), "y": value})
    forecasts = []
    for device in DEVICES:
        config = resolve(
            [], merge(series_settings, {"hardware": {"device": device}, "codec": {"horizon": 8}})
        )
        components = build_components(config)
        components.train(False)
        loaded = LoadedRun(components, config, Path(), RunState({}, "bits"))
        forecasts.append(SeriesModel(loaded).forecast(frame, 6, level=80, samples=5, direct=direct))
    pd.testing.assert_frame_equal(*forecasts, rtol=1e-4, atol=1e-5)


def test_the_laboratory_has_the_figures_of_the_cpu(
    tmp_path: Path, accelerator: FakeAccelerator
) -> None:
    results = []
    for device in DEVICES:
        sizes = {
            "data": {"seq_len": 6},
            "agent": {"window": 0},
            "train": {"symbols": 96, "batch_size": 4},
        }
        config = resolve([], settings(hardware={"device": device}, **sizes))
        few = {
            "checkpoints": 1,
            "draws": 4,
            "batch_size": 2,
            "timings": 1,
            "warmup": 1,
            "credit_draws": 2,
        }
        study = run_variance_study(
            VarianceOptions(config, estimators=("reinforce", "rebar"), **few), tmp_path / device
        )
        (moment,) = study["moments"]
        assert study["costs"].keys() == moment["estimators"].keys()
        results.append(
            {
                (estimator, component, figure): value
                for estimator, result in moment["estimators"].items()
                for component, figures in result["components"].items()
                for figure, (value, _) in figures.items()
            }
        )
    assert results[1] == pytest.approx(results[0], rel=1e-2, abs=1e-4, nan_ok=True)


def test_stepping_equals_that_on_the_cpu(accelerator: FakeAccelerator) -> None:
    symbol_BN = torch.randint(256, (2, 8))
    rollouts = []
    for device in DEVICES:
        components = build_components(resolve([], settings(hardware={"device": device})))
        env = TokenizationEnv(components.lm, TensorSource(symbol_BN), 2, window=2)
        with torch.no_grad():
            rollouts.append(env.rollout(7, components.agent))
    check_env_specs(env)
    for key in (keys.ACTION, keys.LOG_LIKELIHOOD):
        torch.testing.assert_close(rollouts[1][key].cpu(), rollouts[0][key])


def updates_of_rank(ranks: Ranks, sections: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parameters after two updates, on the CPU."""
    with FakeAccelerator():
        _, state = updates(ranks, sections, steps=2)
        return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.slow
def test_two_ranks_equal_one_on_the_cpu(tmp_path: Path) -> None:
    expected = updates(Ranks(), settings(), steps=2)[1]
    for state in in_processes(2, updates_of_rank, tmp_path, settings(hardware={"device": NAME})):
        assert isinstance(state, dict), state
        torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-5)
