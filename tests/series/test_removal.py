"""Time series are a plug-in: without them text is trained, used, measured and compared; the core's tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("agents", "core", "data", "env", "estimators", "lm", "training")  # of the core's tests
BLOCKED = """
import gc
import sys

gc.disable()  # what imports make stays
sys.modules["tokenv.series"] = None  # an editable installation would find it elsewhere
"""
TRAIN = """
import sys

import blocked
import tokenv
import tokenv.compare.command, tokenv.evaluation.loaded_run, tokenv.lab.variance_study
from pathlib import Path
from tokenv.config.files import resolve
from tokenv.training.trainer import train

assert Path(tokenv.__file__).is_relative_to(Path.cwd())
updates = {"data": {"source": "words", "words_documents": 40, "seq_len": 64}}
updates |= {"train": {"symbols": 2048, "batch_size": 4}}
updates |= {"model": {"width": 16, "heads": 2}, "validation": {"sequences": 4}}
evaluation, _ = train(resolve(["quick"], updates), Path("run/checkpoints"), lambda *_: None)
assert 0 < evaluation.loss < 20
assert not {"matplotlib", "jinja2"} & sys.modules.keys()  # computing loads no drawing
assert not [name for name in sys.modules if name.startswith("tokenv.series.")]
"""
USE = """
import blocked
import tokenv
from pathlib import Path
from pkgutil import iter_modules
from importlib import import_module

for room in ("lab", "library"):
    for module in iter_modules([f"tokenv/{room}"], f"tokenv.{room}."):
        try:
            import_module(module.name)
        except ImportError as error:  # an extra is not installed
            assert "series" not in str(error)
model = tokenv.Model.from_pretrained("run")
assert b"".join(model.tokens("some text")) == b"some text"
assert len(model.generate("some text", 4)) > 9
assert not hasattr(model, "forecast")
"""
MEASURE = """
import blocked
from pathlib import Path
from tokenv.cli.lab import Bench, Variance
from tokenv.config.commands import Record

words = ["data.source=words", "data.words_documents=40", "data.seq_len=10"]
words += ["train.symbols=160", "train.batch_size=4", "model.width=16"]
words += ["model.heads=2", "validation.sequences=4"]
record = Record(Path("scratch"), None, "", lambda *_: None, lambda _: None)
for command, more in (
    (Bench, ["repeats=1", "rates=[0.2]"]),
    (Variance, ["estimators=[reinforce]", "draws=4", "checkpoints=1", "timings=1", "credit_draws=2", "warmup=0"]),
):
    values, names = command.read(["quick", *words, *more])
    assert command.resolve(names, values).work(record)
"""
COMPARE = """
import sys

import blocked
from pathlib import Path
sys.path.append("tests/support")
from shrunk import in_this_process
from tokenv.compare.job import Job
Job.__call__ = in_this_process
from tokenv.compare.command import compare_methods, resolve_comparison
from tokenv.compare.report.page import write_reports
from tokenv.compare.report.report_tables import print_comparison

common = {"data": {"source": "words", "words_documents": 40, "seq_len": 64, "validation": 0.2}}
common |= {"model": {"width": 16, "heads": 2}, "validation": {"sequences": 4}}
common |= {"train": {"symbols": 512, "batch_size": 4}, "hardware": {"device": "cpu"}}
values = {"base": "quick", "common": common, "seeds": [0], "bpe_vocabulary": 260, "passages": 1}
methods = {"uniform": {"agent": {"name": "uniform"}}, "random": {"agent": {"name": "random"}}}
compared = compare_methods(resolve_comparison([], values | {"methods": methods}), progress=False)
print_comparison(compared[""])
assert Path("report/report.html") in write_reports(compared, Path("report"))
assert not [name for name in sys.modules if name.startswith("tokenv.series.")]
"""


@pytest.fixture(scope="module")
def without_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project which lacks ``tokenv/series``."""
    folder = tmp_path_factory.mktemp("core") / "tokenv"
    unread = shutil.ignore_patterns(".*", "runs", "series")  # what is compiled comes along
    for name in ("tokenv", "agents", "estimators", "configs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=unread)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "blocked.py").write_text(BLOCKED)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # `.ci/run` runs it
def test_text_is_trained_used_measured_and_compared_without_series(without_series: Path) -> None:
    assert not (without_series / "tokenv" / "series").exists()
    done = run(without_series, "-c", "\n".join((TRAIN, USE, MEASURE, COMPARE)))
    assert done.returncode == 0, done.stderr
    assert "uniform" in done.stdout


@pytest.mark.slow
def test_the_tests_of_the_core_pass_without_series(without_series: Path) -> None:
    """Tests which name series are left out, and those of rooms which forecast: commands, comparisons, library."""
    files = []
    for name in FOLDERS:
        for file in sorted((without_series / "tests" / name).glob("test_*.py")):
            if not re.search(
                r"series|gymnasium|tokenv\.(cli|compare|library|lab)",
                file.read_text(),
                re.IGNORECASE,
            ):
                files.append(str(file))
    assert len(files) > 20
    done = run(without_series, "-m", "pytest", "-q", "-x", "-p", "blocked", *files)
    assert done.returncode == 0, done.stdout[-3000:]
