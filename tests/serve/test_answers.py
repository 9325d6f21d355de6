"""The page gets the same results as the library for the same text."""

from pathlib import Path

import pytest
import torch
from pages import Page

import tokenv
from tokenv.config.files import resolve
from tokenv.core.checkpoints import list_complete
from tokenv.core.conversion import from_dict
from tokenv.core.errors import MissingFileError, UserError
from tokenv.library.handlers import (
    CACHED_MODELS,
    MAX_BYTES,
    ModelCache,
    SegmentRequest,
    render_page,
    segment_text,
)
from tokenv.training.trainer import train

TEXT = "some <b>words</b> für\nall & none " * 3


@pytest.fixture
def shelf(tiny_run: Path) -> ModelCache:
    return ModelCache([str(tiny_run)], "latest")


def test_a_text_is_cut_as_the_library_cuts_it(shelf: ModelCache, tiny_run: Path) -> None:
    for checkpoint in list_complete(tiny_run / "checkpoints"):
        for threshold in (False, True):
            asked = SegmentRequest(TEXT, {str(tiny_run): checkpoint.name}, threshold=threshold)
            (said,) = segment_text(shelf, asked, seed=3)["runs"]
            spans = tokenv.load(checkpoint).spans(TEXT, seed=3, threshold=threshold)
            assert said["spans"] == spans.as_dict()
            assert said["checkpoint"] == checkpoint.name
            assert said["facts"]["bits per byte"] == f"{spans.bits_per_byte:.3f}"
            assert Page(said["html"]).texts == [TEXT]


