"""``tokenv segment``: draw token boundaries in a text, in colour."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.json_output import write_json_output
from tokenv.cli.options import SegmentOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.hardware import prepare
from tokenv.evaluation.calibration import segment_at_rate
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.text_report import facts_of, passage_of, show, write_pages
from tokenv.library.spans import Spans
from tokenv.plotting.characters import Character
from tokenv.plotting.console import console


def show_segments(options: SegmentOptions, _record: Record) -> dict[str, Any]:
    """Colour a text by boundary probability, as one run or several cut it."""
    text = options.read()
    cuts: dict[str, Spans] = {}
    passages: dict[str, list[Character]] = {}
    facts: dict[str, str] = {}
    for run in (options.run, *options.other_runs):
        trained = load_run(run, options.checkpoint)
        check_text(trained.config)
        prepare(trained.config.hardware)
        asked: dict[str, Any] = {"rate": options.rate, "tokens": options.tokens}
        cut = segment_at_rate(trained, text, seed=options.seed, threshold=options.threshold, **asked)
        cuts[run], passages[run] = Spans(cut, trained.step), passage_of(cut)
        told = facts_of(passages[run], trained.step)
        facts |= (
            {"run": run, **told} if not options.other_runs else {run: ", ".join(f"{k}: {v}" for k, v in told.items())}
        )
        if options.other_runs:
            console().print(f"{run}:")
        show(passages[run], options.max_chars)
    if options.out is not None:
        named = passages if options.other_runs else {options.file or "text": passages[options.run]}
        pages = write_pages(Path(options.out), named, facts)
        console().print("page: " + (options.out if len(pages) == 1 else f"{pages[0]} to {pages[-1]}"))
    write_json_output(options.json, {run: spans.as_dict() for run, spans in cuts.items()})
    own = passages[options.run]
    return {"boundaries": sum(c.boundary for c in own), "characters": len(own)}


COMMAND = Command("segment", partial(resolve_options, SegmentOptions), show_segments, SegmentOptions)
run = COMMAND.run
