"""Predict memory and time of a run on machines which are not at hand, from small updates on the CPU.

Live tensors are counted by a dispatch mode while real updates run, so that every operation of model, agent, estimator
and optimizer is in the figures. What a pass needs beyond the states of the parameters is linear in its sequences. The
boundaries of these updates are evenly spaced at the target rate, and attention stores no scores: so it is on a GPU, and
on a CPU for batches which are worth a plan.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import BatchAssignment
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.core.rates import mean_rate
from tokenv.lab.config import BenchOptions
from tokenv.lab.costs import count_flops
from tokenv.lab.speed import UpdateWork
from tokenv.lm.attention import without_stored_scores
from tokenv.lm.flops import Batch
from tokenv.training.optimizers import expected_optimizer_state, optimizer_flops

WORLDS = (1, 8, 64)  # numbers of ranks
GIB = 2**30
NEARLY_0 = 1e-6


class LiveTensors(TorchDispatchMode):
    """Count the bytes of all tensors which operations create inside this context, while they exist.

    Work space inside an operation is not seen, nor what an allocator keeps.

    Attributes:
        live: bytes at present.
        peak: largest number of bytes since ``peak_of`` began, or ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return result

    def peak_of(self, work: Callable[[], object]) -> int:
        """Do some work, and return the most bytes which existed during it, beyond those before."""
        gc.collect()
        before = self.peak = self.live
        work()
        return self.peak - before

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


