"""What a comparison wants to know of a run; without torch, for options are read before it is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wishes:
    """What is to be measured of a run.

    Attributes:
        passages: held-out sequences to keep with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary that boundaries in text are held against.
        calibrate: whether to measure at exactly the target rate; see ``tokenv.run.calibrate``.
        rates: boundaries per symbol to measure at besides; see ``tokenv.run.rate_curve``.
    """

    passages: int = 3
    bpe_vocabulary: int = 32_000
    calibrate: bool = False
    rates: tuple[float, ...] = ()
