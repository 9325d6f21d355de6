"""``tokenv list KIND``: agents, estimators, rate_targets, codecs, configs or datasets, a line each; all without KIND.

``tokenv list agents learned`` shows one with its options. ``tokenv configs`` lists configurations with their files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile

from tokenv.cli.help import format_value
from tokenv.config import registry
from tokenv.config.conversion import parameters
from tokenv.config.field_docs import meanings, sentence
from tokenv.config.files import load_yaml, named_configs
from tokenv.core.errors import UserError, suggest
from tokenv.data.config import BUILT_IN, HUB_PREFIX, SERIES_SUFFIXES, SYNTHETIC_SERIES

Rows = Iterator[tuple[str, str]]  # name and description
REGISTRIES = {f"{section}s": table for section, table in registry.SECTIONS.items() if "." not in section}


def list_names(arguments: list[str]) -> None:
    """Print all names of a kind, or of all kinds, with a description each; or one name with its options.

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


def list_configs(arguments: list[str]) -> None:
    """Print the configurations that come with tokenv, and their files."""
    print("\n".join(f"{name:16} {path}" for name, path in named_configs().items()))


def _registered(table: registry.Registry) -> Rows:
    for name in table.names():
        try:
            target = table.target(name)
            assert target is not None
            description = sentence(target)
        except (LookupError, UserError) as error:  # of another package; the others are listed all the same
            yield name, f"cannot be used: {error}"
            continue
        yield name, description if name in table else f"{description} (from {target})".strip()


def _configs() -> Rows:
    for name, path in named_configs().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        text = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        yield name, text[: text.index(". ") + 1] if ". " in text else text


def _datasets() -> Rows:
    yield from BUILT_IN.items()
    for name, description in SYNTHETIC_SERIES.items():
        yield name, f"{description} (a series: with data.kind=series codec.name=series)"
    sources: dict[str, list[str]] = {}
    for name, path in named_configs().items():
        source = load_yaml(path).get("data", {}).get("source", "")
        if source.startswith(HUB_PREFIX) or source.endswith(SERIES_SUFFIXES):
            sources.setdefault(source, []).append(name)
    for source, names in sources.items():
        yield source, f"the data of {', '.join(names)}"
    yield "PATH", "a file or folder of text, .jsonl, .json or .parquet; .csv or .parquet of series"
    yield f"{HUB_PREFIX}OWNER/NAME", "a data set of the Hugging Face hub, streamed"


KINDS: dict[str, Callable[[], Rows]] = {
    **{kind: partial(_registered, table) for kind, table in REGISTRIES.items()},
    "configs": _configs,
    "datasets": _datasets,
}


def _show_one(kind: str, name: str) -> None:
    """Print the whole documentation of one name, and its options; this imports it."""
    if kind == "configs":
        if name not in named_configs():
            raise UserError(f"no configuration {name!r}: {suggest(name, named_configs())}")
        print(named_configs()[name], named_configs()[name].read_text(encoding="utf-8"), sep="\n")
        return
    if kind not in REGISTRIES:
        raise UserError(f"cannot list {kind} {name!r}: expected tokenv list {kind}")
    section = kind.removesuffix("s")
    target = registry.find(section, name, REGISTRIES[kind])
    print(inspect.getdoc(target) or "")
    print(f"\nOptions, as {section}.name={name} {section}.key=value:")
    descriptions = meanings(target) if isinstance(target, type) else {}
    for key, parameter in parameters(target).items():
        default = "the run's own" if parameter.default is parameter.empty else format_value(parameter.default)
        print(f"  {f'{section}.{key} = {default}':36}  {descriptions.get(key, '')}".rstrip())
