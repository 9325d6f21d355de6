"""Sacred's observers: patches which keep a run's files complete and safe, and trackers of metrics.

The patches take effect in every program which imports this module. A store may come from another person, and a disk may
be full at any moment: files are written completely or not at all, links are not followed, and a template in a store
(which is code) is not rendered. Trackers send metrics to TensorBoard, Weights & Biases and MLflow.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenv.core.atomic import copy_atomically, write_atomically
from tokenv.core.errors import RunFailedError, UserError
from tokenv.core.trust import read_json
from tokenv.plotting.characters import escape_line

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred import dependencies
    from sacred.observers import FileStorageObserver, RunObserver, SqlObserver, file_storage
    from sacred.serializer import flatten

INITIAL_FILES = ("config.json", "cout.txt", "run.json", "metrics.json", "options.json")  # of every run
MONGO_TIMEOUT = 5  # seconds to find a server; pymongo's own 30 would pass twice
Commit = tuple[str | None, str | None, bool | None]  # url, hash, whether files are changed


def _patch(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a method or function by one which takes the original as its first argument."""

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(owner, name, patched)
        return replacement

    return decorate


@_patch(dependencies, "get_commit_if_possible")
def _commit_of(original: Callable[..., Commit], filename: str, save_git_info: bool) -> Commit:
    """Return the git commit of a file, or nothing where git fails, as in a checkout which belongs to another user.

    Sacred itself asks git three times for each source file, which takes seconds, and ends when git fails.
    """
    folder = Path(filename).resolve().parent
    root = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    return (None, None, None) if root is None or not save_git_info else _commit_in(original, root)


@functools.cache
def _commit_in(original: Callable[..., Commit], root: Path) -> Commit:
    try:
        return original(str(root / "README.md"), True)
    except Exception:  # the run is more important than its commit
        return None, None, None


file_storage.copyfile = copy_atomically


@_patch(FileStorageObserver, "save_json")
def _save_json(_original: Callable[..., None], observer: FileStorageObserver, values: Any, filename: str) -> None:
    """Write a file in one step, so that a kill or a full disk leaves the old file and not a half of the new one.

    A file which cannot be written after the run has begun is a warning: the next heartbeat tries again.
    """
    path = Path(observer.dir) / filename
    try:
        write_atomically(path, json.dumps(flatten(values), sort_keys=True, indent=2))
    except OSError as error:
        if not (Path(observer.dir) / "config.json").exists() and observer.run_entry["status"] == "RUNNING":
            raise
        logging.getLogger("tokenv").warning("%s: cannot be written to (%s)", escape_line(str(path)), error.strerror)


@_patch(FileStorageObserver, "save_cout")
def _save_cout(original: Callable[..., None], observer: FileStorageObserver) -> None:
    with suppress(OSError):
        original(observer)


@_patch(FileStorageObserver, "queued_event")
def _queued_event(
    original: Callable[..., Any], observer: FileStorageObserver, ex_info: dict[str, Any], *event: Any, **more: Any
) -> Any:
    """Store the sources as those of a started run; Sacred would look for them in the working directory."""
    sources, copy_sources = observer.save_sources(ex_info), observer.copy_sources
    observer.copy_sources = False
    try:
        return original(observer, ex_info | {"sources": sources}, *event, **more)
    finally:
        observer.copy_sources = copy_sources


@_patch(FileStorageObserver, "started_event")
def _started_event(original: Callable[..., Any], observer: FileStorageObserver, *event: Any, **more: Any) -> Any:
    """Remove the folder of a run which could not be started, for example because the disk is full."""
    observer.dir = observer.run_entry = None
    try:
        return original(observer, *event, **more)
    except OSError:
        if observer.dir is not None and observer.run_entry is None:
            shutil.rmtree(observer.dir, ignore_errors=True)
        raise


