"""The lm-evaluation-harness has the same results as the library."""

import json
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenv import Model
from tokenv.cli.main import run_command

TEXT = "a tale of für and wide, longer than thirty-two bytes;" * 3


lm_eval = pytest.importorskip("lm_eval", reason="needs tokenv[lm-eval]")
ROWS = [
    {"context": "a tale of", "ending": " für", "other": " wide"},
    {"context": "bytes", "ending": ";", "other": "!"},
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{[ending, other]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}{{ending}}"
metric_list: [{metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{ending}}"
generation_kwargs: {until: ["e", "t"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name, task in TASKS.items():
        rows = f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test"
        (tmp_path / f"{name}.yaml").write_text(
            f"task: tokenv_{name}\ndataset_path: json\n{rows}{task}"
        )
    return tmp_path


@pytest.mark.filterwarnings("default")  # the harness's own
def test_a_local_task_is_answered(
    model: Model, tiny_run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the harness does so itself once it looks for plug-ins
    import_module("tokenv.library.lm_eval_model")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    evaluation = lm_eval.simple_evaluate(
        model="tokenv",
        model_args=f"run={tiny_run},seed=3",
        tasks=[f"tokenv_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    answers = {
        name: [one["resps"] for one in evaluation["samples"][f"tokenv_{name}"]] for name in TASKS
    }
    right = 0
    for row, answer_list in zip(ROWS, answers["choice"], strict=True):
        expected = [
            model.log_likelihood(row[each], context=row["context"], seed=3)
            for each in ("ending", "other")
        ]
        assert [answer[0][0] for answer in answer_list] == pytest.approx(expected, rel=1e-5)
        assert [answer[0][1] for answer in answer_list] == [
            model.score(row[each], context=row["context"], seed=3)[1]
            for each in ("ending", "other")
        ]
        right += expected[0] > expected[1]
    assert evaluation["results"]["tokenv_choice"]["acc,none"] == right / 2
    texts = [row["context"] + row["ending"] for row in ROWS]
    nats = [model.log_likelihood(text, seed=3) for text in texts]
    assert [answer_list[0][0] for answer_list in answers["rolling"]] == pytest.approx(
        nats, rel=1e-5
    )
    bits = (
        -sum(nats)
        / sum(len(text.encode()) for text in texts)
        / torch.tensor(2.0).double().log().item()
    )
    assert evaluation["results"]["tokenv_rolling"]["bits_per_byte,none"] == pytest.approx(
        bits, rel=1e-6
    )
    for row, answer_list in zip(ROWS, answers["writing"], strict=True):
        written = model.generate(row["context"], 9, temperature=0, top_p=1, seed=3)[
            len(row["context"]) :
        ]
        assert answer_list[0][0] == written.partition("e")[0].partition("t")[0]


def requests(*of: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in of]


def test_what_cannot_be_predicted_counts_nothing(model: Model, tiny_run: Path) -> None:
    from tokenv.library.lm_eval_model import TokenvLM

    lm = TokenvLM(str(tiny_run))
    assert lm.loglikelihood(requests(("", "x"), ("x", "")), disable_tqdm=True) == [(0.0, True)] * 2
    assert lm.loglikelihood_rolling(requests(("",), ("x",)), disable_tqdm=True) == [0.0, 0.0]
    assert lm.loglikelihood(requests(("", "xy")), disable_tqdm=True) == [model.score("xy")]
    assert lm.loglikelihood_rolling(requests((TEXT,)), disable_tqdm=True) == [
        model.log_likelihood(TEXT)
    ]


def test_options_of_writing_are_followed(model: Model, tiny_run: Path) -> None:
    from tokenv.library.lm_eval_model import TokenvLM

    lm = TokenvLM(str(tiny_run), seed=2, max_new_tokens=7)
    (plain, sampled, longer) = lm.generate_until(
        requests(
            ("für", {}),
            ("für", {"do_sample": True, "temperature": 0.9, "top_p": 0.5}),
            ("für", {"until": "\n\n", "max_gen_toks": 15, "temperature": 1.0, "do_sample": False}),
        ),
        disable_tqdm=True,
    )
    assert "für" + plain == model.generate("für", 7, temperature=0, top_p=1, seed=2)
    assert "für" + sampled == model.generate("für", 7, temperature=0.9, top_p=0.5, seed=2)
    assert (
        longer == model.generate("für", 15, temperature=0, top_p=1, seed=2)[3:].partition("\n\n")[0]
    )


def test_the_harness_imports_the_model_by_its_entry_point() -> None:
    from tokenv.library.lm_eval_model import TokenvLM

    (entry_point,) = entry_points(group="lm_eval.models", name="tokenv")
    assert entry_point.load() is TokenvLM


@pytest.mark.filterwarnings("default")  # the harness's own
def test_the_command_passes_everything_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command("lm-eval", ["run", "--help"])
    assert "--model_args" in capsys.readouterr().out


@pytest.mark.slow  # the harness reads all of its tasks
@pytest.mark.filterwarnings("default")  # the harness's own
def test_the_command_is_the_harnesss_own(
    tiny_run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    model = ["--model", "tokenv", "--model_args", f"run={tiny_run},seed=3"]
    run_command("lm-eval", [*model, "--tasks", "tokenv_choice", "--include_path", str(tasks)])
    assert "|tokenv_choice|" in capsys.readouterr().out
