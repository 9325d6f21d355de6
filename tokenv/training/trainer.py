"""The training loop: ``Trainer.run`` reads from top to bottom."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tokenv.config.components import Components, build_components, build_references
from tokenv.config.hardware import BatchAssignment, prepare
from tokenv.config.schema import Config, LossConfig
from tokenv.core import checkpoints
from tokenv.core.atomic import check_encoding
from tokenv.core.callbacks import build_callbacks
from tokenv.core.devices import has_own_memory, is_accelerator
from tokenv.core.distributed import LostRankError, translate_distributed_errors
from tokenv.core.processes import GracefulStop
from tokenv.core.sequences import SequenceBatch
from tokenv.data.corpus import load_corpus
from tokenv.data.prefetch import PrefetchedSource, ResumableSource
from tokenv.data.stream import Streams
from tokenv.evaluation.boundary_metrics import warn_of_collapse
from tokenv.evaluation.calibration import calibrate, split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions, evaluate
from tokenv.evaluation.run_state import Evaluation, History, Log, RunState
from tokenv.lm.flops import Batch
from tokenv.training.checkpointing import latest_checkpoint, make_checkpoint, restore
from tokenv.training.data_parallel import DataParallelGroup, RankStream, apply_fsdp, unsharded
from tokenv.training.metrics import MetricsLogger, PendingUpdate, UpdateFlops
from tokenv.training.optimizers import (
    learning_rate,
    make_optimizer,
    optimizer_flops,
    optimizer_step,
    set_learning_rate,
    skip_if_nonfinite,
)
from tokenv.training.process_group import Ranks
from tokenv.training.update import (
    PassInput,
    TrainingStep,
    accumulate_gradients,
    micro_batch_seed,
    policy_epochs,
)


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
        config: complete and checked configuration of the run.
        folder: folder for checkpoints and ``progress.json``; only rank 0 writes there.
        log: function called with a metric's name, its value and the number of training symbols so far.
        resume: checkpoint to resume from; the run then equals one that never stopped, except for its timings.
        progress: whether to show progress bars; where stderr is no terminal, a line every half minute.
        ranks: the processes which train this run together, each of which calls this; None for a single process.

    Returns:
        The last validation, and all metrics by name: training symbols and values.

    Raises:
        NotFiniteError: the loss is infinite or NaN.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the step has been finished and saved.
        LostRankError: another process has ended or does not answer.
        ValueError: the configuration does not fit the data or the machine.
    """
    try:
        # a sharded model communicates during its passes
        with translate_distributed_errors(sure=False):
            return Trainer(
                config, folder, log, resume=resume, progress=progress, ranks=ranks or Ranks()
            ).run()
    except LostRankError as error:
        GracefulStop.ignore_signals()  # torchrun ends all processes as soon as one has ended
        raise LostRankError(f"{error}; {latest_checkpoint(folder)}") from error


