"""What an update costs: the FLOPs that the method needs, and those that were executed."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum
from tokenv.lm.flops import Tokens, policy_flops, update_flops


def count_tokens(td: TensorDictBase, parts: Components) -> dict[str, Tensor]:
    """Return the tokens of a rollout that the token-level layers work on; of a shared batch, the whole batch's.

    Args:
        td: the rollout.
        parts: what made it.

    Returns:
        ``tokens`` of the samples that the model learns from, ``tokens_forward`` of those that go forward only; and
        both ``_padded`` as they are computed: to the longest sequence of a pass, to a multiple that keeps shapes few.
        In a pack (``hardware.sequence_packing``) nothing is padded but for at most a sixteenth, which is not counted.
    """
    lm, passes = parts.lm, parts.passes
    drawn_SB = td[keys.ACTION].sum(-1).flatten(0, -2) if td.dim() > 2 else td[keys.ACTION].sum(-1).unsqueeze(0)
    drawn_SB = drawn_SB + lm.pooling.leading_tokens
    first = 1 if keys.SAMPLE_WEIGHT in td else len(drawn_SB)  # samples that share a pass
    nothing = drawn_SB.new_zeros(())
    found = dict.fromkeys(("tokens", "tokens_forward", "tokens_padded", "tokens_forward_padded"), nothing)
    for number, pass_SB in enumerate((drawn_SB[:first], drawn_SB[first:])):
        if not len(pass_SB) or not passes.learning + passes.reward_only:
            continue
        name = "tokens" if passes.learning and not number else "tokens_forward"
        longest = -(-pass_SB.max() // lm.token_multiple) * lm.token_multiple
        there = pass_SB.sum()
        found[name] = found[name] + there
        found[f"{name}_padded"] = found[f"{name}_padded"] + (there if lm.packs else longest * pass_SB.numel())
    return dict(zip(found, all_reduce_sum(*found.values()), strict=True))


class UpdateFlops:
    """Counts updates of some parts.

    Args:
        parts: what learns.
        optimizer: FLOPs of an update's steps; see ``tokenv.training.update.optimizer_flops``.
    """

    def __init__(self, parts: Components, optimizer: int) -> None:
        self._lm, self._policy, self._optimizer = parts.lm, policy_flops(parts.agent), optimizer
        self._passes, self._recompute = parts.passes, parts.lm.recomputes

    def take(self, metrics: dict[str, Any], symbols: int) -> tuple[int, int]:
        """Return what the method needed and what was executed, and take what ``count_tokens`` gave out of metrics.

        Args:
            metrics: of an update.
            symbols: that it learned from.
        """
        counted = [
            Tokens(round(metrics.pop(f"tokens{padded}")), round(metrics.pop(f"tokens_forward{padded}")))
            for padded in ("", "_padded")
        ]
        needed, executed = (
            self._optimizer + update_flops(self._lm, symbols, tokens, self._policy, self._passes, recompute=recompute)
            for tokens, recompute in zip(counted, (False, self._recompute), strict=True)
        )
        return needed, executed
