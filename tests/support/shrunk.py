"""The commands of users in small: whole command lines, cut down by overrides alone, over made-up data.

Lines that a person types run for minutes, hours or days. ``shrink`` appends words to one, so that the same line, every
method, section and option of it included, runs in seconds; ``stand_ins`` makes the files that such lines read.
"""

import copy
import importlib
import json
import lzma
import random
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import yaml
from blank_pictures import blank_png
from tiny import overrides

from tokenv.cli.main import error_message, run_command
from tokenv.cli.run_job import do_job
from tokenv.compare.job import Job, JobResult, read_result
from tokenv.config.files import merge
from tokenv.plotting import figures

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
TEXTS, BOOKS, TABLE = "texts.jsonl", "books", "ETTh1.csv"
ETT = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")

MODEL = {"width": 16, "heads": 2, "down_layers": 1, "mid_layers": 1, "up_layers": 1, "window": 6}
RUN = {
    "data": {"seq_len": 48},
    "model": MODEL,
    "train": {"symbols": 768, "batch_size": 4, "gradient_accumulation_steps": 1},
    "validation": {"every_symbols": 384, "sequences": 6, "batch_size": 6},
    "checkpoint": {"every_symbols": 384},
    "hardware": {"device": "cpu", "precision": "float32", "compile": "off", "threads": 1},
}
TEXT = {"validation": 0.2}
RATE = 0.025  # in short sequences, lower ones draw no boundary
SERIES = {"validation": 0.2, "options": {"context": 12, "count": 8, "length": 400, "dwell": 8}}
HORIZON = 8
# what other sizes follow from
FORECASTING = ("codec.direct", "codec.linear_path", "data.options.future_steps")
VOCABULARY = 300
VARIANCE = {
    "checkpoints": 1,
    "draws": 4,
    "reference_draws": 4,
    "batch_size": 2,
    "warmup": 1,
    "timings": 1,
}


def _nested(key: str, value: Any) -> dict[str, Any]:
    """One word of a command line as nested settings."""
    *sections, last = key.split(".")
    nested = {last: value}
    for section in reversed(sections):
        nested = {section: nested}
    return nested


def content(name: str) -> dict[str, Any]:
    """Return a shipped configuration by name, or a file in this folder."""
    return yaml.safe_load((CONFIGS.get(name) or Path(name)).read_text())


def _of_run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the changes which shrink a run of these settings, whatever its data."""
    data = settings.get("data", {})
    source = data.get("source", "python")
    changes = copy.deepcopy(RUN)
    if data.get("kind") == "series":
        synthetic = not source.endswith((".csv", ".parquet"))
        changes["data"] |= copy.deepcopy(SERIES) if synthetic else {"options": {"context": 12}}
        codec = settings["codec"]
        if codec.get("horizon"):
            changes["codec"] = {"horizon": HORIZON}
        if codec.get("direct"):
            changes["data"]["options"]["context"] = changes["data"]["seq_len"] - HORIZON
        if codec.get("linear_path"):
            changes["codec"]["linear_path"] = changes["data"]["options"]["context"]
        if data.get("options", {}).get("future_steps"):
            changes["data"]["options"]["future_steps"] = HORIZON
    else:
        changes["data"] |= TEXT
        if source.startswith("hub:") or source == "python":
            changes["data"]["source"] = TEXTS
        if source == "words":
            changes["data"] |= {"words_documents": 80, "lexicon_size": 20}
    return changes


def _of_methods(methods: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the words which shrink what methods change themselves."""
    words = []
    for name, changes in methods.items():
        if (rate := (changes or {}).get("rate", 1)) < RATE:
            words.append(f"{prefix}methods.{name}.rate={6 * rate}")
        if "symbols" in (changes or {}).get("train", {}):
            words.append(f"{prefix}methods.{name}.train.symbols={RUN['train']['symbols'] * 3 // 4}")
        if "vocabulary_size" in (changes or {}).get("agent", {}):
            words.append(f"{prefix}methods.{name}.agent.vocabulary_size={VOCABULARY}")
    return words


def _of_comparison(settings: dict[str, Any], only: list[str] | None) -> list[str]:
    """Return the words which shrink a comparison: all methods (or those of ``only``) in small, with one seed."""
    words = ["seeds=[0]", f"bpe_vocabulary={VOCABULARY}", "passages=1"]
    if "base" in settings:
        base = content(settings["base"])
        words += overrides(_of_run(base), "common.")
        words += overrides(_of_run(base), "pretrain.") if settings.get("pretrain") else []
        if base["data"]["source"] == TABLE:
            words.append("common.data.options.columns=OT")
    words += ["forecast.windows=4"] if "forecast" in settings else []
    for name, protocol in settings.get("protocols", {}).items():
        whole = content(protocol.get("base") or settings["base"])
        small = _of_run(merge(merge(whole, settings.get("common", {})), protocol.get("common", {})))
        words += overrides(small, f"protocols.{name}.common.")
        words += overrides(small, f"protocols.{name}.pretrain.") if "pretrain" in protocol else []
    words += [f"tune.{key}={values[:1]}" for key, values in settings.get("tune", {}).items()]
    if settings.get("tune"):
        words.append("tune_seeds=[100]")
    words += _of_methods(settings["methods"])
    for protocol, own in settings.get("protocols", {}).items():
        words += [f"protocols.{protocol}.seeds=[0]"] if "seeds" in own else []
        words += _of_methods(own.get("methods", {}), f"protocols.{protocol}.")
    return words + ([f"only={only}"] if only else [])


