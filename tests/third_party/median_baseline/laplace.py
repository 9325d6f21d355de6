"""A density for series: the Laplace distribution."""

import torch
import torch.nn.functional as F

from tokenv.series.densities import Density


class Laplace(Density):
    """``p(x) = exp(-|x - m| / b) / 2b`` with the location m and the scale b = softplus(raw) + 0.01."""

    num_parameters = 2

    def split(self, raw):
        return raw[..., 0], F.softplus(raw[..., 1]) + 0.01

    def log_prob(self, raw, value):
        location, scale = self.split(raw)
        return -(value - location).abs() / scale - (2 * scale).log()

    def cdf(self, raw, value):
        location, scale = self.split(raw)
        z = (value - location) / scale
        return 0.5 - 0.5 * z.sign() * torch.expm1(-z.abs())

    def quantile(self, raw, q):
        location, scale = self.split(raw)
        return location - scale * (q - 0.5).sign() * torch.log1p(-2 * (q - 0.5).abs())

    def mean(self, raw):
        return raw[..., 0]

    def crps(self, raw, value):
        location, scale = self.split(raw)
        z = ((value - location) / scale).abs()
        return scale * (z + torch.exp(-z) - 0.75)

    def entropy(self, raw):
        return 1 + (2 * self.split(raw)[1]).log()
