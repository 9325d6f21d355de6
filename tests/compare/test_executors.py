"""All executors give the same table, train nothing twice, and go on with killed runs."""

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import shrunk
import yaml
from filelock import FileLock

from tokenv.cli.main import run_command
from tokenv.compare.command import compare_methods, resolve_comparison
from tokenv.compare.config import CompareOptions
from tokenv.compare.executors import check_executor
from tokenv.compare.job import JobResult
from tokenv.compare.locks import LOCKS
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import stored_runs
from tokenv.core.errors import RunFailedError, UserError

LONG = {"train": {"symbols": 20_000}}  # a run that can be met while it trains
ENDLESS = {"train": {"symbols": 10**9}, "checkpoint": {"every_symbols": 10**9}}


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Yield the address of a dask scheduler with two worker processes."""
    distributed = pytest.importorskip("distributed", reason="needs tokenv[dask]")
    how = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**how) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def place(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a comparison file in a folder of its own, which holds the store, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    (tmp_path / "slurm.yaml").write_text("cluster: local\ntimeout_min: 10\n")
    (tmp_path / "broken.py").write_text(
        "from tokenv.agents.fixed import Uniform\n\n\nclass Broken(Uniform):\n"
        "    def draw(self, observation, noise):\n        raise OSError('the disk is full')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
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


@pytest.fixture(params=["local", "dask", "slurm"])
def executor(request: pytest.FixtureRequest, place: Path) -> str:
    """Return the value of ``executor=``."""
    if request.param == "dask":
        return f"dask:{request.getfixturevalue('scheduler')}"
    if request.param == "slurm":
        pytest.importorskip("submitit", reason="needs tokenv[slurm]")
        return f"slurm:{place / 'slurm.yaml'}"
    return "local"


def options(executor: str, **changes: Any) -> CompareOptions:
    return resolve_comparison(["both.yaml"], {"executor": executor, **changes})


def table(of: CompareOptions) -> dict[str, Any]:
    """Return all results of every method except those which depend on clocks."""
    (comparison,) = compare_methods(of, progress=False).values()
    assert comparison.failed == {}
    return {
        method.name: [
            (
                run.evaluation.loss,
                run.evaluation.boundary_rate,
                {
                    name: values
                    for name, values in run.history.items()
                    if name != "train/symbols_per_second"
                },
            )
            for run in method.runs
        ]
        for method in comparison.methods
    }


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def nothing_is_left(store: Path) -> bool:
    """Return whether no lock is held and there are no temporary folders."""
    for path in store.glob(f"{LOCKS}/*"):
        FileLock(path).acquire(blocking=False).lock.release()
    return [path.name for path in store.glob(".*")] == [LOCKS]


@pytest.fixture(scope="module")
def of_local() -> dict[str, Any]:
    """Return a dictionary for the local comparison's table, which the first test that needs it fills."""
    return {}


@pytest.mark.slow
def test_every_executor_gives_the_same_table(
    executor: str, place: Path, of_local: dict[str, Any]
) -> None:
    """Check that a second comparison trains nothing, and that a failed run does not stop the others."""
    broken = {"broken": {"agent": {"name": "broken:Broken"}}}
    of = options(executor, methods=broken)
    folders, failed = run_all(list(of.make_tasks()), of, progress=False)
    assert failed == {"broken, seed 0": "OSError: the disk is full"}
    assert [folder is None for folder in folders] == [False, False, True]
    trained = len(list(stored_runs(place / "runs")))
    of_local |= (
        {} if of_local else table(options("local", store="runs" if executor == "local" else "here"))
    )
    assert table(options(executor)) == of_local
    # nobody is asked where nothing is missing
    assert table(options("dask:127.0.0.1:1")) == of_local
    assert len(list(stored_runs(place / "runs"))) == trained
    assert nothing_is_left(place / "runs")


def at_work(store: Path) -> list[psutil.Process]:
    """Return the processes which train a run that has saved a checkpoint."""
    if not list(store.glob("*/checkpoints/step-*")):
        return []
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "job" in process.cmdline() and str(store) in process.cmdline()[-1]:
                processes.append(process)
    return processes


