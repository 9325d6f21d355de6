"""A method may be called anything: Sacred, reports and the command line take every name."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import shrunk
import yaml
from comparisons import a_run
from hypothesis import example, given
from hypothesis import strategies as st

from tokenv.compare.command import parse_comparison_arguments, resolve_comparison
from tokenv.compare.comparison import LONGEST_NAME, group_into_methods
from tokenv.compare.config import CompareOptions
from tokenv.config.files import resolve

ODD = [
    "learned w=1",
    "v1.5",
    "$money",
    "8 bytes",
    "_leading",
    "[/b]",
    "py/object",
    "json://x",
    "a = b",
    "ü ≤ 1",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a comparison of methods with odd names, numbers among them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates: dict[Any, float] = {
        name: round(0.1 + place / 100, 2) for place, name in enumerate([*ODD, 8, 2.5])
    }
    methods = {name: {"agent": {"name": "uniform"}, "rate": rate} for name, rate in rates.items()}
    Path("odd.yaml").write_text(
        yaml.safe_dump({"base": "small", "seeds": [0], "methods": methods}, allow_unicode=True)
    )
    return tmp_path


def compare(*words: str) -> CompareOptions:
    updates, files = parse_comparison_arguments(words, CompareOptions)
    return resolve_comparison(files, updates)


def rates(options: CompareOptions) -> dict[str, float]:
    return {task.method: task.config.rate for task in options.make_tasks()}


def test_odd_names_from_the_command_line_to_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk.stand_ins(folder)
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    only = ["learned w=1", "v1.5", "$money", "[/b]", "py/object", "8"]
    shrunk.tokenv(
        shrunk.shrink(["compare", "with", "odd.yaml", "methods.learned w=1.rate=0.4"], only=only)
    )
    (report,) = [path.parent for path in folder.glob("runs/*/report.html")]
    with (report / "methods.csv").open(newline="") as file:
        assert {row["method"] for row in csv.DictReader(file)} == set(only)
    stored = json.loads((report / "config.json").read_text())
    assert [method["name"] for method in stored["methods"]] == [*ODD, "8", "2.5"]
    assert stored["methods"][0] == {
        "name": "learned w=1",
        "agent": {"name": "uniform"},
        "rate": 0.4,
    }
    result = json.loads((report / "run.json").read_text())["result"]
    assert {line["method"] for line in result} == set(only)


def test_sacred_prints_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shrunk.tokenv(["compare", "print_config", "with", "odd.yaml"])
    assert "learned w=1" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*ODD, "8", "2.5"])
def test_an_override_finds_its_method(folder: Path, name: str) -> None:
    before = rates(compare("odd.yaml"))
    after = rates(
        compare("odd.yaml", f"methods.{name}.rate=0.5", f"methods.{name}.train.symbols=1e6")
    )
    assert after == before | {name: 0.5}
    if name not in (
        "py/object",
        "json://x",
    ):  # jsonpickle, which reads Sacred's literals, has a use of its own for these
        literal = {name: {"rate": 0.5}}
        assert (
            rates(compare("odd.yaml", f"methods={literal!r}", f"methods.{name}.train.symbols=1e6"))
            == after
        )
    if not name.startswith("["):  # which begins a list
        assert list(rates(compare("odd.yaml", f"only={name}"))) == [name]
    assert list(rates(compare("odd.yaml", f"only={[name]!r}"))) == [name]


def test_the_longest_name_that_fits_is_meant(tmp_path: Path) -> None:
    file = tmp_path / "nested.yaml"
    file.write_text("base: small\nseeds: [0]\nmethods: {v1: {}, v1.rate=0: {}}\n")
    assert rates(compare(str(file), "methods.v1.rate=0.rate=0.5")) == {"v1": 0.2, "v1.rate=0": 0.5}
    assert rates(compare(str(file), "methods.v1.rate=0.3", "methods.new.rate=0.4")) == {
        "v1": 0.3,
        "v1.rate=0": 0.2,
        "new": 0.4,
    }


@example("=")
@given(st.text(min_size=1, max_size=12))
def test_sacred_never_meets_a_name_as_a_key(name: str) -> None:
    from sacred.config.utils import normalize_or_die

    options = CompareOptions(methods={name: {"rate": 0.3}})
    assert normalize_or_die(options.as_dict())["methods"] == [{"name": name, "rate": 0.3}]


def test_a_method_that_is_no_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("base: small\nmethods: {learned: }\n")
    with pytest.raises(
        ValueError, match=r"methods\.learned = None: expected a section of what it changes, \{\}"
    ):
        compare(str(file))


def names(*runs: tuple[str, dict[str, Any]]) -> list[str]:
    return list(
        group_into_methods(
            [a_run(folder=folder, config=resolve([], changes)) for folder, changes in runs]
        )
    )


def test_methods_of_given_runs_have_short_names() -> None:
    """What tells them apart, as briefly as it can be said; where it lies, if that would be long."""
    learned = {"agent": {"name": "learned"}}
    uniform = {"agent": {"name": "uniform"}}
    assert names(("runs/1", learned), ("runs/2", learned | {"seed": 1}), ("runs/3", uniform)) == [
        "learned",
        "uniform",
    ]
    assert names(("runs/1", learned | {"rate": 0.1}), ("runs/2", learned | {"rate": 0.3})) == [
        "learned, rate=0.1",
        "learned, rate=0.3",
    ]
    assert names(
        *((f"runs/{width}", learned | {"model": {"width": width}}) for width in (32, 64))
    ) == [
        "learned, width=32",
        "learned, width=64",
    ]
    both = [{"rate": value, "loss": {"rate": value}} for value in (0.125, 0.25)]
    assert names(*((f"runs/{i}", learned | changes) for i, changes in enumerate(both))) == [
        "learned, rate=0.125, loss.rate=0.125",
        "learned, rate=0.25, loss.rate=0.25",
    ]
    many = [
        {
            "train": {"learning_rate": rate, "agent_learning_rate": rate, "warmup_symbols": 7},
            "rate": rate,
        }
        for rate in (0.125, 0.25, 0.375)
    ]
    places = ("a/runs/1", "b/runs/1", "b/runs/2")
    short_names = names(
        *((place, learned | changes) for place, changes in zip(places, many, strict=True))
    )
    assert short_names == ["learned, a/runs/1", "learned, b/runs/1", "learned, runs/2"]
    assert all(len(name) <= LONGEST_NAME for name in short_names)
