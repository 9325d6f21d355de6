"""Whatever is malformed ends with success or one message: no traceback, no hang, no stray folder."""

import random
import shutil
from collections import Counter
from functools import partial

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import KINDS, RUN, SERIES_RUN, TEXTS, nothing_works, outcome, try_one
from malformed_http import http_outcome, http_request
from malformed_work import CALLS, try_call, working_line

from tokenv.config.files import merge
from tokenv.config.schema import Config
from tokenv.core.conversion import from_dict
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with texts, a run of text and one of series."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / TEXTS).mkdir()
    for number in range(10):
        (folder / TEXTS / f"{number}.txt").write_text("some text, and more of it.\n" * 9)
    small = {
        "model": {
            "width": 8,
            "heads": 2,
            "down_layers": 1,
            "mid_layers": 1,
            "up_layers": 1,
            "window": 8,
        },
        "train": {"symbols": 64, "batch_size": 2, "warmup_symbols": 16},
        "validation": {"sequences": 2, "batch_size": 2},
        "hardware": {"device": "cpu", "precision": "float32", "compile": "off"},
    }
    words = {
        "data": {
            "source": "words",
            "seq_len": 16,
            "words_documents": 20,
            "lexicon_size": 10,
            "validation": 0.2,
        }
    }
    series = {
        "kind": "series",
        "source": "regimes",
        "seq_len": 16,
        "validation": 0.2,
        "options": {"context": 4, "count": 4, "length": 200},
    }
    for name, data in ((RUN, words), (SERIES_RUN, {"data": series, "codec": {"name": "series"}})):
        train(from_dict(Config, merge(small, data)), folder / name / "checkpoints", lambda *_: None)
    shutil.copytree(folder / RUN, folder / "again")
    (folder / "small.yaml").write_text(yaml.safe_dump(merge(small, words)))
    return folder


def tried(count, attempt):
    """Try so many seeds."""

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.integers(0, 2**64))
    def each(seed):
        assert attempt(seed) is None

    each()


def try_work(seed):
    """Run the command line that a seed makes to its end; the line and what went wrong, or None."""
    line = working_line(random.Random(f"work {seed}"))
    verdict = outcome(line)
    return None if verdict in ("ok", "message") else (line, verdict)


WORK = {"work": try_work} | {kind: partial(try_call, kind) for kind in CALLS}


def run(kind, count, place, monkeypatch, capsys, **how):
    monkeypatch.chdir(place)
    counts = Counter()
    with nothing_works(monkeypatch):
        tried(count, lambda seed: try_one(kind, seed, counts, **how))
    with capsys.disabled():
        print(
            f"\n{kind}: {counts.total()} tried",
            *(f"{n} {what}" for (_, what), n in sorted(counts.items())),
            sep=", ",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_malformed_ends_with_one_message(kind, place, monkeypatch, capsys):
    run(kind, 20, place, monkeypatch, capsys)


@pytest.mark.parametrize("kind", WORK)
def test_odd_values_of_what_works_end_with_one_message(kind, place, monkeypatch):
    monkeypatch.chdir(place)
    tried(8, WORK[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORK)
def test_a_thousand_odd_values_of_what_works_end_with_one_message(kind, place, monkeypatch):
    monkeypatch.chdir(place)
    tried(1000, WORK[kind])


def test_a_malformed_request_is_answered_with_one_message(place, monkeypatch, capsys):
    run("http", 50, place, monkeypatch, capsys, make=http_request, judge=http_outcome)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_malformed_ones_end_with_one_message(kind, place, monkeypatch, capsys):
    run(kind, {"line": 6000, "yaml": 2000}.get(kind, 1000), place, monkeypatch, capsys)


@pytest.mark.slow
def test_thousands_of_malformed_requests_are_answered_with_one_message(place, monkeypatch, capsys):
    run("http", 3000, place, monkeypatch, capsys, make=http_request, judge=http_outcome)
