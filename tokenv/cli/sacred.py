"""A command as a Sacred experiment: its flags, its options, and the record of its run.

Only this module and ``observers`` import Sacred.
"""

import logging
import math
import re
import shlex
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import cache, partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from docopt import DocoptExit, docopt

from tokenv.cli.observers import (
    TRACKERS,
    FileStorage,
    OneFigure,
    Tracker,
    check_mongo,
    is_informative,
)
from tokenv.config.commands import Command, Record
from tokenv.config.files import named_configs
from tokenv.config.registry import plugins
from tokenv.core import trust
from tokenv.core.atomic import check_encoding, write_atomically
from tokenv.core.errors import UserError
from tokenv.core.processes import GracefulStop, collect_garbage_from_now_on

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred import Experiment
    from sacred.commandline_options import CLIOption
    from sacred.dependencies import Source, get_commit_if_possible, get_digest
    from sacred.observers import FileStorageObserver, SqlObserver
    from sacred.observers.file_storage import file_storage_option
    from sacred.run import Run
    from sacred.utils import apply_backspaces_and_linefeeds

RUNS = "runs"  # default folder of stored runs
# agents and estimators lie beside tokenv in a checkout
ROOMS = ("tokenv", "tokenv.agents", "tokenv.estimators")
# optional packages behind Sacred's flags
OBSERVER_PACKAGES = ("sqlalchemy", "pymongo", "tinydb", "boto3")
STORAGE_FLAGS = ("--file_storage", "--mongo_db", "--sql", "--tiny_db", "--s3", "--unobserved")
# errors; the former two of --enforce_clean
MENDABLE = ("EnforceClean", "No version control", "Invalid key")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _tracker_option(short: str, tracker: type[Tracker]) -> CLIOption:
    """Build the flag which attaches a tracker to a run."""

    def attach(destination: str, run: Run) -> None:
        run.observers.append(tracker(destination))

    attach.__name__ = tracker.package
    attach.__doc__ = f"Send metrics to {tracker.__name__}: VALUE is {tracker.takes}."
    return CLIOption(attach, short, f"--{tracker.package}", is_flag=False)


def _store_in(folder: str, run: Run) -> None:
    """Store the run in a folder of its own in the folder VALUE."""
    own = FileStorage(folder)
    # Sacred's own flag has added its observer
    run.observers = [each for each in run.observers if each != own]
    run.observers.append(own)


OPTIONS = [
    CLIOption(_store_in, "-F", "--file_storage", is_flag=False),
    *(_tracker_option(short, tracker) for short, tracker in TRACKERS.items()),
]


def run_folder(run: Run) -> Path | None:
    """Return the folder of a run's files: of its FileStorage, or one of its own; None if it is not stored."""
    for observer in run.observers:
        if isinstance(observer, FileStorageObserver):
            return Path(observer.dir)
    if not run.observers:
        return None
    return Path(RUNS) / str(run._id)


def _make_record(run: Run, scratch: Path) -> Record:
    """Return the record of a run which has begun."""
    folder = run_folder(run)
    has_files = any(isinstance(observer, FileStorageObserver) for observer in run.observers)

    def add(path: Path) -> None:
        if folder and not has_files:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / path.name, path.read_bytes())
        run.add_artifact(path, path.name)

    return Record(scratch, folder, f"tokenv run {run._id}", run.log_scalar, add)


def read_command(kind: type[Command], words: list[str], store: str | None = None) -> Command:
    """Return the command, with its options, for the words after ``with``.

    Args:
        kind: class of the command.
        words: configurations and ``key=value``.
        store: folder of ``-F``, for a command whose option ``store`` says where the runs which it starts go.

    Raises:
        UserError: the command rejects them.
    """
    updates, names = kind.read(words)
    if store is not None and any(option.name == "store" for option in fields(kind)):
        updates = {"store": store, **updates}
    trust.allow(updates.pop("trust_code", False))
    return kind.resolve(names, updates)


