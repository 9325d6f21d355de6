"""``tokenv compare``: train and evaluate methods × seeds at one budget, and write one report of all."""

import sys
from typing import Any, Self

from tokenv.compare.config import CompareOptions
from tokenv.config.commands import Command, Record
from tokenv.core.errors import RunFailedError
from tokenv.plotting.console import console


class Compare(CompareOptions, Command):
    """Run methods × seeds at one budget, and write one report of all: ``with compare-quick jobs=2``."""

    stored = True

    @classmethod
    def read(cls, words: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values and names in the words after ``with``; names of methods may hold any character."""
        from tokenv.compare.command import parse_comparison_arguments

        return parse_comparison_arguments(words, cls)

    @classmethod
    def resolve(cls, names: list[str], updates: dict[str, Any]) -> Self:
        """Return the command for comparisons and the command line; a mistake in a method shows before hours of work.

        Raises:
            UserError: an unknown key or value, or an executor which is not available.
        """
        from tokenv.compare.command import check_methods, resolve_comparison
        from tokenv.compare.executors import check_executor

        command = resolve_comparison(names, updates, cls)
        check_methods(command)
        if not command.runs:
            check_executor(command)
        return command

    def work(self, record: Record) -> list[dict[str, Any]]:
        """Train and evaluate all runs of a comparison, write its report, and return the loss of every method."""
        from tokenv.compare.command import compare_methods
        from tokenv.compare.report import page, report_tables

        comparisons = compare_methods(self, progress=sys.stderr.isatty())
        for path in page.write_reports(comparisons, record.scratch, self.reference):
            record.add(path)
        for comparison in comparisons.values():
            report_tables.print_comparison(comparison)
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
