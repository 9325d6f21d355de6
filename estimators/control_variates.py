"""Control variates from a relaxed forward pass: REBAR and RELAX."""

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.core import keys
from tokenv.core.distributed import uniform_like
from tokenv.core.errors import POSITIVE, check_value
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import conditional_noise
from tokenv.estimators.surrogates import logit_loss

RELAXED_LOGITS = "relaxed_logits"  # z and z~ of every decision: float [.., T, 2]


class REBAR(Stage):
    """Score function less a relaxed control variate, whose expected gradient is added back by reparametrisation.

    With ``z = l - logit(u)``, ``a = [z > 0]``, and z~ a second draw of z given a::

        g = (G(a) - c(z~)) d log pi(a) / dl + dc(z)/dl - dc(z~)/dl,    c(z) = eta sum_t R_t(sigmoid(z / tau))

    where R_t(s) is the reward under relaxed boundaries s: the pass in which every byte is a token of strength s, and 0
    symbols from its boundary with ``model.elapsed`` (Tucker et al. 2017, arXiv 1703.07370). eta is learned by
    minimising g's variance. Credits are undiscounted: a discounted c for each position would need a backward pass of
    its own.

    Bias: none for window 0; rejected otherwise, because l_i is a discontinuous function of earlier actions and the
    reparametrised gradient misses the discontinuities. Cost: one hard pass and two relaxed ones (middle layers on N
    instead of M tokens), and a backward pass through both.

    Args:
        temperature: tau, positive.
        scale: initial eta.

    Raises:
        ValueError: ``temperature`` is not positive.
    """

    in_keys = [
        keys.ADVANTAGE,
        keys.ACTION,
        keys.BOUNDARY_LOGITS,
        keys.DECISION_MASK,
        keys.LOG_LIKELIHOOD_RELAXED,
        keys.LOG_LIKELIHOOD_EARLY,
    ]
    out_keys = [keys.LOSS_POLICY]
    requires_factorised_policy = True

    def __init__(self, temperature: float = 0.5, scale: float = 1.0) -> None:
        super().__init__()
        check_value("temperature", temperature, POSITIVE)
        self.temperature = temperature
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def relaxations(
        self,
        drawn: TensorDictBase,
        decision_mask: Tensor,
        noise: Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return sigmoid(z / tau) and sigmoid(z~ / tau); the action where no decision is made: [.., T, 2]."""
        logits = drawn[keys.BOUNDARY_LOGITS]
        action = drawn[keys.ACTION]
        uniform = uniform_like(noise, generator)
        prob = logits.sigmoid()
        # Noise of exactly 0 or 1 would make z infinite, and the gradient of a network which reads z NaN.
        tiny = torch.finfo(noise.dtype).eps
        both = torch.stack([noise, conditional_noise(prob, action, uniform)], -1).clamp(
            tiny, 1 - tiny
        )
        relaxed = logits.unsqueeze(-1) - torch.logit(both)
        drawn.set(RELAXED_LOGITS, relaxed)
        soft = (relaxed / self.temperature).sigmoid()
        return torch.where(decision_mask.unsqueeze(-1), soft, action.unsqueeze(-1).to(soft.dtype))

    def extra(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor] | None:
        """Return a further control variate, r(z~) and dr(z)/dl - dr(z~)/dl with a gradient into r's parameters."""
        return None

    def gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return g of every logit, with a gradient into eta (and r) only: [.., T]."""
        logits = tensordict[keys.BOUNDARY_LOGITS]
        mask = tensordict[keys.DECISION_MASK]
        early = tensordict[keys.LOG_LIKELIHOOD_EARLY].detach().unsqueeze(-1)
        relative = tensordict[keys.LOG_LIKELIHOOD_RELAXED] - early
        contrast = (relative[..., 0] - relative[..., 1]).sum()
        (pathwise,) = torch.autograd.grad(contrast, logits)
        conditional = relative[..., 1].detach()
        control = conditional.flip(-1).cumsum(-1).flip(-1)
        score = (tensordict[keys.ACTION] - logits.detach().sigmoid()).where(mask, 0.0)
        gradient = tensordict[keys.ADVANTAGE] * score - self.scale * (control * score - pathwise)
        extra = self.extra(tensordict)
        if extra is not None:
            value, slope = extra
            gradient = gradient - value * score + slope
        return gradient.where(mask, 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., T]. Its gradient by the control variate's parameters is that of g's variance."""
        gradient = self.gradient(tensordict)
        square = gradient.square()
        return tensordict.set(
            keys.LOSS_POLICY, logit_loss(gradient, tensordict) + square - square.detach()
        )


class RELAX(REBAR):
    """REBAR with a learned term: ``c_i(z) = eta sum_t R_t(sigmoid(z / tau)) + r(X_i, z_i)``, r a small network.

    r is trained, as eta is, on a single-sample estimate of g's variance (Grathwohl et al. 2018, arXiv 1711.00123).

    Bias: none for window 0; rejected otherwise. Cost: as ``REBAR``, and two passes through r.

    Args:
        width: model width D.
        temperature: tau, positive.
        scale: initial eta.
        hidden: hidden units of r.
    """

    def __init__(
        self, width: int, temperature: float = 0.5, scale: float = 1.0, hidden: int = 32
    ) -> None:
        super().__init__(temperature, scale)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(width + 1, hidden), nn.Tanh(), last)

    @property
    def flops(self) -> int:
        """FLOPs of r at z and at z~, of its slopes, and of the gradient of both by its weights."""
        first, last = (
            layer.weight.numel() for layer in self.network if isinstance(layer, nn.Linear)
        )
        return 2 * (12 * first + 10 * last)

    def extra(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return r(X_i, z~_i) and the difference of slopes, both [.., T]."""
        dtype = self.scale.dtype
        encoding = tensordict[keys.ENCODING].detach().to(dtype)
        # dz / dl = 1, and autograd computes dz~ / dl through the conditional noise.
        logits = tensordict[keys.BOUNDARY_LOGITS].detach().requires_grad_()
        mask = tensordict[keys.DECISION_MASK]
        shift = tensordict[RELAXED_LOGITS].detach() - logits.detach().unsqueeze(-1)
        free = logits + shift[..., 0]
        action = tensordict[keys.ACTION]
        prob = logits.sigmoid()
        old = logits.detach().sigmoid()
        given = torch.sigmoid(-shift[..., 1])  # u given a
        within = torch.where(action.bool(), given / old, (given - old) / (1 - old))
        tied = logits - torch.logit(conditional_noise(prob, action, within).clamp(1e-7, 1 - 1e-7))
        both = torch.stack([free, tied], -1).where(mask.unsqueeze(-1), 0.0).to(dtype)
        inputs = torch.cat([encoding.unsqueeze(-2).expand(*both.shape, -1), both.unsqueeze(-1)], -1)
        value = self.network(inputs).squeeze(-1)
        contrast = (value[..., 0] - value[..., 1]).sum()
        (slope,) = torch.autograd.grad(contrast, logits, create_graph=True)
        return value[..., 1], slope
