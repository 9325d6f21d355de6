"""Sacred's observers, changed where they would lose, overwrite or run what they should not, for all who import this.

A store may come from anybody, and a disk may be full at any moment: files are written complete or not at all, links are
not followed, and a template that lies in a store (which is code) is not rendered.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenv.core.errors import RunFailedError, UserError
from tokenv.plotting.characters import escape_line
from tokenv.storage.atomic import copy_atomically, write_atomically
from tokenv.storage.trust import read_json

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred import dependencies
    from sacred.observers import FileStorageObserver, SqlObserver, file_storage
    from sacred.serializer import flatten

AT_BEGINNING = ("config.json", "cout.txt", "run.json", "metrics.json", "options.json")  # files of every run
MONGO_SECONDS = 5  # to find a server; pymongo's own 30 would pass twice


def _commit_of(filename: str, save_git_info: bool) -> tuple[str | None, str | None, bool | None]:
    """What git says of a file; nothing where it refuses, as it does in a checkout that belongs to another user."""
    folder = Path(filename).resolve().parent
    root = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    return (None, None, None) if root is None or not save_git_info else _commit_in(root)


@functools.cache
def _commit_in(root: Path) -> tuple[str | None, str | None, bool | None]:
    try:
        told: tuple[str | None, str | None, bool | None] = _ask_git(str(root / "README.md"), True)
    except Exception:  # whatever git has against it, the run matters more
        return None, None, None
    return told


def _save_json(observer: FileStorageObserver, values: Any, filename: str) -> None:
    """A kill or a full disk leaves the old file, where Sacred itself would leave half of one.

    Once a run has begun, what cannot be written now may be written at the next sign of life: that is no reason to end
    it, nor for a traceback at its end.
    """
    path = Path(observer.dir) / filename
    try:
        write_atomically(path, json.dumps(flatten(values), sort_keys=True, indent=2))
    except OSError as error:
        if not (Path(observer.dir) / "config.json").exists() and observer.run_entry["status"] == "RUNNING":
            raise
        logging.getLogger("tokenv").warning("%s: cannot be written to (%s)", escape_line(str(path)), error.strerror)


def _queued_event(observer: FileStorageObserver, ex_info: dict[str, Any], *event: Any, **more: Any) -> Any:
    """Sources are kept as of a run that starts; Sacred takes them for files of the working directory."""
    kept, keeps = observer.save_sources(ex_info), observer.copy_sources
    observer.copy_sources = False
    try:
        return _queue(observer, ex_info | {"sources": kept}, *event, **more)
    finally:
        observer.copy_sources = keeps


def _completed_event(observer: SqlObserver, stop_time: datetime, result: Any) -> None:
    """Its result is a number: of several figures, the first; it ends with an error where there is none."""
    several = list(result.values()) if isinstance(result, dict) else [result]
    first = several[0] if several else None
    _complete(observer, stop_time, float(first) if isinstance(first, int | float) else None)


def _save_cout(observer: FileStorageObserver) -> None:
    with suppress(OSError):
        _append_cout(observer)


def _started_event(observer: FileStorageObserver, *event: Any, **more: Any) -> Any:
    """Leave no folder of a run that could not be started, such as one whose sources find no room on the disk."""
    observer.dir = observer.run_entry = None
    try:
        return _start(observer, *event, **more)
    except OSError:
        if observer.dir is not None and observer.run_entry is None:
            shutil.rmtree(observer.dir, ignore_errors=True)
        raise


def _failed_event(observer: FileStorageObserver, *event: Any, **more: Any) -> None:
    """Record a failed run; remove it where a mistake of the user's ended it before any work, and free its number."""
    if observer.run_entry is None:  # it never started
        return
    if isinstance(sys.exception(), UserError) and not _has_worked(Path(observer.dir)):
        shutil.rmtree(observer.dir, ignore_errors=True)
    else:
        _fail(observer, *event, **more)


def _has_worked(folder: Path) -> bool:
    """Return whether a run has stored a metric, or any file beside those that it begins with."""
    if any(path.is_file() and path.name not in AT_BEGINNING for path in folder.rglob("*")):
        return True
    metrics = folder / "metrics.json"
    return metrics.is_file() and metrics.read_bytes() != b"{}"


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of Sacred's log says more than the message that the command ends with."""
    return record.msg != "Failed after %s!" or not isinstance(sys.exception(), UserError | RunFailedError)


def _render_template(observer: FileStorageObserver) -> None:
    """Render nothing: ``template.html`` in a store is Mako, hence code of whoever made the store."""


# Sacred asks git three times for each source file, which takes seconds, and ends when git refuses.
_ask_git, dependencies.get_commit_if_possible = dependencies.get_commit_if_possible, _commit_of
file_storage.copyfile = copy_atomically
FileStorageObserver.save_json = _save_json
FileStorageObserver.render_template = _render_template
_append_cout, FileStorageObserver.save_cout = FileStorageObserver.save_cout, _save_cout
_queue, FileStorageObserver.queued_event = FileStorageObserver.queued_event, _queued_event
_start, FileStorageObserver.started_event = FileStorageObserver.started_event, _started_event
_fail, FileStorageObserver.failed_event = FileStorageObserver.failed_event, _failed_event
_complete, SqlObserver.completed_event = SqlObserver.completed_event, _completed_event


def check_mongo(place: str) -> None:
    """Refuse a database that does not answer, before work starts.

    Args:
        place: what ``--mongo_db`` says.

    Raises:
        ModuleNotFoundError: pymongo is not installed.
        UserError: it is none, or there is no answer within ``MONGO_SECONDS``.
    """
    import pymongo
    from sacred.observers.mongo import parse_mongo_db_arg

    try:
        url = parse_mongo_db_arg(place).get("url")
    except (AttributeError, ValueError):
        raise UserError(f"--mongo_db {place}: expected [HOST:PORT:]DATABASE, such as localhost:27017:sacred") from None
    try:
        with pymongo.MongoClient(url, serverSelectionTimeoutMS=1000 * MONGO_SECONDS) as client:
            client.admin.command("ping")
    except pymongo.errors.PyMongoError as error:
        why = str(error).partition(",")[0]
        raise UserError(
            f"--mongo_db {place}: no MongoDB answers at {url or 'localhost:27017'} ({why}): start it, name another, "
            "or leave the flag out"
        ) from None


def mark_completed(folder: Path, result: Any, metrics: Mapping[str, tuple[list[int], list[float]]]) -> None:
    """Make the files of a run say that it is finished, where it was killed after its last step; else change nothing.

    Args:
        folder: of the run.
        result: what its command returns.
        metrics: name to steps and values, all of them.
    """
    told = _mapping(folder / "run.json")
    if told.get("status") in (None, "COMPLETED"):  # kept in a database, or half written by an earlier version; finished
        return
    now = datetime.now(UTC).replace(tzinfo=None).isoformat()
    stored = _mapping(folder / "metrics.json")
    for name, (steps, values) in metrics.items():
        before = stored.get(name)
        times = before.get("timestamps") if isinstance(before, dict) else None
        times = times[: len(steps)] if isinstance(times, list) else []
        times += [now] * (len(steps) - len(times))
        stored[name] = {"steps": steps, "values": values, "timestamps": times}
    write_atomically(folder / "metrics.json", json.dumps(stored, sort_keys=True, indent=2))
    told |= {"status": "COMPLETED", "result": flatten(result), "stop_time": now}
    told.pop("fail_trace", None)
    write_atomically(folder / "run.json", json.dumps(told, sort_keys=True, indent=2))


def _mapping(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none, or it is damaged."""
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
