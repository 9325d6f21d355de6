"""One update: a rollout's gradients, and a step along them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokenv.config.components import Components
from tokenv.config.schema import Config, LossConfig, TrainConfig
from tokenv.core.distributed import all_reduce_sum, full_tensor, use_group
from tokenv.env.rollout import rescore, rescore_head
from tokenv.training.losses import compute_losses, rollout_metrics, total_loss
from tokenv.training.metrics import MetricsBuffer
from tokenv.training.muon import LAYERS, Muon, count_matrices, orthogonal_flops
from tokenv.training.process_group import DataParallelGroup

T = TypeVar("T", bound=Tensor)
PARAM_GROUPS = {"lm": "lm.", "policy": "agent."}  # whose gradients are told of: what their parameters' names begin with


def learning_rate(config: TrainConfig, seen: int) -> float:
    """Linear warm-up, then a cosine, both counted in symbols (paper, appendix D).

    Args:
        config: peak and end of the schedule; a warm-up that would not end before the run is a tenth of it
            (``TrainConfig.warmup``).
        seen: training symbols, those of the coming update included.
    """
    if seen < config.warmup:
        return config.learning_rate * seen / config.warmup
    done = min((seen - config.warmup) / (config.symbols - config.warmup), 1.0)
    low = config.final_learning_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """The seed of a pass's noise, which depends on nothing but the run's seed, the step and the pass's number in it."""
    return (seed * 2_147_483_629 + number * 998_244_353 + step) % 2**62


