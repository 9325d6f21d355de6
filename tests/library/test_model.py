"""``tokenv.load``: a model has the same results in Python as with the commands, also after saving and sharing."""

import json
import math
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from tiny import settings

import tokenv
from tokenv import Model
from tokenv.cli.main import run_command
from tokenv.config.files import resolve
from tokenv.core import trust
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.run_folders import DIGESTS, write_digests
from tokenv.evaluation import loaded_run
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import load_run, score_texts
from tokenv.library import model_hub
from tokenv.training.trainer import train

TEXT = "a tale of für and wide, longer than thirty-two bytes;" * 3


def log_likelihoods(trained, text, **options):
    """Return the log-likelihood of each byte of a text."""
    return score_texts(trained, [text], EvalOptions(**options))[0][0]


@pytest.fixture(scope="module")
def folder(tiny_run: Path) -> Path:
    return tiny_run


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return tokenv.load(folder)


@pytest.mark.parametrize("text", [TEXT, TEXT.encode(), b"\xff\x00" * 20, "x"])
def test_spans_cover_a_text(model: Model, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    spans = model.spans(text)
    assert b"".join(spans.tokens) == data == spans.text
    assert model.tokens(text) == spans.tokens == [span.text for span in spans]
    assert len(spans.probabilities) == len(spans.bits) == len(data)
    for span in spans:
        assert data[span.start : span.end] == span.text
        assert span.probability == spans.probabilities[span.end - 1]
        assert span.bits == pytest.approx(
            sum(b for b in spans.bits[span.start : span.end] if b is not None)
        )
    ends = [i + 1 for i, drawn in enumerate(spans.boundaries) if drawn]
    assert sorted({*ends, len(data)}) == [span.end for span in spans]
    assert spans[-1].end == len(data)
    assert [span.text for span in spans[:2]] == spans.tokens[:2]
    assert "tokens of" in repr(spans)


@settings_of_hypothesis(max_examples=25)
@given(
    st.binary(min_size=1, max_size=100),
    st.sampled_from([{}, {"seed": 3}, {"threshold": True}, {"rate": 0.4}]),
)
def test_offsets_are_the_ends_of_spans(model: Model, text: bytes, options: dict[str, Any]) -> None:
    ends = [span.end for span in model.spans(text, **options)]
    assert model.offsets(text, **options).tolist() == ends


def test_offsets_need_neither_tokens_nor_decoder(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [span.end for span in model.spans(TEXT)]

    def refuse(*_: Any) -> None:
        raise AssertionError("only the encoder is needed")

    for layer in (*model.lm.mid, *model.lm.up, model.lm.head, model.lm.early_head):
        monkeypatch.setattr(layer, "forward", refuse)
    assert model.offsets(TEXT).tolist() == ends


def test_spans_are_those_of_the_command(model: Model, folder: Path, tmp_path: Path) -> None:
    result = run_command("segment", ["with", f"run={folder}", f"text={TEXT}", "out=null", "seed=3"])
    assert result["boundaries"] == sum(
        any(model.spans(TEXT, seed=3).boundaries[start:end]) for start, end in _characters(TEXT)
    )


def _characters(text: str) -> list[tuple[int, int]]:
    ends = [len(text[: i + 1].encode()) for i in range(len(text))]
    return list(zip([0, *ends], ends, strict=False))


def test_bits_are_missing_only_where_nothing_stands_before(model: Model) -> None:
    spans = model.spans(TEXT)
    assert [i for i, bits in enumerate(spans.bits) if bits is None] == list(
        range(0, len(TEXT.encode()), 32)
    )
    assert all(bits > 0 for bits in spans.bits if bits is not None)


def test_likelihoods_of_a_short_text_are_those_of_its_spans(model: Model) -> None:
    text = TEXT.encode()[:32]
    spans = model.spans(text, threshold=True)
    total = -math.log(2) * sum(bits for bits in spans.bits if bits is not None)
    assert model.log_likelihood(text, threshold=True) == pytest.approx(total, rel=1e-5)
    context = text[:20]
    rest = text[20:]
    parts = model.log_likelihood(context, threshold=True) + model.log_likelihood(
        rest, context=context, threshold=True
    )
    assert parts == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 48, 49, 100, 600])
def test_every_byte_but_the_first_has_a_likelihood(folder: Path, length: int) -> None:
    trained = load_run(str(folder))
    text = (TEXT.encode() * 4)[:length]
    nats = log_likelihoods(trained, text, threshold=True, batch_size=3)
    assert len(nats) == length
    assert math.isnan(nats[0])
    assert all(each < 0 for each in nats[1:])
    assert nats == pytest.approx(
        log_likelihoods(trained, text, threshold=True, batch_size=16), rel=1e-4, nan_ok=True
    )
    assert nats[1:32] == pytest.approx(
        log_likelihoods(trained, text[:32], threshold=True)[1:], rel=1e-4
    )


