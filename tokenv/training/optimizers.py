"""Optimizers of a run: the schedule, AdamW and Muon by parameter groups, and clipped steps."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokenv.config.components import Components
from tokenv.config.schema import TrainConfig
from tokenv.core.devices import is_accelerator
from tokenv.core.distributed import full_tensor, shard_like

T = TypeVar("T", bound=Tensor)
LAYERS = re.compile(r"lm\.(down|mid|up|layers)\.")
# number of matrices which one parameter of this name holds, one above the other
STACKED = {"qkv": 3}
# Jordan's: singular values which are not tiny come near 1
POLYNOMIAL, ROUNDS = (3.4445, -4.7750, 2.0315), 5
ADAMW_RMS = 0.2  # root mean square of an AdamW step, in learning rates


def learning_rate(config: TrainConfig, symbols: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine, both counted in symbols (paper, appendix D).

    Args:
        config: peak and end of the schedule; ``TrainConfig.warmup`` limits the warm-up to a tenth of a short run.
        symbols: training symbols, those of the coming update included.
    """
    if symbols < config.warmup:
        low = config.initial_learning_rate
        return config.learning_rate * (low * (config.warmup - symbols) + symbols) / config.warmup
    progress = min((symbols - config.warmup) / (config.symbols - config.warmup), 1.0)
    low = config.final_learning_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(
    config: TrainConfig, parameters: dict[str, torch.nn.Parameter]
) -> torch.optim.AdamW:
    """Build the optimizer which ``train.optimizer`` names, with weight decay on matrices, or on all parameters.

    The key ``lr_scale`` of a parameter group is its learning rate relative to the model's, ``matrices`` the number of
    matrices in each of its parameters which Muon optimizes.
    """
    groups: dict[tuple[float, float, int, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        lr_scale = _peak_learning_rate(config, name) / config.learning_rate
        decay = 0.0
        if parameter.dim() >= 2 or config.decay_vectors:
            decay = config.weight_decay
        matrices = _muon_matrices(config, name, parameter)
        options = {"lr": lr_scale * config.learning_rate, "weight_decay": decay}
        group = groups.setdefault(
            (lr_scale, decay, matrices, isinstance(parameter, DTensor)),
            {"params": [], "lr_scale": lr_scale, "matrices": matrices} | options,
        )
        group["params"].append(parameter)
    optimizer = {"adamw": torch.optim.AdamW, "muon": Muon}[config.optimizer]
    betas = (config.beta1, config.beta2)
    return optimizer(list(groups.values()), lr=config.learning_rate, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the model, and those of all parameter groups relative to it."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr_scale"] * rate


def _peak_learning_rate(config: TrainConfig, name: str) -> float:
    """Return the peak learning rate of the parameter of this name."""
    if LAYERS.match(name):
        return config.learning_rate
    own = config.embedding_learning_rate if name.startswith("lm.") else config.agent_learning_rate
    return config.learning_rate if own is None else own


def expected_optimizer_state(
    config: TrainConfig, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return the form of the optimizer's state: by parameter name, tensors of the shapes and types of the real ones."""
    step = torch.zeros((), device="meta")
    state: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if _muon_matrices(config, name, parameter):
            state[name] = {"momentum": parameter}
        else:
            state[name] = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": step}
    return state


def _muon_matrices(config: TrainConfig, name: str, parameter: Tensor) -> int:
    """Return the number of matrices in a parameter which Muon optimizes; 0 for a parameter which AdamW optimizes."""
    if config.optimizer != "muon" or parameter.dim() != 2 or not LAYERS.match(name):
        return 0
    return STACKED.get(name.split(".")[-2], 1)


def optimizer_flops(config: TrainConfig, components: Components) -> int:
    """Return the FLOPs of the matrix products in an update's optimizer steps: Muon's; AdamW has none.

    Steps on replayed rollouts have gradients of the language model's encoder alone.
    """
    total = 0
    for name, parameter in components.named_parameters().items():
        count = _muon_matrices(config, name, parameter)
        if count:
            steps = 1
            if name.startswith("lm.down."):
                steps += components.further_steps.count(False)
            total += (
                steps * count * orthogonalize_flops(parameter.shape[0] // count, parameter.shape[1])
            )
    return total


def grad_norm(
    parameters: dict[str, torch.nn.Parameter], prefix: str, device: torch.device
) -> Tensor:
    """Return the L2 norm of the gradients of those parameters whose names begin with ``prefix``: [] on ``device``."""
    grads = [
        p.grad for name, p in parameters.items() if name.startswith(prefix) and p.grad is not None
    ]
    return _total_norm(grads) if grads else torch.zeros((), device=device)


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of gradients, some of which may be sharded."""
    norms = [
        full_tensor(torch.nn.utils.get_total_norm(group)) for group in _split_by_sharding(gradients)
    ]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _split_by_sharding(tensors: list[T]) -> list[list[T]]:
    """Split tensors into ordinary and sharded ones, because torch's functions accept no mixture."""
    groups = (
        [each for each in tensors if isinstance(each, DTensor) == sharded]
        for sharded in (False, True)
    )
    return [group for group in groups if group]


def optimizer_step(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], max_norm: float
) -> None:
    """Make one step with gradients clipped to ``max_norm``, then clear the gradients."""
    trained = [parameter for parameter in parameters.values() if parameter.grad is not None]
    if trained:
        norm = _total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        for group in _split_by_sharding(trained):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def skip_if_nonfinite(optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> Iterator[None]:
    """Skip the steps made while entered if ``found_inf`` is 1.0 on the device; None skips nothing.

    As with torch's ``GradScaler``, a fused optimizer then changes neither parameters nor moments nor its step count.
    """
    if found_inf is None:
        yield
        return
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return about U Vᵀ for each matrix U S Vᵀ of any scale: singular values of 0.7 to 1.2, except tiny ones.

    Five rounds of X ← (a + b XXᵀ + c (XXᵀ)²) X (K. Jordan, "Muon", 2024), for all matrices of one shape at once, in
    bfloat16 on a GPU, which is accurate enough, else in the matrices' type.
    """
    by_shape = defaultdict(list)
    for number, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(number)
    result: dict[int, Tensor] = {}
    a, b, c = POLYNOMIAL
    for (rows, columns), numbers in by_shape.items():
        tall = rows > columns
        of_shape = [matrices[number] for number in numbers]
        if tall:
            of_shape = [matrix.mT for matrix in of_shape]
        x_LRC = torch.stack(of_shape)
        x_LRC = x_LRC / x_LRC.norm(dim=(1, 2), keepdim=True).clamp_min(1e-30)
        x_LRC = x_LRC.bfloat16() if is_accelerator(x_LRC.device) else x_LRC
        for _ in range(ROUNDS):
            gram_LRR = x_LRC @ x_LRC.mT
            polynomial_LRR = torch.baddbmm(gram_LRR, gram_LRR, gram_LRR, beta=b, alpha=c)
            x_LRC = torch.baddbmm(x_LRC, polynomial_LRR, x_LRC, beta=a)
        x_LRC = x_LRC.to(matrices[0].dtype)
        if tall:
            x_LRC = x_LRC.mT
        result |= zip(numbers, x_LRC, strict=True)
    return [result[number] for number in range(len(matrices))]


def orthogonalize_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of ``orthogonalize`` on one matrix: in each round 2 R² (2 C + R), R ≤ C."""
    short, long = sorted((rows, columns))
    return ROUNDS * 2 * short**2 * (2 * long + short)


class Muon(torch.optim.AdamW):
    """Muon for groups whose ``matrices`` is not 0, AdamW for the others: one object, because a run has one state.

    m ← β₁ m + (1 − β₁) g;  W ← (1 − η λ) W − 0.2 √max(R, C) η · orthogonal(β₁ m + (1 − β₁) g), for every R × C matrix
    (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; the factor makes a step as long as
    AdamW's: arXiv 2502.16982). η, λ and β₁ are the group's ``lr``, ``weight_decay`` and the first of ``betas``.
    Cost: one moment instead of two, and ``orthogonalize``, whose FLOPs a run counts once. Every rank computes all of
    it, and a rank with a shard of the model first gathers the momentum of a layer's matrices.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step of all groups, which clears the gradients of Muon's groups."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["matrices"]:
                self._muon_step(group, found_inf)
        super().step()

    def _muon_step(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        """Make a step of one group by Muon, which changes nothing if ``found_inf`` is 1.0 on the device."""
        rate = group["lr"]
        beta = group["betas"][0]
        count = group["matrices"]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        matrices: list[Tensor] = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"]
            gradient = parameter.grad
            if found_inf is not None:
                gradient = torch.where(found_inf > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - beta)
            matrices += full_tensor(gradient.lerp(momentum, beta)).chunk(count)
            parameter.grad = None
        steps = orthogonalize(matrices)
        applied = 1.0 if found_inf is None else 1 - found_inf
        for number, parameter in enumerate(parameters):
            own = steps[number * count : (number + 1) * count]
            length = ADAMW_RMS * max(own[0].shape) ** 0.5 * rate
            parameter.mul_(1 - applied * rate * group["weight_decay"])
            parameter.sub_(shard_like(torch.cat(own), parameter) * (applied * length))
