"""Return which sequences of an update belong to which rank of a distributed run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenv.config.schema import TrainConfig
from tokenv.core.errors import UserError


@dataclass(frozen=True)
class BatchAssignment:
    """Of the A passes of B sequences that make an update, those of one rank of W.

    As many groups of successive ranks as divide both A and W take successive passes, and share each between them: its
    rows, in the order of their ranks. So a pass is shared only where there are more ranks than passes to go round.

    Attributes:
        accumulate: passes A.
        batch_size: sequences B of each.
        rank: this process.
        world: how many there are, W.
        together: whether all ranks share every pass, because each pass learns from the one before.

    Raises:
        UserError: the ranks do not divide the sequences.
    """

    accumulate: int
    batch_size: int
    rank: int = 0
    world: int = 1
    together: bool = False

    def __post_init__(self) -> None:
        slots = self.accumulate * self.batch_size
        if slots % self.world:
            raise UserError(
                f"{self.world} processes cannot share the {slots} sequences of an update evenly "
                f"(train.gradient_accumulation_steps = "
                f"{self.accumulate}, train.batch_size = {self.batch_size}): expected a number that divides {slots}, "
                f"such as {_divisor(slots, self.world)}: change torchrun's --nproc-per-node, or train.batch_size"
            )
        if self.together and self.batch_size % self.world:
            raise UserError(
                f"{self.world} processes with train.batch_size = {self.batch_size}: this agent or estimator remembers "
                "something of every pass for the next one, so that all processes share every pass: expected a number "
                f"that divides train.batch_size, such as {_divisor(self.batch_size, self.world)}"
            )

    @classmethod
    def of(cls, config: TrainConfig, rank: int = 0, world: int = 1, *, together: bool = False) -> BatchAssignment:
        """Of a run; see there."""
        return cls(config.gradient_accumulation_steps, config.batch_size, rank, world, together)

    def streams(self, most: int) -> int:
        """How many streams, at most so many, the update's sequences can be shared out to."""
        return _divisor(self.batch_size if self.together else self.accumulate * self.batch_size, most)

    @property
    def groups(self) -> int:
        """Of ranks that share their passes."""
        return 1 if self.together else math.gcd(self.accumulate, self.world)

    @property
    def members(self) -> int:
        """Ranks of a group."""
        return self.world // self.groups

    @property
    def passes(self) -> range:
        """Which of the update's passes are this rank's."""
        each = self.accumulate // self.groups
        first = self.rank // self.members * each
        return range(first, first + each)

    @property
    def rows(self) -> range:
        """Which rows of these passes are."""
        each = self.batch_size // self.members
        first = self.rank % self.members * each
        return range(first, first + each)


def _divisor(number: int, most: int) -> int:
    return next(each for each in range(most, 0, -1) if number % each == 0)