def test_a_byte_of_a_long_text_is_read_in_a_window_that_begins_before_it(folder: Path) -> None:
    """Check windows of 32 bytes which begin at 0, 16, 32, ..., so that a byte has at least 16 preceding ones."""
    trained = load_run(str(folder))
    text = TEXT.encode()
    nats = log_likelihoods(trained, text, threshold=True)
    window = log_likelihoods(trained, text[16:48], threshold=True)
    assert nats[32:48] == pytest.approx(window[16:], rel=1e-4)


def test_generation_is_that_of_the_command(model: Model, folder: Path) -> None:
    printed = run_command(
        "generate", ["with", f"run={folder}", "text=def", "max_new_tokens=12", "seed=2"]
    )
    written = model.generate(b"def", 12, seed=2)
    assert len(written) == 15
    assert model.generate("def", 12, seed=2) == written.decode(errors="replace")
    shown = "".join(c if c.isprintable() else "?" for c in written.decode(errors="replace"))
    assert shown[:3] == printed[:3] == "def"
    assert model.generate("a", 20, temperature=0, stop="\xff") == model.generate(
        "a", 20, temperature=0
    )


def test_several_texts_are_continued_as_each_alone(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loaded_run, "ROWS_PER_PASS", 4)
    prompts = ["a longer text", b"x", "def ", "class A"]
    alone = [[model.generate(text, 9, seed=seed, stop="e") for seed in (3, 4)] for text in prompts]
    assert model.generate(prompts, 9, seed=3, stop="e", num_return_sequences=2) == alone
    assert model.generate(prompts, 9, seed=3, stop="e") == [first for first, _ in alone]
    assert model.generate("def ", 9, seed=3, stop="e", num_return_sequences=2) == alone[2]
    output = tmp_path / "spans.json"
    options = [
        "max_new_tokens=9",
        "seed=3",
        "stop=e",
        "top_p=0.95",
        "temperature=0.8",
        "num_return_sequences=2",
        f"json={output}",
    ]
    assert run_command("generate", ["with", f"run={folder}", "text=def ", *options])
    written = [one["bytes"] for one in json.loads(output.read_text())]
    assert written == list(
        map(len, model.generate(b"def ", 9, seed=3, stop="e", num_return_sequences=2))
    )


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda model: model.spans(""), "the text is empty"),
        (lambda model: model.offsets(""), "the text is empty"),
        (lambda model: model.tokens(3), "expected str or bytes"),
        (lambda model: model.spans("\ud800"), "expected Unicode text"),
        (lambda model: model.generate(""), "the text is empty"),
        (lambda model: model.generate("a", 0), "max_new_tokens = 0"),
        (lambda model: model.generate(["a", ""]), "the text is empty"),
        (lambda model: model.generate("a", num_return_sequences=0), "num_return_sequences = 0"),
        (lambda model: model.generate("a", temperature=-1), "temperature"),
        (lambda model: model.log_likelihood("a"), "nothing to predict"),
        (lambda model: model.log_likelihood("", context="a"), "nothing to predict"),
    ],
)
def test_an_impossible_request_is_one_message(model: Model, ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(model)


def test_a_notebook_draws_it(model: Model) -> None:
    drawn = model.spans("<b>bold & </b>")._repr_html_()
    assert drawn.startswith("<iframe srcdoc=")
    inside = unescape(re.findall(r'srcdoc="([^"]*)"', drawn)[0])
    assert "<html" in inside
    assert "<b>bold" not in inside
    assert "checkpoint" in inside
    assert "the first 20,000 of 60,000 bytes" in model.spans("a" * 60_000)._repr_html_()
    assert "<th>parameters</th>" in model._repr_html_()
    assert "bits per byte" in repr(model)


# --- sharing ---


def test_a_saved_model_is_the_same_model(model: Model, folder: Path, tmp_path: Path) -> None:
    saved = model.save_pretrained(tmp_path / "mine")
    again = Model.from_pretrained(saved)
    for name, tensor in model.lm.state_dict().items():
        assert torch.equal(again.lm.state_dict()[name], tensor)
    assert again.tokens(TEXT) == model.tokens(TEXT)
    assert again.config == model.config
    assert repr(again).partition(":")[2] == repr(model).partition(":")[2]
    assert {path.name for path in saved.iterdir()} == {
        "README.md",
        DIGESTS,
        "model.safetensors",
        "state.json",
    }
    assert 'tokenv.load("' in (saved / "README.md").read_text()
    run_command("segment", ["with", f"run={saved}", "text=abc", "out=null"])
    again.save_pretrained(saved)  # once more over itself
    with pytest.raises(UserError, match="is a run folder"):
        model.save_pretrained(folder)


def test_a_model_with_a_clock_is_saved_with_it(tmp_path: Path) -> None:
    run = tmp_path / "1"
    train(resolve([], settings(model={"elapsed": True})), run / "checkpoints", lambda *_: None)
    model = tokenv.load(run)
    again = Model.from_pretrained(model.save_pretrained(tmp_path / "mine"))
    assert model.lm.elapsed.weight.any()
    assert torch.equal(again.lm.elapsed.weight, model.lm.elapsed.weight)
    assert again.tokens(TEXT) == model.tokens(TEXT)
    assert again.generate("abc", 20, seed=1) == model.generate("abc", 20, seed=1)


def test_what_was_changed_in_memory_is_saved(model: Model, tmp_path: Path) -> None:
    with torch.no_grad():
        model.lm.head.weight.add_(1)
    again = tokenv.load(model.save_pretrained(tmp_path / "mine"))
    assert torch.equal(again.lm.head.weight, model.lm.head.weight)


def test_a_saved_model_that_is_cut_off_is_one_message(model: Model, tmp_path: Path) -> None:
    saved = model.save_pretrained(tmp_path / "mine")
    tensors = saved / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors"):
        tokenv.load(saved)


def test_code_that_a_model_names_runs_only_where_it_is_trusted(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = model.save_pretrained(tmp_path / "mine")
    state = json.loads((saved / "state.json").read_text())
    state["config"]["agent"] = {"name": "their_agent:Theirs", "window": 2}
    (saved / "state.json").write_text(json.dumps(state))
    write_digests(saved, model_hub.SAVED)
    (tmp_path / "their_agent.py").write_text(
        "from tokenv.agents.learned import Learned as Theirs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for word in (False, "other:Agent"):
        with pytest.raises(UserError, match="trust_code=their_agent:Theirs"):
            tokenv.load(saved, trust_code=word)
    for word in (True, "their_agent:Theirs", ["their_agent:Theirs"]):
        assert tokenv.load(saved, trust_code=word).tokens(TEXT) == model.tokens(TEXT)
    assert trust.granted() == []  # one call's trust is not the next one's
    with pytest.raises(UserError, match="names code"):
        tokenv.load(saved)


def test_a_model_of_the_hub(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check, with a folder in place of the Hub, that a pushed model is loaded unchanged."""
    store = tmp_path / "hub"

    def create(_: HfApi, name: str, **options: Any) -> Any:
        assert options == {"private": True, "exist_ok": True}
        (store / name).mkdir(parents=True)
        return type("Url", (str,), {"repo_id": name})(f"https://huggingface.co/{name}")

    def upload(_: HfApi, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert commit_message
        shutil.copytree(folder_path, store / repo_id, dirs_exist_ok=True)

    def download(
        name: str, *, revision: str | None, token: str | None, allow_patterns: list[str]
    ) -> str:
        assert (revision, token) == ("main", "secret")
        assert allow_patterns == ["model.safetensors", "state.json", "digests.json"]
        return str(store / name)

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(model_hub, "snapshot_download", download)
    assert model.push_to_hub("me/mine", private=True) == "https://huggingface.co/me/mine"
    assert 'tokenv.load("me/mine")' in (store / "me/mine/README.md").read_text()
    again = tokenv.load("me/mine", revision="main", token="secret")
    assert again.tokens(TEXT) == model.tokens(TEXT)
    (store / "me/other").mkdir()
    with pytest.raises(UserError, match=r"has no state\.json"):
        tokenv.load("me/other", revision="main", token="secret")


def test_a_name_that_is_nowhere_is_one_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingFileError, match=r"'owner/nothing': there is no such folder, nor"):
        tokenv.load("owner/nothing")
    monkeypatch.chdir(folder.parents[1])
    with pytest.raises(MissingFileError, match="runs with checkpoints are"):
        tokenv.load(f"{folder.parent.name}/9")
    with pytest.raises(MissingFileError, match="no complete checkpoint"):
        tokenv.load("nowhere")


def test_a_model_of_series_says_so(series_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = series_settings | {"train": {"symbols": 256, "batch_size": 4}}
    train(resolve([], settings), tmp_path / "checkpoints", lambda *_: None)
    model = tokenv.load(tmp_path)
    assert type(model) is tokenv.SeriesModel
    assert repr(model).startswith("SeriesModel(")
    assert "agent learned" in repr(model)
    with pytest.raises(UserError, match="expected a model of text"):
        model.tokens("abc")


def test_each_kind_of_data_has_its_methods(folder: Path) -> None:
    assert type(tokenv.Model.from_pretrained(folder)) is tokenv.Model
    assert not hasattr(tokenv.load(folder), "forecast")
    with pytest.raises(UserError, match=r"data\.kind = 'text': expected .* tokenv\.SeriesModel"):
        tokenv.SeriesModel.from_pretrained(folder)


def test_another_device_can_be_requested(folder: Path) -> None:
    with pytest.raises(UserError, match=r"hardware\.device = 'gpu'"):
        tokenv.load(folder, device="gpu")
    assert tokenv.load(folder, device="cpu").config.hardware.device == "cpu"


def test_what_cannot_write_is_refused_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent = {"name": "bpe", "vocabulary_size": 300}
    config = resolve([], settings(agent=agent, train={"symbols": 256}))
    train(config, tmp_path / "checkpoints", lambda *_: None)
    with pytest.raises(
        UserError, match=r"agent\.name=bpe draws the boundaries of whole sequences only"
    ):
        run_command("generate", ["with", f"run={tmp_path}", "text=ab", "max_new_tokens=2"])
