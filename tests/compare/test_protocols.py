"""Comparisons in several protocols: what each method runs with, what is shared, tuned and tested, and the summary."""

import csv
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import shrunk
import torch
import yaml
from comparisons import a_comparison, a_method

from tokenv.cli.main import run_command
from tokenv.compare import command
from tokenv.compare.command import (
    check_methods,
    compare_methods,
    make_trials,
    resolve_comparison,
    select_best_trials,
)
from tokenv.compare.comparison import build_comparison
from tokenv.compare.config import CompareOptions
from tokenv.compare.report.aggregate import describe_result, rank_by_seed
from tokenv.compare.report.page import summary_page
from tokenv.compare.store import find_run
from tokenv.config.components import build_components
from tokenv.config.files import merge
from tokenv.config.registry import ESTIMATORS

METHODS = {
    "reinforce": {"estimator": {"name": "reinforce"}},
    "rloo": {"estimator": {"name": "rloo", "num_samples": 2}},
    "rloo K=4": {"estimator": {"name": "rloo", "num_samples": 4, "reward_only": True}},
    "rebar": {"estimator": {"name": "rebar"}, "agent": {"window": 0}},
    "straight": {"estimator": {"name": "straight"}},
    "pinned": {"train": {"agent_learning_rate": 0.5}},
    "uniform": {"agent": {"name": "uniform"}},
}


def options(settings, **values):
    return resolve_comparison(
        [], {"base": [], "methods": METHODS, "common": settings, "seeds": [0]} | values
    )


@pytest.mark.parametrize("method", METHODS)
def test_equal_decoder_passes_means_passes_are_equal_and_so_are_the_updates(tiny_settings, method):
    of = options(tiny_settings, equal_decoder_passes=True)
    plain = options(tiny_settings).make_task(method, 0).config
    equal = of.make_task(method, 0).config
    passes = build_components(equal, torch.device("meta"), read_files=False).passes
    samples = passes.learning + passes.reward_only + passes.relaxed
    assert equal.train.batch_size == plain.train.batch_size // samples
    for name, one, other in (
        ("updates", equal.train.symbols, plain.train.symbols),
        ("validations", equal.validation.every_symbols, plain.validation.every_symbols),
        ("warm-up", equal.train.warmup_symbols, plain.train.warmup_symbols),
    ):
        assert one / equal.train.batch_size == pytest.approx(
            other / plain.train.batch_size, rel=0.01
        ), name


def test_the_model_of_every_method_is_tuned(tiny_settings):
    of = options(
        tiny_settings,
        tune={"train.learning_rate": [0.1, 0.2], "loss.rate": [1.0, 2.0]},
        tune_seeds=[7],
    )
    tried = make_trials(of, None)
    assert {trial.method for trial in tried} == set(METHODS)
    assert [trial.changes for trial in tried if trial.method == "uniform"] == [
        {"train": {"learning_rate": rate}} for rate in (0.1, 0.2)
    ]


def test_what_is_tried_and_what_is_taken(tiny_settings, monkeypatch):
    """Every learning method that does not say so itself tries all values on all tuning seeds; the lowest mean wins."""
    grid = {"train.agent_learning_rate": [0.1, 0.2], "loss.rate": [1.0, 2.0, 3.0]}
    of = options(tiny_settings, tune=grid, tune_seeds=[7, 8])
    tried = make_trials(of, None)
    assert {trial.method for trial in tried} == set(METHODS) - {"uniform"}
    numbers = {method: sum(trial.method == method for trial in tried) for method in METHODS}
    assert (numbers["reinforce"], numbers["pinned"]) == (6, 3)
    assert all([task.config.seed for task in trial.tasks] == [7, 8] for trial in tried)
    assert len({task.label for trial in tried for task in trial.tasks}) == 2 * len(tried)
    folders = {task.label: Path(task.label) for trial in tried for task in trial.tasks}

    def loss(folder, _):
        """Seed 8 outweighs seed 7, at 0.2 and 3.0 together."""
        chosen = "agent_learning_rate=0.2" in str(folder) and "loss.rate=3.0" in str(folder)
        value = (0.0 if chosen else 3.0) if "seed 8" in str(folder) else (2.0 if chosen else 1.0)
        return replace(a_method("m").runs[0].evaluation, loss=[value])

    monkeypatch.setattr(command, "load_evaluation", loss)
    best = select_best_trials(tried, folders, of)
    assert best["rloo"] == {"train": {"agent_learning_rate": 0.2}, "loss": {"rate": 3.0}}
    failed = {label: None if "rate=0.2" in label else folder for label, folder in folders.items()}
    assert select_best_trials(tried, failed, of)["rloo"]["train"] == {"agent_learning_rate": 0.1}
    changed = of.make_task("rloo", 0, changes=best["rloo"]).config
    assert (changed.train.agent_learning_rate, changed.loss.rate) == (0.2, 3.0)


