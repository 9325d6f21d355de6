"""The variance study: figures against known values, and resuming a study that was stopped."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.cli.main import run_command
from tokenv.config import files as tokenv_settings
from tokenv.config.components import build_components
from tokenv.core.checkpoints import write_json
from tokenv.core.errors import UserError
from tokenv.lab import variance_report, variance_study
from tokenv.lab.config import VarianceOptions, parse
from tokenv.lab.costs import measure_costs
from tokenv.lab.gradients import (
    GradientProblem,
    credit_by_distance,
    draw_gradient,
    gradient_statistics,
    true_gradient,
)
from tokenv.lab.variance_report import (
    draw_cost,
    draw_credit,
    draw_progress,
    noise_flops,
    print_variance,
    write_variance,
)
from tokenv.lab.variance_study import VarianceStudy

SHORT = 6


@pytest.fixture(scope="module")
def options():
    updates = tiny.settings() | {
        "data": {"source": "words", "seq_len": 12, "words_documents": 80, "lexicon_size": 20},
        "agent": {"name": "learned", "window": 0, "scale": 1},
        "estimator": {"name": "reinforce", "gamma": 0.8},
    }
    config = tokenv_settings.resolve([], updates)
    chosen = ("reinforce", "rloo(gamma=1.0)")
    return VarianceOptions(
        config,
        estimators=chosen,
        checkpoints=2,
        draws=12,
        batch_size=4,
        timings=1,
        warmup=1,
        credit_draws=2,
    )


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    """Return the folder and the result of a study which is run once."""
    folder = tmp_path_factory.mktemp("study")
    return folder, variance_study.run_variance_study(options, folder)


@pytest.fixture
def study(finished, tmp_path):
    """Return a copy of its folder."""
    return shutil.copytree(finished[0], tmp_path / "study")


@pytest.fixture
def problem(options):
    torch.manual_seed(1)
    parts = build_components(options.config)
    parts.lm.double()
    parts.lm.compute_dtype = None
    parts.agent.double()
    return GradientProblem(parts, torch.randint(256, (2, SHORT)))


def build(text, problem, options):
    return variance_study._build(options, problem.device, parse(text, 0.8))


def test_statistics_of_known_gaussians():
    torch.manual_seed(0)
    true = torch.randn(40, dtype=torch.float64)
    mean = 0.5 * true + 0.1 * torch.randn(40)
    draws = mean + 2 * torch.randn(4000, 40)
    statistics = gradient_statistics(draws, true.unsqueeze(0))
    expected = {
        "variance": 160.0,
        "noise": 160.0 / mean.square().sum().item(),
        "bias": ((mean - true).norm() / true.norm()).item(),
        "turn": 1 - torch.cosine_similarity(mean, true, 0).item(),
        "scale": (mean @ true / true.square().sum()).item(),
    }
    for name, value in expected.items():
        measured = statistics[name]
        assert abs(measured.value - value) < 4 * measured.error, name
        assert measured.error < 0.2 * max(value, 0.05), name


def test_a_noisy_reference_does_not_look_like_bias():
    torch.manual_seed(0)
    true = torch.randn(40)
    draws, reference = (true + 3 * torch.randn(300, 40) for _ in range(2))
    statistics = gradient_statistics(draws, reference)
    assert abs(statistics["bias"].value) < 0.25
    naive = (draws.mean(0) - reference.mean(0)).norm() / reference.mean(0).norm()
    assert naive > 0.2  # what the difference of two noisy means would have said
    assert abs(statistics["scale"].value - 1) < 4 * statistics["scale"].error


def test_jackknife_errors_are_the_spread_over_repetitions():
    torch.manual_seed(0)
    true = torch.ones(5)
    repetitions = [
        gradient_statistics(true + torch.randn(40, 5), true.unsqueeze(0)) for _ in range(100)
    ]
    for name in ("variance", "scale", "cosine"):
        values = torch.tensor([m[name].value for m in repetitions])
        claimed = torch.tensor([m[name].error for m in repetitions]).mean()
        assert 0.7 < values.std() / claimed < 1.4, name


@settings(max_examples=20)
@given(st.floats(0.1, 10), st.integers(0, 99))
def test_relative_figures_do_not_depend_on_scale(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    draws = 1 + torch.randn(10, 6, generator=generator, dtype=torch.float64)
    true = torch.ones(1, 6, dtype=torch.float64)
    one = gradient_statistics(draws, true)
    other = gradient_statistics(factor * draws, factor * true)
    for name in ("noise", "snr", "bias", "turn", "cosine", "scale"):
        assert one[name].value == pytest.approx(other[name].value, rel=1e-6, abs=1e-9)


def test_draws_average_to_the_enumerated_gradient(problem, options):
    true = true_gradient(problem, symbols=7 * problem.symbol_BN.numel())
    generator = torch.Generator().manual_seed(0)
    estimator = build("rloo(gamma=1.0, num_samples=64)", problem, options)
    with problem.frozen():
        drawn = [draw_gradient(problem, estimator, generator) for _ in range(40)]
    for name, value in true.items():
        assert value.norm() > 0
        statistics = gradient_statistics(torch.stack([d[name] for d in drawn]), value.unsqueeze(0))
        assert abs(statistics["scale"].value - 1) < 5 * statistics["scale"].error, name
        assert statistics["turn"].value < 0.05, name


def test_freezing_changes_no_gradient_and_is_undone(problem, options):
    estimator = build("gumbel", problem, options)
    gradients = []
    for frozen in (True, False):
        generator = torch.Generator().manual_seed(3)
        if frozen:
            with problem.frozen():
                gradients.append(draw_gradient(problem, estimator, generator))
        else:
            gradients.append(draw_gradient(problem, estimator, generator))
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name])
    assert all(p.requires_grad for p in problem.components.lm.parameters())


def test_effects_vanish_without_token_layers(problem):
    generator = torch.Generator().manual_seed(0)
    some = credit_by_distance(problem, 3, generator)
    assert max(some["rms"]) > 0
    for layer in problem.components.lm.mid:
        torch.nn.init.zeros_(layer.post_attention.weight)
        torch.nn.init.zeros_(layer.post_mlp.weight)
    problem.components.lm.mid = torch.nn.ModuleList()
    plain = problem.components.lm.apply_token_layers
    problem.components.lm.apply_token_layers = lambda *args, **options: 0 * plain(*args, **options)
    none = credit_by_distance(problem, 3, generator)
    assert max(none["rms"]) < 1e-12
    assert none["pairs"][0] == 6  # 3 rollouts of 2 sequences
    assert none["pairs"] == sorted(none["pairs"], reverse=True)


def test_costs_count_the_executed_work(problem, options):
    texts = (
        "reinforce",
        "rloo(num_samples=3)",
        "rloo(num_samples=3, reward_only=True)",
        "rebar",
        "ppo",
    )
    built = {text: build(text, problem, options) for text in texts}
    costs = measure_costs(problem.components, built, problem.symbol_BN, rate=0.5, repeats=1)
    flops = {text: cost["flops"] for text, cost in costs.items()}
    one, three, forward = (flops[text] for text in texts[:3])
    late = (three - one) / 2
    assert forward - one == pytest.approx(2 * late / 3)
    assert flops["rebar"] > 1.9 * one
    assert one < flops["ppo"] < 2 * one
    assert (
        costs["rloo(num_samples=3)"]["memory"]
        > costs["rloo(num_samples=3, reward_only=True)"]["memory"]
    )
    assert all(cost["fastest"] <= cost["seconds"] <= cost["slowest"] for cost in costs.values())


def test_a_study_resumes_where_it_stopped(options, finished, tmp_path, monkeypatch):
    _, whole = finished
    score = VarianceStudy.score
    calls = []

    def interrupted(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args[2].label)
        return score(*args)

    monkeypatch.setattr(VarianceStudy, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        variance_study.run_variance_study(options, tmp_path / "parts")
    stored = json.loads((tmp_path / "parts" / "variance.json").read_text())
    assert [len(m["estimators"]) for m in stored["moments"]] == [2, 1]
    monkeypatch.setattr(
        VarianceStudy, "score", lambda *args: (calls.append(args[2].label), score(*args))[1]
    )
    monkeypatch.setattr(variance_study, "train", None)  # the trajectory is there
    resumed = variance_study.run_variance_study(options, tmp_path / "parts")
    assert calls == ["reinforce", "rloo(gamma=1.0)"] * 2
    assert json.dumps(resumed["moments"]) == json.dumps(whole["moments"])
    assert whole["moments"][0]["symbols"] < whole["moments"][1]["symbols"]


def flip(file):
    """Flip the lowest bit of a byte in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_or_foreign_figures_are_rejected(options, study, tmp_path):
    one = study
    other = tmp_path / "other"
    variance_study.run_variance_study(replace(options, noise_seed=1), other)
    more = replace(options, estimators=(*options.estimators, "rloo(num_samples=3)"))
    for name in ("variance.json", "reference-0.safetensors", "reference-1.safetensors"):
        sound = {file: file.read_bytes() for file in one.glob(f"{name}*")}  # and its digest
        flip(one / name)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            variance_study.run_variance_study(more, one)
        for file in sound:
            file.write_bytes((other / file.name).read_bytes())
        with pytest.raises(
            UserError, match=rf"{name}.*: of another run, or measured with other options"
        ):
            variance_study.run_variance_study(more, one)
        for file, content in sound.items():
            file.write_bytes(content)
    # The same run's, but of another moment.
    more = replace(options, estimators=(*options.estimators, "rloo(num_samples=5)"))
    sound = {file: file.read_bytes() for file in one.glob("reference-0.safetensors*")}
    for file in sound:
        file.write_bytes((one / file.name.replace("-0", "-1")).read_bytes())
    with pytest.raises(UserError, match=r"reference-0\.safetensors.*: of another run"):
        variance_study.run_variance_study(more, one)
    for file, content in sound.items():
        file.write_bytes(content)
    variance_study.run_variance_study(more, one)


