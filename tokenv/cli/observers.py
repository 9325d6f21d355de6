"""Observers of a run: Sacred's file observer with complete files, and trackers of metrics.

Nothing of Sacred is replaced: ``FileStorage`` is a subclass, which our experiments attach. A store may come from
another person, and a disk may be full at any moment: files are written completely or not at all, links are not
followed, and a template in a store (which is code) is not rendered. Trackers send metrics to TensorBoard, Weights &
Biases and MLflow.
"""

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

from tokenv.core.atomic import write_atomically
from tokenv.core.errors import RunFailedError, UserError
from tokenv.core.run_folders import source_name
from tokenv.core.trust import read_json
from tokenv.plotting.characters import escape_line

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred.observers import FileStorageObserver, RunObserver, SqlObserver
    from sacred.serializer import flatten

# of every run
INITIAL_FILES = ("config.json", "cout.txt", "run.json", "metrics.json", "options.json")
MONGO_TIMEOUT = 5  # seconds to find a server; pymongo's own 30 would pass twice


class FileStorage(FileStorageObserver):
    """Sacred's observer of files, whose files are complete at any moment.

    Args:
        basedir: folder of the runs; each has a folder in it, by number or by its ``--id``.
    """

    dir: Any  # of the run; None before it begins

    def __init__(self, basedir: str | Path) -> None:
        super().__init__(basedir)
        # template.html in a store is Mako, hence code of the person who made the store
        self.template = None

    def queued_event(self, ex_info: dict[str, Any], **event: Any) -> Any:
        """Store the sources as those of a started run; Sacred would look for them in the working directory."""
        sources = self.save_sources(ex_info)
        self.copy_sources = False
        try:
            return self._begin(
                super().queued_event, ex_info=ex_info | {"sources": sources}, **event
            )
        finally:
            self.copy_sources = True

    def started_event(self, **event: Any) -> Any:
        """Create the run's folder and its initial files."""
        return self._begin(super().started_event, **event)

    def _begin(self, store: Callable[..., Any], **event: Any) -> Any:
        """Store the initial files; remove the folder of a run which cannot begin, for example on a full disk."""
        self.dir = None
        self.run_entry = None
        try:
            return store(**event)
        except OSError:
            if self.dir is not None:
                shutil.rmtree(self.dir, ignore_errors=True)
            self.run_entry = None
            raise

    def _make_run_dir(self, _id: str | None) -> None:
        try:
            super()._make_run_dir(_id)
        except OSError as error:
            folder = self.dir
            self.dir = None  # it is another run's, and stays
            if isinstance(error, FileExistsError) and folder is not None:
                raise UserError(
                    f"{folder}: is there already: choose another --id, or leave it out"
                ) from None
            raise

    def _maximum_existing_run_id(self) -> int:
        names = (path.name for path in Path(self.basedir).iterdir())
        return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)

    def find_or_save(self, filename: str, store_dir: Path) -> Path:
        """Return the copy of a file in a folder, under a name with its digest."""
        source = Path(filename)
        stored = store_dir / source_name(source)
        store_dir.mkdir(parents=True, exist_ok=True)
        if not stored.exists():
            write_atomically(stored, source.read_bytes())
        return stored

    def save_file(self, filename: str, target_name: str | None = None) -> None:
        """Copy a file into the run's folder."""
        name = target_name or Path(filename).name
        if name in INITIAL_FILES:
            raise FileExistsError(f"{name}: a file of this name records the run itself")
        write_atomically(Path(self.dir) / name, Path(filename).read_bytes())

    def save_json(self, obj: Any, filename: str) -> None:
        """Write a file in one step, so that a kill or a full disk leaves the old file and not a half of the new one.

        A file which cannot be written after the run has begun is a warning: the next heartbeat tries again.
        """
        path = Path(self.dir) / filename
        content = json.dumps(flatten(obj), sort_keys=True, indent=2)
        try:
            write_atomically(path, content)
        except OSError as error:
            if not path.with_name("config.json").exists():
                raise
            logging.getLogger("tokenv").warning(
                "%s: cannot be written to (%s)", escape_line(str(path)), error.strerror
            )

    def save_cout(self) -> None:
        """Append to the file of what is printed, if the disk has room."""
        with suppress(OSError):
            super().save_cout()

    def failed_event(self, fail_time: datetime, fail_trace: list[str]) -> None:
        """Record a failed run; remove it, and free its number, where a mistake of the user ended it before any work."""
        if self.run_entry is None:  # it never started
            return
        if isinstance(sys.exception(), UserError) and not _has_output(Path(self.dir)):
            shutil.rmtree(self.dir, ignore_errors=True)
        else:
            super().failed_event(fail_time, fail_trace)


