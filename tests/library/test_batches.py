"""Several texts in one call have the results of each text alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import settings as tiny_settings

import tokenv
from tokenv import Model
from tokenv.config.files import resolve
from tokenv.core.errors import UserError
from tokenv.training.trainer import train

AGENTS = {
    "learned": {"window": 2},
    "exact_count": {"window": 2},
    "uniform": {},
    "random": {},
    "hnet": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Models in float64 with sequences of 32 bytes."""
    loaded = {}
    for name, options in AGENTS.items():
        folder = tmp_path_factory.mktemp(name)
        more = (
            {"model": {"pooling": "smooth"}, "estimator": {"name": "path"}}
            if name == "hnet"
            else {}
        )
        values = tiny_settings(train={"symbols": 256}, hardware={"precision": "float64"}, **more)
        values["agent"] = {"name": name, **options}
        train(resolve([], values), folder / "checkpoints", lambda *_: None)
        loaded[name] = tokenv.load(folder)
    return loaded


texts = st.lists(st.binary(min_size=2, max_size=100), min_size=1, max_size=6)


@settings(max_examples=12)
@given(
    name=st.sampled_from(list(AGENTS)), texts=texts, seed=st.integers(0, 9), threshold=st.booleans()
)
def test_neighbours_change_no_answer(
    models: dict[str, Model], name: str, texts: list[bytes], seed: int, threshold: bool
) -> None:
    model = models[name]
    how = {"seed": seed, "threshold": threshold}
    assert model.tokens(texts, **how) == [model.tokens(text, **how) for text in texts]
    alone = [model.log_likelihood(text, **how) for text in texts]
    assert model.log_likelihood(texts, **how) == pytest.approx(alone, rel=1e-9)
    contexts = texts[::-1]
    pairs = list(zip(texts, contexts, strict=True))
    assert [best for _, best in model.score(texts, context=contexts, **how)] == [
        model.score(text, context=context, **how)[1] for text, context in pairs
    ]


def test_several_texts_share_passes(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["learned"]
    passes = []
    model.lm.down[0].register_forward_hook(
        lambda module, inputs, output: passes.append(len(output))
    )
    model.log_likelihood([bytes(range(32))] * 8 + [b"short"] * 3)
    assert passes == [8, 3]
    passes.clear()
    model.tokens([bytes(range(32))] * 8)
    assert passes == [8]


def test_what_does_not_fit_is_one_message(models: dict[str, Model]) -> None:
    model = models["learned"]
    assert model.tokens([]) == model.log_likelihood([]) == []
    with pytest.raises(UserError, match="2 contexts for 1 texts"):
        model.log_likelihood(["ab"], context=["a", "b"])
    with pytest.raises(UserError, match="nothing to predict"):
        model.log_likelihood(["ab", "a"])
    assert model.log_likelihood(["ab", "cd"], context="x") == pytest.approx(
        [model.log_likelihood(text, context="x") for text in ("ab", "cd")]
    )
