"""A text in tokens: where each begins and ends, how probable its boundary was, and what its bytes cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, overload

from tokenv.evaluation.loaded_run import Segmentation
from tokenv.evaluation.text_report import page, passage_of

SHOWN = 20_000  # bytes that a notebook draws


@dataclass(frozen=True)
class Span:
    """A token.

    Attributes:
        start: offset of its first byte.
        end: offset one past its last byte.
        text: its bytes.
        probability: of the boundary after its last byte, in [0, 1].
        bits: ``-log2 p`` of its bytes given all before them, those left out that have nothing before them.
    """

    start: int
    end: int
    text: bytes
    probability: float
    bits: float


class Spans(Sequence[Span]):
    """The tokens of a text; a notebook draws it coloured.

    Args:
        cut: the text with its boundaries.
        step: of the model that drew them.

    Attributes:
        text: its N bytes.
        probabilities: of a boundary after each byte, N numbers in [0, 1].
        boundaries: whether one was drawn there, N.
        bits: ``-log2 p`` of each byte given those before it, N; None where nothing stands before it: at the first
            byte, and where a text was cut because it is longer than the model was trained on.
        logit_bias: by which the logits of all decisions were shifted; 0 where the rate is the model's own.
    """

    def __init__(self, cut: Segmentation, step: int) -> None:
        self._cut, self._step = cut, step
        self.text, self.probabilities, self.boundaries = cut.text, cut.probability_N, cut.boundary_N
        self.logit_bias = cut.logit_bias
        self.bits = [None if math.isnan(nats) else -nats / math.log(2) for nats in cut.log_likelihood_N]
        ends = [i + 1 for i, drawn in enumerate(self.boundaries[:-1]) if drawn] + [len(self.text)]
        self._spans = [self._span(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _span(self, start: int, end: int) -> Span:
        bits = sum(each for each in self.bits[start:end] if each is not None)
        return Span(start, end, self.text[start:end], self.probabilities[end - 1], bits)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    @property
    def tokens(self) -> list[bytes]:
        """The tokens' bytes; joined, they are the text."""
        return [span.text for span in self]

    @property
    def rate(self) -> float:
        """Boundaries drawn per byte."""
        return sum(self.boundaries) / len(self.boundaries)

    @property
    def bits_per_byte(self) -> float | None:
        """Mean of the bytes that have bits; None where none has."""
        known = [each for each in self.bits if each is not None]
        return math.fsum(known) / len(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        """All there is, for JSON: tokens, and one number a byte; in texts, bytes that are no UTF-8 are escaped."""
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
        shown = ", ".join(map(repr, self.tokens[:20]))
        return f"Spans({len(self)} tokens of {len(self.text)} bytes: {shown}{', ...' if len(self) > 20 else ''})"

    def _repr_html_(self) -> str:
        """The text coloured by boundary probability, in a frame of its own, so that its style stays inside."""
        some = slice(min(SHOWN, len(self.text)))
        cut = Segmentation(self.text[some], self.probabilities[some], self.boundaries[some], [])
        left = f"the first {SHOWN:,} of {len(self.text):,} bytes" if len(self.text) > SHOWN else "text"
        drawn = page(left, passage_of(cut), self._step)
        lines = sum(1 + len(line) // 80 for line in cut.text.split(b"\n"))
        height = 22 + min(30, 2 * lines)  # heading, legend, and the text; what is longer scrolls
        return f'<iframe srcdoc="{escape(drawn)}" style="width: 100%; height: {height}em; border: 0"></iframe>'
