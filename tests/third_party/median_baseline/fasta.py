"""A kind of data: sequences of bases, which are read as bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenv.core.errors import UserError
from tokenv.core.terminology import Terminology
from tokenv.data.chunks import Document
from tokenv.data.corpus import InMemoryDataset
from tokenv.data.kinds import DataKind
from tokenv.data.split import split_documents


@dataclass(frozen=True)
class Fasta(DataKind):
    """Sequences of bases in a FASTA file.

    Args:
        lower: turn bases into small letters.
    """

    lower: bool = False
    words: ClassVar = Terminology(
        "sequences", "base", "segment", "segments", "sequence", "true segments"
    )
    codec: ClassVar = "bytes"

    def check_source(self, data):
        if not data.source.endswith(".fasta"):
            raise UserError(f"data.source = {data.source!r}: expected a .fasta file")

    def load(self, data):
        documents = []
        for record in Path(data.source).read_text().split(">")[1:]:
            name, _, bases = record.partition("\n")
            bases = bases.replace("\n", "")
            if self.lower:
                bases = bases.lower()
            documents.append(Document(name, bases.encode()))
        return InMemoryDataset(split_documents(documents, data), data)
