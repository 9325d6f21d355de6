"""What is subtracted from an action's credit because it would have come anyway."""

import torch
from tensordict import TensorDictBase

from tokenv.core import keys
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import any_over, leave_one_out_mean, masked_mean, mean_over, mean_over_batch


class BatchCentre(Stage):
    """Centre the advantage over the batch, position by position.

    ``A_{i,b} = G_{i,b} - mean_b' G_{i,b'}`` (arXiv 2602.13940, eq. 17).

    Bias: the mean includes the sequence itself, which scales the expected gradient by (B - 1) / B at positions that
    B sequences reach; its direction stays the true one. With one sequence nothing is left. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        mean = mean_over_batch(advantage, tensordict[keys.DECISION_MASK])
        return tensordict.set(keys.ADVANTAGE, advantage - mean)


class LeaveOneOutBatch(Stage):
    """Subtract the mean over the other sequences of the batch, position by position.

    ``A_{i,b} = G_{i,b} - 1/(B-1) sum_{b' != b} G_{i,b'}``: ``BatchCentre`` times B / (B - 1).

    Bias: none, for every policy: the other sequences' actions are independent of this one's. Where no other sequence
    reaches a position, nothing is subtracted. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        others = leave_one_out_mean(advantage, tensordict[keys.DECISION_MASK], -2)
        return tensordict.set(keys.ADVANTAGE, advantage - others)


class LeaveOneOut(Stage):
    """Subtract the mean over the other samples of the same sequence (RLOO).

    ``A_k = G_k - 1/(K-1) sum_{k' != k} G_{k'}`` (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!";
    Ahmadian et al. 2024, arXiv 2402.14740). What makes a text easy or hard is the same in all samples and vanishes.

    Bias: none, for every policy: the samples are independent given the text. Cost: K passes through middle and
    decoder, one through the encoder. With ``reward_only`` the samples after the first are forward passes without a
    backward pass, and the language model learns from the first alone; the policy learns from all.

    Args:
        reward_only: whether only the first sample trains the language model.
    """

    in_keys = [keys.ADVANTAGE]
    out_keys = [keys.ADVANTAGE]
    samples = 2

    def __init__(self, reward_only: bool = False) -> None:
        super().__init__()
        self.reward_only = reward_only

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., K, B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        samples = advantage.shape[-3]
        centred = advantage - advantage.mean(-3, keepdim=True)
        return tensordict.set(keys.ADVANTAGE, centred * (samples / (samples - 1)))


class ShrunkLeaveOneOut(LeaveOneOut):
    """Subtract only as much of the other samples' mean as has proved useful.

    ``A_k = G_k - beta M_k``, M_k the mean over the other samples, ``beta = E[G_k M_k] / E[M_k^2]``, the factor of least
    variance, in [0, 1], from running means over earlier rollouts; 1 before the first. The more of what the samples
    share earlier parts (a critic, the early exit) have explained, the less a mean of few can add (shrinkage, as in Zeng
    et al. 2025, arXiv 2511.03710, who take the factor from the batch itself).

    Bias: none, for every policy: beta comes from earlier rollouts only. Cost: as ``LeaveOneOut``; remembers two
    numbers, which a checkpoint keeps.

    Args:
        reward_only: see ``LeaveOneOut``.
        decay: of the running means, in [0, 1).

    Raises:
        ValueError: ``decay`` outside [0, 1).
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]

    def __init__(self, reward_only: bool = False, decay: float = 0.95) -> None:
        super().__init__(reward_only)
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: expected a number in [0, 1), such as 0.95")
        self.decay = decay
        self.product: torch.Tensor
        self.square: torch.Tensor
        self.register_buffer("product", torch.zeros(()))
        self.register_buffer("square", torch.zeros(()))

    @property
    def beta(self) -> torch.Tensor:
        """The factor for the next rollout: []."""
        known = self.square > 0
        return torch.where(known, self.product / self.square.where(known, 1.0), 1.0).clamp(0, 1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage`` [.., K, B, T]; in training mode, learn beta from it afterwards."""
        advantage, mask = tensordict[keys.ADVANTAGE], tensordict[keys.DECISION_MASK]
        samples = advantage.shape[-3]
        others = (advantage.sum(-3, keepdim=True) - advantage) / (samples - 1)
        centred = advantage - self.beta.to(advantage.dtype) * others
        if self.training:
            for mean, values in ((self.product, advantage * others), (self.square, others.square())):
                mean.lerp_(masked_mean(values, mask).to(mean.dtype), 1 - self.decay)
        return tensordict.set(keys.ADVANTAGE, centred)


