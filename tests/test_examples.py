"""The examples do what they say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tensordict import TensorDict
from tiny import series_settings, settings

import tokenv
from tokenv.agents.learned import Learned
from tokenv.config.files import resolve
from tokenv.core import keys
from tokenv.lm.incremental import Decoder
from tokenv.testing import check_agent, check_estimator, check_rate_target
from tokenv.training.trainer import train

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# TorchRL warns of its own classes when its collectors are imported.
@pytest.mark.filterwarnings(
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning"
)
def test_torchrls_losses_train_the_policy(capsys):
    figures = load("torchrl_losses").main(pretraining=100, batches=25)
    for name in ("A2CLoss", "ClipPPOLoss"):
        before = figures[f"{name} before"]
        after = figures[f"{name} after"]
        assert after["reward"] > before["reward"]
        assert after["entropy"] < before["entropy"]
        assert abs(after["rate"] - before["rate"]) < 0.05
    assert "ClipPPOLoss after" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # TorchRL's own
def test_torchrls_ppo_trains_a_network_of_ones_own_on_a_run(tmp_path):
    config = resolve([], settings(hardware={"precision": "bfloat16"}, train={"symbols": 256}))
    train(config, tmp_path / "checkpoints", lambda *_: None)
    first, *_, last = load("torchrl_ppo_run").main(str(tmp_path), batches=12)
    # boundaries of an untrained model are not worth their price
    assert last["rate"] < first["rate"] - 0.1


def test_bpe_reads_ahead_where_it_merges(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in range(10):
        (texts / f"{name}.txt").write_text(
            f"the other {name:03} hats and the thermometers thereof\n" * 30
        )
    lookahead = load("bpe_lookahead").lookahead
    assert lookahead(str(texts), 1, 256) == (0.0, 1.0)
    differ, rate = lookahead(str(texts), 1, 320)
    assert 0 < differ < 0.5
    assert rate < 0.6


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 10.0])
def test_intervals_cover_what_they_promise(ratio, seeds, paired):
    assert 0.93 <= load("interval_coverage").coverage(ratio, seeds, 1200, paired=paired) <= 0.98


@pytest.mark.parametrize(("documents", "spread"), [(5, 1.0), (10, 1.5), (20, 1.0)])
def test_intervals_cover_with_few_unequal_documents(documents, spread):
    coverage = load("interval_coverage").coverage(10.0, 5, 600, documents=documents, spread=spread)
    # 0.86, 0.81 and 0.89 with C - 1 degrees of freedom and no correction
    assert 0.92 <= coverage <= 0.99


@pytest.mark.slow
def test_the_gpu_day_runs_through(tmp_path):
    """Run every task of the script on any machine; the figures mean nothing."""
    out = tmp_path / "gpu.md"
    command = [
        sys.executable,
        EXAMPLES / "gpu_day.py",
        "--small",
        "--out",
        out,
        "--keep",
        tmp_path / "kept",
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    report = out.read_text()
    assert report.count("ended with 0 after") == 5
    assert report.count("| bytes per second |") == 3
    assert "reinforce has the lowest" in report or "uniform has the lowest" in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.md", "kept"]


@pytest.mark.slow
def test_ppo_steps_are_counted(capsys):
    pytest.importorskip("stable_baselines3")
    load("sb3_steps").main(512)
    assert "16 rows" in capsys.readouterr().out


def test_a_table_is_forecast_with_intervals(tmp_path):
    train(resolve([], series_settings(horizon=6)), tmp_path / "checkpoints", lambda *_: None)
    dates = pd.date_range("2024-01-01", periods=120, freq="h", name="date")
    table = pd.DataFrame(
        {name: np.random.default_rng(seed).normal(size=120) for seed, name in enumerate("ab")},
        dates,
    )
    table.to_csv(tmp_path / "table.csv")
    scored, coverage, future = load("forecast_intervals").main(
        str(tmp_path), str(tmp_path / "table.csv"), 12
    )
    assert coverage.index.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(scored) == 2 * 6 * 6
    assert 0.6 < coverage.mean() <= 1
    assert future["ds"].min() == dates[-1] + pd.Timedelta(hours=1)
    assert (future["tokenv-lo-80"] <= future["tokenv-hi-80"]).all()


def test_signals_are_read(tmp_path):
    """Check the clock at jumps, and the pressure against samples written in WFDB's format 212."""
    module = load("signal_table")
    value_L = np.zeros(6 * 200)
    value_L[6 * 40 : 6 * 42] = 50.0
    value_L[6 * 100 : 6 * 102] = 50.0
    pd.DataFrame({"mlii": value_L}).to_parquet(tmp_path / "record.parquet")
    module.main(str(tmp_path / "record.parquet"), str(tmp_path / "heart.parquet"))
    heart = pd.read_parquet(tmp_path / "heart.parquet")
    assert heart["mlii"].tolist() == value_L[::6].tolist()
    expected = 2 * np.pi * np.arange(60) / 64
    np.testing.assert_allclose(heart["sin64"][40:100], np.sin(expected))
    np.testing.assert_allclose(heart["cos64"][40:100], np.cos(expected))

    sample_L6 = np.random.default_rng(0).integers(-2048, 2048, (20, 6))
    first, second = (sample_L6.reshape(-1, 2) % 4096).T
    middle = first // 256 + second // 256 * 16
    packed = np.stack([first % 256, middle, second % 256], 1).astype(np.uint8)
    packed.tofile(tmp_path / "record.dat")
    module.main(str(tmp_path / "record.dat"), str(tmp_path / "pressure.parquet"))
    pressure = pd.read_parquet(tmp_path / "pressure.parquet")["abp"]
    assert pressure.tolist() == pytest.approx(
        ((sample_L6[:, 4] + 1605) / 12.84).reshape(-1, 2).mean(1)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fitted_early_exit", {}),
        ("optimal_token", {}),
        ("optimal_token", {"cumulative": False}),
        pytest.param("blocks", {"size": 1}, marks=pytest.mark.slow),
        ("annealed_kl", {}),
    ],
)
def test_estimators_for_a_start_from_scratch_are_right(name, options):
    left_out = check_estimator(
        getattr(load("scratch_estimators"), name), windows=(2,), gamma=1.0, **options
    )
    assert bool(left_out) == (name == "annealed_kl")  # which declares its bias


