"""The training loop, from top to bottom. Start reading at ``train``."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from tqdm import tqdm

from tokenv import keys
from tokenv.config.schema import Config, LossConfig, TrainConfig
from tokenv.data.corpus import load_corpus
from tokenv.env.rollout import rescore
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators.statistics import masked_mean
from tokenv.lm.codecs.base import Codec
from tokenv.lm.flops import update_flops
from tokenv.run.evaluate import Evaluation, evaluate
from tokenv.run.hardware import prepare, resolve_device
from tokenv.run.interrupt import Interruptible
from tokenv.run.parts import Parts, build_parts
from tokenv.run.progress import ProgressFile
from tokenv.storage import checkpoints

Log = Callable[[str, float, int], None]
History = dict[str, tuple[list[int], list[float]]]


class NotFiniteError(RuntimeError):
    """The loss is no longer a finite number."""


def learning_rate(config: TrainConfig, seen_bytes: int) -> float:
    """Linear warm-up, then a cosine, both counted in bytes (paper, appendix D)."""
    if seen_bytes < config.warmup_bytes:
        return config.learning_rate * seen_bytes / config.warmup_bytes
    done = min((seen_bytes - config.warmup_bytes) / (config.bytes - config.warmup_bytes), 1.0)
    low = config.final_learning_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(config: TrainConfig, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def mean_log_likelihood(td: TensorDictBase, key: NestedKey, codec: Codec, weight: Tensor | None = None) -> Tensor:
    """Mean over all that has a likelihood: symbols, or those values of a series that count; [..] -> []."""
    log_likelihood, counted = td[key], codec.counted(td["next", keys.SYMBOL])
    if counted is None:
        return log_likelihood.mean() if weight is None else masked_mean(log_likelihood, weight)
    values = counted if weight is None else counted * weight
    return (log_likelihood if weight is None else log_likelihood * weight).sum() / values.sum().clamp(min=1)


def compute_losses(td: TensorDictBase, parts: Parts) -> dict[str, Tensor]:
    """The losses of eq. 27, each a mean over the batch: per symbol or value (lm, early) or per decision."""
    if parts.estimator is not None:
        td = parts.estimator(td) if keys.OLD_LOG_PROB not in td else parts.estimator.replay(td)
    if parts.rate_target is not None:
        td = parts.rate_target(td)
    decided = td[keys.DECISION_MASK]
    codec, weight = parts.lm.codec, td.get(keys.SAMPLE_WEIGHT, None)
    losses = {
        "lm": -mean_log_likelihood(td, keys.LOG_LIKELIHOOD, codec, weight),
        "early": -mean_log_likelihood(td, keys.LOG_LIKELIHOOD_EARLY, codec),
    }
    if keys.LOG_LIKELIHOOD_DIRECT in td:
        losses["direct"] = -td[keys.LOG_LIKELIHOOD_DIRECT].sum() / td[keys.DIRECT_COUNT].sum().clamp(min=1)
    for name, key in (("policy", keys.LOSS_POLICY), ("rate", keys.LOSS_RATE)):
        losses[name] = masked_mean(td[key], decided) if key in td else losses["lm"].new_zeros(())
    return losses


def total_loss(losses: dict[str, Tensor], weights: LossConfig) -> Tensor:
    """L = L_auto + l_pi L_pi + l_target L_target + l_early L_early (eq. 27), + l_direct L_direct where there is one."""
    return losses["lm"] + sum(getattr(weights, name) * loss for name, loss in losses.items() if name != "lm")


def _masked_std(x: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation where ``mask`` is True; no boolean indexing, for which a GPU would wait."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask).sqrt()


@torch.no_grad()
def rollout_metrics(td: TensorDictBase, losses: dict[str, Tensor], codec: Codec) -> dict[str, Tensor]:
    """What a rollout says about the model and the policy."""
    decided, reward = td[keys.DECISION_MASK], td[keys.REWARD].squeeze(-1)
    metrics = {
        codec.unit: losses["lm"] / codec.nats_per_unit,
        f"{codec.unit}_early": losses["early"] / codec.nats_per_unit,
        "boundary_rate": td[keys.ACTION].float().mean(),
        "boundary_prob_std": _masked_std(td[keys.BOUNDARY_PROB], decided),
        "entropy": masked_mean(td[keys.ENTROPY], decided),
        "neg_log_prob": -masked_mean(td[keys.ACTION_LOG_PROB], decided),
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "tokens": td[keys.ACTION].sum(-1).max() * td.shape[-2],  # of one sample, as padded
    }
    if "direct" in losses:
        metrics[f"{codec.unit}_direct"] = losses["direct"] / codec.nats_per_unit
    if keys.DIAGNOSTICS in td:
        metrics |= {name: masked_mean(value, decided) for name, value in td[keys.DIAGNOSTICS].items()}
    if keys.ADVANTAGE in td:
        metrics["advantage_std"] = _masked_std(td[keys.ADVANTAGE], decided)
        metrics["loss_policy"] = losses["policy"]
    return {name: value.detach().double() for name, value in metrics.items()}


def grad_norm(parameters: dict[str, torch.nn.Parameter], owner: str) -> Tensor:
    """L2 norm of the gradient of one part's parameters."""
    grads = [p.grad for name, p in parameters.items() if name.startswith(owner) and p.grad is not None]
    return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())