def build_experiment(name: str, command: Command, store: str | Path | None = None) -> Experiment:
    """Build the experiment which runs a command.

    Args:
        name: name of the command.
        command: the command with its options.
        store: folder in which its run is stored; None for no observer.
    """
    experiment = _bare_experiment(name)
    experiment.sources.clear()  # those which Sacred has found
    logging.getLogger(experiment.path).addFilter(is_informative)
    # of a progress bar store the last state only
    experiment.captured_out_filter = apply_backspaces_and_linefeeds
    for source in source_files():
        _add_source(experiment, source)
    if store is not None:
        experiment.observers.append(FileStorage(store))
    folder = Path(tempfile.mkdtemp(prefix="tokenv-"))
    weakref.finalize(experiment, shutil.rmtree, folder, ignore_errors=True)

    @experiment.option_hook
    def capture(options: dict[str, Any]) -> None:
        if options["--capture"] is None and not options["--unobserved"]:
            # Sacred's own way, processes named tee, may wait for them in vain
            options["--capture"] = "sys"

    @experiment.main
    def main(_run: Run) -> Any:
        for number, observer in enumerate(_run.observers):
            if isinstance(observer, SqlObserver):
                _run.observers[number] = OneFigure(observer)
        return command.work(_make_record(_run, folder))

    own = getattr(command, "as_dict", partial(asdict, command))()
    values = own.pop("config", {}) | own  # the keys of the run and of the command share one level
    for plugin in plugins(values):
        for name, version in plugin.packages().items():
            experiment.add_package_dependency(name, version)
        for file in plugin.files():
            _add_source(experiment, file)
    with _translate_errors():
        experiment.add_config(values)
    return experiment


def run(name: str, kind: type[Command], arguments: list[str]) -> Any:
    """Run a command.

    Args:
        name: name of the command, such as ``train``.
        kind: its class.
        arguments: words after its name on the command line, in Sacred's grammar.

    Returns:
        Result of its work.

    Raises:
        UserError: the arguments do not follow Sacred's grammar, or the command rejects them.
    """
    flags = _parse_flags(name, arguments)
    command = read_command(kind, flags["UPDATE"], flags["--file_storage"])
    works = flags["COMMAND"] is None  # not a command of Sacred's, such as print_config
    shortcut = works and command.shortcut()
    collect_garbage_from_now_on()
    if shortcut:
        with GracefulStop(at_once=True):
            return shortcut()
    store = None
    if not any(flags.get(flag) for flag in STORAGE_FLAGS):
        if command.stored:
            store = RUNS
        else:
            flags["--unobserved"] = True  # or Sacred warns that there is no observer
    experiment = build_experiment(name, command, store)
    if flags["--loglevel"] is None:
        flags["--loglevel"] = "WARNING"  # our commands print what Sacred logs at INFO
    folder = flags["--file_storage"] or store
    if works and folder:
        _check_store(Path(folder))
    if works and flags["--mongo_db"]:
        with _translate_errors():
            check_mongo(flags["--mongo_db"])
    with GracefulStop(at_once=True), _translate_errors():
        done = experiment.run(flags["COMMAND"], options=flags)
    if flags["--queue"]:
        folder = run_folder(done)
        print(f"queued: {folder}; start it with: tokenv {name} with {folder}/config.json")
    return done.result


def usage(name: str) -> str:
    """Return Sacred's section of a command's help."""
    # docopt cannot read a program's name of two words
    return str(_bare_experiment(name).get_usage()[2]).replace("dummy", f"tokenv {name}")


def _bare_experiment(name: str) -> Experiment:
    """Build an experiment which has a command's flags and does nothing."""
    experiment = Experiment(
        f"tokenv-{name}",
        base_dir=Path(str(resources.files("tokenv"))).parent,
        additional_cli_options=OPTIONS,
        save_git_info=False,  # Sacred asks git three times for each file, and ends when git fails
    )
    experiment.doc = ""  # else this module's, which help would show
    experiment.all_cli_options.remove(file_storage_option)  # ours has the same name
    return experiment


def _add_source(experiment: Experiment, file: Path) -> None:
    """Add a source file to an experiment, with the git commit of its checkout."""
    checkouts = (folder for folder in file.resolve().parents if (folder / ".git").exists())
    commit = _commit_of(next(checkouts, None))
    experiment.sources.add(Source(str(file), get_digest(file), *commit))


@cache
def _commit_of(checkout: Path | None) -> tuple[str | None, str | None, bool | None]:
    """Return the address of a git checkout, its commit, and whether files are changed.

    All are None where git fails, as in a checkout which belongs to another user.
    """
    if checkout is not None:
        with suppress(Exception):  # the run is more important than its commit
            return get_commit_if_possible(str(checkout / "README.md"), True)
    return None, None, None


