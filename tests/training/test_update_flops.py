"""The metrics ``flops``, ``flops_linear`` and ``flops_executed`` against torch's own count of an update's products."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_attention import reference_attention
from tiny import settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokenv.config.components import Components, build_components
from tokenv.config.files import merge, resolve
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.estimators.baselines import LinearCritic
from tokenv.lm import flops, unet
from tokenv.lm.flops import (
    Batch,
    Tokens,
    causal_pairs,
    matrix_parameters,
    policy_flops,
    update_flops,
)
from tokenv.training import losses
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.metrics import UpdateFlops
from tokenv.training.optimizers import make_optimizer, optimizer_flops, optimizer_step
from tokenv.training.process_group import Ranks
from tokenv.training.trainer import train
from tokenv.training.update import PassInput, TrainingStep, accumulate_gradients, policy_epochs

BATCH, LENGTH = 4, 32


def compute_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute and count no products of queries, keys and values, or those of all pairs, masked or not."""
    pairs_per_length = {"none": lambda length: 0 * length, "all pairs": lambda length: length**2}[
        kind
    ]
    for module in (flops, losses):
        monkeypatch.setattr(module, "causal_pairs", pairs_per_length)
    monkeypatch.setattr(flops, "window_pairs", lambda length, window: pairs_per_length(length))
    if kind == "all pairs":
        monkeypatch.setattr(
            unet, "select_attention", lambda *_: partial(reference_attention, softcap=50.0)
        )
        return

    def values(
        q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0, gate_BN: Tensor | None = None
    ) -> Tensor:
        mixed = v + 0 * (q + k)
        return mixed if gate_BN is None else mixed * gate_BN[:, None, :, None]

    monkeypatch.setattr(unet, "select_attention", lambda *_: values)
    monkeypatch.setattr(unet, "relaxed_attention", values)


def one_update(config: Config) -> tuple[Components, dict[str, int], int]:
    """Make one update; return its FLOPs by our count, and those which torch counts."""
    parts = build_components(config)
    parts = parts if parts.imitation is None else parts.imitating()
    parts.train()
    symbol_BN = torch.randint(0, 256, (BATCH, LENGTH))
    step = TrainingStep(parts, config.loss)
    optimizer = make_optimizer(config.train, parts.named_parameters())
    group = DataParallelGroup.create(Ranks(), config.train, split_each_pass=False)
    with FlopCounterMode(display=False) as counter:
        figures, kept = accumulate_gradients(step, [PassInput(symbol_BN, seed=0)], group)
        optimizer_step(optimizer, parts.named_parameters(), config.train.max_grad_norm)
        policy_epochs(step, optimizer, kept, group, config.train.max_grad_norm)
    counted = UpdateFlops(parts, Batch(BATCH, LENGTH), optimizer_flops(config.train, parts))
    return parts, counted.take(figures.read()), counter.get_total_flops()


def left_out(parts: Components) -> int:
    """Return the FLOPs which the convention counts and no kernel computes.

    Every sequence's last symbol reaches the encoder and the entropy of the early exit alone. The first token-level
    layer of a relaxed pass sends no gradient to its input, and only half of its attention has one. A linear critic
    multiplies entries of its table without a matrix product.
    """
    lm = parts.lm
    passes = parts.passes
    policy = policy_flops(parts.agent)
    whole = Batch(BATCH, LENGTH)
    without_last = Batch(BATCH, LENGTH - 1)
    everything, rest = (
        update_flops(lm, batch, Tokens(0), policy, passes, recompute=lm.recomputes)
        for batch in (whole, without_last)
    )
    pairs = (
        2
        * lm.config.width
        * len(lm.down)
        * (flops.causal_pairs(LENGTH) - flops.causal_pairs(LENGTH - 1))
    )
    down = matrix_parameters(lm.down) + pairs
    computed = 6 * (matrix_parameters(lm.codec) + down)
    if lm.recomputes:
        computed += 2 * down
    teacher = parts.sampling.teacher
    if keys.EARLY_ENTROPY in {*parts.agent.in_keys, *(teacher.in_keys if teacher else ())}:
        computed += 2 * matrix_parameters(lm.early_head)
    relaxed = 2 * passes.pathwise * lm.mid[0].qkv.weight.numel() * BATCH * (LENGTH - 1)
    relaxed += 6 * lm.config.width * passes.pathwise * BATCH * flops.causal_pairs(LENGTH - 1)
    tables = [
        stage.table
        for stage in getattr(parts.estimator, "stages", [])
        if isinstance(stage, LinearCritic)
    ]
    entries = 4 * sum(table.embedding_dim - 1 for table in tables) * BATCH * (LENGTH - 1)
    return everything - rest - BATCH * computed + relaxed + entries


