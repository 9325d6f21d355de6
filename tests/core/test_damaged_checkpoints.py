"""Damaged checkpoints: every flipped bit is noticed, nothing wrong is loaded, and messages say what to resume from."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_bit
from tiny import settings

from tokenv.config.commands import stored_config
from tokenv.config.files import resolve
from tokenv.config.hardware import prepare, set_threads
from tokenv.config.schema import HardwareConfig
from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.core.run_folders import DIGESTS, FILES, write_digests
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.run_state import RunState
from tokenv.training.trainer import train

TENSORS = {"lm.w": torch.arange(6.0).reshape(2, 3), "lm.b": torch.ones(3)}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with three checkpoints."""
    often = {"every_symbols": 256}
    tiny = settings(train={"symbols": 768}, validation={**often, "sequences": 4}, checkpoint=often)
    folder = tmp_path_factory.mktemp("trained")
    train(resolve([], tiny), folder / "checkpoints", lambda *_: None)
    assert len(checkpoints.list_complete(folder / "checkpoints")) == 3
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 100) for name in (*FILES, DIGESTS)),
        pytest.param(DIGESTS, 10**6, marks=pytest.mark.slow),
    ],
)
def test_every_flipped_bit_is_noticed(name: str, most: int, tmp_path: Path) -> None:
    state = {"step": 1, "config": {"seed": 1}, "bits_per_byte": 2.0}
    path = checkpoints.save(
        tmp_path / "checkpoints", checkpoints.Checkpoint(TENSORS, TENSORS, state), keep=2
    )
    intact = checkpoints.save(
        tmp_path / "checkpoints",
        checkpoints.Checkpoint(TENSORS, TENSORS, state | {"step": 2}),
        keep=2,
    )
    bits = 8 * (path / name).stat().st_size
    chosen = random.Random(0).sample(range(bits), min(bits, most))
    for bit in chosen:
        flip_bit(path / name, bit)
        with pytest.raises(checkpoints.DamagedError) as raised:
            checkpoints.load(path)
        assert raised.value.intact == intact
        assert str(path) in str(raised.value)
        assert f"the newest intact checkpoint is {intact}" in str(raised.value)
        flip_bit(path / name, bit)
    assert checkpoints.load(path).state == state


@pytest.mark.parametrize("name", FILES)
def test_another_runs_file_is_noticed(name: str, tmp_path: Path) -> None:
    for number in (1, 2):
        tensors = {each: tensor + number for each, tensor in TENSORS.items()}
        state = {"step": 1, "config": {"seed": number}, "bits_per_byte": 2.0}
        checkpoints.save(
            tmp_path / str(number), checkpoints.Checkpoint(tensors, tensors, state), keep=2
        )
    one, other = (tmp_path / str(number) / "step-00000001" for number in (1, 2))
    shutil.copy(other / name, one / name)
    with pytest.raises(
        checkpoints.DamagedError, match=rf"{name}: damaged, or of another run: SHA-256 .*no other"
    ):
        checkpoints.load(one)
    (one / name).unlink()
    with pytest.raises(checkpoints.DamagedError, match=f"{name}: it is not there"):
        checkpoints.verify(one)


def test_a_checkpoint_without_digests_is_damaged(run: Path) -> None:
    *_, last = checkpoints.list_complete(run / "checkpoints")
    (last / DIGESTS).unlink()
    with pytest.raises(checkpoints.DamagedError, match=r"digests\.json: it is not there"):
        checkpoints.load(last)
    assert load_run(str(run), "latest").path != last


