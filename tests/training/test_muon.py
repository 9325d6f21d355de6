"""Muon's steps against a straightforward implementation, and against torch's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.config.schema import TrainConfig
from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.training import optimizers
from tokenv.training.optimizers import orthogonalize


def reference(matrix: Tensor) -> Tensor:
    """Apply the rounds to the singular values themselves."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6)


@given(shapes, st.integers(0, 2**32), st.sampled_from([1e-9, 1.0, 1e6]))
def test_orthogonalize_changes_singular_values_alone(
    shapes: list[tuple[int, int]], seed: int, scale: float
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    matrices = [
        scale * torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes
    ]
    for matrix, orthogonal in zip(matrices, orthogonalize(matrices), strict=True):
        assert torch.allclose(orthogonal, reference(matrix), atol=1e-8)


def test_singular_values_come_near_one_and_zero_stays_zero() -> None:
    wide = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize([wide])[0])
    assert values.min() > 0.65
    assert values.max() < 1.25
    assert torch.equal(orthogonalize([torch.zeros(3, 4)])[0], torch.zeros(3, 4))


def some_steps(
    config: TrainConfig, parameters: dict[str, torch.nn.Parameter]
) -> list[dict[str, Tensor]]:
    """Make three steps, and return their gradients."""
    optimizer = optimizers.make_optimizer(config, parameters)
    numbers = torch.Generator().manual_seed(0)
    made = []
    for _ in range(3):
        made.append(
            {
                name: torch.randn(p.shape, generator=numbers, dtype=p.dtype)
                for name, p in parameters.items()
            }
        )
        for name, parameter in parameters.items():
            parameter.grad = made[-1][name].clone()
        optimizer.step()
    return made


def after_steps(start: Tensor, gradients: list[Tensor]) -> Tensor:
    """One matrix, with a learning rate of 0.01, a weight decay of 0.1 and a momentum of 0.8."""
    matrix = start
    momentum = torch.zeros_like(start)
    for gradient in gradients:
        momentum = 0.8 * momentum + 0.2 * gradient
        step = 0.2 * max(matrix.shape) ** 0.5 * reference(0.8 * momentum + 0.2 * gradient)
        matrix = matrix - 0.01 * 0.1 * matrix - 0.01 * step
    return matrix


def test_muon_optimizes_matrices_of_layers_and_adamw_all_others(
    tiny_settings: dict[str, Any],
) -> None:
    tiny_settings["hardware"]["precision"] = "float64"
    tiny_settings["train"] |= {
        "learning_rate": 0.01,
        "agent_learning_rate": 2e-3,
        "weight_decay": 0.1,
        "beta1": 0.8,
    }
    parameters: dict[str, dict[str, torch.nn.Parameter]] = {}
    for optimizer in ("adamw", "muon"):
        tiny_settings["train"]["optimizer"] = optimizer
        config = resolve([], tiny_settings)
        parameters[optimizer] = build_components(config).named_parameters()
        start = {
            name: parameter.detach().clone() for name, parameter in parameters[optimizer].items()
        }
        gradients = some_steps(config.train, parameters[optimizer])
    others = {
        name for name in start if torch.equal(parameters["muon"][name], parameters["adamw"][name])
    }
    matrices = ("qkv", "out", "mlp.gate_up", "mlp.down")
    layers = {
        f"lm.{part}.0.{matrix}.weight" for part in ("down", "mid", "up") for matrix in matrices
    }
    assert others == start.keys() - layers
    for name in layers:
        of_one = [each[name].chunk(3 if "qkv" in name else 1) for each in (start, *gradients)]
        expected = torch.cat(
            [after_steps(first, list(rest)) for first, *rest in zip(*of_one, strict=True)]
        )
        assert torch.allclose(parameters["muon"][name], expected, atol=1e-9), name


def test_steps_equal_those_of_torch() -> None:
    """Torch's Muon, which computes in bfloat16, on a parameter of one matrix."""
    numbers = torch.Generator().manual_seed(0)
    start = torch.randn(24, 32, generator=numbers)
    ours = {"lm.mid.0.out.weight": torch.nn.Parameter(start.clone())}
    theirs = torch.nn.Parameter(start.clone())
    config = TrainConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1, beta1=0.9)
    peer = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for gradients in some_steps(config, ours):
        theirs.grad = gradients["lm.mid.0.out.weight"]
        peer.step()
    moved = ours["lm.mid.0.out.weight"].detach() - start
    expected = theirs.detach() - start
    assert (moved - expected).norm() < 0.02 * expected.norm()


def test_moments_of_another_optimizer_are_rejected(tiny_settings: dict[str, Any]) -> None:
    both = {}
    for name in ("adamw", "muon"):
        config = resolve(
            [], tiny_settings | {"train": tiny_settings["train"] | {"optimizer": name}}
        )
        parameters = build_components(config).named_parameters()
        optimizer = optimizers.make_optimizer(config.train, parameters)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        kept = optimizers.expected_optimizer_state(config.train, parameters)
        both[name] = checkpoints.optimizer_tensors(optimizer, parameters), kept
        checkpoints.check_optimizer(*both[name], "here")
    for name, other in (("adamw", "muon"), ("muon", "adamw")):
        with pytest.raises(UserError, match=r"here: lm\.down\.0\.mlp\.down\.weight/\w+: found"):
            checkpoints.check_optimizer(both[name][0], both[other][1], "here")
