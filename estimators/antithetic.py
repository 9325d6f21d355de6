"""Coupled samples for policies which ignore their past: ARM, DisARM, ARMS.

In an autoregressive policy the two chains of a pair diverge at their first different decision. Later decisions then
have different probabilities in each, and the assumptions of the formulas do not hold: enumeration shows biases of 20%
to 40%. So these stages reject every policy with a window other than 0; those in ``branching`` are valid for all.
"""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.estimators.base import Stage
from tokenv.estimators.surrogates import logit_loss


class _Coupled(Stage):
    """A stage which couples samples and turns their credits into a gradient of the logits."""

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.BOUNDARY_LOGITS, keys.NOISE, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    requires_factorised_policy = True
    samples = 2

    def gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return estimates of the logits' gradient, whose mean over samples is the estimate: [.., K, B, T]."""
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., K, B, T], 0 where no decision is made."""
        return tensordict.set(keys.LOSS_POLICY, logit_loss(self.gradient(tensordict), tensordict))


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return first and second members of the pairs: [.., K, B, T] -> two of [.., K/2, 1, B, T]."""
    first, second = x.unflatten(-3, (-1, 2)).split(1, -3)
    return first, second


def _to_samples(pair: Tensor) -> Tensor:
    """Assign the estimate of a pair to both members: [.., K/2, 1, B, T] -> [.., K, B, T]."""
    return pair.expand(*pair.shape[:-3], 2, *pair.shape[-2:]).flatten(-4, -3)


class ARM(_Coupled):
    """Augment-REINFORCE-merge: antithetic pairs, with noise u and 1 - u.

    ``g_i = (G_i(1 - u) - G_i(u)) (u_i - 1/2)``, where G(u) is the credit of ``a = [u < p]`` (Yin & Zhou 2019, arXiv
    1807.11143). For policies that ignore their past a return-to-go is a valid credit: earlier rewards do not depend
    on u_i.

    Bias: none for window 0; rejected otherwise. Cost: two passes through middle and decoder a pair.
    """

    even = True

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Replace the noise of every second sample by 1 less that of the sample before: [K, B, T]."""
        first, _ = _pairs(noise)
        return torch.cat([first, 1 - first], -3).flatten(-4, -3)

    def gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return the estimate of each pair, for both members: [.., K, B, T]."""
        first, second = _pairs(tensordict[keys.ADVANTAGE])
        noise, _ = _pairs(tensordict[keys.NOISE])
        return _to_samples((second - first) * (noise - 0.5))


class DisARM(ARM):
    """ARM with the noise integrated out, given the actions of both members.

    ``g_i = 1/2 (G_i - G'_i) (a_i - a'_i) sigmoid(|l_i|)`` (Dong, Mnih & Tucker 2020, arXiv 2006.10680; U2G of Yin et
    al. 2020 is the same). Zero where both actions are equal.

    Bias: none for window 0; rejected otherwise. Variance never above ARM's. Cost: as ARM.
    """

    def gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return the estimate of each pair, for both members: [.., K, B, T]."""
        first, second = _pairs(tensordict[keys.ADVANTAGE])
        action, other = _pairs(tensordict[keys.ACTION])
        logits, _ = _pairs(tensordict[keys.BOUNDARY_LOGITS].detach())
        return _to_samples(0.5 * (first - second) * (action - other) * logits.abs().sigmoid())


def joint_probability(prob: Tensor, samples: int) -> Tensor:
    """Return ``P(a_k = a_k' = 1)`` of two samples of the Dirichlet copula: ``max(2 p^(1/(K-1)) - 1, 0)^(K-1)``."""
    power = samples - 1
    return (2 * prob ** (1 / power) - 1).clamp(min=0) ** power


class ARMS(_Coupled):
    """K mutually antithetic samples, and leave-one-out corrected for their correlation.

    ``u_k = (1 - d_k)^(K-1)`` with d ~ Dirichlet(1, ..., 1), each uniform, all negatively correlated;
    ``g_i = rho_i / (K - 1) sum_k (G_{k,i} - mean_k' G_{k',i}) a_{k,i}``, ``rho = p (1 - p) / (p - P(a_k = a_k' = 1))``
    (Dimitriev & Zhou 2021, arXiv 2105.14141, who reflect the copula where p > 1/2; here it is the same for all p, which
    is a slightly weaker coupling for these if K > 2).

    Bias: none for window 0; rejected otherwise. Cost: K passes through middle and decoder.
    """

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Couple the noise by a Dirichlet draw, normalised exponentials: [K, B, T]."""
        exponential = -torch.log1p(-noise.double())
        share = exponential / exponential.sum(-3, keepdim=True).clamp(min=1e-300)
        # Rounding to the noise's precision must not reach 0 or 1, which force an action.
        tiny = torch.finfo(noise.dtype).eps / 2
        return ((1 - share) ** (noise.shape[-3] - 1)).to(noise.dtype).clamp(tiny, 1 - tiny)

    def gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return the terms of the samples, whose mean over K is the estimate: [.., K, B, T]."""
        credit = tensordict[keys.ADVANTAGE]
        action = tensordict[keys.ACTION]
        samples = credit.shape[-3]
        prob = tensordict[keys.BOUNDARY_LOGITS].detach().sigmoid()
        rho = prob * (1 - prob) / (prob - joint_probability(prob, samples)).clamp(min=1e-12)
        return rho * (credit - credit.mean(-3, keepdim=True)) * action * (samples / (samples - 1))
