"""The same on CUDA: fused attention, one pass, stepping, bfloat16, and whole runs."""

import math
import warnings

import pytest
import torch
from reference_attention import reference_attention
from tensordict import TensorDict

from tokenv.agents.learned import Learned
from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.core.contracts import Sampling
from tokenv.data.corpus import TensorSource
from tokenv.data.prefetch import stage_batch
from tokenv.env.rollout import rollout
from tokenv.estimators.recipes import reinforce
from tokenv.lm.attention import flex_attention
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import Decoder
from tokenv.lm.segments import SortedGather
from tokenv.lm.unet import UNet
from tokenv.training import optimizers, update
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.metrics import NotFiniteError
from tokenv.training.process_group import Ranks
from tokenv.training.trainer import train

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
    lm = UNet(CONFIG, compute_dtype=compute_dtype)
    agent = Learned(CONFIG.width, window=2)
    return lm, agent


def random_sequences(batch=3, length=200):
    return torch.randint(256, (batch, length)), torch.rand(batch, length - 1)


@pytest.mark.parametrize(
    ("window", "size"), [(None, 16), (16, 16), (63, 64), (64, 64), (65, 64), (300, 16)]
)
def test_flex_attention_equals_the_reference(window, size):
    qkv = [torch.randn(2, 4, 200, size, device="cuda", requires_grad=True) for _ in range(3)]
    weight = torch.randn_like(qkv[0])
    results = []
    for attention in (flex_attention, reference_attention):
        out = attention(*qkv, 50.0, window)
        results.append((out, *torch.autograd.grad((out * weight).sum(), qkv)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_one_pass_equals_the_cpus():
    lm, agent = models()
    symbol_BN, noise_BT = random_sequences()
    on_cpu = rollout(lm, agent, symbol_BN, noise=noise_BT)
    on_gpu = rollout(lm.cuda(), agent.cuda(), symbol_BN.cuda(), noise=noise_BT.cuda())
    # A logit within rounding of its threshold may flip; then what follows in its row is another text.
    same_B = (on_gpu[keys.ACTION].cpu() == on_cpu[keys.ACTION]).all(1)
    assert same_B.any()
    for key in (keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY, keys.BOUNDARY_LOGITS, keys.REWARD):
        torch.testing.assert_close(
            on_gpu[key].cpu()[same_B], on_cpu[key][same_B], rtol=1e-2, atol=1e-2
        )


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
        torch.testing.assert_close(
            acted[keys.BOUNDARY_LOGITS], td[keys.BOUNDARY_LOGITS][:, i], rtol=1e-2, atol=1e-2
        )
        late_B = lm.codec.log_prob(decoder.decode(td[keys.ACTION][:, i]), symbol_BN[:, i + 1])
        torch.testing.assert_close(late_B, td[keys.LOG_LIKELIHOOD][:, i], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("samples", [None, 2])
def test_a_bfloat16_step_is_finite(samples):
    lm, agent = (module.cuda() for module in models(torch.bfloat16))
    symbol_BN, _ = random_sequences()
    td = reinforce()(rollout(lm, agent, symbol_BN.cuda(), Sampling(num_samples=samples)))
    late = td[keys.LOG_LIKELIHOOD]
    early = td[keys.LOG_LIKELIHOOD_EARLY]
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
        results.append(
            [out.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)]
        )
    for packed, padded in zip(*reversed(results), strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("length", [130, 512])
def test_blocks_of_64_have_kernels_at_the_size_of_a_real_head(length):
    """In a compiled layer, in bfloat16, forward and backward."""
    lm = UNet(
        UNetConfig(width=128, heads=2, down_layers=1, mid_layers=1, up_layers=1),
        compute_dtype=torch.bfloat16,
    )
    lm.cuda()
    symbol_BN = torch.randint(256, (2, length), device="cuda")
    action_BN = (torch.arange(length, device="cuda") % 5 == 0).long().expand(2, -1)
    results = []
    for compiled in (False, True):
        if compiled:
            lm.pack_tokens()
            lm.use_small_flex_blocks()
            lm.compile_layers()
        lm.zero_grad()
        y = lm.decode_hidden(lm.encode(symbol_BN), action_BN)
        late = lm.log_prob(y[:, :-1], symbol_BN[:, 1:])
        late.mean().backward()
        results.append(
            [late.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)]
        )
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.05)


def test_the_gradient_of_gathering_is_the_same_every_time():
    token_index_BT = (torch.rand(4, 3000, device="cuda") < 0.2).long().cumsum(1)
    x_BMD = torch.randn(4, 800, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4, 3000, 64, device="cuda").bfloat16()
    gradients = [
        torch.autograd.grad((SortedGather.apply(x_BMD, token_index_BT) * weight).sum(), x_BMD)[0]
        for _ in range(3)
    ]
    assert torch.equal(gradients[1], gradients[0])
    assert torch.equal(gradients[2], gradients[0])
    expected = torch.zeros(4, 800, 64, dtype=torch.float64, device="cuda")
    expected.scatter_add_(1, token_index_BT.unsqueeze(-1).expand(-1, -1, 64), weight.double())
    torch.testing.assert_close(gradients[0].double(), expected, rtol=1e-2, atol=1e-2)


def test_compiled_draws_are_the_draws():
    agent = Learned(64, window=8, scale=1.0).cuda()
    lm = UNet(CONFIG).cuda()
    symbol_BN, noise_BT = (x.cuda() for x in random_sequences())
    with torch.no_grad():
        plain = rollout(lm, agent, symbol_BN, noise=noise_BT)
        agent.compile_draw()
        compiled = rollout(lm, agent, symbol_BN, noise=noise_BT)
    assert torch.equal(compiled[keys.ACTION], plain[keys.ACTION])


def settings_on_gpu(tiny_settings, **more):
    """Of a run of ten updates on a GPU; sequences and heads are large enough for the kernels of training."""
    larger = {
        "hardware": {"device": "cuda"},
        "model": {"width": 64, "heads": 4},
        "data": {"seq_len": 200, "words_documents": 800},
        "train": {"symbols": 16_000, "warmup_symbols": 3200},
        "validation": {"every_symbols": 6400},
        "checkpoint": {"every_symbols": 6400},
    }
    return merge(merge(tiny_settings, larger), more)


def run(settings, folder, **options):
    """Return the metrics of a run without the clock's, sorted: a resumed run repeats the earlier ones first."""
    logged = []
    train(resolve([], settings), folder, lambda *metric: logged.append(metric), **options)
    return sorted((name, at, repr(value)) for name, value, at in logged if "per_second" not in name)


@pytest.mark.parametrize("agent", ["learned", "uniform"])
def test_a_run_trains_and_resumes_bit_for_bit(agent, tiny_settings, tmp_path):
    """Kernels that add in any order would show here."""
    settings = settings_on_gpu(tiny_settings, agent={"name": agent})
    whole = run(settings, tmp_path / "whole")
    saved = checkpoints.list_complete(tmp_path / "whole")
    resumed = run(settings, tmp_path / "resumed", resume=checkpoints.load(saved[0]))
    assert resumed == whole
    last, expected = (
        checkpoints.load(checkpoints.list_complete(tmp_path / name)[-1])
        for name in ("resumed", "whole")
    )
    for name, tensor in (expected.tensors | expected.optimizer).items():
        assert torch.equal((last.tensors | last.optimizer)[name], tensor), name


def test_what_is_not_finite_ends_a_run_with_the_checkpoint_before(
    tiny_settings, tmp_path, monkeypatch
):
    calls = 0
    total = update.total_loss

    def broken(*arguments):
        nonlocal calls
        calls += 1
        return total(*arguments) * (math.nan if calls > 9 else 1)

    monkeypatch.setattr(update, "total_loss", broken)
    with pytest.raises(NotFiniteError, match=r"step 4: grad_norm_lm = nan.*step-00000004"):
        run(settings_on_gpu(tiny_settings), tmp_path)
    saved = checkpoints.list_complete(tmp_path)
    assert [path.name for path in saved] == ["step-00000004"]
    assert all(tensor.isfinite().all() for tensor in checkpoints.load(saved[0]).tensors.values())


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_an_update_waits_for_the_gpu_twice_a_pass(compiled, tiny_settings):
    """For its draws and the number of its tokens; see tests/accelerator/test_waits.py."""
    config = resolve([], settings_on_gpu(tiny_settings, hardware={"compile": compiled}))
    parts = build_components(config)
    parts.train()
    group = DataParallelGroup.create(
        Ranks(), config.train, split_each_pass=parts.has_cross_step_state
    )
    passes = config.train.gradient_accumulation_steps

    class Pinned(TensorSource):
        def next(self, count):
            return stage_batch(super().next(count), torch.device("cuda"))

    source = Pinned(torch.randint(256, (8, config.data.seq_len)))
    step = update.TrainingStep(parts, config.loss)
    parameters = parts.named_parameters()
    optimizer = optimizers.make_optimizer(config.train, parameters)

    def one_update():
        batches = []
        for number in group.assignment.passes:
            batch = source.next(config.train.batch_size)
            batches.append(update.PassInput(batch.symbols_on(torch.device("cuda")), number))
        figures, _ = update.accumulate_gradients(step, batches, group)
        with optimizers.skip_if_nonfinite(optimizer, figures.found_inf):
            optimizers.optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    for _ in range(3):
        one_update()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        one_update()
        torch.cuda.set_sync_debug_mode("default")
    # torch also warns, once, that its search for waits is a prototype
    waits = [
        f"{each.filename}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message)
    ]
    assert len(waits) == 2 * passes, waits
