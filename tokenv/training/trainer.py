"""The training loop: ``Trainer.run`` reads from top to bottom."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDictBase

from tokenv.config.batch_assignment import BatchAssignment
from tokenv.config.components import Components, build_components
from tokenv.config.hardware import prepare
from tokenv.config.schema import Config
from tokenv.core.distributed import LostRankError, translate_distributed_errors
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
from tokenv.training.checkpointing import latest_checkpoint, make_checkpoint, restore
from tokenv.training.data_parallel import RankStream
from tokenv.training.interrupt import GracefulStop
from tokenv.training.metrics_logger import MetricsLogger, PendingUpdate
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

ASYNC_DEVICES = ("cuda",)  # devices on which the metrics of an update are read when the next update is under way


def train(
    config: Config,
    folder: Path,
    log: Log,
    *,
    resume: checkpoints.Checkpoint | None = None,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Evaluation, History]:
    """Train a language model which draws its own token boundaries.

    Args:
        config: the run, complete and checked.
        folder: for checkpoints and for ``progress.json``; only rank 0 writes there.
        log: called with a metric's name, its value and the number of training symbols so far.
        resume: checkpoint to resume from; the run then equals one that never stopped, except for its timings.
        progress: whether to show progress bars.
        ranks: the processes which train this run together, each of which calls this; None for a single process.

    Returns:
        The last validation, and all metrics by name: training symbols and values.

    Raises:
        NotFiniteError: the loss is infinite or NaN.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the step was finished and saved.
        LostRankError: another process has ended, or does not answer.
        ValueError: the configuration does not fit the data or the machine.
    """
    try:
        with translate_distributed_errors(sure=False):  # a sharded model communicates during its passes
            return Trainer(config, folder, log, resume=resume, progress=progress, ranks=ranks or Ranks()).run()
    except LostRankError as error:
        GracefulStop.ignore_signals()  # torchrun ends all processes as soon as one has ended
        raise LostRankError(f"{error}; {latest_checkpoint(folder)}") from error


class Trainer:
    """Train one run.

    Args:
        config: see ``train``, as for all arguments.
        folder: see there.
        log: see there.
        resume: see there.
        progress: see there.
        ranks: see there; ``Ranks()`` for a single process.

    Attributes:
        components: language model, agent, estimator and rate target.
        optimizer: of all trained parameters.
        state: the progress of the run.
        group: which sequences of every update are this process's.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        log: Log,
        *,
        resume: checkpoints.Checkpoint | None,
        progress: bool,
        ranks: Ranks,
    ) -> None:
        self.config, self.folder, self.log, self.progress, self.ranks = config, folder, log, progress, ranks
        self.setup = setup = ranks.run_on_all_ranks(partial(set_up, config, resume, ranks, progress))
        self.components, self.optimizer, self.state = setup.components, setup.optimizer, setup.state
        ranks.assert_consistent({"the data's fingerprint": setup.corpus.fingerprint})
        ranks.broadcast_parameters(self.components.modules.values())
        self.shard = config.hardware.fsdp_size if ranks.size > 1 else 1
        if self.shard > 1:
            self.optimizer = fsdp.apply_fsdp(self.components, self.optimizer, config, ranks)
        self.parameters = self.components.named_parameters()
        self.group = ranks.team(config.train, together=self.components.has_cross_step_state)
        self.symbols_per_update = (
            config.train.batch_size * config.train.gradient_accumulation_steps * setup.corpus.seq_len
        )
        device = self.components.lm.head.weight.device.type
        # The fused optimizer's flag which skips a step does not support DTensor.
        self.asynchronous = device in ASYNC_DEVICES and self.shard == 1
        self.metrics = MetricsLogger(
            self.state,
            log,
            UpdateFlops(self.components, optimizer_flops(config.train, self.components)),
            total=config.train.symbols,
            symbols_per_update=self.symbols_per_update,
            progress=progress,
            folder=folder,
            writes=ranks.is_first,
        )
        self.state.replay(log)
        if resume is None:
            overlap = setup.corpus.overlap
            self.state.record("data", {"overlap": None if math.isnan(overlap) else overlap}, log)

    def run(self) -> tuple[Evaluation, History]:
        """Train to the end; return the last validation and all metrics."""
        self.components.train()
        with self.metrics, open_source(self.setup, self.group.slots) as self.source, GracefulStop() as stop:
            agent, rows = self.components.agent, len(self.group.slots.rows)
            self.env = TokenizationEnv(self.components.lm, self.source, rows, window=agent.window, rates=agent.rates)
            if self.finished:  # the run was killed after its last update, before its end was recorded
                self.save()
            while not self.finished:
                self.train_step()
                if self.finished or self.crossed(self.config.validation.every_symbols):
                    self.validate()
                stopping = self.ranks.any(stop.requested)
                if self.finished or stopping or self.crossed(self.config.checkpoint.every_symbols):
                    self.save()
                if stopping and not self.finished:
                    stop.stop()
        assert self.state.validation is not None
        return self.state.validation, self.state.history

    @property
    def finished(self) -> bool:
        """Whether all training symbols have been seen."""
        return self.state.symbols >= self.config.train.symbols

    def crossed(self, every: int) -> bool:
        """Return whether the last update crossed a multiple of ``every`` symbols."""
        symbols = self.state.symbols
        return symbols // every > (symbols - self.symbols_per_update) // every

    def train_step(self) -> None:
        """Make one update: gradients of all its passes, then a step of the optimizer."""
        started, state, train = time.perf_counter(), self.state, self.config.train
        rate = learning_rate(train, state.symbols + self.symbols_per_update)
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * rate
        values, rollouts = accumulate_gradients(self.rollout, self.components, self.config.loss, self.group)
        self.metrics.flush()  # the update before this one, while the device computes
        update = PendingUpdate(state.step, state.symbols + self.symbols_per_update, rate, values, self.env.origin)
        if not self.asynchronous:
            update.check(self.folder)
        with skip_if_nonfinite(self.optimizer, values.found_inf if self.asynchronous else None):
            optimizer_step(self.optimizer, self.parameters, train.max_grad_norm)
            policy_epochs(self.optimizer, rollouts, self.components, self.config, self.group)
        state.step, state.symbols = state.step + 1, update.symbols
        update.seconds = time.perf_counter() - started
        self.metrics.add(update)
        if not self.asynchronous:
            self.metrics.flush()

    def rollout(self, number: int) -> TensorDictBase:
        """Return the rollout of one pass of the present update, with the noise that belongs to it."""
        self.env.set_seed(micro_batch_seed(self.config.seed, self.state.step, number))
        return self.env.one_pass(self.components.agent, self.components.sampling)

    def validate(self) -> None:
        """Evaluate on held-out sequences, and once more at exactly the target rate where that is asked for."""
        self.metrics.flush()
        wanted, setup, state = self.config.validation, self.setup, self.state
        evaluate_held_out = partial(
            evaluate,
            self.components,
            setup.held_out,
            batch_size=wanted.batch_size,
            tolerance=self.config.data.tolerance,
            progress=self.progress,
            group=self.ranks.control,
            shard=self.shard,
        )
        state.validation = evaluate_held_out()
        state.record("validation", state.validation.metrics(), self.log)
        if setup.calibration is None:
            return
        find_bias = partial(
            calibrate, self.components, setup.calibration, self.config.rate, batch_size=wanted.batch_size
        )
        bias = self.ranks.from_rank0(find_bias, all_work=self.shard > 1)
        at_rate = evaluate_held_out(logit_bias=bias or 0.0)
        state.record("calibrated", at_rate.metrics() | {"logit_bias": bias}, self.log)

    def save(self) -> None:
        """Save a checkpoint; all ranks call this together, and rank 0 writes."""
        self.metrics.flush()
        cursors = self.ranks.control.all_gather_object(self.source.state_dict())
        self.state.data = Streams.joined(cursors)
        if self.ranks.is_first or self.shard > 1:
            checkpoint = make_checkpoint(self.state, self.components, self.optimizer)
        if self.ranks.is_first:
            checkpoints.save(self.folder, checkpoint, keep=self.config.checkpoint.keep)


