"""Compile for a CUDA GPU of which the machine has none: a CUDA build of torch, and Triton, suffice.

Functions are traced on the CPU, where autograd needs no driver. Every graph which reaches Inductor is then moved to
fake CUDA tensors and lowered to Triton kernels, which are compiled up to the GPU's machine code; nothing is launched.
A compiled function returns zeros of the right shapes.
"""

import contextlib
import copy
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.attention import flex_attention
from torch.utils import _triton

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
# NVIDIA's figures for an H100.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
)


@contextlib.contextmanager
def compile_for_cuda(monkeypatch: Any, *modules: Any) -> Iterator[dict[str, list[Any]]]:
    """Make ``torch.compile`` compile for sm_90.

    Args:
        monkeypatch: pytest's fixture.
        modules: modules of tokenv whose ``compiles`` shall be true of the CPU.

    Yields:
        The compiled kernels by name; every one has ``metadata.target`` and ``asm["cubin"]``.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kernels: dict[str, list[Any]] = {}
    for module in modules:
        monkeypatch.setattr(module, "compiles", lambda device: True)
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)
    driver = types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    # Flex attention has no backward pass on a CPU; that of the GPU is compiled here.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    tuner, to_kernel = triton_heuristics.CachingAutotuner, triton_heuristics.CachingAutotuner._precompile_config

    def compiled(self: Any, config: Any) -> Any:
        result = to_kernel(self, config)
        kernels.setdefault(self.fn.__name__, []).append(result.kernel)
        return result

    monkeypatch.setattr(tuner, "_precompile_config", compiled)
    monkeypatch.setattr(tuner, "_make_launchers", lambda self: None)
    monkeypatch.setattr(tuner, "_dynamic_scale_rblock", lambda self: None)
    outer = compile_fx.compile_fx
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda *args, **options: outer(*args, **options | {"inner_compile": _lower})
    )
    torch._dynamo.reset()
    with inductor.patch(compile_threads=1, force_disable_caches=True, use_static_cuda_launcher=False):
        yield kernels
    torch._dynamo.reset()


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": CAPABILITY,
        "get_rng_state": torch.zeros(8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        for place in (CudaInterface, CudaInterface.Worker):
            known = staticmethod(lambda *_: PROPERTIES)
            patches.enter_context(mock.patch.object(place, "get_device_properties", known))
        _triton.has_triton.cache_clear()
        yield


def _lower(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    found = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    with _pretended_gpu():
        compile_fx.compile_fx_inner(*_on_cuda(graph, inputs), **options)

    def run(values: list[Any]) -> list[Any]:
        values.clear()
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() if isinstance(x, torch.Tensor) else x
            for x in found
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _on_cuda(graph: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Return a copy of a graph, and its inputs, with fake tensors on the GPU."""
    graph = copy.deepcopy(graph)
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.args = tuple(_argument(each) for each in node.args)
            node.kwargs = {name: _argument(each) for name, each in node.kwargs.items()}
        if isinstance(module, fx.GraphModule):
            module.recompile()
    mode = detect_fake_mode(inputs)
    with mode, torch.no_grad():
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    return graph, moved


def _argument(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CUDA
    if isinstance(value, dict) and "OUTPUT_LOGSUMEXP" in value:
        return {**value, "OUTPUT_LOGSUMEXP": True}  # what flex attention's backward pass reads; never set on a CPU
    return value