def test_a_protocol_changes_what_it_says(tiny_settings):
    protocols = {
        "one": {
            "skip": ["uniform"],
            "common": {"rate": 0.3},
            "methods": {"rloo": {"loss": {"rate": 9.0}}},
        },
        "two": {"seeds": [3], "only": "uniform"},
    }
    parts = options(tiny_settings, protocols=protocols).split_protocols()
    assert list(parts) == ["one", "two"]
    one, two = parts.values()
    assert set(one.selected_methods) == set(METHODS) - {"uniform"}
    assert list(two.selected_methods) == ["uniform"]
    assert {task.config.seed for task in two.make_tasks()} == {3}
    rloo = one.make_task("rloo", 0).config
    assert (rloo.rate, rloo.loss.rate, rloo.estimator["num_samples"]) == (0.3, 9.0, 2)
    assert rloo.data.seq_len == tiny_settings["data"]["seq_len"]
    only = options(tiny_settings, protocols=protocols, only_protocols="two").split_protocols()
    assert list(only) == ["two"]
    assert list(options(tiny_settings).split_protocols()) == [""]
    skipping = {"one": {}, "two": {"skip": ["rloo"]}}
    assert list(options(tiny_settings, protocols=skipping, only=["rloo"]).split_protocols()) == [
        "one"
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"protocols": {"a": {"sead": [1]}}}, r"protocols\.a: unknown key sead"),
        ({"protocols": {"a": 3}}, r"protocols\.a = 3: expected a section"),
        ({"protocols": {"a": {"seeds": []}}}, r"^seeds = \[\]: expected at least one"),
        (
            {"only_protocols": "b", "protocols": {"a": {}}},
            "only_protocols names 'b', which is no protocol: known are a",
        ),
        (
            {"protocols": {"a": {"skip": "uniform"}}, "only": "uniform"},
            "skip leaves out all of these in every protocol",
        ),
        ({"skip": "b"}, "skip names 'b', which is no method"),
        ({"reference": "b"}, "reference names 'b', which is no method"),
        ({"tune": {"rate": 0.2}}, r"tune\.rate = 0\.2: expected a list of values"),
        ({"tune": {"rate": []}}, r"tune\.rate = \[\]: expected a list of values"),
        ({"tune": {"rate": [0.2]}, "tune_seeds": []}, r"^tune_seeds = \[\]: expected at least one"),
        ({"tune": {"rate": [0.2]}, "tune_seeds": [0]}, "have 0 in common"),
        ({"tune": {"rait": [0.2]}}, "unknown key"),
        ({"tune": {"rate": [2.0]}}, "rate = 2.0"),
        ({"pretrain": {"rait": 0.2}}, "pretrain: unknown key"),
        ({"protocols": {"a": {"common": {"rait": 0.2}}}}, "unknown key"),
    ],
)
def test_mistakes_are_reported_before_work_starts(tiny_settings, values, message):
    with pytest.raises(ValueError, match=message):
        check_methods(options(tiny_settings, **values))


