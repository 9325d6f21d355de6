"""The losses of a rollout (paper, eq. 27), and its metrics.

In a batch which several processes share, each computes its share of a loss; the shares, and their gradients, add up to
those of the whole batch.
"""

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, current_group
from tokenv.core.expectations import local_masked_mean, masked_mean, mean_over, mean_over_decisions
from tokenv.lm.codecs.base import Codec
from tokenv.lm.flops import causal_pairs

# Metrics which are counts of an update: its passes' counts are added, not averaged.
TOKEN_COUNTS = tuple(
    f"{what}{suffix}"
    for what in ("tokens", "token_pairs")
    for suffix in ("", "_forward", "_padded", "_forward_padded")
)
ROUNDING = 1e-5  # advantages below it, in nats, count as zero


def compute_losses(td: TensorDictBase, components: Components) -> dict[str, Tensor]:
    """Return this process's shares of the losses of eq. 27: means per symbol or value (lm, early) or per decision."""
    if components.estimator is not None:
        replayed = keys.OLD_LOG_PROB in td
        td = components.estimator.replay(td) if replayed else components.estimator(td)
    if components.rate_target is not None:
        td = components.rate_target(td)
    codec = components.lm.codec
    weight = td.get(keys.SAMPLE_WEIGHT, None)
    losses = {"lm": -mean_log_likelihood(td, keys.LOG_LIKELIHOOD, codec, weight)}
    if keys.LOG_LIKELIHOOD_EARLY in td:
        losses["early"] = -mean_log_likelihood(td, keys.LOG_LIKELIHOOD_EARLY, codec)
    if keys.LOG_LIKELIHOOD_AUXILIARY in td:
        losses["auxiliary"] = -_local_ratio(
            td[keys.LOG_LIKELIHOOD_AUXILIARY], td[keys.AUXILIARY_COUNT]
        )
    if keys.LOSS_IMITATION in td:
        losses["imitation"] = mean_over_decisions(td, keys.LOSS_IMITATION)
    return losses | {
        "policy": mean_over_decisions(td, keys.LOSS_POLICY),
        "rate": mean_over_decisions(td, keys.LOSS_RATE),
    }


def total_loss(losses: dict[str, Tensor], weights: LossConfig) -> Tensor:
    """Return L = L_auto + l_pi L_pi + l_target L_target + l_early L_early (eq. 27).

    The auxiliary head and the imitation of a teacher beside rewards are added in the same way if present. L_auto has a
    weight, too, which the paper has not.

    An early exit of weight 0 is left out, so that no gradient is computed for it.
    """
    weight = {name: weights.weight(name) for name in losses if name != "lm"}
    return weights.likelihood * losses["lm"] + sum(
        weight[name] * losses[name] for name in weight if name != "early" or weight[name]
    )


def mean_log_likelihood(
    td: TensorDictBase, key: NestedKey, codec: Codec, weight: Tensor | None = None
) -> Tensor:
    """Return this process's share of the mean over symbols, or over the observed values of a series: [..] -> []."""
    log_likelihood = td[key]
    loss_mask = codec.loss_mask(td["next", keys.SYMBOL])
    if loss_mask is None:
        if weight is None:
            return _local_mean(log_likelihood)
        return local_masked_mean(log_likelihood, weight)
    if weight is not None:
        log_likelihood = log_likelihood * weight
        loss_mask = loss_mask * weight
    return _local_ratio(log_likelihood, loss_mask)


def _local_mean(x: Tensor) -> Tensor:
    return x.mean() / current_group().size


def _local_ratio(total: Tensor, count: Tensor) -> Tensor:
    (count_of_batch,) = all_reduce_sum(count.sum())
    return total.sum() / count_of_batch.clamp(min=1)