def source_files() -> list[Path]:
    """Return all source files of tokenv."""
    folders = (Path(str(resources.files(room))) for room in ROOMS)
    return list(chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders))


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn Sacred's errors which the user can mend into ``UserError``: wrong keys, packages which are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, _ = (error.name or "").partition(".")
        if package not in OBSERVER_PACKAGES:
            raise
        raise UserError(
            f"this flag of Sacred's needs the package {package}: pip install it"
        ) from error
    except (RuntimeError, KeyError) as error:
        text = str(next(iter(error.args), ""))
        if not text.startswith(MENDABLE):
            raise
        raise UserError(text) from error


def _parse_flags(name: str, arguments: list[str]) -> dict[str, Any]:
    experiment = _bare_experiment(name)
    commands = [word for word, _ in experiment.gather_commands()]
    expected = f"expected tokenv {name} with NAME key=value ..., then flags; tokenv {name} --help names them"
    # docopt would read -seed=3 as -s eed=3
    arguments = [re.sub(r"^-(?=[a-z_.]{2,}=)", "--", word) for word in arguments]
    flags = _match_usage(experiment, arguments)
    if flags is None:
        raise UserError(
            f"cannot read {' '.join(arguments)!r}: {_hint(name, arguments, experiment) or expected}"
        )
    if flags["COMMAND"] == "with":  # with nothing after it
        flags["COMMAND"] = None
    if flags["COMMAND"] not in (None, *commands):
        raise UserError(
            f"{flags['COMMAND']!r} is no command of tokenv {name}: {_hint(name, arguments, experiment) or expected}"
        )
    _check_flags(flags)
    return flags


def _match_usage(experiment: Experiment, arguments: list[str]) -> dict[str, Any] | None:
    """Return the flags of a command line by name; None if it does not follow Sacred's grammar."""
    try:
        with warnings.catch_warnings(action="ignore"):  # our message says what docopt warns of
            flags: dict[str, Any] = docopt(experiment.get_usage()[2], arguments, default_help=False)
    except DocoptExit:
        return None
    return flags


def _hint(name: str, arguments: list[str], experiment: Experiment) -> str:
    """Return advice on a line without ``with``, or with ``--key value`` for ``key=value``; empty if it has neither."""
    flags = set[str]().union(*(option.get_flags() for option in experiment.all_cli_options))
    meant = ["with"]
    words = iter(word for word in arguments if word != "with")
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("--") or flag in flags:
            meant.append(word)
            continue
        if not equals:
            value = next(words, "--")
        if value.startswith("--"):
            return ""
        key = flag.removeprefix("--").replace("-", "_")
        meant.append(f"{key}={value}")
    first = next((word for word in meant[1:] if not word.startswith("-")), "")
    is_first = (
        first in named_configs() or "=" in first or first.endswith((".yaml", ".yml", ".json"))
    )
    if not is_first or _match_usage(experiment, meant) is None:
        return ""
    return f"did you mean tokenv {name} {shlex.join(meant)}?"


def _check_flags(flags: dict[str, Any]) -> None:
    """Check flags which Sacred would reject only during the run, by a message which does not name the flag."""
    checks: dict[str, tuple[Callable[[str], bool], str]] = {
        "--loglevel": (
            lambda text: text.isdigit() or text in LEVELS,
            f"0 to 50 or one of {', '.join(LEVELS)}",
        ),
        "--id": (
            lambda text: re.fullmatch(r"\w[\w.-]*", text) is not None,
            "a name of letters, digits, - and _",
        ),
        "--capture": (lambda text: text in ("no", "sys", "fd"), "no, sys or fd"),
        "--beat-interval": (
            lambda text: 0 < _to_float(text) < math.inf,
            "a positive number of seconds",
        ),
        "--priority": (lambda text: math.isfinite(_to_float(text)), "a number"),
    }
    for flag, (is_valid, expected) in checks.items():
        if flags.get(flag) is not None and not is_valid(flags[flag]):
            raise UserError(f"{flag} {flags[flag]!r}: expected {expected}")


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check_store(store: Path) -> None:
    """Check that runs can be stored in a folder, which is created if it is missing, before work starts.

    Raises:
        UserError: it cannot be created or written to, or its path is not UTF-8.
    """
    check_encoding(store)
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise UserError(
            f"{store}: cannot be written to ({error.strerror}): expected a folder for runs; name another with -F DIR, "
            "or store nothing with -u"
        ) from None
