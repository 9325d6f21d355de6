"""Help, lists and completion of the command line.

``tokenv COMMAND --help``: every key with its meaning, its default and its range, then Sacred's flags.

``tokenv list KIND``: agents, estimators, rate_targets, codecs, data, callbacks, configs or datasets, a line each; all
without KIND.
``tokenv list agents learned`` shows one with its options, ``tokenv list configs quick`` a configuration and its file.

``tokenv check NAME``: see ``tokenv.cli.check``.

``tokenv completion SHELL``: print the code by which bash, zsh or fish completes commands, keys and names.
``eval "$(tokenv completion bash)"`` in ~/.bashrc (zsh: ~/.zshrc), ``tokenv completion fish | source`` in config.fish.

Only light modules are imported here, so that help and completion answer at once.
"""

import dataclasses
import inspect
import itertools
import shutil
import textwrap
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.command_registry import COMMANDS, load_command
from tokenv.config import registry
from tokenv.config.field_docs import Key, describe, keys_of, meanings
from tokenv.config.files import config_path, load_yaml, named_configs
from tokenv.core.callbacks import CALLBACKS
from tokenv.core.conversion import parameters
from tokenv.core.errors import UserError, suggest
from tokenv.core.run_folders import list_complete
from tokenv.data.config import BUILT_IN, HUB_PREFIX
from tokenv.data.kinds import DATA, all_kinds

TRUST_CODE = Key(
    "trust_code",
    False,
    "names of your own code which a stored run may import; see SECURITY.md",
    "names or true",
)
Rows = Iterator[tuple[str, str]]  # name and description
REGISTRIES = {
    f"{section}s": table for section, table in registry.SECTIONS.items() if "." not in section
}
# what tokenv list shows of registries
LISTED = {**REGISTRIES, "data": DATA, "callbacks": CALLBACKS}
WORDS = {  # which commands without keys take
    "lm-eval": "the flags of lm-evaluation-harness, such as --model tokenv --model_args run=runs/7 --tasks piqa",
    "check": "NAME or module:name, options of its constructor as key=value, and kind=SECTION if several have the name",
    "list": "[KIND [NAME]], such as agents learned",
    "completion": "bash, zsh or fish",
}
SHELLS = ("bash", "zsh", "fish")
WITH_CONFIGS = ("train", "compare", "variance", "bench")
RUN_KEYS = ("run", "resume", "init_from", "agent.pretrained")


def command_keys(command: str) -> list[Key]:
    """Return all keys which a command takes, the command's own first."""
    if command not in COMMANDS.names():
        return []
    keys = list(keys_of(load_command(command)))
    own = [key for key in keys if not key.name.startswith("config.")]
    of_run = [
        dataclasses.replace(key, name=key.name.removeprefix("config."))
        for key in keys
        if key not in own
    ]
    return [*own, TRUST_CODE, *of_run]


def print_help(command: str, summary: str) -> None:
    """Print the help of a command."""
    keys = command_keys(command)
    print(f"tokenv {command}: {summary}")
    if not keys:
        print(f"\nusage: tokenv {command} {WORDS[command]}")
        return
    from tokenv.cli.sacred import usage  # heavier than what completion may load

    print(f"\nKeys, as tokenv {command} with key=value:")
    width = max(60, min(120, shutil.get_terminal_size((120, 0)).columns))
    for key in keys:
        print("\n".join(_lines(key, width)))
    print(f"\n{usage(command).rstrip()}")


def _lines(key: Key, width: int) -> Iterator[str]:
    begin = f"  {key.name}"
    if key.default is not dataclasses.MISSING:
        begin += f" = {format_value(key.default)}"
    text = f"{key.meaning.rstrip('.')} [{key.expected}]"
    if len(begin) > 33:
        yield from textwrap.wrap(begin, width, subsequent_indent=" " * 6)
        begin = ""
    yield from textwrap.wrap(
        text, width, initial_indent=begin.ljust(34) + " ", subsequent_indent=" " * 35
    )


def format_value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def list_names(arguments: list[str]) -> None:
    """List agents, estimators, rate_targets, codecs, data, callbacks, configs or datasets; all, or one: ``agents``.

    Raises:
        UserError: there is no such kind, or no such name of it.
    """
    kind, name, *more = [*arguments, "", ""]
    if any(more) or (kind and kind not in KINDS):
        raise UserError(f"cannot list {' '.join(arguments)!r}: {suggest(kind, KINDS)}")
    if name:
        _show_one(kind, name)
        return
    for one in KINDS:
        if kind in ("", one):
            _print_kind(one, heading=not kind)


def _print_kind(kind: str, *, heading: bool) -> None:
    rows = dict(KINDS[kind]())
    longest = max(map(len, rows), default=0)
    if heading:
        print(f"\n{kind}:")
    for name, text in rows.items():
        print(f"{name:{longest}}  {text}")


def _configs() -> Rows:
    for name, path in named_configs().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        text = " ".join(line.lstrip("# ") for line in comment)
        first, stop, _ = text.partition(". ")
        yield name, first + stop.strip()


