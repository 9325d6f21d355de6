"""``tokenv generate``: continue a text."""

from __future__ import annotations

from functools import partial

import torch

from tokenv.cli.options import GenerateOptions, check_text, encode, resolve_options
from tokenv.cli.passages import show
from tokenv.cli.sacred import Command, Record
from tokenv.env.generate import generate
from tokenv.errors import UserError
from tokenv.report.characters import characters, visible
from tokenv.run.memory import check_generation
from tokenv.run.stored import load_run


def continue_text(options: GenerateOptions, _record: Record) -> str:
    """Continue a text, boundaries drawn on the way."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    prompt = options.read()
    if not prompt:
        raise UserError("the text is empty: expected at least one byte to go on from")
    check_generation(trained.config, 1, len(prompt) + options.max_new)
    parts, device = trained.parts, trained.parts.lm.head.weight.device
    written = generate(
        parts.lm,
        parts.agent,
        torch.tensor([list(prompt)], device=device),
        options.max_new,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=None if options.stop is None else encode(options.stop),
        generator=torch.Generator(device).manual_seed(options.seed),
    )
    data = bytes(written.symbol_BN[0].tolist())
    show(characters(data, written.boundary_prob_BN[0].tolist(), written.action_BN[0].bool().tolist()))
    return visible(data.decode("utf-8", errors="replace"))  # Sacred prints it as it is


COMMAND = Command("generate", partial(resolve_options, GenerateOptions), continue_text)
run = COMMAND.run
