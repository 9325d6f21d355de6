"""How far stepping through an episode and rolling it out in one pass are apart: rounding, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenv import keys
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.run.parts import Parts

STAGES = {
    "encoding": keys.ENCODING,
    "boundary probability": keys.BOUNDARY_PROB,
    "early log-likelihood": keys.LOG_LIKELIHOOD_EARLY,
    "log-likelihood": keys.LOG_LIKELIHOOD,
}


@torch.no_grad()
def stepping_differences(env: TokenizationEnv, parts: Parts) -> dict[str, tuple[float, float]]:
    """Step through a batch of episodes, roll the same symbols out with the same actions, and compare.

    Args:
        env: whose next sequences are taken.
        parts: its model, and who acts.

    Returns:
        Stage to the mean and the largest absolute difference: of ``encoding`` relative to the encodings' root mean
        square, of ``boundary probability`` (whose mean is the share of decisions that come out differently for the
        same noise), and of both log-likelihoods in nats per symbol.
    """
    stepped = env.rollout(env.source.seq_len, parts.agent)
    symbol_BN = torch.cat([stepped[keys.SYMBOL], stepped["next", keys.SYMBOL][:, -1:]], 1)
    forcing_BT = 1.0 - stepped[keys.ACTION].float()  # 0 forces a boundary, 1 forces none
    asked = stepped.get(keys.TARGET_RATE, None)
    rate = None if asked is None else asked[:, 0]
    at_once = rollout(parts.lm, parts.agent, symbol_BN, noise=forcing_BT, rate=rate)
    found = {}
    for stage, key in STAGES.items():
        one, other = stepped[key].float(), at_once[key].float()
        apart = (one - other).abs()
        if key == keys.ENCODING:
            apart = apart / _root_mean_square(other)
        found[stage] = (apart.mean().item(), apart.max().item())
    return found


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