def test_an_annealed_imitation_declares_its_bias_and_keeps_the_rest_of_an_estimators_promises():
    assert check_estimator(load("remedies").annealed_imitation, windows=(1,), gamma=1.0)


def test_a_ramped_pressure_is_a_rate_target():
    assert check_rate_target(load("remedies").RampedPressure, rate=0.4, start=0.4) == []


def test_the_averaged_policy_is_an_agent_which_draws_with_the_mean_of_its_parameters():
    averaged_policy = load("remedies").AveragedPolicy
    assert check_agent(averaged_policy) == []
    agent = averaged_policy(8, decay=0.75)
    start = agent.average.clone()
    plain = Learned(8, window=1, scale=4.0, softcap=15.0)
    with torch.no_grad():
        plain.projection.weight.copy_(start)
        agent.projection.weight.add_(1.0)
    position = torch.arange(6).expand(4, 6)
    observation = TensorDict(
        {
            keys.ENCODING: torch.randn(4, 6, 8),
            keys.POSITION: position,
            keys.DECISION_MASK: position > 0,
        },
        batch_size=[4, 6],
    )
    noise = torch.rand(4, 6)
    action = agent.draw(observation, noise)[keys.ACTION]
    assert torch.equal(action, plain.draw(observation, noise)[keys.ACTION])
    assert torch.allclose(agent.average, start + 0.25)
    agent.score(observation, action)  # as in an imitation, whose boundaries another agent draws
    assert torch.allclose(agent.average, start + 0.4375)


