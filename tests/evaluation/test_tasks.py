"""Downstream tasks: the harness's prompts, exact bits of answers, and errors."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import overrides

from tokenv.agents.fixed import Uniform
from tokenv.agents.heuristic import Whitespace
from tokenv.cli.main import run_command
from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.env.rollout import rollout
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.task_formats import TASKS, Question, load_questions
from tokenv.evaluation.task_scores import answer_bits, score_task

PIQA = {"goal": "How to boil eggs?", "sol1": "Use water.", "sol2": "Use sand.", "label": 0}
ARC = {
    "question": "Which is a star?",
    "choices": {"text": ["Mars", "the Sun"], "label": ["A", "B"]},
    "answerKey": "B",
}
HELLASWAG = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof. [header] How he works [title] First",
    "ctx_b": "he",
    "endings": ["is using wrap  to wrap skis.", "pulls up shingles [step] quickly."],
    "label": "1",
}
LAMBADA = {
    "text": "He shook his head, took a step back and held his hands up. 'I'm not a danger to Bob"
}


def test_rows_become_the_harnesss_strings():
    """Return prompts as in lm-evaluation-harness: doc_to_text, then a blank and doc_to_choice."""
    assert TASKS["piqa"].question(PIQA) == Question(
        "Question: How to boil eggs?\nAnswer:", (" Use water.", " Use sand."), 0
    )
    assert TASKS["arc_easy"].question(ARC) == Question(
        "Question: Which is a star?\nAnswer:", (" Mars", " the Sun"), 1
    )
    assert TASKS["hellaswag"].question(HELLASWAG) == Question(
        "Roof shingle removal: A man is sitting on a roof. How he works. First He",
        (" is using wrap to wrap skis.", " pulls up shingles quickly."),
        1,
    )
    assert TASKS["lambada"].question(LAMBADA) == Question(
        LAMBADA["text"].removesuffix(" Bob"), (" Bob",)
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_local_files_with_and_without_labels(tmp_path):
    rows = [PIQA, PIQA | {"label": 1}]
    unlabelled = [{key: value for key, value in row.items() if key != "label"} for row in rows]
    inside = load_questions("piqa", [write(tmp_path / "a.jsonl", rows)])
    (tmp_path / "labels.lst").write_text("0\n1\n")
    beside = load_questions(
        "piqa", [write(tmp_path / "b.jsonl", unlabelled), tmp_path / "labels.lst"]
    )
    assert inside == beside
    assert [question.gold for question in inside] == [0, 1]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    assert load_questions("piqa", [tmp_path / "c.json"], limit=1) == inside[:1]


def test_the_hub_is_asked_by_name(monkeypatch):
    requests = []

    def load_dataset(*names, **options):
        requests.append((names, options))
        return type("Rows", (list,), {"select": lambda self, which: [self[i] for i in which]})(
            [LAMBADA] * 3
        )

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(load_questions("lambada", limit=2)) == 2
    assert requests == [(("EleutherAI/lambada_openai", "default"), {"split": "test"})]

    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(
        ValueError, match=r"cannot be read from the hub \(no network\).*task_files\.piqa=PATH"
    ):
        load_questions("piqa")


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("pika", "{}", "task 'pika' is unknown: did you mean 'piqa'"),
        ("piqa", "", "has no question in"),
        ("piqa", "{", "cannot be read as .jsonl"),
        ("piqa", "[1, 2]", "holds no rows"),
        (
            "piqa",
            '{"goal": "x"}',
            r"row 0 lacks the field 'sol1'; expected fields as in baber/piqa",
        ),
        (
            "piqa",
            json.dumps(PIQA | {"label": 7}),
            "row 0 is no question: the right answer is number 7",
        ),
        ("lambada", '{"text": "Bob"}', "row 0 is no question: the context is empty"),
        ("arc_easy", json.dumps(ARC | {"answerKey": "C"}), "row 0 is no question"),
        (
            "piqa",
            json.dumps(PIQA | {"goal": "\ud800"}),
            "row 0 is no question: .*surrogates not allowed",
        ),
        (
            "piqa",
            json.dumps(PIQA | {"sol1": "x\udfff"}),
            "row 0 is no question: .*surrogates not allowed",
        ),
    ],
)
def test_bad_rows_are_reported(tmp_path, task, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_questions(task, [tmp_path / "rows.jsonl"])


def test_bad_files_are_reported(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [PIQA])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_questions("piqa", [tmp_path / "none.jsonl"])
    (tmp_path / "labels").write_text("0\n1\n")
    with pytest.raises(ValueError, match="has 2 labels for 1 rows"):
        load_questions("piqa", [rows, tmp_path / "labels"])
    (tmp_path / "labels").write_bytes(b"\xff0\n")
    with pytest.raises(UserError, match="labels cannot be read as labels in UTF-8"):
        load_questions("piqa", [rows, tmp_path / "labels"])
    with pytest.raises(ValueError, match="has 3 files"):
        load_questions("piqa", [rows] * 3)
    with pytest.raises(ValueError, match="limit is 0"):
        load_questions("piqa", [rows], limit=0)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=30), st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=6,
    )
)
def test_bits_are_those_of_the_answer_alone_whatever_shares_its_batch(pairs):
    torch.manual_seed(0)
    from tokenv.lm.config import UNetConfig
    from tokenv.lm.unet import UNet

    lm = UNet(
        UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=8)
    ).double()
    parts = Components(lm, Whitespace(), None, None)
    measured = answer_bits(parts, pairs, EvalOptions(3), seq_len=20)
    for (context, answer), bits in zip(pairs, measured.tolist(), strict=True):
        kept = (context + answer)[-max(20, len(answer) + 1) :]
        td = rollout(lm, parts.agent, torch.tensor([list(kept)]))
        alone = -td[keys.LOG_LIKELIHOOD][0, -len(answer) :].sum().item() / math.log(2)
        assert bits == pytest.approx(alone, rel=1e-9)


def test_scores_are_means_with_their_errors(tiny_lm, monkeypatch):
    questions = [
        Question("a", (" b", " ccc"), 1),
        Question("a", (" b", " ccc"), 1),
        Question("a", (" b", " ccc"), 0),
    ]
    parts = Components(tiny_lm, Uniform(0.5, 8), None, None)
    bits = torch.tensor([2.0, 8.0, 6.0, 8.0, 2.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr("tokenv.evaluation.task_scores.answer_bits", lambda *_, **__: bits)
    score = score_task(parts, questions, EvalOptions(2), seq_len=8)
    # Per byte: 1 and 2 | 3 and 2 | 1 and 0.75; the right ones are 2, 2 and 1.
    assert score.bits_per_byte == pytest.approx(5 / 3)
    assert score.standard_error == pytest.approx(1 / 3)
    assert score.accuracy == pytest.approx(1 / 3)
    assert score.accuracy_standard_error == pytest.approx(1 / 3)
    monkeypatch.setattr("tokenv.evaluation.task_scores.answer_bits", lambda *_, **__: bits[:1])
    one = score_task(parts, [Question("a", (" b",))], EvalOptions(2), seq_len=8)
    assert one.accuracy is None
    assert math.isnan(one.standard_error)


def test_evaluate_scores_tasks(tiny_settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = overrides(tiny_settings)
    run_command("train", ["with", *words])
    write(tmp_path / "piqa.jsonl", [PIQA] * 3)
    write(tmp_path / "lambada.jsonl", [LAMBADA] * 2)
    files = ["task_files.piqa=piqa.jsonl", "task_files.lambada=lambada.jsonl"]
    report = run_command(
        "evaluate", ["with", "run=runs/1", "sequences=4", "tasks=piqa,lambada", *files, "limit=2"]
    )
    assert report["sampled"]["piqa"]["questions"] == 2
    assert "accuracy" not in report["sampled"]["lambada"]
    assert report["thresholded"]["lambada"]["bits_per_byte"] > 0
    assert "piqa, 2 answers" in capsys.readouterr().out
    for words, message in (
        (["tasks=pika"], "task 'pika' is unknown"),
        (["task_files.piqa=piqa.jsonl"], "name the task there, too"),
        (["tasks=piqa", "limit=0"], "limit = 0"),
        (["tasks=piqa", "task_files.piqa=3"], "task piqa: 3 does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            run_command("evaluate", ["with", "run=runs/1", *words])
