"""Baselines, which are subtracted from an action's credit to lower its variance.

Each logs ``explained_variance``: ``1 - Var(A) / Var(G)`` over all decisions, A being what is left of the credit G.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.core import keys
from tokenv.core.errors import COUNT, DECAY, NOT_NEGATIVE, POSITIVE, check_value
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import (
    leave_one_out_mean,
    log_explained_variance,
    masked_mean,
    mean_over_batch,
    weighted_sums,
)


def _set_centred(tensordict: TensorDictBase, centred: Tensor) -> TensorDictBase:
    """Write what a baseline leaves of the advantage, and the share of the variance which it explains."""
    log_explained_variance(tensordict, tensordict[keys.ADVANTAGE], centred)
    return tensordict.set(keys.ADVANTAGE, centred)


class BatchCentre(Stage):
    """Centre the advantage over the batch, position by position.

    ``A_{i,b} = G_{i,b} - mean_b' G_{i,b'}`` (arXiv 2602.13940, eq. 17).

    Bias: the mean includes the sequence itself, which scales the expected gradient by (B - 1) / B at positions in
    B sequences. Where all sequences have one length its direction stays the true one; where lengths differ, positions
    of few sequences are scaled down more, which turns it (``1 - cosine`` of 0.14 for two texts of three and one
    decisions, by enumeration). With one sequence the result is 0. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        mean = mean_over_batch(advantage, tensordict[keys.DECISION_MASK])
        return _set_centred(tensordict, advantage - mean)


class RewardCentre(Stage):
    """Centre the reward over the batch, position by position, before it is credited.

    ``R_{i,b} <- R_{i,b} - mean_b' R_{i,b'}`` over the sequences which have a symbol there, as the authors of arXiv
    2602.13940 released it. Discounted, this is ``BatchCentre`` if all sequences have one length: both are linear. Where
    lengths differ, a reward is compared with those at its own position only.

    Bias: as ``BatchCentre``; with one sequence the result is 0. Cost: O(T) elementwise.
    """

    in_keys = [keys.REWARD, keys.DECISION_MASK]
    out_keys = [keys.REWARD]
    unbiased = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``("next", "reward")``: [.., B, T, 1]; 0 in the padding."""
        reward = tensordict[keys.REWARD].squeeze(-1)
        mask = tensordict[keys.DECISION_MASK]
        centred = (reward - mean_over_batch(reward, mask)).where(mask, 0.0)
        log_explained_variance(tensordict, reward, centred)
        return tensordict.set(keys.REWARD, centred.unsqueeze(-1))


class LeaveOneOutBatch(Stage):
    """Subtract the mean over the other sequences of the batch, position by position.

    ``A_{i,b} = G_{i,b} - 1/(B-1) sum_{b' != b} G_{i,b'}``: ``BatchCentre`` times B / (B - 1).

    Bias: none, for every policy: the other sequences' actions are independent of this one's. At positions beyond the
    end of all other sequences nothing is subtracted. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        others = leave_one_out_mean(advantage, tensordict[keys.DECISION_MASK], -2)
        return _set_centred(tensordict, advantage - others)