@dataclass(frozen=True)
class Objective:
    """What an update minimises, and what that costs.

    Attributes:
        components: language model, agent, estimator and rate target.
        loss: weights of the losses.
        flops: counter of an update's FLOPs.
    """

    components: Components
    loss: LossConfig
    flops: UpdateFlops

    @classmethod
    def of(cls, components: Components, loss: LossConfig, config: Config) -> Objective:
        """Make the counter of FLOPs which belongs to the components."""
        train = config.train
        batch = Batch(train.gradient_accumulation_steps * train.batch_size, config.data.seq_len)
        return cls(
            components, loss, UpdateFlops(components, batch, optimizer_flops(train, components))
        )


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
        optimizer: optimizer of all trained parameters.
        state: progress of the run.
        group: this process's share of every update.
    """

    optimizer: torch.optim.Optimizer
    state: RunState
    calibration: SequenceBatch | None = None  # held-out sequences which fit the logit bias

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
        check_encoding(folder)
        self.config = config
        self.folder = folder
        self.log = log
        self.progress = progress and sys.stderr.isatty()  # bars of validations and of reading data
        self.ranks = ranks
        ranks.run_on_all_ranks(partial(self.build, resume))
        ranks.assert_consistent({"the data's fingerprint": self.corpus.fingerprint})
        ranks.broadcast_parameters(self.components.modules.values())
        self.fsdp_size = config.hardware.fsdp_size if ranks.size > 1 else 1
        self.step = TrainingStep(self.components, config.loss)
        if self.fsdp_size > 1:
            self.optimizer = apply_fsdp(self.step, self.components, self.optimizer, config, ranks)
        self.parameters = self.components.named_parameters()
        self.group = DataParallelGroup.create(
            ranks, config.train, split_each_pass=self.components.has_cross_step_state
        )
        self.symbols_per_update = (
            config.train.batch_size * config.train.gradient_accumulation_steps * self.corpus.seq_len
        )
        # An accelerator computes an update while the metrics of the one before are read. The fused optimizer's flag
        # which skips a step does not support DTensor.
        self.asynchronous = is_accelerator(self.device) and self.fsdp_size == 1
        self.objective = Objective.of(self.components, config.loss, config)
        self.imitation: Objective | None = None
        if self.components.imitation is not None:
            weights = replace(config.loss, policy=config.imitation.weight, rate=0.0)
            self.imitation = Objective.of(self.components.imitating(), weights, config)
        self.metrics = MetricsLogger(
            self.state,
            log,
            total=config.train.symbols,
            symbols_per_update=self.symbols_per_update,
            symbol=config.data.options.words.symbol,
            progress=progress,
            folder=folder,
            writes=ranks.is_first,
        )
        self.state.replay(log)
        if resume is None and not math.isnan(self.corpus.overlap):
            self.state.record("data", {"overlap": self.corpus.overlap}, log)

    def build(self, resume: checkpoints.Checkpoint | None) -> None:
        """Build components, data, optimizer and state, or restore them from a checkpoint."""
        config = self.config
        prepare(config.hardware)
        device = self.ranks.device(config.hardware.device)
        self.components = build_components(
            config, device, read_files=resume is None, world=self.ranks.size
        )
        self.device = self.components.lm.head.weight.device
        self.callbacks = build_callbacks(config, self.components.lm.codec)
        self.corpus = load_corpus(config.data, progress=self.progress)
        if resume is None and config.init_from is None:
            config.data.options.prepare_model(self.components.lm, self.corpus.dataset)
        self.held_out = self.corpus.validation(config.validation.sequences)
        self.references = build_references(config, self.corpus)
        if config.validation.calibrate:
            self.held_out, self.calibration = split_for_calibration(
                self.corpus, config.validation.sequences
            )
        assignment = BatchAssignment.of(
            config.train, split_each_pass=self.components.has_cross_step_state
        )
        self.streams = self.corpus.streams(
            assignment.streams(config.data.streams), seed=config.seed
        )
        self.optimizer = make_optimizer(config.train, self.components.named_parameters())
        if resume is None:
            self.state = RunState(config.as_dict(), self.components.lm.codec.unit)
        else:
            self.state = restore(
                resume, config.train, self.components, self.optimizer, self.streams
            )
            self.state.config = config.as_dict()

    def run(self) -> tuple[Evaluation, History]:
        """Train to the end; return the last validation and all metrics."""
        self.components.train()
        with self.metrics, self.open_source() as self.source, GracefulStop() as stop:
            for callback in self.callbacks:
                callback.on_train_begin(self)
            # the run was killed after its last update, before its end was recorded
            if self.finished:
                self.save()
            while not self.finished:
                self.train_step()
                if self.finished:
                    for callback in self.callbacks:
                        callback.on_train_end(self)
                if self.finished or self.crossed(self.config.validation.every_symbols):
                    self.validate()
                stopping = self.ranks.any(stop.requested)
                if self.finished or stopping or self.crossed(self.config.checkpoint.every_symbols):
                    self.save()
                if stopping and not self.finished:
                    stop.raise_interrupt()
        assert self.state.validation is not None
        return self.state.validation, self.state.history

    def open_source(self) -> AbstractContextManager[ResumableSource]:
        """Open this rank's training sequences; a thread reads them ahead from disk, or for a GPU."""
        source = RankStream(self.streams, self.group.assignment)
        if self.corpus.streamed or has_own_memory(self.device):
            return PrefetchedSource(source, len(self.group.assignment.rows), self.device)
        return nullcontext(source)

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
        started = time.perf_counter()
        state = self.state
        train = self.config.train
        symbols = state.symbols + self.symbols_per_update
        rate = learning_rate(train, symbols)
        set_learning_rate(self.optimizer, rate)
        objective = self.current_objective()
        self.step.components = objective.components
        self.step.weights = objective.loss
        values, rollouts = accumulate_gradients(self.step, self.passes(), self.group)
        self.metrics.flush()  # the update before this one, while the device computes
        update = PendingUpdate(state.step, symbols, rate, values, objective.flops, self.origin)
        if not self.asynchronous:
            update.check(self.folder)
        found_inf = values.found_inf if self.asynchronous else None
        with skip_if_nonfinite(self.optimizer, found_inf):
            optimizer_step(self.optimizer, self.parameters, train.max_grad_norm)
            update.further = policy_epochs(
                self.step, self.optimizer, rollouts, self.group, train.max_grad_norm
            )
        state.step += 1
        state.symbols = symbols
        update.seconds = time.perf_counter() - started
        self.metrics.add(update)
        if not self.asynchronous:
            self.metrics.flush()

    def current_objective(self) -> Objective:
        """Return what the next update minimises: the imitation of a teacher first, if there is one."""
        until = self.config.imitation.symbols(self.config.train.symbols)
        if self.imitation is None or self.state.symbols >= until:
            return self.objective
        return self.imitation

    def passes(self) -> Iterator[PassInput]:
        """Read the sequences of this rank's passes of the present update, with the noise which belongs to them."""
        assignment = self.group.assignment
        for number in assignment.passes:
            batch = self.source.next(len(assignment.rows))
            self.origin = batch.origin
            seed = micro_batch_seed(self.config.seed, self.state.step, number)
            yield PassInput(batch.symbols_on(self.device), seed)

    def validate(self) -> None:
        """Evaluate on held-out sequences, and once more calibrated to the target rate if ``calibrate`` is set."""
        self.metrics.flush()
        with unsharded(self.step):
            self.state.validation = self.evaluate()
            self.state.record("validation", self.state.validation.metrics(), self.log)
            if self.ranks.is_first:
                imitated = self.config.imitation.symbols(self.config.train.symbols)
                warn_of_collapse(self.state.history, imitated)
            if self.calibration is not None:
                self.validate_calibrated(self.calibration)

    def validate_calibrated(self, calibration: SequenceBatch) -> None:
        """Evaluate with the logit bias which gives held-out sequences the target rate."""
        options = EvalOptions(self.config.validation.batch_size)
        find_bias = partial(calibrate, self.components, calibration, self.config.rate, options)
        bias = self.ranks.from_rank0(find_bias, run_on_all=self.fsdp_size > 1)
        calibrated = self.evaluate(bias or 0.0)
        self.state.record("calibrated", calibrated.metrics() | {"logit_bias": bias}, self.log)

    def evaluate(self, logit_bias: float = 0.0) -> Evaluation:
        """Evaluate on held-out sequences, which all ranks share; ``logit_bias`` is added to the policy's logits."""
        options = EvalOptions(
            self.config.validation.batch_size,
            logit_bias=logit_bias,
            tolerance=self.config.data.options.boundary_tolerance,
            progress=self.progress,
        )
        return evaluate(
            self.components,
            self.held_out,
            options,
            references=self.references,
            group=self.ranks.cpu_group,
            shard=self.fsdp_size,
        )

    def save(self) -> None:
        """Save a checkpoint; all ranks call this together, and rank 0 writes."""
        self.metrics.flush()
        cursors = self.ranks.cpu_group.all_gather_object(self.source.state_dict())
        self.state.data = Streams.merge_states(cursors)
        if self.ranks.is_first or self.fsdp_size > 1:
            checkpoint = make_checkpoint(self.state, self.components, self.optimizer)
        if self.ranks.is_first:
            checkpoints.save(self.folder, checkpoint, keep=self.config.checkpoint.keep)
