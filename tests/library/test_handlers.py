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
from tokenv.library import handlers
from tokenv.library.handlers import (
    MAX_BYTES,
    ModelCache,
    SegmentRequest,
    render_page,
    segment_text,
)
from tokenv.training.trainer import train

TEXT = "some <b>words</b> für\nall & none " * 3


@pytest.fixture
def model_cache(served_run: Path) -> ModelCache:
    return ModelCache([str(served_run)], "latest")


def test_a_text_is_cut_as_the_library_cuts_it(model_cache: ModelCache, served_run: Path) -> None:
    for checkpoint in list_complete(served_run / "checkpoints"):
        for threshold in (False, True):
            segment_request = SegmentRequest(
                TEXT, {str(served_run): checkpoint.name}, threshold=threshold
            )
            (answer,) = segment_text(model_cache, segment_request, seed=3)["runs"]
            spans = tokenv.load(checkpoint).spans(TEXT, seed=3, threshold=threshold)
            assert answer["spans"] == spans.as_dict()
            assert answer["checkpoint"] == checkpoint.name
            assert answer["facts"]["bits per byte"] == f"{spans.bits_per_byte:.3f}"
            assert Page(answer["html"]).texts == [TEXT]


def test_the_chosen_checkpoint_is_where_it_begins(
    model_cache: ModelCache, served_run: Path
) -> None:
    last = list_complete(served_run / "checkpoints")[-1].name
    (run,) = model_cache.as_list()
    assert run["default"] == last
    assert [kept["name"] for kept in run["checkpoints"]] == [
        path.name for path in list_complete(served_run / "checkpoints")
    ]
    assert len(run["checkpoints"]) == 3
    assert run["checkpoints"][0]["description"].startswith("1,024 bytes of training, ")
    assert (
        segment_text(model_cache, SegmentRequest("ab"), seed=0)["runs"][0]["spans"]["step"]
        == run["checkpoints"][-1]["step"]
    )


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("threshold", [False, True])
def test_the_rate_is_the_requested_one(
    model_cache: ModelCache, served_run: Path, rate: float, threshold: bool
) -> None:
    (answer,) = segment_text(
        model_cache, SegmentRequest(TEXT, rate=rate, threshold=threshold), seed=0
    )["runs"]
    drawn = sum(answer["spans"]["boundary"])
    requested = rate * len(TEXT.encode())
    forced = -(-len(TEXT.encode()) // 32)  # one at the beginning of every piece
    # a boundary may bring others along
    assert abs(drawn - max(requested, forced)) <= (3 if threshold else 1)
    plain = tokenv.load(served_run, checkpoint="latest").spans(TEXT, threshold=threshold)
    assert (answer["spans"]["logit_bias"] > 0) == (drawn > sum(plain.boundaries))
    higher = [
        one > other
        for one, other in zip(answer["spans"]["probability"], plain.probabilities, strict=True)
    ]
    assert any(higher) == (drawn > sum(plain.boundaries))


def test_probabilities_are_those_of_the_shifted_logits(served_run: Path) -> None:
    model = tokenv.load(served_run)
    moved = [model.spans(TEXT, seed=seed, rate=0.5) for seed in range(30)]
    drawn, expected = (
        sum(sum(getattr(each, of)) for each in moved) for of in ("boundaries", "probabilities")
    )
    assert drawn == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("agent", ["uniform", "whitespace"])
def test_an_agent_without_logits_has_one_rate(
    agent: str, tmp_path: Path, tiny_settings: dict
) -> None:
    train(
        resolve([], tiny_settings | {"agent": {"name": agent}}),
        tmp_path / "checkpoints",
        lambda *_: None,
    )
    model_cache = ModelCache([str(tmp_path)], "best")
    (answer,) = segment_text(model_cache, SegmentRequest(TEXT, rate=0.3), seed=0)["runs"]
    assert "does not draw by logits" in answer["error"]
    assert "spans" not in answer
    (answer,) = segment_text(model_cache, SegmentRequest(TEXT), seed=0)["runs"]
    assert "error" not in answer


def test_a_text_of_one_byte_has_no_choice(served_run: Path) -> None:
    assert tokenv.load(served_run).spans("a", rate=0.3).boundaries == [True]


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_that_is_none(served_run: Path, rate: float) -> None:
    with pytest.raises(UserError, match=r"expected boundaries per byte in \(0, 1\]"):
        tokenv.load(served_run).spans("ab", rate=rate)


def test_a_checkpoint_that_is_gone(model_cache: ModelCache, served_run: Path) -> None:
    with pytest.raises(MissingFileError, match="reload the page"):
        model_cache.model(str(served_run), "step-99999999")
    (answer,) = segment_text(
        model_cache, SegmentRequest("ab", {str(served_run): "../../secret"}), seed=0
    )["runs"]
    assert "has no checkpoint '../../secret' any more" in answer["error"]


def test_few_models_are_kept(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "CACHED_MODELS", 1)
    model_cache = ModelCache([str(served_run)], "latest")
    names = [path.name for path in list_complete(served_run / "checkpoints")]
    first = model_cache.model(str(served_run), names[0])
    assert model_cache.model(str(served_run), names[0]) is first
    for name in names:
        model_cache.model(str(served_run), name)
    assert model_cache.model(str(served_run), names[0]) is not first


@pytest.mark.parametrize(
    ("values", "message"),
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
def test_impossible_requests_are_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(SegmentRequest, values)


def test_the_page_is_whole_and_escapes_names(served_run: Path, tmp_path: Path) -> None:
    linked_run = tmp_path / "<img src=x>\x1b"
    linked_run.symlink_to(served_run)
    model_cache = ModelCache([str(linked_run)], "latest")
    shown = render_page(model_cache, seed=0)
    assert "<img" not in shown
    assert "\x1b" not in shown + str(model_cache.as_list())
    page = Page(shown)
    assert page.headings[-1] == "Token boundaries as you type"
    assert {"textarea", "input", "template", "script"} <= page.tags


def test_sliders_stand_above_what_they_change(model_cache: ModelCache) -> None:
    """On a phone one thing stands below the other: the text, the rate, and the result, whose legend comes last."""
    shown = render_page(model_cache, seed=0)
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


def test_a_text_has_no_tab_stop_of_its_own(model_cache: ModelCache) -> None:
    (answer,) = segment_text(model_cache, SegmentRequest(TEXT), seed=0)["runs"]
    stops = [attrs["tabindex"] for attrs in Page(answer["html"]).spans if "tabindex" in attrs]
    assert stops == ["-1"] * len(stops)  # the page's script makes one
    assert stops


@pytest.mark.parametrize("rate", [None, 0.4])
def test_pieces_of_a_text_are_cut_together(
    served_run: Path, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tokenv.load(served_run)
    text = "some words, and others " * 30
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