class LeaveOneOutSamples(Stage):
    """Subtract the mean over the other samples of the same sequence (RLOO).

    ``A_k = G_k - 1/(K-1) sum_{k' != k} G_{k'}`` (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!";
    Ahmadian et al. 2024, arXiv 2402.14740). The difficulty of a text is the same in all samples and cancels.

    Bias: none, for every policy: the samples are independent given the text. Cost: K passes through middle and
    decoder, one through the encoder. With ``reward_only`` the samples after the first are forward passes without a
    backward pass, and the language model learns from the first alone; the policy learns from all.

    Args:
        reward_only: whether only the first sample trains the language model.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
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
        return _set_centred(tensordict, centred * (samples / (samples - 1)))


class ShrunkLeaveOneOut(LeaveOneOutSamples):
    """Subtract the mean over the other samples, multiplied by a learned factor.

    ``A_k = G_k - beta M_k``, M_k the mean over the other samples, ``beta = E[G_k M_k] / E[M_k^2]``, the factor of least
    variance, in [0, 1], from running means over earlier rollouts; 1 before the first. The more of the samples' common
    variation earlier stages (a critic, the early exit) explain, the less the mean of a few samples improves (shrinkage,
    as in Zeng et al. 2025, arXiv 2511.03710, who compute the factor from the batch itself).

    Bias: none, for every policy: beta depends on earlier rollouts only. Cost: as ``LeaveOneOutSamples``; its state is
    two numbers, which checkpoints hold.

    Args:
        reward_only: see ``LeaveOneOutSamples``.
        decay: decay of the running means, in [0, 1).

    Raises:
        ValueError: ``decay`` outside [0, 1).
    """

    def __init__(self, reward_only: bool = False, decay: float = 0.95) -> None:
        super().__init__(reward_only)
        check_value("decay", decay, DECAY)
        self.decay = decay
        self.product: Tensor = nn.Buffer(torch.zeros(()))
        self.square: Tensor = nn.Buffer(torch.zeros(()))

    @property
    def beta(self) -> Tensor:
        """Factor for the next rollout: []."""
        known = self.square > 0
        return torch.where(known, self.product / self.square.where(known, 1.0), 1.0).clamp(0, 1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage`` [.., K, B, T]; in training mode, then update beta."""
        advantage = tensordict[keys.ADVANTAGE]
        mask = tensordict[keys.DECISION_MASK]
        samples = advantage.shape[-3]
        others = (advantage.sum(-3, keepdim=True) - advantage) / (samples - 1)
        centred = advantage - self.beta.to(advantage.dtype) * others
        if self.training:
            for mean, values in (
                (self.product, advantage * others),
                (self.square, others.square()),
            ):
                mean.lerp_(masked_mean(values, mask).to(mean.dtype), 1 - self.decay)
        return _set_centred(tensordict, centred)


