"""One contract for all executors: the same table, nothing trained twice, and what is killed is gone on with."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenv.compare.command import compare_methods
from tokenv.compare.options import CompareOptions
from tokenv.compare.reading import resolve_comparison
from tokenv.compare.store import stored_runs

KINDS = ("local", "dask", "slurm")
SLOW = 40_000  # symbols of a run that is to be met while it trains


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of one, with two workers in processes of their own."""
    distributed = pytest.importorskip("distributed", reason="needs tokenv[dask]")
    # dask sets one thread a worker, as we do
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def place(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comparison file, in a folder of its own that is also the store's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    (tmp_path / "slurm.yaml").write_text("cluster: local\ntimeout_min: 10\n")
    values = {
        "base": "tiny.yaml",
        "seeds": [0],
        "jobs": 2,
        "methods": {"uniform": {"agent": {"name": "uniform"}}, "learned": {}},
        "bpe_vocabulary": 260,
        "passages": 1,
    }
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


@pytest.fixture(params=KINDS)
def executor(request: pytest.FixtureRequest, place: Path) -> str:
    """What follows ``executor=``."""
    if request.param == "dask":
        return f"dask:{request.getfixturevalue('scheduler')}"
    if request.param == "slurm":
        pytest.importorskip("submitit", reason="needs tokenv[slurm]")
        return f"slurm:{place / 'slurm.yaml'}"
    return "local"


def options(executor: str, **changes: Any) -> CompareOptions:
    return resolve_comparison(["both.yaml"], {"executor": executor, **changes})


def table(of: CompareOptions) -> dict[str, Any]:
    (comparison,) = compare_methods(of, progress=False).values()
    assert comparison.failed == {}
    return {
        method.name: [(run.assessment.loss, run.assessment.boundary_rate, run.config.seed) for run in method.runs]
        for method in comparison.methods
    }


def test_every_executor_gives_the_same_table(executor: str, place: Path) -> None:
    found = table(options(executor))
    assert len(list(stored_runs(place / "runs"))) == 2
    assert {path.name for path in place.glob("runs/.*")} == set()  # neither claims nor scratch
    if executor != "local":
        assert table(options("local", store="here")) == found
    before = time.monotonic()
    assert table(options(executor)) == found
    assert len(list(stored_runs(place / "runs"))) == 2, f"trained twice, {time.monotonic() - before}"
