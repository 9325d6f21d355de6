"""Scaling of advantages, surrogate losses whose gradient is the estimate, and imitation."""

import math

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent
from tokenv.core.errors import COUNT, NOT_NEGATIVE, NOT_NEGATIVE_OR_NULL, POSITIVE, check_value
from tokenv.core.rates import FIXED_RATE
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import masked_mean, mean_over


class Standardise(Stage):
    """Divide the advantage by its standard deviation over all decisions of the batch, after centring it.

    ``A <- (A - mean A) / (std A + epsilon)``, as implementations of PPO do (Schulman et al. 2017, arXiv 1707.06347).

    Bias: one factor for all decisions, random but nearly constant in large batches; the batch's mean and deviation
    contain the sample itself, which changes the direction by O(1 / decisions): ``1 - cosine`` of 0.05 with 6 decisions
    and of 0.15 with 4 in a policy with a past, by enumeration; other rewards may turn it more. Cost: O(T) elementwise.

    Args:
        epsilon: added to the standard deviation, in nats.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Standardise ``advantage``: [.., T]."""
        advantage = tensordict[keys.ADVANTAGE]
        mask = tensordict[keys.DECISION_MASK]
        centred = advantage - masked_mean(advantage, mask)
        deviation = masked_mean(centred.square(), mask).sqrt()
        return tensordict.set(keys.ADVANTAGE, centred / (deviation + self.epsilon))


class Clip(Stage):
    """Clip advantages to plus and minus ``limit``.

    Bias: towards zero where credits are large, in exchange for fewer outliers. Cost: O(T) elementwise.

    Args:
        limit: largest advantage (in nats, or in standard deviations after ``Standardise``).

    Raises:
        ValueError: ``limit`` is not positive.
    """

    in_keys = [keys.ADVANTAGE]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def __init__(self, limit: float = 5.0) -> None:
        super().__init__()
        check_value("limit", limit, POSITIVE)
        self.limit = limit

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Clip ``advantage``: [.., T]."""
        return tensordict.set(
            keys.ADVANTAGE, tensordict[keys.ADVANTAGE].clamp(-self.limit, self.limit)
        )


def logit_loss(gradient: Tensor, tensordict: TensorDictBase) -> Tensor:
    """Return a loss per decision whose gradient by each logit is an estimated gradient of the objective: [.., T].

    ``L_i = -stop(g_i) l_i``, so that descending the loss ascends the objective; 0 where no decision is made.
    """
    logits = tensordict[keys.BOUNDARY_LOGITS]
    return -(gradient.detach() * logits).where(tensordict[keys.DECISION_MASK], 0.0)


class ScoreFunction(Stage):
    """The score-function (REINFORCE) surrogate.

    ``L_i = -log pi(a_i | x_<=i, a_<i) detach(A_i)`` (Williams 1992; arXiv 2602.13940, eq. 18).

    Bias: none, if the advantage is an unbiased credit less a baseline that does not depend on a_i; for every
    policy, autoregressive or not. Cost: one forward and one backward pass, shared with the language model's.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., T], 0 where no decision is made."""
        return tensordict.set(
            keys.LOSS_POLICY,
            -tensordict[keys.ACTION_LOG_PROB] * tensordict[keys.ADVANTAGE].detach(),
        )


