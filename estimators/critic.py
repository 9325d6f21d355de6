"""A learned guess of each reward from the whole text, which boundaries cannot move."""

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.core import keys
from tokenv.estimators.base import Stage


class TextCritic(Stage):
    """Subtract what a small network expects of each reward, given the text.

    ``R_{i+1} <- R_{i+1} - c(X_i, X_{i+1}, log p_early(x_{i+1} | x_<=i))``. Credited with a discount, an action's
    baseline is then ``sum_{j>=0} gamma^j c_{i+j+1}``: it reads the text to its end. The actions do not choose the text,
    so a baseline may read ahead of the decision (Mao et al. 2018, arXiv 1807.02264). No more is to be read for one
    reward: given the text, its expectation depends on ``x_<=i+1`` alone, for so do the actions and the prediction.

    c is trained by regression on the rewards themselves, through ``loss_critic``; it starts at 0.

    Bias: none, for every policy. Cost: a network of (2 D + 1) x ``hidden`` weights on every symbol, forward and
    backward; the encodings are detached. Before ``LeaveOneOut`` it changes nothing, for it is the same in all samples
    of a text; there, use ``ShrunkLeaveOneOut``.

    Args:
        width: model width D.
        hidden: units of the hidden layer.
        warmup: rollouts in which c learns and nothing is subtracted.

    Raises:
        ValueError: ``hidden`` below 1 or ``warmup`` below 0.
    """

    in_keys = [keys.REWARD, keys.ENCODING, keys.NEXT_ENCODING, keys.LOG_LIKELIHOOD_EARLY, keys.DECISION_MASK]
    out_keys = [keys.REWARD, keys.LOSS_CRITIC]

    def __init__(self, width: int, hidden: int = 64, warmup: int = 20) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden = {hidden}: expected at least 1 unit, such as 64")
        if warmup < 0:
            raise ValueError(f"warmup = {warmup}: expected 0 or more rollouts")
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(2 * width + 1, hidden), nn.GELU(), last)
        self.warmup = warmup
        self.rollouts_done: Tensor
        self.register_buffer("rollouts_done", torch.zeros((), dtype=torch.long))

    @property
    def flops(self) -> int:
        """6 per weight, 4 in the first layer, to whose input nothing goes backward."""
        first, last = (layer.weight.numel() for layer in self.network if isinstance(layer, nn.Linear))
        return 4 * first + 6 * last

    def _expected(self, tensordict: TensorDictBase) -> Tensor:
        """What the network expects, with a gradient into its parameters alone: [.., T]."""
        dtype = next(self.network.parameters()).dtype
        pair = torch.cat([tensordict[keys.ENCODING], tensordict[keys.NEXT_ENCODING]], -1).detach().to(dtype)
        early = tensordict[keys.LOG_LIKELIHOOD_EARLY].detach().to(dtype).unsqueeze(-1)
        inputs = torch.cat([F.layer_norm(pair, pair.shape[-1:]), early], -1)
        return self.network(inputs).squeeze(-1).where(tensordict[keys.DECISION_MASK], 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")`` [.., T, 1] and ``loss_critic`` [.., T]; in training mode, count the rollout."""
        reward, expected = tensordict[keys.REWARD], self._expected(tensordict)
        error = (reward.squeeze(-1) - expected).square().where(tensordict[keys.DECISION_MASK], 0.0)
        tensordict.set(keys.LOSS_CRITIC, error)
        baseline = expected.detach().where(self.rollouts_done >= self.warmup, 0.0)
        if self.training:
            self.rollouts_done += 1
        return tensordict.set(keys.REWARD, reward - baseline.to(reward.dtype).unsqueeze(-1))
