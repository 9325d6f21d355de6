"""Statistics over training are those of each checkpoint in the same text."""

from pathlib import Path

import pytest
from tiny import settings

from tokenv.config.files import resolve
from tokenv.core.checkpoints import list_complete
from tokenv.data.corpus import load_corpus
from tokenv.evaluation import boundary_stats
from tokenv.evaluation.boundary_stats import (
    BoundaryStats,
    boundary_stats_of_run,
    boundary_stats_over_training,
)
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.text_report import training_table
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(resolve([], settings()), folder / "checkpoints", lambda *_: None)
    return folder


def test_every_kept_checkpoint_has_a_column(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = load_run(str(run), "latest")
    batch = load_corpus(last.config.data).validation(8)
    monkeypatch.setattr(boundary_stats, "MIN_COUNT", 1)
    stats = boundary_stats_over_training(last, batch)
    assert list(stats) == [1024, 2048, 2560]
    for path, each in zip(list_complete(run / "checkpoints"), stats.values(), strict=True):
        assert each == boundary_stats_of_run(load_run(str(path)), batch)
    assert len({str(each.contexts) for each in stats.values()}) == 3
    ((header, *rows),) = training_table(stats).values()
    assert header == ["byte", "1,024", "2,048", "2,560"]
    assert [row[0] for row in rows] == list(stats[2560].classes)
    monkeypatch.setattr(boundary_stats, "MAX_CHECKPOINTS", 2)
    assert list(boundary_stats_over_training(last, batch)) == [1024, 2560]


def test_a_damaged_checkpoint_has_none(run: Path) -> None:
    last = load_run(str(run), "latest")
    first = list_complete(run / "checkpoints")[0] / "model.safetensors"
    sound = first.read_bytes()
    first.write_bytes(sound[:-1])
    batch = load_corpus(last.config.data).validation(4)
    assert list(boundary_stats_over_training(last, batch)) == [2048, 2560]
    first.write_bytes(sound)


def test_an_absent_class_has_no_row_and_one_checkpoint_alone_has_no_growth() -> None:
    one, other = (
        BoundaryStats({name: (1.0, rate)}, [], [])
        for name, rate in (("space", 0.5), ("letter", 0.25))
    )
    ((_, *rows),) = training_table({10: one, 20: other}).values()
    assert rows == [["space", "0.500", "–"], ["letter", "–", "0.250"]]
    assert training_table({10: one}) == {}
