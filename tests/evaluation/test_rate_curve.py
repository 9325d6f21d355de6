"""Rate-conditioned models: configuration, training, storage, evaluation and calibration at several rates."""

from dataclasses import replace

import pytest
import torch
from rated import rate_curve
from tiny import settings

import tokenv
from tokenv.config import registry
from tokenv.config.components import build_components, check_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.data.corpus import load_corpus
from tokenv.estimators.rate_targets import LogitPressure
from tokenv.evaluation.calibration import calibrate, evaluate_rates, split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions, evaluate, held_out_rollouts
from tokenv.evaluation.loaded_run import rate_for_flops, resolve_rate
from tokenv.lm.flops import reading_flops
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.process_group import Ranks
from tokenv.training.trainer import train
from tokenv.training.update import PassInput, TrainingStep, accumulate_gradients

RATES = {"rate": {"min": 0.1, "max": 0.6}}
TOLD = {"learned", "exact_count", "uniform", "random"}


class OneRate(LogitPressure):
    """Rate target for a single rate."""

    varies = False


def settings_of(tiny_settings, **sections):
    return merge(tiny_settings, RATES | {"validation": {"sequences": 6}} | sections)


# --- configuration ---


def test_a_range_is_a_section_and_one_number_stays_one():
    assert resolve([], {}).as_dict()["rate"] == 0.2
    assert resolve([], RATES).rate == RateRange(0.1, 0.6)
    assert resolve([], {"rate": {"max": 0.4}}).rate == RateRange(0.05, 0.4)
    assert resolve([], {"rate": 0.3}, base=resolve([], RATES).as_dict()).rate == 0.3
    again = resolve([], {"rate": {"min": 0.2}}, base=resolve([], RATES).as_dict())
    assert again.as_dict()["rate"] == {"min": 0.2, "max": 0.6}
    assert f"{again.rate:g}" == "0.2 to 0.6"


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (
            {"min": 0.5, "max": 0.1},
            r"rate\.min = 0\.5, rate\.max = 0\.1: expected .* 0 < min < max < 1",
        ),
        ({"min": 0.2, "max": 0.2}, "0 < min < max < 1"),
        ({"min": 0.0, "max": 0.2}, "0 < min < max < 1"),
        ({"max": 1.5}, "0 < min < max < 1"),
        ({"least": 0.1}, r"unknown key rate\.least"),
        ({"min": "low"}, r"rate\.min = 'low': expected a number"),
        ("low", "rate = 'low': expected boundaries per symbol .* or a range such as rate.min"),
        ([0.1, 0.2], r"rate = \[0\.1, 0\.2\]: expected boundaries per symbol"),
        (
            1.5,
            r"rate = 1\.5: expected boundaries per symbol in \(0, 1\), such as 0\.2, or a range such as",
        ),
    ],
)
def test_ranges_that_cannot_be_are_refused(rate, message):
    with pytest.raises(UserError, match=message):
        resolve([], {"rate": rate})


def test_rates_are_even_on_a_logarithmic_scale():
    rates = RateRange(0.05, 0.5)
    drawn = rates.at(torch.linspace(0, 1, 100_001, dtype=torch.float64))
    assert drawn[[0, -1]].tolist() == pytest.approx([0.05, 0.5])
    assert (
        drawn.mean().item() == pytest.approx(rates.mean, rel=1e-4) == pytest.approx(0.195, abs=1e-3)
    )
    counts = torch.histc(drawn.log2(), bins=10)
    assert counts.max() - counts.min() <= 2


@pytest.mark.parametrize("name", sorted(set(registry.AGENTS) - {"bpe"}))
def test_agents_that_have_one_rate_refuse_a_range(tiny_settings, name):
    own = {"hnet": {"model": {"pooling": "smooth"}}, "nawrot": {"model": {"pooling": "mean"}}}
    config = resolve([], settings_of(tiny_settings, agent={"name": name}, **own.get(name, {})))
    if name in TOLD:
        check_components(config)
        assert build_components(config).agent.rates == RateRange(0.1, 0.6)
        return
    with pytest.raises(
        UserError,
        match=f"rate = 0.1 to 0.6: agent '{name}' has one rate at most: expected one number",
    ):
        check_components(config)


