"""What a rollout is trained on (paper, eq. 27), and what it says about model and policy."""

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, current_group
from tokenv.core.expectations import local_masked_mean, masked_mean, mean_over, mean_over_decisions
from tokenv.lm.codecs.base import Codec
from tokenv.training.update_flops import count_tokens


def mean_log_likelihood(td: TensorDictBase, key: NestedKey, codec: Codec, weight: Tensor | None = None) -> Tensor:
    """Mean over all that has a likelihood: symbols, or those values of a series that count; [..] -> [].

    Of a shared batch, this process's part.
    """
    log_likelihood, loss_mask = td[key], codec.loss_mask(td["next", keys.SYMBOL])
    if loss_mask is None:
        return _mean_share(log_likelihood) if weight is None else local_masked_mean(log_likelihood, weight)
    values = loss_mask if weight is None else loss_mask * weight
    return _ratio_share(log_likelihood if weight is None else log_likelihood * weight, values)


def _mean_share(x: Tensor) -> Tensor:
    return x.mean() / current_group().size


def _ratio_share(total: Tensor, count: Tensor) -> Tensor:
    (of_all,) = all_reduce_sum(count.sum())
    return total.sum() / of_all.clamp(min=1)


def compute_losses(td: TensorDictBase, parts: Components) -> dict[str, Tensor]:
    """The losses of eq. 27, each a mean over the batch: per symbol or value (lm, early) or per decision.

    Of a shared batch, this process's parts, which add up to the losses; so do their gradients.
    """
    if parts.estimator is not None:
        td = parts.estimator(td) if keys.OLD_LOG_PROB not in td else parts.estimator.replay(td)
    if parts.rate_target is not None:
        td = parts.rate_target(td)
    codec, weight = parts.lm.codec, td.get(keys.SAMPLE_WEIGHT, None)
    losses = {"lm": -mean_log_likelihood(td, keys.LOG_LIKELIHOOD, codec, weight)}
    if keys.LOG_LIKELIHOOD_EARLY in td:
        losses["early"] = -mean_log_likelihood(td, keys.LOG_LIKELIHOOD_EARLY, codec)
    if keys.LOG_LIKELIHOOD_DIRECT in td:
        losses["direct"] = -_ratio_share(td[keys.LOG_LIKELIHOOD_DIRECT], td[keys.DIRECT_COUNT])
    return losses | {
        "policy": mean_over_decisions(td, keys.LOSS_POLICY),
        "rate": mean_over_decisions(td, keys.LOSS_RATE),
    }


def total_loss(losses: dict[str, Tensor], weights: LossConfig) -> Tensor:
    """L = L_auto + l_pi L_pi + l_target L_target + l_early L_early (eq. 27), + l_direct L_direct where there is one.

    An early exit of weight 0 is only read: nothing goes backward through it.
    """
    weight = {name: weights.weight(name) for name in losses if name != "lm"}
    return losses["lm"] + sum(weight[name] * losses[name] for name in weight if name != "early" or weight[name])


def _masked_std(x: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation where ``mask`` is True; no boolean indexing, for which a GPU would wait."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask).sqrt()


@torch.no_grad()
def rollout_metrics(td: TensorDictBase, losses: dict[str, Tensor], parts: Components) -> dict[str, Tensor]:
    """What a rollout says about the model and the policy; of a shared batch, what the whole batch does.

    Args:
        td: the rollout.
        losses: of the whole batch.
        parts: what made it.
    """
    codec, decided = parts.lm.codec, td[keys.DECISION_MASK]
    boundaries, places = all_reduce_sum(td[keys.ACTION].sum(), decided.sum() + decided[..., 0].numel())
    metrics = {
        codec.unit: losses["lm"] / codec.nats_per_unit,
        "boundary_rate": boundaries.float() / places.float(),
        "boundary_prob_std": _masked_std(td[keys.BOUNDARY_PROB], decided),
        "entropy": masked_mean(td[keys.ENTROPY], decided),
        "neg_log_prob": -masked_mean(td[keys.ACTION_LOG_PROB], decided),
    }
    if "early" in losses:
        reward = td[keys.REWARD].squeeze(-1)
        (mean_reward,) = all_reduce_sum(_mean_share(reward))
        metrics |= {
            f"{codec.unit}_early": losses["early"] / codec.nats_per_unit,
            "reward_mean": mean_reward,
            "reward_std": current_group().gather(reward, -2).std(),
        }
    if keys.TARGET_RATE in td:
        target = td[keys.TARGET_RATE].double()
        gap = mean_over(td[keys.BOUNDARY_PROB].double(), decided, -1) - target
        metrics |= {"target_rate": masked_mean(target, decided), "rate_gap": masked_mean(gap.abs(), decided)}
    if "direct" in losses:
        metrics[f"{codec.unit}_direct"] = losses["direct"] / codec.nats_per_unit
    if keys.DIAGNOSTICS in td:
        metrics |= {name: masked_mean(value, decided) for name, value in td[keys.DIAGNOSTICS].items()}
    if keys.ADVANTAGE in td:
        metrics["advantage_std"] = _masked_std(td[keys.ADVANTAGE], decided)
        metrics["loss_policy"] = losses["policy"]
    return {name: value.detach().double() for name, value in (metrics | count_tokens(td, parts)).items()}
