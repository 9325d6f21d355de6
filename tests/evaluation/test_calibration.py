"""Calibration: a bias shifts all logits, reaches the rate, and changes nothing else."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import settings as tiny

from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.calibration import (
    calibrate,
    options_for_text,
    segment_at_rate,
    split_for_calibration,
)
from tokenv.evaluation.evaluator import EvalOptions, evaluate, held_out_rollouts, shift_noise
from tokenv.evaluation.loaded_run import LoadedRun
from tokenv.evaluation.run_state import RunState
from tokenv.training.trainer import train


@settings(max_examples=50)
@given(st.floats(-4, 4), st.floats(-5, 5), st.floats(1e-6, 1 - 1e-6))
def test_shifted_noise_decides_as_shifted_logits(bias, logit, noise):
    noise_ = torch.tensor(noise, dtype=torch.float64)
    margin = logit + bias - torch.logit(noise_)
    if margin.abs() > 1e-9:
        assert bool(logit > torch.logit(shift_noise(noise_, bias))) == bool(margin > 0)


@pytest.fixture
def config(tiny_settings):
    return resolve([], merge(tiny_settings, {"validation": {"sequences": 6}, "rate": 0.3}))


@pytest.mark.parametrize("window", [0, 1])
def test_a_calibrated_policy_draws_the_requested_rate(config, tiny_settings, window):
    """Check on the calibration sequences with the same noise, to about one decision in a hundred."""
    changes = {
        "agent": {"name": "learned", "window": window},
        "validation": {"sequences": 6},
        "rate": 0.3,
    }
    parts = build_components(resolve([], merge(tiny_settings, changes)))
    corpus = load_corpus(config.data)
    held_out, own = split_for_calibration(corpus, 6)
    bias = calibrate(parts, own, 0.45, EvalOptions(4))
    assert bias > 0.2  # from about 0.3 upwards
    rates = [
        evaluate(parts, own, EvalOptions(4, seed, logit_bias=bias)).boundary_rate
        for seed in range(8)
    ]
    assert sum(rates) / 8 == pytest.approx(0.45, abs=0.03)
    assert evaluate(parts, held_out, EvalOptions(4)).boundary_rate < 0.4
    assert parts.agent.training


def test_sequences_to_calibrate_on_are_measured_nowhere(config):
    corpus = load_corpus(config.data)
    held_out, own = split_for_calibration(corpus, 6)
    assert held_out.origin == corpus.validation(6).origin
    assert torch.equal(held_out.symbol_BN, corpus.validation(6).symbol_BN)
    assert not set(held_out.origin) & set(own.origin)
    first_half, second_half = split_for_calibration(corpus, 10**6)
    assert not set(first_half.origin) & set(second_half.origin)


@pytest.mark.parametrize(
    "agent",
    [{"name": "uniform"}, {"name": "random"}, {"name": "whitespace"}, {"name": "exact_count"}],
)
def test_agents_whose_number_is_fixed_have_no_bias(config, tiny_settings, agent):
    parts = build_components(resolve([], merge(tiny_settings, {"agent": agent})))
    _, own = split_for_calibration(load_corpus(config.data), 6)
    assert calibrate(parts, own, 0.45, EvalOptions(4)) is None


def test_no_bias_is_no_change(config):
    parts = build_components(config)
    held_out = load_corpus(config.data).validation(6)
    plain = evaluate(parts, held_out, EvalOptions(4))
    assert evaluate(parts, held_out, EvalOptions(4, logit_bias=1e-9)).loss == pytest.approx(
        plain.loss, rel=1e-6
    )
    wide = list(held_out_rollouts(parts, held_out, EvalOptions(4, logit_bias=50.0)))
    assert all(td[keys.ACTION].all() for td in wide)


def run(config, folder, **options):
    _, history = train(config, folder, lambda *_: None, **options)
    return {name: curve for name, curve in history.items() if "per_second" not in name}


def test_training_that_calibrates_learns_the_same(config, tiny_settings, tmp_path):
    """Check that only ``calibrated/`` metrics are added, and that a resumed run has the same ones."""
    changes = {"validation": {"sequences": 6, "calibrate": True}, "rate": 0.3}
    calibrated = resolve([], merge(tiny_settings, changes))
    plain = run(config, tmp_path / "plain")
    more = run(calibrated, tmp_path / "more")
    assert {
        name: curve for name, curve in more.items() if not name.startswith("calibrated/")
    } == plain
    assert {"calibrated/bits_per_byte", "calibrated/boundary_rate", "calibrated/logit_bias"} <= set(
        more
    )
    early = checkpoints.list_complete(tmp_path / "more")[0]
    assert run(calibrated, tmp_path / "again", resume=checkpoints.load(early)) == more


@settings(max_examples=10)
@given(st.floats(-40, 8), st.integers(4, 60))
def test_any_number_of_tokens_is_found_however_far_the_logits_are(far, tokens):
    config = resolve([], tiny())
    parts = build_components(config)
    text = b"a text that is cut into as many tokens as are asked for, or not"
    parts.agent.bias = far
    trained = LoadedRun(parts, config, Path(), RunState(config.as_dict(), "bits_per_byte"))
    cut = segment_at_rate(trained, text, tokens=tokens)
    assert sum(cut.boundary_N[:-1]) + 1 == tokens
    rate = tokens / len(text)  # a boundary in each of three pieces is forced
    assert abs(sum(segment_at_rate(trained, text, EvalOptions(rate=rate)).boundary_N) - tokens) <= 1


def test_a_rate_that_cannot_be_drawn_is_reported(tiny_settings, capsys):
    """Check the warning for a threshold, where positions with equal logits become boundaries together."""
    config = resolve([], tiny_settings)
    parts = build_components(config)
    torch.nn.init.zeros_(parts.agent.projection.weight)
    trained = LoadedRun(parts, config, Path(), RunState(config.as_dict(), "bits_per_byte"))
    segment_at_rate(trained, b"some text or other", EvalOptions(rate=0.5, threshold=True))
    assert (
        "rate = 0.5: no logit bias draws it in this text; the nearest is "
        in capsys.readouterr().err
    )
    segment_at_rate(trained, b"some text or other", EvalOptions(rate=0.5))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("boundaries", "warns"), [(7, False), (5, False), (4, True)])
def test_a_boundary_more_or_less_is_not_reported(
    boundaries, warns, tiny_settings, capsys, monkeypatch
):
    config = resolve([], tiny_settings)
    trained = LoadedRun(
        build_components(config), config, Path(), RunState(config.as_dict(), "bits_per_byte")
    )
    rate = 6 / 7
    reached = (0.0, boundaries / 7 - rate)  # 1 - 6 / 7 is more than 1 / 7 in floats
    monkeypatch.setattr("tokenv.evaluation.calibration._find_text_bias", lambda *_: reached)
    options_for_text(trained, b"letters", EvalOptions(rate=rate))
    assert ("no logit bias draws it" in capsys.readouterr().err) is warns


@pytest.mark.parametrize("estimator", ["reinforce", "text_critic", "relax", "moving_average"])
def test_float64_is_the_precision_of_all_parts(tiny_settings, estimator):
    changes = {
        "hardware": {"precision": "float64"},
        "estimator": {"name": estimator},
        "agent": {"window": 0},
    }
    state = build_components(resolve([], merge(tiny_settings, changes))).state_dict()
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {
        torch.float64
    }