class GroupRelative(Stage):
    """Standardise over the samples of one sequence (GRPO's group-relative advantage, as in ReinPatch).

    ``A_k = (G_k - mean_k' G_k') / (std_k' G_k' + epsilon)`` (Shao et al. 2024, arXiv 2402.03300; for patches arXiv
    2603.26097), position by position.

    Bias: the mean includes the sample itself (a factor (K - 1) / K), and dividing by the group's own standard
    deviation weighs decisions by their spread, which changes the gradient's direction. Cost: as ``LeaveOneOutSamples``.

    Args:
        epsilon: added to the standard deviation, in nats.
        reward_only: whether only the first sample trains the language model; see ``LeaveOneOutSamples``.
        centred_only: whether not to divide by the standard deviation, so that only the factor (K - 1) / K remains (Liu
            et al. 2025, arXiv 2503.20783).

    Raises:
        ValueError: ``epsilon`` is not positive.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    samples = 2
    unbiased = False

    def __init__(
        self, epsilon: float = 1e-2, reward_only: bool = False, centred_only: bool = False
    ) -> None:
        super().__init__()
        self.reward_only = reward_only
        self.centred_only = centred_only
        check_value("epsilon", epsilon, POSITIVE)
        self.epsilon = epsilon

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Standardise ``advantage``: [.., K, B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        centred = advantage - advantage.mean(-3, keepdim=True)
        _set_centred(tensordict, centred)
        if self.centred_only:
            return tensordict
        spread = centred.square().mean(-3, keepdim=True).sqrt()
        return tensordict.set(keys.ADVANTAGE, centred / (spread + self.epsilon))


class MovingAverage(Stage):
    """Subtract a running mean of earlier batches' credits, position by position.

    ``A_i = G_i - m_i``, and only then ``m_i <- decay m_i + (1 - decay) mean_b G_{i,b}`` (Williams 1992; Mnih & Gregor
    2014, arXiv 1402.0030), with the zero start divided out as Adam does.

    Bias: none, for every policy: m depends on earlier rollouts only. (Updating first would leak a rollout's own
    return into its baseline.) Cost: O(T) elementwise; its state is T numbers, which checkpoints hold.

    Args:
        seq_len: symbols N of a sequence.
        decay: decay of the running mean, in [0, 1).

    Raises:
        ValueError: ``decay`` outside [0, 1).
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, seq_len: int, decay: float = 0.95) -> None:
        super().__init__()
        check_value("decay", decay, DECAY)
        self.decay = decay
        self.mean_T: Tensor = nn.Buffer(torch.zeros(seq_len - 1))
        self.weight_T: Tensor = nn.Buffer(torch.zeros(seq_len - 1))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., T]; in training mode, then update the running mean."""
        advantage = tensordict[keys.ADVANTAGE]
        mask = tensordict[keys.DECISION_MASK]
        baseline_T = self.mean_T / self.weight_T.where(self.weight_T > 0, 1.0)
        if self.training:
            leading = tuple(range(advantage.dim() - 1))
            total, count = weighted_sums(advantage, mask.to(advantage.dtype), leading)
            batch_mean_T = (total / count.clamp(min=1)).flatten()
            step_T = torch.where(count > 0, 1 - self.decay, 0.0).flatten().to(self.mean_T.dtype)
            self.mean_T.add_(step_T * (batch_mean_T - self.mean_T))
            self.weight_T.add_(step_T * (1 - self.weight_T))
        return _set_centred(tensordict, advantage - baseline_T.to(advantage.dtype))


class _RewardCritic(Stage):
    """Subtract a prediction of each reward, given the text: ``R_{i+1} <- R_{i+1} - c_{i+1}``.

    Credited with a discount, an action's baseline is then ``sum_{j>=0} gamma^j c_{i+j+1}``, which depends on the whole
    text. The actions do not affect the text, so a baseline may read ahead of the decision (Mao et al. 2018, arXiv
    1807.02264). More input is of no use for one reward: given the text, its expectation depends on ``x_<=i+1`` alone,
    as the actions and the prediction do.

    c is trained by regression on the rewards, through ``loss_critic``; it starts at 0. Logs
    ``explained_variance_critic``, of the rewards by c.

    Args:
        warmup: rollouts in which c is trained and nothing is subtracted.

    Raises:
        ValueError: ``warmup`` below 0.
    """

    out_keys = [keys.REWARD, keys.LOSS_CRITIC]

    def __init__(self, warmup: int) -> None:
        super().__init__()
        check_value("warmup", warmup, NOT_NEGATIVE)
        self.warmup = warmup
        self.rollouts_done: Tensor = nn.Buffer(torch.zeros((), dtype=torch.long))

    @abstractmethod
    def _predicted_reward(self, tensordict: TensorDictBase) -> Tensor:
        """Return c, with a gradient into the critic's parameters alone: [.., T]."""

    @staticmethod
    def _encodings(tensordict: TensorDictBase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return X_i and X_{i+1}, detached: [.., T, D] each."""
        here, following = (
            tensordict[key].detach().to(dtype) for key in (keys.ENCODING, keys.NEXT_ENCODING)
        )
        return here, following

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")`` [.., T, 1] and ``loss_critic`` [.., T]; in training mode, count the rollout."""
        reward = tensordict[keys.REWARD]
        mask = tensordict[keys.DECISION_MASK]
        predicted = self._predicted_reward(tensordict).where(mask, 0.0)
        error = reward.squeeze(-1) - predicted
        tensordict.set(keys.LOSS_CRITIC, error.square().where(mask, 0.0))
        log_explained_variance(tensordict, reward.squeeze(-1), error, "explained_variance_critic")
        baseline = predicted.detach().where(self.rollouts_done >= self.warmup, 0.0)
        if self.training:
            self.rollouts_done += 1
        return tensordict.set(keys.REWARD, reward - baseline.to(reward.dtype).unsqueeze(-1))


class TextCritic(_RewardCritic):
    """Subtract a small network's prediction of each reward, ``c(X_i, X_{i+1}, log p_early(x_{i+1} | x_<=i))``.

    How it is credited and trained: see ``_RewardCritic``.

    Bias: none, for every policy. Cost: a network of (2 D + 1) x ``hidden`` weights on every symbol, forward and
    backward; the encodings are detached. Before ``LeaveOneOutSamples`` it has no effect, because it is the same in all
    samples of a text; there, use ``ShrunkLeaveOneOut``.

    Args:
        width: model width D.
        hidden: units of the hidden layer.
        warmup: rollouts in which c is trained and nothing is subtracted.

    Raises:
        ValueError: ``hidden`` below 1 or ``warmup`` below 0.
    """

    in_keys = [
        keys.REWARD,
        keys.ENCODING,
        keys.NEXT_ENCODING,
        keys.LOG_LIKELIHOOD_EARLY,
        keys.DECISION_MASK,
    ]

    def __init__(self, width: int, hidden: int = 64, warmup: int = 20) -> None:
        super().__init__(warmup)
        check_value("hidden", hidden, COUNT)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(2 * width + 1, hidden), nn.GELU(), last)

    @property
    def flops(self) -> int:
        """FLOPs of the network per symbol: 6 per weight, but 4 in the first layer, whose input needs no gradient."""
        first, last = (
            layer.weight.numel() for layer in self.network if isinstance(layer, nn.Linear)
        )
        return 4 * first + 6 * last

    def _predicted_reward(self, tensordict: TensorDictBase) -> Tensor:
        dtype = next(self.network.parameters()).dtype
        pair = torch.cat(self._encodings(tensordict, dtype), -1)
        early = tensordict[keys.LOG_LIKELIHOOD_EARLY].detach().to(dtype).unsqueeze(-1)
        return self.network(torch.cat([F.layer_norm(pair, pair.shape[-1:]), early], -1)).squeeze(-1)


