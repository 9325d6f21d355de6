# ruff: noqa: E501
"""Malformed command lines, YAML files, corpora, series, checkpoints: what a seed makes, and what tokenv says of it."""

import dataclasses
import gzip
import io
import json
import logging
import lzma
import random
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from shrunk import CONFIGS

from tokenv.cli.evaluate import Evaluate
from tokenv.cli.inference import Generate, Segment, Serve
from tokenv.cli.main import main
from tokenv.compare.config import CompareOptions
from tokenv.config.registry import AGENTS, ESTIMATORS, RATE_TARGETS
from tokenv.config.schema import Config
from tokenv.data.corpus import load_corpus
from tokenv.lab.config import BenchOptions, VarianceOptions
from tokenv.series.config import ForecastRequest
from tokenv.series.forecast_command import Forecast

SECONDS = 20
TEXTS, RUN, SERIES_RUN = "texts", "run", "series-run"
# a mistake is one message, with no log of Sacred's around it
OF_LIBRARIES = re.compile(r"^WARNING - (?!tokenv)")
HIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
NASTY = [
    *(
        "",
        " ",
        "0",
        "-1",
        "1",
        "2",
        "3.5",
        "1e999",
        "-1e999",
        "inf",
        "-inf",
        ".inf",
        "nan",
        ".nan",
        "1e308",
        "1e300",
    ),
    *(
        "null",
        "None",
        "true",
        "True",
        "false",
        "maybe",
        "on",
        "1:30",
        "0x" + "f" * 400,
        "9" * 5000,
        "1e18",
        "2e9",
        "1j",
    ),
    *(
        "b'x'",
        "{1}",
        "...",
        "[]",
        "{}",
        "()",
        "[1]",
        "[[1]]",
        "[None]",
        "{'a': 1}",
        "{1: 2}",
        "{'name': None}",
        "(1, 2)",
    ),
    *(
        "[1, 1]",
        "['a']",
        "'a'",
        "{'name': 'learned'}",
        "{'name': {}}",
        "{'name': 'x:y'}",
        "os:nothing",
        ":",
        "a:",
        ":b",
    ),
    *(
        "\x1b[31mred",
        "a\nb",
        "'\\x00'",
        "'\\ud800'",
        "\udcff",
        "é",
        "[" * 300,
        "-" * 3000 + "1",
        "[" * 150 + "]" * 150,
    ),
    *(
        "{'a':" * 60 + "1" + "}" * 60,
        "x" * 5000,
        "../..",
        "/",
        "/dev/null",
        "/root/x",
        ".",
        "a b",
        "=",
        "==",
        "%",
        "$x",
    ),
    *(
        "['rloo(num_samples=9999999)']",
        "['rloo(num_samples=\"a\")', 'arm']",
        "['rloo(1)']",
        "['rloo(a={1: 2})']",
        "1e12",
    ),
    *(
        "learned",
        "rloo",
        "rloo(",
        "rloo(num_samples=9)",
        "rloo(num_samples='a')",
        "rloo(1)",
        "GAMMA",
        "lambda: 0",
    ),
    *(
        "[0.1, 0.5]",
        "[0.5, 0.1]",
        "[nan]",
        "[1e999]",
        "['0.1']",
        "python",
        "words",
        "regimes",
        "hub:",
        "quick",
        "-u",
    ),
]
OPTIONS = {
    "segment": Segment,
    "serve": Serve,
    "evaluate": Evaluate,
    "generate": Generate,
    "forecast": Forecast,
    "train": None,
    "compare": CompareOptions,
    "variance": VarianceOptions,
    "bench": BenchOptions,
}
FLAGS = [
    ["-u"],
    [],
    [],
    ["-F", "store"],
    ["-F"],
    ["-l", "zzz"],
    ["-C", "odd"],
    ["-b", "x"],
    ["-i", "7"],
    ["-c"],
    ["-e"],
]
SMALL = ["data.source=texts", "data.seq_len=16", "data.validation=0.5", "hardware.device=cpu"]


def keys_of(kind, prefix=""):
    """All keys of a dataclass, dotted, sections included."""
    keys = []
    for item in dataclasses.fields(kind):
        keys.append(prefix + item.name)
        inner = item.default_factory
        if dataclasses.is_dataclass(inner):
            keys += keys_of(inner, f"{prefix}{item.name}.")
    return keys