def test_holm_counts_the_pairs_that_are_asked_for():
    methods = {name: a_method(name, 2 + place / 10).runs for place, name in enumerate("abcd")}
    every = build_comparison(methods, "", {})
    some = build_comparison(methods, "", {}, reference="b")
    assert all(np.isfinite(difference.p_holm) for difference in every.differences.values())
    counted = {
        pair for pair, difference in some.differences.items() if np.isfinite(difference.p_holm)
    }
    assert counted == {pair for pair in some.differences if "b" in pair}
    assert len(counted) == 3
    (sentence,) = [
        line
        for line in describe_result(some)
        if line.startswith("Against b, after Holm's correction for 3 pairs")
    ]
    named = {name for name in "acd" if f"{name} " in sentence.partition(":")[2].replace(",", " ")}
    separable = {pair for pair in counted if some.differences[pair].p_holm < 0.05}
    assert named == {name for pair in separable for name in pair if name != "b"}
    assert not [line for line in describe_result(every) if line.startswith("Against")]
    for pair, difference in some.differences.items():
        assert replace(difference, p_holm=0) == replace(every.differences[pair], p_holm=0)


def test_ranks_are_seed_by_seed():
    better = a_method("better", 1.0)
    crossing = replace(
        better, name="crossing", runs=[a_method("", 2.0).runs[0], a_method("", 0.5).runs[1]]
    )
    ranks = rank_by_seed(a_comparison([better, crossing, a_method("worse", 3.0)]))
    assert {name: list(row) for name, row in ranks.iterrows()} == {
        "better": [1, 2],
        "crossing": [2, 1],
        "worse": [3, 3],
    }
    ranks = rank_by_seed(
        a_comparison([better, replace(better, name="other", runs=better.runs[:1])])
    )
    assert {name: list(row) for name, row in ranks.iterrows()} == {"better": [1.5], "other": [1.5]}


