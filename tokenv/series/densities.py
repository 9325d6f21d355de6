"""Densities of one real number, with parameters from a head's raw output, for the series codec.

All are in the codec's normalised units. The scales have a lower bound, ``MIN_SCALE``: the likelihood of a constant
series would otherwise be unbounded.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor

from tokenv.core.errors import COUNT, check_value

MIN_SCALE = 1e-3
LOGIT_REACH = 32  # beyond these logits of a logistic variable lies a mass of 3e-14
LOGIT_STEP = 0.5
_UNIT = math.log(math.e - 1)  # inverse softplus of 1: heads start at a scale of about one


def _from_exponential(value: Tensor) -> Tensor:
    """Return ``E|X - value|`` for X with an exponential density of rate 1."""
    above = value - 1 + 2 * torch.exp(-value.clamp(min=0))
    return torch.where(value > 0, above, 1 - value)


def _array(x: Tensor) -> Any:
    return x.double().cpu().numpy()


def _scale(raw: Tensor) -> Tensor:
    return MIN_SCALE + F.softplus(raw + _UNIT)


class Density(ABC):
    """A family of densities on the real line.

    Every method reads the head's raw output, [.., P], and computes in its precision; values and results are [..].

    Attributes:
        num_parameters: number P of parameters.
    """

    num_parameters: int

    @abstractmethod
    def log_prob(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the log-density in nats."""

    @abstractmethod
    def cdf(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return P(x <= value); without gradient if the family's special functions have none."""

    @abstractmethod
    def quantile(self, raw: Tensor, q: Tensor) -> Tensor:
        """Return the inverse of ``cdf`` for q in (0, 1)."""

    @abstractmethod
    def mean(self, raw: Tensor) -> Tensor:
        """Return the expected value."""

    @abstractmethod
    def crps(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the continuous ranked probability score, ``E|X - value| - E|X - X'| / 2`` (Gneiting & Raftery 2007).

        It has no gradient if the family's special functions have none.
        """

    @abstractmethod
    def entropy(self, raw: Tensor) -> Tensor:
        """Return the differential entropy in nats."""


class Gaussian(Density):
    """A normal density: mean, scale."""

    num_parameters = 2

    def log_prob(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the log-density in nats."""
        scale = _scale(raw[..., 1])
        z = (value - raw[..., 0]) / scale
        return -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)

    def cdf(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return P(x <= value)."""
        z = (value - raw[..., 0]) / _scale(raw[..., 1])
        return torch.special.ndtr(z)

    def quantile(self, raw: Tensor, q: Tensor) -> Tensor:
        """Return the inverse of ``cdf``."""
        z = torch.special.ndtri(q)
        return raw[..., 0] + _scale(raw[..., 1]) * z

    def mean(self, raw: Tensor) -> Tensor:
        """Return the expected value."""
        return raw[..., 0]

    def crps(self, raw: Tensor, value: Tensor) -> Tensor:
        """Compute the CRPS in closed form."""
        scale = _scale(raw[..., 1])
        z = (value - raw[..., 0]) / scale
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        above = z * (2 * torch.special.ndtr(z) - 1)
        spread = 1 / math.sqrt(math.pi)
        return scale * (above + 2 * density - spread)

    def entropy(self, raw: Tensor) -> Tensor:
        """Compute the entropy in closed form."""
        scale = _scale(raw[..., 1])
        return scale.log() + 0.5 * math.log(2 * math.pi * math.e)


class StudentT(Density):
    """Student's t: location, scale and more than two degrees of freedom, so that mean and variance exist."""

    num_parameters = 3

    def _unpack(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        location, scale, freedom = raw.unbind(-1)
        return location, _scale(scale), 2 + F.softplus(freedom + 2)

    def log_prob(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the log-density in nats."""
        location, scale, freedom = self._unpack(raw)
        square = ((value - location) / scale).square()
        more = (freedom + 1) / 2
        gammas = torch.lgamma(more) - torch.lgamma(freedom / 2)
        normaliser = gammas - 0.5 * (math.pi * freedom).log()
        return normaliser - scale.log() - more * torch.log1p(square / freedom)

    def cdf(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return P(x <= value), without gradient: torch has no incomplete beta function."""
        location, scale, freedom = self._unpack(raw.detach())
        z = (value.detach() - location) / scale
        prob = special.stdtr(_array(freedom.expand(z.shape)), _array(z))
        return torch.as_tensor(prob).to(z)

    def quantile(self, raw: Tensor, q: Tensor) -> Tensor:
        """Return the inverse of ``cdf``, without gradient."""
        location, scale, freedom = self._unpack(raw.detach())
        shape = torch.broadcast_shapes(location.shape, q.shape)
        z = special.stdtrit(_array(freedom.expand(shape)), _array(q.expand(shape)))
        return location + scale * torch.as_tensor(z).to(scale)

    def mean(self, raw: Tensor) -> Tensor:
        """Return the expected value."""
        return raw[..., 0]

    def crps(self, raw: Tensor, value: Tensor) -> Tensor:
        """Compute the CRPS in closed form (Jordan, Krueger & Lerch 2019), without gradient."""
        location, scale, freedom = self._unpack(raw.detach())
        z = (value.detach() - location) / scale
        log_density = self.log_prob(raw.detach(), value.detach()) + scale.log()
        half = freedom / 2
        halves = torch.lgamma(half) - torch.lgamma(half + 0.5)
        gammas = torch.lgamma(freedom - 0.5) - torch.lgamma(freedom) - 2 * halves
        log_betas = gammas - 0.5 * math.log(math.pi)  # of B(1/2, v - 1/2) / B(v/2, 1/2)^2
        spread = freedom.sqrt() * log_betas.exp()
        above = z * (2 * self.cdf(raw, value) - 1)
        near = log_density.exp() * (freedom + z.square())
        return scale * (above + 2 * (near - spread) / (freedom - 1))

    def entropy(self, raw: Tensor) -> Tensor:
        """Compute the entropy in closed form."""
        _, scale, freedom = self._unpack(raw)
        half = freedom / 2
        more = (freedom + 1) / 2
        log_beta = torch.lgamma(half) + math.lgamma(0.5) - torch.lgamma(more)
        slope = torch.digamma(more) - torch.digamma(half)
        return more * slope + 0.5 * freedom.log() + log_beta + scale.log()


class LogisticMixture(Density):
    """K logistic densities: weights, locations, scales.

    Args:
        components: number K of components.

    Raises:
        ValueError: ``components`` below 1.
    """

    def __init__(self, components: int = 4) -> None:
        check_value("codec.components", components, COUNT)
        self.num_parameters = 3 * components

    def _unpack(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-weights, locations and scales, each [.., K]."""
        weight, location, scale = raw.unflatten(-1, (3, -1)).unbind(-2)
        return weight.log_softmax(-1), location, _scale(scale)

    def log_prob(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the log-density in nats."""
        log_weight, location, scale = self._unpack(raw)
        z = (value.unsqueeze(-1) - location) / scale
        each = log_weight + F.logsigmoid(z) + F.logsigmoid(-z) - scale.log()
        return torch.logsumexp(each, -1)

    def cdf(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return P(x <= value)."""
        log_weight, location, scale = self._unpack(raw)
        z = (value.unsqueeze(-1) - location) / scale
        return (log_weight.exp() * torch.sigmoid(z)).sum(-1)

    @torch.no_grad()
    def quantile(self, raw: Tensor, q: Tensor) -> Tensor:
        """Return the inverse of ``cdf`` by bisection between the quantiles of the components.

        It is computed in float64 and without gradient.
        """
        fine = raw.double()
        _, location, scale = self._unpack(fine)
        each = location + scale * torch.logit(q.double()).unsqueeze(-1)
        low = each.amin(-1)
        high = each.amax(-1)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cdf(fine, middle) < q
            low = torch.where(below, middle, low)
            high = torch.where(below, high, middle)
        return ((low + high) / 2).to(raw.dtype)

    def mean(self, raw: Tensor) -> Tensor:
        """Return the expected value."""
        log_weight, location, _ = self._unpack(raw)
        return (log_weight.exp() * location).sum(-1)

    def crps(self, raw: Tensor, value: Tensor) -> Tensor:
        """``E|X - value|`` in closed form, ``E|X - X'|`` by quadrature, to 1e-10 of the scales in float64.

        A logistic variable is ``location + scale logit(q)``, so that the mean for a pair of components is an integral
        over logits of the narrower one. Its integrand is analytic, the nearest singularity being pi away, so that the
        trapezoidal rule converges exponentially (Trefethen & Weideman 2014, "The exponentially convergent trapezoidal
        rule").
        """
        log_weight, location, scale = self._unpack(raw)
        logit = torch.arange(
            -LOGIT_REACH, LOGIT_REACH, LOGIT_STEP, device=raw.device, dtype=raw.dtype
        )
        mass = LOGIT_STEP * torch.sigmoid(logit) * torch.sigmoid(-logit)
        scale_1 = scale.unsqueeze(-1)
        scale_2 = scale.unsqueeze(-2)
        narrow = torch.minimum(scale_1, scale_2)
        wide = torch.maximum(scale_1, scale_2)
        gap = location.unsqueeze(-1) - location.unsqueeze(-2)
        z = (gap.unsqueeze(-1) + narrow.unsqueeze(-1) * logit) / wide.unsqueeze(-1)
        distance = wide * ((2 * F.softplus(z) - z) @ mass)
        weight = log_weight.exp()
        spread = (weight.unsqueeze(-1) * weight.unsqueeze(-2) * distance).sum((-2, -1))
        # E|X - value| of one component is scale (2 log(1 + e^z) - z)
        z = (value.unsqueeze(-1) - location) / scale
        from_value = 2 * F.softplus(z) - z
        return (weight * scale * from_value).sum(-1) - spread / 2

    def entropy(self, raw: Tensor, points: int = 32) -> Tensor:
        """Approximate: every component's mean of -log p by the midpoint rule over ``points`` of its quantiles."""
        log_weight, location, scale = self._unpack(raw)
        q = (torch.arange(points, device=raw.device, dtype=raw.dtype) + 0.5) / points
        at = location.unsqueeze(-1) + scale.unsqueeze(-1) * torch.logit(q)
        mean = -self.log_prob(raw[..., None, None, :], at).mean(-1)
        return (log_weight.exp() * mean).sum(-1)


class Bins(Density):
    """Probabilities of B equal bins on [-R, R] with constant density in each, and exponential tails.

    The tails decay at one unit of the normalised scale.

    Args:
        bins: number B of bins.
        reach: R, half the range which they cover.

    Raises:
        ValueError: ``bins`` below 1 or ``reach`` not positive.
    """

    def __init__(self, bins: int = 64, reach: float = 5.0) -> None:
        check_value("codec.bins", bins, COUNT)
        if not 0 < reach < math.inf:
            raise ValueError(
                f"codec.reach = {reach}: expected a positive number, such as 5 standard deviations"
            )
        self.bins = bins
        self.reach = float(reach)
        self.width = 2 * float(reach) / bins
        self.num_parameters = bins + 2

    def log_prob(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return the log-density in nats."""
        place = ((value + self.reach) / self.width).floor()
        index = place.clamp(-1, self.bins).long() + 1
        log_prob = raw.log_softmax(-1)
        shape = torch.broadcast_shapes(log_prob.shape[:-1], index.shape)
        own = index.expand(shape).unsqueeze(-1)
        chosen = log_prob.expand(*shape, -1).gather(-1, own).squeeze(-1)
        outside = (value.abs() - self.reach).clamp(min=0)
        inside = (index > 0) & (index <= self.bins)
        return chosen - torch.where(
            inside,
            math.log(self.width),
            outside,
        )

    def cdf(self, raw: Tensor, value: Tensor) -> Tensor:
        """Return P(x <= value)."""
        prob = raw.softmax(-1)
        at = (value + self.reach) / self.width
        bins = torch.arange(self.bins, device=raw.device, dtype=raw.dtype)
        full = (at.unsqueeze(-1) - bins).clamp(0, 1)
        below = (value + self.reach).clamp(max=0)
        above = (value - self.reach).clamp(min=0)
        low = prob[..., 0] * torch.exp(below)
        high = -prob[..., -1] * torch.expm1(-above)
        return low + (prob[..., 1:-1] * full).sum(-1) + high

    def quantile(self, raw: Tensor, q: Tensor) -> Tensor:
        """Return the inverse of ``cdf``."""
        shape = torch.broadcast_shapes(raw.shape[:-1], q.shape)
        prob = raw.softmax(-1).expand(*shape, -1)
        q = q.expand(shape)
        cumulative = prob.cumsum(-1)
        edges = cumulative[..., :-1].contiguous()
        index = torch.searchsorted(edges, q.unsqueeze(-1).contiguous())
        own = prob.gather(-1, index)
        before = cumulative.gather(-1, index) - own
        index = index.squeeze(-1)
        limits = torch.finfo(raw.dtype)
        share = (q - before.squeeze(-1)) / own.squeeze(-1).clamp(min=limits.tiny)
        share = share.clamp(limits.tiny, 1 - limits.eps / 2)
        inside = -self.reach + self.width * (index - 1 + share)
        low_tail = -self.reach + share.log()
        high_tail = self.reach - torch.log1p(-share)
        below = torch.where(index == 0, low_tail, inside)
        return torch.where(index > self.bins, high_tail, below)

    def mean(self, raw: Tensor) -> Tensor:
        """Return the expected value."""
        return (raw.softmax(-1) * self._centres(raw)).sum(-1)

    def crps(self, raw: Tensor, value: Tensor) -> Tensor:
        """Compute the CRPS in closed form: ``E|X - value| - int F (1 - F)``."""
        prob = raw.softmax(-1)
        inner = prob[..., 1:-1]
        low = prob[..., 0]
        high = prob[..., -1]
        bins = torch.arange(self.bins, device=raw.device, dtype=raw.dtype)
        edge = -self.reach + self.width * bins
        at = value.unsqueeze(-1)
        # width of the part of a bin which is below the value
        inside = (at - edge).clamp(0, self.width)
        outside = (at - (edge + self.width / 2)).abs()
        contains_value = (inside > 0) & (inside < self.width)
        squares = inside.square() + (self.width - inside).square()
        within = squares / (2 * self.width)
        each = torch.where(contains_value, within, outside)
        distance = (inner * each).sum(-1)
        distance = distance + low * _from_exponential(-self.reach - value)
        distance = distance + high * _from_exponential(value - self.reach)
        below = low.unsqueeze(-1) + inner.cumsum(-1) - inner
        middle = below + inner / 2
        square = below.square() + below * inner + inner.square() / 3
        spread = self.width * (middle - square).sum(-1)
        spread = spread + low - low.square() / 2
        spread = spread + high - high.square() / 2
        return distance - spread

    def entropy(self, raw: Tensor) -> Tensor:
        """Compute the entropy in closed form; an exponential tail has an entropy of 1 nat."""
        log_prob = raw.log_softmax(-1)
        own = torch.full_like(log_prob, math.log(self.width))
        own[..., 0] = own[..., -1] = 1.0
        return (log_prob.exp() * (own - log_prob)).sum(-1)

    def _centres(self, raw: Tensor) -> Tensor:
        index = torch.arange(
            -1,
            self.bins + 1,
            device=raw.device,
            dtype=raw.dtype,
        )
        centre = -self.reach + self.width * (index + 0.5)
        centre[0] = -self.reach - 1
        centre[-1] = self.reach + 1
        return centre
