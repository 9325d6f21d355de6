"""A command as an experiment of Sacred's, its flags, and where a run is kept; only ``observers`` knows Sacred, too."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docopt import DocoptExit, docopt

from tokenv.cli.flags import check_flags, check_new, check_store, forgotten_with
from tokenv.cli.observers import check_mongo, is_news
from tokenv.cli.trackers import FLAGS, Tracker
from tokenv.config.literals import read_words
from tokenv.config.registry import plugins
from tokenv.core.errors import UserError
from tokenv.storage import processes, trust
from tokenv.storage.atomic import copy_atomically
from tokenv.training.interrupt import GracefulStop

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred import SETTINGS, Experiment
    from sacred.commandline_options import CLIOption
    from sacred.host_info import HostInfoGetter
    from sacred.observers import FileStorageObserver
    from sacred.run import Run
    from sacred.utils import apply_backspaces_and_linefeeds

SETTINGS.CAPTURE_MODE = "sys"
SETTINGS.DISCOVER_SOURCES = "none"  # ours are named below; an installed tokenv must not copy site-packages
SETTINGS.CONFIG.READ_ONLY_CONFIG = False
RUNS = "runs"
Words = tuple[dict[str, Any], list[str]]  # nested values, and names of files
OBSERVERS_NEED = ("sqlalchemy", "pymongo", "tinydb", "boto3")  # packages behind Sacred's flags, which we do not require
STORAGE_FLAGS = ("--file_storage", "--mongo_db", "--sql", "--tiny_db", "--s3", "--unobserved")


def _option(short: str, tracker: type[Tracker]) -> CLIOption:
    """The flag that lets a tracker follow a run."""

    def follow(place: str, run: Run) -> None:
        run.observers.append(tracker(place))

    follow.__name__, follow.__doc__ = tracker.package, f"Send metrics to {tracker.__name__}: VALUE is {tracker.takes}."
    return CLIOption(follow, short, f"--{tracker.package}", is_flag=False)


_TRACKERS = [_option(short, tracker) for short, tracker in FLAGS.items()]


def folder_of(run: Run) -> Path | None:
    """Where a run's files go: its FileStorage folder, or one of its own; None if it is not stored."""
    for observer in run.observers:
        if isinstance(observer, FileStorageObserver):
            return Path(observer.dir)
    return Path(RUNS) / str(run._id) if run.observers else None


@dataclass(frozen=True)
class Record:
    """What Sacred keeps of one run of a command.

    Attributes:
        scratch: a folder for files that are to be kept; there until all observers have them.
    """

    _run: Run
    scratch: Path

    @property
    def folder(self) -> Path | None:
        """Where the run's files go: see ``folder_of``."""
        return folder_of(self._run)

    @property
    def title(self) -> str:
        """For pictures."""
        return f"tokenv run {self._run._id}"

    def log(self, name: str, value: float, step: int) -> None:
        """Keep one value of a metric."""
        self._run.log_scalar(name, value, step)

    def add(self, path: Path) -> None:
        """Keep a copy of a file."""
        if not any(isinstance(observer, FileStorageObserver) for observer in self._run.observers) and self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            copy_atomically(path, self.folder / path.name)
        self._run.add_artifact(path, path.name)


