"""Muon: steps along orthogonalised gradients, for the matrices of a model's layers."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenv.core.distributed import full_tensor, shard_like

LAYERS = re.compile(r"lm\.(down|mid|up|layers)\.")
STACKED = {"qkv": 3}  # matrices that one parameter of this name holds, one above the other
POLYNOMIAL, ROUNDS = (3.4445, -4.7750, 2.0315), 5  # Jordan's: what is not tiny among singular values comes near 1
LIKE_ADAMW = 0.2  # root mean square of an AdamW step, in learning rates


def count_matrices(name: str, parameter: Tensor) -> int:
    """How many matrices a parameter of a layer holds, which Muon learns; 0 is a parameter that AdamW learns.

    Args:
        name: of the parameter: ``lm.mid.0.qkv.weight``.
        parameter: of any shape.
    """
    if parameter.dim() != 2 or not LAYERS.match(name):
        return 0
    return STACKED.get(name.split(".")[-2], 1)


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """For each matrix U S Vᵀ, of any scale, about U Vᵀ: singular values of 0.7 to 1.2, but for tiny ones.

    Five rounds of X ← (a + b XXᵀ + c (XXᵀ)²) X (K. Jordan, "Muon", 2024), of all matrices of one shape at once.
    In bfloat16 on a GPU, which these rounds bear, else in the matrices' type.
    """
    alike = defaultdict(list)
    for number, matrix in enumerate(matrices):
        alike[matrix.shape].append(number)
    found: dict[int, Tensor] = {}
    a, b, c = POLYNOMIAL
    for (rows, columns), numbers in alike.items():
        upright = rows > columns
        x_LRC = torch.stack([matrices[number].mT if upright else matrices[number] for number in numbers])
        x_LRC = x_LRC / x_LRC.norm(dim=(1, 2), keepdim=True).clamp_min(1e-30)
        x_LRC = x_LRC.bfloat16() if x_LRC.is_cuda else x_LRC
        for _ in range(ROUNDS):
            gram_LRR = x_LRC @ x_LRC.mT
            polynomial_LRR = torch.baddbmm(gram_LRR, gram_LRR, gram_LRR, beta=b, alpha=c)
            x_LRC = torch.baddbmm(x_LRC, polynomial_LRR, x_LRC, beta=a)
        x_LRC = x_LRC.to(matrices[0].dtype)
        found |= zip(numbers, x_LRC.mT if upright else x_LRC, strict=True)
    return [found[number] for number in range(len(matrices))]


def orthogonal_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of ``orthogonalize`` on one matrix: in each round 2 R² (2 C + R), R ≤ C."""
    short, long = sorted((rows, columns))
    return ROUNDS * 2 * short**2 * (2 * long + short)


class Muon(torch.optim.AdamW):
    """Muon for groups whose ``matrices`` is not 0, AdamW for the others; one object, for a run has one state.

    m ← β₁ m + (1 − β₁) g;  W ← (1 − η λ) W − 0.2 √max(R, C) η · orthogonal(β₁ m + (1 − β₁) g), for every R × C matrix
    (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; the factor, with which a step is as
    long as AdamW's: arXiv 2502.16982). η, λ and β₁ are the group's ``lr``, ``weight_decay`` and the first of
    ``betas``. Cost: one moment, not two, and ``orthogonalize``, whose FLOPs a run counts once. Every
    rank does all of it, and one that has a part of the model gathers the momentum of a layer's matrices first.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all groups, which uses up the gradients of Muon's."""
        spared = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["matrices"]:
                self._step(group, spared)
        super().step()

    def _step(self, group: dict[str, Any], spared: Tensor | None) -> None:
        """Of one group by Muon; it changes nothing where ``spared`` is 1.0, which only the device knows."""
        rate, beta, count = group["lr"], group["betas"][0], group["matrices"]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        pieces: list[Tensor] = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"]
            gradient = parameter.grad if spared is None else torch.where(spared > 0, momentum, parameter.grad)
            momentum.lerp_(gradient, 1 - beta)
            pieces += full_tensor(gradient.lerp(momentum, beta)).chunk(count)
            parameter.grad = None
        steps = orthogonalize(pieces)
        made = 1.0 if spared is None else 1 - spared
        for number, parameter in enumerate(parameters):
            own = steps[number * count : (number + 1) * count]
            length = LIKE_ADAMW * max(own[0].shape) ** 0.5 * rate
            parameter.mul_(1 - made * rate * group["weight_decay"])
            parameter.sub_(shard_like(torch.cat(own), parameter) * (made * length))