@pytest.fixture
def place(tiny_settings, tmp_path, monkeypatch):
    """Return a folder with a comparison in two protocols, the second of which starts frozen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    values = {
        "base": "tiny.yaml",
        "seeds": [0, 1],
        "tune_seeds": [100],
        "methods": {
            "reinforce": {},
            "rloo": {"estimator": {"name": "rloo"}},
            "uniform": {"agent": {"name": "uniform"}},
        },
        "reference": "reinforce",
        "calibrate": True,
        "bpe_vocabulary": 260,
        "passages": 1,
        "pretrain": {"agent": {"name": "random_rate"}},
        "protocols": {
            "both learn": {"common": {"validation": {"calibrate": True}}},
            "policy alone": {
                "skip": "uniform",
                "common": {"freeze_lm": True, "agent": {"zero_init": True}},
                "equal_decoder_passes": True,
                "tune": {"train.agent_learning_rate": [0.001, 0.1]},
            },
        },
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


class Links(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name == "href"]


def stored(folder):
    records = {path.parent: json.loads(path.read_text()) for path in folder.glob("runs/*/run.json")}
    return [path for path, run in records.items() if run["experiment"]["name"] == "tokenv-train"]


def test_from_nothing_to_the_summary_and_again(place):
    first = run_command("compare", ["with", "two.yaml"])
    assert [(entry["protocol"], entry["method"]) for entry in first] == [
        *(("both learn", name) for name in ("reinforce", "rloo", "uniform")),
        *(("policy alone", name) for name in ("reinforce", "rloo")),
    ]
    runs = stored(place)
    # the shared one, those tried, and both protocols' own
    assert len(runs) == 1 + 2 * 2 + 2 * 3 + 2 * 2
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    starts = {config["init_from"] for config in configs}
    assert len(starts) == 2  # the shared run's own is none
    assert sum(config["freeze_lm"] for config in configs) == 8

    (page,) = place.glob("runs/*/report.html")
    links = set(Links(page.read_text()).found)
    assert links == {"1-both-learn-report.html", "2-policy-alone-report.html"}
    assert all((page.parent / link).is_file() for link in links)
    with (page.parent / "summary.csv").open(newline="") as file:
        rows = {(row["protocol"], row["method"]): row for row in csv.DictReader(file)}
    assert {key: float(row["loss"]) for key, row in rows.items()} == {
        (entry["protocol"], entry["method"]): entry["loss"] for entry in first
    }
    calibrated = {
        key: float(row["loss_raw"]) != float(row["loss"])
        for key, row in rows.items()
        if row["loss_raw"] != "nan"
    }
    assert set(calibrated) == {key for key in rows if key[1] != "uniform"}
    assert any(calibrated.values())
    for key, row in rows.items():
        assert float(row["area"]) > 0
        assert 0 <= float(row["f1"]) <= 1
        assert (row["p_holm"] != "") == (key[1] != "reinforce")
        if key[1] != "uniform":
            assert float(row["boundary_rate"]) == pytest.approx(0.2, abs=0.05)

    assert run_command("compare", ["with", "two.yaml", "only_protocols=both learn"]) == [
        {key: value for key, value in entry.items() if key != "protocol"}
        | {"protocol": "both learn"}
        for entry in first
        if entry["protocol"] == "both learn"
    ]
    assert len(stored(place)) == len(runs)


@pytest.mark.slow
def test_a_third_partys_estimator_is_one_more_line(place, monkeypatch):
    """It is tuned as the others were, runs in every protocol, and the table says where it stands."""
    monkeypatch.syspath_prepend(str(place))
    Path("mytrick.py").write_text(
        "from tokenv.estimators import Discount, EarlyExit, LeaveOneOutBatch, ScoreFunction, chain\n\n\n"
        "def mine():\n    return chain(EarlyExit(), Discount(0.5), LeaveOneOutBatch(), ScoreFunction())\n"
    )
    of = resolve_comparison(
        ["two.yaml"],
        {
            "methods": {"mine": {"estimator": {"name": "mytrick:mine"}}},
            "only": ["mine", "reinforce"],
        },
    )
    check_methods(of)
    comparisons = compare_methods(of, progress=False)
    assert [
        [method.name for method in comparison.methods] for comparison in comparisons.values()
    ] == [
        ["reinforce", "mine"],
        ["reinforce", "mine"],
    ]
    page = summary_page(comparisons, dict.fromkeys(comparisons, "x.html"), "reinforce")
    assert page.count(">mine</th>") == 1
    assert "mine and reinforce are not separable" in page or "mine is " in page


def test_a_method_of_another_model_starts_from_one_of_its_own(tiny_settings):
    """As long, as seeded and with the same agent; all others share one."""
    methods = METHODS | {"wide": {"model": {"window": 16}, "agent": {"name": "uniform"}}}
    of = options(tiny_settings, methods=methods, pretrain={"agent": {"name": "random_rate"}})
    configs = {method: task.config for method, task in of.make_pretraining_tasks().items()}
    assert configs.keys() == methods.keys()
    plain = configs["uniform"]
    wide = configs.pop("wide")
    assert all(config == plain for config in configs.values())
    assert wide.model == replace(plain.model, window=16)
    assert replace(wide, model=plain.model) == plain
    starts = {method: Path(f"runs/{number}") for number, method in enumerate(methods)}
    started = []
    with pytest.MonkeyPatch.context() as patch:
        remember = lambda _, method, seed, *, start, changes: started.append((method, start))  # noqa: E731
        patch.setattr(CompareOptions, "make_task", remember)
        list(of.make_tasks(starts))
    assert started == list(starts.items())
    assert options(tiny_settings).make_pretraining_tasks() == {}


def test_the_shared_run_that_fails_is_named(place):
    of = resolve_comparison(["two.yaml"], {"pretrain": {"train": {"learning_rate": 1e30}}})
    with pytest.raises(Exception, match="a run that methods start from failed: step"):
        compare_methods(of, progress=False)


def test_every_method_of_the_shipped_benchmark_fits():
    """It has all estimators which come along, and none is rejected."""
    of = resolve_comparison(["compare-estimators"], {})
    check_methods(of)
    used = {
        task.config.estimator["name"]
        for part in of.split_protocols().values()
        for task in part.make_tasks()
    }
    assert set(ESTIMATORS) - used == {"path"}  # H-Net's own, whose model pools otherwise
    assert isinstance(of, CompareOptions)
    assert (
        find_run(
            of.split_protocols()["A-words"].make_pretraining_task("uniform").config, Path("nowhere")
        )
        is None
    )
    assert merge({}, of.protocols).keys() == {"A-words", "A-python", "B-words", "B-python"}
