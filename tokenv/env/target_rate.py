"""Draw and check the target rates of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenv.core.distributed import current_group, local_rows
from tokenv.core.rates import Rate, RateRange
from tokenv.env.observation import Observer


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; a GPU is not waited for: what it has yet to do goes on, while pinned memory is copied."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def derive_seed(seed: int) -> int:
    """The seed of the rates that go with noise of this seed: they are other numbers."""
    return (seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**62


def sample_target_rates(
    rates: Rate, rows: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """A rate for each sequence of a batch.

    Args:
        rates: the range that they are drawn from; or one number for all.
        rows: sequences B, of those of the batch that this process holds.
        device: of the result.
        generator: draws for the whole batch (``tokenv.core.distributed``), so that a sequence's rate depends on its
            place alone.

    Returns:
        float32 [B].
    """
    if not isinstance(rates, RateRange):
        return torch.full((rows,), rates, device=device)
    place = device if generator is None else generator.device
    uniform = torch.rand(rows * current_group().size, device=place, generator=generator)
    return to_device_async(rates.at(local_rows(uniform, 0)), device)


def rate_or_mean(rate: float | Tensor | None, rates: RateRange | None) -> float | Tensor | None:
    """A rate that is asked for; where none is, the mean of the range, if there is one."""
    return rates.mean if rate is None and rates is not None else rate


def resolve_target_rate(
    observer: Observer,
    rates: RateRange | None,
    rate: float | Tensor | None,
    rows: int,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """What observations say of the rates.

    Args:
        observer: of what they hold.
        rates: the agent's range.
        rate: one number for all sequences, or one for each, [B]; None draws them from the range.
        rows: sequences B.
        device: of the result.
        generator: see ``sample_target_rates``.

    Returns:
        float [B]; None where they hold none.

    Raises:
        ValueError: a rate is given for an agent that is not told it, or none where there is no range; or it is outside
            (0, 1), or there is not one for each sequence.
    """
    if not observer.target_rate:
        if rate is not None:
            raise ValueError(f"rate = {rate}: this agent is not told a rate: expected None, or an agent with a range")
        return None
    if rate is None:
        if rates is None:
            raise ValueError("this agent reads target_rate and has no range of rates: give it one, or rate=")
        return sample_target_rates(rates, rows, device, generator)
    given = torch.as_tensor(rate, device=device)
    given = given if given.dtype == torch.float64 and isinstance(rate, Tensor) else given.float()
    if given.shape not in ((), (rows,)) or not bool(((given > 0) & (given < 1)).all()):
        raise ValueError(f"rate = {rate}: expected boundaries per symbol in (0, 1), one number or {rows}")
    return given.expand(rows)
