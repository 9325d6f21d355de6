"""``tokenv completion SHELL``: print the code by which bash, zsh or fish completes commands, keys and names.

``eval "$(tokenv completion bash)"`` in ~/.bashrc (zsh: ~/.zshrc), ``tokenv completion fish | source`` in config.fish.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenv.cli.commands import COMMANDS
from tokenv.cli.help import command_keys
from tokenv.cli.list import KINDS, REGISTRIES
from tokenv.config.files import named_configs
from tokenv.core.errors import MissingFileError, UserError, suggest
from tokenv.core.run_folders import list_complete

SHELLS = ("bash", "zsh", "fish")
WITH_CONFIGS = ("train", "compare", "variance", "bench")
RUN_KEYS = ("run", "resume", "init_from", "agent.pretrained")


def run(arguments: list[str]) -> None:
    """Print the code for a shell.

    Raises:
        UserError: there is no such shell, or argcomplete is not installed.
    """
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UserError(f"cannot complete in {' '.join(arguments)!r}: {suggest(' '.join(arguments), SHELLS)}")
    print(_import_argcomplete().shellcode(["tokenv"], shell=arguments[0]))


def answer_shell() -> None:
    """Answer a shell, through argcomplete's environment variables, with the next words of its line; end the process."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("command", choices=COMMANDS)
    words: Any = parser.add_argument("words", nargs="*", help=SUPPRESS)
    words.completer = complete
    _import_argcomplete().autocomplete(parser, always_complete_options=False)


def _import_argcomplete() -> Any:
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise MissingFileError("completion needs the package argcomplete: pip install argcomplete") from None
    return argcomplete


def complete(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """Return the words by which a command line can be continued.

    Args:
        prefix: beginning of the next word.
        parsed_args: ``command`` and the ``words`` before the next one.
    """
    command, words = parsed_args.command, parsed_args.words or []
    candidates: Iterable[str]
    if command == "completion":
        candidates = SHELLS
    elif command == "list":
        candidates = KINDS if not words else REGISTRIES[words[0]].names() if words[0] in REGISTRIES else ()
    elif command in ("configs", "lm-eval"):
        candidates = ()
    elif "with" not in words:
        candidates = ("with", "print_config", "--help")
    elif "=" in prefix:
        key, _equals, value = prefix.partition("=")
        candidates = [f"{key}={each}" for each in _values(key, value)]
    else:
        names = list(named_configs()) if command in WITH_CONFIGS else []
        candidates = [*names, *(f"{key.name}=" for key in command_keys(command))]
    return [word for word in candidates if word.startswith(prefix)]


def _values(key: str, value: str) -> Iterable[str]:
    section = key.removesuffix(".name") + "s"
    if key.endswith(".name") and section in REGISTRIES:
        return REGISTRIES[section].names()
    if key == "data.source":
        return [name for name, _ in KINDS["datasets"]() if name.islower() or ":" in name]
    if key in RUN_KEYS:
        with suppress(OSError):
            store = Path(value.rpartition("/")[0] or "runs")
            return [str(path) for path in sorted(store.iterdir()) if list_complete(path / "checkpoints")]
    return ()
