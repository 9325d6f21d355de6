"""Every configuration that comes with tokenv runs, through the command that it is for, as a user starts it."""

import csv
import json
from pathlib import Path

import pytest
import shrunk

OF_BENCH = {"bench-d256"}
OF_COMPARISONS = {name for name in shrunk.CONFIGS if "methods" in shrunk.content(name)}
OF_PROTOCOLS = {name for name in OF_COMPARISONS if "protocols" in shrunk.content(name)}
OF_RUNS = set(shrunk.CONFIGS) - OF_COMPARISONS - OF_BENCH


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the data which shrunk lines read and caches of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shrunk.stand_ins(tmp_path)
    return tmp_path


def stored(folder: Path, experiment: str) -> list[Path]:
    """Folders of all completed runs of an experiment."""
    folders = []
    for path in folder.glob("runs/*/run.json"):
        record = json.loads(path.read_text())
        if record["experiment"]["name"] == experiment:
            assert record["status"] == "COMPLETED"
            folders.append(path.parent)
    return folders


def methods_in_report(folder: Path) -> set[str]:
    (report,) = stored(folder, "tokenv-compare")
    assert (report / "report.html").stat().st_size > 10_000
    with (report / "methods.csv").open(newline="") as file:
        return {row["method"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", sorted(OF_RUNS))
def test_a_run_trains(name: str, folder: Path) -> None:
    shrunk.tokenv(shrunk.shrink(["train", "with", name]))
    (run,) = stored(folder, "tokenv-train")
    assert {"curves.png", "metrics.json", "checkpoints"} <= {path.name for path in run.iterdir()}


@pytest.mark.parametrize("name", sorted(OF_BENCH))
def test_a_bench_measures(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shrunk.tokenv(shrunk.shrink(["bench", "with", name]))
    assert "bytes per second" in capsys.readouterr().out
    assert not (folder / "runs").exists()


def check_comparison(name: str, folder: Path, only: list[str] | None) -> None:
    """Every method is in the report, each of one run."""
    shrunk.tokenv(shrunk.shrink(["compare", "with", name], only=only))
    settings = shrunk.content(name)
    methods = set(only or settings["methods"])
    assert methods_in_report(folder) == methods
    models = (
        {str(settings["methods"][method].get("model")) for method in methods}
        if settings.get("pretrain")
        else ()
    )
    assert len(stored(folder, "tokenv-train")) == len(methods) + len(models)


# The models of released-sizes are large: the slow test below has it.
@pytest.mark.parametrize("name", sorted(OF_COMPARISONS - OF_PROTOCOLS - {"released-sizes"}))
def test_a_comparison_compares_its_first_and_last_method(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    first, *_, last = shrunk.content(name)["methods"]
    check_comparison(name, folder, [first, last])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_COMPARISONS - OF_PROTOCOLS))
def test_a_comparison_compares_all_methods(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    check_comparison(name, folder, None)


def check_protocol(name: str, folder: Path, protocol: str) -> None:
    """Return the last method of one protocol of several."""
    *_, last = shrunk.content(name)["methods"]
    shrunk.tokenv(
        [*shrunk.shrink(["compare", "with", name], only=[last]), f"only_protocols=[{protocol}]"]
    )
    assert methods_in_report(folder) == {last}


def check_protocols(name: str, folder: Path, only: list[str] | None) -> None:
    """Every protocol has all of its methods in the summary, and a report of its own."""
    shrunk.tokenv(shrunk.shrink(["compare", "with", name], only=only))
    settings = shrunk.content(name)
    (report,) = stored(folder, "tokenv-compare")
    assert len(list(report.glob("*-report.html"))) == len(settings["protocols"])
    reported: dict[str, set[str]] = {}
    with (report / "summary.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            reported.setdefault(row["protocol"], set()).add(row["method"])
    methods = set(only or settings["methods"])
    assert reported == {
        protocol: methods - set(of.get("skip", ()))
        for protocol, of in settings["protocols"].items()
    }


def test_protocols_compare_some_methods(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    check_protocols("compare-estimators", folder, ["rloo", "uniform"])


def test_a_horizon_of_the_table_is_forecast(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    check_protocol("compare-ett", folder, "96")
    (report,) = stored(folder, "tokenv-compare")
    with (report / "forecasts.csv").open(newline="") as file:
        assert {"dlinear", "last value", "mean"} < {
            row["forecaster"] for row in csv.DictReader(file)
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_PROTOCOLS))
def test_protocols_compare_all_methods(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    check_protocols(name, folder, None)


def test_the_readmes_comparison_runs_its_processes(folder: Path) -> None:
    """Two of its methods, each trained in a process of its own, both at a time."""
    methods = ["uniform", "learned w=1"]
    shrunk.tokenv(shrunk.shrink(["compare", "with", "compare-quick", "jobs=2"], only=methods))
    assert methods_in_report(folder) == set(methods)
    assert len(stored(folder, "tokenv-train")) == 2


def test_the_smallest_configuration_can_be_cut_to_nothing_but_fewer_bytes(folder: Path) -> None:
    """A warm-up longer than the run is no obstacle; what is left of the line is the user's own."""
    line = [
        "train",
        "with",
        "small",
        "train.symbols=100000",
        f"data.source={shrunk.TEXTS}",
        "validation.sequences=8",
    ]
    shrunk.tokenv(line)
    (run,) = stored(folder, "tokenv-train")
    rates = json.loads((run / "metrics.json").read_text())["train/learning_rate"]
    peak = rates["values"].index(max(rates["values"]))
    assert rates["steps"][peak] == pytest.approx(10_000, abs=4096)
    assert max(rates["values"]) == pytest.approx(3e-3, rel=0.01)
