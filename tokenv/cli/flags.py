"""Sacred's flags and commands as people mistype them: refused before anything starts."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenv.config.files import named_configs
from tokenv.core.errors import UserError


def forgotten_with(name: str, arguments: list[str], commands: list[str]) -> str:
    """A hint for those who forget the ``with``."""
    first = next((word for word in arguments if not word.startswith("-")), "with")
    forgotten = first not in (*commands, "with") and (
        first in named_configs() or "=" in first or first.endswith((".yaml", ".yml", ".json"))
    )
    return f"did you mean tokenv {name} with {' '.join(arguments)}? " if forgotten else ""


def check_flags(flags: dict[str, Any]) -> None:
    """Refuse what Sacred would only meet when the run is on its way, and without a word of which flag it was."""
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    checks: dict[str, tuple[Callable[[str], bool], str]] = {
        "--loglevel": (
            lambda level: level.isdigit() or level in levels,
            f"0 to 50 or one of {', '.join(levels)}",
        ),
        "--id": (lambda name: re.fullmatch(r"\w[\w.-]*", name) is not None, "a name of letters, digits, - and _"),
        "--capture": (lambda mode: mode in ("no", "sys", "fd"), "no, sys or fd"),
        "--beat-interval": (_positive, "a positive number of seconds"),
        "--priority": (_number, "a number"),
    }
    for flag, (fits, expected) in checks.items():
        if flags.get(flag) is not None and not fits(flags[flag]):
            raise UserError(f"{flag} {flags[flag]!r}: expected {expected}")


def check_new(store: Path, name: str) -> None:
    """Refuse the name of a run that is there already."""
    if (store / name).exists():
        raise UserError(f"--id {name!r}: {store / name} is there already: choose another, or leave it out")


def check_store(store: Path) -> None:
    """Refuse a folder that no run can be kept in, before work starts.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise UserError(
            f"{store}: cannot be written to ({error.strerror}): expected a folder for runs; name another with -F DIR, "
            "or store nothing with -u"
        ) from None


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _positive(text: str) -> bool:
    return _number(text) and float(text) > 0
