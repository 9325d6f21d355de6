# ruff: noqa: E501
"""Odd values for what does work: command lines that run a tiny model to the end, and calls from a program."""

import functools
import json
import random
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from malformed import RUN, SERIES_RUN, flipped

import tokenv
from tokenv.core.errors import RunFailedError, UserError

TEXTS = [
    "",
    " ",
    "a",
    "abc " * 30,
    "é",
    "日本語",
    "\ud800",
    "\udcff",
    "\0",
    "\x1b[2J",
    "\r\n" * 9,
    "null",
    "1e3",
    "🙂" * 40,
]
RATES = [
    "0",
    "1",
    "0.2",
    "0.9",
    "1e-9",
    "0.999999",
    "nan",
    "null",
    "-1",
    "[0.1]",
    "[0.1,0.1]",
    "[0.05,0.5]",
    "[]",
]
NUMBERS = ["0", "1", "2", "3", "7", "40", "-1", "1.5", "1e9", "null", "true", "x"]
FLAGS = ["true", "false", "1", "null"]
PATHS = ["null", "made", "made/deeper", ".", "made.json", "texts", "\ud800"]
KEYS = {
    "segment": {
        "text": TEXTS, "file": ["texts/0.txt", ".", "none", RUN], "out": PATHS, "json": PATHS, "tokens": NUMBERS,
        "rate": RATES, "threshold": FLAGS, "max_chars": NUMBERS, "seed": NUMBERS, "checkpoint": ["best", "latest", "x"],
        "other_runs": [f"[{RUN}]", f"[{SERIES_RUN}]", "[again]", "[again,again]", "[1e3]", "[]", "again"],
    },
    "generate": {
        "text": TEXTS, "max_new_tokens": ["0", "1", "5", "x"], "temperature": ["0", "1", "1e-30", "1e30", "nan"], "seed": NUMBERS,
        "top_p": ["0", "1", "1e-12", "0.5"], "stop": [*TEXTS, "null"], "rate": RATES, "flops": ["1", "1e4", "1e30", "nan"],
        "json": PATHS,
    },
    "evaluate": {
        "sequences": ["1", "2", "3", "0", "1e9"], "batch_size": NUMBERS, "calibrate": FLAGS, "rates": RATES, "out": PATHS,
        "flops": ["1", "1e4", "1e30", "nan"], "entropy_weight": ["[0]", "[1,-1]", "[9]", "[nan]", "3"], "json": PATHS,
        "other_runs": ["[again]", f"[{SERIES_RUN}]", "[]"], "split": ["test", "validation", "x"], "limit": NUMBERS,
        "tasks": [",", "x"], "task_files.lambada": ["rows.jsonl", "[rows.jsonl]", "texts/0.txt", "1e3"],
        "data.source": ["texts", "words", "none", "1e3"], "data.options.stride": NUMBERS,
    },
    "forecast": {
        "csv": ["rows.csv", "none", "texts/0.txt", "null"], "horizon": NUMBERS, "samples": ["2", "3", "1", "0"], "rate": RATES,
        "windows": ["1", "2", "0", "-1"], "direct": FLAGS, "season": NUMBERS, "peers": ["dlinear", "[dlinear]", "[x]", "[]"],
        "quantiles": ["[0.5]", "[0.1,0.9]", "[0.9,0.1]", "[0]", "0.5", "[]"], "out": PATHS, "json": PATHS,
    },
    "train": {
        "init_from": [RUN, SERIES_RUN, "1e3", "null"], "freeze_lm": FLAGS, "agent.pretrained": [RUN, SERIES_RUN, "007"],
        "agent.frozen": FLAGS, "train.optimizer": ["muon", "adamw", "x"], "train.symbols": ["32", "64", "1"],
        "train.batch_size": ["1", "2", "3"], "rate.min": ["0.1", "0", "0.9"], "rate.max": ["0.5", "1", "nan"],
        "validation.calibrate": FLAGS, "codec.horizon": ["0", "4", "1e9"], "codec.direct": FLAGS, "loss.early": ["0", "1"],
        "codec.linear_path": ["0", "4", "-1"],
        "data.source": ["hub:streamed", "streamed", "hub:texts"], "data.streams": ["1", "2", "99"],
        "data.shuffle_buffer": ["1", "5", "0"], "train.max_grad_norm": ["inf", ".inf", "0"], "agent.name": ["uniform", "exact_count", "bpe"],
        "agent.vocabulary_size": ["256", "300", "0"], "estimator.name": ["rloo", "arm", "relax", "none"],
    },
}  # fmt: skip
STARTS = {
    "segment": [f"run={RUN}", "text=abc abc", "out=null"],
    "generate": [f"run={RUN}", "text=abc", "max_new_tokens=3"],
    "evaluate": [f"run={RUN}", "sequences=4", "out=null"],
    "forecast": [f"run={SERIES_RUN}", "horizon=2", "samples=2", "windows=1", "out=made"],
    "train": ["small.yaml"],
}


def working_line(generator):
    """Return a command that does its work, on a tiny run, with odd values."""
    rows = [
        json.dumps({"text": generator.choice(TEXTS[:6]) + " last words"})
        for _ in range(generator.randint(0, 4))
    ]
    Path("rows.jsonl").write_text(
        "\n".join([*rows, *generator.choice([[], ["{}"], ["null"], ["{"]])])
    )
    steps = [f"2020-01-01 00:{row:02}:00" for row in range(generator.choice([0, 1, 3, 40]))]
    channels = generator.choice(
        [["a"], ["a", "b", "c", "d", "e", "f", "g"], ["ds", "unique_id", "y"]]
    )
    cells = [
        [step, *(generator.choice(["1", "2.5", "1e300", "", "x"]) for _ in channels)]
        for step in steps
    ]
    Path("rows.csv").write_text("\n".join(map(",".join, [["date", *channels], *cells])))
    _stream(generator)
    command = generator.choice([*KEYS, "segment", "evaluate"])
    words = list(STARTS[command])
    for key in generator.sample(list(KEYS[command]), generator.choice([1, 2, 2, 3])):
        words.append(f"{key}={generator.choice(KEYS[command][key])}".replace("\0", "0"))
    words += ["tasks=lambada"] if any(word.startswith("task_files") for word in words) else []
    return [command, "with", *words, *(["-u"] if command == "train" else [])]