SECTIONS = {"agent": AGENTS, "estimator": ESTIMATORS, "rate_target": RATE_TARGETS}
DEEPER = [
    "rate.min",
    "rate.max",
    "agent.window",
    "agent.pretrained",
    "agent.frozen",
    "agent.every",
    "agent.vocabulary_size",
    "estimator.gamma",
]
DEEPER += [
    "estimator.num_samples",
    "estimator.reward_only",
    "estimator.rollouts",
    "estimator.positions",
    "codec.density",
]
RUN_KEYS = keys_of(Config) + DEEPER + [f"{section}.name" for section in SECTIONS]


def keys_for(command):
    """Keys that a command knows."""
    kind = OPTIONS[command]
    own = [] if kind is None else [key for key in keys_of(kind) if not key.startswith("config")]
    if command == "compare":
        own += [
            f"{place}.{key}"
            for place in ("common", "methods.a", "pretrain", "protocols.a.common")
            for key in RUN_KEYS
        ]
        own += [
            f"{place}.{key}"
            for place in ("forecast", "protocols.a.forecast")
            for key in keys_of(ForecastRequest)
        ]
        own += ["tune.rate", "tune.train.learning_rate", "protocols.a.rates", "protocols.a.only"]
    if command == "evaluate":
        own += [
            "data.source",
            "data.seq_len",
            "data.validation_source",
            "task_files.piqa",
            "data.options.stride",
        ]
    if command == "bench":
        own += ["scaling.ranks", "scaling.data.seq_len", "scaling.model.width", "scaling.odd"]
    return (
        own
        + (RUN_KEYS if command in ("train", "variance", "bench") else [])
        + (["resume"] if command == "train" else [])
    )


def mutated(text, generator):
    """Return a text with a few characters dropped, doubled, changed or moved."""
    made = list(text)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(made) + 1)
        what = generator.randrange(4)
        if what == 0:
            made[at:at] = generator.choice(
                [
                    "=",
                    ".",
                    ":",
                    "[",
                    "{",
                    "'",
                    '"',
                    "\x1b",
                    "é",
                    "-",
                    "1",
                    "e",
                    ",",
                    " ",
                    "\t",
                    "&a ",
                    "*a",
                ]
            )
        elif what == 1:
            del made[at : at + generator.randint(1, 5)]
        elif what == 2:
            made[at:at] = made[at : at + generator.randint(1, 20)]
        elif made:
            made[at % len(made)] = chr(
                generator.choice([0, 9, 10, 27, 58, 91, 127, 0x2028, 0xD800, 0x1F600]) or 1
            )
    return "".join(made)


def value(key, generator):
    """Return a value for a key: mostly nasty, at times a name that fits."""
    table = SECTIONS.get(key.removesuffix(".name").rpartition(".")[2])
    if table is not None and key.endswith(".name") and generator.random() < 0.7:
        return generator.choice(list(table))
    if generator.random() < 0.1:
        return repr(
            generator.choice(
                [
                    generator.random(),
                    generator.randint(-(10**30), 10**30),
                    2.0 ** generator.randint(-1074, 1023),
                ]
            )
        )
    return generator.choice(NASTY)


def command_line(generator):
    """Words that a person might have typed wrongly."""
    command = generator.choice(list(OPTIONS))
    if generator.random() < 0.03:
        return [generator.choice([mutated(command, generator), *NASTY]) or "x", "with", "quick"]
    start = {
        "segment": [f"run={RUN}", "text=abc", "out=null"],
        "serve": [f"run={RUN}"],
        "generate": [f"run={RUN}", "text=abc"],
        "evaluate": [f"run={RUN}"],
        "forecast": [f"run={SERIES_RUN}"],
        "compare": ["compare-quick"],
        "train": SMALL,
        "variance": ["quick"],
        "bench": [generator.choice(["quick", "series-synthetic"])],
    }[command]
    words = [word for word in start if generator.random() < 0.95]
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        key = generator.choice(keys_for(command))
        word = f"{key}={value(key, generator)}"
        words.append(mutated(word, generator) if generator.random() < 0.2 else word)
    before = (
        ["print_config"]
        if generator.random() < 0.1
        else ["foo"]
        if generator.random() < 0.03
        else []
    )
    words = [word.replace("\0", "0") for word in words]  # which no argument of a process can hold
    return [
        command,
        *before,
        *(["with"] if generator.random() < 0.97 else []),
        *words,
        *generator.choice(FLAGS),
    ]


