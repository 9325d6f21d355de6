"""Every built-in codec keeps to what ``check_codec`` asks, and those that do not are caught."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tokenv.config import registry
from tokenv.core.errors import UserError
from tokenv.lm.codecs.base import ByteCodec
from tokenv.testing import check_codec


@pytest.mark.parametrize("name", registry.CODECS)
def test_every_codec_passes(name):
    check_codec(name)


@pytest.mark.parametrize("density", ["gaussian", "logistic_mixture", "bins"])
@pytest.mark.parametrize("residual", [False, True])
def test_every_density_passes(density, residual):
    (unchecked,) = check_codec("series", density=density, residual=residual)
    assert "density" in unchecked


class Small(ByteCodec):
    """Sixteen symbols."""

    def __init__(self, width):
        super().__init__(width, vocabulary=16)


def test_one_of_somebodys_passes():
    assert check_codec(Small) == []


class OtherDraws(Small):
    """Draws at another temperature."""

    def sample(self, parameters, *, temperature=1.0, **options):
        return super().sample(parameters, temperature=temperature * 0.7, **options)


class Unnormalised(Small):
    def log_prob(self, parameters, symbol):
        return self.logits(parameters).gather(-1, symbol.unsqueeze(-1)).squeeze(-1)


class TooMuch(Small):
    """Probabilities that sum to e."""

    def log_prob(self, parameters, symbol):
        return super().log_prob(parameters, symbol) + 1


class NoGenerator(Small):
    def sample(self, parameters, *, generator=None, **options):
        return super().sample(parameters, **options)


class Coarse(Small):
    def log_prob(self, parameters, symbol):
        return super().log_prob(parameters, symbol).to(parameters.dtype)


class WrongEntropy(Small):
    def entropy(self, parameters):
        return super().entropy(parameters) + 0.2


class Deaf(Small):
    def embed(self, symbol):
        return super().embed(torch.zeros_like(symbol))


class Detached(Small):
    def embed(self, symbol):
        return super().embed(symbol).detach() + 0 * self.embedding.weight.sum()


class Flat(Small):
    def embed(self, symbol):
        return super().embed(symbol).sum(-1)


class Context(Small):
    """Reads the neighbours, which are not there when symbols come one by one."""

    def embed(self, symbol):
        before = super().embed(symbol)
        return before + (F.pad(before, (0, 0, 1, 0))[..., :-1, :] if symbol.dim() == 2 else 0)


class Raises(Small):
    def sample(self, parameters, **options):
        raise IndexError("nothing here")


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (OtherDraws, "does not draw what log_prob"),
        (Unnormalised, "does not draw what log_prob"),
        (TooMuch, "sum to 2.718"),
        (NoGenerator, "the same generator gave other symbols"),
        (Coarse, "float32 or finer"),
        (WrongEntropy, r"entropy\(\) is"),
        (Deaf, "the same vector for all symbols"),
        (Detached, "no gradient"),
        (Flat, "embed.. has shape"),
        (Context, "differs between stepping and one pass"),
        (Raises, "sample.. of parameters .* fails with IndexError"),
    ],
)
def test_a_wrong_codec_is_reported(codec, message):
    with pytest.raises(AssertionError, match=f"codec {codec.__name__}: .*{message}"):
        check_codec(codec)


def test_what_is_no_codec_is_refused():
    with pytest.raises(UserError, match="expected a Codec"):
        check_codec(nn.Identity)