@pytest.mark.parametrize("which", ["best", "latest"])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_readers_take_the_newest_intact_one_and_say_so(
    which: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = checkpoints.list_complete(run / "checkpoints")
    requested = checkpoints.find(run, which)
    flip_bit(requested / name, 999)
    trained = load_run(str(run), which)
    assert trained.path == (second if requested == third else third)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokenv: warning: {requested / name}: damaged")
    assert line.endswith(f"this goes on with {trained.path}")
    for path, options in ((requested, {}), (run, {"fall_back": False})):
        with pytest.raises(
            checkpoints.DamagedError, match=f"name that one .resume={trained.path} goes on"
        ):
            load_run(str(path), which, **options)
    for path in (first, second, third):
        flip_bit(path / "optimizer.safetensors", 999)
        flip_bit(path / "model.safetensors", 998)
    with pytest.raises(
        checkpoints.DamagedError, match="no other checkpoint of the run is known to be intact"
    ):
        load_run(str(run), which)


@pytest.mark.parametrize("name", [*FILES, DIGESTS])
def test_resuming_names_the_intact_one_and_takes_none_by_itself(name: str, run: Path) -> None:
    second, third = checkpoints.list_complete(run / "checkpoints")[1:]
    flip_bit(third / name, 777)
    with pytest.raises(checkpoints.DamagedError, match=f"resume={second} goes on from it"):
        stored_config("resume", str(run), [])
    assert stored_config("resume", str(second), [])[0] == second


def test_a_damaged_state_does_not_stop_a_run_that_saves(run: Path) -> None:
    paths = checkpoints.list_complete(run / "checkpoints")
    flip_bit(paths[0] / "state.json", 99)
    checkpoint = checkpoints.load(paths[-1])
    checkpoint.state["step"] = 4
    assert checkpoints.save(run / "checkpoints", checkpoint, keep=10).is_dir()
    with pytest.raises(checkpoints.DamagedError):
        checkpoints.find(run, "best")


# --- files that are what was written, but not what they should be ---


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("size", [0, 7, 50, -1])
def test_half_a_file_is_one_message(name: str, size: int, run: Path) -> None:
    path = checkpoints.find(run)
    (path / name).write_bytes((path / name).read_bytes()[:size])
    write_digests(path)
    with pytest.raises(checkpoints.DamagedError, match=rf"{name}: damaged, no safetensors: "):
        checkpoints.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged, no JSON"),
        ('{"a": ', "damaged, no JSON"),
        ("[" * 100_000, "damaged, no JSON"),
        ("\xff", "config = None|no JSON"),
        ("[]", "expected a JSON mapping"),
        ("{}", "config = None: expected a run's configuration"),
        ('{"unit": "bits", "config": {"model": 3}}', "'validation' is missing"),
        (
            '{"unit": "bits", "config": {}, "validation": null, "history": [], "step": "x"}',
            "step = 'x': expected a whole number",
        ),
        (
            '{"unit": "bits", "config": {}, "validation": null, "history": {"a": 3}, "step": 1, "symbols": 1}',
            "'flops' is missing",
        ),
    ],
)
def test_a_state_that_is_none_is_one_message(text: str, message: str, run: Path) -> None:
    path = checkpoints.find(run)
    (path / "state.json").write_bytes(text.encode("latin-1"))
    write_digests(path)
    for read in (lambda: RunState.read(path), lambda: load_run(str(path))):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": {"a": [[1], [2, 3]]}}, "history of a: expected two lists of numbers"),
        ({"history": {"a": [["x"], [2]]}}, "history of a: expected"),
        ({"history": 3}, "history = 3: expected"),
        ({"history": "text"}, "history = 'text': expected"),
        ({"validation": {"odd": 3}}, "no state as a checkpoint holds it"),
        ({"symbols": None}, "symbols = None: expected a whole number"),
        ({"data": 3}, "data = 3: expected a section"),
        ({"config": {"model": 3}}, "model = 3: expected a section"),
    ],
)
def test_a_state_with_wrong_values_is_one_message(
    change: dict[str, Any], message: str, run: Path
) -> None:
    path = checkpoints.find(run)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | change))
    write_digests(path)
    with pytest.raises(UserError, match=message):
        load_run(str(path))


