# ruff: noqa: E501
"""What users may write wrongly, one by one: each ends with a message that names it."""

import errno
import gzip
import io
import json
import logging
import lzma
import re
import sys
from pathlib import Path

import pytest
import zstandard
from test_fuzz import place  # noqa: F401

from tokenv.cli import main as cli
from tokenv.config.literals import check_plain, read_words
from tokenv.config.registry import ESTIMATORS, find
from tokenv.core.errors import MissingFileError, RunFailedError, UserError
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.series.config import SeriesConfig
from tokenv.series.tables import read_csv


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("tokenv.cli.sacred.source_files", list)


@pytest.fixture
def message_of(monkeypatch, capsys):
    """Return the message with which a command line ends."""

    def of(*words: str, status: int = 2) -> str:
        handlers = logging.getLogger().handlers[:]
        monkeypatch.setattr(sys, "argv", ["tokenv", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        logging.getLogger().handlers = handlers
        assert end.value.code == status
        (line,) = [
            line
            for line in capsys.readouterr().err.splitlines()
            if not re.match("WARNING|INFO|ERROR", line)
        ]
        assert line.startswith("tokenv: ")
        return line

    return of


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train with train.symbols=1e999", "train.symbols = inf: expected a whole number"),
        ("train with train.symbols=1e300", "expected a whole number below 2"),
        (
            "train with seed=1e18",
            "seed = 1000000000000000000: expected a whole number from 0 to 4294967295",
        ),
        ("train with rate=1j", "rate = 1j: expected a number, text, true or false"),
        ("train with data.seq_len=b'x'", "data.seq_len = b'x': expected a number, text"),
        ("train with data={1:2}", "unknown key data.1"),
        ("train with agent={'name':None}", "agent.name = None: expected the name of one"),
        ("train with estimator.gamma={'a':1}", "estimator.gamma = {'a': 1}: expected a number"),
        ("train with agent.window={'a':1}", "agent.window = {'a': 1}: expected"),
        (f"train with rate={'-' * 5000}1", "rate is nested too deeply"),
        (f"train with agent={'[' * 100}{']' * 100}", "nested more than 32 levels deep"),
        ("train foo", "'foo' is no command of tokenv train: expected tokenv train with"),
        (
            "train with train.learning_rate=1e999",
            "train.learning_rate = inf: expected a finite number",
        ),
        ("train with train.weight_decay=inf", "train.weight_decay = 'inf': expected"),
        (
            "train with model.output_softcap=1e999",
            "model.output_softcap = inf: expected a finite number",
        ),
        ("train with data=1 data.source=words", "is given, and data = 1, too"),
        (
            "train with model.mid_layers=1000000",
            "model.mid_layers = 1000000: expected 1 to 1,000 layers",
        ),
        ("train with model.width=1e7", "GiB of memory"),
        ("train with train.batch_size=1e9", "most of it by train.batch_size, data.seq_len"),
        ("train with data.source=words data.words_documents=1e12", "most of it by data"),
        ("train with agent.width=1e6 agent.name=odd", "agent.name = 'odd' is unknown"),
        (
            "compare with compare-quick seeds=[1,1]",
            "seeds = [1, 1]: expected whole numbers, every seed once",
        ),
        ("compare with compare-quick seeds=[None]", "seeds = [None]: expected"),
        ("compare with compare-quick methods=3", "methods = 3: expected a section"),
        ("compare with compare-quick only={'a':1}", "only names"),
        ("compare with compare-quick base=3", "no configuration '3'"),
        ("compare with runs=[]", "nothing to compare"),
        ("compare with compare-quick common=3", "common = 3: expected a section"),
        ("variance with quick estimators=[1]", "estimators = '1' is unknown"),
        ("variance with quick estimators=['rloo(1)']", "options need names"),
        ("bench with quick repeats=0", "repeats = 0: expected a whole number of at least 1"),
        ("bench with quick stepping=abc", "stepping = 'abc': expected true or false"),
        ("evaluate with run=run data.odd=1", "unknown key data.odd"),
        ("evaluate with run=run data=3", "data = 3: expected a section"),
        (
            "evaluate with run=run sequences=0",
            "sequences = 0: expected a whole number of at least 1",
        ),
        ("forecast with run=series-run quantiles=[0.5,nan]", "quantiles = "),
        ("segment with run=run file=texts", "file = 'texts' is a folder: expected one file"),
        (
            "train with estimator.num_samples=3",
            "estimator.num_samples is no option of estimator 'reinforce': known are",
        ),
        (
            "train with agent.name=mytrick:mine",
            "mytrick.py in the current folder write PYTHONPATH=. before the command",
        ),
        ("forecast with run=series-run csv=texts", "csv = 'texts' is a folder: expected one file"),
        ("forecast with run=series-run csv=none.csv", "csv = 'none.csv': there is no such file"),
        ("generate with run=run text=a temperature=nan", "temperature = 'nan': expected 0 or more"),
        ("generate with run=run text=a temperature=-1", "temperature = -1.0: expected 0"),
        ("generate with run=run text=a top_p=2", "top_p = 2.0: expected a number in (0, 1]"),
        (
            "generate with run=run text=a max_new_tokens=0",
            "max_new_tokens = 0: expected a whole number of at least 1",
        ),
        (
            "generate with run=run text=a max_new_tokens=1e12",
            "writing 1,000,000,000,001 symbols would need at least",
        ),
        ("generate with run=run text=", "the text is empty"),
        ("train with quick -l zzz", "--loglevel 'zzz': expected 0 to 50"),
        ("train with quick -b x", "--beat-interval 'x': expected a positive number"),
        ("train with quick -i ../x", "--id '../x': expected a name"),
        ("train with \x1b[31mred", r"no configuration '\x1b[31mred'"),
        ("segment with run=texts/0.txt/x text=a", "texts/0.txt/x"),
        (
            "train with quick train.symbols=1M",
            "train.symbols = '1M': expected a whole number of at least 1, such as",
        ),
        ("train with quick symbols=1000", "unknown key symbols: did you mean train.symbols?"),
        (
            "train with quick batch_size=3",
            "did you mean train.batch_size or validation.batch_size?",
        ),
        (
            "train with quick data=words",
            "expected a section with keys of its own, such as data.kind",
        ),
        (
            "train with quick rate=20%",
            "rate = '20%': expected boundaries per symbol in (0, 1), such as 0.2",
        ),
        ("train with quick rate=[0.05,0.5]", "or a range such as rate.min=0.05 rate.max=0.5"),
        ("train with quick train.learning_rate=3e-3x", "= '3e-3x': expected a positive number"),
        (
            "train with quick seed=random",
            "seed = 'random': expected a whole number from 0 to 4294967295",
        ),
        ("train with quick codec.name=series", "such as bytes, or data.kind=series beside it"),
        ("train with quick freeze_lm=True", "freeze_lm = True: expected init_from=RUN beside it"),
        (
            "train with quick imitation.teacher.name=whitespce",
            "imitation.teacher.name = 'whitespce' is unknown",
        ),
        (
            "train with quick callbacks=shrink",
            "callbacks = 'shrink': expected names, in a list such as [a, b]",
        ),
        (
            "train with quick callbacks=[shrnk]",
            "callbacks.name = 'shrnk' is unknown: did you mean 'shrink'?",
        ),
        (
            "train with quick callbacks=[{gamma:\u00a01}]",
            "expected names, in a list such as [a, b], or [{name: a",
        ),
        ("train with quick callbacks=[shrink", "callbacks = '[shrink': expected names"),
        ("train with quick -seed=3", "did you mean tokenv train with quick seed=3?"),
        (
            "train with rate = 0.2",
            "expected words with dots between, such as train.symbols=1e6, without blanks",
        ),
        (
            "check mytrick:mine",
            "(the module without .py), of the current folder or of an installed package",
        ),
        ("segment with run=series-run text=abc", "data.kind = 'series': expected a run of text"),
        (
            "segment with run=run text=abc tokens=2 rate=0.2",
            "tokens = 2 and rate = 0.2: expected one of them",
        ),
        (
            "generate with run=run text=a flops=1 rate=0.2",
            "flops = 1 and rate = 0.2: expected one of them",
        ),
        (
            "evaluate with run=run flops=3 rates=[0.1]",
            "flops = 3 and rates = [0.1]: expected one of them",
        ),
        (
            "evaluate with run=run rates=0.1",
            "rates = 0.1: expected numbers, in a list such as [0.1, 0.2]",
        ),
        ("evaluate with run=run source=x", "unknown key source: did you mean data.source?"),
        (
            "compare with compare-quick train.symbols=9",
            "did you mean common.train.symbols or pretrain.train.symbols?",
        ),
        (
            "compare with compare-quick seeds=[]",
            "seeds = []: expected at least one whole number, such as seeds=[0,1,2]",
        ),
        (
            "compare with compare-quick seeds=[a]",
            "seeds = ['a']: expected whole numbers, every seed once, such as seeds",
        ),
        (
            "compare with compare-quick rates=[0.1,0.1]",
            "every rate once, such as rates=[0.05,0.1,0.2]",
        ),
        (
            "compare with compare-quick tune.rate=[0.1] tune_seeds=[0]",
            "have 0 in common: expected seeds that no run",
        ),
        (
            "compare with compare-quick only=lerned",
            "only names 'lerned', which is no method: did you mean",
        ),
        ("compare with compare-quick only_protocols=a", "which is no protocol: leave it out"),
        (
            "variance with quick estimators=rlo",
            "expected a list of names or calls, such as estimators=[reinforce,rloo]",
        ),
        (
            "bench with quick scaling.data.seq_len=64",
            "expected a list of sizes, as in scaling={data.seq_len: [1024",
        ),
        ("bench with quick scaling={'width':[1]}", "unknown key width: did you mean model.width?"),
        (
            "bench with quick samples=[1]",
            "samples = [1]: expected whole numbers of at least 2, to measure",
        ),
    ],
)
def test_a_mistake_is_named(place, message_of, monkeypatch, line, message):  # noqa: F811
    monkeypatch.chdir(place)
    assert message in message_of(*line.split(" "))
    assert not Path("runs").exists()


