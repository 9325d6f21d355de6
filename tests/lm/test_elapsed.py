"""The clock of the decoder: exact counts, no effect at its start, and the same step by step as in one pass."""

import pytest
import torch
from episodes import Noise, forced_first
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictSequential

from tokenv.agents.fixed import NoBoundaries, Random
from tokenv.agents.learned import Learned
from tokenv.config.hardware import model_parameters
from tokenv.config.schema import TrainConfig
from tokenv.core import keys
from tokenv.core.sequences import elapsed_symbols
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators import recipes
from tokenv.lm import incremental
from tokenv.lm.config import POOLINGS, UNetConfig
from tokenv.lm.elapsed import CLASSES, ElapsedEmbedding
from tokenv.lm.flops import Batch, Passes, Tokens, update_flops
from tokenv.lm.incremental import CompiledLayers, Decoder
from tokenv.lm.unet import UNet
from tokenv.training.optimizers import make_optimizer

WIDTH, LENGTH = 16, 20
SIZES = {"width": WIDTH, "heads": 2, "down_layers": 1, "mid_layers": 2, "up_layers": 1, "window": 3}
masks = st.lists(
    st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2
)
seeds = st.integers(0, 1000)
poolings = st.sampled_from(POOLINGS)


def make_lm(pooling="select", **options):
    return UNet(UNetConfig(**SIZES, pooling=pooling, elapsed=True, **options)).double()


def trained(pooling="select"):
    """Build a model with a table which matters."""
    lm = make_lm(pooling)
    torch.nn.init.normal_(lm.elapsed.weight)
    return lm


def parameters(lm, symbol_BT, action_BT, boundary_BT=None):
    return lm.decode(lm.encode(symbol_BT), action_BT, boundary_BT)


# --- the count, and its table ---


@given(masks)
def test_counts_are_the_loop(mask):
    """Also before the first boundary of a row, where they begin at its first symbol."""
    expected = []
    for row in mask:
        newest = 0
        counts = []
        for position, boundary in enumerate(row):
            newest = position if boundary else newest
            counts.append(position - newest)
        expected.append(counts)
    assert elapsed_symbols(torch.tensor(mask)).tolist() == expected