def test_the_chosen_checkpoint_is_where_it_begins(shelf: ModelCache, tiny_run: Path) -> None:
    last = list_complete(tiny_run / "checkpoints")[-1].name
    (run,) = shelf.as_list()
    assert run["default"] == last
    assert [kept["name"] for kept in run["checkpoints"]] == [
        path.name for path in list_complete(tiny_run / "checkpoints")
    ]
    assert len(run["checkpoints"]) == 3
    assert run["checkpoints"][0]["description"].startswith("1,024 bytes of training, ")
    assert (
        segment_text(shelf, SegmentRequest("ab"), seed=0)["runs"][0]["spans"]["step"]
        == run["checkpoints"][-1]["step"]
    )


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("threshold", [False, True])
def test_the_rate_is_the_asked_one(
    shelf: ModelCache, tiny_run: Path, rate: float, threshold: bool
) -> None:
    (said,) = segment_text(shelf, SegmentRequest(TEXT, rate=rate, threshold=threshold), seed=0)[
        "runs"
    ]
    drawn, wanted = sum(said["spans"]["boundary"]), rate * len(TEXT.encode())
    forced = -(-len(TEXT.encode()) // 32)  # one at the beginning of every piece
    # a boundary may bring others along
    assert abs(drawn - max(wanted, forced)) <= (3 if threshold else 1)
    plain = tokenv.load(tiny_run, checkpoint="latest").spans(TEXT, threshold=threshold)
    assert (said["spans"]["logit_bias"] > 0) == (drawn > sum(plain.boundaries))
    higher = [
        one > other
        for one, other in zip(said["spans"]["probability"], plain.probabilities, strict=True)
    ]
    assert any(higher) == (drawn > sum(plain.boundaries))


def test_probabilities_are_those_of_the_shifted_logits(tiny_run: Path) -> None:
    model = tokenv.load(tiny_run)
    moved = [model.spans(TEXT, seed=seed, rate=0.5) for seed in range(30)]
    drawn, expected = (
        sum(sum(getattr(each, of)) for each in moved) for of in ("boundaries", "probabilities")
    )
    assert drawn == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("agent", ["uniform", "whitespace"])
def test_who_has_no_logits_cannot_be_moved(agent: str, tmp_path: Path, tiny_settings: dict) -> None:
    train(
        resolve([], tiny_settings | {"agent": {"name": agent}}),
        tmp_path / "checkpoints",
        lambda *_: None,
    )
    shelf = ModelCache([str(tmp_path)], "best")
    (said,) = segment_text(shelf, SegmentRequest(TEXT, rate=0.3), seed=0)["runs"]
    assert "does not draw by logits" in said["error"]
    assert "spans" not in said
    (said,) = segment_text(shelf, SegmentRequest(TEXT), seed=0)["runs"]
    assert "error" not in said


def test_a_text_of_one_byte_has_no_choice(tiny_run: Path) -> None:
    assert tokenv.load(tiny_run).spans("a", rate=0.3).boundaries == [True]


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_that_is_none(tiny_run: Path, rate: float) -> None:
    with pytest.raises(UserError, match=r"expected boundaries per byte in \(0, 1\]"):
        tokenv.load(tiny_run).spans("ab", rate=rate)


def test_a_checkpoint_that_is_gone(shelf: ModelCache, tiny_run: Path) -> None:
    with pytest.raises(MissingFileError, match="reload the page"):
        shelf.model(str(tiny_run), "step-99999999")
    (said,) = segment_text(shelf, SegmentRequest("ab", {str(tiny_run): "../../secret"}), seed=0)[
        "runs"
    ]
    assert "has no checkpoint '../../secret' any more" in said["error"]


def test_few_models_are_kept(
    shelf: ModelCache, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [path.name for path in list_complete(tiny_run / "checkpoints")]
    first = shelf.model(str(tiny_run), names[0])
    assert shelf.model(str(tiny_run), names[0]) is first
    monkeypatch.setattr(shelf, "_capacity", 2)
    for name in names:
        shelf.model(str(tiny_run), name)
    assert shelf.model(str(tiny_run), names[0]) is not first
    assert CACHED_MODELS >= 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": ""}, "the text is empty"),
        (
            {"text": "é" * MAX_BYTES},
            f"the text has {2 * MAX_BYTES:,} bytes: expected at most {MAX_BYTES:,}",
        ),
        ({"text": 5}, "expected text"),
        ({"text": "a", "rate": "much"}, "expected a number"),
        ({"text": "a", "rate": float("nan")}, "expected a"),
        ({"text": "a", "threshold": "perhaps"}, "expected true or false"),
        ({"text": "a", "checkpoints": [1]}, "checkpoints"),
        ({"text": "a", "colour": 1}, "unknown key colour"),
    ],
)
def test_what_cannot_be_asked(values: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_dict(SegmentRequest, values)


def test_the_page_is_whole_and_escapes_names(tiny_run: Path, tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x>\x1b"
    evil.symlink_to(tiny_run)
    shelf = ModelCache([str(evil)], "latest")
    shown = render_page(shelf, seed=0)
    assert "<img" not in shown
    assert "\x1b" not in shown + str(shelf.as_list())
    found = Page(shown)
    assert found.headings[-1] == "Token boundaries as you type"
    assert {"textarea", "input", "template", "script"} <= found.tags


def test_sliders_stand_above_what_they_change(shelf: ModelCache) -> None:
    """On a phone one thing stands below the other: the text, the rate, and the result, whose legend comes last."""
    shown = render_page(shelf, seed=0)
    parts = (
        'id="text"',
        'id="rate"',
        'id="status"',
        'id="runs"',
        'class="legend"',
        'class="choice"',
        'class="drawn"',
    )
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_a_text_has_no_tab_stop_of_its_own(shelf: ModelCache) -> None:
    (said,) = segment_text(shelf, SegmentRequest(TEXT), seed=0)["runs"]
    stops = [attrs["tabindex"] for attrs in Page(said["html"]).spans if "tabindex" in attrs]
    assert stops == ["-1"] * len(stops)  # the page's script makes one
    assert stops


@pytest.mark.parametrize("rate", [None, 0.4])
def test_pieces_of_a_text_are_cut_together(
    tiny_run: Path, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tokenv.load(tiny_run), "some words, and others " * 30
    passes: list[torch.Size] = []
    encode = model.lm.encode
    monkeypatch.setattr(
        model.lm, "encode", lambda symbol_BN: passes.append(symbol_BN.shape) or encode(symbol_BN)
    )
    together = model.spans(text, rate=rate)
    # whole pieces and the rest; a rate takes a search
    assert len(passes) == (2 if rate is None else 4)
    monkeypatch.setattr("tokenv.evaluation.evaluator.SYMBOLS_PER_PASS", 1)
    alone = model.spans(text, rate=rate)
    assert len(passes) > 20
    assert together.boundaries == alone.boundaries
    assert together.probabilities == pytest.approx(alone.probabilities, abs=1e-5)
    assert together.bits == pytest.approx(alone.bits, abs=1e-4)
