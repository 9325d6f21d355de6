"""A pretended accelerator: tensors in the CPU's memory whose device says otherwise, for machines without a GPU.

It has real values and no compiler. An operation which a GPU would refuse is an error, and what makes the host wait is
counted by the line of our code which caused it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tokenv.config.schema import DEVICE

NAME = "pretended"
ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / room}/" for room in ("tokenv", "agents", "estimators"))
COPY = torch.ops.aten.copy_.default
TO = torch.ops.aten._to_copy.default
INDEX = torch.ops.aten.index.Tensor
INDEXING = (INDEX, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)
WAITS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_entered: list["FakeAccelerator"] = []


class DeviceError(RuntimeError):
    """An operation which a GPU would refuse."""


class DeviceTensor(Tensor):
    """Tensor of the pretended accelerator; ``host`` holds its values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        size = host.shape
        stride = host.stride()
        offset = host.storage_offset()
        return Tensor._make_wrapper_subclass(
            cls, size, stride, offset, dtype=host.dtype, device=device()
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "host"}
        return memo.setdefault(id(self), copied)

    def tolist(self) -> Any:
        """Return the values, as tensors of CUDA do; torch refuses this for subclasses."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory which holds the values."""
        return self.host.untyped_storage()

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Generator(torch.Generator):
    """Generator whose device may be the pretended accelerator; its numbers are the CPU's."""

    of: torch.device

    def __new__(cls, of: torch.device | str = "cpu") -> "Generator":
        of = torch.device(of)
        generator = super().__new__(cls, "cpu" if of.type == NAME else of)
        generator.of = of
        if of.type == NAME:
            # an operation is given another object
            _entered[-1].generators[generator._cdata] = generator
        return generator

    device = property(lambda self: self.of)  # type: ignore[assignment]


