"""What the page asks and is answered, as plain values: nothing here knows of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenv.core.errors import UserError
from tokenv.evaluation.text_report import scale_of
from tokenv.library.model_cache import ModelCache
from tokenv.library.spans import Spans
from tokenv.plotting.characters import characters, escape
from tokenv.plotting.html import coloured, legend, render

LONGEST = 10_000  # bytes of a text: what a small model cuts on a CPU while one waits


@dataclass(frozen=True)
class SegmentRequest:
    """What the page wants to see.

    Args:
        text: at least one character.
        checkpoints: run to the name of its checkpoint; the chosen one where a run is not named.
        rate: boundaries per byte that logits are shifted to; None for the models' own.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
    """

    text: str
    checkpoints: dict[str, str] = field(default_factory=dict)
    rate: float | None = None
    threshold: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise UserError("the text is empty: expected at least one character")
        length = len(self.text.encode(errors="replace"))
        if length > LONGEST:
            raise UserError(
                f"the text has {length:,} bytes: expected at most {LONGEST:,}; tokenv segment takes longer ones"
            )


def page(shelf: ModelCache, seed: int) -> str:
    """The page itself; what it draws with it asks for.

    Args:
        shelf: of runs.
        seed: of drawn boundaries.
    """
    return render(
        "library/page.html.jinja",
        runs=[escape(run) for run in shelf.chosen],
        seed=seed,
        longest=LONGEST,
        **legend((0.0, 1.0)),
    )


def answer(
    shelf: ModelCache, asked: SegmentRequest, seed: int, *, check: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return a text as every run cuts it.

    Args:
        shelf: of runs.
        asked: the text and how to cut it.
        seed: of drawn boundaries.
        check: called before every run; raises where nobody waits for the answer any more.

    Returns:
        For JSON: ``runs``, each with ``run``, ``checkpoint`` and either ``spans`` (as ``tokenv segment json=`` has it),
        ``facts`` and ``html`` (the coloured text, escaped) or ``error``; and ``labels`` of the one colour scale of all.
    """
    cuts: dict[str, Spans] = {}
    told: list[dict[str, Any]] = []
    for run, chosen in shelf.chosen.items():
        name = asked.checkpoints.get(run, chosen)
        said: dict[str, Any] = {"run": run, "checkpoint": name}
        check()
        try:
            cuts[run] = shelf.model(run, name).spans(asked.text, seed=seed, threshold=asked.threshold, rate=asked.rate)
        except UserError as error:
            said["error"] = escape(str(error))
        told.append(said)
    passages = {run: characters(cut.text, cut.probabilities, cut.boundaries) for run, cut in cuts.items()}
    scale = scale_of(*passages.values())
    for said in told:
        if said["run"] in cuts:
            cut = cuts[said["run"]]
            spans = coloured(passages[said["run"]], scale)
            said |= {
                "facts": facts(cut),
                "html": render("library/passage.html.jinja", spans=spans),
                "spans": cut.as_dict(),
            }
    return {"runs": told, "labels": legend(scale)["labels"]}


def facts(cut: Spans) -> Mapping[str, str]:
    """What a run's table says of a text."""
    bits = cut.bits_per_byte
    shifted = {"logits shifted by": f"{cut.logit_bias:+.2f}".replace("-", "−")} if cut.logit_bias else {}
    return {
        "bits per byte": "–" if bits is None else f"{bits:.3f}",
        "boundaries per byte": f"{cut.rate:.3f}",
        "tokens": f"{len(cut):,} of {len(cut.text):,} bytes",
        **shifted,
    }
