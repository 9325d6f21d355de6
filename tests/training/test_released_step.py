"""One update as the paper's authors released it, written out in loops, is ours: losses and every gradient, in float64.

The formulas are those of github.com/SamD770/bitter-lesson-tokenization (commit 25a70ac). Three things are as here: no
position in the padding counts, a policy off policy is conditioned on the boundaries which were used, and the logit of a
forced boundary (a constant 100 there) is left out of the rate loss, of whose gradient it is no part.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from tokenv.agents.learned import Learned
from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.estimators.rate_targets import LogitPressure
from tokenv.estimators.recipes import reinforce
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.training.update import PassInput, TrainingStep

RATE, GAMMA, CAP, SCALE, BATCH, LENGTH, WIDTH = 0.2, 0.99, 6.0, 16.0, 4, 24, 16
WEIGHTS = {"likelihood": 0.9, "early": 0.1, "policy": 0.01, "rate": 0.01}
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def parts(window):
    torch.manual_seed(window)
    sizes = {"down_layers": 1, "mid_layers": 2, "up_layers": 1, "window": 4}
    lm = UNet(UNetConfig(width=WIDTH, heads=2, **sizes)).double()
    agent = Learned(
        WIDTH, rate=RATE, window=window, scale=SCALE, softcap=CAP, projection_bias=True
    ).double()
    with torch.no_grad():
        lm.early_head.weight.normal_(std=0.3)
        for parameter in agent.projection.parameters():
            parameter.normal_(std=6.0)
    return lm, agent


def policy_logits(agent, x_TD, action_T):
    """Add the base term and one term for each of the earlier boundaries which the filter covers."""
    logits = []
    for i in range(len(action_T)):
        value = agent.projection.weight @ x_TD[i] + agent.projection.bias
        raw = value[0]
        for j in range(1, len(value)):
            if i >= j:
                raw = raw + value[j] * float(action_T[i - j])
        logits.append(CAP * torch.tanh((raw / SCALE + math.log(RATE / (1 - RATE))) / CAP))
    return logits


def draw(agent, x_TD, noise_T, length, off_policy):
    """Draw boundaries in order; the first is forced."""
    action_T = torch.zeros(len(noise_T), dtype=torch.long)
    action_T[0] = 1
    for i in range(1, min(length - 1, len(noise_T))):
        prob = RATE
        if not off_policy:
            prob = policy_logits(agent, x_TD[: i + 1], action_T[: i + 1])[i].sigmoid().item()
        action_T[i] = int(noise_T[i] < prob)
    return action_T


def released_losses(lm, agent, symbol_BN, length_B, noise_BT, off_policy):
    """Every loss as a sum over positions, with the numbers of positions by which the released code divides."""
    x_BND = lm.encode(symbol_BN)[:, :-1]
    rows = [
        draw(agent, x_BND[b].detach(), noise_BT[b], length_B[b], off_policy) for b in range(BATCH)
    ]
    action_BT = torch.stack(rows)
    # A model of its own layers: all that happens to predictions here is the heads, as log-softmax.
    late = lm.codec.logits(lm.decode(x_BND, action_BT)).log_softmax(-1)
    early = lm.codec.logits(lm.early_exit(x_BND)).log_softmax(-1)
    target_BT1 = symbol_BN[:, 1:, None]
    late_BT = -late.gather(-1, target_BT1)[..., 0]
    early_BT = -early.gather(-1, target_BT1)[..., 0]
    reward = [
        [(early_BT[b, t] - late_BT[b, t]).item() for t in range(length_B[b] - 1)]
        for b in range(BATCH)
    ]
    policy_sum = 0.0
    logit_sum = 0.0
    prob_sum = 0.0
    positions = sum(length_B)
    for b in range(BATCH):
        credit = 0.0
        logits = policy_logits(agent, x_BND[b], action_BT[b])
        prob_sum += 2.0  # the first and the last boundary are forced
        for t in reversed(range(length_B[b] - 1)):
            present = [row[t] for row in reward if len(row) > t]
            credit = reward[b][t] - sum(present) / len(present) + GAMMA * credit
            if t == 0:
                continue
            prob = logits[t].sigmoid()
            chosen = prob if action_BT[b, t] == 1 else 1 - prob
            ratio = 1.0
            if off_policy:
                ratio = chosen.item() / (RATE if action_BT[b, t] == 1 else 1 - RATE)
            policy_sum = policy_sum - ratio * credit * chosen.log()
            logit_sum = logit_sum + logits[t]
            prob_sum += prob.item()
    valid = [(b, t) for b in range(BATCH) for t in range(length_B[b] - 1)]
    sums = {
        "lm": sum(late_BT[b, t] for b, t in valid),
        "early": sum(early_BT[b, t] for b, t in valid),
        "policy": policy_sum,
        "rate": logit_sum * (prob_sum / positions - RATE),
    }
    return {name: value / positions for name, value in sums.items()}


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("lengths", [[LENGTH] * BATCH, [24, 17, 24, 3]])
@pytest.mark.parametrize("window", [0, 1, 7])
def test_an_update_is_the_released_one(window, lengths, off_policy):
    lm, agent = parts(window)
    symbol_BN = torch.randint(256, (BATCH, LENGTH))
    noise_BT = torch.rand(BATCH, LENGTH - 1, dtype=torch.float64)
    expected = released_losses(lm, agent, symbol_BN, lengths, noise_BT, off_policy)
    weighted = {"lm": WEIGHTS["likelihood"]} | {
        name: WEIGHTS[name] for name in ("early", "policy", "rate")
    }
    parameters = dict(lm.named_parameters()) | {
        f"agent.{name}": p for name, p in agent.named_parameters()
    }
    total = sum(weight * expected[name] for name, weight in weighted.items())
    gradient = torch.autograd.grad(total, list(parameters.values()))

    # The released code divides every sum by all bytes; ours are means over predicted bytes and over decisions.
    positions = sum(lengths)
    predictions = BATCH * (LENGTH - 1) / positions
    decisions = (positions - 2 * BATCH) / positions
    weights = LossConfig(
        likelihood=WEIGHTS["likelihood"] * predictions,
        early=WEIGHTS["early"] * predictions,
        policy=WEIGHTS["policy"] * decisions,
        rate=WEIGHTS["rate"] * decisions,
    )
    estimator = reinforce(GAMMA, centred="reward", warm_start=int(off_policy), rate=RATE)
    step = TrainingStep(
        Components(lm, agent, estimator, LogitPressure(RATE, count_forced=True)), weights
    )
    losses = step(PassInput(symbol_BN, seed=0, length_B=torch.tensor(lengths), noise=noise_BT))
    losses.total.backward()
    scale = SimpleNamespace(lm=predictions, early=predictions, policy=decisions, rate=decisions)
    for name, value in expected.items():
        torch.testing.assert_close(
            losses.shares[name] * getattr(scale, name), value.detach(), **EXACT
        )
    for (name, parameter), true in zip(parameters.items(), gradient, strict=True):
        torch.testing.assert_close(parameter.grad, true, **EXACT, msg=name)
    assert all(true.abs().sum() > 0 for true in gradient)