def test_a_rate_target_that_has_one_rate_refuses_a_range(tiny_settings):
    target = {"rate_target": {"name": f"{__name__}:OneRate"}}
    with pytest.raises(UserError, match=r"has one rate: expected one that reads target_rate"):
        check_components(resolve([], settings_of(tiny_settings, **target)))
    check_components(resolve([], settings_of(tiny_settings, loss={"rate": 0.0}, **target)))


def test_one_rates_model_has_no_more_parameters_than_ever(tiny_settings):
    state = build_components(resolve([], tiny_settings)).state_dict()
    assert {name for name in state if name.startswith("agent.")} == {"agent.projection.weight"}
    more = build_components(resolve([], settings_of(tiny_settings))).state_dict()
    assert {name for name in more if name not in state} == {
        *(f"agent.film.{name}" for name in ("hidden.weight", "hidden.bias", "last.weight"))
    }
    assert all(torch.equal(more[name], tensor) for name, tensor in state.items())


# --- training ---


def run(config, folder, **options):
    _, history = train(config, folder, lambda *_: None, **options)
    return {name: curve for name, curve in history.items() if "per_second" not in name}


CASES = {
    "learned, reinforce": {"estimator": {"name": "reinforce", "head_epochs": 2}},
    "learned, rloo": {"estimator": {"name": "rloo"}, "rate_target": {"name": "ratio"}},
    "exact_count": {"agent": {"name": "exact_count", "window": 1}, "loss": {"rate": 0.0}},
    "random": {"agent": {"name": "random", "rounding": "random"}},
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_is_never_having_stopped(tiny_settings, tmp_path, case):
    config = resolve([], settings_of(tiny_settings, **CASES[case]))
    whole = run(config, tmp_path / "whole")
    assert len(set(whole["train/target_rate"][1])) == len(whole["train/target_rate"][1])
    assert all(0.1 < rate < 0.6 for rate in whole["train/target_rate"][1])
    first = checkpoints.list_complete(tmp_path / "whole")[0]
    assert run(config, tmp_path / "resumed", resume=checkpoints.load(first)) == whole


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "relax", "branch", "off_policy"])
def test_a_range_that_is_almost_one_rate_learns_what_that_rate_learns(tiny_settings, estimator):
    results = []
    for rate in (0.3, {"min": 0.3 - 1e-7, "max": 0.3 + 1e-7}):
        options = {
            "rate": rate,
            "estimator": {"name": estimator},
            "hardware": {"precision": "float64"},
        }
        config = resolve([], merge(tiny_settings, options | {"agent": {"window": 0}}))
        parts = build_components(config)
        if estimator == "relax":  # its own parameters are drawn after the agent's
            torch.manual_seed(1)
            for parameter in parts.estimator.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
        parts.estimator.double()
        group = DataParallelGroup.create(
            Ranks(), config.train, split_each_pass=parts.has_cross_step_state
        )
        symbols = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
        parts.train()
        batches = [PassInput(each, seed=5) for each in symbols.split(4)]
        figures, _ = accumulate_gradients(TrainingStep(parts, config.loss), batches, group)
        grads = {name: p.grad for name, p in parts.named_parameters().items() if p.grad is not None}
        results.append((figures.read(), grads))
    (metrics, grads), (other, more) = results
    for name, value in metrics.items():
        if name not in ("grad_norm_policy", "policy", "loss_policy"):
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, grad in grads.items():
        assert torch.allclose(more[name], grad, rtol=1e-3, atol=1e-6), name


