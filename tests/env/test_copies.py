"""An environment can be pickled, copied, stored by torch and sent to a collector's processes."""

import io
import pickle
from copy import deepcopy

import pytest
import torch
from torch.testing import assert_close

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.data.config import DataConfig
from tokenv.data.corpus import CorpusFactory, TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

WIDTH, BATCH, LENGTH, BEFORE = 16, 3, 12, 4
WORDS = DataConfig(
    source="words", seq_len=LENGTH, words_documents=20, lexicon_size=20, validation=0.1
)
EXACT = {"rtol": 0, "atol": 0}


def pickled(env):
    return pickle.loads(pickle.dumps(env))


def stored(env):
    file = io.BytesIO()
    torch.save(env, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def make_env(pooling="select", source=None, **options):
    sizes = {"width": WIDTH, "heads": 2, "down_layers": 1, "mid_layers": 1, "up_layers": 1}
    lm = UNet(UNetConfig(**sizes, window=8, pooling=pooling)).double()
    source = source or TensorSource(torch.randint(256, (7, LENGTH)))
    return TokenizationEnv(lm, source, BATCH, **options)


def steps(env, td, count):
    """Return what follows the given actions: a boundary in every row but the first, which changes its mind."""
    for i in range(count):
        action_B = torch.tensor([i % 2, 1, 1])
        td = env.step(td.set(keys.ACTION, action_B))["next"]
        yield td


@pytest.mark.parametrize("copy", [pickled, stored, deepcopy])
@pytest.mark.parametrize("pooling", ["select", "mean", "smooth"])
def test_a_copy_goes_on_as_the_original_does(copy, pooling):
    env = make_env(pooling, optional_keys=["early_entropy"], rates=0.3)
    *_, td = steps(env, env.reset(), BEFORE)
    other = copy(env)
    following = zip(
        steps(env, td, LENGTH - 1 - BEFORE), steps(other, td, LENGTH - 1 - BEFORE), strict=True
    )
    for one, another in following:
        assert_close(dict(one.items()), dict(another.items()), **EXACT)
    assert one[keys.DONE[1]].all()
    # The next episode and its noise, too: neither reads from the other's source or generator.
    assert_close(dict(env.reset().items()), dict(other.reset().items()), **EXACT)
    agent = Learned(WIDTH).double()
    assert_close(env.one_pass(agent)[keys.NOISE], other.one_pass(agent)[keys.NOISE], **EXACT)


def test_a_copy_steps_with_its_own_parameters_when_they_are_trained():
    env = make_env()
    *_, td = steps(env, env.reset(), BEFORE)
    other = pickled(env)
    with torch.no_grad():
        for lm in (env.lm, other.lm):
            lm.head.weight.add_(0.1)
    one, another = (next(steps(each, td, 1)) for each in (env, other))
    assert_close(one[keys.REWARD[1]], another[keys.REWARD[1]], **EXACT)


def test_a_seed_opens_the_same_text_in_a_copy():
    env = make_env(source=CorpusFactory(WORDS))
    other = pickled(env)
    for each in (env, other):
        each.set_seed(3)
    assert_close(env.reset()[keys.SYMBOL], other.reset()[keys.SYMBOL], **EXACT)
    assert other.origin == env.origin


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning"
)
def test_a_collector_steps_it_in_processes():
    from torchrl.collectors import MultiSyncCollector

    env = make_env()
    agent = Learned(WIDTH, scale=1.0).double()
    frames = 2 * BATCH * (LENGTH - 1)
    collector = MultiSyncCollector([env, env], agent, frames_per_batch=frames, total_frames=frames)
    try:
        (td,) = (batch.clone() for batch in collector)
    finally:
        collector.shutdown()
    assert td.numel() == frames
    assert td[keys.DONE].sum() == 2 * BATCH
    assert_close(td[keys.REWARD], td[keys.REWARD].nan_to_num(), **EXACT)
