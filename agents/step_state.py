"""What a stepping agent remembers of the symbol before."""

from torch import Tensor


class StepState:
    """Values of earlier positions, for agents that compare neighbours or remember how a sequence began.

    An observation holds one position only, so an agent that acts at one position at a time must see every row's
    positions in order from 0 on (0 at any time starts a row anew), and steps through one batch at a time.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None  # values and positions

    def exchange(self, value: Tensor, position: Tensor) -> Tensor:
        """Give the values of the positions before, and keep these (detached) for the next call.

        Args:
            value: what stands at ``position``, [.., *shape].
            position: [..].

        Returns:
            What stood one position earlier, [.., *shape]; arbitrary at position 0.

        Raises:
            ValueError: a row is neither at the position after the last call's nor at 0.
        """
        before = self._before(value, position)
        self._last = value.detach().clone(), position.clone()
        return before

    def keep(self, value: Tensor, position: Tensor) -> Tensor:
        """What was given at position 0 of each row, at every later position.

        Args:
            value: of which only the rows at position 0 count, [.., *shape].
            position: [..].

        Returns:
            [.., *shape].

        Raises:
            ValueError: as ``exchange``.
        """
        start = (position == 0).view(*position.shape, *(1,) * (value.dim() - position.dim()))
        kept = value.detach().where(start, self._before(value, position))
        self._last = kept, position.clone()
        return kept

    def repeat(self, times: int) -> None:
        """Let each row's memory be that of ``times`` rows, side by side."""
        if self._last is not None:
            value, position = self._last
            self._last = value.repeat_interleave(times, 0), position.repeat_interleave(times, 0)

    def _before(self, value: Tensor, position: Tensor) -> Tensor:
        before = value.detach(), position.new_full(position.shape, -1)
        if self._last is not None and self._last[1].shape == position.shape:
            before = self._last
        if bool(((position > 0) & (position != before[1] + 1)).any()):
            raise ValueError(
                f"position = {position.tolist()} after {before[1].tolist()}: this agent reads what it saw "
                "before, so it expected the next position or 0 in every row; step through sequences from their "
                "start, or give whole sequences to draw"
            )
        return before[0]
