"""The assignment of an update's sequences to the ranks of a distributed run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenv.config.schema import TrainConfig
from tokenv.core.errors import UserError


@dataclass(frozen=True)
class BatchAssignment:
    """The sequences of one of W ranks among the A passes of B sequences which make an update.

    The ranks form gcd(A, W) groups of successive ranks. Each group computes successive passes, and the members of a
    group share the rows of each pass, in the order of their ranks. A pass is shared only if there are more ranks than
    groups.

    Attributes:
        accumulate: number of passes A.
        batch_size: number of sequences B of each pass.
        rank: rank of this process.
        world: number of ranks W.
        together: whether all ranks share every pass, because each pass reads state of the one before.

    Raises:
        UserError: the ranks do not divide the sequences.
    """

    accumulate: int
    batch_size: int
    rank: int = 0
    world: int = 1
    together: bool = False

    def __post_init__(self) -> None:
        sequences = self.accumulate * self.batch_size
        if sequences % self.world:
            raise UserError(
                f"{self.world} processes cannot share the {sequences} sequences of an update evenly "
                f"(train.gradient_accumulation_steps = {self.accumulate}, train.batch_size = {self.batch_size}): "
                f"expected a number that divides {sequences}, such as {_divisor(sequences, self.world)}: change "
                "torchrun's --nproc-per-node, or train.batch_size"
            )
        if self.together and self.batch_size % self.world:
            raise UserError(
                f"{self.world} processes with train.batch_size = {self.batch_size}: this agent or estimator keeps "
                "state from one pass to the next, so that all processes share every pass: expected a number "
                f"that divides train.batch_size, such as {_divisor(self.batch_size, self.world)}"
            )

    @classmethod
    def of(cls, config: TrainConfig, rank: int = 0, world: int = 1, *, together: bool = False) -> BatchAssignment:
        """Return the assignment of a run."""
        return cls(config.gradient_accumulation_steps, config.batch_size, rank, world, together)

    def streams(self, most: int) -> int:
        """Return the largest number of streams, up to ``most``, which divides the update's sequences."""
        return _divisor(self.batch_size if self.together else self.accumulate * self.batch_size, most)

    @property
    def groups(self) -> int:
        """Number of groups of ranks which share their passes."""
        return 1 if self.together else math.gcd(self.accumulate, self.world)

    @property
    def members(self) -> int:
        """Number of ranks of a group."""
        return self.world // self.groups

    @property
    def passes(self) -> range:
        """This rank's passes of the update."""
        count = self.accumulate // self.groups
        first = self.rank // self.members * count
        return range(first, first + count)

    @property
    def rows(self) -> range:
        """This rank's rows of these passes."""
        count = self.batch_size // self.members
        first = self.rank % self.members * count
        return range(first, first + count)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` up to ``most``."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