def test_another_runs_agent_reads_its_rate_here(tiny_settings, tmp_path):
    config = resolve([], settings_of(tiny_settings))
    run(config, tmp_path / "1" / "checkpoints")
    words = {"agent": {"pretrained": str(tmp_path / "1")}}
    loaded = resolve([], words, base=settings_of(tiny_settings) | {"agent": {"name": "learned"}})
    assert build_components(loaded).agent.rates == RateRange(0.1, 0.6)
    run(loaded, tmp_path / "2")
    other = resolve(
        [], words | {"rate": 0.3}, base=settings_of(tiny_settings) | {"agent": {"name": "learned"}}
    )
    with pytest.raises(
        UserError,
        match=r"rate = 0\.3: .* trained for another; expected rate\.min=0\.1 rate\.max=0\.6",
    ):
        build_components(other)


# --- measuring ---


@pytest.fixture(scope="module")
def held_out():
    config = resolve([], settings(data={"words_documents": 80}))
    return split_for_calibration(load_corpus(config.data), 6)


@pytest.fixture
def parts(tiny_settings):
    return build_components(resolve([], settings_of(tiny_settings)))


def test_every_held_out_sequence_keeps_its_rate_however_many_share_a_pass(parts, held_out):
    rates = []
    for batch_size in (2, 6):
        rollouts = held_out_rollouts(parts, held_out[0], EvalOptions(batch_size))
        rates.append(torch.cat([td[keys.TARGET_RATE][:, 0] for td in rollouts]))
    assert torch.equal(*rates)
    assert len(rates[0].unique()) == 6
    second = list(held_out_rollouts(parts, held_out[0], EvalOptions(2), shard=(1, 3)))
    assert torch.equal(second[0][keys.TARGET_RATE][:, 0], rates[0][2:4])


def test_a_requested_rate_is_that_of_all_sequences(parts, held_out):
    few, many = (evaluate(parts, held_out[0], EvalOptions(4, rate=rate)) for rate in (0.15, 0.55))
    assert few.boundary_rate < many.boundary_rate
    assert few.boundary_rate == pytest.approx(0.15, abs=0.06)
    assert evaluate(parts, held_out[0], EvalOptions(4, rate=0.15)) == few
    assert evaluate(parts, held_out[0], EvalOptions(4)).boundary_rate not in (
        few.boundary_rate,
        many.boundary_rate,
    )


def test_a_calibrated_model_draws_the_requested_rate(parts, held_out):
    with torch.no_grad():
        parts.agent.film.last.weight.fill_(0.1)  # off, the more so the further up
    own = held_out[1]
    for rate in (0.15, 0.3, 0.5):
        bias = calibrate(parts, own, rate, EvalOptions(4))
        options = EvalOptions(4, rate=rate, logit_bias=bias)
        rates = [
            evaluate(parts, own, replace(options, seed=seed)).boundary_rate for seed in range(8)
        ]
        assert sum(rates) / 8 == pytest.approx(rate, abs=0.03)
    whole = calibrate(parts, own, RateRange(0.1, 0.6), EvalOptions(4))
    drawn = []
    target_rates = []
    for seed in range(8):
        rollouts = list(held_out_rollouts(parts, own, EvalOptions(4, seed, logit_bias=whole)))
        drawn += [td[keys.ACTION].double().mean(-1) for td in rollouts]
        target_rates += [td[keys.TARGET_RATE].double().mean(-1) for td in rollouts]
    assert torch.cat(drawn).mean().item() == pytest.approx(
        torch.cat(target_rates).mean().item(), abs=0.05
    )


@pytest.mark.parametrize(
    "agent", [{"name": "exact_count"}, {"name": "uniform"}, {"name": "random"}]
)
def test_exact_counts_are_those_of_the_requested_rate(tiny_settings, held_out, agent):
    parts = build_components(config := resolve([], settings_of(tiny_settings, agent=agent)))
    points = rate_curve(parts, config, [0.125, 0.25, 0.5], *held_out, EvalOptions(4))
    assert [point.way for point in points] == ["conditioned"] * 3
    assert [point.boundary_rate for point in points] == pytest.approx([4 / 31, 8 / 31, 16 / 31])


