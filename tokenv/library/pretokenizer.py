"""A model's boundaries as a pre-tokenizer of Hugging Face's ``tokenizers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from tokenv.library.spans import Span


class PreTokenizer:
    """Splits text where a model draws boundaries above 1/2.

    ``tokenizers.pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer())`` is one of that library's: a tokenizer that
    is trained behind it learns a vocabulary within the model's tokens. Like all custom ones, it is not saved with it.

    Args:
        spans: cuts a text of at least one character.
    """

    def __init__(self, spans: Callable[[str], Iterable[Span]]) -> None:
        self._spans = spans

    def pre_tokenize_str(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Pieces with their offsets in characters, as all of the library's pre-tokenizers give them.

        A boundary inside a character of several bytes comes after it. Joined, the pieces are the text.
        """
        return [(text[start:end], (start, end)) for start, end in pairwise(self._cuts(text))]

    def pre_tokenize(self, pretok: Any) -> None:
        """Split a ``PreTokenizedString`` in place: what the library calls."""
        pretok.split(lambda _, piece: [piece[start:end] for start, end in pairwise(self._cuts(str(piece)))])

    def _cuts(self, text: str) -> list[int]:
        """Offsets in characters, from 0 to the text's end; none for an empty text."""
        if not text:
            return []
        ends = {span.end for span in self._spans(text)}
        cuts, position = [0], 0
        for i, character in enumerate(text, 1):
            before, position = position, position + len(character.encode(errors="surrogateescape"))
            if not ends.isdisjoint(range(before + 1, position + 1)):
                cuts.append(i)
        return cuts