@_patch(FileStorageObserver, "failed_event")
def _failed_event(original: Callable[..., None], observer: FileStorageObserver, *event: Any, **more: Any) -> None:
    """Record a failed run; remove it, and free its number, where a mistake of the user ended it before any work."""
    if observer.run_entry is None:  # it never started
        return
    if isinstance(sys.exception(), UserError) and not _has_output(Path(observer.dir)):
        shutil.rmtree(observer.dir, ignore_errors=True)
    else:
        original(observer, *event, **more)


def _has_output(folder: Path) -> bool:
    """Return whether a run has stored a metric, or any file which is not among the initial ones."""
    if any(path.is_file() and path.name not in INITIAL_FILES for path in folder.rglob("*")):
        return True
    metrics = folder / "metrics.json"
    return metrics.is_file() and metrics.read_bytes() != b"{}"


@_patch(FileStorageObserver, "render_template")
def _render_template(_original: Callable[..., None], observer: FileStorageObserver) -> None:
    """Render nothing: ``template.html`` in a store is Mako, hence code of the person who made the store."""


@_patch(SqlObserver, "completed_event")
def _completed_event(original: Callable[..., None], observer: SqlObserver, stop_time: datetime, result: Any) -> None:
    """Store the first figure of the result: Sacred's table has one number, and raises an error for anything else."""
    figures = list(result.values()) if isinstance(result, dict) else [result]
    first = figures[0] if figures else None
    original(observer, stop_time, float(first) if isinstance(first, int | float) else None)


def is_informative(record: logging.LogRecord) -> bool:
    """Return whether a line of Sacred's log says more than the message with which the command ends."""
    return record.msg != "Failed after %s!" or not isinstance(sys.exception(), UserError | RunFailedError)


def check_mongo(database: str) -> None:
    """Check that a database answers, before work starts.

    Args:
        database: value of ``--mongo_db``.

    Raises:
        ModuleNotFoundError: pymongo is not installed.
        UserError: the value has another form, or there is no answer within ``MONGO_TIMEOUT``.
    """
    import pymongo
    from sacred.observers.mongo import parse_mongo_db_arg

    try:
        url = parse_mongo_db_arg(database).get("url")
    except (AttributeError, ValueError):
        raise UserError(
            f"--mongo_db {database}: expected [HOST:PORT:]DATABASE, such as localhost:27017:sacred"
        ) from None
    try:
        with pymongo.MongoClient(url, serverSelectionTimeoutMS=1000 * MONGO_TIMEOUT) as client:
            client.admin.command("ping")
    except pymongo.errors.PyMongoError as error:
        why = str(error).partition(",")[0]
        raise UserError(
            f"--mongo_db {database}: no MongoDB answers at {url or 'localhost:27017'} ({why}): start it, name another, "
            "or leave the flag out"
        ) from None


