"""``tokenv segment``: draw token boundaries in a text, in colour."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.options import SegmentOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.report.table import console
from tokenv.run.hardware import prepare
from tokenv.run.passages import passage_of, show, write_page
from tokenv.run.stored import load_run, segment


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


COMMAND = Command("segment", partial(resolve_options, SegmentOptions), show_segments)
run = COMMAND.run
