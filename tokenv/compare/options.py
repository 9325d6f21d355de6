"""What to compare: a comparison's YAML file, its keys and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE, config_path, load_yaml, merge, resolve
from tokenv.config.schema import Config
from tokenv.errors import UserError

Words: TypeAlias = tuple[dict[str, Any], list[str]]


@dataclass(frozen=True)
class Task:
    """One run to be had.

    Attributes:
        method: its method's name.
        config: the whole run.
    """

    method: str
    config: Config

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.method}, seed {self.config.seed}"


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``tokenv compare``.

    Args:
        base: configuration that all methods share: a file or name, or several.
        common: what all methods change of it.
        methods: method to what it alone changes. A name may hold any character.
        seeds: runs of every method.
        only: methods to run and show; all where empty.
        jobs: runs at a time.
        store: folder of Sacred runs, where finished runs are looked for and new ones are put.
        runs: folders of existing runs to compare instead; then nothing is trained, and ``base``, ``common``,
            ``methods`` and ``seeds`` are not read.
        passages: held-out sequences to show as every method cuts them: text coloured, series drawn.
        bpe_vocabulary: size of the BPE vocabulary that boundaries in text are held against.

    Raises:
        UserError: there is nothing to compare, or a value is out of range.
    """

    base: list[str] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    only: list[str] = field(default_factory=list)
    jobs: int = 1
    store: str = "runs"
    runs: list[str] = field(default_factory=list)
    passages: int = 3
    bpe_vocabulary: int = 32_000

    def __post_init__(self) -> None:
        if not self.runs and not self.methods:
            raise UserError(
                "nothing to compare: expected a comparison, such as compare-quick, or runs=[runs/1, runs/2]"
            )
        if not self.runs and not self.seeds:
            raise UserError("seeds is empty: expected at least one whole number, such as seeds=[0,1,2]")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds = {self.seeds!r}: expected every seed once, such as seeds=[0,1,2]")
        for name, changes in self.methods.items():
            if not isinstance(changes, dict):
                raise UserError(
                    f"methods.{name} = {changes!r}: expected a section of what it changes, {{}} for nothing"
                )
        for name in self.only:
            if name not in self.methods:
                raise UserError(f"only names {name!r}, which is no method: they are {', '.join(self.methods)}")
        for name, least in (("jobs", 1), ("passages", 0), ("bpe_vocabulary", 256)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least {least}")

    def tasks(self) -> Iterator[Task]:
        """All runs: every method with the first seed, then with the second, so that an early look compares all.

        Raises:
            ValueError: a method's configuration has an unknown key or a wrong value.
        """
        for seed in self.seeds:
            for method, changes in self.methods.items():
                if not self.only or method in self.only:
                    where = f"methods.{method}"
                    check_keys(changes, where, Config)
                    yield Task(method, resolve(self.base, merge(merge(self.common, changes), {"seed": seed})))

    def as_dict(self) -> dict[str, Any]:
        """What Sacred stores: methods as a list, for Sacred refuses keys with ``=``, ``.`` or a leading ``$``."""
        return asdict(self) | {"methods": [{"name": name} | changes for name, changes in self.methods.items()]}


LISTS = ("base", "seeds", "only", "runs")


def read_words(words: Sequence[str], parse: Callable[[list[str]], Words]) -> Words:
    """The words of a command line, of which ``methods.NAME.key=value`` may name a method with dots or equals signs.

    Args:
        words: as typed.
        parse: Sacred's reading of words without such names: nested values, and names of files.

    Returns:
        The same as ``parse``.

    Raises:
        ValueError: a file that is named is none.
    """
    _, files = parse(list(words))
    methods_of = (load_yaml(config_path(file)).get("methods") for file in files)
    names = [str(name) for methods in methods_of if isinstance(methods, dict) for name in methods]
    names.sort(key=len, reverse=True)  # the longest that fits, where one name begins like another
    plain: list[str] = []
    found: dict[str, Any] = {}
    for word in words:
        rest = {name: word.removeprefix(f"methods.{name}.") for name in names}
        name = next((name for name in names if rest[name] != word and "=" in rest[name]), None)
        if name is None:
            plain.append(word)
        else:
            changes, _ = parse([rest[name]])
            found = merge(found, {name: changes})
    updates, files = parse(plain)
    return (merge(updates, {"methods": found}) if found else updates), files


def resolve_comparison(names: list[str], updates: dict[str, Any]) -> CompareOptions:
    """Options from comparison files and the command line.

    Args:
        names: files or names of comparisons, later ones overriding earlier ones.
        updates: nested values of the command line, which override all files.

    Raises:
        UserError: an unknown file, key or value.
    """
    values: dict[str, Any] = {}
    for name in names:
        path = config_path(name)
        read = load_yaml(path)
        check_keys(read, str(path), CompareOptions)
        values = merge(values, _named(read))
    check_keys(updates, COMMAND_LINE, CompareOptions)
    values = merge(values, _named(updates))
    for key in LISTS:
        if key in values and not isinstance(values[key], list | tuple):
            values[key] = [values[key]]
    if "only" in values:
        values["only"] = [str(name) for name in values["only"]]
    options = make(CompareOptions, values)
    check_keys(options.common, "common", Config)
    return options


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """The same with method names as text, where YAML or the command line read a number."""
    methods = values.get("methods")
    return values | {"methods": {str(k): v for k, v in methods.items()}} if isinstance(methods, dict) else values