def _has_output(folder: Path) -> bool:
    """Return whether a run has stored a metric, or any file which is not among the initial ones."""
    if any(path.is_file() and path.name not in INITIAL_FILES for path in folder.rglob("*")):
        return True
    metrics = folder / "metrics.json"
    return metrics.is_file() and metrics.read_bytes() != b"{}"


class OneFigure:
    """Sacred's SQL observer, told of one figure of the result: its table has one number, and an error for others.

    Args:
        observer: the observer which stores everything else as it is.
    """

    def __init__(self, observer: SqlObserver) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def completed_event(self, stop_time: datetime, result: Any) -> None:
        """Store the first figure of the result; nothing where it is no number."""
        figure = result
        if isinstance(result, dict):
            figure = next(iter(result.values()), None)
        if not isinstance(figure, int | float):
            figure = None
        self._observer.completed_event(stop_time=stop_time, result=figure)


def is_informative(record: logging.LogRecord) -> bool:
    """Return whether a line of Sacred's log says more than the message with which the command ends."""
    return record.msg != "Failed after %s!" or not isinstance(
        sys.exception(), UserError | RunFailedError
    )


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


def mark_completed(
    folder: Path, result: Any, metrics: Mapping[str, tuple[list[int], list[float]]]
) -> None:
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
        times = _stored_times(stored.get(name))[: len(steps)]
        times += [now] * (len(steps) - len(times))
        stored[name] = {"steps": steps, "values": values, "timestamps": times}
    write_atomically(folder / "metrics.json", json.dumps(stored, sort_keys=True, indent=2))
    entry |= {"status": "COMPLETED", "result": flatten(result), "stop_time": now}
    entry.pop("fail_trace", None)
    write_atomically(folder / "run.json", json.dumps(entry, sort_keys=True, indent=2))


def _stored_times(metric: Any) -> list[Any]:
    """Return the times of a metric of metrics.json; none where it is missing or damaged."""
    if isinstance(metric, dict) and isinstance(metric.get("timestamps"), list):
        return metric["timestamps"]
    return []


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where the file is missing or damaged."""
    with suppress(OSError, ValueError):
        values = read_json(path)
        if isinstance(values, dict):
            return values
    return {}


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
        self.has_begun = False
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
        self,
        ex_info: Any,
        command: Any,
        host_info: Any,
        start_time: Any,
        config: Any,
        meta_info: Any,
        _id: Any,
    ) -> None:
        """Handle the start of the run."""
        number = _id or start_time.strftime("%Y%m%d-%H%M%S")
        self.begin(f"{ex_info['name']}-{number}", config)
        self.has_begun = True

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
        if self.has_begun:
            self.end("KILLED")

    def failed_event(self, fail_time: Any, fail_trace: Any) -> None:
        """Handle a failure of the run."""
        if self.has_begun:
            self.end("FAILED")


class TensorBoard(Tracker):
    """Event files in a folder of the run's own under ``destination``."""

    package = "tensorboard"
    module = "torch.utils.tensorboard"
    takes = "a folder"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Open a writer."""
        self.writer = self.api.SummaryWriter(f"{self.destination}/{name}")
        lines = (f"    {key}: {value}" for key, value in config.items())
        self.writer.add_text("config", "\n".join(lines))

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
        self.run.finish(exit_code=int(status != "FINISHED"))


class MLflow(Tracker):
    """A run of the MLflow experiment ``destination``, at the server or database which ``MLFLOW_TRACKING_URI`` names.

    MLflow's functions know a run in the thread only which started it, and Sacred's heartbeat is another.
    """

    package = module = "mlflow"
    takes = "an experiment"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run; its configuration is a file, since MLflow's parameters are short.

        Raises:
            UserError: MLflow cannot store a run there.
        """
        try:
            self.client = self.api.MlflowClient()
            experiment = self.api.set_experiment(self.destination)
            run = self.client.create_run(experiment.experiment_id, run_name=name)
            self.run_id = run.info.run_id
            self.client.log_dict(self.run_id, dict(config), "config.json")
        except (ImportError, self.api.exceptions.MlflowException) as error:
            raise UserError(
                f"--mlflow {self.destination}: MLflow says: {str(error).strip()} (MLFLOW_TRACKING_URI names its server "
                "or a database such as sqlite:///mlflow.db, which needs pip install tokenv[trackers])"
            ) from error

    def add(self, name: str, value: float, step: int) -> None:
        """Log one value."""
        self.client.log_metric(self.run_id, name, value, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self.client.set_terminated(self.run_id, status)


TRACKERS: dict[str, type[Tracker]] = {"-T": TensorBoard, "-W": WandB, "-M": MLflow}  # by flag
