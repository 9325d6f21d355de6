"""What one decision is worth, by taking it both ways with the same random numbers."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.estimators.base import Stage
from tokenv.estimators.surrogates import logit_loss


def choose_positions(
    decision_mask: Tensor, positions: int, shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    """One random decision in each of ``positions`` equal stretches of every sequence's decisions.

    Args:
        decision_mask: True where somebody decides, [.., B, T].
        positions: stretches; a stretch without a decision chooses none.
        shape: of the result, [.., B, T].
        generator: of the choice.

    Returns:
        True where chosen, bool of ``shape``.
    """
    mask = decision_mask.expand(shape)
    number = mask.cumsum(-1) - 1  # which decision of its sequence this is
    count = mask.sum(-1, keepdim=True)
    stretch = torch.arange(positions, device=mask.device)
    start, end = stretch * count // positions, (stretch + 1) * count // positions
    offset = torch.rand(*shape[:-1], positions, device=mask.device, generator=generator)
    pick = (start + (offset * (end - start)).long()).clamp(max=end - 1).where(end > start, -1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=mask.device)
    for picked in pick.unbind(-1):
        chosen |= mask & (number == picked.unsqueeze(-1))
    return chosen


def inverse_probability(decision_mask: Tensor, chosen: Tensor, positions: int) -> Tensor:
    """``1 / P(chosen)``: the length of the stretch that a chosen decision lies in; 0 where not chosen."""
    mask = decision_mask.expand(chosen.shape)
    number = mask.cumsum(-1) - 1
    count = mask.sum(-1, keepdim=True)
    # The stretch of decision n is the last one that starts at or before it.
    stretch = (positions * (number + 1) - 1).div(count.clamp(min=1), rounding_mode="floor")
    length = (stretch + 1) * count // positions - stretch * count // positions
    return length.to(torch.get_default_dtype()).where(chosen, 0.0)


class BitFlip(Stage):
    """Force one random decision both ways and compare.

    Two samples share all random numbers; at one random position i (of d) the first is forced to 1 and the second to 0:
    ``g_i = d p_i (1 - p_i) (G_i(1) - G_i(0))``, zero elsewhere (BitFlip-1: Dimitriev & Zhou 2021, CARMS; the pathwise
    form of local expectation gradients, Titsias & Lazaro-Gredilla 2015, arXiv 1503.01494). Decisions after i are
    drawn anew by the policy with the same random numbers, so that it holds for autoregressive policies too.

    Bias: none, for every policy, with ``positions=1``; with more, the decisions forced in one sequence are in each
    other's credit, and the gradient may turn far. Cost: two passes through middle and decoder. The language model's
    loss weighs the two samples by p_i and 1 - p_i, which is its expectation over a_i.

    Args:
        positions: forced decisions per sequence, one in each of as many equal stretches.

    Raises:
        ValueError: ``positions`` below 1.
    """

    in_keys = [keys.ADVANTAGE, keys.NOISE, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    samples = 2
    even = True

    def __init__(self, positions: int = 1) -> None:
        super().__init__()
        if positions < 1:
            raise ValueError(f"positions = {positions}: expected at least 1 forced decision per sequence")
        self.positions = positions
        self.unbiased = positions == 1

    def couple(self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None) -> Tensor:
        """The same noise in both members of a pair, but 0 and 1 at the chosen decisions: [K, B, T]."""
        shared = noise[..., ::2, :, :]
        chosen = choose_positions(decision_mask, self.positions, shared.shape, generator)
        pair = torch.stack([shared.masked_fill(chosen, 0.0), shared.masked_fill(chosen, 1.0)], -3)
        return pair.flatten(-4, -3)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy`` [.., K, B, T], and ``sample_weight`` where one decision is forced."""
        mask, credit = tensordict[keys.DECISION_MASK], tensordict[keys.ADVANTAGE]
        noise = tensordict[keys.NOISE]
        with_one, with_zero = credit[..., ::2, :, :], credit[..., 1::2, :, :]
        chosen = (noise[..., ::2, :, :] == 0) & (noise[..., 1::2, :, :] == 1)
        prob = tensordict[keys.BOUNDARY_LOGITS].detach().sigmoid()[..., ::2, :, :]
        weight = inverse_probability(mask[..., ::2, :, :], chosen, self.positions).to(prob.dtype)
        gradient = weight * prob * (1 - prob) * (with_one - with_zero)
        tensordict.set(keys.LOSS_POLICY, logit_loss(gradient.repeat_interleave(2, -3), tensordict))
        if self.positions == 1:
            share = (prob * chosen).sum(-1, keepdim=True).where(chosen.any(-1, keepdim=True), 0.5)
            both = torch.stack([share, 1 - share], -3).flatten(-4, -3)
            tensordict.set(keys.SAMPLE_WEIGHT, both.expand(credit.shape))
        return tensordict


class Branch(Stage):
    """Draw normally, and once more with some boundaries forced, by a forward pass only.

    Sample 0 is the policy's own. In the others, with the same random numbers, a boundary is forced at chosen positions
    and everything after is drawn anew: ``g_i = L_i p_i [a_i = 0] (G_i(forced) - G_i)``, 1/L_i the chance that i is
    chosen. Since ``E[p_i [a_i = 0]] = p_i (1 - p_i)``, this is ``p_i (1 - p_i) (Q_i(1) - Q_i(0))`` on average, the
    gradient itself (ours; vine rollouts of Schulman et al. 2015, arXiv 1502.05477, with common random numbers).

    Bias: none, for every policy, with ``positions=1``; with more, the boundaries forced in one sequence are in each
    other's credit, and gamma fades only the later ones' share in the earlier ones'. Cost: one pass and K - 1 forward
    passes through middle and decoder; the language model learns from sample 0 alone.

    Args:
        positions: forced boundaries per sequence and further sample, one in each of as many equal stretches.

    Raises:
        ValueError: ``positions`` below 1.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.NOISE, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    samples = 2
    reward_only = True

    def __init__(self, positions: int = 1) -> None:
        super().__init__()
        if positions < 1:
            raise ValueError(f"positions = {positions}: expected at least 1 forced boundary per sequence")
        self.positions = positions
        self.unbiased = positions == 1

    def couple(self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None) -> Tensor:
        """Sample 0's noise everywhere, 0 at the chosen decisions of the further samples: [K, B, T]."""
        own = noise[..., :1, :, :]
        further = own.expand(*noise.shape[:-3], noise.shape[-3] - 1, *noise.shape[-2:])
        chosen = choose_positions(decision_mask, self.positions, further.shape, generator)
        return torch.cat([own, further.masked_fill(chosen, 0.0)], -3)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., K, B, T], all of it at sample 0's logits."""
        mask, credit = tensordict[keys.DECISION_MASK], tensordict[keys.ADVANTAGE]
        own, further = credit[..., :1, :, :], credit[..., 1:, :, :]
        chosen = tensordict[keys.NOISE][..., 1:, :, :] == 0
        prob = tensordict[keys.BOUNDARY_LOGITS].detach().sigmoid()[..., :1, :, :]
        weight = inverse_probability(mask[..., 1:, :, :], chosen, self.positions).to(prob.dtype)
        absent = tensordict[keys.ACTION][..., :1, :, :] == 0
        gradient = (weight * prob * absent * (further - own)).mean(-3, keepdim=True)
        # The loss is a mean over all K samples, and only sample 0 carries it.
        samples = credit.shape[-3]
        share = torch.zeros_like(credit)
        share[..., :1, :, :] = gradient * samples
        return tensordict.set(keys.LOSS_POLICY, logit_loss(share, tensordict))
