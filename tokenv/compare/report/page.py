"""Write a comparison of methods as a self-contained web page, and one page for several protocols."""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tokenv.compare.comparison import ComparedMethod, Comparison, finite_mean
from tokenv.compare.report import report_tables
from tokenv.compare.report.aggregate import (
    assign_styles,
    compute_colour_scale,
    describe_result,
    describe_target_rates,
    list_passages,
    rank_by_seed,
    sort_methods,
)
from tokenv.compare.report.kind_report import Summary, kind_report
from tokenv.compare.report.pictures import draw_pictures, draw_ranks
from tokenv.compare.report.table import Column, Table
from tokenv.compare.score_statistics import describe_difference, tabulate_differences
from tokenv.core.atomic import write_atomically
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture
from tokenv.plotting.html import coloured, legend, render

_MAX_OPEN = 6  # sentences on pairs which are shown without a click
OF_DIFFERENCE = ["difference", "low", "high", "p", "p_holm", "verdict"]
METRICS = ["area", "boundary_rate", "loss_raw", "boundary_rate_raw", "flops", "seconds"]


def write_notes(comparison: Comparison) -> list[str]:
    """Return sentences on how to read the figures."""
    words = comparison.words
    data = words.data
    documents = f"{words.document}s"
    losses = comparison.unit_in_words.capitalize()
    return [
        f"{losses} are of held-out {data}, with boundaries drawn as in training. ± is always the standard error over "
        f"seeds: how much another seed may change a figure. The error over {documents}, how much other held-out {data} "
        "may change it, has a column of its own.",
        f"A pair's 95% interval accounts for both errors of the difference: over {documents}, and over seeds, seed by "
        "seed (by Welch's method if methods do not share two seeds), for runs of one seed share first parameters and "
        f"the order of the {data}; each counts with Student's t of its own degrees of freedom (Cochran and Cox). One "
        "seed alone decides nothing.",
        f"The interquartile mean leaves out the best and the worst quarter of all losses by seed and {words.document}; "
        f"P(better) is the probability that a random seed has a lower loss than one of the other method, mean over "
        f"{documents}; a performance profile is the share of losses at most a threshold (rliable's terms, with lower "
        f"losses for higher scores). Losses are taken relative to each {words.document}'s mean over the methods, each "
        f"{words.document} counts once, and whole seeds and {documents} are resampled (stratified bootstrap, Student's "
        "t). With fewer than three seeds there is no interval.",
        "Verdicts and intervals are not corrected for the number of pairs: of twenty pairs which do not differ, one "
        "will seem to. Holm's corrected p-values are: if all pairs with one below 0.05 are taken to differ, the "
        "probability that any of them does not is at most 5%.",
        *kind_report(comparison).notes,
        "The loss at equal FLOPs is read from the curves where the cheapest run ends. The learning rate of a longer "
        "training has not come down yet there: a training of that length would have reached less.",
        f"FLOPs are 6 per matrix parameter for every {words.symbol} or {words.token}, which is the paper's rule, and "
        "12 times the width for every layer's pair of a query and a key which it sees, and Muon's matrix products; "
        "padding is not counted.",
    ]


def comparison_page(comparison: Comparison, pictures: Mapping[str, Picture]) -> str:
    """Return a page on which method is best, how certain that is, how training went, and examples of boundaries.

    Args:
        comparison: what to show.
        pictures: pictures of it by `tokenv.compare.report.pictures.draw_pictures`.

    Returns:
        One HTML document, to be written as UTF-8. It loads nothing and runs no script.
    """
    methods = sort_methods(comparison)
    names = [method.name for method in methods]
    unit = comparison.unit_in_words
    scale = compute_colour_scale(comparison)
    passages = []
    for method in methods:
        passages.append([coloured(passage, scale) for passage in list_passages(method)])
    versions = itertools.zip_longest(*passages, fillvalue=())
    return render(
        "compare/report/comparison.html.jinja",
        title=comparison.title,
        conclusion=describe_result(comparison),
        failed=comparison.failed,
        facts=comparison.facts,
        looks=list(assign_styles(comparison).values()),
        numbers={method.name: i for i, method in enumerate(comparison.methods)},
        unit=unit,
        words=comparison.words,
        methods=report_tables.methods_table(comparison),
        settings={method.name: describe_settings(method) for method in methods},
        robust=report_tables.robust_table(comparison),
        options=report_tables.options_table(comparison),
        given_up=comparison.given_up,
        targets=describe_target_rates(comparison),
        matrix=report_tables.difference_matrix(
            "", (names, names), comparison.both_ways, unit, explain=True
        ),
        sentences=[
            describe_difference(*pair, each, unit) for pair, each in comparison.differences.items()
        ],
        many=len(comparison.differences) > _MAX_OPEN,
        rates=report_tables.rate_columns(comparison),
        rate_losses=report_tables.rate_losses(comparison),
        rate_differences=report_tables.rate_differences(comparison),
        rates_reference=comparison.rates_reference,
        sections=kind_report(comparison).sections(pictures),
        pictures=pictures,
        references=comparison.references,
        agreements=report_tables.agreements_table(comparison),
        boundaries=report_tables.boundaries_table(comparison),
        passages=[list(zip(names, spans, strict=True)) for spans in versions],
        notes=write_notes(comparison),
        **legend(scale),
    )


