"""Scaling of advantages, and surrogate losses whose gradient is the estimate."""

from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import masked_mean


class Standardise(Stage):
    """Divide the advantage by its standard deviation over all decisions of the batch, after centring it.

    ``A <- (A - mean A) / (std A + epsilon)``, as implementations of PPO do (Schulman et al. 2017, arXiv 1707.06347).

    Bias: one factor for all decisions, random but nearly constant in large batches; the batch's mean and deviation
    contain the sample itself, which changes the direction by O(1 / decisions). Cost: O(T) elementwise.

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
        advantage, mask = tensordict[keys.ADVANTAGE], tensordict[keys.DECISION_MASK]
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
        if not limit > 0:
            raise ValueError(f"limit = {limit}: expected a positive number, such as 5")
        self.limit = limit

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Clip ``advantage``: [.., T]."""
        return tensordict.set(keys.ADVANTAGE, tensordict[keys.ADVANTAGE].clamp(-self.limit, self.limit))


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
        return tensordict.set(keys.LOSS_POLICY, -tensordict[keys.ACTION_LOG_PROB] * tensordict[keys.ADVANTAGE].detach())


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
        if not epsilon > 0:
            raise ValueError(f"epsilon = {epsilon}: expected a positive clipping range, such as 0.2")
        if epochs < 1:
            raise ValueError(f"epochs = {epochs}: expected at least 1 gradient step")
        if head_epochs < 0:
            raise ValueError(f"head_epochs = {head_epochs}: expected 0 (none) or more further steps of the agent alone")
        self.epsilon, self.num_epochs, self.head_epochs = epsilon, epochs, head_epochs

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_policy``: [.., T], without gradient where no decision is made."""
        log_prob, advantage = tensordict[keys.ACTION_LOG_PROB], tensordict[keys.ADVANTAGE].detach()
        ratio = (log_prob - tensordict.get(keys.OLD_LOG_PROB, log_prob).detach()).exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        loss = -(ratio * advantage).minimum(clipped * advantage)
        return tensordict.set(keys.LOSS_POLICY, loss)