class _Mode(TorchDispatchMode):
    """Mode of one thread, which makes tensors on the device where they are asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run_thread(thread: threading.Thread, run: Any = threading.Thread._bootstrap_inner) -> None:  # type: ignore[attr-defined]
    with _Mode():
        run(thread)


class FakeAccelerator(_Mode):
    """Where this is entered, the pretended accelerator can be used.

    Backward passes must not raise, since torch then aborts the process: what a GPU would refuse is an error on leaving.

    Attributes:
        device: the device.
        waits: number of waits of the host, by ``operation at file:line``.

    Raises:
        DeviceError: an operation was given tensors of two devices, or a generator of another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = device()
        self.waits = Counter[str]()
        self.refused = Counter[str]()
        self.generators: dict[int, Generator] = {}
        self._late: list[tuple[Tensor, Tensor]] = []  # copies to the host which have not arrived

    def __enter__(self) -> "FakeAccelerator":
        with ExitStack() as stack:
            library = stack.enter_context(_scoped_library("aten", "IMPL"))
            library.impl("is_pinned", lambda x, device=None: False, "CPU")
            library.impl("_pin_memory", lambda x, device=None: x.clone(), "CPU")
            stack.enter_context(patch.object(torch, "Generator", Generator))
            # Torch counts devices at a process's first backward pass, which may be before this.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(patch.object(threading.Thread, "_bootstrap_inner", _run_thread))
            # hardware.device=pretended
            stack.enter_context(patch.dict(DEVICE, accepts=lambda name: True))
            # torch.tensor(.., device=..) then copies where it is counted
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, False)
            _entered.append(self)
            stack.callback(_entered.remove, self)
            self._stack = stack.pop_all()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        if self.refused and error[0] is None:
            raise DeviceError(f"{dict(self.refused)}")

    def wait(self, operation: str) -> None:
        """Count a wait, after which everything has been computed and copied."""
        self.waits[f"{operation} at {_place()}"] += 1
        for copied, source in self._late:
            copied.copy_(source)
        self._late.clear()

    def copy_late(self, source: Tensor) -> Tensor:
        """Return a copy whose values are wrong until the next wait."""
        self._late.append(
            (torch.full_like(source, -1 if source.dtype != torch.bool else True), source.clone())
        )
        return self._late[-1][0]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the tensors' values; check it, and count it if the host waits for it."""
    leaves = list(_leaves((*args, *kwargs.values())))
    on_device = [each for each in leaves if isinstance(each, DeviceTensor)]
    requested = kwargs.get("device")
    target = bool(on_device) if requested is None else torch.device(requested).type == NAME
    if not on_device and not target:
        return func(*args, **kwargs)
    mode = _entered[-1]
    if func is COPY:
        target = isinstance(args[0], DeviceTensor)
    elif func is not TO and len(on_device) < len(leaves):
        mode.refused.update(_refusals(func, args, kwargs))
    late = kwargs.get("non_blocking", False) or (func is COPY and args[2:] == (True,))
    wait = _waits_for(func, args, target=target)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # changes the shape of the wrapper alone
            func(*args, **kwargs)
    args = _map(lambda each: each.host, DeviceTensor, args)
    kwargs = {
        name: _map(lambda each: each.host, DeviceTensor, each) for name, each in kwargs.items()
    }
    kwargs.pop("pin_memory", None)
    if requested is not None:
        kwargs["device"] = torch.device("cpu")
    result = func(*args, **kwargs)
    if late and wait == "copy to the host" and func is TO:
        result = mode.copy_late(result)
    elif wait and not (late and wait.startswith("copy")):
        mode.wait(wait)
    if not target:
        return result
    given = {id(each.host): each for each in on_device}
    return _map(
        lambda each: given[id(each)] if id(each) in given else DeviceTensor(each), Tensor, result
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and generators among an operation's arguments."""
    if isinstance(value, (Tensor, torch._C.Generator)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)


def _map(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """Apply a function to what is of a kind; torch's tree_map would take half of the time."""
    if isinstance(value, kind):
        return function(value)
    return (
        type(value)(_map(function, kind, each) for each in value)
        if type(value) in (list, tuple)
        else value
    )


def _refusals(func: Any, args: Any, kwargs: Any) -> list[str]:
    """Return what CUDA would refuse: tensors of the CPU, except a number to read or indices, and its generators."""
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    wrong = []
    for argument in arguments:
        value = given.get(argument.name)
        index = func in INDEXING and argument.name == "indices"
        read = isinstance(value, Tensor) and (
            argument.alias_info is None or not argument.alias_info.is_write
        )
        for each in _leaves(value):
            if isinstance(each, torch._C.Generator):
                allowed = each._cdata in _entered[-1].generators
            else:
                allowed = isinstance(each, DeviceTensor) or index or (read and each.dim() == 0)
            if not allowed:
                wrong.append(f"{func} with {argument.name} on the CPU at {_place()}")
    return wrong


def _waits_for(func: Any, args: Any, *, target: bool) -> str:
    """Return a name for an operation which waits, as ``torch.cuda.set_sync_debug_mode`` finds them; else ''."""
    if func in (COPY, TO):
        source = args[1] if func is COPY else args[0]
        if isinstance(source, DeviceTensor) == target:
            return ""
        return "copy to the device" if target else "copy to the host"
    if func in INDEXING:
        chosen = [each for each in args[1] if each is not None]
        return (
            "mask"
            if any(
                each.dtype == torch.bool or not isinstance(each, DeviceTensor) for each in chosen
            )
            else ""
        )
    return func.__name__.partition(".")[0] if WAITS & set(func.tags) else ""


def _place() -> str:
    """Return file and line of the innermost frame of our code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PRODUCT):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
    )


class _Event:
    def record(self) -> None:
        """Do nothing: the pretended accelerator has finished."""

    def synchronize(self) -> None:
        _entered[-1].wait("event")


@cache
def device() -> torch.device:
    """Register the backend, once in a process, and return its device."""
    module = SimpleNamespace(
        Event=_Event,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        get_device_name=lambda device: "pretended accelerator",
        get_rng_state=lambda device: torch.empty(0),  # fork_rng asks all devices, long after this
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: None,
        max_memory_allocated=lambda device: 2**20,
        mem_get_info=lambda device: (2**33, 2**34),
        set_device=lambda device: None,
        set_rng_state=lambda state, device: None,
        # libraries call it anywhere
        synchronize=lambda device=None: [mode.wait("synchronize") for mode in _entered],
        _is_in_bad_fork=lambda: False,
    )
    _setup_privateuseone_for_python_backend(NAME, module)
    return torch.device(NAME, 0)
