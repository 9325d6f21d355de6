"""The commands that look at a run or a configuration and store nothing in Sacred: what they do and print."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenv.bench.measure import BenchOptions, bench
from tokenv.cli.options import EvaluateOptions, ForecastOptions, GenerateOptions, SegmentOptions
from tokenv.config.convert import make
from tokenv.config.files import merge
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.series.tables import read_csv
from tokenv.data.series.windows import load_series
from tokenv.env.generate import generate
from tokenv.forecast.forecast import as_pictures, forecast, held_out_windows, history_steps, last_windows
from tokenv.forecast.forecast import score as score_forecasts
from tokenv.forecast.report import draw_forecasts, write_forecasts
from tokenv.lm.codecs.series import VALUE
from tokenv.report.characters import characters
from tokenv.report.html import Passage, segment_page
from tokenv.report.table import console, summary_table
from tokenv.report.terminal import coloured_text
from tokenv.run.evaluate import evaluate
from tokenv.run.hardware import prepare
from tokenv.run.stored import Trained, check_text, load_run, probability_scale, segment
from tokenv.tasks.formats import load_questions
from tokenv.tasks.score import score


def write_page(path: Path, passages: list[Passage], trained: Trained, facts: dict[str, str]) -> None:
    """Write passages of one run, coloured, as a web page."""
    passage = passages[0].characters
    drawn = sum(character.boundary for character in passage)
    facts = {"checkpoint": f"step {trained.step}", "boundaries per character": f"{drawn / len(passage):.3f}"} | facts
    page = segment_page(passages, title="Token boundaries", facts=facts, scale=probability_scale(passage))
    path.write_text(page, encoding="utf-8")


def show_segments(options: SegmentOptions, _run: Any) -> dict[str, Any]:
    """Colour a text by boundary probability."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    prepare(trained.config.hardware)
    passage = segment(trained, options.read(), seed=options.seed, threshold=options.threshold)
    console().print(coloured_text(passage, scale=probability_scale(passage)))
    if options.out is not None:
        title = options.file or "text"
        write_page(Path(options.out), [Passage(title, passage)], trained, {"run": options.run})
        console().print(f"page: {options.out}")
    return {"boundaries": sum(c.boundary for c in passage), "characters": len(passage)}


def continue_text(options: GenerateOptions, _run: Any) -> str:
    """Continue a text, boundaries drawn on the way."""
    trained = load_run(options.run, options.checkpoint)
    check_text(trained.config)
    parts, device = trained.parts, trained.parts.lm.head.weight.device
    prompt = torch.tensor([list(options.read())], device=device)
    written = generate(
        parts.lm,
        parts.agent,
        prompt,
        options.max_new,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=None if options.stop is None else options.stop.encode(),
        generator=torch.Generator(device).manual_seed(options.seed),
    )
    data = bytes(written.symbol_BN[0].tolist())
    passage = characters(data, written.boundary_prob_BN[0].tolist(), written.action_BN[0].bool().tolist())
    console().print(coloured_text(passage, scale=probability_scale(passage)))
    return data.decode("utf-8", errors="replace")


def evaluate_run(options: EvaluateOptions, _run: Any) -> dict[str, Any]:
    """Held-out loss and that of tasks' answers, with sampled and with thresholded boundaries."""
    trained = load_run(options.run, options.checkpoint)
    prepare(trained.config.hardware)
    if options.task_names:
        check_text(trained.config)
    data = make(DataConfig, merge(asdict(trained.config.data), options.data), "data.")
    tasks = {name: load_questions(name, options.files_of(name), options.questions) for name in options.task_names}
    progress = sys.stderr.isatty()
    if options.split == "test":
        if data.kind != "series":
            raise ValueError("split = 'test': expected validation, for a corpus of text has no test side")
        held_out = load_series(data).test(options.sequences)
    else:
        held_out = load_corpus(data, progress=progress).validation(options.sequences)
    results = {}
    for name, threshold in (("sampled", False), ("thresholded", True)):
        result = evaluate(
            trained.parts,
            held_out,
            batch_size=options.batch_size,
            seed=options.seed,
            threshold=threshold,
            tolerance=data.tolerance,
            progress=progress,
        )
        results[name] = result.metrics()
        rows = {key: f"{value:.4f}" for key, value in results[name].items() if value is not None}
        for task, questions in tasks.items():
            scored = score(
                trained.parts,
                questions,
                seq_len=trained.config.data.seq_len,
                batch_size=options.batch_size,
                seed=options.seed,
                threshold=threshold,
                progress=progress,
            )
            results[name][task] = {key: value for key, value in asdict(scored).items() if value is not None}
            rows[f"{task}, {scored.questions:,} answers"] = str(scored)
        whence = data.validation_source or data.source
        title = f"{name} boundaries, {len(held_out)} {options.split} sequences of {whence}"
        console().print(summary_table(rows, title=title))
    return results


def forecast_series(options: ForecastOptions, _run: Any) -> dict[str, Any]:
    """Continue series; hold the forecasts against what came, where that is known."""
    trained = load_run(options.run, options.checkpoint)
    config = trained.config
    prepare(config.hardware)
    if config.data.kind != "series":
        raise ValueError(f"run = {options.run!r} is of text: expected a run of series; tokenv generate continues text")
    known, held_out = history_steps(config, options.horizon), None
    if options.csv is None:
        held_out = held_out_windows(load_series(config.data), options.horizon, options.windows)
        names, history_BL = held_out.names, held_out.symbol_BN[:, :known]
    else:
        recording = read_csv(Path(options.csv), config.data.series)
        names, history_BL = last_windows(recording, config, options.horizon)
    made = forecast(
        trained.parts,
        names,
        history_BL,
        options.horizon,
        samples=options.samples,
        seed=options.seed,
        direct=options.direct,
        progress=sys.stderr.isatty(),
    )
    truth_BHC = None if held_out is None else held_out.symbol_BN[:, known:, :, VALUE].numpy()
    shown = as_pictures(made, options.quantiles, config.data.series.context, truth_BHC)
    table, picture, result = Path(f"{options.out}.csv"), Path(f"{options.out}.png"), {}
    write_forecasts(shown, options.quantiles, table)
    drawn = [shown[i] for i in sorted({round(i * (len(shown) - 1) / 3) for i in range(4)})]
    draw_forecasts(drawn, options.quantiles, picture, title=f"{options.run}, {options.horizon} steps")
    if held_out is not None:
        result = asdict(score_forecasts(made, held_out))
        rows = {name: f"{result[name]:.4f} ± {result[f'{name}_error']:.4f}" for name in ("mse", "mae", "crps")}
        rows["of"] = f"{result['windows']} windows, {options.horizon} steps, standardised"
        console().print(summary_table(rows, title="forecasts against what came"))
    console().print(f"forecasts: {table}, {picture}")
    return result


def show_bench(options: BenchOptions, _run: Any) -> dict[str, Any]:
    """Speed, memory, and what learning the boundaries costs."""
    results = bench(options, progress=sys.stderr.isatty())
    for title, rows in results["tables"].items():
        console().print(summary_table(rows, title=title))
    return results["figures"]