def describe_settings(method: ComparedMethod) -> str:
    """Return the settings which distinguish a method for people."""
    settings = [
        f"{escape_line(key)} = {escape_line(value)}" for key, value in method.settings.items()
    ]
    if method.reads_ahead:
        settings.insert(0, "reads ahead")
    return ", ".join(settings)


def summary_columns(comparison: Comparison) -> list[Column]:
    """Return what the summary shows and writes of a protocol's methods."""
    f1_header = ""
    if find_true_boundaries(comparison) is not None:
        f1_header = "F1"
    return [
        Column("seeds", file="seeds"),
        Column("loss", f"{comparison.unit_in_words} ± seeds", error="seed_error", file="loss"),
        Column("seed_error", file="seed_error"),
        Column("rank", "rank", ".1f", file="rank"),
        *(Column(key, file=key) for key in METRICS[:4]),
        Column("f1", f1_header, ".2f", file="f1"),
        Column("flops", "FLOPs", ".2e", file="flops"),
        Column("seconds", "seconds", ",.0f", file="seconds"),
        *(Column(key, file=key) for key in OF_DIFFERENCE),
    ]


def summary_table(comparison: Comparison, reference: str) -> Table:
    """Return a protocol's part of the summary: its methods with their mean ranks over seeds.

    The columns of a difference from the reference are empty where there is none; unknown values are NaN.

    Args:
        comparison: comparison of the protocol.
        reference: method against which the others are tested; empty for none in particular.
    """
    names = [method.name for method in comparison.methods]
    truth = find_true_boundaries(comparison)
    frame = comparison.means.reindex(index=names, columns=METRICS).assign(
        seeds=[len(method.runs) for method in comparison.methods],
        loss=[method.loss for method in comparison.methods],
        seed_error=[method.seed_error for method in comparison.methods],
        rank=rank_by_seed(comparison).mean(axis=1),
        f1=[comparison.mean(name, f"{truth} f1") for name in names],
    )
    both_ways = comparison.both_ways
    pairs = [(name, reference) for name in names if (name, reference) in both_ways]
    tested = tabulate_differences({pair: both_ways[pair] for pair in pairs})
    tested = tested.droplevel("second")[OF_DIFFERENCE].astype(object)
    tested.loc[tested["p_holm"].isna(), "verdict"] = ""
    frame = frame.join(tested.reindex(names, fill_value=""))
    return Table("", "method", frame, summary_columns(comparison))


def find_true_boundaries(comparison: Comparison) -> str | None:
    """Return the name of the true boundaries with which drawn ones were compared; None if there are none."""
    name = comparison.words.true_boundaries
    if name in comparison.references:
        return name
    return None


def _order_methods(tables: Mapping[str, Table]) -> list[str]:
    """Return the methods by their mean rank, as a share of the methods of a protocol; those of more protocols first."""
    shares = pd.concat([table.frame["rank"] / len(table.frame) for table in tables.values()])
    of_methods = shares.groupby(level=0, sort=False).agg(["size", "mean"])
    return list(of_methods.sort_values(["size", "mean"], ascending=[False, True]).index)


def _collect_summaries(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, Summary]]:
    """Return the summaries of all protocols: name of the section to protocol to summary."""
    collected: dict[str, dict[str, Summary]] = {}
    for protocol, comparison in comparisons.items():
        for section in kind_report(comparison).sections(()):
            if section.summary is not None:
                collected.setdefault(section.name, {})[protocol] = section.summary
    return collected


def _show_summaries(summaries: Mapping[str, Summary], protocols: Iterable[str]) -> dict[str, Any]:
    """Return what the page shows of a section's summaries side by side; no cells where a protocol lacks a name."""
    first = next(iter(summaries.values()))
    key = first.table.shown()[0].key
    values = pd.concat([summary.table.frame[key] for summary in summaries.values()])
    means = values.groupby(level=0, sort=False).agg(finite_mean)
    cells = {protocol: dict(summary.table.cells()) for protocol, summary in summaries.items()}
    rows = []
    for name in means.sort_values(kind="stable").index:
        rows.append((name, [cells.get(protocol, {}).get(name, {}) for protocol in protocols]))
    return {
        "heading": first.table.title,
        "first": first.table.first,
        "headers": first.table.headers(),
        "rows": rows,
        "note": first.note,
    }