@dataclass
class Command:
    """A command as a Sacred experiment.

    Attributes:
        name: such as ``train``.
        resolve: makes options of names and nested key=value updates.
        work: what the command does.
        kind: dataclass of the options, which says which keys take text.
        stored: keep the run under ``runs`` if no flag says otherwise.
        instead: given the options, gives what is to be done without a run of its own; None for a run.
        read: reads the words after ``with``, given the dataclass of the options.
    """

    name: str
    resolve: Callable[[list[str], dict[str, Any]], Any]
    work: Callable[[Any, Record], Any]
    kind: type
    stored: bool = False
    instead: Callable[[Any], Callable[[], Any] | None] = lambda _: None
    read: Callable[[list[str], type], Words] = read_words

    def options(self, words: list[str]) -> Any:
        """What the words after ``with`` ask for.

        Raises:
            UserError: ``resolve`` refuses them.
        """
        updates, names = self.read(words, self.kind)
        if "trust" in updates:
            raise UserError("trust is now called trust_code: write that instead")
        trust.allow(updates.pop("trust_code", False))
        return self.resolve(names, updates)

    def experiment(self, options: Any, store: str | Path | None = None) -> Experiment:
        """The experiment that does this.

        Args:
            options: as ``options`` gives them.
            store: a folder where its run is kept; None for no observer.
        """
        experiment = _experiment(self.name)
        if store is not None:
            experiment.observers.append(FileStorageObserver(store, copy_sources=True))
        folder = Path(tempfile.mkdtemp(prefix="tokenv-"))
        weakref.finalize(experiment, shutil.rmtree, folder, ignore_errors=True)

        @experiment.main
        def main(_config: dict[str, Any], _run: Run) -> Any:
            return self.work(options, Record(_run, folder))

        own = options.as_dict() if hasattr(options, "as_dict") else asdict(options)
        values = own.pop("config", {}) | own  # a run's keys and the command's own lie side by side
        for plugin in plugins(values):
            for name, version in plugin.packages.items():
                experiment.add_package_dependency(name, version)
            for file in plugin.files:
                experiment.add_source_file(str(file))
        with _sacreds_refusals():
            experiment.add_config(values)
        return experiment

    def run(self, arguments: list[str]) -> Any:
        """Run the command.

        Args:
            arguments: what follows its name on the command line, in Sacred's grammar.

        Returns:
            What ``work`` returned.

        Raises:
            UserError: the arguments are not of Sacred's grammar, or ``resolve`` refuses them.
        """
        flags = _parse(self.name, arguments)
        options = self.options(flags["UPDATE"])
        other = self.instead(options) if flags["COMMAND"] is None else None
        if other is not None:
            with GracefulStop(at_once=True):
                return other()
        kept_elsewhere = any(flags.get(flag) for flag in STORAGE_FLAGS)
        experiment = self.experiment(options, RUNS if self.stored and not kept_elsewhere else None)
        if not self.stored and not kept_elsewhere:
            flags["--unobserved"] = True  # or Sacred warns that nobody observes
        if flags["--loglevel"] is None:
            flags["--loglevel"] = "WARNING"  # what Sacred says at INFO, our commands say better
        store = flags["--file_storage"] or (RUNS if experiment.observers else None)
        if store and flags["COMMAND"] is None:
            check_store(Path(store))
        if flags["--mongo_db"] and flags["COMMAND"] is None:
            with _sacreds_refusals():
                check_mongo(flags["--mongo_db"])
        for observer in experiment.observers:
            if isinstance(observer, FileStorageObserver) and flags["--id"] is not None:
                check_new(Path(observer.basedir), flags["--id"])
        with GracefulStop(at_once=True), _sacreds_refusals():
            run = experiment.run(flags["COMMAND"], options=flags)
        if flags["--queue"]:
            folder = folder_of(run)
            print(f"queued: {folder}; start it with: tokenv {self.name} with {folder}/config.json")
        return run.result


def usage(name: str) -> str:
    """Return Sacred's part of a command's help."""
    experiment = _bare(name)
    # docopt cannot read a program's name of two words
    return str(experiment.get_usage()[2]).replace("dummy", f"tokenv {name}")


def _bare(name: str) -> Experiment:
    """One with a command's flags."""
    process = HostInfoGetter(processes.describe, "process")  # by which others see whether it still exists
    return Experiment(
        f"tokenv-{name}",
        base_dir=_package("tokenv").parent,
        additional_host_info=[process],
        additional_cli_options=_TRACKERS,
    )


def _experiment(name: str) -> Experiment:
    """One that keeps all our sources."""
    experiment = _bare(name)
    logging.getLogger(experiment.path).addFilter(is_news)
    experiment.captured_out_filter = apply_backspaces_and_linefeeds  # keep a progress bar's last state only
    for room in ("tokenv", "tokenv.agents", "tokenv.estimators"):
        for source in sorted(_package(room).rglob("*.py")):
            experiment.add_source_file(str(source))
    return experiment


@contextmanager
def _sacreds_refusals() -> Iterator[None]:
    """What Sacred refuses is the user's to mend: keys that it cannot store, flags whose packages are not there."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith(("EnforceClean", "No version control")):  # --enforce_clean
            raise UserError(str(error)) from error
        raise
    except KeyError as error:
        if str(error.args[0]).startswith("Invalid key"):
            raise UserError(str(error.args[0])) from error
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OBSERVERS_NEED:
            raise UserError(f"this flag of Sacred's needs the package {package}: pip install it") from error
        raise


def _package(name: str) -> Path:
    """A package's folder: agents and estimators lie beside tokenv in a checkout, and in it where it is installed."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _parse(name: str, arguments: list[str]) -> dict[str, Any]:
    experiment = _bare(name)
    commands = [word for word, _ in experiment.gather_commands()]
    hint = f"expected tokenv {name} with NAME key=value ..., then flags; tokenv {name} --help names them"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what docopt warns of is in our message
            flags: dict[str, Any] = docopt(experiment.get_usage()[2], arguments, default_help=False)
    except DocoptExit:
        raise UserError(
            f"cannot read {' '.join(arguments)!r}: {forgotten_with(name, arguments, commands)}{hint}"
        ) from None
    if flags["COMMAND"] == "with":  # and nothing behind it
        flags["COMMAND"] = None
    if flags["COMMAND"] not in (None, *commands):
        meant = forgotten_with(name, arguments, commands)
        raise UserError(f"{flags['COMMAND']!r} is none of {', '.join(commands)}: {meant}{hint}")
    check_flags(flags)
    return flags