def test_a_trajectory_of_another_run_is_rejected(options, study):
    other = replace(options, config=replace(options.config, seed=9))
    (study / "variance.json").unlink()
    with pytest.raises(UserError, match=r"step-.*: of another run than"):
        variance_study.run_variance_study(other, study)


def test_a_study_without_digests_is_not_believed(options, finished, study):
    _, whole = finished
    path = study / "variance.json"
    stored = {
        key: value
        for key, value in json.loads(path.read_text()).items()
        if key not in ("of", "sha256")
    }
    del stored["moments"][1]["estimators"]["reinforce"]
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"variance\.json is damaged: its SHA-256"):
        variance_study.run_variance_study(options, study)
    write_json(path, stored, options.identity)
    for reference in study.glob("reference-*.safetensors.json"):
        reference.unlink()
    resumed = variance_study.run_variance_study(options, study)
    assert json.dumps(resumed["moments"][0]) == json.dumps(whole["moments"][0])


def test_the_report_of_a_study(finished, tmp_path, capsys):
    _, result = finished
    print_variance(result)
    printed = capsys.readouterr().out
    assert "rloo(gamma=1.0) *" in printed
    assert "True gradient: enumeration" in printed
    lines = write_variance(result, tmp_path / "v.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 3
    for picture in (draw_progress, draw_cost, draw_credit):
        assert picture(result, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def a_result(**figures):
    """Two estimators at one moment; the second with other figures."""

    def statistics_of(**changes):
        return {
            "unbiased": True,
            "components": {"policy": {"noise": [2.0, 0.5], "turn": [0.1, 0.05]} | changes},
        }

    estimators = {
        "reinforce": statistics_of(),
        "other": statistics_of(**figures),
        "arm": {"refused": "it has a past"},
    }
    credit = {
        "mean": [0.1, 0.2, 0.3],
        "mean_error": [0.1, 0.1, 0.0],
        "rms": [1.0, 0.5, 0.1],
        "noise": [1.0, 1.0, 0.0],
    }
    moment = {
        "symbols": 10**6,
        "bits_per_byte": 2.0,
        "estimators": estimators,
        "credit": credit | {"pairs": [9, 4, 1]},
    }
    cost = {"flops": 10.0, "seconds": 1.0, "memory": 1.0}
    return {
        "moments": [moment],
        "costs": {"reinforce": cost, "other": cost},
        "reference": "enumeration",
    }


def drawn(monkeypatch, draw, result):
    """Return a picture's first axes, the texts beside them, and the texts of its legend."""
    figures = []
    monkeypatch.setattr(variance_report, "save_png", lambda figure, path: figures.append(figure))
    draw(result, None)
    (figure,) = figures
    figure.draw_without_rendering()
    legends = [
        text.get_text()
        for legend in figure.legends
        for text in [legend.get_title(), *legend.get_texts()]
    ]
    return figure.axes[0], [text.get_text() for text in figure.axes[0].texts], "\n".join(legends)


@pytest.mark.parametrize("draw", [draw_progress, draw_cost])
def test_no_error_of_a_picture_is_hidden(monkeypatch, draw):
    axes, _, legend = drawn(monkeypatch, draw, a_result(noise=[3.0, 7.0]))
    bars = sorted(
        tuple(bar.get_segments()[0][:, 1]) for container in axes.containers for bar in container[2]
    )
    floor = axes.get_ylim()[0]
    # the second error is larger than its value
    assert bars == [(pytest.approx(floor), 10.0), (1.5, 2.5)]
    assert axes.get_ylim()[1] > 10
    for sentence in (
        "goes on below it",
        "standard error not measurable",
        "noise infinite",
        "refuse this policy: arm",
    ):
        assert sentence in legend

    axes, _, _ = drawn(monkeypatch, draw, a_result(noise=[3.0, math.nan]))
    faces = [container[0].get_markerfacecolor() for container in axes.containers]
    assert [face == "white" for face in faces] == [False, True]

    for noise, marker in ((math.inf, "^"), (0.0, "v"), (-1.0, "v")):
        axes, texts, legend = drawn(monkeypatch, draw, a_result(noise=[noise, math.nan]))
        assert ("No signal seen at 1.00 MB: other." in legend) == (marker == "^")
        (missing,) = (line for line in axes.lines if line.get_marker() == marker)
        low, high = axes.get_ylim()
        assert low < missing.get_ydata()[0] < high
        assert any(text.startswith("other") for text in texts)
        drawn(
            monkeypatch,
            draw,
            a_result(noise=[noise, math.nan]) | {"costs": {"other": {"flops": 1.0}}},
        )


def faces(axes):
    """Return the colours of a picture's points."""
    return [container[0].get_markerfacecolor() for container in axes.containers]


def test_bias_of_direction_is_drawn_as_estimated(monkeypatch):
    for turn in (-0.7, 1.8):
        axes, texts, _ = drawn(monkeypatch, draw_cost, a_result(turn=[turn, 0.3]))
        assert f"other  [{turn:.2f} ± 0.30]" in texts
        scale = axes.figure.axes[-1].get_ylim()
        assert scale == (pytest.approx(min(turn, 0.0)), pytest.approx(max(turn, 0.1)))
        assert faces(axes)[1] != variance_report._NO_BIAS
    axes, texts, _ = drawn(monkeypatch, draw_cost, a_result(turn=[math.nan, math.nan]))
    assert "other  [–]" in texts


@pytest.mark.parametrize(
    "turn", [[math.nan, math.nan], [0.5, math.nan], [0.5, 0.3], [-0.5, 0.3], [0.0, 0.0]]
)
def test_a_bias_that_may_be_zero_is_grey(monkeypatch, turn):
    axes, _, legend = drawn(monkeypatch, draw_cost, a_result(turn=turn))
    # the first is 0.1 ± 0.05
    assert faces(axes) == [variance_report._NO_BIAS, variance_report._NO_BIAS]
    assert "grey: bias within 2 standard errors of 0, or not measurable" in legend
    assert axes.figure.axes[-1].get_ylim() == (0.0, pytest.approx(0.1))


def test_distances_with_one_pair_have_no_error_and_are_left_out(monkeypatch):
    axes, _, _ = drawn(monkeypatch, draw_credit, a_result())
    rms, noise = (line.get_ydata() for line in axes.lines)
    assert rms[:2].tolist() == [1.0, 0.5]
    assert math.isnan(rms[2])
    assert math.isnan(noise[2])
    assert "errors were not measured" in axes.figure.get_supxlabel()


def test_noise_flops_are_relative_to_the_papers_estimator():
    def statistics_of(noise):
        return {"components": {"policy": {"noise": [noise, 0.1]}}}

    result = {"costs": {"rloo": {"flops": 30}, "reinforce(gamma=0.9)": {"flops": 20}}}
    moment = {
        "estimators": {"rloo": statistics_of(2.0), "reinforce(gamma=0.9)": statistics_of(12.0)}
    }
    assert noise_flops(result, moment) == {"rloo": 0.25, "reinforce(gamma=0.9)": 1.0}
    nothing = {
        "estimators": {"rloo": statistics_of(2.0), "reinforce(gamma=0.9)": statistics_of(math.inf)}
    }
    assert all(math.isnan(product) for product in noise_flops(result, nothing).values())


def test_estimators_refuse_autoregressive_policies(options, tmp_path):
    config = replace(options.config, agent={"name": "learned", "window": 1})
    result = variance_study.run_variance_study(
        replace(options, config=config, estimators=("reinforce", "arm"), checkpoints=1), tmp_path
    )
    assert "refused" in result["moments"][0]["estimators"]["arm"]
    assert list(result["costs"]) == ["reinforce"]


def test_long_sequences_are_compared_with_unbiased_draws(options, tmp_path):
    config = replace(options.config, data=replace(options.config.data, seq_len=24))
    long = replace(
        options,
        config=config,
        checkpoints=1,
        reference_draws=4,
        reference="rloo(gamma=1.0, num_samples=2)",
    )
    assert variance_study.run_variance_study(long, tmp_path / "long")["reference"] == long.reference
    with pytest.raises(ValueError, match="is biased: expected an unbiased"):
        variance_study.run_variance_study(replace(long, reference="reinforce"), tmp_path / "biased")


def test_the_command(options, tmp_path, monkeypatch, capsys):
    import yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options.config.as_dict()))
    words = [
        "with",
        "c.yaml",
        "estimators=['reinforce','disarm']",
        "draws=4",
        "checkpoints=1",
        "timings=1",
        "warmup=0",
    ]
    words += ["credit_draws=2", "batch_size=2"]
    run_command("variance", words)
    folder = tmp_path / "runs" / "1"
    assert {"variance.csv", "variance.json", "progress.png", "cost.png", "credit.png"} <= {
        path.name for path in folder.iterdir()
    }
    assert "disarm" in capsys.readouterr().out
    # One estimator more, at the same moments.
    more = "estimators=['reinforce','disarm','rloo']"
    run_command("variance", ["with", f"resume={folder / 'variance'}", more])
    stored = json.loads((folder / "variance" / "variance.json").read_text())
    assert list(stored["moments"][0]["estimators"]) == ["reinforce", "disarm", "rloo"]
    assert math.isfinite(stored["costs"]["rloo"]["seconds"])
    for word in ("draws=8", "noise_seed=1", "rate=0.3", "hardware.precision=bfloat16"):
        with pytest.raises(
            UserError, match=f"{word.partition('=')[0]} cannot change when a study is resumed"
        ):
            run_command("variance", ["with", f"resume={folder / 'variance'}", word])
    flip(folder / "variance" / "options.json")
    with pytest.raises(UserError, match=r"options\.json.* damaged"):
        run_command("variance", ["with", f"resume={folder / 'variance'}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rlo", "did you mean 'rloo'"),
        ("rloo(4)", "options need names"),
        ("rloo(gamma=", "cannot be read"),
        ("rloo(gamma=open('x'))", "cannot be read"),
        ("rloo(gamma=1j)", "= 1j: expected a number"),
        ("rloo(gamma=" + "[" * 300, "too many nested"),
        ("-" * 100_000 + "1", "cannot be read"),
    ],
)
def test_unreadable_estimators_are_reported(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text, 0.9)