def summary_page(
    comparisons: Mapping[str, Comparison], pages: Mapping[str, str], reference: str
) -> str:
    """Return a page with one table of all protocols, and each protocol's ranks.

    Args:
        comparisons: protocol to comparison.
        pages: protocol to the file of its own page.
        reference: method against which the others are tested; empty for none in particular.

    Returns:
        One HTML document, to be written as UTF-8.
    """
    tables = {
        name: summary_table(comparison, reference) for name, comparison in comparisons.items()
    }
    rows = []
    for method in _order_methods(tables):
        cells = [
            _summary_cells(tables[name], method, comparisons[name], reference)
            for name in comparisons
        ]
        rows.append((method, cells))
    protocols = []
    for name, comparison in comparisons.items():
        protocols.append(
            {
                "name": name,
                "page": pages[name],
                "headers": tables[name].headers(),
                "comparison": comparison,
                "conclusion": describe_result(comparison),
                "truth": find_true_boundaries(comparison),
                "ranks": draw_ranks(comparison),
            }
        )
    sections = [
        _show_summaries(summaries, comparisons)
        for summaries in _collect_summaries(comparisons).values()
    ]
    return render(
        "compare/report/summary.html.jinja",
        title=f"{len(comparisons)} protocols",
        reference=reference,
        protocols=protocols,
        rows=rows,
        sections=sections,
    )


def _summary_cells(
    table: Table, name: str, comparison: Comparison, reference: str
) -> dict[str, Any] | None:
    """Return the cells of a method in a protocol, with its verdict, settings and test; None if it is not in it."""
    if name not in table.frame.index:
        return None
    row = table.frame.loc[name]
    tip = ""
    difference = comparison.both_ways.get((name, reference))
    if difference is not None:
        tip = describe_difference(name, reference, difference, comparison.unit_in_words)
    (method,) = [method for method in comparison.methods if method.name == name]
    return {
        "cells": [column.show(row) for column in table.shown()],
        "verdict": row["verdict"].replace(" ", "-"),
        "settings": describe_settings(method),
        "tip": tip,
    }


def write_reports(
    comparisons: Mapping[str, Comparison], folder: Path, reference: str = ""
) -> list[Path]:
    """Write the report of a comparison, or those of several with a summary of all.

    Args:
        comparisons: protocol to comparison; a single one may have an empty name.
        folder: folder to write to; created if it is missing, files of an earlier report are replaced.
        reference: method against which the others are tested; empty for none in particular.

    Returns:
        Written files: see ``write_report``. Of several comparisons, ``report.html``, ``summary.csv`` and, if there are
        forecasts, ``forecasts.csv`` are of all, and the names of every protocol's own files begin with its name.
    """
    if len(comparisons) == 1:
        return write_report(next(iter(comparisons.values())), folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    pages = {}
    for number, (name, comparison) in enumerate(comparisons.items(), 1):
        prefix = f"{number}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
        for path in write_report(comparison, folder / prefix):
            written.append(path.replace(folder / f"{prefix}-{path.name}"))
        (folder / prefix).rmdir()
        pages[name] = f"{prefix}-report.html"
    page = folder / "report.html"
    write_atomically(page, summary_page(comparisons, pages, reference))
    tables = {
        name: summary_table(comparison, reference).for_file()
        for name, comparison in comparisons.items()
    }
    summary = _write_protocols(folder / "summary.csv", tables)
    for name, summaries in _collect_summaries(comparisons).items():
        frames = {protocol: each.table.for_file() for protocol, each in summaries.items()}
        written.insert(0, _write_protocols(folder / f"{name}.csv", frames))
    return [page, summary, *written]


def _write_protocols(path: Path, frames: Mapping[str, pd.DataFrame]) -> Path:
    """Write the frames of protocols below one another, with the columns which all have."""
    frame = pd.concat(frames, names=["protocol"], join="inner").reset_index(level=0)
    return report_tables.write_frame(path, frame)


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the page, the pictures and the tables of a comparison.

    Args:
        comparison: what to report.
        folder: folder to write to; created if it is missing, files of an earlier report are replaced.

    Returns:
        Written files: ``report.html``, which needs no other file, the pictures, and the CSV files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(comparison)
    page = folder / "report.html"
    write_atomically(page, comparison_page(comparison, pictures))
    drawn = []
    for name, picture in pictures.items():
        drawn.append(folder / f"{name}.png")
        write_atomically(drawn[-1], picture.light)
    return [page, *drawn, *report_tables.write_tables(comparison, folder)]
