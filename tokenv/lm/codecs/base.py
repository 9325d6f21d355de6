"""What the U-Net reads and predicts: symbols in, a distribution over the next symbol out.

The U-Net itself knows nothing of bytes. Another kind of sequence is another codec with the same five members.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.lm.layers import Linear


class Codec(nn.Module, ABC):
    """How one symbol becomes a vector, and how a vector becomes a distribution over the next symbol.

    Attributes:
        symbol_shape: shape of one symbol; () for bytes.
        symbol_dtype: its dtype.
        num_parameters: numbers that describe one distribution; the size of a head's output.
        unit: what losses are reported in, as metrics are named.
        nats_per_unit: how many nats that is.
    """

    symbol_shape: tuple[int, ...]
    symbol_dtype: torch.dtype
    num_parameters: int
    unit: str = "nats_per_symbol"
    nats_per_unit: float = 1.0

    @abstractmethod
    def embed(self, symbol: Tensor) -> Tensor:
        """[.., *symbol_shape] -> [.., D]."""

    @abstractmethod
    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Log-probability (or log-density) in nats: [.., num_parameters], [.., *symbol_shape] -> [..]."""

    def log_prob_horizon(self, parameters: Tensor, symbol: Tensor, target: Tensor) -> Tensor:
        """Log-probability of several symbols, each given all up to one: [.., H, num_parameters] -> [.., H] in nats.

        Args:
            parameters: of each target's distribution.
            symbol: the last one that is known, [.., *symbol_shape]; nothing to codecs whose distributions do not
                depend on it otherwise than through the parameters.
            target: [.., H, *symbol_shape].
        """
        return self.log_prob(parameters, target)

    def loss_mask(self, symbol: Tensor) -> Tensor | None:
        """How many likelihoods a symbol's is the sum of: [.., *symbol_shape] -> int64 [..]; None where always one."""
        return None

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy of the next symbol in nats: [.., num_parameters] -> [..]. Only some agents ask for it.

        Raises:
            ValueError: this codec does not tell.
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

        ``after``, the symbols before, is for codecs whose distributions depend on them otherwise than through the
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
        """[..] -> [.., D]."""
        return self.embedding(symbol) * self.embedding.embedding_dim**0.5

    def logits(self, parameters: Tensor) -> Tensor:
        """Soft-capped logits in float32 or finer: [.., V] -> [.., V]."""
        fine = parameters if parameters.dtype == torch.float64 else parameters.float()
        return self.softcap * torch.tanh(fine / self.softcap)

    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """[.., V], [..] -> [..] in nats."""
        loss = F.cross_entropy(self.logits(parameters).flatten(0, -2), symbol.flatten(), reduction="none")
        return -loss.view(symbol.shape)

    def entropy(self, parameters: Tensor) -> Tensor:
        """``-sum_x p(x) log p(x)`` in nats: [.., V] -> [..]."""
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
        """Nucleus sampling (Holtzman et al. 2020): [.., V] -> [..].

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
    """A linear map from the stream to the parameters of the codec's distribution."""
    return Linear(width, codec.num_parameters)