def yaml_file(generator):
    """Return a YAML file near one of ours, and a command that reads it."""
    name = generator.choice(list(CONFIGS))
    lines = CONFIGS[name].read_text().splitlines()
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        what = generator.random()
        if what < 0.4 and colon:
            lines[at] = f"{key}: {generator.choice([*NASTY, *TAGGED])}"
        elif what < 0.6:
            lines[at] = mutated(lines[at], generator)
        elif what < 0.7:
            lines.insert(at, generator.choice(lines))
        elif what < 0.8:
            del lines[at]
        else:
            lines.insert(
                at,
                generator.choice(
                    [
                        *TAGGED,
                        "1: 2",
                        "null: 1",
                        "? [a]\n: 1",
                        "[a, b]: 1",
                        "{name: }",
                        "agent: {name: }",
                    ]
                ),
            )
        lines = lines or [""]
    text = "\n".join(lines) + "\n"
    if generator.random() < 0.05:
        text = generator.choice(
            [
                "[" * 2000,
                "{a: " * 2000,
                "- " * 2000 + "1",
                "&a [*a]",
                "a: &a {b: *a}",
                LAUGHS,
                "%YAML 3",
                "---\n---\n",
            ]
        )
    data = text.encode("utf-8", "surrogatepass")
    if generator.random() < 0.05:
        data = generator.choice(
            [
                data.decode("utf-8", "replace").encode("utf-16"),
                generator.randbytes(50),
                b"",
                data + b"\0",
            ]
        )
    Path("odd.yaml").write_bytes(data)
    command = (
        "compare"
        if name.startswith("compare")
        else generator.choice(["train", "train", "variance", "bench"])
    )
    return [command, "with", "odd.yaml", "-u"]


TAGGED = ["!!binary aGk=", "!!set {a}", "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!python/name:os.system",
          "!!null x", "!!omap [a: 1]", "*nowhere", "&a [1]", "{<<: 3}", "<<: [1]", "!odd x", "2020-01-01", "'a", "|", "@"]  # fmt: skip
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{one}: &{one} [{','.join(['*' + before] * 9)}]\n"
    for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)


def data_file(generator):
    """Return a broken or odd corpus, and a command that reads it."""
    rows = [
        json.dumps({"text": "some text " * generator.randint(0, 9)})
        for _ in range(generator.randint(0, 12))
    ]
    for _ in range(generator.randint(0, 3)):
        odd = [
            '{"text": null}',
            '{"text": 3}',
            "{}",
            '{"other": "x"}',
            "[]",
            "3",
            "null",
            '"x"',
            "{",
            '{"text": "\\ud800"}',
            '{"text": ["a"]}',
        ]
        rows.insert(generator.randint(0, len(rows)), generator.choice(odd))
    data = ("\n".join(rows) + "\n").encode()
    suffix = generator.choice(
        [".jsonl", ".json", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".txt", ".parquet"]
    )
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    data = pack.get(Path("x" + suffix).suffix, bytes)(data)
    if generator.random() < 0.5:
        data = generator.choice(
            [
                data[: generator.randint(0, len(data))],
                generator.randbytes(generator.randint(0, 200)),
                flipped(data, generator),
            ]
        )
    path = Path("odd" + suffix)
    path.write_bytes(data)
    if generator.random() < 0.15 and suffix in (".jsonl", ".json"):
        return ["evaluate", "with", f"run={RUN}", "tasks=lambada", f"task_files.lambada={path}"]
    return [
        "train",
        "with",
        *SMALL,
        f"data.source={path}",
        f"data.column={generator.choice(['text', 'text', 'other'])}",
        "-u",
    ]


