"""``tokenv segment``: draw token boundaries in a text, in colour."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.options import SegmentOptions, check_text, resolve_options
from tokenv.cli.outputs import write_json_output
from tokenv.cli.sacred import Command, Record
from tokenv.config.hardware import prepare
from tokenv.evaluation.calibration import segment_at_rate
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.text_report import passage_facts, print_passage, to_passage, write_pages
from tokenv.library.spans import Spans
from tokenv.plotting.characters import Character
from tokenv.plotting.console import console


def show_segments(options: SegmentOptions, _record: Record) -> dict[str, Any]:
    """Colour a text by boundary probability, as one run or several segment it."""
    text = options.read()
    spans: dict[str, Spans] = {}
    passages: dict[str, list[Character]] = {}
    facts: dict[str, str] = {}
    for run in (options.run, *options.other_runs):
        trained = load_run(run, options.checkpoint)
        check_text(trained.config)
        prepare(trained.config.hardware)
        how = EvalOptions(seed=options.seed, threshold=options.threshold, rate=options.rate)
        segmentation = segment_at_rate(trained, text, how, tokens=options.tokens)
        spans[run], passages[run] = Spans(segmentation, trained.step), to_passage(segmentation)
        own = passage_facts(passages[run], trained.step)
        facts |= {run: ", ".join(f"{k}: {v}" for k, v in own.items())} if options.other_runs else {"run": run, **own}
        if options.other_runs:
            console().print(f"{run}:")
        print_passage(passages[run], options.max_chars)
    if options.out is not None:
        headings = passages if options.other_runs else {options.file or "text": passages[options.run]}
        pages = write_pages(Path(options.out), headings, facts)
        console().print("page: " + (options.out if len(pages) == 1 else f"{pages[0]} to {pages[-1]}"))
    write_json_output(options.json, {run: each.as_dict() for run, each in spans.items()})
    first = passages[options.run]
    return {"boundaries": sum(c.boundary for c in first), "characters": len(first)}


COMMAND = Command("segment", partial(resolve_options, SegmentOptions), show_segments, SegmentOptions)
run = COMMAND.run
