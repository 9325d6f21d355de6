"""What is compiled for a GPU compiles for sm_90 on a machine without one, where torch is a CUDA build."""

import pytest
import torch

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators.recipes import reinforce
from tokenv.lm import attention, unet
from tokenv.lm.config import UNetConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason="needs a CUDA build of torch, and no GPU"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs the kernels"),
    # torch.compile's and Triton's own warnings are not ours to mend.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def kernels():
    """Yield the compiled kernels by name."""
    from cuda_lowering import compile_for_cuda  # imports Inductor, with its warnings

    attention._compiled_flex.cache_clear()
    unet._compiled_log_prob.cache_clear()
    with compile_for_cuda(attention, unet) as kernels:
        yield kernels
    attention._compiled_flex.cache_clear()
    unet._compiled_log_prob.cache_clear()


def check(kernels, *parts):
    """Check that all kernels are machine code for sm_90, and that some kernel's name has each of ``parts``."""
    for name, compiled in kernels.items():
        for kernel in compiled:
            assert kernel.metadata.target.arch == 90, name
            assert len(kernel.asm["cubin"]) > 1000, name
    for part in parts:
        assert any(part in name for name in kernels), (part, list(kernels))


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("size", [64, 128])
def test_flex_attention_has_kernels_forward_and_backward(window, size, kernels):
    qkv = [torch.randn(2, 2, 512, size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attention.flex_attention(*qkv, 50.0, window).sum().backward()
    check(kernels, "tem_fused_flex_attention_0", "tem_fused_flex_attention_backward")


def test_layers_exits_and_draws_have_kernels(kernels):
    config = UNetConfig(width=128, heads=2, down_layers=1, mid_layers=1, up_layers=1)
    lm = unet.UNet(config, compute_dtype=torch.bfloat16)
    agent = Learned(config.width, window=8, scale=1.0)
    lm.pack_tokens()
    lm.compile_layers()
    agent.compile_draw()
    td = reinforce()(rollout(lm, agent, torch.randint(256, (2, 257))))
    late = td[keys.LOG_LIKELIHOOD]
    early = td[keys.LOG_LIKELIHOOD_EARLY]
    (td[keys.LOSS_POLICY] - late - 0.1 * early).mean().backward()
    check(kernels, "flex_attention_backward", "log_softmax", "_gt_mul")
