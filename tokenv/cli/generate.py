"""``tokenv generate``: continue a text."""

from __future__ import annotations

from functools import partial

from tokenv.cli.options import GenerateOptions, check_text, encode, resolve_options
from tokenv.cli.outputs import write_json_output
from tokenv.cli.sacred import Command, Record
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import generate_text, load_run, rate_for_flops
from tokenv.evaluation.text_report import print_passage, to_passage
from tokenv.library.spans import Spans
from tokenv.plotting.characters import escape


def continue_text(options: GenerateOptions, _record: Record) -> str:
    """Continue a text, and draw its boundaries on the way."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    rate = options.rate if options.flops is None else rate_for_flops(trained.components, options.flops)
    written = generate_text(
        trained,
        options.read(),
        options.max_new,
        EvalOptions(seed=options.seed, rate=rate),
        temperature=options.temperature,
        top_p=options.top_p,
        stop=None if options.stop is None else encode(options.stop),
    )
    print_passage(to_passage(written))
    write_json_output(options.json, Spans(written, trained.step).as_dict())
    return escape(written.text.decode("utf-8", errors="replace"))  # Sacred prints the result without escaping it


COMMAND = Command("generate", partial(resolve_options, GenerateOptions), continue_text, GenerateOptions)
run = COMMAND.run
