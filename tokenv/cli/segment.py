"""``tokenv segment``: draw token boundaries in a text, in colour."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.options import TextOptions, check_text, resolve_options
from tokenv.cli.passages import passage_of, show, write_page
from tokenv.cli.sacred import Record, run_experiment
from tokenv.report.table import console
from tokenv.run.hardware import prepare
from tokenv.run.stored import load_run, segment


@dataclass(frozen=True)
class SegmentOptions(TextOptions):
    """Options of ``tokenv segment``.

    Args:
        out: HTML page to write; nothing is written where null.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
    """

    out: str | None = "segments.html"
    threshold: bool = False


def run(arguments: list[str]) -> Any:
    """Run the command: see ``tokenv.cli.main``."""
    return run_experiment("segment", arguments, partial(resolve_options, SegmentOptions), show_segments)


def show_segments(options: SegmentOptions, _record: Record) -> dict[str, Any]:
    """Colour a text by boundary probability."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    prepare(trained.config.hardware)
    passage = passage_of(segment(trained, options.read(), seed=options.seed, threshold=options.threshold))
    show(passage)
    if options.out is not None:
        write_page(Path(options.out), options.file or "text", passage, trained, run=options.run)
        console().print(f"page: {options.out}")
    return {"boundaries": sum(c.boundary for c in passage), "characters": len(passage)}