def test_a_model_of_one_rate_is_moved_by_its_logits(tiny_settings, held_out):
    config = resolve([], tiny_settings)
    parts = build_components(config)
    points = rate_curve(parts, config, [0.1, 0.4], *held_out, EvalOptions(4))
    assert [(point.way, point.target_rate) for point in points] == [
        ("calibrated", 0.1),
        ("calibrated", 0.4),
    ]
    assert points[0].logit_bias < 0 < points[1].logit_bias
    assert [point.boundary_rate for point in points] == pytest.approx([0.1, 0.4], abs=0.07)
    assert points[0].flops < points[1].flops
    for name in ("uniform", "whitespace"):
        config = resolve([], merge(tiny_settings, {"agent": {"name": name}}))
        with pytest.raises(UserError, match=f"rates: no logit bias brings agent '{name}'"):
            rate_curve(build_components(config), config, [0.4], *held_out, EvalOptions(4))


def test_what_nothing_moves_is_measured_at_its_own_rate(tiny_settings, held_out):
    config = resolve([], merge(tiny_settings, {"agent": {"name": "whitespace"}}))
    ((point, loss_B),) = evaluate_rates(
        build_components(config), config, [0.3, 0.5], *held_out, EvalOptions(4), allow_native=True
    )
    plain = evaluate(build_components(config), held_out[0], EvalOptions(4))
    assert (point.way, point.target_rate, point.boundary_rate) == (
        "own",
        plain.boundary_rate,
        plain.boundary_rate,
    )
    assert (point.loss, point.standard_error) == (plain.loss, plain.standard_error)
    assert loss_B.mean().item() == plain.loss


# --- budgets, and what users ask for ---


def test_a_budget_is_met(parts):
    for rate in (0.1, 0.37):
        flops = reading_flops(parts.lm, rate, parts.agent, 100)
        assert rate_for_flops(parts, flops, 100) == pytest.approx(rate, rel=1e-12)
    # Longer sequences need more attention.
    assert reading_flops(parts.lm, 0.3, parts.agent, 50) < reading_flops(
        parts.lm, 0.3, parts.agent, 100
    )
    for flops in (1.0, 1e12):
        with pytest.raises(
            UserError, match=r"flops = .*: expected more than .* without tokens, and less than"
        ):
            rate_for_flops(parts, flops, 100)


def test_a_rate_beyond_the_trained_range_is_warned_of_and_an_impossible_one_is_refused(
    parts, tiny_settings, capsys
):
    config = resolve([], settings_of(tiny_settings))
    assert resolve_rate(parts, config, None) == RateRange(0.1, 0.6).mean
    assert resolve_rate(parts, config, 0.3) == 0.3
    assert capsys.readouterr().err == ""
    assert resolve_rate(parts, config, 0.05) == 0.05
    printed = capsys.readouterr().err
    assert (
        printed
        == "tokenv: warning: rate = 0.05 is outside the range that this run was trained for, 0.1 to 0.6\n"
    )
    with pytest.raises(UserError, match=r"rate = 1.0: expected boundaries per symbol in \(0, 1\)"):
        resolve_rate(parts, config, 1.0)
    one = resolve([], tiny_settings)
    assert resolve_rate(build_components(one), one, None) is None
    with pytest.raises(
        UserError, match=r"rate = 0\.3: this run was trained for one rate, 0\.2: leave it out"
    ):
        resolve_rate(build_components(one), one, 0.3)