def mark_completed(folder: Path, result: Any, metrics: Mapping[str, tuple[list[int], list[float]]]) -> None:
    """Mark a run as completed in its files, if it was killed after its last step; else change nothing.

    Args:
        folder: folder of the run.
        result: result of its command.
        metrics: name to steps and values of all metrics.
    """
    entry = _read_mapping(folder / "run.json")
    if entry.get("status") in (None, "COMPLETED"):  # None: stored in a database, or damaged
        return
    now = datetime.now(UTC).replace(tzinfo=None).isoformat()
    stored = _read_mapping(folder / "metrics.json")
    for name, (steps, values) in metrics.items():
        before = stored.get(name)
        times = before.get("timestamps") if isinstance(before, dict) else None
        times = times[: len(steps)] if isinstance(times, list) else []
        times += [now] * (len(steps) - len(times))
        stored[name] = {"steps": steps, "values": values, "timestamps": times}
    write_atomically(folder / "metrics.json", json.dumps(stored, sort_keys=True, indent=2))
    entry |= {"status": "COMPLETED", "result": flatten(result), "stop_time": now}
    entry.pop("fail_trace", None)
    write_atomically(folder / "run.json", json.dumps(entry, sort_keys=True, indent=2))


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where the file is missing or damaged."""
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


class Tracker(RunObserver, ABC):
    """An observer which sends a run's configuration and metrics to another program.

    Args:
        destination: value of the flag: a folder, project or experiment.

    Raises:
        UserError: the package of that program is not installed.
    """

    package: str
    module: str
    takes: str

    def __init__(self, destination: str) -> None:
        self.destination = destination
        try:
            self.api: Any = import_module(self.module)
        except ImportError as error:
            flag = f"--{self.package} {destination}"
            raise UserError(f"{flag}: needs the package {self.package}: pip install it") from error

    @abstractmethod
    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run of this name and configuration."""

    @abstractmethod
    def add(self, name: str, value: float, step: int) -> None:
        """Add one value of a metric; a step is a training symbol."""

    @abstractmethod
    def end(self, status: str) -> None:
        """End the run with status ``FINISHED``, ``KILLED`` or ``FAILED``."""

    def started_event(
        self, ex_info: Any, command: Any, host_info: Any, start_time: Any, config: Any, meta_info: Any, _id: Any
    ) -> None:
        """Handle the start of the run."""
        number = start_time.strftime("%Y%m%d-%H%M%S") if _id is None else _id
        self.begin(f"{ex_info['name']}-{number}", config)

    def log_metrics(self, metrics_by_name: Mapping[str, Mapping[str, Any]], info: Any) -> None:
        """Handle the metrics since the last call."""
        for name, metric in metrics_by_name.items():
            for step, value in zip(metric["steps"], metric["values"], strict=True):
                self.add(name, float(value), int(step))

    def completed_event(self, stop_time: Any, result: Any) -> None:
        """Handle the completion of the run."""
        self.end("FINISHED")

    def interrupted_event(self, interrupt_time: Any, status: Any) -> None:
        """Handle an interruption of the run."""
        self.end("KILLED")

    def failed_event(self, fail_time: Any, fail_trace: Any) -> None:
        """Handle a failure of the run."""
        self.end("FAILED")


class TensorBoard(Tracker):
    """Event files in a folder of the run's own under ``destination``."""

    package, module, takes = "tensorboard", "torch.utils.tensorboard", "a folder"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Open a writer."""
        self.writer = self.api.SummaryWriter(f"{self.destination}/{name}")
        self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def add(self, name: str, value: float, step: int) -> None:
        """Write a scalar."""
        self.writer.add_scalar(name, value, step)

    def end(self, status: str) -> None:
        """Close the file."""
        self.writer.close()


class WandB(Tracker):
    """A run of the Weights & Biases project ``destination``."""

    package = module = "wandb"
    takes = "a project"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run, with training symbols as the axis of all metrics."""
        self.run = self.api.init(project=self.destination, name=name, config=dict(config))
        self.run.define_metric("symbols")
        self.run.define_metric("*", step_metric="symbols")

    def add(self, name: str, value: float, step: int) -> None:
        """Log one value."""
        self.run.log({name: value, "symbols": step})

    def end(self, status: str) -> None:
        """Finish the run."""
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


class MLflow(Tracker):
    """A run of the MLflow experiment ``destination``, at the server which ``MLFLOW_TRACKING_URI`` names."""

    package = module = "mlflow"
    takes = "an experiment"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run; its configuration is a file, since MLflow's parameters are short."""
        self.api.set_experiment(self.destination)
        self.api.start_run(run_name=name)
        self.api.log_dict(dict(config), "config.json")

    def add(self, name: str, value: float, step: int) -> None:
        """Log one value."""
        self.api.log_metric(name, value, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self.api.end_run(status=status)


TRACKERS: dict[str, type[Tracker]] = {"-T": TensorBoard, "-W": WandB, "-M": MLflow}  # by flag