def test_a_ramped_target_moves_from_its_start_to_the_rate():
    target = load("remedies").RampedPressure(0.4, start=0.1, rollouts=3)
    tensordict = TensorDict(
        {
            keys.BOUNDARY_LOGITS: torch.ones(4, 6),
            keys.BOUNDARY_PROB: torch.full((4, 6), 0.5),
            keys.DECISION_MASK: torch.ones(4, 6, dtype=torch.bool),
        },
        batch_size=[4, 6],
    )
    excess = [target(tensordict.clone())[keys.LOSS_RATE].mean().item() for _ in range(5)]
    assert excess == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])


def test_an_annealed_imitation_ends():
    tensordict = TensorDict(
        {
            keys.LOSS_POLICY: torch.zeros(2, 3),
            keys.DEMONSTRATION_LOG_PROB: torch.full((2, 3), -1.5),
            keys.DECISION_MASK: torch.ones(2, 3, dtype=torch.bool),
        },
        batch_size=[2, 3],
    )
    stage = load("remedies").AnnealedImitation(weight=2.0, rollouts=2)
    losses = [stage(tensordict.clone())[keys.LOSS_POLICY].mean().item() for _ in range(4)]
    assert losses == pytest.approx([3.0, 1.5, 0.0, 0.0])


def test_a_kl_which_has_been_annealed_leaves_the_estimate_alone():
    tensordict = TensorDict(
        {
            keys.LOSS_POLICY: torch.zeros(4, 6),
            keys.BOUNDARY_LOGITS: torch.randn(4, 6),
            keys.DECISION_MASK: torch.rand(4, 6) < 0.8,
        },
        batch_size=[4, 6],
    )
    stage = load("scratch_estimators").AnnealedKL(rate=0.3, weight=2.0, rollouts=2)
    losses = []
    for _ in range(3):
        losses.append(stage(tensordict.clone())[keys.LOSS_POLICY])
    prob = tensordict[keys.BOUNDARY_LOGITS].sigmoid()
    expected = prob * (prob / 0.3).log() + (1 - prob) * ((1 - prob) / 0.7).log()
    for loss, beta in zip(losses, (2.0, 1.0, 0.0), strict=True):
        assert torch.allclose(
            loss, beta * expected.where(tensordict[keys.DECISION_MASK], 0.0), atol=1e-6
        )


def test_the_fitted_coefficient_of_the_early_exit_is_that_of_least_variance():
    early = torch.randn(64, 6)
    full = 0.6 * early + 0.1 * torch.randn(64, 6)
    tensordict = TensorDict(
        {
            keys.LOG_LIKELIHOOD: full,
            keys.LOG_LIKELIHOOD_EARLY: early,
            keys.DECISION_MASK: torch.ones(64, 6, dtype=torch.bool),
        },
        batch_size=[64, 6],
    )
    stage = load("scratch_estimators").FittedEarlyExit(decay=0.0)
    first, second = (stage(tensordict.clone())[keys.REWARD].squeeze(-1) for _ in range(2))
    assert torch.equal(first, full - early)
    covariance = torch.cov(torch.stack([full.flatten(), early.flatten()]))
    assert torch.allclose(second, full - covariance[0, 1] / covariance[1, 1] * early, atol=1e-5)


def test_the_speed_of_using_models_is_printed_with_the_size_of_their_caches(
    tmp_path, monkeypatch, capsys
):
    config = resolve([], settings(train={"symbols": 256}))
    train(config, tmp_path / "checkpoints", lambda *_: None)
    script = load("inference_speed")
    monkeypatch.setattr(script, "BYTES", 48)
    monkeypatch.setattr(script, "TEXTS", 3)
    monkeypatch.setattr(sys, "argv", ["inference_speed.py", str(tmp_path), "--rounds", "1"])
    script.main()
    assert "bytes read a second" in " ".join(capsys.readouterr().out.split())
    model = tokenv.load(tmp_path)
    decoder = Decoder(model.lm, 1, 48)
    stored = sum(part.cache.nbytes for part in (decoder.down, decoder.up, decoder.tokens))
    assert script.cache_kib(model, decoder.tokens.size) == pytest.approx(stored / 1024)
