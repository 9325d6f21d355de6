"""``tokenv list KIND``: agents, estimators, rate_targets, codecs, configs or datasets, a line each; all without KIND.

``tokenv list agents learned`` shows one with its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenv.cli.help import in_yaml
from tokenv.config import registry
from tokenv.config.conversion import parameters
from tokenv.config.field_docs import meanings, sentence
from tokenv.config.files import load_yaml, named_configs
from tokenv.core.errors import UserError, suggest
from tokenv.data.config import BUILT_IN, HUB_PREFIX, SERIES_SUFFIXES, SYNTHETIC_SERIES

Lines = Iterator[tuple[str, str]]
TABLES = {
    "agents": registry.AGENTS,
    "estimators": registry.ESTIMATORS,
    "rate_targets": registry.RATE_TARGETS,
    "codecs": registry.CODECS,
}


def run(arguments: list[str]) -> None:
    """Run the command: see ``tokenv.cli.main``.

    Raises:
        UserError: there is no such kind, or no such name of it.
    """
    kind, name, *more = [*arguments, "", ""][: max(2, len(arguments))]
    if more or (kind and kind not in KINDS):
        raise UserError(f"cannot list {' '.join(arguments)!r}: {suggest(kind, KINDS)}")
    if name:
        _show_one(kind, name)
        return
    for one in [kind] if kind else KINDS:
        rows = list(KINDS[one]())
        longest = max((len(name) for name, _ in rows), default=0)
        print("\n".join([*([] if kind else [f"\n{one}:"]), *(f"{name:{longest}}  {text}" for name, text in rows)]))


def _registered(table: registry.Registry) -> Lines:
    for name in table.names():
        try:
            target = table.target(name)
            assert target is not None
            told = sentence(target)
        except (LookupError, UserError) as error:  # somebody's package: no reason not to show all others
            yield name, f"cannot be used: {error}"
            continue
        yield name, told if name in table else f"{told} (from {target})".strip()


def _configs() -> Lines:
    for name, path in named_configs().items():
        comment = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        text = " ".join(comment)
        yield name, text[: text.index(". ") + 1] if ". " in text else text


def _datasets() -> Lines:
    yield from BUILT_IN.items()
    for name, told in SYNTHETIC_SERIES.items():
        yield name, f"{told} (a series: with data.kind=series codec.name=series)"
    sources: dict[str, list[str]] = {}
    for name, path in named_configs().items():
        source = load_yaml(path).get("data", {}).get("source", "")
        if source.startswith(HUB_PREFIX) or source.endswith(SERIES_SUFFIXES):
            sources.setdefault(source, []).append(name)
    for source, names in sources.items():
        yield source, f"what {', '.join(names)} read{'s' if len(names) == 1 else ''}"
    yield "PATH", "a file or folder of text, .jsonl, .json or .parquet; .csv or .parquet of series"
    yield f"{HUB_PREFIX}OWNER/NAME", "a data set of the Hugging Face hub, streamed"


KINDS: dict[str, Callable[[], Lines]] = {
    **{kind: lambda table=table: _registered(table) for kind, table in TABLES.items()},  # type: ignore[misc]
    "configs": _configs,
    "datasets": _datasets,
}


def _show_one(kind: str, name: str) -> None:
    """Print all that is said of one, and its options; this does import it."""
    if kind == "configs":
        if name not in named_configs():
            raise UserError(f"no configuration {name!r}: {suggest(name, named_configs())}")
        print(named_configs()[name], Path(named_configs()[name]).read_text(encoding="utf-8"), sep="\n")
        return
    if kind not in TABLES:
        raise UserError(f"cannot list {kind} {name!r}: expected tokenv list {kind}")
    section = kind.removesuffix("s")
    found = registry.find(section, name, TABLES[kind])
    print(inspect.getdoc(found) or "")
    print(f"\nOptions, as {section}.name={name} {section}.key=value:")
    told = meanings(found) if isinstance(found, type) else {}
    for key, parameter in parameters(found).items():
        default = "the run's own" if parameter.default is parameter.empty else in_yaml(parameter.default)
        print(f"  {f'{section}.{key} = {default}':36}  {told.get(key, '')}".rstrip())