class LinearCritic(_RewardCritic):
    """Subtract a linear prediction of each reward: ``c = e(x_{i+1}) . X_i + u . X_i + v . X_{i+1} + b(x_{i+1})``.

    e and b are tables with an entry for every symbol, X_i and X_{i+1} are normalised to mean 0 and variance 1. So c has
    the form of an early exit without its softmax, and its parameters; but it computes one of the V products only, that
    of the symbol which comes. Where V is not small beside the model, as in small models of bytes, the early exit is
    expensive (at width 64 an eighth of all FLOPs, at width 768 0.4%), and this replaces it: put ``Likelihood`` before
    it, not ``EarlyExit``. How it is credited and trained: see ``_RewardCritic``.

    Bias: none, for every policy. Cost: 3 D products on every symbol, forward and backward; the encodings are detached.
    Memory: V (D + 1) parameters. It has no effect before ``LeaveOneOutSamples``.

    Args:
        width: model width D.
        vocabulary: symbols V; 0 where symbols are not numbered.
        warmup: rollouts in which c is trained and nothing is subtracted.

    Raises:
        ValueError: ``vocabulary`` is 0, or ``warmup`` is below 0.
    """

    in_keys = [keys.REWARD, keys.ENCODING, keys.NEXT_ENCODING, keys.NEXT_SYMBOL, keys.DECISION_MASK]

    def __init__(self, width: int, vocabulary: int = 256, warmup: int = 20) -> None:
        super().__init__(warmup)
        if vocabulary < 1:
            raise ValueError(
                f"vocabulary = {vocabulary}: this critic has a table with an entry for every symbol, as bytes have and "
                "values of series have not: choose an estimator with the early exit, such as reinforce"
            )
        self.table = nn.Embedding(vocabulary, width + 1)
        self.linear = nn.Linear(2 * width, 1, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    @property
    def flops(self) -> int:
        """FLOPs per symbol: 4 per product, because the encodings need no gradient."""
        return 4 * (self.table.weight.shape[1] - 1 + self.linear.weight.numel())

    def _predicted_reward(self, tensordict: TensorDictBase) -> Tensor:
        pair = [
            F.layer_norm(x, x.shape[-1:])
            for x in self._encodings(tensordict, self.linear.weight.dtype)
        ]
        entry = self.table(tensordict[keys.NEXT_SYMBOL])
        product = (entry[..., :-1] * pair[0]).sum(-1) + entry[..., -1]
        return product + self.linear(torch.cat(pair, -1)).squeeze(-1)
