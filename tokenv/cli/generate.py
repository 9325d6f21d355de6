"""``tokenv generate``: continue a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tokenv.cli.options import TextOptions, check_text, encode, resolve_options
from tokenv.cli.passages import show
from tokenv.cli.sacred import Record, run_experiment
from tokenv.env.generate import generate
from tokenv.errors import UserError
from tokenv.report.characters import characters, visible
from tokenv.run.memory import check_generation
from tokenv.run.stored import load_run


@dataclass(frozen=True)
class GenerateOptions(TextOptions):
    """Options of ``tokenv generate``.

    Args:
        max_new: bytes to write.
        temperature: 0 takes the most probable byte.
        top_p: nucleus that bytes are drawn from.
        stop: text after which to stop.
    """

    max_new: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    stop: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new < 1:
            raise UserError(f"max_new = {self.max_new}: expected at least 1 byte to write")
        if self.temperature < 0:
            raise UserError(f"temperature = {self.temperature}: expected 0 (the most probable byte) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: expected a number in (0, 1]")
        if self.stop == "":
            raise UserError("stop is empty: expected a text after which to stop, or null")


def run(arguments: list[str]) -> Any:
    """Run the command: see ``tokenv.cli.main``."""
    return run_experiment("generate", arguments, partial(resolve_options, GenerateOptions), continue_text)


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
