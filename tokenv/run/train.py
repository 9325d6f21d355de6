"""The training loop, from top to bottom. Start reading at ``train``."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tokenv.config.schema import Config
from tokenv.data.corpus import load_corpus
from tokenv.env.stepping import TokenizationEnv
from tokenv.errors import FailedError
from tokenv.lm.flops import policy_flops, update_flops
from tokenv.run.calibrate import calibrate, split_for_calibration
from tokenv.run.evaluate import Evaluation, evaluate
from tokenv.run.hardware import prepare, resolve_device
from tokenv.run.interrupt import Interruptible
from tokenv.run.parts import build_parts
from tokenv.run.progress import ProgressFile
from tokenv.run.state import History, Log, RunState
from tokenv.run.update import accumulate, backward, descend, grad_norm, learning_rate, make_optimizer, replays
from tokenv.storage import checkpoints


class NotFiniteError(FailedError):
    """The loss is no longer a finite number."""


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
        log: called with a metric's name, its value and the training symbols so far.
        resume: go on from here; everything but the clock is then as if the run had never stopped.
        progress: show bars.

    Returns:
        The last validation, and all metrics by name: training symbols and values.

    Raises:
        NotFiniteError: the loss is infinite or NaN.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the step was finished and saved.
        ValueError: the configuration does not fit the data or the machine.
    """
    prepare(config.hardware)
    device = resolve_device(config.hardware.device)
    parts = build_parts(config, device, pretrained=resume is None)
    unit = parts.lm.codec.unit
    corpus = load_corpus(config.data, progress=progress)
    wanted = config.validation
    held_out, own = corpus.validation(wanted.sequences), None
    if wanted.calibrate:
        held_out, own = split_for_calibration(corpus, wanted.sequences)
    stream = corpus.train(seed=config.seed)
    env = TokenizationEnv(parts.lm, stream, config.train.batch_size, window=parts.agent.window)
    parameters = parts.named_parameters()
    optimizer = make_optimizer(config.train, parameters)
    passes, policy = parts.passes, policy_flops(parts.agent)
    if resume is None:
        state = RunState(config.as_dict(), unit)
    else:
        state = RunState.restore(resume, parts, optimizer, stream)
        state.config = config.as_dict()
        state.replay(log)

    per_step = config.train.batch_size * config.train.accumulate * corpus.seq_len
    bar = tqdm(
        total=config.train.symbols,
        initial=state.symbols,
        unit="B",
        unit_scale=True,
        desc="training",
        disable=not progress,
    )
    told = ProgressFile(folder, config.train.symbols)
    parts.train()
    with bar, Interruptible() as interrupt:
        if state.symbols >= config.train.symbols:  # resumed at its end: it was killed before it had told what came out
            checkpoints.save(folder, state.checkpoint(parts, optimizer, stream), keep=config.checkpoint.keep)
        while state.symbols < config.train.symbols:
            started = time.perf_counter()
            rate = learning_rate(config.train, state.symbols + per_step)
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * rate

            # The noise of a step depends on nothing but the seed and the step.
            env.set_seed((config.seed * 2_147_483_629 + state.step) % 2**62)
            fresh = (env.one_pass(parts.agent, parts.sampling) for _ in range(config.train.accumulate))
            sums, rollouts = accumulate(fresh, parts, config.loss, passes=config.train.accumulate)
            sums["grad_norm_lm"] = grad_norm(parameters, "lm.")
            sums["grad_norm_policy"] = grad_norm(parameters, "agent.")
            metrics = dict(zip(sums, torch.stack([v.double() for v in sums.values()]).tolist(), strict=True))
            if not math.isfinite(metrics[unit] + metrics["grad_norm_lm"] + metrics["grad_norm_policy"]):
                raise NotFiniteError(_not_finite(state.step, metrics, env.origin, folder))
            descend(optimizer, parameters, config.train.clip)
            for again in replays(parts, rollouts):
                for td in again:
                    backward(td, parts, config.loss, passes=config.train.accumulate)
                descend(optimizer, parameters, config.train.clip)

            state.step, state.symbols = state.step + 1, state.symbols + per_step
            tokens = int(metrics.pop("tokens"))
            state.flops += update_flops(parts.lm, per_step, tokens, policy, passes)
            metrics |= {"learning_rate": rate, "flops": state.flops}
            metrics["symbols_per_second"] = per_step / (time.perf_counter() - started)
            state.record("train", metrics, log)
            bar.update(per_step)
            told.update(state.symbols)
            bar.set_postfix_str(
                f"{metrics[unit]:.3f} {unit.replace('_per_', '/')}, rate {metrics['boundary_rate']:.3f}, "
                f"entropy {metrics['entropy']:.3f}"
            )

            finished = state.symbols >= config.train.symbols
            if finished or _passed(wanted.every_symbols, state.symbols, per_step):
                how: dict[str, Any] = {
                    "batch_size": wanted.batch_size,
                    "tolerance": config.data.tolerance,
                    "progress": progress,
                }
                state.validation = evaluate(parts, held_out, **how)
                state.record("validation", state.validation.metrics(), log)
                if own is not None:
                    bias = calibrate(parts, own, config.rate, batch_size=wanted.batch_size)
                    at_rate = evaluate(parts, held_out, logit_bias=bias or 0.0, **how)
                    state.record("calibrated", at_rate.metrics() | {"logit_bias": bias}, log)
            if finished or interrupt.requested or _passed(config.checkpoint.every_symbols, state.symbols, per_step):
                checkpoints.save(folder, state.checkpoint(parts, optimizer, stream), keep=config.checkpoint.keep)
            if interrupt.requested and not finished:
                interrupt.stop()
    assert state.validation is not None
    return state.validation, state.history


def _passed(every: int, seen: int, per_step: int) -> bool:
    """Whether the last step went past a multiple of ``every`` symbols."""
    return seen // every > (seen - per_step) // every


def _not_finite(step: int, metrics: dict[str, float], origin: list[str], folder: Path) -> str:
    found = checkpoints.complete(folder)
    good = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
    odd = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
    return (
        f"step {step}: {odd}; {good}. The last sequences were {', '.join(origin[:4])}, ... "
        "Try a lower train.learning_rate, a longer train.warmup_symbols or hardware.precision=float32"
    )
