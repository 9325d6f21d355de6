"""``tokenv compare``: train and evaluate methods × seeds at one budget, and write one report of all."""

from __future__ import annotations

import sys
from typing import Any

from tokenv.cli.sacred import Command, Record
from tokenv.compare.command import check_methods, compare_methods, parse_comparison_arguments, resolve_comparison
from tokenv.compare.config import CompareOptions
from tokenv.compare.executors import check_executor
from tokenv.compare.report.page import write_reports
from tokenv.compare.report.report_tables import print_comparison
from tokenv.core.errors import RunFailedError
from tokenv.plotting.console import console


def resolve_compare(names: list[str], updates: dict[str, Any]) -> CompareOptions:
    """Return the options for comparisons and the command line; a mistake in a method shows before hours of work.

    Raises:
        UserError: an unknown key or value, or an executor which is not available.
    """
    options = resolve_comparison(names, updates)
    check_methods(options)
    if not options.runs:
        check_executor(options)
    return options


def compare_and_show(options: CompareOptions, record: Record) -> list[dict[str, Any]]:
    """Train and evaluate all runs of a comparison, write its report, and return the loss of every method."""
    comparisons = compare_methods(options, progress=sys.stderr.isatty())
    for path in write_reports(comparisons, record.scratch, options.reference):
        record.add(path)
    for comparison in comparisons.values():
        print_comparison(comparison)
    if record.folder is not None:
        console().print(f"report: {record.folder / 'report.html'}")
    failed = sum(len(comparison.failed) for comparison in comparisons.values())
    if failed:
        raise RunFailedError(f"{failed} runs failed; the report leaves them out")
    return [
        ({"protocol": name} if name else {}) | {"method": method.name, "loss": method.loss}
        for name, comparison in comparisons.items()
        for method in comparison.methods
    ]


COMMAND = Command(
    "compare", resolve_compare, compare_and_show, CompareOptions, stored=True, read=parse_comparison_arguments
)