@dataclass(frozen=True)
class Footprint:
    """Memory of an update in bytes.

    Attributes:
        states: parameters, gradients and moments of all components, by these names.
        sharded: the same of the language model, which ``hardware.fsdp_size`` divides.
        gathered: parameters which a rank gathers at a time: those outside the layers, and the two largest layers.
        fixed: what a pass needs besides, for any number of sequences.
        per_sequence: what it needs for every sequence.
        step: what the optimizer's step needs besides the states.
    """

    states: dict[str, int]
    sharded: dict[str, int]
    gathered: int
    fixed: float
    per_sequence: float
    step: float

    @classmethod
    def measure(cls, config: Config) -> Footprint:
        """Run updates of one and of two sequences on the CPU, which the configuration names."""
        one, two = (_Update(config, rows) for rows in (1, 2))
        lm = one.work.components.lm
        layers = sorted((_nbytes(layer) for layer in (*lm.down, *lm.mid, *lm.up)), reverse=True)
        return cls(
            states=one.states(""),
            sharded=one.states("lm."),
            gathered=_nbytes(lm) - sum(layers) + sum(layers[:2]),
            fixed=2 * one.pass_bytes - two.pass_bytes,
            per_sequence=two.pass_bytes - one.pass_bytes,
            step=two.step_bytes,
        )

    def peak(self, rows: int, passes: int, shards: int = 1) -> dict[str, float]:
        """Return the memory of one rank by name, and its ``peak``.

        Args:
            rows: sequences of a pass on this rank.
            passes: passes of an update on this rank; the gradients of the first ones stay during the last.
            shards: ranks which share one copy of the language model.
        """
        found = {
            name: size - self.sharded[name] * (1 - 1 / shards) for name, size in self.states.items()
        }
        found["activations"] = self.fixed + self.per_sequence * rows
        if shards > 1:
            found["gathered"] = self.gathered
        step = found["gradients"] + self.step / shards
        during = found["activations"] + found.get("gathered", 0)
        if passes > 1:
            during += found["gradients"]
        return found | {"peak": found["parameters"] + found["moments"] + max(during, step)}


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class _Update:
    """The second update of a run with ``rows`` sequences on the CPU; the first one makes the optimizer's moments.

    Attributes:
        work: the run's work.
        pass_bytes: most bytes of the pass's tensors, without parameters, gradients and moments.
        step_bytes: most bytes of the optimizer step's tensors, without these.
    """

    def __init__(self, config: Config, rows: int) -> None:
        train = replace(config.train, batch_size=rows, gradient_accumulation_steps=1)
        with without_stored_scores(), LiveTensors() as self._counter:
            self.work = UpdateWork(replace(config, train=train))
            self.parameters = self.work.components.named_parameters()
            noise = self._even_noise(rows)
            self.work.backward(noise)
            self.work.step()
            for parameter in self.parameters.values():
                parameter.register_post_accumulate_grad_hook(self._exclude)
            self.pass_bytes = self._counter.peak_of(partial(self.work.backward, noise))
            self.step_bytes = self._counter.peak_of(self.work.step)

    def _even_noise(self, rows: int) -> Tensor:
        """Return noise by which policies draw evenly spaced boundaries at the target rate: [.., B, T]."""
        config = self.work.config
        sampling = self.work.components.sampling
        position_T = torch.arange(config.data.seq_len - 1)
        rate = mean_rate(config.rate)
        ends_T = ((position_T + 1) * rate).floor() > (position_T * rate).floor()
        noise_BT = torch.where(ends_T, NEARLY_0, 1 - NEARLY_0).expand(rows, -1)
        if sampling.num_samples is not None:
            noise_BT = noise_BT.expand(sampling.num_samples, -1, -1)
        return noise_BT.clone()

    def _exclude(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._counter.live -= parameter.grad.nbytes

    def states(self, prefix: str) -> dict[str, int]:
        """Return the bytes of the parameters whose names begin with ``prefix``, their gradients and moments."""
        every = {
            name: x
            for name, x in self.work.components.state_dict().items()
            if name.startswith(prefix)
        }
        trained = {name: x for name, x in self.parameters.items() if name.startswith(prefix)}
        moments = expected_optimizer_state(self.work.config.train, trained)
        return {
            "parameters": sum(x.nbytes for x in every.values()),
            "gradients": sum(x.nbytes for x in trained.values()),
            "moments": sum(x.nbytes for x in tree_leaves(moments)),
        }


def plan(options: BenchOptions) -> dict[str, Any]:
    """Predict the memory of every rank, and the time of an update, for several numbers of ranks.

    Precision ``auto`` is bfloat16 here, and ``activation_checkpointing`` ``auto`` is off.

    Returns:
        ``flops`` and ``symbols`` of an update, ``parameters``, and ``ranks``: a row for every number of ranks, with and
        without a sharded model: ``world``, ``fsdp_size``, ``rows`` and ``passes`` of a rank, its memory in GiB
        (``parameters_gib`` and so on, ``peak_gib``), ``communication_gib`` which it sends in an update,
        ``step_seconds`` without communication, and ``run_hours``; or, instead of these, an ``error``.
    """
    hardware = replace(options.config.hardware, device="cpu", compile="off", fsdp_size=1)
    if hardware.precision == "auto":
        hardware = replace(hardware, precision="bfloat16")
    if hardware.activation_checkpointing == "auto":
        hardware = replace(hardware, activation_checkpointing="off")
    config = replace(options.config, hardware=hardware)
    footprint = Footprint.measure(config)
    components = build_components(config, torch.device("meta"))
    batch = Batch(
        config.train.gradient_accumulation_steps * config.train.batch_size, config.data.seq_len
    )
    flops = count_flops(components, batch, mean_rate(config.rate))
    flops += optimizer_flops(config.train, components)
    rows = []
    for world in WORLDS:
        for shards in sorted({1, world}):
            seconds = flops / (world * options.peak_tflops * 1e12 * options.utilisation)
            time = {
                "step_seconds": seconds,
                "run_hours": seconds * config.train.symbols / batch.symbols / 3600,
            }
            rows.append(_rank_row(config, components, footprint, world, shards) | time)
    return {
        "flops": flops,
        "symbols": batch.symbols,
        "parameters": sum(x.numel() for x in components.state_dict().values()),
        "ranks": rows,
    }


def _rank_row(
    config: Config, components: Components, footprint: Footprint, world: int, shards: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"world": world, "fsdp_size": shards}
    try:
        assignment = BatchAssignment.of(
            config.train, world=world, split_each_pass=components.has_cross_step_state
        )
    except UserError as error:
        return row | {"error": str(error)}
    passes = len(assignment.passes)
    count = len(assignment.rows)
    found = footprint.peak(count, passes, shards)
    # A ring sends (W - 1) / W of the data twice for a sum, once to gather or to scatter; FSDP gathers in both passes.
    times = 2 if shards == 1 else 3
    row |= {"rows": count, "passes": passes} | {
        f"{name}_gib": size / GIB for name, size in found.items()
    }
    sent = times * (world - 1) / world * footprint.states["gradients"]
    return row | {"communication_gib": sent / GIB}
