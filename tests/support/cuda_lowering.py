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

import pytest
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
def compile_for_cuda(*modules: Any) -> Iterator[dict[str, list[Any]]]:
    """Make ``torch.compile`` compile for sm_90.

    Args:
        modules: modules of tokenv whose ``compiles`` shall be true of the CPU.

    Yields:
        The compiled kernels by name; every one has ``metadata.target`` and ``asm["cubin"]``.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kernels: dict[str, list[Any]] = {}
    target = GPUTarget("cuda", 10 * PROPERTIES.major + PROPERTIES.minor, PROPERTIES.warp_size)
    driver = types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    tuner = triton_heuristics.CachingAutotuner
    outer = compile_fx.compile_fx
    to_kernel = tuner._precompile_config

    def compiled(self: Any, config: Any) -> Any:
        result = to_kernel(self, config)
        kernels.setdefault(self.fn.__name__, []).append(result.kernel)
        return result

    def lowered(*args: Any, **options: Any) -> Any:
        return outer(*args, **options | {"inner_compile": _lower})

    torch._dynamo.reset()
    options = inductor.patch(
        compile_threads=1, force_disable_caches=True, use_static_cuda_launcher=False
    )
    with options, pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "compiles", lambda device: True)
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        # Flex attention has no backward pass on a CPU; that of the GPU is compiled here.
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(tuner, "_precompile_config", compiled)
        patch.setattr(tuner, "_make_launchers", lambda self: None)
        patch.setattr(tuner, "_dynamic_scale_rblock", lambda self: None)
        patch.setattr(compile_fx, "compile_fx", lowered)
        yield kernels
    torch._dynamo.reset()


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_rng_state": torch.zeros(8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        for place in (CudaInterface, CudaInterface.Worker):
            patch.setattr(place, "get_device_properties", staticmethod(lambda *_: PROPERTIES))
        _triton.has_triton.cache_clear()
        yield


def _lower(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    examples = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    with _pretended_gpu():
        compile_fx.compile_fx_inner(*_on_cuda(graph, inputs), **options)

    def run(values: list[Any]) -> list[Any]:
        values.clear()
        return [_zeros_like(x, torch.device("cpu")) for x in examples]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _on_cuda(graph: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Return a copy of a graph, and its inputs, with fake tensors on the GPU."""
    graph = copy.deepcopy(graph)
    for module in [each for each in graph.modules() if isinstance(each, fx.GraphModule)]:
        for node in module.graph.nodes:
            node.args = tuple(_argument(each) for each in node.args)
            node.kwargs = {name: _argument(each) for name, each in node.kwargs.items()}
        module.recompile()
    mode = detect_fake_mode(inputs)
    with mode, torch.no_grad():
        moved = [_zeros_like(x, CUDA) for x in inputs]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    return graph, moved


def _zeros_like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=device
    ).zero_()


def _argument(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CUDA
    if isinstance(value, dict) and "OUTPUT_LOGSUMEXP" in value:
        # what flex attention's backward pass reads; never set on a CPU
        return {**value, "OUTPUT_LOGSUMEXP": True}
    return value
