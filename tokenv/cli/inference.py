"""Commands which use a trained model on text: generate, segment and serve."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.options import GenerateOptions, SegmentOptions, ServeOptions, check_text, encode, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.hardware import prepare
from tokenv.evaluation.calibration import segment_at_rate
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import generate_texts, load_run, rate_for_flops
from tokenv.evaluation.text_report import passage_facts, print_passage, to_passage, write_pages
from tokenv.library.handlers import ModelCache
from tokenv.library.server import build_application, check_installed, host_names, in_url, listen, serve
from tokenv.library.spans import Spans
from tokenv.plotting.characters import Character, escape
from tokenv.plotting.console import console, write_json_output


def continue_text(options: GenerateOptions, _record: Record) -> str:
    """Continue a text, and draw its boundaries on the way; the result is the first continuation."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    rate = options.rate
    if options.flops is not None:
        rate = rate_for_flops(trained.components, options.flops, trained.config.data.seq_len)
    stop = None
    if options.stop is not None:
        stop = encode(options.stop)
    (written,) = generate_texts(
        trained,
        [options.read()],
        options.max_new_tokens,
        EvalOptions(seed=options.seed, rate=rate),
        samples=options.num_return_sequences,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=stop,
    )
    for each in written:
        print_passage(to_passage(each))
    spans: Any = [Spans(each, trained.step).as_dict() for each in written]
    if options.num_return_sequences == 1:
        (spans,) = spans
    write_json_output(options.json, spans)
    first = written[0].text.decode("utf-8", errors="replace")
    return escape(first)  # Sacred prints the result without escaping it


GENERATE = Command("generate", partial(resolve_options, GenerateOptions), continue_text, GenerateOptions)


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
        spans[run] = Spans(segmentation, trained.step)
        passages[run] = to_passage(segmentation)
        own = passage_facts(passages[run], trained.step)
        if options.other_runs:
            facts[run] = ", ".join(f"{name}: {value}" for name, value in own.items())
            console().print(f"{run}:")
        else:
            facts = {"run": run, **own}
        print_passage(passages[run], options.max_chars)
    if options.out is not None:
        headings = passages
        if not options.other_runs:
            headings = {options.file or "text": passages[options.run]}
        pages = write_pages(Path(options.out), headings, facts)
        files = options.out
        if len(pages) > 1:
            files = f"{pages[0]} to {pages[-1]}"
        console().print(f"page: {files}")
    write_json_output(options.json, {run: each.as_dict() for run, each in spans.items()})
    first = passages[options.run]
    return {"boundaries": sum(c.boundary for c in first), "characters": len(first)}


SEGMENT = Command("segment", partial(resolve_options, SegmentOptions), show_segments, SegmentOptions)


def serve_page(options: ServeOptions, _record: Record) -> None:
    """Serve until Ctrl-C."""
    check_installed()
    with listen(options.host, options.port) as listening:
        models = ModelCache([options.run, *options.other_runs], options.checkpoint)
        for config in models.configs.values():
            check_text(config)
        numeric, port, *_ = listening.getsockname()
        app = build_application(models, seed=options.seed, names=host_names(options.host, numeric))
        address = f"http://{in_url(options.host)}:{port}/"
        console().print(f"{', '.join(models.defaults)} at {address} (Ctrl-C ends)", soft_wrap=True)
        sys.stdout.flush()
        serve(app, listening)


SERVE = Command("serve", partial(resolve_options, ServeOptions), serve_page, ServeOptions)
