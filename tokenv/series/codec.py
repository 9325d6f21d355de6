"""Codec of real values, which are normalised by a frame in the symbol, with a density over the next value.

A symbol is [C, 5]: for every channel the value (NaN if missing), the location and scale of its sequence's frame,
whether its likelihood counts, and the last value before it which is not missing (the location, if there is none). The
frame consists of statistics of the leading context, and the source writes it. Covariates, which are read but not
predicted, are K further rows of a symbol, [C + K, 5], whose likelihood does not count; the codec itself standardises
them, by statistics of the training steps.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from tokenv.core.errors import COUNT, NOT_NEGATIVE, check_value
from tokenv.core.plugins import Registry, construct, find
from tokenv.lm.codecs.base import Codec, check_sampling
from tokenv.lm.layers import Linear
from tokenv.series.densities import Density

VALUE, LOCATION, SCALE, COUNTED, LAST = range(5)
DENSITIES = Registry(
    "tokenv.densities",
    {
        "gaussian": "tokenv.series.densities:Gaussian",
        "student_t": "tokenv.series.densities:StudentT",
        "logistic_mixture": "tokenv.series.densities:LogisticMixture",
        "bins": "tokenv.series.densities:Bins",
    },
    base="tokenv.series.densities:Density",
)


def known_values(symbol: Tensor) -> Tensor:
    """Return values in units of their frame, the last known one in place of a missing one: [.., C, 5] -> [.., C]."""
    value = torch.where(
        symbol[..., VALUE].isnan(),
        symbol[..., LAST],
        symbol[..., VALUE],
    )
    return (value - symbol[..., LOCATION]) / symbol[..., SCALE]


def predict_linear(symbol_BL: Tensor, weight_FH: Tensor) -> Tensor:
    """Forecast histories by a linear map, in units of the frame.

    Args:
        symbol_BL: framed symbols [B, L, C, 5], of which the last F - 1 are read; a shorter history is extended by its
            first value.
        weight_FH: map, [F, H]; its last row is the constant.

    Returns:
        [B, H, C] in the precision of ``symbol_BL``.
    """
    history = len(weight_FH) - 1
    value_BCL = known_values(symbol_BL[:, -history:]).mT
    missing = history - value_BCL.shape[-1]
    if missing:
        value_BCL = torch.cat([value_BCL[..., :1].expand(-1, -1, missing), value_BCL], -1)
    return (F.pad(value_BCL, (0, 1), value=1.0) @ weight_FH.to(value_BCL.dtype)).mT


class DirectHead(nn.Module):
    """Linear map from a hidden state to the parameters of the next H symbols' distributions.

    Args:
        width: model width D.
        horizon: number of symbols H.
        num_parameters: parameters P of one distribution.
        linear_path: steps of the linear path, at which the head starts; 0 for none.
    """

    linear_path: Tensor

    def __init__(self, width: int, horizon: int, num_parameters: int, linear_path: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.projection = Linear(width, horizon * num_parameters)
        if linear_path:
            self.register_buffer("linear_path", torch.zeros(linear_path + 1, horizon))
            nn.init.zeros_(self.projection.weight)

    def forward(self, y: Tensor) -> Tensor:
        """Return the parameters of each symbol's distribution: [.., D] -> [.., H, P]."""
        return self.projection(y).unflatten(-1, (self.horizon, -1))


