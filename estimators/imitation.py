"""Learn to draw the boundaries of another agent."""

from tensordict import TensorDictBase
from torch import nn

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent
from tokenv.estimators.base import Stage


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
        """Write ``loss_policy``, [.., T]."""
        nats = -tensordict[keys.DEMONSTRATION_LOG_PROB]
        tensordict.set((keys.DIAGNOSTICS, "imitation_nats"), nats.detach())
        return tensordict.set(keys.LOSS_POLICY, nats)
