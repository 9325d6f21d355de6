"""``tokenv completion SHELL``: what a shell (bash, zsh or fish) has to read to complete commands, keys and names.

``eval "$(tokenv completion bash)"`` in ~/.bashrc (zsh: ~/.zshrc), ``tokenv completion fish | source`` in config.fish.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenv.cli.help import command_keys
from tokenv.cli.list import KINDS, TABLES
from tokenv.cli.main import COMMANDS
from tokenv.config.files import named_configs
from tokenv.core.errors import MissingFileError, UserError, suggest
from tokenv.storage.run_folders import list_complete

SHELLS = ("bash", "zsh", "fish")
WITH_CONFIGS = ("train", "compare", "variance", "bench")
RUN_KEYS = ("run", "resume", "init_from", "agent.pretrained")


def run(arguments: list[str]) -> None:
    """Run the command: see ``tokenv.cli.main``.

    Raises:
        UserError: there is no such shell, or argcomplete is not installed.
    """
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UserError(f"cannot complete in {' '.join(arguments)!r}: {suggest(' '.join(arguments), SHELLS)}")
    print(_argcomplete().shellcode(["tokenv"], shell=arguments[0]))


def answer() -> None:
    """Answer a shell that asks, through argcomplete's variables, how its line may go on; ends the process."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("command", choices=COMMANDS)
    words: Any = parser.add_argument("words", nargs="*", help=SUPPRESS)
    words.completer = continuations
    _argcomplete().autocomplete(parser, always_complete_options=False)


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise MissingFileError("completion needs the package argcomplete: pip install argcomplete") from None
    return argcomplete


def continuations(prefix: str, parsed_args: Namespace, **_: Any) -> Iterable[str]:
    """Words that a command line may go on with.

    Args:
        prefix: what stands there of the next word.
        parsed_args: ``command`` and the ``words`` before this one.
    """
    command, words = parsed_args.command, parsed_args.words or []
    if command == "completion":
        found: Iterable[str] = SHELLS
    elif command == "list":
        found = KINDS if not words else TABLES[words[0]].names() if words[0] in TABLES else ()
    elif command in ("configs", "lm-eval"):
        found = ()
    elif "with" not in words:
        found = ("with", "print_config", "--help")
    else:
        found = _after_with(command, prefix)
    return [word for word in found if word.startswith(prefix)]


def _after_with(command: str, prefix: str) -> Iterable[str]:
    key, equals, value = prefix.partition("=")
    if not equals:
        names = list(named_configs()) if command in WITH_CONFIGS else []
        return [*names, *(f"{known.name}=" for known in command_keys(command))]
    return [f"{key}={each}" for each in _values(key, value)]


def _values(key: str, value: str) -> Iterable[str]:
    section = key.removesuffix(".name") + "s"
    if key.endswith(".name") and section in TABLES:
        return TABLES[section].names()
    if key == "data.source":
        return [name for name, _ in KINDS["datasets"]() if name.islower() or ":" in name]
    if key in RUN_KEYS:
        with suppress(OSError):
            store = Path(value.rpartition("/")[0] or "runs")
            return [str(path) for path in sorted(store.iterdir()) if list_complete(path / "checkpoints")]
    return ()