def backward(
    rollouts: Iterable[TensorDictBase], parts: Parts, config: Config
) -> tuple[dict[str, Tensor], list[TensorDictBase]]:
    """Accumulate the gradients of an update.

    Returns:
        Metrics, averaged over the rollouts (tokens summed), and the rollouts, detached, if they are used again.
    """
    sums: dict[str, Tensor] = {}
    kept = []
    for td in rollouts:
        losses = compute_losses(td, parts)
        (total_loss(losses, config.loss) / config.train.accumulate).backward()
        for name, value in rollout_metrics(td, losses, parts.lm.codec).items():
            sums[name] = sums.get(name, 0) + value / (1 if name == "tokens" else config.train.accumulate)
        if parts.num_epochs > 1:
            kept.append(td.detach())
    return sums, kept


def descend(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], clip: float) -> None:
    """One update with clipped gradients, which are then forgotten."""
    torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(
    config: Config,
    folder: Path,
    log: Log,
    *,
    resume: checkpoints.Checkpoint | None = None,
    progress: bool = False,
) -> tuple[Evaluation, History]:
    """Train a language model that draws its own token boundaries.

    Args:
        config: the run, complete and checked.
        folder: for checkpoints, and for ``progress.json``.
        log: called with a metric's name, its value and the training bytes so far.
        resume: go on from here; everything but the clock is then as if the run had never stopped.
        progress: show bars.

    Returns:
        The last validation, and all metrics by name: training bytes and values.

    Raises:
        NotFiniteError: the loss is infinite or NaN.
        KeyboardInterrupt: Ctrl-C, after the step was finished and saved.
        ValueError: the configuration does not fit the data or the machine.
    """
    prepare(config.hardware)
    device = resolve_device(config.hardware.device)
    parts = build_parts(config, device, pretrained=resume is None)
    unit = parts.lm.codec.unit
    corpus = load_corpus(config.data, progress=progress)
    held_out = corpus.validation(config.validation.sequences)
    stream = corpus.train(seed=config.seed)
    env = TokenizationEnv(parts.lm, stream, config.train.batch_size, window=parts.agent.window)
    parameters = parts.named_parameters()
    optimizer = make_optimizer(config.train, parameters)
    passes = parts.passes

    step, seen, flops, history = 0, 0, 0, {}
    last: Evaluation | None = None
    validated_at = -1
    if resume is not None:
        parts.load_state_dict(resume.tensors)
        checkpoints.load_optimizer(optimizer, parameters, resume.optimizer)
        stream.load_state_dict(resume.state["data"])
        step, seen, flops = (resume.state[key] for key in ("step", "bytes", "flops"))
        history = {name: (list(x), list(y)) for name, (x, y) in resume.state["history"].items()}
        validation = resume.state["validation"]
        last = Evaluation.from_metrics(validation, unit) if validation else None
        for name, (xs, ys) in history.items():
            for x, y in zip(xs, ys, strict=True):
                log(name, y, x)

    def record(prefix: str, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                xs, ys = history.setdefault(f"{prefix}/{name}", ([], []))
                xs.append(seen)
                ys.append(value)
                log(f"{prefix}/{name}", value, seen)

    def save() -> Path:
        state = {
            "config": config.as_dict(),
            "step": step,
            "bytes": seen,
            "flops": flops,
            "data": stream.state_dict(),
            "history": history,
            "validation": None if last is None else last.metrics(),
            "unit": unit,
            unit: last.loss if last is not None and validated_at == seen else None,
        }
        moments = checkpoints.optimizer_tensors(optimizer, parameters)
        saved = checkpoints.Checkpoint(parts.state_dict(), moments, state)
        return checkpoints.save(folder, saved, keep=config.checkpoint.keep)

    per_step = config.train.batch_size * config.train.accumulate * corpus.seq_len
    bar = tqdm(total=config.train.bytes, initial=seen, unit="B", unit_scale=True, desc="training", disable=not progress)
    told = ProgressFile(folder, config.train.bytes)
    parts.train()
    with bar, Interruptible() as interrupt:
        while seen < config.train.bytes:
            started = time.perf_counter()
            rate = learning_rate(config.train, seen + per_step)
            for group in optimizer.param_groups:
                group["lr"] = rate

            # The noise of a step depends on nothing but the seed and the step.
            env.set_seed((config.seed * 2_147_483_629 + step) % 2**62)
            fresh = (env.rollout(parts.agent, **parts.rollout_options) for _ in range(config.train.accumulate))
            sums, rollouts = backward(fresh, parts, config)
            sums["grad_norm_lm"] = grad_norm(parameters, "lm.")
            sums["grad_norm_policy"] = grad_norm(parameters, "agent.")
            metrics = dict(zip(sums, torch.stack([v.double() for v in sums.values()]).tolist(), strict=True))
            if not math.isfinite(metrics[unit] + metrics["grad_norm_lm"] + metrics["grad_norm_policy"]):
                raise NotFiniteError(_not_finite(step, metrics, env.origin, folder))
            descend(optimizer, parameters, config.train.clip)
            for _ in range(parts.num_epochs - 1):
                backward((rescore(parts.lm, parts.agent, td) for td in rollouts), parts, config)
                descend(optimizer, parameters, config.train.clip)

            step, seen = step + 1, seen + per_step
            tokens = int(metrics.pop("tokens"))
            flops += update_flops(parts.lm, per_step, tokens, parts.policy_parameters, passes)
            metrics |= {"learning_rate": rate, "flops": flops}
            metrics["bytes_per_second"] = per_step / (time.perf_counter() - started)
            record("train", metrics)
            bar.update(per_step)
            told.update(seen)
            bar.set_postfix_str(
                f"{metrics[unit]:.3f} {unit.replace('_per_', '/')}, rate {metrics['boundary_rate']:.3f}, "
                f"entropy {metrics['entropy']:.3f}"
            )

            finished = seen >= config.train.bytes
            if finished or _passed(config.validation.every_bytes, seen, per_step):
                last = evaluate(
                    parts,
                    held_out,
                    batch_size=config.validation.batch_size,
                    tolerance=config.data.tolerance,
                    progress=progress,
                )
                record("validation", last.metrics())
                validated_at = seen
            if finished or interrupt.requested or _passed(config.checkpoint.every_bytes, seen, per_step):
                save()
            if interrupt.requested and not finished:
                raise KeyboardInterrupt
    assert last is not None
    return last, history


def _passed(every: int, seen: int, per_step: int) -> bool:
    """Whether the last step went past a multiple of ``every`` bytes."""
    return seen // every > (seen - per_step) // every


def _not_finite(step: int, metrics: dict[str, float], origin: list[str], folder: Path) -> str:
    found = checkpoints.complete(folder)
    good = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
    odd = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
    return (
        f"step {step}: {odd}; {good}. The last sequences were {', '.join(origin[:4])}, ... "
        "Try a lower train.learning_rate, a longer train.warmup_bytes or hardware.precision=float32"
    )
