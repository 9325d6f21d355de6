"""Score the actions of a stored rollout again, for further gradient steps on it."""

from tensordict import TensorDictBase

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent
from tokenv.env.observation import Observer
from tokenv.lm.unet import UNet


def rescore(
    lm: UNet, agent: BoundaryAgent, tensordict: TensorDictBase, *, detach_encoder: bool = False
) -> TensorDictBase:
    """Score the actions of a rollout again, after model or agent have changed: passes of encoder and policy only.

    Args:
        lm: model.
        agent: policy.
        tensordict: detached rollout.
        detach_encoder: whether the outputs carry no gradient into the encoder.

    Returns:
        The rollout with new observations and agent outputs, of which the outputs carry gradients, and with the earlier
        log-probabilities as ``old_log_prob``. Likelihoods and the estimator's outputs are unchanged.
    """
    one_sample = _first_sample(tensordict)
    symbol = one_sample[keys.SYMBOL]
    observation = Observer.of_rollout(tensordict).static_observation(
        lm,
        symbol,
        lm.encode(symbol),
        one_sample[keys.POSITION],
        one_sample[keys.DECISION_MASK],
        one_sample.get(keys.TARGET_RATE, None),
    )
    if detach_encoder:
        observation = observation.detach()
    rescored = _score_actions(agent, observation, tensordict)
    return rescored.update(observation.detach().expand(tensordict.shape))


def rescore_head(agent: BoundaryAgent, tensordict: TensorDictBase) -> TensorDictBase:
    """Score the actions of a rollout again, after the agent alone has changed: it reads the stored observations.

    While the model is unchanged the result is that of ``rescore``, without a pass through the encoder and without a
    gradient into it. See ``head_epochs`` of ``tokenv.estimators.surrogates.ClippedSurrogate``.

    Args:
        agent: policy.
        tensordict: detached rollout.

    Returns:
        The rollout with new agent outputs, which carry gradients into the agent alone, and with the earlier
        log-probabilities as ``old_log_prob``. Everything else is unchanged.
    """
    static_keys = Observer.of_rollout(tensordict).static_keys
    return _score_actions(
        agent,
        _first_sample(tensordict).select(*static_keys, strict=False).detach(),
        tensordict,
    )


def _first_sample(tensordict: TensorDictBase) -> TensorDictBase:
    """Return the first sample of each sequence: [.., B, T] -> [B, T]. All samples share the static observations."""
    return tensordict[(0,) * (tensordict.dim() - 2)]


def _score_actions(
    agent: BoundaryAgent, observation: TensorDictBase, tensordict: TensorDictBase
) -> TensorDictBase:
    rescored = tensordict.clone(recurse=False)
    if keys.OLD_LOG_PROB not in rescored:
        rescored.set(keys.OLD_LOG_PROB, rescored[keys.ACTION_LOG_PROB].detach())
    return rescored.update(agent.score(observation, tensordict[keys.ACTION]))