def test_the_library_takes_a_rate(tiny_settings, tmp_path):
    train(resolve([], settings_of(tiny_settings)), tmp_path / "1" / "checkpoints", lambda *_: None)
    model = tokenv.load(tmp_path / "1")
    text = b"some text that is cut in few or in many tokens; " * 8
    few, many = (len(model.spans(text, rate=rate)) for rate in (0.12, 0.55))
    assert few < many
    assert model.tokens(text, rate=0.12) == model.spans(text, rate=0.12).tokens
    assert model.log_likelihood(text, rate=0.12) != model.log_likelihood(text, rate=0.55)
    assert model.generate(text[:30], 5, rate=0.12).startswith(text[:30])
    assert (
        model.spans(text).boundaries == model.spans(text, rate=RateRange(0.1, 0.6).mean).boundaries
    )
    assert "rate 0.1 to 0.6" in repr(model)
    model.save_pretrained(tmp_path / "kept")
    assert (
        tokenv.load(tmp_path / "kept").spans(text, rate=0.12).boundaries
        == model.spans(text, rate=0.12).boundaries
    )


# --- entropy weights ---


@pytest.mark.parametrize("ranged", [True, False])
def test_an_entropy_weight_raises_the_logits_where_the_early_exit_is_unsure(
    tiny_settings, held_out, ranged
):
    words = merge(tiny_settings, {"agent": {"window": 0}, "hardware": {"precision": "float64"}})
    parts = build_components(resolve([], merge(words, RATES if ranged else {})))
    with torch.no_grad():
        parts.agent.projection.weight.normal_(std=0.3)
        parts.lm.early_head.weight.normal_(std=0.5)
    batch = held_out[0]
    requested = 0.3 if ranged else None
    options = EvalOptions(6, seed=3, rate=requested)
    (plain,) = held_out_rollouts(parts, batch, options)
    (weighted,) = held_out_rollouts(
        parts, batch, replace(options, entropy_weight=0.7, logit_bias=-0.4)
    )
    entropy_BT = parts.lm.early_entropy(parts.lm.encode(batch.symbol_BN))[:, :-1]
    assert entropy_BT.std() > 0.05
    logit_BT = torch.logit(plain[keys.BOUNDARY_PROB]) + 0.7 * entropy_BT - 0.4
    noise_BT = torch.rand(entropy_BT.shape, generator=torch.Generator().manual_seed(3))
    expected = torch.where(
        plain[keys.DECISION_MASK], logit_BT > torch.logit(noise_BT.double()), plain[keys.ACTION] > 0
    )
    assert torch.equal(weighted[keys.ACTION] > 0, expected)
    assert not torch.equal(weighted[keys.ACTION], plain[keys.ACTION])


def test_an_entropy_weight_keeps_the_rate_and_is_compared_with_a_constant_bias(
    parts, tiny_settings, held_out
):
    config = resolve([], settings_of(tiny_settings))
    with torch.no_grad():
        parts.lm.early_head.weight.normal_(std=0.5)
    points = rate_curve(parts, config, [0.3], *held_out, EvalOptions(4), entropy_weights=[0.0, 1.0])
    assert [(point.way, point.entropy_weight) for point in points] == [
        ("conditioned", 0),
        ("calibrated", 0),
        ("entropy-weighted", 1),
    ]
    constant, weighted = points[1:]
    assert constant.difference is None
    assert weighted.difference == pytest.approx(weighted.loss - constant.loss)
    assert 0 < weighted.difference_error < weighted.standard_error
    own = held_out[1]
    biases = [
        calibrate(parts, own, 0.3, EvalOptions(4, entropy_weight=weight)) for weight in (0.0, 1.0)
    ]
    assert [constant.logit_bias, weighted.logit_bias] == biases
    rates = []
    for seed in range(8):
        rollouts = held_out_rollouts(
            parts, own, EvalOptions(4, seed, rate=0.3, logit_bias=biases[1], entropy_weight=1.0)
        )
        rates += [td[keys.ACTION].double().mean() for td in rollouts]
    assert sum(rates) / len(rates) == pytest.approx(0.3, abs=0.03)
    strict = build_components(
        config := resolve([], settings_of(tiny_settings, agent={"name": "exact_count"}))
    )
    with pytest.raises(
        UserError,
        match=r"no logit bias .* 'exact_count' to 0\.3: expected .* \(without an entropy weight\)",
    ):
        rate_curve(strict, config, [0.3], *held_out, EvalOptions(4), entropy_weights=[1.0])