class GroupRelative(Stage):
    """Standardise over the samples of one sequence (GRPO's group-relative advantage, as in ReinPatch).

    ``A_k = (G_k - mean_k' G_k') / (std_k' G_k' + epsilon)`` (Shao et al. 2024, arXiv 2402.03300; for patches arXiv
    2603.26097), position by position.

    Bias: the mean includes the sample itself (a factor (K - 1) / K), and dividing by the group's own standard
    deviation weighs decisions by their spread, which changes the gradient's direction. Cost: as ``LeaveOneOut``.

    Args:
        epsilon: added to the standard deviation, in nats.
        reward_only: whether only the first sample trains the language model; see ``LeaveOneOut``.
        centred_only: leave the standard deviation out, so that only the factor (K - 1) / K remains (Liu et al. 2025,
            arXiv 2503.20783).

    Raises:
        ValueError: ``epsilon`` is not positive.
    """

    in_keys = [keys.ADVANTAGE]
    out_keys = [keys.ADVANTAGE]
    samples = 2
    unbiased = False

    def __init__(self, epsilon: float = 1e-2, reward_only: bool = False, centred_only: bool = False) -> None:
        super().__init__()
        self.reward_only, self.centred_only = reward_only, centred_only
        if not epsilon > 0:
            raise ValueError(f"epsilon = {epsilon}: expected a positive number of nats, such as 0.01")
        self.epsilon = epsilon

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Standardise ``advantage``: [.., K, B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        centred = advantage - advantage.mean(-3, keepdim=True)
        if self.centred_only:
            return tensordict.set(keys.ADVANTAGE, centred)
        spread = centred.square().mean(-3, keepdim=True).sqrt()
        return tensordict.set(keys.ADVANTAGE, centred / (spread + self.epsilon))


class MovingAverage(Stage):
    """Subtract a running mean of earlier batches' credits, position by position.

    ``A_i = G_i - m_i``, and only then ``m_i <- decay m_i + (1 - decay) mean_b G_{i,b}`` (Williams 1992; Mnih & Gregor
    2014, arXiv 1402.0030), with the zero start divided out as Adam does.

    Bias: none, for every policy: m comes from earlier rollouts only. (Updating first would leak a rollout's own
    return into its baseline.) Cost: O(T) elementwise; remembers T numbers, which a checkpoint keeps.

    Args:
        seq_len: symbols N of a sequence.
        decay: in [0, 1).

    Raises:
        ValueError: ``decay`` outside [0, 1).
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, seq_len: int, decay: float = 0.95) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: expected a number in [0, 1), such as 0.95")
        self.decay = decay
        self.mean_T: torch.Tensor
        self.weight_T: torch.Tensor
        self.register_buffer("mean_T", torch.zeros(seq_len - 1))
        self.register_buffer("weight_T", torch.zeros(seq_len - 1))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., T]; in training mode, learn from it afterwards."""
        advantage, mask = tensordict[keys.ADVANTAGE], tensordict[keys.DECISION_MASK]
        baseline_T = self.mean_T / self.weight_T.where(self.weight_T > 0, 1.0)
        if self.training:
            rest = tuple(range(advantage.dim() - 1))
            reached_T = any_over(mask, rest)
            new_T = mean_over(advantage, mask, rest).flatten()
            share_T = torch.where(reached_T, 1 - self.decay, 0.0).to(self.mean_T.dtype)
            self.mean_T.add_(share_T * (new_T - self.mean_T))
            self.weight_T.add_(share_T * (1 - self.weight_T))
        return tensordict.set(keys.ADVANTAGE, advantage - baseline_T.to(advantage.dtype))