class ClippedSurrogate(Stage):
    """PPO's clipped surrogate, for several gradient steps on one rollout.

    ``L_i = -min(rho_i A_i, clip(rho_i, 1 - epsilon, 1 + epsilon) A_i)`` with ``rho_i = pi(a_i) / pi_old(a_i)``
    (Schulman et al. 2017, arXiv 1707.06347).

    Bias: none in the first step, where rho = 1 and the gradient is the score function's; later steps use states and
    rewards of the old policy. Cost: each step after the first is one pass through encoder and policy only: credits
    are reused, and the language model learns in the first step alone.

    ``head_epochs`` further steps update the agent alone, which reads the encodings of the time of drawing: the policy's
    head has (w + 1) D parameters, so their cost is small, and the size of the policy's update becomes independent of
    the model's. The training loop makes them after the others: for each, ``rescore_head(agent, rollout)`` of every
    stored and detached rollout, ``Chain.replay``, backward of policy and rate loss, and a step of the optimizer, in
    which only the agent's parameters have a gradient.

    Further steps log ``clip_fraction``, the share of decisions with rho outside of the clipping range, and
    ``kl_approx``, the estimate ``rho - 1 - log rho`` of KL(pi_old || pi), unbiased and never negative.

    Args:
        epsilon: clipping range, positive.
        epochs: gradient steps on one rollout.
        head_epochs: further steps of the agent alone.

    Raises:
        ValueError: ``epsilon`` not positive, ``epochs`` below 1 or ``head_epochs`` below 0.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]

    def __init__(self, epsilon: float = 0.2, epochs: int = 2, head_epochs: int = 0) -> None:
        super().__init__()
        check_value("epsilon", epsilon, POSITIVE)
        check_value("epochs", epochs, COUNT)
        check_value("head_epochs", head_epochs, NOT_NEGATIVE)
        self.epsilon = epsilon
        self.num_epochs = epochs
        self.head_epochs = head_epochs

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., T], without gradient where no decision is made."""
        log_prob = tensordict[keys.ACTION_LOG_PROB]
        advantage = tensordict[keys.ADVANTAGE].detach()
        log_ratio = log_prob - tensordict.get(keys.OLD_LOG_PROB, log_prob).detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        loss = -(ratio * advantage).minimum(clipped * advantage)
        if keys.OLD_LOG_PROB in tensordict:
            tensordict.set((keys.DIAGNOSTICS, "clip_fraction"), (ratio != clipped).to(ratio.dtype))
            tensordict.set((keys.DIAGNOSTICS, "kl_approx"), (ratio - 1 - log_ratio).detach())
        return tensordict.set(keys.LOSS_POLICY, loss)