def shrink(line: list[str], only: list[str] | None = None) -> list[str]:
    """Return a command line with added words which shrink it; its options other than sizes and sources stay.

    Args:
        line: what follows ``tokenv``: a command, ``with`` and words.
        only: the methods of a comparison that are to be run; all where None.

    Raises:
        ValueError: this command is unknown here; say above how it is made small.
    """
    command = line[0]
    arguments = line[2:]
    names = [word for word in arguments if "=" not in word]
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    if command in ("check", "list") or "print_config" in line or "--help" in line:
        return line
    if command == "compare":
        if "runs" in given:
            return [*line, f"bpe_vocabulary={VOCABULARY}", "passages=1"]
        settings = content(names[0])
        more = _of_comparison(settings, only)
        own = (
            [f"common.data.source={given['common.data.source']}"]
            if "common.data.source" in given
            else []
        )
        return [*line, *more, *own]
    if command in ("train", "bench", "variance"):
        if "resume" in given:
            return line
        more = []
        if "run" not in given:
            settings = content(names[0])
            for key in FORECASTING:
                settings = (
                    merge(settings, _nested(key, yaml.safe_load(given[key])))
                    if key in given
                    else settings
                )
            more = overrides(_of_run(settings))
            if "data.source" in given:  # a file that stands there already, or another synthetic one
                more.append(f"data.source={given['data.source']}")
        if command == "bench":
            more += ["horizon=6", "codec.horizon=6"] if "horizon" in given else []
            return [*line, *more, "repeats=1"]
        if command == "variance":
            more += [
                *overrides(VARIANCE),
                f"credit_draws={min(2, int(given.get('credit_draws', 2)))}",
            ]
            more += [] if "estimators" in given else ["estimators=['reinforce', 'rloo']"]
            more += ["seq_len=24"] if int(given.get("seq_len", 0)) > 24 else []
        return [*line, *more]
    small = {
        "segment": {},
        "evaluate": {"sequences": 4, "batch_size": 4, "limit": 2}
        if "tasks" in given
        else {"sequences": 4},
        "generate": {"max_new_tokens": 5},
        "forecast": {"horizon": HORIZON, "samples": 2, "windows": 2},
    }
    if command not in small:
        raise ValueError(f"tokenv {command}: nobody has said how to make it small")
    return [*line, *overrides(small[command])]


def stand_ins(folder: Path) -> None:
    """Write the files which shrunk lines read: texts, tables of series, questions for two tasks."""
    generator = random.Random(0)
    rows = []
    for number in range(120):
        sentence = " ".join(
            generator.choice(("the", "of", "return", "self", "token", f"x{number}"))
            for _ in range(30)
        )
        text = f"def f_{number}(x):\n    return {sentence!r}\n"
        rows.append({"text": text, "content": text})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / TEXTS).write_text(lines)
    (folder / "some_of.jsonl").write_text(lines[: len(lines) // 2])
    for name in ("train", "valid"):
        with lzma.open(folder / f"{BOOKS}.{name}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": f"{name} {row['text']}"}) + "\n" for row in rows)
    rng = np.random.default_rng(0)
    _table(folder / TABLE, ETT, 20 * 30 * 24, rng)
    _table(folder / "new.csv", ETT, 200, rng)
    _table(folder / "my.csv", ("load", "price"), 600, rng)
    clock = [f"{wave}{period}" for period in (16, 32, 64, 128) for wave in ("sin", "cos")]
    columns_of = {
        "ecg60": ["mlii", *clock],
        "ecg360": ["mlii", *clock],
        "ecg100": ["mlii"],
        "abp": ["abp"],
    }
    for name, columns in columns_of.items():
        values_TC = rng.normal(size=(2000, len(columns)))
        pd.DataFrame(values_TC, columns=columns).to_parquet(folder / f"{name}.parquet")
    (folder / "lambada_test.jsonl").write_text(
        '{"text": "the last word of this line is here"}\n' * 3
    )
    question = {"goal": "open a jar", "sol1": "turn the lid", "sol2": "paint the lid"}
    (folder / "piqa_valid.jsonl").write_text((json.dumps(question) + "\n") * 3)
    (folder / "piqa_valid_labels.lst").write_text("0\n" * 3)


def _table(path: Path, columns: tuple[str, ...], hours: int, rng: np.random.Generator) -> None:
    wave_T = np.sin(np.arange(hours) / 24 * 2 * np.pi)
    signals_TC = wave_T[:, None] * np.arange(1, len(columns) + 1)
    signals_TC += rng.normal(0, 0.3, signals_TC.shape)
    table = pd.DataFrame(signals_TC, columns=list(columns))
    dates = pd.date_range("2016-07-01", periods=hours, freq="h")
    table.insert(0, "date", dates.astype(str))
    table.to_csv(path, index=False, float_format="%.3f")


def tokenv(line: list[str]) -> None:
    """Run ``tokenv`` with these arguments, as the console script does, in this process.

    Raises:
        SystemExit: the command refused them.
    """
    module, _, function = PROJECT["scripts"]["tokenv"].partition(":")
    before = sys.argv
    sys.argv = ["tokenv", *line]
    try:
        getattr(importlib.import_module(module), function)()
    finally:
        sys.argv = before


def in_this_process(job: Job) -> JobResult:
    """Stand in for ``tokenv.compare.job.Job.__call__``: make a comparison's runs in turn and without processes.

    The run's own pictures, which a comparison does not look at, are left blank. What it prints goes to the job's log.
    """
    job.spec.write()
    with (
        (job.spec.job_dir / "log").open("w") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        patch.object(figures, "png", blank_png),
    ):
        do_job(job.spec, 0, run_command, error_message)
    return read_result(job.spec, 0)