def test_specifications_are_calls():
    assert parse("rloo(gamma=GAMMA, num_samples=3)", 0.9).options == {
        "name": "rloo",
        "gamma": 0.9,
        "num_samples": 3,
    }
    own = parse("tokenv.estimators.recipes:rloo(num_samples=3)", 0.9)
    assert own.options == {"name": "tokenv.estimators.recipes:rloo", "num_samples": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 3}, "draws = 3"),
        ({"seq_len": 3}, "seq_len = 3"),
        ({"seq_len": 1000}, "expected at most the run's data.seq_len"),
        ({"estimators": ()}, r"estimators = \(\): expected a list of names or calls"),
        ({"estimators": "rloo"}, "expected a list"),
        ({"credit_draws": -1}, "credit_draws = -1: expected a whole number of at least 0"),
        ({"noise_seed": -1}, "noise_seed = -1: expected a whole number from 0"),
    ],
)
def test_options_out_of_range_are_rejected(options, change, message):
    with pytest.raises(ValueError, match=message):
        replace(options, **change)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("estimator.gamma=maybe", "estimator.gamma = 'maybe': expected a number"),
        ("estimator.gamma=null", "estimator.gamma = None: expected a number"),
        ("estimator.gamma=[1]", r"estimator.gamma = \[1\]: expected a number"),
        (
            "estimators=['rloo(num_samples=\"a\")']",
            "estimator.num_samples = 'a': expected a whole number",
        ),
        ("estimators=['rloo(num_samples=99999999)']", "would need at least .* GiB of memory"),
        ("draws=999999999999", "would need at least .* GiB of memory"),
        ("reference=reinforce", "is biased: expected an unbiased"),
    ],
)
def test_impossible_studies_are_rejected_before_work_starts(word, message):
    with pytest.raises(UserError, match=message):
        run_command("variance", ["with", "quick", word, "-u"])