def _datasets() -> Rows:
    yield from BUILT_IN.items()
    kinds = all_kinds()
    suffixes: list[str] = []
    for name, kind in kinds.items():
        suffixes += kind.suffixes
        for source, description in kind.sources.items():
            yield (
                source,
                f"{description} (a {kind.words.data}: with data.kind={name} codec.name={kind.codec})",
            )
    sources: dict[str, list[str]] = {}
    for name, path in named_configs().items():
        source = load_yaml(path).get("data", {}).get("source", "")
        if source.startswith(HUB_PREFIX) or source.endswith(tuple(suffixes)):
            sources.setdefault(source, []).append(name)
    for source, names in sources.items():
        yield source, f"the data of {', '.join(names)}"
    texts = "a file or folder of text, .jsonl, .json or .parquet"
    others = [
        f"{' or '.join(kind.suffixes)} of {name}" for name, kind in kinds.items() if kind.suffixes
    ]
    yield "PATH", "; ".join([texts, *others])
    yield f"{HUB_PREFIX}OWNER/NAME", "a data set of the Hugging Face hub, streamed"


KINDS: dict[str, Callable[[], Rows]] = {
    **{kind: partial(describe, table) for kind, table in LISTED.items()},
    "configs": _configs,
    "datasets": _datasets,
}


def _show_one(kind: str, name: str) -> None:
    """Print the whole documentation of one name, and its options; this imports it."""
    if kind == "configs":
        path = config_path(name)
        print(path, path.read_text(encoding="utf-8"), sep="\n")
        return
    if kind not in LISTED:
        raise UserError(f"cannot list {kind} {name!r}: expected tokenv list {kind}")
    section = kind.removesuffix("s")
    key = f"{section}.name"
    if kind == "data":
        section = "data.options"
        key = "data.kind"
    target = registry.find(section, name, LISTED[kind], key)
    print(inspect.getdoc(target) or "")
    print(f"\nOptions, as {key}={name} {section}.key=value:")
    descriptions = {}
    if isinstance(target, type):
        descriptions = meanings(target)
    defaults = {name: parameter.default for name, parameter in parameters(target).items()}
    if dataclasses.is_dataclass(target):
        defaults |= {key.name: key.default for key in keys_of(target)}  # lists, not what makes them
    for name, value in defaults.items():
        default = "the run's own"
        if value is not inspect.Parameter.empty:
            default = format_value(value)
        option = f"{section}.{name} = {default}"
        print(f"  {option:36}  {descriptions.get(name, '')}".rstrip())


def print_completion(arguments: list[str]) -> None:
    """Print the code by which a shell, ``bash``, zsh or fish, completes all this.

    Raises:
        UserError: there is no such shell.
    """
    shell = " ".join(arguments)
    if shell not in SHELLS:
        raise UserError(f"cannot complete in {shell!r}: {suggest(shell, SHELLS)}")
    import argcomplete

    print(argcomplete.shellcode(["tokenv"], shell=shell))


def answer_shell(commands: Iterable[str]) -> None:
    """Answer a shell, through argcomplete's environment variables, with the next words of its line; end the process.

    Args:
        commands: names of all commands.
    """
    import argcomplete

    parser = ArgumentParser(add_help=False)
    parser.add_argument("command", choices=commands)
    words: Any = parser.add_argument("words", nargs="*", help=SUPPRESS)
    words.completer = complete
    argcomplete.autocomplete(parser, always_complete_options=False)


def complete(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """Return the words by which a command line can be continued.

    Args:
        prefix: beginning of the next word.
        parsed_args: ``command`` and the ``words`` before the next one.
    """
    candidates = _candidates(parsed_args.command, parsed_args.words or [], prefix)
    return [word for word in candidates if word.startswith(prefix)]


def _candidates(command: str, words: list[str], prefix: str) -> Iterable[str]:
    if command == "completion":
        return SHELLS
    if command == "list" and not words:
        return KINDS
    if command == "list" and words[0] in LISTED:
        return LISTED[words[0]].names()
    if command == "check" and words:
        return [f"kind={kind.removesuffix('s')}" for kind in REGISTRIES]
    if command == "check":
        return itertools.chain.from_iterable(table.names() for table in REGISTRIES.values())
    if command not in COMMANDS.names():
        return ()
    if "with" not in words:
        return ("with", "print_config", "--help")
    key, equals, value = prefix.partition("=")
    if equals:
        return [f"{key}={each}" for each in _values(key, value)]
    names: list[str] = []
    if command in WITH_CONFIGS:
        names += named_configs()
    return names + [f"{key.name}=" for key in command_keys(command)]


def _values(key: str, value: str) -> Iterable[str]:
    section = key.removesuffix(".name") + "s"
    if key.endswith(".name") and section in REGISTRIES:
        return REGISTRIES[section].names()
    if key == "data.source":
        return [name for name, _ in KINDS["datasets"]() if name.islower() or ":" in name]
    if key in RUN_KEYS:
        with suppress(OSError):
            store = Path(value.rpartition("/")[0] or "runs")
            return [
                str(path) for path in sorted(store.iterdir()) if list_complete(path / "checkpoints")
            ]
    return ()