def test_small_counts_have_codes_of_their_own_and_large_ones_are_exact_to_four_percent():
    table = ElapsedEmbedding(1)
    with torch.no_grad():
        table.weight[:, 0] = torch.arange(CLASSES)
    count_N = torch.arange(10_000)
    class_N = table(count_N)[:, 0].long()
    assert torch.equal(class_N[:64], count_N[:64])
    assert set(class_N.diff().tolist()) == {0, 1}
    for number in range(64, int(class_N[4095]) + 1):
        inside = count_N[class_N == number]
        assert inside[-1] - inside[0] < 0.05 * inside[0]
    assert set(class_N[4096:].tolist()) == {CLASSES - 1}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_fresh_model_is_bit_for_bit_the_one_without(pooling):
    torch.manual_seed(1)
    plain = UNet(UNetConfig(**SIZES, pooling=pooling))
    after = torch.rand(1)
    torch.manual_seed(1)
    lm = UNet(UNetConfig(**SIZES, pooling=pooling, elapsed=True))
    assert torch.equal(torch.rand(1), after)
    state = lm.state_dict()
    assert state.keys() - plain.state_dict().keys() == {"elapsed.weight"}
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    symbol_BT = torch.randint(256, (2, LENGTH))
    action_BT = forced_first([[0, 1] * (LENGTH // 2)] * 2)
    outs = []
    losses = []
    for model in (lm, plain):
        out = parameters(model, symbol_BT, action_BT)
        loss = -model.codec.log_prob(out[:, :-1], symbol_BT[:, 1:]).mean()
        loss.backward()
        outs.append(out)
        losses.append(loss)
    assert torch.equal(*outs)
    assert torch.equal(*losses)
    assert lm.elapsed.weight.grad[:2].all()
    assert not lm.elapsed.weight.grad[2:].any()


@settings(max_examples=20)
@given(poolings, masks, seeds)
def test_the_decoder_reads_its_row_of_the_table(pooling, mask, seed):
    """Moving one row of the table moves what is read at this distance, and nothing before it."""
    torch.manual_seed(seed)
    lm = trained(pooling)
    action_BT = forced_first(mask)
    symbol_BT = torch.randint(256, action_BT.shape)
    before = parameters(lm, symbol_BT, action_BT)
    count_BT = elapsed_symbols(action_BT)
    distance = int(count_BT.max())
    with torch.no_grad():
        lm.elapsed.weight[distance] += 1.0
    after = parameters(lm, symbol_BT, action_BT)
    for b in range(2):
        at = (count_BT[b] == distance).nonzero().flatten()
        first = int(at[0]) if len(at) else LENGTH
        torch.testing.assert_close(after[b, :first], before[b, :first], rtol=0, atol=0)
        assert all(not torch.allclose(after[b, t], before[b, t]) for t in at)


@settings(max_examples=20)
@given(poolings, masks, st.integers(1, LENGTH - 1), seeds)
def test_no_boundary_moves_an_earlier_output(pooling, mask, t, seed):
    torch.manual_seed(seed)
    lm = trained(pooling)
    action_BT = forced_first(mask)
    symbol_BT = torch.randint(256, action_BT.shape)
    flipped_BT = action_BT.clone()
    flipped_BT[:, t] = 1 - action_BT[:, t]
    before, after = (parameters(lm, symbol_BT, action) for action in (action_BT, flipped_BT))
    torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(after[:, t], before[:, t])


# --- relaxed passes ---


@settings(max_examples=15)
@given(st.sampled_from(["select", "deviation", "mean"]), masks, seeds)
def test_at_hard_boundaries_a_relaxed_pass_is_the_hard_one(pooling, mask, seed):
    torch.manual_seed(seed)
    lm = trained(pooling)
    action_BT = forced_first(mask)
    symbol_BT = torch.randint(256, action_BT.shape)
    boundary_BT = action_BT.double()
    outs = [parameters(lm, symbol_BT, action_BT, boundary) for boundary in (boundary_BT, None)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
    grads = [
        torch.autograd.grad(out.square().sum(), lm.elapsed.weight, retain_graph=True)
        for out in outs
    ]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


def test_relaxations_are_continuous_where_a_decision_flips():
    """REBAR differentiates them by the logits: a jump would bias it."""
    lm = trained()
    agent = Learned(WIDTH, window=0, scale=1.0).double()
    estimator = recipes.rebar()
    symbol_BN = torch.randint(256, (2, 9))
    noise = torch.rand(2, 8).double()
    prob_BT = rollout(lm, agent, symbol_BN, noise=noise)[keys.BOUNDARY_PROB].detach()
    rollouts = []
    for side in (-1e-9, 1e-9):
        noise[:, 4] = prob_BT[:, 4] + side
        td = rollout(lm, agent, symbol_BN, estimator.sampling, noise=noise)
        rollouts.append(td)
    assert (rollouts[0][keys.ACTION] != rollouts[1][keys.ACTION]).sum() == 2
    likelihoods = [td[keys.LOG_LIKELIHOOD_RELAXED][..., 0] for td in rollouts]
    torch.testing.assert_close(*likelihoods, rtol=0, atol=1e-6)
    assert (rollouts[0][keys.LOG_LIKELIHOOD] - rollouts[1][keys.LOG_LIKELIHOOD]).abs().max() > 1e-3


# --- one symbol at a time ---


@settings(max_examples=20)
@given(
    poolings,
    st.booleans(),
    st.lists(st.integers(1, LENGTH), min_size=2, max_size=3),
    st.floats(0, 1),
    seeds,
)
def test_stepping_equals_one_pass_when_rows_start_anew(pooling, compiled, lengths, rate, seed):
    """Row 0 reads episodes of the given lengths, row 1 in the other order, with compiled loops or torch's layers."""
    torch.manual_seed(seed)
    lm = trained(pooling)
    total = sum(lengths)
    symbol_BT = torch.randint(256, (2, total))
    action_BT = (torch.rand(2, total) < rate).long()
    ends = [torch.tensor(order).cumsum(0).tolist() for order in (lengths, lengths[::-1])]
    starts = [[0, *end[:-1]] for end in ends]
    first_BT = torch.tensor([[t in start for t in range(total)] for start in starts])
    action_BT[first_BT] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incremental, "shares_memory_with_numpy", lambda device: compiled)
        decoder = Decoder(lm, 2, max(lengths))
    assert isinstance(decoder.up, CompiledLayers) == compiled
    stepped = []
    for t in range(total):
        decoder.reset(first_BT[:, t])
        decoder.encode(symbol_BT[:, t])
        stepped.append(decoder.decode(action_BT[:, t]))
    stepped = torch.stack(stepped, 1)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for i, j in zip(start, end, strict=True):
            with torch.no_grad():
                expected = parameters(lm, symbol_BT[b : b + 1, i:j], action_BT[b : b + 1, i:j])
            torch.testing.assert_close(stepped[b : b + 1, i:j], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "agent", [Random(0.2, LENGTH), NoBoundaries()], ids=["random", "no boundaries"]
)
def test_the_environment_equals_one_pass(agent):
    lm = trained()
    noise_BT = torch.rand(3, LENGTH - 1).double()
    env = TokenizationEnv(lm, TensorSource(torch.randint(256, (3, LENGTH))), 3)
    stepped = env.rollout(LENGTH - 1, TensorDictSequential(Noise(noise_BT), agent))
    one_pass = env.one_pass(agent, noise=noise_BT).detach()
    for name in (keys.ACTION, ("next", "reward"), keys.LOG_LIKELIHOOD):
        torch.testing.assert_close(stepped[name], one_pass[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("lengths", "samples"), [((9, 3, 14), 1), ((6, 6), 3)])
def test_continuations_of_several_prompts_equal_one_pass(lengths, samples):
    lm = trained()
    agent = Random(0.2, 30)
    prompts = [torch.randint(256, (length,)) for length in lengths]
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    done = generate(lm, agent, prompts, 12, samples=samples, temperature=0, generator=generators)
    for b, (symbol_N, action_N) in enumerate(zip(done.symbol_BN, done.action_BN, strict=True)):
        known = len(prompts[b // samples])
        length = int(done.length_B[b])
        assert elapsed_symbols(action_N[None]).max() > SIZES["window"]
        best_N = parameters(lm, symbol_N[None, :length], action_N[None, :length])[0].argmax(-1)
        assert torch.equal(best_N[known - 1 : length - 1], symbol_N[known:length])


# --- cost and training ---


def test_the_table_costs_parameters_and_no_multiplications():
    lm = make_lm()
    plain = UNet(UNetConfig(**SIZES))
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (lm, plain)]
    assert sizes[0] - sizes[1] == CLASSES * WIDTH
    assert model_parameters(lm.config) - model_parameters(plain.config) == CLASSES * WIDTH
    flops = [
        update_flops(model, Batch(4, LENGTH), Tokens(20, learning_pairs=60), 0, Passes())
        for model in (lm, plain)
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_table_is_optimized_as_the_embedding_of_bytes(optimizer):
    lm = make_lm()
    named = {f"lm.{name}": parameter for name, parameter in lm.named_parameters()}
    config = TrainConfig(optimizer=optimizer, embedding_learning_rate=0.1)
    for group in make_optimizer(config, named).param_groups:
        held = {id(parameter) for parameter in group["params"]}
        assert (id(lm.elapsed.weight) in held) == (id(lm.codec.embedding.weight) in held)