@dataclass(frozen=True)
class TrainingSetup:
    """What a run trains with, before its next update.

    Attributes:
        components: language model, agent, estimator and rate target.
        corpus: the data.
        held_out: sequences to validate on.
        calibration: further held-out sequences, on which the logit bias is fitted; None where there is no calibration.
        streams: of training sequences.
        optimizer: of all trained parameters.
        state: the progress of the run.
    """

    components: Components
    corpus: Corpus
    held_out: SequenceBatch
    calibration: SequenceBatch | None
    streams: Streams
    optimizer: torch.optim.Optimizer
    state: RunState


def set_up(config: Config, resume: checkpoints.Checkpoint | None, ranks: Ranks, progress: bool) -> TrainingSetup:
    """Build what a run trains with, or restore it from a checkpoint; the arguments are those of ``train``."""
    prepare(config.hardware)
    device = ranks.device(config.hardware.device)
    components = build_components(config, device, pretrained=resume is None, world=ranks.size)
    corpus = load_corpus(config.data, progress=progress)
    held_out, calibration = corpus.validation(config.validation.sequences), None
    if config.validation.calibrate:
        held_out, calibration = split_for_calibration(corpus, config.validation.sequences)
    assignment = BatchAssignment.of(config.train, together=components.has_cross_step_state)
    streams = corpus.streams(assignment.streams(config.data.streams), seed=config.seed)
    optimizer = make_optimizer(config.train, components.named_parameters())
    if resume is None:
        state = RunState(config.as_dict(), components.lm.codec.unit)
    else:
        state = restore(resume, config.train, components, optimizer, streams)
        state.config = config.as_dict()
    return TrainingSetup(components, corpus, held_out, calibration, streams, optimizer, state)


def open_source(setup: TrainingSetup, assignment: BatchAssignment) -> AbstractContextManager[ResumableSource]:
    """Open this rank's training sequences, read ahead by a thread where that saves time: from disk, or for a GPU."""
    source, device = RankStream(setup.streams, assignment), setup.components.lm.head.weight.device
    if setup.corpus.streamed or device.type == "cuda":
        return PrefetchedSource(source, len(assignment.rows), device)
    return nullcontext(source)