def _masked_std(x: Tensor, mask: Tensor) -> Tensor:
    """Return the standard deviation where ``mask`` is True; boolean indexing would make a GPU wait."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask).sqrt()


def _boundary_enrichment(td: TensorDictBase, key: NestedKey, codec: Codec) -> Tensor:
    """Return the mean loss of the symbol after a boundary minus that elsewhere; 0 if either does not occur: []."""
    loss = -td[key].double() / codec.nats_per_unit
    decisions = td[keys.DECISION_MASK]
    ends = td[keys.ACTION].bool()
    sums = [
        x
        for where in (decisions & ends, decisions & ~ends)
        for x in ((loss * where).sum(), where.sum())
    ]
    after, number_after, elsewhere, number_elsewhere = all_reduce_sum(*sums)
    gap = after / number_after.clamp(min=1) - elsewhere / number_elsewhere.clamp(min=1)
    return gap.where((number_after > 0) & (number_elsewhere > 0), 0.0)


@torch.no_grad()
def rollout_metrics(
    td: TensorDictBase, losses: dict[str, Tensor], components: Components
) -> dict[str, Tensor]:
    """Return metrics of model and policy on a rollout, for the whole batch.

    Args:
        td: rollout.
        losses: losses of the whole batch.
        components: language model, agent and estimator which produced the rollout.
    """
    codec = components.lm.codec
    decisions = td[keys.DECISION_MASK]
    boundaries, positions = all_reduce_sum(
        td[keys.ACTION].sum(), decisions.sum() + decisions[..., 0].numel()
    )
    metrics = {
        codec.unit: losses["lm"] / codec.nats_per_unit,
        "boundary_rate": boundaries.float() / positions.float(),
        "boundary_prob_std": _masked_std(td[keys.BOUNDARY_PROB], decisions),
        "entropy": masked_mean(td[keys.ENTROPY], decisions),
        "neg_log_prob": -masked_mean(td[keys.ACTION_LOG_PROB], decisions),
    }
    metrics["boundary_enrichment"] = _boundary_enrichment(td, keys.LOG_LIKELIHOOD, codec)
    if "early" in losses:
        reward = td[keys.REWARD].squeeze(-1)
        (mean_reward,) = all_reduce_sum(_local_mean(reward))
        metrics |= {
            f"{codec.unit}_early": losses["early"] / codec.nats_per_unit,
            "boundary_enrichment_early": _boundary_enrichment(td, keys.LOG_LIKELIHOOD_EARLY, codec),
            "reward_mean": mean_reward,
            "reward_std": current_group().gather(reward, -2).std(),
        }
    if keys.TARGET_RATE in td:
        target = td[keys.TARGET_RATE].double()
        gap = mean_over(td[keys.BOUNDARY_PROB].double(), decisions, -1) - target
        metrics |= {
            "target_rate": masked_mean(target, decisions),
            "rate_gap": masked_mean(gap.abs(), decisions),
        }
    if "auxiliary" in losses:
        metrics[f"{codec.unit}_auxiliary"] = losses["auxiliary"] / codec.nats_per_unit
    if keys.DIAGNOSTICS in td:
        metrics |= {
            name: masked_mean(value, decisions) for name, value in td[keys.DIAGNOSTICS].items()
        }
    if keys.ADVANTAGE in td:
        metrics["advantage_std"] = _masked_std(td[keys.ADVANTAGE], decisions)
        metrics["advantage_zero_fraction"] = masked_mean(
            (td[keys.ADVANTAGE].abs() < ROUNDING).double(), decisions
        )
        metrics["loss_policy"] = losses["policy"]
    return {
        name: value.detach().double()
        for name, value in (metrics | count_tokens(td, components)).items()
    }


def count_tokens(td: TensorDictBase, components: Components) -> dict[str, Tensor]:
    """Return how many tokens of a rollout the token-level layers process, for the whole batch.

    Args:
        td: rollout.
        components: language model, agent and estimator which produced the rollout.

    Returns:
        ``tokens`` of the samples which the model learns from and ``token_pairs``, the pairs of a query and a key which
        attention between them sees; ``tokens_forward`` and ``token_pairs_forward`` of the samples which only go
        forward; all also as ``_padded``: as computed, padded to the longest sequence of a pass and to a multiple which
        keeps the number of shapes small. The empty slots of a pack (``hardware.sequence_packing``) are not counted:
        see ``tokenv.lm.segments.bucket_size``.
    """
    lm = components.lm
    passes = components.passes
    tokens_SB = td[keys.ACTION].sum(-1)
    if td.dim() > 2:
        tokens_SB = tokens_SB.flatten(0, -2)
    else:
        tokens_SB = tokens_SB.unsqueeze(0)
    tokens_SB = tokens_SB + lm.pooling.leading_tokens
    first = len(tokens_SB)  # samples which share a pass
    if keys.SAMPLE_WEIGHT in td:
        first = 1
    counts = dict.fromkeys(TOKEN_COUNTS, tokens_SB.new_zeros(()))
    for number, pass_SB in enumerate((tokens_SB[:first], tokens_SB[first:])):
        if not len(pass_SB) or not passes.learning + passes.reward_only:
            continue
        suffix = "" if passes.learning and not number else "_forward"
        _add_tokens(counts, suffix, pass_SB)
        padded_SB = pass_SB
        if not lm.packs:
            longest = -(-pass_SB.max() // lm.token_multiple) * lm.token_multiple
            padded_SB = longest.expand_as(pass_SB)
        _add_tokens(counts, f"{suffix}_padded", padded_SB)
    return dict(zip(counts, all_reduce_sum(*counts.values()), strict=True))


def _add_tokens(counts: dict[str, Tensor], suffix: str, tokens_SB: Tensor) -> None:
    """Add the tokens of a pass, and the pairs which attention sees."""
    counts[f"tokens{suffix}"] = counts[f"tokens{suffix}"] + tokens_SB.sum()
    counts[f"token_pairs{suffix}"] = counts[f"token_pairs{suffix}"] + causal_pairs(tokens_SB).sum()
