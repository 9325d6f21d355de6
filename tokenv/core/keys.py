"""TensorDict keys shared by all rooms, and the shape legend.

Shape legend, used as suffixes (``reward_BT``):

==  =====================================================================
B   sequences in the batch
K   samples of the boundaries per sequence (leading dimension, if there are several)
N   symbols of a sequence (bytes of a text)
T   decisions that earn a reward, T = N - 1
M   tokens of a sequence (boundaries drawn so far)
D   model width
H   attention heads; steps of a horizon
W   sliding window of the byte-level attention
w   earlier boundaries that the policy reads
==  =====================================================================

Where TorchRL has a name, it is used: a rollout is a TensorDict of batch size [B, T] (or [K, B, T]) with the
observation and the action at the root and their result under ``next``.
"""

# Observation at position i.
SYMBOL = "symbol"  # x_i, the symbol itself: int64 bytes [.., T]
ENCODING = "encoding"  # X_i, the encoder's output: float [.., T, D]
LAST_ACTIONS = "last_actions"  # a_{i-1}, ..., a_{i-w}, newest first: float [.., T, w]
POSITION = "position"  # i: int64 [.., T]
TOKEN_COUNT = "token_count"  # boundaries drawn before i: int64 [.., T]
DECISION_MASK = "decision_mask"  # False where the boundary is forced: bool [.., T]
# requested boundaries per symbol: float [.., T]; only where an agent reads it
TARGET_RATE = "target_rate"
# of p_early(x_{i+1} | x_<=i) in nats: float [.., T]; only where an agent reads it
EARLY_ENTROPY = "early_entropy"

# Further input of an agent, and its output.
NOISE = "noise"  # u_i, the uniform number that decides a_i: float [.., T]
ACTION = "action"  # a_i in {0, 1}: int64 [.., T]
BOUNDARY_LOGITS = "boundary_logits"  # l_i: float [.., T]
BOUNDARY_PROB = "boundary_prob"  # p_i = sigmoid(l_i): float [.., T]
ACTION_LOG_PROB = "action_log_prob"  # log pi(a_i | x_<=i, a_<i) in nats: float [.., T]
ENTROPY = "entropy"  # of pi(. | x_<=i, a_<i) in nats: float [.., T]
# log pi(a_i | x_<=i, a_<i) of a teacher's actions: float [.., T]
DEMONSTRATION_LOG_PROB = "demonstration_log_prob"
# a_i with a gradient, as the pooling reads it: float [.., T]; only where it is relaxed
BOUNDARY = "boundary"
# action_log_prob at the time of drawing: float [.., T]; only when scored again
OLD_LOG_PROB = "old_log_prob"

# Output of the environment, under "next", so that step i holds the prediction of x_{i+1}.
LOG_LIKELIHOOD = ("next", "log_likelihood")  # log p(x_{i+1} | x_<=i, a_<=i) in nats: float [.., T]
# the same from the early exit: float [.., T]
LOG_LIKELIHOOD_EARLY = ("next", "log_likelihood_early")
# under R relaxed boundaries: float [.., T, R]
LOG_LIKELIHOOD_RELAXED = ("next", "log_likelihood_relaxed")
# sum over the auxiliary head's symbols from i + 1 on
LOG_LIKELIHOOD_AUXILIARY = ("next", "log_likelihood_auxiliary")
# number of summed likelihoods; 0 too close to the end: [.., T]
AUXILIARY_COUNT = ("next", "auxiliary_count")
REWARD = ("next", "reward")  # R_{i+1}, detached: float [.., T, 1]
DONE = ("next", "done")
NEXT_SYMBOL = ("next", SYMBOL)  # x_{i+1}: int64 bytes [.., T]
NEXT_ENCODING = ("next", ENCODING)  # X_{i+1}: float [.., T, D]

# Output of estimators.
# weight in the language model's loss: float [K, B, T]; absent where all are equal
SAMPLE_WEIGHT = "sample_weight"
DIAGNOSTICS = "diagnostics"  # ("diagnostics", name): values which an estimator logs: float [.., T]
ADVANTAGE = "advantage"  # credit of action i after the stages so far: float [.., T]
LOSS_POLICY = "loss_policy"  # per decision; its mean is the loss: float [.., T]
LOSS_CRITIC = "loss_critic"  # loss of the estimator's own network: float [.., T]
LOSS_RATE = "loss_rate"  # per decision; its mean is the loss: float [.., T]
LOSS_IMITATION = "loss_imitation"  # per decision; its mean is the loss: float [.., T]
