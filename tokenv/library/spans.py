"""Tokens of a text: positions, boundary probabilities and bits; a Hugging Face pre-tokenizer which makes them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, overload

import numpy as np

from tokenv.evaluation.loaded_run import Segmentation
from tokenv.evaluation.text_report import passage_page, to_passage

NOTEBOOK_BYTES = 20_000  # bytes which a notebook shows


@dataclass(frozen=True)
class Span:
    """Token of a text.

    Attributes:
        start: offset of its first byte.
        end: offset after its last byte.
        text: its bytes.
        probability: probability of the boundary after its last byte, in [0, 1].
        bits: ``-log2 p`` of its bytes given all preceding ones, without bytes which have no preceding ones.
    """

    start: int
    end: int
    text: bytes
    probability: float
    bits: float


class Spans(Sequence[Span]):
    """Tokens of a text; a notebook shows them in colour.

    Args:
        segmentation: text with its boundaries.
        step: step of the model which drew them.

    Attributes:
        text: N bytes of the text.
        probabilities: probability of a boundary after each byte, N numbers in [0, 1].
        boundaries: whether a boundary was drawn after each byte.
        bits: ``-log2 p`` of each byte given the preceding ones; None for the first byte of each piece, since a text
            which is longer than the model's training sequences is split into pieces.
        logit_bias: number which was added to the logits of all decisions; 0 at the model's own rate.
    """

    def __init__(self, segmentation: Segmentation, step: int) -> None:
        self._step = step
        self.text = segmentation.text
        self.logit_bias = segmentation.logit_bias
        self.probabilities = segmentation.probability_N
        self.boundaries = segmentation.boundary_N
        self.bits = [
            None if math.isnan(nats) else -nats / math.log(2)
            for nats in segmentation.log_likelihood_N
        ]
        ends = [i + 1 for i, drawn in enumerate(self.boundaries[:-1]) if drawn] + [len(self.text)]
        self._spans = [self._span(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _span(self, start: int, end: int) -> Span:
        bits = sum(each for each in self.bits[start:end] if each is not None)
        return Span(
            start,
            end,
            self.text[start:end],
            self.probabilities[end - 1],
            bits,
        )

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def tokens(self) -> list[bytes]:
        """Bytes of each token; joined, they are the text."""
        return [span.text for span in self]

    @property
    def rate(self) -> float:
        """Drawn boundaries per byte."""
        return sum(self.boundaries) / len(self.boundaries)

    @property
    def bits_per_byte(self) -> float | None:
        """Mean bits of the bytes which have preceding ones; None if there are none."""
        bits = [each for each in self.bits if each is not None]
        if bits:
            return math.fsum(bits) / len(bits)
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON: tokens, and a number per byte; bytes which are not UTF-8 are escaped."""
        tokens = [
            {
                "start": span.start,
                "end": span.end,
                "text": span.text.decode(errors="backslashreplace"),
                "probability": round(span.probability, 6),
                "bits": round(span.bits, 6),
            }
            for span in self
        ]
        return {
            "step": self._step,
            "bytes": len(self.text),
            "logit_bias": self.logit_bias,
            "tokens": tokens,
            "probability": [round(each, 6) for each in self.probabilities],
            "boundary": list(map(int, self.boundaries)),
            "bits": [None if each is None else round(each, 6) for each in self.bits],
        }

    def __repr__(self) -> str:
        shown = list(map(repr, self.tokens[:20]))
        if len(self) > len(shown):
            shown.append("...")
        return f"Spans({len(self)} tokens of {len(self.text)} bytes: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Return the text in colour, inside a frame which keeps its style from the notebook."""
        shown = slice(NOTEBOOK_BYTES)
        excerpt = Segmentation(
            self.text[shown], self.probabilities[shown], self.boundaries[shown], []
        )
        cut = len(self.text) > NOTEBOOK_BYTES
        if cut:
            title = f"the first {NOTEBOOK_BYTES:,} of {len(self.text):,} bytes"
        else:
            title = "text"
        html = passage_page(title, to_passage(excerpt), self._step)
        lines = sum(1 + len(line) // 80 for line in excerpt.text.split(b"\n"))
        height = 22 + min(30, 2 * lines)  # heading, legend and text; longer texts scroll
        return f'<iframe srcdoc="{escape(html)}" style="width: 100%; height: {height}em; border: 0"></iframe>'


class PreTokenizer:
    """Splits text at a model's boundaries.

    ``tokenizers.pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer())`` makes it a pre-tokenizer of that library: a
    tokenizer with it learns a vocabulary within the model's tokens. Like all custom ones, it is not saved
    (``Model.train_tokenizer`` returns a tokenizer which is).

    Args:
        ends: function from a text of at least one character to the offsets at which its tokens end, in bytes.
    """

    def __init__(self, ends: Callable[[str], np.ndarray[Any, Any]]) -> None:
        self._ends = ends

    def pre_tokenize_str(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Split a text into pieces with their offsets in characters; joined, the pieces are the text.

        A boundary inside a character of several bytes is moved to its end.
        """
        return [(text[start:end], (start, end)) for start, end in pairwise(self._offsets(text))]

    def pre_tokenize(self, pretok: Any) -> None:
        """Split a ``PreTokenizedString`` in place; the library calls this method."""
        pretok.split(
            lambda _, piece: [
                piece[start:end] for start, end in pairwise(self._offsets(str(piece)))
            ]
        )

    def _offsets(self, text: str) -> list[int]:
        """Return offsets in characters, from 0 to the text's end; none for an empty text."""
        if not text:
            return []
        lengths = [len(character.encode(errors="surrogateescape")) for character in text]
        characters = np.searchsorted(np.cumsum(lengths), self._ends(text)) + 1
        return [0, *np.unique(characters).tolist()]
