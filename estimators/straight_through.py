"""Straight-through estimators: the model's gradient by a boundary, passed to the logits. Biased, and without a reward.

Their chains' ``trains_through`` is ``likelihood``: ``loss_policy`` is zero, and ``loss.policy`` has no effect on them.

The pooling reads ``a_i + s_i (l_i - stop(l_i))``: the value of the drawn action, and a slope s_i by which the
boundary's gradient is multiplied for the logit. The estimators differ in s_i alone.
"""

from abc import abstractmethod

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.errors import COUNT, POSITIVE, check_value
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import conditional_noise


class PathGradient(Stage):
    """The policy's gradient is that of the language model's loss; nothing is estimated.

    For agents which write a differentiable ``boundary`` themselves (H-Net's router with confidence straight-through,
    Hwang et al. 2025, arXiv 2507.07955).

    Bias: that of the agent's relaxation. Cost: one forward and one backward pass.
    """

    in_keys = [keys.BOUNDARY_PROB]
    out_keys: list[str] = []
    unbiased = False
    trains_through = "likelihood"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rollout unchanged."""
        return tensordict


class _Relaxed(PathGradient):
    """Common to all stages which relax the drawn boundaries."""

    @abstractmethod
    def slope(self, logits: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """Return d boundary / d logit at each decision: all [.., T]."""

    def relax(self, drawn: TensorDictBase, decision_mask: Tensor, noise: Tensor) -> Tensor:
        """Return boundaries with the actions' values and a gradient into the logits: [.., T]."""
        logits = drawn[keys.BOUNDARY_LOGITS]
        action = drawn[keys.ACTION]
        with torch.no_grad():
            slope = self.slope(logits, action, noise).where(decision_mask, 0.0)
        return action + slope * (logits - logits.detach())


class StraightThrough(_Relaxed):
    """``s = p (1 - p)``: the boundary's gradient is used as its probability's (Bengio et al. 2013, arXiv 1308.3432).

    Bias: none only if the model is linear in each boundary. Valid for every policy in the same sense; with a window,
    the effect of a_i on later logits is left out. Cost: one pass, but with ``model.pooling: select`` the relaxed one,
    in which every byte is a token.
    """

    def slope(self, logits: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """Return p (1 - p): [.., T]."""
        prob = logits.sigmoid()
        return prob * (1 - prob)


class GumbelSigmoid(_Relaxed):
    """``s = y (1 - y) / tau`` at the relaxed sample ``y = sigmoid((l - logit u) / tau)`` of the action's own noise.

    Straight-through Gumbel (Jang et al. 2017, arXiv 1611.01144; Maddison et al. 2017, arXiv 1611.00712), as Nawrot et
    al. 2023 (arXiv 2211.09761) use it for boundaries with tau = 0.5: ``hard - stop(soft) + soft``.

    Bias: that of linearising at the drawn action; falls with tau while variance grows. Cost: as ``StraightThrough``.

    Args:
        temperature: tau, positive.

    Raises:
        ValueError: ``temperature`` is not positive.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        check_value("temperature", temperature, POSITIVE)
        self.temperature = temperature

    def slope(self, logits: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """Return y (1 - y) / tau: [.., T]."""
        soft = ((logits - torch.logit(noise)) / self.temperature).sigmoid()
        return soft * (1 - soft) / self.temperature


class ReinMax(_Relaxed):
    """``s = |a - p| / 2``: second order instead of first (Liu et al. 2023, arXiv 2304.08612), for Bernoulli decisions.

    Its expectation is ``p (1 - p) (f'(0) + f'(1)) / 2``, the trapezoidal rule for f(1) - f(0).

    Bias: none only if the model is quadratic in each boundary. Cost: as ``StraightThrough``.
    """

    def slope(self, logits: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """Return |a - p| / 2: [.., T]."""
        return (action - logits.sigmoid()).abs() / 2


class GumbelRao(GumbelSigmoid):
    """``GumbelSigmoid`` averaged over K relaxed samples which all agree with the drawn action.

    Rao-Blackwellised straight-through Gumbel (Paulus, Maddison & Krause 2021, arXiv 2010.04838): the same expectation,
    less variance.

    Bias: as ``GumbelSigmoid``. Cost: the same passes; K elementwise draws.

    Args:
        temperature: tau, positive.
        draws: number K of relaxed samples.

    Raises:
        ValueError: ``temperature`` not positive or ``draws`` below 1.
    """

    def __init__(self, temperature: float = 0.5, draws: int = 16) -> None:
        super().__init__(temperature)
        check_value("draws", draws, COUNT)
        self.draws = draws

    def slope(self, logits: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """Return the mean of y (1 - y) / tau: [.., T]. The draws are stratified over the noise which gives a."""
        prob = logits.sigmoid()
        within = torch.where(action.bool(), noise / prob, (noise - prob) / (1 - prob)).clamp(0, 1)
        total = torch.zeros_like(prob)
        for draw in range(self.draws):
            agreeing = conditional_noise(prob, action, (within + draw) / self.draws)
            total += super().slope(logits, action, agreeing.clamp(1e-7, 1 - 1e-7))
        return total / self.draws