@pytest.mark.slow
def test_a_killed_worker_is_gone_on_with(executor: str, place: Path) -> None:
    """Kill a worker with its children, as when a machine fails, and compare the outcome with an undisturbed one."""
    changes = {"only": ["learned"], "common": LONG}
    alone = table(options("local", store="alone", **changes))

    def kill() -> None:
        wait_until(lambda: at_work(place / "runs"))
        (worker,) = at_work(place / "runs")
        if executor != "local":
            worker = worker.parent()  # type: ignore[assignment]
        for process in (worker, *worker.children(recursive=True)):
            process.kill()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        finished = table(options(executor, **changes))
        killed.result()
    assert finished == alone
    runs = list(stored_runs(place / "runs"))
    assert sorted(run.status for run in runs) == ["COMPLETED", "RUNNING"]
    newest = next(run for run in runs if run.finished)
    assert json.loads((newest.folder / "config.json").read_text())["resume"]
    assert nothing_is_left(place / "runs")


@pytest.mark.slow
def test_a_preempted_job_saves_and_is_gone_on_with(place: Path) -> None:
    """Send Slurm's warning before preemption or the time limit: nothing is trained twice."""
    pytest.importorskip("submitit", reason="needs tokenv[slurm]")
    changes = {"only": ["learned"], "common": LONG}
    alone = table(options("local", store="alone", **changes))

    def preempt() -> None:
        wait_until(lambda: at_work(place / "runs"))
        (trainer,) = at_work(place / "runs")
        job = trainer.parent()
        assert job is not None
        for process in (job, *job.children(recursive=True)):
            process.send_signal(signal.SIGUSR2)

    with ThreadPoolExecutor(1) as pool:
        preempted = pool.submit(preempt)
        finished = table(options("slurm:slurm.yaml", **changes))
        preempted.result()
    assert finished == alone
    assert sorted(run.status for run in stored_runs(place / "runs")) == ["COMPLETED", "INTERRUPTED"]
    assert nothing_is_left(place / "runs")


SLURM = {
    "sbatch": """
import os, pathlib, subprocess, sys
number = len(list(here.glob("job-*"))) + 1
batch = sys.argv[-1]
environment = os.environ | {"SLURM_JOB_ID": str(number)}
batch = pathlib.Path(batch).read_text()
job = subprocess.Popen(["bash", "-c", batch], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(here / f"job-{number}").write_text(batch)
print(f"Submitted batch job {number}")
""",
    "srun": """
import os, sys
words = sys.argv[1:]
words = words[words.index("--error") + 2 :]
os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"}
os.execvp(words[0], words)
""",
    "sacct": """
import sys
print("JobID|State|NodeList")
for path in here.glob("job-*"):
    print(f"{path.name[4:]}|RUNNING|here")
""",
}


@pytest.mark.slow
def test_jobs_go_through_slurms_own_commands(
    place: Path, monkeypatch: pytest.MonkeyPatch, of_local: dict[str, Any]
) -> None:
    """Replace the commands by programs which only answer submitit: jobs are submitted as the file says."""
    pytest.importorskip("submitit", reason="needs tokenv[slurm]")
    (place / "bin").mkdir()
    for name, program in SLURM.items():
        path = place / "bin" / name
        path.write_text(
            f"#!{sys.executable}\nimport pathlib\nhere = pathlib.Path({str(place)!r})\n{program}"
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=":")
    (place / "gpu.yaml").write_text("partition: gpu\ntimeout_min: 90\n")
    of_local |= {} if of_local else table(options("local", store="here"))
    assert table(options("slurm:gpu.yaml")) == of_local
    batches = [path.read_text() for path in place.glob("job-*")]
    assert len(batches) == 2
    for line in ("#SBATCH --partition=gpu", "#SBATCH --time=90", "#SBATCH --job-name=tokenv"):
        assert all(line in batch for batch in batches)


@pytest.mark.slow
def test_two_comparisons_with_different_executors_train_each_run_once(
    executor: str, place: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(table, options(kind, common=LONG)) for kind in (executor, "local")]
        one, other = (each.result() for each in both)
    assert one == other
    assert len(list(stored_runs(place / "runs"))) == 2
    assert nothing_is_left(place / "runs")


