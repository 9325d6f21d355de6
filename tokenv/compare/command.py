"""All of ``tokenv compare``: have the runs, read them, compare them."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from tokenv.compare.comparison import Comparison
from tokenv.compare.compose import compared_run, compose
from tokenv.compare.options import CompareOptions
from tokenv.compare.runner import run_all
from tokenv.compare.settings import check_same_kind, group_into_methods
from tokenv.compare.store import finished_run
from tokenv.errors import FailedError, UserError
from tokenv.run.parts import check_parts


def check_methods(options: CompareOptions) -> None:
    """Check every method, so that a mistake shows before hours of work.

    Raises:
        UserError: a method's configuration has an unknown key, a wrong value, or parts that do not fit; or methods
            are of different kinds of data.
    """
    firsts = {f"methods.{task.method}": task.config for task in options.tasks() if task.config.seed == options.seeds[0]}
    for name, config in firsts.items():
        try:
            check_parts(config)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    check_same_kind(firsts)


def compare_methods(options: CompareOptions, *, progress: bool) -> Comparison:
    """Train what is missing, and compare everything.

    Args:
        options: what to compare.
        progress: show bars.

    Raises:
        FailedError: every run failed.
        UserError: a run is not finished, or the runs cannot be compared: see ``tokenv.compare.compose``.
        KeyboardInterrupt: Ctrl-C.
    """
    wishes = {"passages": options.passages, "bpe_vocabulary": options.bpe_vocabulary}
    if options.runs:
        stored = [finished_run(Path(folder)) for folder in options.runs]
        check_same_kind({str(run.folder): run.config for run in stored})
        shown = tqdm(stored, desc="measuring", unit=" runs", disable=not progress)
        methods = group_into_methods([compared_run(run, **wishes) for run in shown])
        return compose(methods, f"{len(options.runs)} runs", {})
    tasks = list(options.tasks())
    folders, failed = run_all(tasks, options, progress=progress)
    methods = {}
    for task, folder in zip(tasks, folders, strict=True):
        if folder is not None:
            methods.setdefault(task.method, []).append(compared_run(finished_run(folder), **wishes))
    if not methods:
        raise FailedError("every run failed: " + "; ".join(f"{label}: {why}" for label, why in failed.items()))
    return compose(methods, f"{len(methods)} methods", failed)