class Imitation(Stage):
    """Descend the cross-entropy between a teacher's boundaries and the policy (behavioural cloning, Pomerleau 1989).

    ``loss_policy = -log pi(b_i | x_<=i, b_<i)`` for the teacher's boundaries b, which stand in the history, too
    (teacher forcing). The language model reads the policy's own boundaries, which it will read later, and learns on
    them. Where the teacher reads ahead, as ``bpe`` does, the policy learns what of it can be known from the past; the
    mean loss is then an upper bound on the nats per decision which the teacher's boundaries tell of later symbols.

    Logs ``imitation_nats``, the loss.

    Bias: the gradient is the exact one of the cross-entropy (for a teacher which draws at random, unbiased); it is not
    that of the reward. Cost: the policy is evaluated twice, and the teacher once; no further pass of the model.

    Args:
        teacher: agent which can draw the boundaries of whole sequences. Nothing of it learns.
    """

    in_keys = [keys.DEMONSTRATION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]
    unbiased = False

    def __init__(self, teacher: BoundaryAgent) -> None:
        super().__init__()
        if isinstance(teacher, nn.Module):
            teacher.requires_grad_(requires_grad=False)
        self._teacher = teacher

    @property
    def teacher(self) -> BoundaryAgent:
        """Agent which is imitated."""
        return self._teacher

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the cross-entropy, [.., T]."""
        nats = -tensordict[keys.DEMONSTRATION_LOG_PROB]
        tensordict.set((keys.DIAGNOSTICS, "imitation_nats"), nats.detach())
        return tensordict.set(self.out_keys[0], nats)


class Kickstart(Imitation):
    """Write the cross-entropy of ``Imitation`` as a loss of its own, beside that of the rewards.

    ``loss_imitation = -log pi(b_i | x_<=i, b_<i)`` (kickstarting, Schmitt et al. 2018, arXiv 1803.03835). It equals
    the KL divergence from the teacher to the policy, up to a constant, and so keeps the policy near its teacher.

    Bias: towards the teacher, in proportion to ``loss.imitation``. Cost: as ``Imitation``, for every sample.
    """

    out_keys = [keys.LOSS_IMITATION]


class _Proposal(Stage):
    """Common to stages which draw the boundaries of the first rollouts from a fixed-rate Bernoulli q, q(1) = rate.

    Args:
        rate: boundary probability of the proposal, in (0, 1).
        rollouts: number of rollouts which the proposal draws; None for all.

    Raises:
        ValueError: ``rate`` outside (0, 1), or negative ``rollouts``.
    """

    def __init__(self, rate: float, rollouts: int | None) -> None:
        super().__init__()
        check_value("rate", rate, FIXED_RATE)
        check_value("rollouts", rollouts, NOT_NEGATIVE_OR_NULL)
        self.rate = rate
        self.rollouts = rollouts
        self.rollouts_done: Tensor = nn.Buffer(torch.zeros((), dtype=torch.long))

    def _on_policy(self) -> bool:
        return self.rollouts is not None and int(self.rollouts_done) >= self.rollouts

    def propose(self, noise: Tensor) -> Tensor | None:
        """Return ``[u < rate]``, or None after the warm start."""
        return None if self._on_policy() else (noise < self.rate).long()

    def _log_ratio(self, tensordict: TensorDictBase) -> Tensor:
        """Return ``log pi(a_i | .) - log q(a_i)``, detached; 0 where no decision is made: [.., T]."""
        log_prob = tensordict[keys.ACTION_LOG_PROB].detach()
        action = tensordict[keys.ACTION].to(log_prob.dtype)
        proposal_log_prob = action * math.log(self.rate) + (1 - action) * math.log(1 - self.rate)
        return (log_prob - proposal_log_prob).where(tensordict[keys.DECISION_MASK], 0.0)

    def _count_rollout(self) -> None:
        if self.training:
            self.rollouts_done += 1


class FixedRateProposal(_Proposal):
    """Draw boundaries from a fixed-rate Bernoulli instead of the policy, and weigh rewards by importance.

    ``R_{t+1} <- R_{t+1} prod_{j=t-h..t} pi(a_j | .) / q(a_j)`` with q(1) = rate, so that
    ``E_q[weighted R_{t+1} grad log pi(a_i)] = E_pi[R_{t+1} grad log pi(a_i)]`` for i <= t (per-decision importance
    sampling, Precup et al. 2000). As a warm start: after ``rollouts`` rollouts the policy draws its own boundaries.
    The authors' early code (github.com/SamD770/bitter-lesson-tokenization, June 2025) explored so.

    Bias: none with ``horizon=None`` (all decisions before a reward are weighed), for every policy, but the variance of
    the weights then grows exponentially with T; with a horizon h, decisions more than h steps before a reward have no
    weight. Cost: one pass. Logs ``effective_sample_size``, ``(sum w)^2 / sum w^2`` over the batch, averaged over
    positions, as a fraction of the batch. The language model learns from the boundaries as drawn.

    Args:
        rate: boundary probability of the proposal, in (0, 1).
        horizon: decisions h before a reward which are weighed besides its own; None for all.
        rollouts: number of rollouts which the proposal draws; None for all.

    Raises:
        ValueError: ``rate`` outside (0, 1), a negative ``horizon`` or ``rollouts``.
    """

    in_keys = [keys.REWARD, keys.ACTION, keys.ACTION_LOG_PROB, keys.DECISION_MASK]
    out_keys = [keys.REWARD]

    def __init__(self, rate: float, horizon: int | None = 8, rollouts: int | None = None) -> None:
        super().__init__(rate, rollouts)
        check_value("horizon", horizon, NOT_NEGATIVE_OR_NULL)
        self.horizon = horizon
        self.unbiased = horizon is None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Weigh ``("next", "reward")``: [.., T, 1]."""
        if self._on_policy():
            return tensordict
        mask = tensordict[keys.DECISION_MASK]
        log_ratio = self._log_ratio(tensordict)
        log_weight = log_ratio.cumsum(-1)
        if self.horizon is not None and self.horizon + 1 < log_weight.shape[-1]:
            log_weight = (
                log_weight - F.pad(log_weight, (self.horizon + 1, 0))[..., : log_weight.shape[-1]]
            )
        weight = log_weight.exp()
        size = mean_over(weight, mask, -2).square() / mean_over(weight.square(), mask, -2).clamp(
            min=1e-30
        )
        tensordict.set((keys.DIAGNOSTICS, "effective_sample_size"), size.expand(weight.shape))
        self._count_rollout()
        return tensordict.set(keys.REWARD, tensordict[keys.REWARD] * weight.unsqueeze(-1))


class DecisionProposal(_Proposal):
    """Start with boundaries of a fixed-rate Bernoulli, and weigh each advantage by its own decision's ratio.

    ``A_i <- A_i pi(a_i | .) / q(a_i)`` with q(1) = rate, for the first ``rollouts`` rollouts (passes), as the authors
    of arXiv 2602.13940 released it. Then the policy draws its own boundaries, and nothing is weighed. As in
    ``FixedRateProposal`` the policy is conditioned on the boundaries which were used; their code conditions it on draws
    of its own, which makes a difference for a policy with a past.

    Bias: rewards are those of the proposal's later boundaries, not of the policy's. Cost: none. For the arguments, see
    ``_Proposal``.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.ACTION_LOG_PROB, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Weigh ``advantage``: [.., T]; in training mode, count the rollout."""
        if self._on_policy():
            return tensordict
        weight = self._log_ratio(tensordict).exp()
        self._count_rollout()
        return tensordict.set(keys.ADVANTAGE, tensordict[keys.ADVANTAGE] * weight)
