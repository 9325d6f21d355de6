"""Imitation of a teacher: the gradient is that of the cross-entropy, and training begins with it."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tiny import settings
from torch import Tensor

from tokenv.agents.heuristic import Whitespace
from tokenv.agents.learned import Learned
from tokenv.config.components import Components, build_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.core.expectations import all_boundaries, forcing_noise
from tokenv.core.sequences import SequenceBatch
from tokenv.env.rescoring import rescore
from tokenv.env.rollout import rollout
from tokenv.estimators import Imitation, Kickstart, ScoreFunction, chain, rloo
from tokenv.estimators.statistics import mean_over_decisions
from tokenv.evaluation.evaluator import evaluate
from tokenv.lm.unet import UNet
from tokenv.training.losses import compute_losses, total_loss
from tokenv.training.trainer import train

TEXT = torch.tensor([list(b"ab c d"), list(b"a  bcd")])


def gradients(loss: Tensor, lm: UNet, agent: Learned) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*agent.parameters(), *lm.down.parameters()]))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_gradient_is_that_of_the_teacher_forced_cross_entropy(
    tiny_lm: UNet, window: int
) -> None:
    agent = Learned(width=16, rate=0.3, window=window).double()
    teacher = Whitespace()
    estimator = chain(Imitation(teacher))
    td = estimator(rollout(tiny_lm, agent, TEXT, estimator.sampling))
    actual = gradients(mean_over_decisions(td, keys.LOSS_POLICY), tiny_lm, agent)

    # The reference steps through the positions, with the teacher's boundaries as the last actions.
    x_BND = tiny_lm.encode(TEXT)
    length = TEXT.shape[1] - 1
    taught_BT = teacher.draw(
        td.select(keys.SYMBOL, keys.POSITION, keys.DECISION_MASK), td[keys.NOISE]
    )[keys.ACTION]
    log_probs = []
    for i in range(1, length):
        last = [taught_BT[:, i - j] if i >= j else torch.zeros(2) for j in range(1, window + 1)]
        here = {
            keys.SYMBOL: TEXT[:, i],
            keys.ENCODING: x_BND[:, i],
            keys.LAST_ACTIONS: torch.stack(last, -1).float() if last else torch.zeros(2, 0),
            keys.POSITION: torch.full((2,), i),
            keys.TOKEN_COUNT: taught_BT[:, :i].sum(-1),
            keys.DECISION_MASK: torch.ones(2, dtype=torch.bool),
        }
        log_probs.append(agent.get_dist(TensorDict(here, batch_size=[2])).log_prob(taught_BT[:, i]))
    expected = gradients(-torch.stack(log_probs).mean(), tiny_lm, agent)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_of_a_teacher_that_draws_at_random_the_gradient_is_right_on_average(tiny_lm: UNet) -> None:
    agent = Learned(width=16, rate=0.3, window=0).double()
    rate = 0.4
    estimator = chain(Imitation(Learned(width=16, rate=rate, window=0, zero_init=True).double()))
    length = TEXT.shape[1] - 1
    total = [0.0] * len([*agent.parameters(), *tiny_lm.down.parameters()])
    for number in range(2 ** (length - 1)):  # every draw of the teacher, with its probability
        bits = [number >> i & 1 for i in range(length - 1)]
        noise = torch.tensor(
            [0.5] + [0.0 if bit else 1.0 for bit in bits], dtype=torch.float64
        ).expand(2, -1)
        chance = rate ** sum(bits) * (1 - rate) ** (length - 1 - sum(bits))
        td = estimator(rollout(tiny_lm, agent, TEXT, estimator.sampling, noise=noise))
        each = gradients(mean_over_decisions(td, keys.LOSS_POLICY), tiny_lm, agent)
        total = [one + chance * other for one, other in zip(total, each, strict=True)]
    td = rollout(tiny_lm, agent, TEXT)
    logit = td[keys.BOUNDARY_LOGITS]
    nats = -(
        rate * torch.nn.functional.logsigmoid(logit)
        + (1 - rate) * torch.nn.functional.logsigmoid(-logit)
    )
    expected = gradients(nats[:, 1:].mean(), tiny_lm, agent)
    for one, other in zip(total, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_the_model_reads_the_policys_own_boundaries(tiny_lm: UNet) -> None:
    agent = Learned(width=16, rate=0.3).double()
    noise = torch.rand(2, TEXT.shape[1] - 1, dtype=torch.float64)
    with_teacher = rollout(
        tiny_lm, agent, TEXT, chain(Imitation(Whitespace())).sampling, noise=noise
    )
    without = rollout(tiny_lm, agent, TEXT, noise=noise)
    for key in (keys.ACTION, keys.LOG_LIKELIHOOD, keys.REWARD):
        assert torch.equal(with_teacher[key], without[key])


def test_kickstarting_adds_the_cross_entropy_and_leaves_the_estimate_alone(tiny_lm: UNet) -> None:
    agent = Learned(width=16, rate=0.3).double()
    noise = torch.rand(2, 2, TEXT.shape[1] - 1, dtype=torch.float64)
    teacher = Whitespace()
    alone = rloo(gamma=0.9)
    kickstarted = chain(*alone.stages, Kickstart(teacher), num_samples=2)
    imitating = chain(Imitation(teacher), num_samples=2)
    losses = []
    for estimator in (alone, kickstarted, imitating):
        td = estimator(rollout(tiny_lm, agent, TEXT, estimator.sampling, noise=noise))
        losses.append(td)
    assert torch.equal(losses[1][keys.LOSS_POLICY], losses[0][keys.LOSS_POLICY])
    assert torch.equal(losses[1][keys.LOSS_IMITATION], losses[2][keys.LOSS_POLICY])
    assert losses[1][keys.LOSS_IMITATION].requires_grad
    assert not kickstarted.unbiased


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "ppo", "gumbel"])
def test_the_weight_of_kickstarting_multiplies_the_teachers_cross_entropy(estimator: str) -> None:
    changes = {"imitation": {"teacher": {"name": "whitespace"}}, "estimator": {"name": estimator}}
    totals = []
    for weight in (0.0, 0.5):
        config = resolve([], merge(settings(), {**changes, "loss": {"imitation": weight}}))
        components = build_components(config)
        generator = torch.Generator().manual_seed(0)
        td = rollout(
            components.lm, components.agent, TEXT, components.sampling, generator=generator
        )
        losses = compute_losses(td, components)
        totals.append(total_loss(losses, config.loss))
    nats = -td[keys.DEMONSTRATION_LOG_PROB]
    expected = totals[0] + 0.5 * mean_over_decisions(td.set("nats", nats), "nats")
    torch.testing.assert_close(totals[1], expected)
    gradient = torch.autograd.grad(losses["imitation"], components.agent.projection.weight)[0]
    assert gradient.abs().max() > 0


def test_a_chain_has_one_teacher() -> None:
    with pytest.raises(ValueError, match="two stages have a teacher"):
        chain(Imitation(Whitespace()), Imitation(Whitespace()))
    with pytest.raises(ValueError, match="advantage"):
        chain(Imitation(Whitespace()), ScoreFunction())


TEACHERS: dict[str, dict[str, Any]] = {
    "whitespace": {"name": "whitespace"},
    "bpe": {"name": "bpe", "vocabulary_size": 300},
    "entropy": {"name": "entropy"},
}


def run(
    config: Any, folder: Path, resume: checkpoints.Checkpoint | None = None
) -> dict[str, list[float]]:
    logged: dict[str, list[float]] = {}
    train(
        config,
        folder,
        lambda name, value, _: logged.setdefault(name, []).append(value),
        resume=resume,
    )
    return logged


@pytest.mark.parametrize(
    ("teacher", "weight"),
    [
        ("whitespace", 0.0),
        ("whitespace", 0.5),
        ("bpe", 0.0),
        ("bpe", 0.5),
        ("entropy", 0.0),
        ("of a run", 0.0),
        ("of a run", 0.5),
    ],
)
def test_training_begins_with_imitation_and_resumes_inside_it(
    tmp_path: Path, teacher: str, weight: float
) -> None:
    old_run = tmp_path / "old"
    teachers = TEACHERS | {"of a run": {"pretrained": str(old_run)}}
    if teacher == "of a run":
        run(resolve([], settings()), old_run / "checkpoints")
    changes = {
        "loss": {"imitation": weight},
        "imitation": {"teacher": teachers[teacher], "fraction": 0.5},
        "estimator": {"name": "rloo", "num_samples": 2},
        "checkpoint": {"every_symbols": 512},
    }
    config = resolve([], merge(settings(), changes))
    whole = run(config, tmp_path / "whole")
    updates = len(whole["train/bits_per_byte"])
    imitating = updates if weight else updates // 2
    assert len(whole["train/imitation_nats"]) == imitating
    assert len(whole["train/loss_policy"]) == updates - updates // 2
    shutil.rmtree(old_run, ignore_errors=True)
    first = checkpoints.load(checkpoints.list_complete(tmp_path / "whole")[0])
    of_teacher = [name for name in first.tensors if "teacher" in name]
    assert len({name.partition("_teacher")[2] for name in of_teacher}) == len(of_teacher)
    assert first.state["symbols"] < 0.5 * config.train.symbols
    resumed = run(resolve([], {}, first.state["config"]), tmp_path / "resumed", first)
    for name in (
        "train/imitation_nats",
        "train/loss_policy",
        "validation/bits_per_byte",
        "train/flops",
    ):
        assert resumed[name] == whole[name]


def test_one_sample_is_drawn_until_the_estimator_begins(tmp_path: Path) -> None:
    changes = {
        "imitation": {"teacher": {"name": "whitespace"}, "fraction": 0.5},
        "estimator": {"name": "rloo"},
    }
    flops = run(resolve([], merge(settings(), changes)), tmp_path)["train/flops"]
    steps = [after - before for before, after in zip([0.0, *flops], flops, strict=False)]
    assert max(steps[:5]) < min(steps[5:])


def test_a_run_may_imitate_throughout_and_needs_no_early_exit(tmp_path: Path) -> None:
    changes = {
        "imitation": {"teacher": {"name": "whitespace"}, "fraction": 1.0},
        "train": {"learning_rate": 0.02},
    }
    config = resolve([], merge(settings(), changes))
    logged = run(config, tmp_path)
    assert not build_components(config).early_exit
    assert logged["train/imitation_nats"][-1] < logged["train/imitation_nats"][0]
    assert "train/loss_policy" not in logged


@pytest.mark.parametrize("window", [0, 3])
def test_imitation_bits_are_those_of_the_teachers_boundaries_among_all(window: int) -> None:
    """Each draw's probability from the policy's draws alone: the noise of 0 and 1 forces it, and all sum to 1."""
    changes = {"imitation": {"teacher": {"name": "whitespace"}}, "agent": {"window": window}}
    components = build_components(resolve([], merge(settings(), changes)))
    components.lm.double()
    components.agent.double()
    torch.nn.init.normal_(components.agent.projection.weight)
    components.train(False)
    pattern_K1T = all_boundaries(TEXT.shape[1])
    noise_KBT = forcing_noise(pattern_K1T).expand(-1, len(TEXT), -1)
    with torch.no_grad():
        td = rollout(components.lm, components.agent, TEXT, noise=noise_KBT)
    log_prob_KB = td[keys.ACTION_LOG_PROB].sum(-1)
    torch.testing.assert_close(log_prob_KB.exp().sum(0), torch.ones(2).double())
    taught_BT = Whitespace().draw(td[0], noise_KBT[0])[keys.ACTION]
    is_taught_KB = (td[keys.ACTION] == taught_BT).all(-1)
    assert is_taught_KB.sum(0).tolist() == [1, 1]
    bits_B = -log_prob_KB.T[is_taught_KB.T] / math.log(2) / (TEXT.shape[1] - 1)
    imitation_bits = evaluate(
        components, SequenceBatch(TEXT, ["", ""], None, torch.arange(2))
    ).imitation_bits
    assert imitation_bits == pytest.approx(bits_B.mean().item(), rel=1e-6)  # encodings are float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"imitation": {"teacher": {"name": "whitespce"}}},
            "whitespce' is unknown: did you mean 'whitespace'",
        ),
        (
            {"imitation": {"teacher": {"name": "whitespace"}, "fraction": 0.0}},
            r"imitation\.fraction = 0\.0: expected",
        ),
        ({"loss": {"imitation": 0.5}}, r"loss\.imitation = 0\.5 without imitation\.teacher"),
        ({"imitation": {"weight": 0.0}}, r"imitation\.weight = 0\.0: expected"),
        ({"imitation": {"teacher": {"options": 1}}}, r"imitation\.teacher\.name = None: expected"),
        (
            {"imitation": {"teacher": {"name": "bpe"}}, "agent": {"name": "uniform"}},
            "which does not learn",
        ),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_components(resolve([], merge(settings(), wrong)))


def gradients_by_owner(components: Components, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of agent and encoder, a vector each."""
    loss.backward(retain_graph=True)
    vectors = {}
    for name, module in (("agent", components.agent), ("encoder", components.lm.down)):
        grads = [each.grad for each in module.parameters() if each.grad is not None]
        vectors[name] = torch.cat([grad.flatten() for grad in grads] or [torch.zeros(1)])
        module.zero_grad()
    return vectors


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "ppo"])
def test_losses_of_a_detached_policy_train_the_agent_alone(estimator: str) -> None:
    found = []
    for detach_encoder in (False, True):
        changes = {
            "imitation": {"teacher": {"name": "whitespace"}},
            "estimator": {"name": estimator},
            "loss": {"imitation": 0.5, "detach_encoder": detach_encoder},
        }
        config = resolve([], merge(settings(), changes))
        components = build_components(config)
        torch.nn.init.normal_(components.agent.projection.weight)
        generator = torch.Generator().manual_seed(0)
        td = rollout(
            components.lm, components.agent, TEXT, components.sampling, generator=generator
        )
        losses = compute_losses(td, components)
        rescored = rescore(
            components.lm, components.agent, td.detach(), detach_encoder=detach_encoder
        )
        again = components.estimator.replay(rescored)[keys.LOSS_POLICY].mean()
        trained = (losses["policy"], losses["rate"], again, losses["imitation"])
        found.append([gradients_by_owner(components, loss) for loss in trained])
    for attached, detached in zip(*found, strict=True):
        torch.testing.assert_close(detached["agent"], attached["agent"])
    for attached, detached in list(zip(*found, strict=True))[:3]:
        assert attached["encoder"].abs().max() > 0
        assert detached["encoder"].abs().max() == 0
    torch.testing.assert_close(found[1][3]["encoder"], found[0][3]["encoder"])