CASES: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "muon": {"train": {"optimizer": "muon"}},
    "naive": {"estimator": {"name": "naive"}, "loss": {"early": 0.0}},
    "early exit read, not trained": {"loss": {"early": 0.0}},
    "rloo": {"estimator": {"name": "rloo", "num_samples": 3}},
    "rloo, forward only": {"estimator": {"name": "rloo", "reward_only": True, "num_samples": 3}},
    "ppo": {"estimator": {"name": "ppo", "epochs": 3}, "train": {"optimizer": "muon"}},
    "gumbel": {"estimator": {"name": "gumbel"}, "agent": {"window": 0}},
    "rebar": {"estimator": {"name": "rebar"}, "agent": {"window": 0}},
    "relax": {"estimator": {"name": "relax"}, "agent": {"window": 0}},
    "text_critic": {"estimator": {"name": "text_critic", "num_samples": 2}},
    "linear_critic": {"estimator": {"name": "linear_critic"}},
    "uniform": {"agent": {"name": "uniform"}, "train": {"optimizer": "muon"}},
    "uniform, early exit wanted": {"agent": {"name": "uniform"}, "loss": {"early": 0.1}},
    "entropy": {"agent": {"name": "entropy"}},
    "imitation": {"imitation": {"teacher": {"name": "whitespace"}}, "estimator": {"name": "rloo"}},
    "entropy imitated": {"imitation": {"teacher": {"name": "entropy"}}},
    "mean": {"agent": {"name": "uniform"}, "model": {"pooling": "mean"}},
    "recompute": {"hardware": {"activation_checkpointing": "on"}},
}


@pytest.mark.parametrize("attention", ["none", "all pairs"])
@pytest.mark.parametrize("name", CASES)
def test_executed_flops_equal_those_which_torch_counts(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_attention(attention, monkeypatch)
    changes = settings(
        train={"batch_size": BATCH},
        hardware={"activation_checkpointing": "off"},
    )
    config = resolve([], merge(changes, CASES[name]))
    parts, counted, by_torch = one_update(config)
    assert by_torch == counted["flops_executed"] - left_out(parts)
    assert counted["flops_linear"] <= counted["flops"] <= counted["flops_executed"]


def spent(changes: dict[str, Any], **sections: Any) -> tuple[int, int]:
    _, counted, _ = one_update(resolve([], merge(changes, sections)))
    return counted["flops"], counted["flops_executed"]


def test_needed_flops_exclude_padding_recomputation_and_an_unused_early_exit() -> None:
    changes = settings(train={"batch_size": BATCH})
    plain, packed, again = (
        spent(changes, hardware={"sequence_packing": pack, "activation_checkpointing": recompute})
        for pack, recompute in (("off", "off"), ("on", "off"), ("off", "on"))
    )
    assert plain[0] == packed[0] == packed[1] == again[0] < plain[1] < again[1]
    even = {
        early: spent(changes, agent={"name": "uniform"}, loss={"early": early})[0]
        for early in (None, 0.0, 0.1)
    }
    head = 6 * 16 * 256 * BATCH * LENGTH
    assert even[0.1] - even[None] == head == even[0.1] - even[0.0]


def test_a_run_adds_up_its_updates_and_validates_without_an_early_exit(tmp_path: Path) -> None:
    config = resolve(
        [],
        settings(
            agent={"name": "uniform"}, train={"symbols": 1024}, hardware={"sequence_packing": "on"}
        ),
    )
    validation, history = train(config, tmp_path, lambda *_: None)
    parts = build_components(config)
    batch = Batch(2 * 4, 32)
    for place, rate in enumerate(history["train/boundary_rate"][1]):
        tokens = Tokens(round(rate * 2 * 4 * 31))  # of the sequences alike: the agent is uniform
        per_sequence = tokens.learning // 8
        assert tokens.learning == 8 * per_sequence
        tokens = replace(tokens, learning_pairs=8 * causal_pairs(per_sequence))
        before = history["train/flops"][1][place - 1] if place else 0
        expected = update_flops(parts.lm, batch, tokens, policy_flops(parts.agent), parts.passes)
        assert history["train/flops"][1][place] - before == expected
    assert history["train/flops"] == history["train/flops_executed"]
    assert validation.loss_early is None
    assert not any("early" in name or "reward" in name for name in history)