def test_null_is_null_and_true_is_true(place, monkeypatch, capsys):  # noqa: F811
    assert read_words(["out=null", "a.b=true", "text=abc", "quick"]) == (
        {"out": None, "a": {"b": True}, "text": "abc"},
        ["quick"],
    )
    monkeypatch.chdir(place)
    monkeypatch.setattr(
        sys, "argv", ["tokenv", "segment", "with", "run=run", "text=true", "out=null"]
    )
    cli.main()
    assert not Path("null").exists()
    assert "true" in capsys.readouterr().out.replace("│", "")


def test_a_text_is_read_from_standard_input_and_from_packed_files(place, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(place)
    Path("packed.txt.gz").write_bytes(gzip.compress(b"from a file"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    for file, text in (("-", "from a pipe"), ("packed.txt.gz", "from a file")):
        monkeypatch.setattr(
            sys, "argv", ["tokenv", "segment", "-u", "with", "run=run", f"file={file}", "out=null"]
        )
        cli.main()
        assert text in capsys.readouterr().out.replace("│", "")


def test_what_is_written_does_not_steer_a_terminal(place, monkeypatch, capsys, caplog):  # noqa: F811
    monkeypatch.chdir(place)
    monkeypatch.setattr(
        cli.sys,
        "argv",
        ["tokenv", "generate", "with", "run=run", "text=\x1b[31mred", "max_new_tokens=2"],
    )
    cli.main()
    shown = capsys.readouterr()
    assert "\x1b[31m" not in shown.out + shown.err
    assert "\x1b" not in caplog.text  # Sacred's line "Result: ..."


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (UserError("odd\nvalue \x1b[1m"), r"odd value \x1b[1m", 2),
        (MissingFileError("none"), "none", 2),
        (RunFailedError("the loss is NaN"), "the loss is NaN", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", 2),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/1"),
            "runs/1: Permission denied",
            2,
        ),
        (FileExistsError(errno.EEXIST, "File exists", "runs"), "runs: File exists", 2),
        (MemoryError(), "not enough memory", 2),
    ],
)
def test_what_is_not_ours_is_one_message(message_of, monkeypatch, error, message, status):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    assert message in message_of("train", status=status)


