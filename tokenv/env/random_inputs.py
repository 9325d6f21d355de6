"""Draw the random inputs of a batch of sequences: the noise which decides the actions, and the target rates.

What is drawn for a batch does not depend on how its rows are distributed over processes (``tokenv.core.distributed``).
"""

import torch
from torch import Tensor

from tokenv.core.contracts import Sampling
from tokenv.core.devices import to_device_async
from tokenv.core.distributed import SINGLE_PROCESS, current_group, local_rows
from tokenv.core.rates import Rate, RateRange
from tokenv.env.observation import Observer


def couple_noise(
    decision_mask_BT: Tensor,
    sampling: Sampling,
    noise: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw the noise of a batch unless it is given, and couple it between samples: [.., B, T].

    Args:
        decision_mask_BT: False where no decision is made, in the rows of this process.
        sampling: number of samples, and how their noise is coupled.
        noise: noise which is given, for the rows of this process; None draws it.
        generator: random generator, which draws for the whole batch; None for torch's own.
    """
    device = decision_mask_BT.device
    group = current_group() if noise is None else SINGLE_PROCESS
    source = getattr(generator, "device", device)
    if noise is None:
        rows, steps = decision_mask_BT.shape
        shape = [rows * group.size, steps]
        if sampling.num_samples is not None:
            shape.insert(0, sampling.num_samples)
        batch_noise = torch.rand(shape, device=source, generator=generator)
    else:
        batch_noise = noise.to(source)
    if sampling.couple is not None:
        batch_noise = sampling.couple(
            batch_noise,
            group.gather(decision_mask_BT).to(source),
            generator,
        )
    if noise is None:
        batch_noise = local_rows(batch_noise)
    return to_device_async(batch_noise, device)


def derive_seed(seed: int) -> int:
    """Return the seed of the target rates which belong to noise of this seed, so that the numbers differ."""
    return (seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**62


def sample_target_rates(
    rates: Rate, rows: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a target rate for each sequence of a batch.

    Args:
        rates: range from which the rates are drawn, or one number for all sequences.
        rows: sequences B of the batch in this process.
        device: device of the result.
        generator: random generator, which draws for the whole batch, so that the rate of a sequence depends on its
            row alone.

    Returns:
        float32 [B].
    """
    if not isinstance(rates, RateRange):
        return torch.full((rows,), rates, device=device)
    source = getattr(generator, "device", device)
    uniform = torch.rand(
        rows * current_group().size,
        device=source,
        generator=generator,
    )
    return to_device_async(rates.at(local_rows(uniform, 0)), device)


def rate_or_mean(rate: float | Tensor | None, rates: RateRange | None) -> float | Tensor | None:
    """Return the rate, or where it is None the mean of the range, if there is one."""
    if rate is None and rates is not None:
        return rates.mean
    return rate


def resolve_target_rate(
    observer: Observer,
    rates: RateRange | None,
    rate: float | Tensor | None,
    rows: int,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """Return the target rates which observations hold.

    Args:
        observer: observer of the observations.
        rates: range of the agent.
        rate: one number for all sequences, or one for each, [B]; None draws them from the range.
        rows: sequences B.
        device: device of the result.
        generator: see ``sample_target_rates``.

    Returns:
        float [B]; None if observations hold no target rate.

    Raises:
        ValueError: a rate is given for an agent that does not read it, or none is given and the agent has no range; or
            it is outside (0, 1), or their number is not that of the sequences.
    """
    if not observer.has_target_rate:
        if rate is not None:
            raise ValueError(
                f"rate = {rate}: this agent does not read a target rate: expected None, or an agent with a range"
            )
        return None
    if rate is None:
        if rates is None:
            raise ValueError(
                "this agent reads target_rate and has no range of rates: give it one, or rate="
            )
        return sample_target_rates(rates, rows, device, generator)
    given = torch.as_tensor(rate, device=device)
    if given.dtype != torch.float64 or not isinstance(rate, Tensor):
        given = given.float()
    is_rate = (given > 0) & (given < 1)
    if given.shape not in ((), (rows,)) or not bool(is_rate.all()):
        raise ValueError(
            f"rate = {rate}: expected boundaries per symbol in (0, 1), one number or {rows}"
        )
    return given.expand(rows)
