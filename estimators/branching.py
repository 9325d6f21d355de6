"""The value of single decisions, by forcing them with common random numbers."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.errors import COUNT, check_value
from tokenv.estimators.base import Stage
from tokenv.estimators.surrogates import logit_loss


def choose_positions(
    decision_mask: Tensor, positions: int, shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    """Choose one random decision in each of ``positions`` equal segments of every sequence's decisions.

    Args:
        decision_mask: True where a decision is made, [.., B, T].
        positions: number of segments; none is chosen in a segment without a decision.
        shape: shape of the result, [.., B, T].
        generator: random generator of the choice.

    Returns:
        bool of ``shape``, True where chosen.
    """
    mask = decision_mask.expand(shape)
    number = mask.cumsum(-1) - 1  # index of the decision in its sequence
    count = mask.sum(-1, keepdim=True)
    segment = torch.arange(positions, device=mask.device)
    start = segment * count // positions
    end = (segment + 1) * count // positions
    offset = torch.rand(*shape[:-1], positions, device=mask.device, generator=generator)
    pick = (start + (offset * (end - start)).long()).clamp(max=end - 1).where(end > start, -1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=mask.device)
    for picked in pick.unbind(-1):
        chosen |= mask & (number == picked.unsqueeze(-1))
    return chosen


def inverse_probability(decision_mask: Tensor, chosen: Tensor, positions: int) -> Tensor:
    """Return ``1 / P(chosen)``, the length of the segment of a chosen decision; 0 where not chosen."""
    mask = decision_mask.expand(chosen.shape)
    number = mask.cumsum(-1) - 1
    count = mask.sum(-1, keepdim=True)
    # The segment of decision n is the last one which starts at or before it.
    segment = (positions * (number + 1) - 1).div(count.clamp(min=1), rounding_mode="floor")
    length = (segment + 1) * count // positions - segment * count // positions
    return length.to(torch.get_default_dtype()).where(chosen, 0.0)


class _ForcedDecisions(Stage):
    """Base of stages which force some decisions of every sequence, and draw the later ones again."""

    samples = 2

    def __init__(self, positions: int = 1) -> None:
        super().__init__()
        check_value("positions", positions, COUNT)
        self.positions = positions
        self.unbiased = positions == 1


class BitFlip(_ForcedDecisions):
    """Force one random decision both ways and compare.

    Two samples share all random numbers; at one random position i (of d) the first is forced to 1 and the second to 0:
    ``g_i = d p_i (1 - p_i) (G_i(1) - G_i(0))``, zero elsewhere (BitFlip-1: Dimitriev & Zhou 2021, CARMS; the pathwise
    form of local expectation gradients, Titsias & Lazaro-Gredilla 2015, arXiv 1503.01494). Decisions after i are
    drawn again by the policy with the same random numbers, so that it holds for autoregressive policies too.

    Bias: none, for every policy, with ``positions=1``; with more, the decisions forced in one sequence are in each
    other's credit, and the gradient's direction may differ much. Cost: two passes through middle and decoder. The
    language model's loss weighs the two samples by p_i and 1 - p_i, which is its expectation over a_i.

    Args:
        positions: forced decisions per sequence, one in each of as many equal segments.

    Raises:
        ValueError: ``positions`` below 1.
    """

    in_keys = [keys.ADVANTAGE, keys.NOISE, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    even = True

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Use the same noise in both members of a pair, but 0 and 1 at the chosen decisions: [K, B, T]."""
        shared = noise[..., ::2, :, :]
        chosen = choose_positions(decision_mask, self.positions, shared.shape, generator)
        pair = torch.stack([shared.masked_fill(chosen, 0.0), shared.masked_fill(chosen, 1.0)], -3)
        return pair.flatten(-4, -3)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy`` [.., K, B, T], and with one position ``sample_weight``."""
        mask = tensordict[keys.DECISION_MASK]
        credit = tensordict[keys.ADVANTAGE]
        noise = tensordict[keys.NOISE]
        with_one = credit[..., ::2, :, :]
        with_zero = credit[..., 1::2, :, :]
        chosen = (noise[..., ::2, :, :] == 0) & (noise[..., 1::2, :, :] == 1)
        prob = tensordict[keys.BOUNDARY_LOGITS].detach().sigmoid()[..., ::2, :, :]
        weight = inverse_probability(mask[..., ::2, :, :], chosen, self.positions).to(prob.dtype)
        gradient = weight * prob * (1 - prob) * (with_one - with_zero)
        tensordict.set(keys.LOSS_POLICY, logit_loss(gradient.repeat_interleave(2, -3), tensordict))
        if self.positions == 1:
            chosen_prob = (
                (prob * chosen).sum(-1, keepdim=True).where(chosen.any(-1, keepdim=True), 0.5)
            )
            sample_weight = torch.stack([chosen_prob, 1 - chosen_prob], -3).flatten(-4, -3)
            tensordict.set(keys.SAMPLE_WEIGHT, sample_weight.expand(credit.shape))
        return tensordict


class Branch(_ForcedDecisions):
    """Draw normally, and once more with some boundaries forced, by a forward pass only.

    Sample 0 is the policy's own. In the others, with the same random numbers, a boundary is forced at chosen positions
    and everything after is drawn again: ``g_i = L_i p_i [a_i = 0] (G_i(forced) - G_i)``, 1/L_i the probability that i
    is chosen. Since ``E[p_i [a_i = 0]] = p_i (1 - p_i)``, this is ``p_i (1 - p_i) (Q_i(1) - Q_i(0))`` on average, the
    gradient itself (ours; vine rollouts of Schulman et al. 2015, arXiv 1502.05477, with common random numbers).

    Bias: none, for every policy, with ``positions=1``; with more, the boundaries forced in one sequence are in each
    other's credit, and gamma reduces only the effect of later ones on earlier ones. Cost: one pass and K - 1 forward
    passes through middle and decoder; the language model learns from sample 0 alone.

    Args:
        positions: forced boundaries per sequence and sample after the first, one in each of as many equal segments.

    Raises:
        ValueError: ``positions`` below 1.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.NOISE, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    reward_only = True

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Use the noise of sample 0 in all samples, but 0 at the chosen decisions of the others: [K, B, T]."""
        policy_noise = noise[..., :1, :, :]
        forced_noise = policy_noise.expand(
            *noise.shape[:-3], noise.shape[-3] - 1, *noise.shape[-2:]
        )
        chosen = choose_positions(decision_mask, self.positions, forced_noise.shape, generator)
        return torch.cat([policy_noise, forced_noise.masked_fill(chosen, 0.0)], -3)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., K, B, T], nonzero in sample 0 only."""
        mask = tensordict[keys.DECISION_MASK]
        credit = tensordict[keys.ADVANTAGE]
        policy_credit = credit[..., :1, :, :]
        forced_credit = credit[..., 1:, :, :]
        chosen = tensordict[keys.NOISE][..., 1:, :, :] == 0
        prob = tensordict[keys.BOUNDARY_LOGITS].detach().sigmoid()[..., :1, :, :]
        weight = inverse_probability(mask[..., 1:, :, :], chosen, self.positions).to(prob.dtype)
        absent = tensordict[keys.ACTION][..., :1, :, :] == 0
        gradient = (weight * prob * absent * (forced_credit - policy_credit)).mean(-3, keepdim=True)
        # The loss is a mean over all K samples, and only that of sample 0 is not zero.
        sample_gradient = torch.zeros_like(credit)
        sample_gradient[..., :1, :, :] = gradient * credit.shape[-3]
        return tensordict.set(keys.LOSS_POLICY, logit_loss(sample_gradient, tensordict))
