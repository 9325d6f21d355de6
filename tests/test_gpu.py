"""The same on CUDA: fused attention, one pass, stepping, and bfloat16."""

import pytest
import torch
from tensordict import TensorDict

from tokenv import keys
from tokenv.agents.learned import Learned
from tokenv.contracts import Sampling
from tokenv.env.rollout import rollout
from tokenv.estimators.recipes import reinforce
from tokenv.lm.attention import flex_attention, reference_attention
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet

pytestmark = [
    pytest.mark.gpu,
    # torch.compile's and Triton's own warnings are not ours to mend.
    pytest.mark.filterwarnings("default"),
]
CONFIG = UNetConfig(width=64, heads=4, down_layers=2, mid_layers=2, up_layers=2, window=16)


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def models(compute_dtype=None):
    lm, agent = UNet(CONFIG, compute_dtype=compute_dtype), Learned(CONFIG.width, window=2)
    return lm, agent


def random_sequences(batch=3, length=200):
    return torch.randint(256, (batch, length)), torch.rand(batch, length - 1)


@pytest.mark.parametrize("window", [None, 16, 300])
def test_flex_attention_equals_the_reference(window):
    qkv = [torch.randn(2, 4, 200, 16, device="cuda", requires_grad=True) for _ in range(3)]
    weight = torch.randn_like(qkv[0])
    results = []
    for attention in (flex_attention, reference_attention):
        out = attention(*qkv, 50.0, window)
        results.append((out, *torch.autograd.grad((out * weight).sum(), qkv)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_one_pass_equals_the_cpus():
    lm, agent = models()
    symbol_BN, noise_BT = random_sequences()
    on_cpu = rollout(lm, agent, symbol_BN, noise=noise_BT)
    on_gpu = rollout(lm.cuda(), agent.cuda(), symbol_BN.cuda(), noise=noise_BT.cuda())
    # A logit within rounding of its threshold may flip; then what follows in its row is another text.
    same_B = (on_gpu[keys.ACTION].cpu() == on_cpu[keys.ACTION]).all(1)
    assert same_B.any()
    for key in (keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY, keys.BOUNDARY_LOGITS, keys.REWARD):
        torch.testing.assert_close(on_gpu[key].cpu()[same_B], on_cpu[key][same_B], rtol=1e-2, atol=1e-2)


def test_stepping_equals_one_pass():
    lm, agent = (module.cuda() for module in models())
    symbol_BN, noise_BT = (x.cuda() for x in random_sequences())
    with torch.no_grad():
        td = rollout(lm, agent, symbol_BN, noise=noise_BT)
    decoder = Decoder(lm, *symbol_BN.shape)
    for i in range(symbol_BN.shape[1] - 1):
        x_BD = decoder.encode(symbol_BN[:, i])
        torch.testing.assert_close(x_BD, td[keys.ENCODING][:, i], rtol=1e-2, atol=1e-2)
        acted = agent(
            TensorDict(
                {
                    keys.ENCODING: x_BD,
                    keys.LAST_ACTIONS: td[keys.LAST_ACTIONS][:, i],
                    keys.POSITION: decoder.position_B.clone(),
                    keys.DECISION_MASK: decoder.position_B > 0,
                    keys.NOISE: noise_BT[:, i],
                },
                batch_size=symbol_BN.shape[:1],
            )
        )
        torch.testing.assert_close(acted[keys.BOUNDARY_LOGITS], td[keys.BOUNDARY_LOGITS][:, i], rtol=1e-2, atol=1e-2)
        late_B = lm.codec.log_prob(decoder.decode(x_BD, td[keys.ACTION][:, i]), symbol_BN[:, i + 1])
        torch.testing.assert_close(late_B, td[keys.LOG_LIKELIHOOD][:, i], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("samples", [None, 2])
def test_a_bfloat16_step_is_finite(samples):
    lm, agent = (module.cuda() for module in models(torch.bfloat16))
    symbol_BN, _ = random_sequences()
    td = reinforce()(rollout(lm, agent, symbol_BN.cuda(), Sampling(num_samples=samples)))
    late, early = td[keys.LOG_LIKELIHOOD], td[keys.LOG_LIKELIHOOD_EARLY]
    assert late.dtype == torch.float32
    (td[keys.LOSS_POLICY] - late - 0.1 * early).mean().backward()
    for name, parameter in [*lm.named_parameters(), *agent.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_tokens_equal_padded_ones(compiled):
    lm, _ = models()
    lm.cuda()
    symbol_BN, noise_BT = (x.cuda() for x in random_sequences())
    action_BN = torch.nn.functional.pad((noise_BT < 0.3).long(), (1, 0), value=1)
    results = []
    for packs in (False, True):
        lm.packs = packs
        if packs and compiled:
            lm.compile_layers()
        lm.zero_grad()
        out = lm(symbol_BN, action_BN)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)])
    for packed, padded in zip(*reversed(results), strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-2, atol=1e-2)
