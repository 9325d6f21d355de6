"""A command of this package."""

from dataclasses import dataclass, field

from tokenv.config.commands import Command, Record
from tokenv.core.errors import COUNT


@dataclass(frozen=True)
class Count(Command):
    """Count the letters of a word: ``with word=…``.

    Args:
        word: word whose letters are counted.
        times: number by which they are multiplied.
    """

    word: str
    times: int = field(default=1, metadata=COUNT)

    def work(self, record: Record) -> int:
        """Count, and store the word."""
        path = record.scratch / "word.txt"
        path.write_text(self.word)
        record.add(path)
        print(f"{self.word} has {len(self.word)} letters")
        return len(self.word) * self.times