class SeriesCodec(Codec):
    """Real-valued symbols of C channels, whose density factorises over the channels given the past.

    Likelihoods are in nats on the values' original scale, summed over a symbol's channels: exactly 0 for values which
    are missing or do not count. Missing values are embedded as learned vectors.

    Args:
        width: model width D.
        channels: predicted values C of one symbol.
        density: ``gaussian``, ``student_t``, ``logistic_mixture`` or ``bins``; a name that a package registers in
            ``tokenv.densities``, or ``package.module:Class``. The next three go to constructors which take them.
        components: components of ``logistic_mixture``.
        bins: number of bins of ``bins``.
        reach: half the range of ``bins``, in standard deviations of the context.
        residual: whether the density is that of the difference from the last known value, not from the frame's
            location; for series whose level drifts.
        covariates: values K of one symbol which are only read.
        horizon: symbols H which a direct head predicts at once from every position, besides the next one; 0 for no
            such head.
        direct: whether only the last ``horizon`` symbols of a sequence are predicted, at once and by that head, from
            the history before them (``Codec.trailing``). Every likelihood is then the direct head's.
        linear_path: last steps of the history from which a linear map, too, predicts the ``horizon``, with ``direct``;
            0 for no such map. It is DLinear, fitted to the training windows before the first update and not trained
            (``tokenv.series.baseline_models``); the direct head starts at it and learns what it misses.

    Raises:
        ValueError: an unknown density, a size out of range, ``direct`` without a horizon, or ``linear_path`` without
            ``direct``.
    """

    covariate_mean: Tensor
    covariate_std: Tensor
    symbol_dtype = torch.float64
    unit = "nats_per_value"
    nats_per_unit = 1.0

    def __init__(
        self,
        width: int,
        channels: int = 1,
        density: str = "student_t",
        components: int = 4,
        bins: int = 64,
        reach: float = 5.0,
        residual: bool = False,
        covariates: int = 0,
        horizon: int = 0,
        direct: bool = False,
        linear_path: int = 0,
    ) -> None:
        super().__init__()
        check_value("codec.horizon", horizon, NOT_NEGATIVE)
        if direct and not horizon:
            raise ValueError(
                "codec.direct = True with codec.horizon = 0: expected symbols to predict at once, such as 24"
            )
        check_value("codec.linear_path", linear_path, NOT_NEGATIVE)
        if linear_path and not direct:
            raise ValueError(
                f"codec.linear_path = {linear_path} without codec.direct: expected codec.direct=True"
            )
        self.horizon = horizon
        self.linear_path = linear_path
        if direct:
            self.trailing = horizon
        check_value("codec.channels", channels, COUNT)
        family = find("density", density, DENSITIES, "codec.density")
        self.density: Density = construct(
            f"codec.density {density!r}", family, {}, components=components, bins=bins, reach=reach
        )
        self.channels = channels
        self.residual = residual
        self.covariates = covariates
        self.symbol_shape = (channels + covariates, 5)
        self.num_parameters = channels * self.density.num_parameters
        # for each the value, and whether it is missing
        self.lift = Linear(2 * (channels + covariates), width)
        self.bias = nn.Parameter(torch.randn(width))
        if covariates:
            self.register_buffer("covariate_mean", torch.zeros(covariates, dtype=torch.float64))
            self.register_buffer("covariate_std", torch.ones(covariates, dtype=torch.float64))
        self.mix = Linear(width, width)

    def set_covariate_moments(self, mean_K: ArrayLike, std_K: ArrayLike) -> None:
        """Set the mean and the standard deviation by which covariates are standardised, [K] each."""
        self.covariate_mean.copy_(torch.as_tensor(mean_K))
        self.covariate_std.copy_(torch.as_tensor(std_K))

    def embed(self, symbol: Tensor) -> Tensor:
        """Embed symbols, [.., C + K, 5] -> [.., D], with far outliers on a logarithmic scale."""
        z, present = self._normalised(symbol)
        if self.covariates:
            known = (z[..., self.channels :] - self.covariate_mean) / self.covariate_std
            z = torch.cat([z[..., : self.channels], known], -1).where(present, 0.0)
        missing = (~present).to(z.dtype)
        read = torch.cat([torch.asinh(z), missing], -1)
        lifted = self.lift(read.to(self.bias.dtype))
        return lifted + self.mix(F.gelu(lifted + self.bias))

    def predicted(self, symbol: Tensor) -> Tensor:
        """Return symbols without their covariates: [.., C + K, 5] -> [.., C, 5]."""
        return symbol[..., : self.channels, :]

    def log_prob(self, parameters: Tensor, symbol: Tensor) -> Tensor:
        """Return log-densities in nats: [.., C * P], [.., C + K, 5] -> [..]."""
        symbol = self.predicted(symbol)
        base = None
        if self.residual:
            base = (symbol[..., LAST] - symbol[..., LOCATION]) / symbol[..., SCALE]
        return self._log_prob(parameters, symbol, base)

    def make_auxiliary_head(self, width: int) -> DirectHead | None:
        """Build the direct head if there is a horizon."""
        if not self.horizon:
            return None
        return DirectHead(width, self.horizon, self.num_parameters, self.linear_path)

    def auxiliary_log_prob(
        self, head: nn.Module, y: Tensor, symbol_BN: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the direct head's log-probability of the next H symbols from every position; see ``Codec``."""
        positions = valid_BT.shape[1] - self.horizon + 1
        if positions < 1:
            return None
        target_BSH = symbol_BN[:, 1:].unfold(1, self.horizon, 1).movedim(-1, 2)
        complete_BS = valid_BT[:, -positions:]
        log_prob = self._direct_log_prob(
            head, y[..., :positions, :], symbol_BN[:, :positions], target_BSH
        )
        log_prob = log_prob.sum(-1).where(complete_BS, 0.0)
        count_BS = complete_BS * self.loss_mask(target_BSH).sum(-1)
        rest = (0, self.horizon - 1)
        count_BT = F.pad(count_BS, rest)
        return F.pad(log_prob, rest), count_BT.expand(y.shape[:-1])

    def trailing_log_prob(self, head: nn.Module, y: Tensor, symbol_BN: Tensor) -> Tensor:
        """Return the direct head's log-probability of the last H symbols, given the history; see ``Codec``."""
        known = symbol_BN.shape[1] - self.horizon
        base = self.linear_forecast(head, symbol_BN[:, :known])
        log_prob = self._direct_log_prob(
            head, y[..., -1, :], symbol_BN[:, known - 1], symbol_BN[:, known:], base
        )
        return F.pad(log_prob, (known - 1, 0))

    def linear_forecast(self, head: Any, history_BL: Tensor) -> Tensor | None:
        """Return what the linear path predicts, in units of the frame: [B, L, C + K, 5] -> [B, H, C]; None without one.

        It reads the last ``linear_path`` steps; see ``predict_linear``.
        """
        if not self.linear_path:
            return None
        return predict_linear(self.predicted(history_BL), head.linear_path)

    def _direct_log_prob(
        self,
        head: nn.Module,
        y: Tensor,
        symbol: Tensor,
        target: Tensor,
        base: Tensor | None = None,
    ) -> Tensor:
        """Return log-densities of H symbols: [K, .., D], [.., C + K, 5], [.., H, C + K, 5] -> [K, .., H] in nats.

        ``base`` is the zero of the densities, [.., H, C]; None for that which follows from the symbol before them.
        """
        samples = y.shape[: y.dim() - target.dim() + len(self.symbol_shape)]
        if base is None and self.residual:
            last = symbol.expand(*samples, *symbol.shape)
            base = self.base(last).unsqueeze(-2)
        target = target.expand(*samples, *target.shape)
        return self._log_prob(head(y), self.predicted(target), base)

    def _log_prob(self, parameters: Tensor, symbol: Tensor, base: Tensor | None) -> Tensor:
        raw = self._raw(parameters)
        z, present = self._normalised(symbol)
        if base is not None:
            z = torch.where(present, z - base, 0.0)
        log_scale = symbol[..., SCALE].log().to(raw.dtype)
        log_prob = self.density.log_prob(raw, z.to(raw.dtype)) - log_scale
        counted = present & (symbol[..., COUNTED] > 0)
        return torch.where(counted, log_prob, 0.0).sum(-1)

    def base(self, symbol: Tensor) -> Tensor:
        """Return the zero of the density of what follows, in units of the frame: [.., C + K, 5] -> [.., C]."""
        symbol = self.predicted(symbol)
        if self.residual:
            return known_values(symbol)
        return torch.zeros_like(symbol[..., VALUE])

    def loss_mask(self, symbol: Tensor) -> Tensor:
        """Return how many of a symbol's values have a likelihood: [.., C + K, 5] -> int64 [..]."""
        symbol = self.predicted(symbol)
        counted = ~symbol[..., VALUE].isnan() & (symbol[..., COUNTED] > 0)
        return counted.sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the differential entropy in nats, in units of the frame, summed over channels: [.., C * P] -> [..].

        On the original scale it is larger by log(scale), which is constant in a sequence. It is computed in closed
        form, except for ``logistic_mixture``.
        """
        return self.density.entropy(self._raw(parameters)).sum(-1)

    def mean(
        self, parameters: Tensor, location: Tensor | float = 0.0, scale: Tensor | float = 1.0
    ) -> Tensor:
        """Return expected values on the original scale: [.., C * P] and the frame's [.., C] each -> [.., C].

        If the codec is residual, the location is the last value; so in ``quantile`` and ``cdf``.
        """
        mean = self.density.mean(self._raw(parameters))
        return location + scale * mean

    def quantile(
        self,
        parameters: Tensor,
        q: Tensor | float,
        location: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return quantiles of every channel on the original scale.

        Args:
            parameters: parameters of the densities, [.., C * P].
            q: probabilities strictly between 0 and 1, broadcast with [.., C].
            location: location of the frame, [.., C].
            scale: scale of the frame, [.., C].

        Returns:
            [.., C].

        Raises:
            ValueError: a probability outside (0, 1).
        """
        raw = self._raw(parameters)
        q = torch.as_tensor(q, dtype=raw.dtype, device=raw.device)
        if not bool(((q > 0) & (q < 1)).all()):
            raise ValueError(f"q = {q.tolist()}: expected probabilities strictly between 0 and 1")
        return location + scale * self.density.quantile(raw, q)

    def cdf(
        self,
        parameters: Tensor,
        value: Tensor,
        location: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return P(x <= value) of every channel, for values on the original scale: [.., C * P], [.., C] -> [.., C]."""
        raw = self._raw(parameters)
        z = (value - location) / scale
        return self.density.cdf(raw, z.to(raw.dtype))

    def crps(
        self,
        parameters: Tensor,
        value: Tensor,
        location: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the continuous ranked probability score of every channel, in the values' unit; see ``cdf``."""
        raw = self._raw(parameters)
        z = (value - location) / scale
        return scale * self.density.crps(raw, z.to(raw.dtype))

    def sample(
        self,
        parameters: Tensor,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """Draw symbols in units of the frame, which the codec does not know: [.., C * P] -> [.., C + K, 5].

        Covariates are missing.

        Their own frame is (0, 1), in which they have the same embedding as in that of the sequence. For values on the
        original scale multiply by the scale of the sequence's frame and add its location.

        Args:
            parameters: parameters of the densities, [.., C * P].
            temperature: factor of the deviation from the median; 0 gives the median.
            top_p: central probability mass of every channel from which values are drawn.
            generator: random generator.
            after: previous symbols, [.., C + K, 5]; None for symbols at the location of their frame.

        Raises:
            ValueError: temperature below 0 or ``top_p`` outside (0, 1].
        """
        check_sampling(temperature, top_p)
        raw = self._raw(parameters)
        half = torch.full(raw.shape[:-1], 0.5, dtype=raw.dtype, device=raw.device)
        drawn = torch.rand(half.shape, dtype=raw.dtype, device=raw.device, generator=generator)
        tiny = torch.finfo(raw.dtype).eps / 2
        q = half + top_p * (drawn - half)
        q = q.clamp(tiny, 1 - tiny)
        median = self.density.quantile(raw, half)
        value = median + temperature * (self.density.quantile(raw, q) - median)
        zero = torch.zeros_like(value)
        one = torch.ones_like(value)
        base = zero
        if after is not None:
            base = self.base(after)
        symbol = torch.stack([value + base, zero, one, one, base], -1)
        symbol = symbol.to(self.symbol_dtype)
        if not self.covariates:
            return symbol
        missing = symbol.new_tensor([math.nan, 0.0, 1.0, 0.0, 0.0])
        missing = missing.expand(*symbol.shape[:-2], self.covariates, 5)
        return torch.cat([symbol, missing], -2)

    def _raw(self, parameters: Tensor) -> Tensor:
        """Return the raw parameters of every channel in float32 or finer: [.., C * P] -> [.., C, P]."""
        fine = torch.promote_types(parameters.dtype, torch.float32)
        return parameters.to(fine).unflatten(-1, (self.channels, -1))

    @staticmethod
    def _normalised(symbol: Tensor) -> tuple[Tensor, Tensor]:
        """Return values in units of their frame, 0 if missing, and whether they are present; both [.., C]."""
        present = ~symbol[..., VALUE].isnan()
        z = (symbol[..., VALUE] - symbol[..., LOCATION]) / symbol[..., SCALE]
        return torch.where(present, z, 0.0), present
