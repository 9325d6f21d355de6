"""Commands of the laboratory: bench and variance."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tokenv.config.commands import Command, Record, check_kind, stored_config
from tokenv.config.files import flatten, resolve
from tokenv.core import trust
from tokenv.core.conversion import from_dict
from tokenv.core.errors import MissingFileError, UserError
from tokenv.lab.config import MAY_CHANGE_ON_RESUME, BenchOptions, VarianceOptions
from tokenv.plotting.console import console, summary_table

OPTIONS_FILE = "options.json"


class Bench(BenchOptions, Command):
    """Measure speed, memory and the cost of learning boundaries: ``with bench-d256``."""

    @classmethod
    def resolve(cls, names: list[str], updates: dict[str, Any]) -> Self:
        """Return the command for configurations and the command line.

        Raises:
            UserError: an unknown key or value; the configuration is of series, or of text where forecasts are timed.
        """
        own = cls.take_own(updates)
        config = resolve(names, updates)
        command = from_dict(cls, {**own, "config": config.as_dict()})
        if not command.samples:
            check_kind(config, "text")
        elif config.data.options.forecast_work is None:
            raise UserError(
                f"samples = {command.samples!r} with data.kind = {config.data.kind!r}: expected series, such as "
                "series-synthetic"
            )
        return command

    def work(self, _record: Record) -> dict[str, Any]:
        """Measure, and print the tables."""
        from tokenv.lab import bench_report, plan, speed

        if self.scaling:
            rows = speed.scale(self, progress=sys.stderr.isatty())
            console().print(bench_report.scaling_table(rows))
            files = bench_report.write_scaling(rows, self.out)
            console().print("scaling: " + ", ".join(map(str, files)))
            return {"scaling": rows}
        if self.plan:
            figures = plan.plan(self)
            for table in bench_report.plan_tables(figures, self):
                console().print(table)
            return figures
        measure = speed.bench_forecasts if self.samples else speed.bench
        results = measure(self, progress=sys.stderr.isatty())
        for title, rows in results["tables"].items():
            console().print(summary_table(rows, title=title))
        return results["figures"]


class Variance(VarianceOptions, Command):
    """Measure bias, variance and cost of gradient estimators along one run: ``with quick``."""

    stored = True

    @classmethod
    def resolve(cls, names: list[str], updates: dict[str, Any]) -> Self:
        """Return the command for configurations, a run or an unfinished study, and the command line.

        Raises:
            UserError: an unknown key or value, or a run which cannot be measured.
            MissingFileError: there is no such run or study.
        """
        from tokenv.config import build, components
        from tokenv.lab.variance_study import check_estimators

        own = cls.take_own(updates)
        base = None
        if own.get("resume"):
            stored = Path(str(own["resume"])) / OPTIONS_FILE
            if not stored.is_file():
                raise MissingFileError(
                    f"resume = {own['resume']!r}: expected the folder of an unfinished study"
                )
            values = _stored_options(stored)
            _check_unchanged(own, updates)
            base = values.pop("config")
            own = values | own
        if own.get("run"):
            _, base = stored_config("run", str(own["run"]), names)
        config = resolve(names, updates, base=base)
        check_kind(config, "text")
        command = from_dict(cls, {**own, "config": config.as_dict()})
        components.check_components(config, read_files=base is None)
        if not build.is_trainable(config.agent):
            raise UserError(
                f"agent.name = {config.agent['name']!r} has no policy: expected an agent that learns"
            )
        check_estimators(command)
        return command

    def work(self, record: Record) -> dict[str, Any]:
        """Compare gradient estimators, then store and show the results."""
        from tokenv.core.checkpoints import write_json
        from tokenv.lab import variance_report, variance_study

        folder = (record.folder or record.scratch) / "variance"
        if self.resume:
            folder = Path(self.resume)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / OPTIONS_FILE, asdict(self), OPTIONS_FILE)
        try:
            result = variance_study.run_variance_study(self, folder, sys.stderr.isatty())
        except KeyboardInterrupt:
            hint = "nothing was saved"
            if self.resume or record.folder is not None:
                hint = f"resume it with: tokenv variance with resume={folder}"
            raise KeyboardInterrupt(f"stopped; {hint}") from None
        files = (
            folder / "variance.json",
            variance_report.write_variance(result, folder / "variance.csv"),
            variance_report.draw_progress(result, folder / "progress.png"),
            variance_report.draw_cost(result, folder / "cost.png"),
            variance_report.draw_credit(result, folder / "credit.png"),
        )
        for file in filter(None, files):
            record.add(file)
        variance_report.print_variance(result)
        if not self.resume and record.folder is not None:
            console().print(f"stored in {folder}")
        return {label: cost["flops"] for label, cost in result["costs"].items()}


def _check_unchanged(own: dict[str, Any], updates: dict[str, Any]) -> None:
    """Check that a study is resumed with the same options, since one table shows its old and new figures."""
    allowed = (*MAY_CHANGE_ON_RESUME, "hardware")
    for key in (*own, *flatten(updates)):
        if key.partition(".")[0] not in allowed or key == "hardware.precision":
            raise UserError(
                f"{key} cannot change when a study is resumed: only {', '.join(allowed)} (but its precision) can"
            )


def _stored_options(path: Path) -> dict[str, Any]:
    """Read the options of an unfinished study.

    Raises:
        UserError: they are damaged, or name code which the user has not allowed.
    """
    from tokenv.core.checkpoints import read_json

    try:
        values = read_json(path, OPTIONS_FILE)
        trust.check(values["config"], path)
        for estimator in (*values["estimators"], values["reference"]):
            trust.check_name(estimator.partition("(")[0].strip(), path)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged: {error!r}; expected the options of a study: start it anew"
        ) from None
    return values
