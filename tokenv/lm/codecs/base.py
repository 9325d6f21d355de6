"""Codecs: embeddings of symbols, and distributions over the next symbol.

The U-Net itself does not depend on bytes. Another kind of sequence needs another codec with the same members.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.lm.layers import Linear


class Codec(nn.Module, ABC):
    """Embedding of symbols, and the family of distributions over the next symbol.

    Attributes:
        symbol_shape: shape of one symbol; () for bytes.
        symbol_dtype: dtype of symbols.
        num_parameters: parameters of one distribution; the size of a head's output.
        unit: unit of reported losses, as in the names of metrics.
        nats_per_unit: nats in one unit.
    """

    symbol_shape: tuple[int, ...]
    symbol_dtype: torch.dtype
    num_parameters: int
    unit: str = "nats_per_symbol"
    nats_per_unit: float = 1.0

    @abstractmethod
    def embed(self, symbol: Tensor) -> Tensor:
        """Embed symbols: [.., *symbol_shape] -> [.., D]."""

    @abstractmethod
    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Return log-probabilities (or log-densities) in nats: [.., num_parameters], [.., *symbol_shape] -> [..]."""

    def log_prob_horizon(self, parameters: Tensor, symbol: Tensor, target: Tensor) -> Tensor:
        """Return log-probabilities of several symbols, each given the symbols up to one, in nats: [.., H].

        Args:
            parameters: parameters of the distribution of each target, [.., H, num_parameters].
            symbol: last known symbol, [.., *symbol_shape]; ignored by codecs whose distributions depend on it only
                through the parameters.
            target: targets, [.., H, *symbol_shape].
        """
        return self.log_prob(parameters, target)

    def loss_mask(self, symbol: Tensor) -> Tensor | None:
        """Return the number of terms in a likelihood: [.., *symbol_shape] -> int64 [..]; None if always one."""
        return None

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy of the next symbol in nats, for agents which read it: [.., num_parameters] -> [..].

        Raises:
            ValueError: this codec does not compute it.
        """
        raise ValueError(
            f"{type(self).__name__} has no entropy: write its method entropy(parameters), or choose an agent that "
            "does not read early_entropy"
        )

    @abstractmethod
    def sample(
        self,
        parameters: Tensor,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """Draw symbols: [.., num_parameters] -> [.., *symbol_shape]. Temperature 0 takes the most probable.

        ``after``, the previous symbols, is ignored by codecs whose distributions depend on them only through the
        parameters.
        """


class ByteCodec(Codec):
    """Bytes (and special symbols beyond 255, where the data has some) with a categorical distribution.

    The embedding is scaled by sqrt(D), as in Gemma 2, so that its rows have unit variance.

    Args:
        width: model width D.
        vocabulary: number of symbols.
        softcap: output logits are ``softcap * tanh(logits / softcap)``.
    """

    symbol_shape = ()
    symbol_dtype = torch.int64
    unit = "bits_per_byte"
    nats_per_unit = math.log(2)

    def __init__(self, width: int, vocabulary: int = 256, softcap: float = 30.0) -> None:
        super().__init__()
        self.num_parameters = vocabulary
        self.softcap = softcap
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def embed(self, symbol: Tensor) -> Tensor:
        """Embed bytes: [..] -> [.., D]."""
        return self.embedding(symbol) * self.embedding.embedding_dim**0.5

    def logits(self, parameters: Tensor) -> Tensor:
        """Return soft-capped logits in float32 or finer: [.., V] -> [.., V]."""
        fine = parameters if parameters.dtype == torch.float64 else parameters.float()
        return self.softcap * torch.tanh(fine / self.softcap)

    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Return log-probabilities in nats: [.., V], [..] -> [..]."""
        loss = F.cross_entropy(self.logits(parameters).flatten(0, -2), symbol.flatten(), reduction="none")
        return -loss.view(symbol.shape)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return ``-sum_x p(x) log p(x)`` in nats: [.., V] -> [..]."""
        log_prob = self.logits(parameters).log_softmax(-1)
        return -(log_prob.exp() * log_prob).sum(-1)

    def sample(
        self,
        parameters: Tensor,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """Draw bytes by nucleus sampling (Holtzman et al. 2020): [.., V] -> [..].

        Raises:
            ValueError: temperature below 0 or ``top_p`` outside (0, 1].
        """
        if temperature < 0:
            raise ValueError(f"temperature = {temperature}: expected 0 (most probable symbol) or more")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p = {top_p}: expected a number in (0, 1]")
        logits = self.logits(parameters)
        if temperature == 0:
            return logits.argmax(-1)
        prob, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
        prob = torch.where(prob.cumsum(-1) - prob < top_p, prob, 0.0)
        choice = torch.multinomial(prob.flatten(0, -2), 1, generator=generator).view(*prob.shape[:-1], 1)
        return order.gather(-1, choice).squeeze(-1)


def make_head(codec: Codec, width: int) -> Linear:
    """Build the linear map from hidden states to the parameters of the codec's distribution."""
    return Linear(width, codec.num_parameters)