def test_a_tensor_of_too_many_dimensions_is_one_message(run: Path) -> None:
    path = checkpoints.find(run)
    tensors, _ = checkpoints.load_model(path)
    many = torch.ones(4096).reshape([2] * 12 + [1] * 58)
    checkpoints.save_file(tensors | {"lm.head.weight": many}, path / checkpoints.MODEL)
    write_digests(path)
    with pytest.raises(
        checkpoints.DamagedError, match=r"lm\.head\.weight has 70 dimensions, expected 64 at most"
    ):
        checkpoints.load(path)


def replaced(
    tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    kept = {each: value for each, value in tensors.items() if each != name}
    return kept if tensor is None else kept | {name: tensor}


@pytest.mark.parametrize(
    "tensor", [None, torch.zeros(8, 8), torch.zeros(256, 16, dtype=torch.int64)]
)
def test_a_model_of_another_shape_is_not_loaded(tensor: torch.Tensor | None, run: Path) -> None:
    path = checkpoints.find(run)
    tensors, _ = checkpoints.load_model(path)
    name = "lm.head.weight"
    checkpoints.save_file(replaced(tensors, name, tensor), path / checkpoints.MODEL)
    write_digests(path)
    descriptions = {
        None: "none",
        torch.float32: r"float32 \[8, 8\]",
        torch.int64: r"int64 \[256, 16\]",
    }
    description = descriptions[None if tensor is None else tensor.dtype]
    with pytest.raises(
        UserError,
        match=rf"model\.safetensors: {name}: found {description}, expected float32 \[256, 16\]",
    ):
        load_run(str(path))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "lm.head.weight/exp_avg",
            torch.zeros(256, 8),
            r"found float32 \[256, 8\], expected float32 \[256, 16\]",
        ),
        ("lm.head.weight/exp_avg_sq", torch.zeros(256, 16, dtype=torch.int8), "found int8"),
        ("lm.head.weight/exp_avg_sq", None, "found none, expected float32"),
        ("lm.head.weight/step", torch.zeros(3), r"found float32 \[3\], expected float32 \[\]"),
        ("lm.head.weight/odd", torch.zeros(3), r"found float32 \[3\], expected no tensor"),
        ("lm.of_another/exp_avg", torch.zeros(3), r"found float32 \[3\], expected no tensor"),
        ("", torch.zeros(3), "found"),
    ],
)
def test_an_optimizer_of_another_model_is_not_loaded(
    name: str, tensor: torch.Tensor | None, message: str, run: Path, tmp_path: Path
) -> None:
    """The first of these was a segmentation fault."""
    path = checkpoints.find(run, "latest")
    optimizer = replaced(checkpoints.load(path).optimizer, name, tensor)
    checkpoints.save_file(optimizer, path / checkpoints.OPTIMIZER)
    write_digests(path)
    resume = checkpoints.load(path)
    with pytest.raises(UserError, match=rf"optimizer\.safetensors: {name}: {message}"):
        train(RunState.read(path).settings, tmp_path / "new", lambda *_: None, resume=resume)


def test_moments_are_of_the_precision_that_a_run_goes_on_in(run: Path, tmp_path: Path) -> None:
    resume = checkpoints.load(checkpoints.list_complete(run / "checkpoints")[0])
    config = resolve([], {"hardware": {"precision": "float64"}}, base=resume.state["config"])
    _, history = train(config, tmp_path / "new", lambda *_: None, resume=resume)
    assert history["train/flops"][0][-1] == 768
    saved = checkpoints.load(checkpoints.find(tmp_path / "new" / "step-00000003"))
    assert {tensor.dtype for name, tensor in saved.optimizer.items() if "/exp" in name} == {
        torch.float64
    }


def test_threads_have_a_bound() -> None:
    with pytest.raises(UserError, match=r"hardware\.threads = 100000000: expected 0 to \d+"):
        HardwareConfig(threads=100_000_000)
    before = torch.get_num_threads()
    prepare(HardwareConfig(threads=1024))
    assert torch.get_num_threads() == 1024
    set_threads(before)
