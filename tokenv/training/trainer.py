"""The training loop, from top to bottom. Start reading at ``train``."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tqdm import tqdm

from tokenv.config.batch_assignment import BatchAssignment
from tokenv.config.components import Components, build_components
from tokenv.config.hardware import prepare
from tokenv.config.schema import Config
from tokenv.core.distributed import LostRankError, translate_distributed_errors
from tokenv.core.errors import RunFailedError
from tokenv.data.chunks import SequenceBatch
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.sources import PrefetchedSource, ResumableSource
from tokenv.data.stream import Streams
from tokenv.env.stepping import TokenizationEnv
from tokenv.evaluation.calibration import calibrate, split_for_calibration
from tokenv.evaluation.evaluator import Evaluation, evaluate
from tokenv.evaluation.run_state import History, Log, RunState
from tokenv.storage import checkpoints
from tokenv.training import fsdp
from tokenv.training.checkpointing import make_checkpoint, restore
from tokenv.training.data_parallel import RankStream
from tokenv.training.interrupt import GracefulStop
from tokenv.training.metrics import MetricsBuffer, ProgressFile
from tokenv.training.process_group import Ranks
from tokenv.training.update import (
    accumulate_gradients,
    learning_rate,
    make_optimizer,
    micro_batch_seed,
    optimizer_flops,
    optimizer_step,
    policy_epochs,
    skip_if_nonfinite,
)
from tokenv.training.update_flops import UpdateFlops

ASYNC_DEVICES = ("cuda",)  # devices that are asked how an update went when the next one is on its way


class NotFiniteError(RunFailedError):
    """The loss is no longer a finite number."""


def train(
    config: Config,
    folder: Path,
    log: Log,
    *,
    resume: checkpoints.Checkpoint | None = None,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Evaluation, History]:
    """Train a language model that draws its own token boundaries.

    Args:
        config: the run, complete and checked.
        folder: for checkpoints, and for ``progress.json``; the first rank alone writes there.
        log: called with a metric's name, its value and the training symbols so far.
        resume: go on from here; everything but the clock is then as if the run had never stopped.
        progress: show bars.
        ranks: the processes that train this run together, each of which calls this; None for one alone.

    Returns:
        The last validation, and all metrics by name: training symbols and values.

    Raises:
        NotFiniteError: the loss is infinite or NaN.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the step was finished and saved.
        LostRankError: another process has ended, or does not answer.
        ValueError: the configuration does not fit the data or the machine.
    """
    try:
        with translate_distributed_errors(sure=False):  # a model that is dealt out sends in the midst of its passes
            return _train(config, folder, log, resume, progress, ranks or Ranks())
    except LostRankError as error:
        GracefulStop.ignore_signals()  # torchrun tells all to end as soon as one has
        raise LostRankError(f"{error}; {latest_checkpoint(folder)}") from error


def _train(
    config: Config, folder: Path, log: Log, resume: checkpoints.Checkpoint | None, progress: bool, ranks: Ranks
) -> tuple[Evaluation, History]:
    begun = ranks.run_on_all_ranks(lambda: set_up(config, resume, ranks, progress))
    parts, corpus, optimizer, state = begun.parts, begun.corpus, begun.optimizer, begun.state
    ranks.assert_consistent({"the data's fingerprint": corpus.fingerprint})
    ranks.broadcast_parameters(parts.modules.values())
    shard = config.hardware.shard if ranks.size > 1 else 1
    if shard > 1:
        optimizer = fsdp.apply_fsdp(parts, optimizer, config, ranks)
    state.replay(log)
    if resume is None and not math.isnan(corpus.overlap):
        state.record("data", {"overlap": corpus.overlap}, log)
    team, unit, wanted = (
        ranks.team(config.train, together=parts.has_cross_step_state),
        parts.lm.codec.unit,
        config.validation,
    )
    parameters = parts.named_parameters()
    flops = UpdateFlops(parts, optimizer_flops(config.train, parts))

    per_step = config.train.batch_size * config.train.accumulate * corpus.seq_len
    bar = tqdm(
        total=config.train.symbols,
        initial=state.symbols,
        unit="B",
        unit_scale=True,
        desc="training",
        disable=not progress,
    )
    told = ProgressFile(folder, config.train.symbols) if ranks.is_first else None
    untold: list[_Update] = []
    late = parts.lm.head.weight.device.type in ASYNC_DEVICES and shard == 1  # torch spares no step of a model dealt out

    def tell() -> None:
        """Note what updates have said of themselves that nobody has listened to."""
        while untold:
            update = untold.pop(0)
            metrics = update.checked(folder)
            needed, executed = flops.take(metrics, per_step)
            state.flops, state.flops_executed = state.flops + needed, state.flops_executed + executed
            spent = {"flops": state.flops, "flops_executed": state.flops_executed}
            metrics |= {"learning_rate": update.rate} | spent
            metrics["symbols_per_second"] = per_step / update.seconds
            state.record("train", metrics, log, update.symbols)
            bar.update(per_step)
            if told is not None:
                told.update(update.symbols)
            bar.set_postfix_str(
                f"{metrics[unit]:.3f} {unit.replace('_per_', '/')}, rate {metrics['boundary_rate']:.3f}, "
                f"entropy {metrics['entropy']:.3f}"
            )

    def save() -> None:
        tell()
        state.data = Streams.joined(ranks.control.all_gather_object(source.state_dict()))
        if ranks.is_first or shard > 1:
            checkpoint = make_checkpoint(state, parts, optimizer)
        if ranks.is_first:
            checkpoints.save(folder, checkpoint, keep=config.checkpoint.keep)

    def one_pass(number: int) -> TensorDictBase:
        env.set_seed(micro_batch_seed(config.seed, state.step, number))
        return env.one_pass(parts.agent, parts.sampling)

    parts.train()
    with bar, _reading(begun, team.slots) as source, GracefulStop() as interrupt:
        env = TokenizationEnv(
            parts.lm, source, len(team.slots.rows), window=parts.agent.window, rates=parts.agent.rates
        )
        if state.symbols >= config.train.symbols:  # resumed at its end: it was killed before it had told what came out
            save()
        while state.symbols < config.train.symbols:
            started = time.perf_counter()
            rate = learning_rate(config.train, state.symbols + per_step)
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * rate

            figures, rollouts = accumulate_gradients(one_pass, parts, config.loss, team)
            tell()
            update = _Update(state.step, state.symbols + per_step, rate, figures, env.origin)
            if not late:
                update.checked(folder)
            with skip_if_nonfinite(optimizer, figures.odd if late else None):
                optimizer_step(optimizer, parameters, config.train.clip)
                policy_epochs(optimizer, rollouts, parts, config, team)

            state.step, state.symbols = state.step + 1, update.symbols
            update.seconds = time.perf_counter() - started
            untold.append(update)
            if not late:
                tell()

            finished = state.symbols >= config.train.symbols
            if finished or crossed_interval(wanted.every_symbols, state.symbols, per_step):
                tell()
                how: dict[str, Any] = {
                    "batch_size": wanted.batch_size,
                    "tolerance": config.data.tolerance,
                    "progress": progress,
                    "group": ranks.control,
                    "shard": shard,
                }
                state.validation = evaluate(parts, begun.held_out, **how)
                state.record("validation", state.validation.metrics(), log)
                if begun.own is not None:
                    look = partial(calibrate, parts, begun.own, config.rate, batch_size=wanted.batch_size)
                    bias = ranks.from_rank0(look, all_work=shard > 1)
                    at_rate = evaluate(parts, begun.held_out, logit_bias=bias or 0.0, **how)
                    state.record("calibrated", at_rate.metrics() | {"logit_bias": bias}, log)
            stopping = ranks.any(interrupt.requested)
            if finished or stopping or crossed_interval(config.checkpoint.every_symbols, state.symbols, per_step):
                save()
            if stopping and not finished:
                interrupt.stop()
    assert state.validation is not None
    return state.validation, state.history


@dataclass
class _Update:
    """An update that has been made, or is on its way.

    Attributes:
        step: updates before it.
        symbols: trained on with it.
        rate: of learning.
        figures: what it says of itself.
        origin: of its last sequences.
        seconds: that it took.
    """

    step: int
    symbols: int
    rate: float
    figures: MetricsBuffer
    origin: list[str]
    seconds: float = math.nan

    def checked(self, folder: Path) -> dict[str, float]:
        """Its metrics.

        Raises:
            NotFiniteError: loss or gradients are infinite or NaN.
        """
        metrics = self.figures.read()
        if not self.figures.is_finite():
            odd = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
            raise NotFiniteError(
                f"step {self.step}: {odd}; {latest_checkpoint(folder)}. The last sequences were "
                f"{', '.join(self.origin[:4])}, ... Try a lower train.learning_rate, a longer train.warmup_symbols or "
                "hardware.precision=float32"
            )
        return metrics


@dataclass(frozen=True)
class TrainingSetup:
    """A run before its next step: what learns, from what, and how far it is."""

    parts: Components
    corpus: Corpus
    held_out: SequenceBatch
    own: SequenceBatch | None  # to calibrate on
    streams: Streams
    optimizer: torch.optim.Optimizer
    state: RunState


def set_up(config: Config, resume: checkpoints.Checkpoint | None, ranks: Ranks, progress: bool) -> TrainingSetup:
    prepare(config.hardware)
    parts = build_components(config, ranks.device(config.hardware.device), pretrained=resume is None, world=ranks.size)
    corpus = load_corpus(config.data, progress=progress)
    sequences, own = config.validation.sequences, None
    held_out = corpus.validation(sequences)
    if config.validation.calibrate:
        held_out, own = split_for_calibration(corpus, sequences)
    most = BatchAssignment.of(config.train, together=parts.has_cross_step_state).streams(config.data.streams)
    streams = corpus.streams(most, seed=config.seed)
    optimizer = make_optimizer(config.train, parts.named_parameters())
    if resume is None:
        state = RunState(config.as_dict(), parts.lm.codec.unit)
    else:
        state = restore(resume, config.train, parts, optimizer, streams)
        state.config = config.as_dict()
    return TrainingSetup(parts, corpus, held_out, own, streams, optimizer, state)


def _reading(begun: TrainingSetup, slots: BatchAssignment) -> AbstractContextManager[ResumableSource]:
    """A rank's sequences. Those in memory are a copy away, and only a GPU gains by having them ready."""
    own, device = RankStream(begun.streams, slots), begun.parts.lm.head.weight.device
    if begun.corpus.streamed or device.type == "cuda":
        return PrefetchedSource(own, len(slots.rows), device)
    return nullcontext(own)


def crossed_interval(every: int, seen: int, per_step: int) -> bool:
    """Whether the last step went past a multiple of ``every`` symbols."""
    return seen // every > (seen - per_step) // every


def latest_checkpoint(folder: Path) -> str:
    found = checkpoints.list_complete(folder)
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
