"""Read the questions of downstream tasks, zero-shot, as the lm-evaluation-harness phrases them.

A task's rows come from the Hugging Face Hub or from local files with the same fields. Prompts and answers follow
https://github.com/EleutherAI/lm-evaluation-harness: an answer is a blank and its text, as one continuation.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenv.core.errors import MissingFileError, UserError, suggest

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """Context with its possible continuations.

    Attributes:
        context: text before the answer, at least one byte.
        choices: possible continuations, each with the blank at its beginning.
        gold: index of the right one.

    Raises:
        UnicodeEncodeError: if a text holds a lone surrogate.
        UserError: if the context or a choice is empty, or there is no choice ``gold``.
    """

    context: str
    choices: tuple[str, ...]
    gold: int = 0

    def __post_init__(self) -> None:
        if not self.context:
            raise UserError(
                "the context is empty; expected at least one byte to predict the answer from"
            )
        if not all(self.choices):
            raise UserError("an answer is empty; expected at least one byte")
        for text in (self.context, *self.choices):
            text.encode()  # JSON can hold lone surrogates, which have no bytes
        if not 0 <= self.gold < len(self.choices):
            raise UserError(
                f"the right answer is number {self.gold}; expected one of {len(self.choices)}, from 0 on"
            )


@dataclass(frozen=True)
class Task:
    """Data set of a task, and its conversion to questions.

    Attributes:
        hub: name of the data set on the Hugging Face Hub.
        hub_config: configuration of the data set, if it has several.
        split: split of the data set.
        question: function from a row to a question.
    """

    hub: str
    hub_config: str | None
    split: str
    question: Callable[[Row], Question]


def _answers(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(f" {text}" for text in texts)


def _piqa(row: Row) -> Question:
    return Question(
        f"Question: {row['goal']}\nAnswer:", _answers([row["sol1"], row["sol2"]]), int(row["label"])
    )


def _arc(row: Row) -> Question:
    choices = row["choices"]
    return Question(
        f"Question: {row['question']}\nAnswer:",
        _answers(choices["text"]),
        choices["label"].index(row["answerKey"]),
    )


def _without_titles(text: str) -> str:
    """Remove WikiHow's headings and other bracketed marks, which HellaSwag's texts contain."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(row: Row) -> Question:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [_without_titles(ending) for ending in row["endings"]]
    return Question(_without_titles(context), _answers(endings), int(row["label"]))


def _lambada(row: Row) -> Question:
    context, _, word = row["text"].rpartition(" ")
    return Question(context, _answers([word]))


TASKS = {
    "piqa": Task("baber/piqa", None, "validation", _piqa),
    "hellaswag": Task("Rowan/hellaswag", None, "validation", _hellaswag),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "test", _arc),
    "lambada": Task("EleutherAI/lambada_openai", "default", "test", _lambada),
}


def check_tasks(names: Sequence[str]) -> None:
    """Raise an error unless all names are tasks.

    Raises:
        UserError: if a name is unknown.
    """
    for name in names:
        if name not in TASKS:
            raise UserError(f"task {name!r} is unknown: {suggest(name, TASKS)}")


def load_questions(
    name: str, files: Sequence[str | Path] = (), limit: int | None = None
) -> list[Question]:
    """Read a task's questions.

    Args:
        name: key of ``TASKS``.
        files: .jsonl or .json file of the rows, and optionally a file with one label per line (as PIQA is published);
            without files, the rows come from the hub.
        limit: maximum number of questions, the first ones; None for all.

    Raises:
        MissingFileError: if a file does not exist.
        UserError: if the task is unknown, ``limit`` is below 1, a file or the hub cannot be read or is empty, or a row
            lacks a field.
    """
    check_tasks([name])
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected at least 1 question: raise it or leave it out")
    task = TASKS[name]
    rows = _local_rows(name, [Path(file) for file in files]) if files else _hub_rows(name)
    questions = []
    for number, row in enumerate(islice(rows, limit)):
        try:
            questions.append(task.question(row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"is no question: {error}"
            if isinstance(error, KeyError):
                problem = f"lacks the field {error}"
            where = files[0] if files else task.hub
            raise UserError(
                f"task {name}, {where}, row {number} {problem}; expected fields as in {task.hub}"
            ) from error
    if not questions:
        raise UserError(
            f"task {name} has no question in {', '.join(map(str, files)) or task.hub}; expected some"
        )
    return questions


def _hub_rows(name: str) -> Iterable[Row]:
    from datasets import load_dataset

    task = TASKS[name]
    try:
        return load_dataset(task.hub, task.hub_config, split=task.split)
    except Exception as error:  # the hub raises errors of many kinds
        raise UserError(
            f"task {name}: {task.hub} cannot be read from the hub ({error}); expected a connection, or local files: "
            f"task_files.{name}=PATH"
        ) from error


def _local_rows(name: str, files: list[Path]) -> list[Row]:
    for file in files:
        if not file.is_file():
            raise MissingFileError(
                f"task {name}: {file} does not exist; expected a .jsonl or .json file"
            )
    if len(files) > 2:
        raise UserError(
            f"task {name} has {len(files)} files; expected the rows', and perhaps one of labels"
        )
    try:
        text = files[0].read_text(encoding="utf-8")
        if files[0].suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"task {name}: {files[0]} cannot be read as {files[0].suffix or 'JSON'}: {error}"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"task {name}: {files[0]} holds no rows; expected a JSON list of objects, or one a line"
        )
    if len(files) == 1:
        return rows
    try:
        labels = files[1].read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise UserError(
            f"task {name}: {files[1]} cannot be read as labels in UTF-8: {error}"
        ) from error
    if len(labels) != len(rows):
        raise UserError(
            f"task {name}: {files[1]} has {len(labels)} labels for {len(rows)} rows; expected one each"
        )
    return [row | {"label": label} for row, label in zip(rows, labels, strict=True)]
