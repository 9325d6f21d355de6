"""What to compare: a comparison's YAML file, its keys and their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE, config_path, load_yaml, merge, resolve
from tokenv.config.schema import Config
from tokenv.errors import UserError


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
        methods: method to what it alone changes.
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
        for seed in self.seeds:
            if not isinstance(seed, int) or isinstance(seed, bool):
                raise UserError(f"seeds = {self.seeds!r}: expected whole numbers, such as seeds=[0,1,2]")
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


LISTS = ("base", "seeds", "only", "runs")


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
        values = merge(values, read)
    check_keys(updates, COMMAND_LINE, CompareOptions)
    values = merge(values, updates)
    for key in LISTS:
        if key in values and not isinstance(values[key], list | tuple):
            values[key] = [values[key]]
    check_keys(values.get("common", {}), "common", Config)
    return make(CompareOptions, values)
