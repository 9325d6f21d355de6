"""Run the same updates in several processes and compare their results."""

import contextlib
import os
import pickle
import socket
import time
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fresh_process import CONTEXT

from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.core.distributed import gather_full_tensors
from tokenv.data.corpus import load_corpus
from tokenv.training import data_parallel
from tokenv.training.data_parallel import DataParallelGroup, RankStream
from tokenv.training.optimizers import make_optimizer, optimizer_step
from tokenv.training.process_group import init_from_torchrun
from tokenv.training.update import (
    PassInput,
    TrainingStep,
    accumulate_gradients,
    micro_batch_seed,
    policy_epochs,
)


def in_processes(count, function, folder, *arguments):
    """Return the results of ``function(ranks, *arguments)`` in ``count`` processes, or the text of its exception."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_in_process, args=(rank, count, port, function, folder, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 900
    try:
        for process in processes:
            process.join(end - time.monotonic())
            assert process.exitcode is not None, "hangs"
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(count)]


def _in_process(rank, count, port, function, folder, arguments):
    torch.set_num_threads(1)
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    with open(folder / f"{rank}.err", "w") as errors, contextlib.redirect_stderr(errors):
        try:
            with init_from_torchrun() as ranks:
                result = function(ranks, *arguments)
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    (folder / f"{rank}").write_bytes(pickle.dumps(result))


def updates(ranks, settings, *, steps=3, ragged=False, frozen=False):
    """Run some updates with the functions of the training loop; return metrics, gradients, and the final state."""
    config = resolve([], settings)
    parts = build_components(config)
    if parts.estimator is not None:
        parts.estimator.double()
    for parameter in parts.agent.parameters():
        shift = torch.linspace(-0.3, 0.3, parameter.numel(), device=parameter.device)
        parameter.data.add_(shift.view_as(parameter))
    parts.lm.requires_grad_(not frozen)
    group = DataParallelGroup.create(
        ranks, config.train, split_each_pass=parts.has_cross_step_state
    )
    source = RankStream(load_corpus(config.data).streams(1, seed=config.seed), group.assignment)
    step_module = TrainingStep(parts, config.loss)
    optimizer = make_optimizer(config.train, parts.named_parameters())
    if config.hardware.fsdp_size > 1 and ranks.size > 1:
        optimizer = data_parallel.apply_fsdp(step_module, parts, optimizer, config, ranks)
    parameters = parts.named_parameters()
    parts.train()
    device = next(parts.lm.parameters()).device
    results = []
    for step in range(steps):
        batches = []
        for number in group.assignment.passes:
            symbol_BN = source.next(len(group.assignment.rows)).symbols_on(device)
            length_B = None
            if ragged:
                lengths = np.random.default_rng([step, number]).integers(
                    5, 33, config.train.batch_size
                )
                length_B = torch.from_numpy(lengths).to(device)[
                    group.assignment.rows.start : group.assignment.rows.stop
                ]
            batches.append(
                PassInput(symbol_BN, micro_batch_seed(config.seed, step, number), length_B)
            )
        figures, rollouts = accumulate_gradients(step_module, batches, group)
        gradients = gather_full_tensors(
            {name: p.grad for name, p in parameters.items() if p.grad is not None}
        )
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)
        further = policy_epochs(step_module, optimizer, rollouts, group, config.train.max_grad_norm)
        results.append((figures.read() | ({} if further is None else further.read()), gradients))
    return results, {
        name: tensor.detach().clone()
        for name, tensor in gather_full_tensors(parts.state_dict()).items()
    }


def all_updates(ranks, cases):
    """Return the results of ``updates`` for every case, by name."""
    return {name: updates(ranks, settings, **how) for name, (settings, how) in cases.items()}


def largest_difference(one, other):
    """Return the largest differences of two results of ``updates``: in metrics, gradients, and final state."""
    (steps, state) = one
    (other_steps, other_state) = other
    assert len(steps) == len(other_steps)
    worst = {"metrics": 0.0, "gradients": 0.0, "state": 0.0}
    for (metrics, gradients), (other_metrics, other_gradients) in zip(
        steps, other_steps, strict=True
    ):
        assert metrics.keys() == other_metrics.keys()
        assert gradients.keys() == other_gradients.keys()
        worst["metrics"] = max(
            [worst["metrics"], *(abs(metrics[n] - other_metrics[n]) for n in metrics)]
        )
        differences = ((gradients[n] - other_gradients[n]).abs().max().item() for n in gradients)
        worst["gradients"] = max(worst["gradients"], *differences)
    assert state.keys() == other_state.keys()
    both = [(state[name], other_state[name]) for name in state if state[name].numel()]
    worst["state"] = max((a.double() - b.double()).abs().max().item() for a, b in both)
    return worst


def write_series(path: Path) -> None:
    """Write two channels with gaps, some of which are long."""
    generator = np.random.default_rng(0)
    value_LC = generator.normal(size=(600, 2)).cumsum(0)
    value_LC[generator.random(value_LC.shape) < 0.2] = np.nan
    value_LC[100:140, 1] = np.nan
    rows = [",".join("" if np.isnan(x) else f"{x:.6f}" for x in row) for row in value_LC]
    path.write_text("\n".join(["a,b", *rows]) + "\n")


def write_tables(folder: Path) -> None:
    """Write two Parquet files of texts with forty row groups each."""
    for part in range(2):
        texts = [
            f"file {part}, text number {number} of some that are long enough"
            for number in range(240)
        ]
        pq.write_table(pa.table({"text": texts}), folder / f"{part}.parquet", row_group_size=6)