def make_optimizer(config: TrainConfig, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """What ``train.optimizer`` names, with weight decay on matrices only.

    A group's ``share`` is its learning rate over the model's, its ``matrices`` what Muon learns of it.
    """
    members: dict[tuple[float, float, int, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        share = _rate_of(config, name) / config.learning_rate
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        kind = (share, decay, _of_muon(config, name, parameter))
        members.setdefault((*kind, isinstance(parameter, DTensor)), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": group,
            "share": share,
            "lr": share * config.learning_rate,
            "weight_decay": decay,
            "matrices": count,
        }
        for (share, decay, count, _), group in members.items()
    ]
    make = {"adamw": torch.optim.AdamW, "muon": Muon}[config.optimizer]
    return make(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def _rate_of(config: TrainConfig, name: str) -> float:
    """Return the peak learning rate of the parameter of this name."""
    if LAYERS.match(name):
        return config.learning_rate
    own = config.embedding_learning_rate if name.startswith("lm.") else config.agent_learning_rate
    return config.learning_rate if own is None else own


def expected_optimizer_state(
    config: TrainConfig, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """What ``make_optimizer``'s keeps of each parameter that ever had a gradient, by its name: tensors of that form."""
    step = torch.zeros((), device="meta")
    return {
        name: {"momentum": parameter}
        if _of_muon(config, name, parameter)
        else {"exp_avg": parameter, "exp_avg_sq": parameter, "step": step}
        for name, parameter in parameters.items()
    }


def _of_muon(config: TrainConfig, name: str, parameter: Tensor) -> int:
    """How many matrices Muon learns of a parameter; 0 is one of AdamW's."""
    return count_matrices(name, parameter) if config.optimizer == "muon" else 0


def optimizer_flops(config: TrainConfig, parts: Components) -> int:
    """Return the FLOPs of the matrix products in an update's optimizer steps: Muon's; AdamW has none.

    Steps on replayed rollouts have gradients of the language model's encoder alone.
    """

    def one_step(begins: str) -> int:
        total = 0
        for name, parameter in parts.named_parameters().items():
            count = _of_muon(config, name, parameter) if name.startswith(begins) else 0
            total += count and count * orthogonal_flops(parameter.shape[0] // count, parameter.shape[1])
        return total

    return one_step("lm.") + (parts.num_epochs - 1) * one_step("lm.down.")


def backward(
    one_pass: Callable[[], TensorDictBase], parts: Components, weights: LossConfig, *, passes: int = 1
) -> tuple[TensorDictBase, dict[str, Tensor]]:
    """Add the gradients of one of an update's ``passes`` rollouts to the parameters'.

    Returns:
        The rollout, and its losses; of a shared batch, the whole batch's.
    """
    losses: dict[str, Tensor] = {}
    rollouts: list[TensorDictBase] = []

    def loss() -> Tensor:
        rollouts.append(one_pass())
        losses.update(compute_losses(rollouts[0], parts))
        return total_loss(losses, weights) / passes

    parts.whole(loss).backward()
    return rollouts[0], dict(zip(losses, all_reduce_sum(*(each.detach() for each in losses.values())), strict=True))


def accumulate_gradients(
    one_pass: Callable[[int], TensorDictBase], parts: Components, weights: LossConfig, team: DataParallelGroup
) -> tuple[MetricsBuffer, list[TensorDictBase]]:
    """Add up the gradients of an update, over its passes and over all who make them.

    Args:
        one_pass: from a pass's number to its rollout.
        parts: the model and who learns.
        weights: of the losses.
        team: which passes are ours.

    Returns:
        Metrics, averaged over the update's rollouts (tokens summed), loss and gradients watched; and our own rollouts,
        detached, if they are used again.
    """
    sums: dict[str, Tensor] = {}
    kept, passes = [], team.slots.accumulate
    with use_group(team.sharers):
        for number in team.slots.passes:
            td, losses = backward(partial(one_pass, number), parts, weights, passes=passes)
            for name, value in rollout_metrics(td, losses, parts).items():
                sums[name] = sums.get(name, 0) + value / (1 if name.startswith("tokens") else passes)
            if parts.num_epochs > 1 or parts.head_epochs:
                kept.append(td.detach())
    parameters = parts.named_parameters()
    team.ranks.all_reduce_gradients(parameters.values())
    sums = team.all_reduce_metrics(sums)
    device = sums["tokens"].device
    norms = {f"grad_norm_{whose}": grad_norm(parameters, owner, device) for whose, owner in PARAM_GROUPS.items()}
    return MetricsBuffer(sums | norms, watched=(parts.lm.codec.unit, *norms)), kept


def policy_epochs(
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[TensorDictBase],
    parts: Components,
    config: Config,
    team: DataParallelGroup,
) -> None:
    """Make the further steps which the estimator asks for, on the rollouts of ``accumulate_gradients``."""
    parameters = parts.named_parameters()
    for again in rescored_rollouts(parts, rollouts):
        with use_group(team.sharers):
            for one_pass in again:
                backward(one_pass, parts, config.loss, passes=team.slots.accumulate)
        team.ranks.all_reduce_gradients(parameters.values())
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)


def rescored_rollouts(
    parts: Components, rollouts: Sequence[TensorDictBase]
) -> Iterator[list[Callable[[], TensorDictBase]]]:
    """What an update's further steps learn from: its rollouts, scored again when they are called.

    Args:
        parts: the model and who learns.
        rollouts: detached.

    Yields:
        Of each further step the rollouts; after the epochs come the steps of the policy alone, its encodings kept.
    """
    for _ in range(parts.num_epochs - 1):
        yield [partial(rescore, parts.lm, parts.agent, td) for td in rollouts]
    for _ in range(parts.head_epochs):
        yield [partial(rescore_head, parts.agent, td) for td in rollouts]


def grad_norm(parameters: dict[str, torch.nn.Parameter], owner: str, device: torch.device) -> Tensor:
    """L2 norm of the gradient of one part's parameters, on ``device``, where they are."""
    grads = [p.grad for name, p in parameters.items() if name.startswith(owner) and p.grad is not None]
    return _total_norm(grads) if grads else torch.zeros((), device=device)


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of gradients, some of which may be dealt out over processes."""
    norms = [full_tensor(torch.nn.utils.get_total_norm(some)) for some in _by_kind(gradients)]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _by_kind(tensors: list[T]) -> list[list[T]]:
    """Whole tensors apart from those that are dealt out, for torch takes no mixture."""
    kinds = ([each for each in tensors if isinstance(each, DTensor) == dealt_out] for dealt_out in (False, True))
    return [kind for kind in kinds if kind]


def optimizer_step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], clip: float) -> None:
    """One step with clipped gradients, which are then forgotten."""
    having = [parameter for parameter in parameters.values() if parameter.grad is not None]
    if having:
        norm = _total_norm([parameter.grad for parameter in having if parameter.grad is not None])
        for some in _by_kind(having):
            torch.nn.utils.clip_grads_with_norm_(some, clip, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def skip_if_nonfinite(optimizer: torch.optim.Optimizer, odd: Tensor | None) -> Iterator[None]:
    """While entered, steps change nothing where ``odd`` is 1.0, which only the device knows; None changes nothing here.

    The way of torch's ``GradScaler``: a fused optimiser leaves parameters and moments alone, and takes its count back.
    """
    if odd is None:
        yield
        return
    optimizer.found_inf = odd  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
