"""Comparisons: what is run, what is found again, what is measured, and what goes wrong."""

import csv
import itertools
import json
import signal
import threading
import time
from dataclasses import asdict, fields, replace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from shrunk import in_this_process

from tokenv.cli.compare import Compare
from tokenv.cli.main import run_command
from tokenv.cli.train_command import Train
from tokenv.compare.command import load_compared_run, resolve_comparison
from tokenv.compare.comparison import group_into_methods
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.job import Job
from tokenv.compare.run_evaluation import (
    Agreement,
    RunEvaluation,
    _owner,
    evaluate_run,
    load_evaluation,
    token_lengths,
)
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import find_run, finished_run, read_run, same_runs
from tokenv.config.files import (
    COMMAND_OPTIONS,
    flatten,
    load_yaml,
    merge,
    named_configs,
    read_yaml,
    resolve,
)
from tokenv.core import checkpoints
from tokenv.core.checkpoints import write_json
from tokenv.core.conversion import from_dict
from tokenv.data.kinds import Text


@pytest.fixture
def comparison(tiny_settings, tmp_path, monkeypatch):
    """Create a comparison file in a folder of its own, which holds the store, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    values = {
        "base": "tiny.yaml",
        "seeds": [0],
        "methods": {"uniform": {"agent": {"name": "uniform"}}, "learned": {}},
        "bpe_vocabulary": 260,
        "passages": 2,
    }
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def train(**changes):
    words = [f"{key}={value}" for key, value in flatten(changes).items()]
    run_command("train", ["with", "tiny.yaml", *words])


def test_from_nothing_to_the_report_and_again(comparison, capsys, monkeypatch):
    """One run is there already, one is trained; a second comparison trains nothing and says the same."""
    monkeypatch.setattr(Job, "__call__", in_this_process)
    train(agent={"name": "uniform"})
    first = run_command("compare", ["with", "both.yaml"])
    assert {losses["method"] for losses in first} == {"uniform", "learned"}
    assert "uniform" in capsys.readouterr().out
    statuses = {
        path.parent.name: json.loads(path.read_text())["experiment"]["name"]
        for path in runs(comparison)
    }
    assert sorted(statuses.values()) == ["tokenv-compare", "tokenv-train", "tokenv-train"]
    (report,) = comparison.glob("runs/*/report.html")
    assert "learned" in report.read_text()
    with (report.parent / "methods.csv").open() as rows:
        losses = {row["method"]: float(row["bits_per_byte"]) for row in csv.DictReader(rows)}
    assert losses == pytest.approx({one["method"]: one["loss"] for one in first})

    assert run_command("compare", ["with", "both.yaml", "store=runs", "-F", "elsewhere"]) == first
    assert len(runs(comparison)) == 3
    trained = [
        str(path.parent)
        for path in runs(comparison)
        if statuses[path.parent.name] == "tokenv-train"
    ]
    again = run_command(
        "compare", ["with", f"runs={trained}", "passages=2", "bpe_vocabulary=260", "-u"]
    )
    assert sorted(again, key=str) == sorted(first, key=str)


def runs(folder):
    return sorted(folder.glob("runs/*/run.json"))


def test_a_failed_run_does_not_stop_the_others(comparison):
    (comparison / "broken.py").write_text(
        "from tokenv.agents.fixed import Uniform\n\n\nclass Broken(Uniform):\n"
        "    def draw(self, observation, noise):\n        raise OSError('the disk is full')\n"
    )
    changes = {"methods": {"broken": {"agent": {"name": "broken:Broken"}}}, "jobs": 2}
    options = resolve_comparison(["both.yaml"], changes)
    tasks = [task for task in options.make_tasks() if task.method in ("broken", "uniform")]
    folders, failed = run_all(tasks, options, progress=False)
    assert [folder is not None for folder in folders] == [True, False]
    assert failed == {"broken, seed 0": "OSError: the disk is full"}


@pytest.mark.slow
def test_ctrl_c_saves_the_runs_that_are_going_on(comparison):
    """Both runs end as interrupted, with a checkpoint to go on from, though each would take an hour."""
    endless = {
        "jobs": 2,
        "common": {"train": {"symbols": 10**9}, "checkpoint": {"every_symbols": 10**9}},
    }
    options = resolve_comparison(["both.yaml"], endless)

    def under_way():
        metrics = [path.read_text() for path in comparison.glob("runs/*/metrics.json")]
        return sum("train/flops" in text for text in metrics) == 2

    def press():
        until = time.monotonic() + 240
        while time.monotonic() < until and not under_way():
            time.sleep(1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
            run_all(list(options.make_tasks()), options, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    for task in options.make_tasks():
        run = find_run(task.config, comparison / "runs")
        assert run.status == "INTERRUPTED"
        assert run.is_resumable


def test_runs_are_found_by_what_they_are(comparison, tiny_settings):
    config = resolve([], merge(tiny_settings, {"agent": {"name": "uniform"}}))
    store = comparison / "runs"
    assert find_run(config, store) is None
    train(agent={"name": "uniform"}, checkpoint={"keep": 1})
    stored_run = find_run(config, store)
    assert stored_run.finished
    assert stored_run.folder == store / "1"
    assert stored_run.config.identity() == config.identity()
    assert (
        find_run(
            resolve([], merge(tiny_settings, {"agent": {"name": "uniform"}, "seed": 1})), store
        )
        is None
    )

    def set_status(status):
        record = json.loads((store / "1" / "run.json").read_text())
        (store / "1" / "run.json").write_text(json.dumps(record | {"status": status}))

    set_status("QUEUED")
    assert find_run(config, store) is None
    set_status("FAILED")
    assert find_run(config, store).is_resumable
    set_status("INTERRUPTED")
    assert find_run(config, store).is_resumable
    set_status("RUNNING")  # killed, for one who holds its lock
    assert find_run(config, store).is_resumable
    assert [run.folder for run in same_runs(config, store)] == [store / "1"]
    (store / "1" / "run.json").write_text("{")
    assert find_run(config, store) is None


def test_a_stored_run_is_read_whatever_options_its_command_has(comparison):
    stored = {field.name for field in fields(Train)} - {"config"}
    assert stored == set(COMMAND_OPTIONS)
    run_command("train", ["with", "tiny.yaml", "agent.name=uniform", "title=Ours"])
    assert read_run(comparison / "runs" / "1").finished
    assert read_yaml(comparison / "runs" / "1" / "config.json")["agent"]["name"] == "uniform"


def keep_values(content, folder):
    """Store any values as an evaluation with a valid digest, as an attacker could."""
    values = {name: value for name, value in content.items() if name not in ("of", "sha256")}
    write_json(folder / "assessment.json", values, _owner(checkpoints.find(folder)))


def test_an_assessment_agrees_with_the_run_and_is_kept(comparison):
    train(agent={"name": "whitespace"})
    folder = comparison / "runs" / "1"
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None
    evaluation = evaluate_run(folder, EvaluationRequest(1, 300))
    validation = json.loads((folder / "run.json").read_text())["result"]
    assert sum(evaluation.loss) / len(evaluation.loss) == pytest.approx(validation["bits_per_byte"])
    assert evaluation.boundary_rate == pytest.approx(validation["boundary_rate"])
    assert (
        evaluation.agreement["whitespace"] == Agreement(1.0, 1.0, 1.0)
        or evaluation.boundary_rate < 0.04
    )
    assert 0 <= evaluation.agreement["bpe"].f1 <= 1
    assert len(evaluation.passages) == 1
    assert load_evaluation(folder, EvaluationRequest(1, 300)) == evaluation
    assert load_evaluation(folder, EvaluationRequest(2, 300)) is None
    path = folder / "assessment.json"
    sound = path.read_text()
    content = json.loads(sound)
    # as by a flipped bit
    path.write_text(json.dumps(content | {"loss": [content["loss"][0] + 1, *content["loss"][1:]]}))
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None
    assert evaluation.learned is not None
    drawn = sum(share * rate for share, rate in evaluation.learned.classes.values())
    # the first byte of each sequence, where all draw a boundary, is left out
    length = len(evaluation.passages[0].action)
    assert drawn == pytest.approx((evaluation.boundary_rate * length - 1) / (length - 1))
    earlier = {
        name: value for name, value in content.items() if name not in ("learned", "of", "sha256")
    }
    path.write_text(json.dumps(earlier))
    # without a digest it is measured again
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None
    for name, value in itertools.product(
        content.keys() - {"of", "sha256"}, (None, 3, "x", [1], {"a": [1]}, [[2]], {})
    ):
        keep_values(content | {name: value}, folder)
        read = load_evaluation(folder, EvaluationRequest(1, 300))
        assert read is None or from_dict(RunEvaluation, asdict(read)) == read, (name, value)
    keep_values({name: value for name, value in content.items() if name != "learned"}, folder)
    assert load_evaluation(folder, EvaluationRequest(1, 300)) == replace(evaluation, learned=None)
    path.write_text(sound)
    train(agent={"name": "whitespace"}, seed=5)
    assert evaluate_run(folder.parent / "2", EvaluationRequest(1, 300)) != evaluation
    path.write_bytes((folder.parent / "2" / "assessment.json").read_bytes())  # another run's
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None
    (folder / "checkpoints").rename(folder / "away")
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None
    (folder / "away").rename(folder / "checkpoints")
    (folder / "assessment.json").write_text('{"version": 0}')
    assert load_evaluation(folder, EvaluationRequest(1, 300)) is None


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_token_lengths(rows):
    action_BT = torch.tensor([[True, *row] for row in rows]).long()
    counts = [0] * 4
    for row in action_BT.tolist():
        since = 0
        for action in row[1:]:
            since += 1
            if action:
                counts[min(since, 4) - 1] += 1
                since = 0
    assert token_lengths(action_BT, 4) == counts
    assert sum(token_lengths(action_BT, Text.longest_token)) == int(action_BT[:, 1:].sum())


def test_mistakes_are_reported(comparison):
    train(agent={"name": "uniform"})
    train(agent={"name": "uniform"})
    train(agent={"name": "uniform"}, data={"seq_len": 48}, seed=1)
    evaluation_request = EvaluationRequest(0, 260)
    some = [
        load_compared_run(finished_run(comparison / "runs" / name), evaluation_request)
        for name in ("1", "2")
    ]
    with pytest.raises(ValueError, match="are the same run, seed included"):
        group_into_methods(some)
    with pytest.raises(ValueError, match="measured on different held-out text"):
        run_command(
            "compare",
            ["with", "runs=['runs/1', 'runs/3']", "passages=0", "bpe_vocabulary=260", "-u"],
        )
    with pytest.raises(
        ValueError, match="there is no training run; expected the folder of a finished one"
    ):
        run_command("compare", ["with", "runs=['runs/9']", "-u"])
    assert read_run(comparison / "nowhere") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare"),
        (["both.yaml", "jobs=0"], "jobs = 0: expected a whole number of at least 1"),
        (["both.yaml", "seeds=[]"], r"seeds = \[\]: expected at least one"),
        (["both.yaml", "seeds=['a']"], "expected whole numbers"),
        (
            ["both.yaml", "seeds=3"],
            r"seeds=3: expected a list, such as seeds=\[0,1,2\]; seeds=\[3\] is one seed",
        ),
        (["both.yaml", "tune_seeds=7"], r"tune_seeds=7: expected a list"),
        (["both.yaml", "only=other"], "only names 'other'"),
        (["both.yaml", "metods.a.rate=0.1"], "unknown key metods.a: did you mean 'methods'"),
        (
            ["both.yaml", "methods.learned.agent.windw=3"],
            "methods.learned: agent.windw is no option",
        ),
        (
            ["both.yaml", "methods.learned.rat=3"],
            "methods.learned: unknown key rat: did you mean 'rate'",
        ),
        (["both.yaml", "common.rat=3"], "common: unknown key rat"),
        (["tiny.yaml"], "is the configuration of one run, and a comparison needs methods"),
    ],
)
def test_bad_options_are_reported_before_work_starts(comparison, words, message):
    with pytest.raises(ValueError, match=message):
        run_command("compare", ["with", *words, "-u"])
    assert not (comparison / "runs").exists()


@pytest.mark.parametrize(("more", "store"), [([], "elsewhere"), (["store=named"], "named")])
def test_runs_go_where_the_flag_says_unless_a_store_is_named(comparison, monkeypatch, more, store):
    stores = []
    monkeypatch.setattr(Compare, "work", lambda command, _: stores.append(command.store))
    run_command("compare", ["with", "both.yaml", *more, "-F", "elsewhere"])
    assert stores == [store]


def test_a_comparison_is_no_training_run(comparison):
    with pytest.raises(
        ValueError, match="is a comparison of several runs: expected tokenv compare with both"
    ):
        run_command("train", ["with", "both.yaml"])


@pytest.mark.parametrize(
    "name", [name for name, path in named_configs().items() if "methods" in load_yaml(path)]
)
def test_comparisons_that_come_with_tokenv_can_be_built(name):
    from tokenv.compare.command import check_methods

    check_methods(resolve_comparison([name], {}))


def test_the_aspect_study_is_that_of_the_single_configurations():
    identities = {
        task.method: task.config.identity()
        for task in resolve_comparison(["aspect"], {}).make_tasks()
    }
    assert identities == {f"n={n}": resolve([f"aspect-{n}"], {}).identity() for n in (2, 4, 6)}