def _stream(generator):
    """Return a folder of parquet shards, some of them damaged, as streamed data have them."""
    folder = Path("streamed")
    folder.mkdir(exist_ok=True)
    for number in range(3):
        texts = [
            generator.choice(["some text " * 9, "", None, "x"])
            for _ in range(generator.choice([0, 1, 9, 9]))
        ]
        column = generator.choice(["text", "text", "text", "other"])
        pq.write_table(
            pa.table({column: pa.array(texts, pa.string())}), folder / f"{number}.parquet"
        )
    if generator.random() < 0.3:
        path = folder / "1.parquet"
        path.write_bytes(
            generator.choice([b"", flipped(path.read_bytes(), generator), path.read_bytes()[:40]])
        )
    notes = generator.choice(
        [
            "",
            "---\n: [\n---\n",
            "---\nconfigs:\n- config_name: a\n  data_files: none/*.parquet\n---\n",
        ]
    )
    (folder / "README.md").write_text(notes)


@functools.cache
def _model(run):
    return tokenv.load(run, device="cpu")


def frame(generator):
    """Return a forecast of an odd data frame."""
    rows = generator.choice([0, 1, 2, 20, 20, 20])
    values = generator.choice(
        [
            [1.0] * rows,
            [float(row % 5) for row in range(rows)],
            ["x"] * rows,
            [None] * rows,
            [1e300] * rows,
        ]
    )
    steps = pd.date_range("2020-01-01", periods=rows, freq="h")
    dates = generator.choice(
        [
            steps,
            steps[::-1],
            list(range(rows)),
            ["x"] * rows,
            steps.tz_localize("UTC"),
            [pd.NaT] * rows,
        ]
    )
    names = generator.choice(
        [["date", "a"], ["ds", "y"], ["a", "a"], [0, 1], ["date", None], ["unique_id", "y"]]
    )
    made = pd.DataFrame(dict(enumerate([dates, values])))
    made.columns = names
    if generator.random() < 0.3:
        made.insert(
            0,
            "unique_id",
            [generator.choice(["a", "b", None, 3]) for _ in range(rows)],
            allow_duplicates=True,
        )
    made = (
        made.set_index(made.columns[0])
        if made.columns.is_unique and generator.random() < 0.2
        else made
    )
    options = {
        "h": generator.choice([1, 2, 5, 0, -1, 10**9]),
        "quantiles": generator.choice([[0.5], [], [0.1, 0.9], [0.9, 0.1], [float("nan")]]),
        "level": generator.choice([None, 80, [50, 95], 0, [], float("nan")]),
        "freq": generator.choice([None, None, "h", "B", 1, "no"]),
        "samples": generator.choice([2, 3, 0]),
        "direct": generator.choice([None, True, False]),
        "rate": generator.choice([None, None, 0.2, 2.0, float("nan")]),
    }
    return f"{made.dtypes.to_dict()} {options}", lambda: _model(SERIES_RUN).forecast(
        made, **options
    )


def text_call(generator):
    """Return a call of a model by the library or the lm-evaluation-harness, with odd texts and numbers."""
    text = generator.choice(TEXTS)
    context = generator.choice(TEXTS)
    rate = generator.choice([None, None, 0.2, 0.0, 1.0, -1.0, float("nan")])
    harness = ["harness"] if find_spec("lm_eval") else []
    name = generator.choice(["spans", "tokens", "log_likelihood", "score", "generate", *harness])
    if name == "harness":
        return _harness_call(generator, context, text)
    model = _model(generator.choice([RUN, RUN, RUN, SERIES_RUN]))
    calls = {
        "spans": lambda: model.spans(text, rate=rate),
        "tokens": lambda: model.tokens(text, rate=rate),
        "log_likelihood": lambda: model.log_likelihood(text),
        "score": lambda: model.score([(context, text)]),
        "generate": lambda: model.generate(text, 3, stop=context or None, rate=rate),
    }
    return f"{name} {text!r} {context!r} {rate}", calls[name]


def _harness_call(generator, context, text):
    harness = _harness()
    arguments = {
        "until": generator.choice([[], [text], text, None]),
        "max_gen_toks": generator.choice([1, 3, 0]),
    }
    name, args = generator.choice(
        [
            ("loglikelihood", (context, text)),
            ("loglikelihood_rolling", (text,)),
            ("generate_until", (context, arguments)),
        ]
    )
    return f"{name} {args!r}", lambda: getattr(harness, name)(
        [SimpleNamespace(args=args)], disable_tqdm=True
    )


@functools.cache
def _harness():
    from tokenv.library.lm_eval_model import TokenvLM

    return TokenvLM(RUN)


CALLS = {"frame": frame, "text": text_call}


def try_call(kind, seed):
    """Call what a seed makes; what was called and what went wrong, or None."""
    described, call = CALLS[kind](random.Random(f"{kind} {seed}"))
    try:
        call()
    except (UserError, RunFailedError):
        return None
    except Exception as error:
        return described, f"traceback: {type(error).__name__}: {str(error)[:200]}"
    return None