def series_file(generator):
    """Return a broken or odd table, and a command that reads it."""
    cells = [
        "1",
        "2.5",
        "",
        "nan",
        "NA",
        "1e308",
        "-1e308",
        "1e999",
        "inf",
        "x",
        "1,5",
        '"',
        "\x1b[1m",
        "1_000",
        "5e-324",
        "0",
    ]
    odd = generator.random() < 0.6
    lines = ["date,a,b"]
    for row in range(generator.choice([0, 1, 5, 60, 60])):
        date = (
            f"2020-01-{row % 28 + 1:02} {row // 28:02}:00:00"
            if generator.random() < 0.9 or not odd
            else generator.choice(cells)
        )
        a, b = (
            generator.choice(cells)
            if odd and generator.random() < 0.1
            else f"{generator.gauss(0, 1):.3f}"
            for _ in "ab"
        )
        lines.append(
            f"2020-01-01 {row // 60:02}:{row % 60:02}:00,{a},{b}" if not odd else f"{date},{a},{b}"
        )
    scale = generator.choice(["", "", "e307", "e300"])
    data = ("\n".join(lines).replace("\n0.", f"\n0.{scale}") + "\n").encode()
    if generator.random() < 0.1:
        data = b"date,a,b\n" + b"".join(
            b"2020-01-01 00:%02d:00,%s,1\n" % (i, generator.choice([b"1e308", b"-1.7e308"]))
            for i in range(60)
        )
    if generator.random() < 0.3:
        data = generator.choice(
            [
                data[: generator.randint(0, len(data))],
                generator.randbytes(generator.randint(0, 200)),
                flipped(data, generator),
            ]
        )
    Path("odd.csv").write_bytes(data)
    if generator.random() < 0.4:
        return ["forecast", "with", f"run={SERIES_RUN}", "csv=odd.csv", "horizon=4"]
    more = generator.choice(
        [[], ["data.options.date=null"], ["data.options.columns=a"], ["data.options.stride=3"]]
    )
    return ["train", "with", "data.kind=series", "codec.name=series", "data.source=odd.csv", "data.seq_len=8",
            "data.validation=0.3", "data.options.context=2", "hardware.device=cpu", *more, "-u"]  # fmt: skip


def parquet_file(generator):
    """Return a parquet file of texts or series with flipped bits, and a command that reads it."""
    texts = [f"document {row} " * 5 for row in range(12)]
    steps = [f"2020-01-01 00:{row:02}:00" for row in range(60)]
    lists = [
        [generator.gauss(0, 1) for _ in range(60)],
        generator.choice([[1.0] * 60, None, [], [None] * 60, [1e300] * 60]),
    ]
    kind, columns = generator.choice(
        [
            ("text", {"text": texts}),
            ("series", {"date": steps, "a": [generator.gauss(0, 1) for _ in steps]}),
            ("series", {"target": lists}),
        ]
    )
    pq.write_table(
        pa.table(columns), "odd.parquet", compression=generator.choice(["NONE", "SNAPPY", "GZIP"])
    )
    path = Path("odd.parquet")
    data = path.read_bytes()
    path.write_bytes(
        generator.choice(
            [
                flipped(data, generator),
                flipped(data, generator),
                data[: generator.randint(0, len(data))],
                data,
            ]
        )
    )
    if kind == "text":
        return ["train", "with", *SMALL, "data.source=odd.parquet", "-u"]
    return ["train", "with", "data.kind=series", "codec.name=series", "data.source=odd.parquet", "data.seq_len=8",
            "data.validation=0.3", "data.options.context=2", "hardware.device=cpu", "-u"]  # fmt: skip


def flipped(data, generator):
    """Bytes with a few bits changed."""
    made = bytearray(data)
    for _ in range(generator.randint(1, 8)):
        if made:
            made[generator.randrange(len(made))] ^= 1 << generator.randrange(8)
    return bytes(made)


def checkpoint(generator):
    """Return a damaged checkpoint, and a command that reads it."""
    shutil.rmtree("odd-run", ignore_errors=True)
    shutil.copytree(RUN, "odd-run")
    path = generator.choice(
        sorted(
            path for path in Path("odd-run").rglob("*") if path.suffix in (".json", ".safetensors")
        )
    )
    data = path.read_bytes()
    if path.suffix == ".json" and generator.random() < 0.6:
        content = json.loads(data)
        place = content
        for _ in range(generator.randint(0, 3)):
            inner = [each for each in place.values() if isinstance(each, dict) and each]
            place = generator.choice(inner) if inner else place
        place[generator.choice(list(place))] = generator.choice(
            [None, 1, -1, "x", "os:system", [], {}, 1e300, True, {"name": "x:y"}]
        )
        data = json.dumps(content).encode()
    else:
        data = generator.choice(
            [
                data[: generator.randint(0, len(data))],
                b"",
                flipped(data, generator),
                generator.randbytes(100),
            ]
        )
    path.write_bytes(data)
    return generator.choice(
        [
            ["segment", "with", "run=odd-run", "text=abc", "out=null"],
            ["generate", "with", "run=odd-run", "text=abc"],
            ["train", "with", "resume=odd-run", "-u"],
            ["train", "with", *SMALL, "agent.pretrained=odd-run", "-u"],
        ]
    )