@pytest.mark.parametrize(
    "error", [ValueError("ours"), KeyError("x"), RuntimeError("odd"), OSError("odd"), ImportError()]
)
def test_what_is_ours_keeps_its_traceback_and_asks_for_a_report(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    monkeypatch.setattr(sys, "argv", ["tokenv", "train"])
    with pytest.raises(type(error)) as raised:
        cli.main()
    assert "please report" in raised.value.__notes__[-1]


@pytest.mark.parametrize(
    "body", ["raise SystemExit(0)", "1 / 0", "raise KeyError('x')", "import nowhere", "def"]
)
def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch, body):
    (tmp_path / "odd_plugin.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_plugin", raising=False)
    with pytest.raises(UserError, match=r"estimator\.name = 'odd_plugin:Odd' cannot be imported"):
        find("estimator", "odd_plugin:Odd", ESTIMATORS)


@pytest.mark.parametrize(
    "text",
    [
        "1: 2", "[a]: 1", "a: !!binary aGk=", "a: !!set {b}", "a: !!int x", "a: !!timestamp x", "a: &a [*a]",
        "[" * 2000, "{a: " * 2000, "agent: {name: }", "train: {symbols: .inf}", "seed: 0x" + "f" * 5000, "seed: " + "9" * 5000,
        "a: &a [1,1,1,1,1,1,1,1,1]\n" + "\n".join(
            f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in zip("abcdefg", "bcdefgh", strict=True)
        ),
    ],
)  # fmt: skip
def test_a_yaml_file_of_other_things_is_refused(message_of, tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    message_of("train", "with", str(tmp_path / "odd.yaml"))


def test_what_is_too_much_is_refused():
    with pytest.raises(UserError, match="more than 100,000 values"):
        check_plain([[0] * 1000] * 1000, "odd")


def corpus(path: Path, column: str = "text") -> None:
    load_corpus(DataConfig(source=str(path), column=column, seq_len=8, validation=0.5))


def test_a_line_without_the_field_is_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "some words"}\n' * 5 + '{"other": "x"}\n')
    with pytest.raises(UserError, match="row 5, has no column 'text' but other"):
        corpus(path)


