"""Commands which use a trained model on text: generate, segment and serve."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenv.config.commands import Record, check_kind
from tokenv.core.atomic import output
from tokenv.core.errors import (
    COUNT,
    COUNT_OR_NULL,
    NOT_NEGATIVE,
    SHARE,
    UserError,
    at_least,
    bounds,
)
from tokenv.core.rates import FLOPS, REQUESTED_RATE
from tokenv.evaluation.run_command import RunCommand, check_input
from tokenv.plotting.characters import Character, escape
from tokenv.plotting.console import console, write_json_output

if TYPE_CHECKING:
    from tokenv.library.spans import Spans

STANDARD_INPUT = "-"
KEPT = "surrogateescape"  # bytes of the command line which are not UTF-8


@dataclass(frozen=True)
class TextCommand(RunCommand):
    """Command which reads a text.

    Args:
        json: file for all results, in addition to what is printed; null for none.
        text: text, if there is no file.
        file: file with the text (UTF-8 or any bytes; .gz, .xz and .zst are decompressed); - for standard input.
        rate: boundaries per byte. A run which was trained for a range of rates is given the rate; for any other,
            segment shifts the logits until this text has it. null for the run's own.
    """

    json: str | None = field(default=None, metadata=output())
    text: str | None = None
    file: str | None = field(
        default=None, metadata={"check": partial(check_input, accepted=STANDARD_INPUT)}
    )
    rate: float | None = field(default=None, metadata=REQUESTED_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None and self.file is None:
            raise UserError('text and file are missing: expected one of text="..." and file=PATH')
        if self.text is not None and self.file is not None:
            raise UserError(
                f"text = {self.text[:40]!r} and file = {self.file!r}: expected one of them"
            )

    def read_text(self) -> bytes:
        """Return the bytes of the text.

        Raises:
            UserError: the file is compressed and damaged.
        """
        if self.file is None:
            return (self.text or "").encode(errors=KEPT)
        if self.file == STANDARD_INPUT:
            return sys.stdin.buffer.read()
        from tokenv.data.packed import read_unpacked  # loads pyarrow

        return read_unpacked(Path(self.file))


@dataclass(frozen=True)
class Generate(TextCommand):
    """Continue a text: ``with run=runs/7 text="…"``.

    Args:
        max_new_tokens: number of bytes to write.
        num_return_sequences: number of continuations: those of the seeds ``seed``, ``seed + 1``, and so on.
        temperature: temperature of the bytes' distribution; 0 takes the most probable byte.
        top_p: probability mass of the nucleus from which bytes are sampled.
        stop: text after which generation stops.
        flops: budget of floating-point operations per byte, in place of a rate (docs/rates.md); null for none.
    """

    max_new_tokens: int = field(default=200, metadata=COUNT)
    num_return_sequences: int = field(default=1, metadata=COUNT)
    temperature: float = field(default=0.8, metadata=NOT_NEGATIVE)
    top_p: float = field(default=0.95, metadata=SHARE)
    stop: str | None = field(
        default=None, metadata=bounds("a text which is not empty, or null", lambda x: x != "")
    )
    flops: float | None = field(default=None, metadata=FLOPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flops is not None and self.rate is not None:
            raise UserError(
                f"flops = {self.flops:g} and rate = {self.rate:g}: expected one of them"
            )

    def work(self, _record: Record) -> str:
        """Continue a text, and draw its boundaries on the way; the result is the first continuation."""
        from tokenv.evaluation import evaluator, loaded_run, text_report
        from tokenv.library.spans import Spans

        trained = self.load()
        rate = self.rate
        if self.flops is not None:
            rate = loaded_run.rate_for_flops(
                trained.components, self.flops, trained.config.data.seq_len
            )
        stop = None
        if self.stop is not None:
            stop = self.stop.encode(errors=KEPT)
        (written,) = loaded_run.generate_texts(
            trained,
            [self.read_text()],
            self.max_new_tokens,
            evaluator.EvalOptions(seed=self.seed, rate=rate),
            samples=self.num_return_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=stop,
        )
        for each in written:
            text_report.print_passage(text_report.to_passage(each))
        spans: Any = [Spans(each, trained.state.step).as_dict() for each in written]
        if self.num_return_sequences == 1:
            (spans,) = spans
        write_json_output(self.json, spans)
        first = written[0].text.decode("utf-8", errors="replace")
        return escape(first)  # Sacred prints the result without escaping it


@dataclass(frozen=True)
class Segment(TextCommand):
    """Draw token boundaries in a text, in colour: ``with run=runs/7 text="…"``, or ``file=…``.

    Args:
        out: HTML page to write, with further ones (``segments-2.html``) for a long text; null for none.
        other_runs: further runs which segment the same text, side by side.
        tokens: exact number of tokens, in place of a rate; null for none.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        max_chars: maximum number of characters to print.
    """

    out: str | None = field(default="segments.html", metadata=output())
    other_runs: list[str] = field(default_factory=list)
    tokens: int | None = field(default=None, metadata=COUNT_OR_NULL)
    threshold: bool = False
    max_chars: int = field(default=5_000, metadata=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None and self.rate is not None:
            raise UserError(
                f"tokens = {self.tokens} and rate = {self.rate:g}: expected one of them"
            )

    def work(self, _record: Record) -> dict[str, Any]:
        """Colour a text by boundary probability, as one run or several segment it."""
        from tokenv.evaluation import calibration, evaluator, text_report
        from tokenv.library.spans import Spans

        text = self.read_text()
        spans: dict[str, Spans] = {}
        passages: dict[str, list[Character]] = {}
        facts: dict[str, str] = {}
        for run in (self.run, *self.other_runs):
            trained = self.load(run)
            how = evaluator.EvalOptions(seed=self.seed, threshold=self.threshold, rate=self.rate)
            segmentation = calibration.segment_at_rate(trained, text, how, tokens=self.tokens)
            spans[run] = Spans(segmentation, trained.state.step)
            passages[run] = text_report.to_passage(segmentation)
            own = text_report.passage_facts(passages[run], trained.state.step)
            if self.other_runs:
                facts[run] = ", ".join(f"{name}: {value}" for name, value in own.items())
                console().print(f"{run}:")
            else:
                facts = {"run": run, **own}
            text_report.print_passage(passages[run], self.max_chars)
        if self.out is not None:
            headings = passages
            if not self.other_runs:
                headings = {self.file or "text": passages[self.run]}
            pages = text_report.write_pages(Path(self.out), headings, facts)
            files = self.out
            if len(pages) > 1:
                files = f"{pages[0]} to {pages[-1]}"
            console().print(f"page: {files}")
        write_json_output(self.json, {run: each.as_dict() for run, each in spans.items()})
        first = passages[self.run]
        return {"boundaries": sum(c.boundary for c in first), "characters": len(first)}


@dataclass(frozen=True)
class Serve(RunCommand):
    """Serve a page on this machine: ``with run=runs/7``; boundaries and bits as you type.

    Args:
        other_runs: further runs which segment the same text, side by side.
        host: address to listen on; any but 127.0.0.1 gives access to other machines.
        port: port to listen on; 0 for any free one.
    """

    other_runs: list[str] = field(default_factory=list)
    host: str = field(
        default="127.0.0.1", metadata=bounds("an address of this machine, such as 127.0.0.1", bool)
    )
    port: int = field(
        default=8123, metadata=bounds("0 (any free one) to 65535", lambda port: 0 <= port < 2**16)
    )

    def work(self, _record: Record) -> None:
        """Serve until Ctrl-C."""
        from tokenv.library import handlers, server

        server.check_installed()
        with server.listen(self.host, self.port) as listening:
            models = handlers.ModelCache([self.run, *self.other_runs], self.checkpoint)
            for config in models.configs.values():
                check_kind(config, "text")
            numeric, port, *_ = listening.getsockname()
            names = server.host_names(self.host, numeric)
            app = server.build_application(models, seed=self.seed, names=names)
            address = f"http://{server.in_url(self.host)}:{port}/"
            console().print(
                f"{', '.join(models.defaults)} at {address} (Ctrl-C ends)", soft_wrap=True
            )
            sys.stdout.flush()
            server.serve(app, listening)