KINDS = {
    "line": command_line,
    "yaml": yaml_file,
    "corpus": data_file,
    "series": series_file,
    "checkpoint": checkpoint,
}
KINDS["parquet"] = parquet_file


class ValidError(Exception):
    """Stands for the work of a command that got so far."""


def _valid(*_, **__):
    raise ValidError


def _read_data(options, _record):
    """Stands for training: reads what is small enough to read."""
    if Path(options.config.data.source).exists() and options.config.data.words_documents <= 2000:
        corpus = load_corpus(options.config.data)
        corpus.validation(4)
        corpus.train(seed=options.config.seed).next(2)
    return {}


@contextmanager
def nothing_works(monkeypatch):
    """Every command stops where its work would begin."""
    stubs = {
        "tokenv.cli.train_command.Train.work": _read_data,
        "tokenv.cli.compare.Compare.work": lambda *_: {},
        "tokenv.cli.lab.Variance.work": lambda *_: {},
        "tokenv.lab.speed.bench": _valid,
        "tokenv.lab.speed.bench_forecasts": _valid,
        "tokenv.library.server.listen": _valid,
        "tokenv.evaluation.evaluator.evaluate": _valid,
        "tokenv.evaluation.loaded_run.generate": _valid,
        "tokenv.series.forecaster.make_forecasts": _valid,
        "tokenv.cli.sacred.source_files": list,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(name, stub)
    yield


def outcome(line):
    """``ok``, ``message``, or what went wrong: an exception, several lines, control characters, a stray folder, time."""
    out = io.StringIO()
    err = io.StringIO()
    before = _folders()
    started = time.perf_counter()
    status = 0
    handlers = logging.getLogger().handlers[:]
    level = logging.getLogger().level
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            patch.object(sys, "argv", ["tokenv", *line]),
        ):
            main()
    except SystemExit as end:
        status = end.code
    except ValidError:
        pass
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {str(error)[:200]}"
    finally:
        logging.getLogger().handlers = handlers
        logging.getLogger().level = level
    if (seconds := time.perf_counter() - started) > SECONDS:
        return f"{seconds:.0f} s"
    if status == 0:
        # Sacred's own colours
        shown = "" if {"print_config", "print_dependencies"} & set(line) else out.getvalue()
        raw = HIDDEN.search(shown.replace("\t", "")) or HIDDEN.search(err.getvalue())
        return f"control characters: {raw.string[:200]!r}" if raw else "ok"
    messages = [
        line_of_output
        for line_of_output in err.getvalue().splitlines()
        if not OF_LIBRARIES.match(line_of_output)
    ]
    if (
        status != 2
        or len(messages) != 1
        or not messages[0].startswith("tokenv: ")
        or HIDDEN.search(messages[0])
    ):
        return f"exit {status!r} and {messages!r}"[:400]
    if _folders() != before:
        return f"a stray folder {_folders() - before}"
    return "message"


def _folders():
    """Folders of runs, but those of runs that began and are recorded as failed."""
    paths = [
        path
        for store in ("runs", "store")
        for path in Path(store).glob("*")
        if path.name != "_sources"
    ]
    return {
        str(path) for path in paths if not (path / "run.json").exists() or _status(path) != "FAILED"
    }


def _status(path):
    return json.loads((path / "run.json").read_text())["status"]


def try_one(kind, seed, counts: Counter, make=None, judge=outcome):
    """Try what a seed makes; what that was and what went wrong, or None."""
    line = (make or KINDS[kind])(random.Random(f"{kind} {seed}"))
    verdict = judge(line)
    counts[kind, verdict if verdict in ("ok", "message") else "wrong"] += 1
    return None if verdict in ("ok", "message") else (line, verdict)