def test_json_that_crashed_its_reader_is_refused(tmp_path):
    (tmp_path / "odd.jsonl").write_bytes(b'null\n{\n{"text": ""}\nnull\n')
    with pytest.raises(UserError, match="line 1 holds 'None'; expected an object"):
        corpus(tmp_path / "odd.jsonl")


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("gz", gzip.compress), ("xz", lzma.compress), ("zst", zstandard.ZstdCompressor().compress)],
)
def test_a_packed_corpus_that_is_cut_off_is_refused(tmp_path, suffix, pack):
    lines = "".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(999)).encode()
    whole = pack(lines[:9000]) + pack(lines[9000:])  # two frames are as good as one
    path = tmp_path / f"texts.jsonl.{suffix}"
    path.write_bytes(whole)
    corpus(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="cannot be read as json"):
        corpus(path)


@pytest.mark.parametrize("value", ["1e308", "-1e200", "inf", "1e999"])
def test_a_value_that_cannot_be_squared_is_refused(tmp_path, value):
    (tmp_path / "odd.csv").write_text(f"a\n1\n{value}\n")
    with pytest.raises(UserError, match="line 3, column 'a'"):
        read_csv(tmp_path / "odd.csv", SeriesConfig(date=None))


def test_control_characters_reach_no_csv(tmp_path):
    from tokenv.plotting.console import write_csv

    path = write_csv(tmp_path / "methods.csv", ["method"], [["\x1b[31mred", 1]])
    assert io.StringIO(path.read_text()).read() == "method\n\\x1b[31mred,1\n"