@pytest.mark.slow
def test_ctrl_c_saves_what_goes_on_and_drops_what_waits(executor: str, place: Path) -> None:
    of = options(executor, common=ENDLESS, seeds=[0, 1])
    begun = 4 if executor.startswith("slurm") else 2

    def under_way() -> bool:
        metrics = [path.read_text() for path in place.glob("runs/*/metrics.json")]
        return sum("train/flops" in text for text in metrics) == begun

    def press() -> None:
        wait_until(under_way, 240)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
            run_all(list(of.make_tasks()), of, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    runs = list(stored_runs(place / "runs"))
    assert [run.status for run in runs] == ["INTERRUPTED"] * begun
    assert all(run.is_resumable for run in runs)
    assert nothing_is_left(place / "runs")
    if executor.startswith("dask"):  # its workers are free again
        assert table(options(executor, seeds=[2])) != {}


@pytest.mark.parametrize(
    ("executor", "file", "message"),
    [
        ("ray", "", "executor = 'ray': expected local, dask:ADDRESS"),
        ("dask:", "", "executor = 'dask:': expected local, dask:ADDRESS"),
        ("dask:carrier://pigeon", "", "no scheduler answers there \\(unknown address scheme"),
        ("slurm:none.yaml", "", "no such file"),
        ("slurm:it.yaml", "- a", "it.yaml: expected a mapping"),
        ("slurm:it.yaml", "a: [", "it.yaml: not valid YAML"),
        ("slurm:it.yaml", "cluster: pbs", "cluster = 'pbs': expected slurm or local"),
        ("slurm:it.yaml", "cluster: local\ntimeout_min: soon", "timeout_min.*soon"),
        ("slurm:it.yaml", "cluster: local\npartitoin: gpu", "local_partitoin"),
        ("slurm:it.yaml", "partition: gpu", 'Could not detect "srun"'),
    ],
)
def test_a_wrong_executor_is_reported_before_work_starts(
    executor: str, file: str, message: str, place: Path
) -> None:
    for package in ("distributed", "submitit"):
        pytest.importorskip(package)
    (place / "it.yaml").write_text(file)
    with pytest.raises(UserError, match=message):
        run_command("compare", ["with", "both.yaml", f"executor={executor}"])
    assert not (place / "runs").exists()


def test_a_run_that_only_others_can_read_has_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", lambda _: JobResult("finished", "99"))
    monkeypatch.setattr("tokenv.compare.scheduler.VISIBLE_SECONDS", 0)
    of = options("local", only=["uniform"])
    folders, failed = run_all(list(of.make_tasks()), of, progress=False)
    assert folders == [None]
    assert "runs/99 is said to be finished, but cannot be read here" in failed["uniform, seed 0"]


def test_a_run_that_is_lost_every_time_has_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tokenv.compare.job.Job.__call__", lambda _: JobResult("lost", "killed by signal 9")
    )
    of = options("local", only=["uniform"])
    failed = {"uniform, seed 0": "killed by signal 9, 3 times in a row"}
    assert run_all(list(of.make_tasks()), of, progress=False) == ([None], failed)


def test_a_scheduler_that_is_gone_ends_the_comparison(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: CompareOptions) -> None:
        raise UserError("no scheduler answers")

    monkeypatch.setattr(
        "tokenv.compare.job.Job.__call__", lambda _: JobResult("lost", "killed by signal 9")
    )
    monkeypatch.setattr("tokenv.compare.scheduler.check_executor", refuse)
    of = options("local", only=["uniform"])
    with pytest.raises(RunFailedError, match="no scheduler answers; the same command goes on"):
        run_all(list(of.make_tasks()), of, progress=False)
    assert not list((place / "runs").glob(".*"))


def test_the_documents_file_is_one_for_slurm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="needs tokenv[slurm]")
    (place / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    text = (shrunk.ROOT / "docs" / "scale.md").read_text()
    (block,) = re.findall(r"```\n(partition: .*?)```", text, re.DOTALL)
    (place / "a100.yaml").write_text(block)
    check_executor(options("slurm:a100.yaml"))
    (place / "a100.yaml").write_text(block.replace("partition", "partitoin"))
    with pytest.raises(UserError, match="partitoin"):
        check_executor(options("slurm:a100.yaml"))


def test_an_address_without_a_scheduler_is_reported_soon(place: Path) -> None:
    """Check an address where a server listens which says nothing."""
    pytest.importorskip("distributed", reason="needs tokenv[dask]")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(UserError, match=f"dask:127.0.0.1:{port}': no scheduler answers there"):
            run_command("compare", ["with", "both.yaml", f"executor=dask:127.0.0.1:{port}"])
    assert time.monotonic() - started < 60
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("executor", "package"), [("dask:a:1", "distributed"), ("slurm:slurm.yaml", "submitit")]
)
def test_an_extra_that_is_missing_is_named(
    executor: str, package: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"takes the package {package} .*pip install 'tokenv\[{executor[:4]}"
    ):
        run_command("compare", ["with", "both.yaml", f"executor={executor}"])
    assert not (place / "runs").exists()
