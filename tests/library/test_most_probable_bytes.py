"""Scores say which bytes are the most probable ones, and how probable they are."""

from pathlib import Path

import pytest
import torch

import tokenv
from tokenv import Model
from tokenv.data.corpus import TensorSource
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import load_run, score_texts

TEXT = "a tale of für and wide, longer than thirty-two bytes;" * 3


@pytest.mark.parametrize("length", [2, 31, 32, 33, 49, 150])
def test_the_most_probable_bytes_are_those_of_the_models_own_distributions(
    tiny_run: Path, length: int
) -> None:
    """Compare with plain forward passes over windows which begin at 0, 16, 32, ... and with the last one."""
    trained = load_run(str(tiny_run))
    text = TEXT.encode()[:length]
    options = EvalOptions(threshold=True)
    ((nats, best),) = score_texts(trained, [text], options, greedy=True)
    assert nats[1:] == score_texts(trained, [text], options)[0][0][1:]
    assert len(best) == length
    assert best[0] is False
    lm = trained.components.lm
    agent = trained.components.agent
    window = min(32, length)
    known = 0
    is_best = [False] * length
    for start in [*range(0, length - window, 16), length - window]:
        symbol_BN = torch.tensor([list(text[start : start + window])])
        env = tokenv.TokenizationEnv(lm, TensorSource(symbol_BN), 1, window=agent.window)
        td = env.one_pass(agent, noise=torch.full((1, window - 1), 0.5))
        chosen = lm.codec.logits(lm(symbol_BN[:, :-1], td["action"])).argmax(-1)[0].tolist()
        for i in range(known + 1, start + window):
            is_best[i] = chosen[i - start - 1] == text[i]
        known = start + window - 1
    assert best == is_best


def test_what_the_model_writes_greedily_is_greedy(model: Model) -> None:
    written = model.generate(b"a", 12, temperature=0)
    assert model.score(written[1:], context=b"a")[1] is True
    for i in range(1, len(written)):
        other = written[:i] + bytes([written[i] ^ 1]) + written[i + 1 :]
        assert model.score(other[1:], context=b"a")[1] is False
    assert model.score(TEXT, context="x")[0] == model.log_likelihood(TEXT, context="x")
