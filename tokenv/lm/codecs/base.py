"""Codecs: embeddings of symbols, and distributions over the next symbol.

The U-Net itself does not depend on bytes. Another kind of sequence needs another codec with the same members.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.core.devices import shares_memory_with_numpy
from tokenv.core.errors import SHARE, check_value
from tokenv.lm.layers import Linear


class Codec(nn.Module, ABC):
    """Embedding of symbols, and the family of distributions over the next symbol.

    Attributes:
        symbol_shape: shape of one symbol; () for bytes.
        symbol_dtype: dtype of symbols.
        num_parameters: parameters of one distribution; the size of a head's output.
        unit: unit of reported losses, as in the names of metrics.
        nats_per_unit: nats in one unit.
        trailing: number of last symbols of a sequence which the auxiliary head predicts at once, from those before
            them; 0 if each symbol is predicted from those before it. Otherwise no boundary is drawn among them, and
            nothing before them is predicted, so that an agent may read all of it.
        symbol_classes: names of classes of symbols, for which a validation counts boundaries; see ``classify``.
    """

    symbol_shape: tuple[int, ...]
    symbol_dtype: torch.dtype
    num_parameters: int
    unit: str = "nats_per_symbol"
    nats_per_unit: float = 1.0
    trailing: int = 0
    symbol_classes: tuple[str, ...] = ()

    @classmethod
    def classify(cls, symbol: Tensor) -> Tensor:
        """Return the index into ``symbol_classes`` of each symbol: [.., *symbol_shape] -> int64 [..]."""
        raise NotImplementedError(f"{cls.__name__} has symbol_classes: write its classify")

    @abstractmethod
    def embed(self, symbol: Tensor) -> Tensor:
        """Embed symbols: [.., *symbol_shape] -> [.., D]."""

    @abstractmethod
    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Return log-probabilities (or log-densities) in nats: [.., num_parameters], [.., *symbol_shape] -> [..]."""

    def make_auxiliary_head(self, width: int) -> nn.Module | None:
        """Build a head which predicts several symbols at once from a hidden state [.., D]; None for no such head."""
        return None

    def auxiliary_log_prob(
        self, head: nn.Module, y: Tensor, symbol_BN: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the auxiliary head's log-probability of what follows each position, and the number of its terms.

        It is trained beside the next symbol's likelihood. Both are 0 where too few symbols follow.

        Args:
            head: what ``make_auxiliary_head`` has built.
            y: hidden states, [.., B, T, D].
            symbol_BN: sequences, [B, N, *symbol_shape], N = T + 1.
            valid_BT: whether the next symbol is one of the sequence, not padding.

        Returns:
            [.., B, T] each, the first in nats; None if the sequences are too short for any position.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has an auxiliary head: write its auxiliary_log_prob"
        )

    def trailing_log_prob(self, head: nn.Module, y: Tensor, symbol_BN: Tensor) -> Tensor:
        """Return the log-probability in nats of the ``trailing`` last symbols, 0 before, where ``trailing`` is not 0.

        Args:
            head: what ``make_auxiliary_head`` has built.
            y: hidden states before them, [.., B, N - trailing, D].
            symbol_BN: sequences, [B, N, *symbol_shape].

        Returns:
            [.., B, T], T = N - 1; position i has that of symbol i + 1.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has trailing symbols: write its trailing_log_prob"
        )

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

    def sample_noise(self, count: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw at once what ``sample`` would draw for ``count`` symbols, one after the other: [count, ..].

        None if ``sample`` draws for itself; otherwise it takes these numbers, of the symbols' shape, as ``noise``.
        """
        return None

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
    symbol_classes = (
        "space",
        "line break",
        "letter",
        "digit",
        "punctuation",
        "control",
        "UTF-8 lead",
        "UTF-8 continuation",
        "special",
    )

    def __init__(self, width: int, vocabulary: int = 256, softcap: float = 30.0) -> None:
        super().__init__()
        self.num_parameters = vocabulary
        self.softcap = softcap
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    @classmethod
    def classify(cls, symbol: Tensor) -> Tensor:
        """Return the class of each byte; symbols from 256 on are special: [..] -> int64 [..]."""
        names = (*map(_byte_class, range(256)), "special")
        classes = [cls.symbol_classes.index(name) for name in names]
        return torch.tensor(classes, device=symbol.device)[symbol.long().clamp(max=256)]

    def embed(self, symbol: Tensor) -> Tensor:
        """Embed bytes: [..] -> [.., D]."""
        weight = self.embedding.weight
        return F.embedding(symbol, weight) * math.sqrt(weight.shape[1])

    def logits(self, parameters: Tensor) -> Tensor:
        """Return soft-capped logits in float32 or finer: [.., V] -> [.., V]."""
        fine = parameters.to(torch.promote_types(parameters.dtype, torch.float32))
        return self.softcap * torch.tanh(fine / self.softcap)

    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Return log-probabilities in nats: [.., V], [..] -> [..]."""
        loss = F.cross_entropy(
            self.logits(parameters).flatten(0, -2),
            symbol.flatten(),
            reduction="none",
        )
        return -loss.view(symbol.shape)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return ``-sum_x p(x) log p(x)`` in nats: [.., V] -> [..]."""
        log_prob = self.logits(parameters).log_softmax(-1)
        return -(log_prob.exp() * log_prob).sum(-1)

    def sample_noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw uniform numbers u, float64 [count, V].

        With ``E_r = -log(1 - u_r)`` the symbol of rank r with the largest ``p_r / E_r`` is drawn from p: E are the
        exponential numbers of ``torch.multinomial`` on the same generator of a CPU.

        Where two symbols' probabilities differ by less than rounding, about 1e-5 of them, their ranks and so their
        noise depend on who computes them: of 20 texts of 400 bytes by small untrained models, one differed between
        torch and numba, at a pair whose probabilities differ by 4e-6 of them.
        """
        device = self.embedding.weight.device
        return torch.rand(
            count, self.num_parameters, dtype=torch.float64, device=device, generator=generator
        )

    def sample(
        self,
        parameters: Tensor,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        after: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Draw bytes by nucleus sampling (Holtzman et al. 2020): [.., V] -> [..].

        ``noise`` holds the numbers of ``sample_noise``, [.., V]; None draws them.

        Raises:
            ValueError: temperature below 0 or ``top_p`` outside (0, 1].
        """
        check_sampling(temperature, top_p)
        if temperature == 0:
            return self.logits(parameters).argmax(-1)
        dtype = torch.promote_types(parameters.dtype, torch.float32)
        if noise is None:
            count = parameters[..., 0].numel()
            noise = self.sample_noise(count, generator).view(parameters.shape)
        if (
            dtype == torch.float32
            and type(self).logits is ByteCodec.logits
            and shares_memory_with_numpy(parameters.device)
        ):
            from tokenv.lm.cpu_kernels import sample_bytes

            logits = parameters.detach().float().reshape(-1, self.num_parameters).numpy()
            uniform = noise.detach().reshape(-1, self.num_parameters).numpy()
            symbol = sample_bytes(
                logits,
                uniform,
                self.softcap,
                float(temperature),
                float(top_p),
            )
            return torch.from_numpy(symbol).view(parameters.shape[:-1])
        scaled = self.logits(parameters) / temperature
        prob, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = prob.cumsum(-1) - prob
        prob = torch.where(before < top_p, prob, 0.0)
        exponential = -torch.log1p(-noise).to(dtype)
        rank = (prob / exponential).argmax(-1, keepdim=True)
        return order.gather(-1, rank).squeeze(-1)


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise a ValueError unless symbols can be drawn with a temperature of 0 or more, and ``top_p`` in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature}: expected 0 (without chance) or more")
    check_value("top_p", top_p, SHARE)


def make_head(codec: Codec, width: int) -> Linear:
    """Build the linear map from hidden states to the parameters of the codec's distribution."""
    return Linear(width, codec.num_parameters)


# a byte, as a character of Latin-1, is of the first class whose test it passes
BYTE_CLASSES: dict[str, Callable[[str], bool]] = {
    "UTF-8 lead": lambda character: character >= "\xc0",
    "UTF-8 continuation": lambda character: character >= "\x80",
    "line break": lambda character: character == "\n",
    "space": lambda character: character in " \t",
    "digit": str.isdigit,
    "letter": str.isalpha,
    "punctuation": str.isprintable,
    "control": lambda character: True,
}


def _byte_class(byte: int) -> str:
    return next(name for name, holds in BYTE_CLASSES.items() if holds(chr(byte)))
