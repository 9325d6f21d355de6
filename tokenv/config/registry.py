"""Find classes by name, importing none before it is named, and list the plug-ins of a configuration."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from tokenv import agents, estimators
from tokenv.config import registry
from tokenv.config.conversion import RENAMED_OPTIONS, convert, parameters
from tokenv.core.errors import MissingFileError, UserError, suggest
from tokenv.lm import codecs


class Registry(Mapping[str, str]):
    """Built-in names, and those that installed packages register under an entry-point group.

    As a mapping it holds what is built in: name to ``package.module:Class``.

    Args:
        group: entry-point group, such as ``tokenv.estimators``.
        builtin: what comes with tokenv.
        base: ``package.module:Class`` of which all that is named here is, or builds, an instance.
    """

    def __init__(self, group: str, builtin: Mapping[str, str], *, base: str) -> None:
        self.group, self._builtin, self._base = group, dict(builtin), base

    def __getitem__(self, name: str) -> str:
        return self._builtin[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._builtin)

    def __len__(self) -> int:
        return len(self._builtin)

    def names(self) -> list[str]:
        """All names, those of other packages included."""
        return sorted({*self, *(entry.name for entry in entry_points(group=self.group))})

    def target(self, name: str) -> str | None:
        """``package.module:Class`` for a name; None if nobody has it.

        Raises:
            UserError: two packages claim the name.
        """
        others = {
            (entry.dist.name if entry.dist else "an unknown package", entry.value)
            for entry in entry_points(group=self.group)
            if entry.name == name
        }
        claims = sorted(others | ({("tokenv", self._builtin[name])} if name in self else set()))
        if len(claims) > 1:
            whose = " and ".join(f"{package} ({value})" for package, value in claims)
            raise UserError(
                f"{name!r} in {self.group} is claimed by {whose}: uninstall one of them, or name the class itself as "
                "package.module:Class"
            )
        return claims[0][1] if claims else None

    def base(self) -> type:
        """The class that all that is named here is, or builds, an instance of."""
        module, _, attribute = self._base.partition(":")
        found: type = getattr(importlib.import_module(module), attribute)
        return found


# What each room has is listed where it is.
AGENTS = Registry("tokenv.agents", agents.AGENTS, base="tokenv.agents.base:Agent")
ESTIMATORS = Registry("tokenv.estimators", estimators.RECIPES, base="tokenv.estimators.base:Chain")
CODECS = Registry("tokenv.codecs", codecs.CODECS, base="tokenv.lm.codecs.base:Codec")
RATE_TARGETS = Registry(
    "tokenv.rate_targets", estimators.RATE_TARGETS, base="tokenv.estimators.rate_targets:RateTarget"
)


def find(kind: str, name: str, table: Registry) -> Callable[..., Any]:
    """The class or recipe that a name stands for.

    Args:
        kind: what is looked for, for messages, such as ``agent``.
        name: a name of ``table``, or ``package.module:Class`` for one of your own.
        table: where names are looked up.

    Raises:
        UserError: the name is unknown, nothing can be imported under it, or it is seen to build something else.
    """
    if not isinstance(name, str):
        raise UserError(f"{kind}.name = {name!r}: expected the name of one, or package.module:Class")
    if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names and ":" in name:
        raise UserError(f"{kind}.name = {name!r} is of Python's own library: {_expected(kind, table)}")
    target = name if ":" in name else table.target(name)
    if target is None:
        hint = suggest(name, table.names())
        raise UserError(f"{kind}.name = {name!r} is unknown: {hint} (or name your own as package.module:Class)")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        what = f"{type(error).__name__}: {error}".removeprefix("ModuleNotFoundError: ")
        if getattr(error, "name", None) in ("agents", "estimators"):
            what += f" (it is called tokenv.{error.name} now)"  # type: ignore[union-attr]
        raise UserError(f"{kind}.name = {name!r} cannot be imported: {what}") from error
    if not _may_build(found, table.base()):
        raise UserError(f"{kind}.name = {name!r} is {found!r}: {_expected(kind, table)}")
    return found


def _expected(kind: str, table: Registry) -> str:
    return f"expected a class or a function that builds one, a {kind} being a {table.base().__name__}"


def _may_build(found: Any, base: type) -> bool:
    """Whether something may be called to build an instance of a class, as far as that is seen before."""
    if isinstance(found, type):
        return issubclass(found, base)
    if not callable(found) or inspect.isbuiltin(found):
        return False
    told = getattr(found, "__annotations__", {}).get("return")
    return not isinstance(told, type) or issubclass(told, base)


def build(kind: str, options: Mapping[str, Any], table: Registry, **context: Any) -> Any:
    """Build what a section of the configuration names.

    Args:
        kind: the section, such as ``agent``.
        options: ``name`` and the keyword arguments that its constructor takes.
        table: see ``find``.
        context: what the program itself knows (width, rate, ...); passed where the constructor asks for it, and
            overridden by ``options``.

    Raises:
        UserError: an option is unknown to the constructor, the constructor refuses a value, or it builds something
            else.
    """
    given = {name: value for name, value in options.items() if name != "name"}
    made = construct(f"{kind} {options['name']!r}", find(kind, options["name"], table), given, **context)
    if not isinstance(made, table.base()):
        raise UserError(f"{kind}.name = {options['name']!r} has built {made!r}: {_expected(kind, table)}")
    return made


def construct(whose: str, found: Callable[..., Any], options: Mapping[str, Any], **context: Any) -> Any:
    """Call a class or recipe with its options, as its annotations want them, and with what it asks for of the context.

    Args:
        whose: for messages: section and name, such as ``agent 'learned'``.
        found: class or function.
        options: keyword arguments for it.
        context: passed where its signature asks for it, and overridden by ``options``.

    Raises:
        MissingFileError: a file that an option names is not there.
        UserError: an option is unknown to it, missing or of another type, or it refuses a value.
    """
    section = whose.partition(" ")[0]
    try:
        takes = parameters(found)
    except ValueError as error:
        raise UserError(f"{whose} cannot be built by name: {error}") from error
    known = {name: parameter for name, parameter in takes.items() if parameter.kind is not parameter.VAR_KEYWORD}
    arguments = {name: value for name, value in context.items() if name in known}
    for name, value in options.items():
        if name not in known and len(known) == len(takes):
            if name in RENAMED_OPTIONS:
                new = f"{section}.{RENAMED_OPTIONS[name]}"
                raise UserError(f"{section}.{name} is now called {new}: write that instead")
            raise UserError(f"{section}.{name} is no option of {whose}: {suggest(name, [*known, 'name'])}")
        hint = known[name].annotation if name in known else Any
        arguments[name] = convert(value, hint, f"{section}.{name}")
    for name, parameter in known.items():
        named = parameter.kind is not parameter.VAR_POSITIONAL
        if named and parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{section}.{name} is missing: {whose} cannot be built without it")
    try:
        return found(**arguments)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(str(error)) from error
    except ValueError as error:
        raise UserError(str(error)) from error


SECTIONS = {
    "agent": registry.AGENTS,
    "codec": registry.CODECS,
    "estimator": registry.ESTIMATORS,
    "rate_target": registry.RATE_TARGETS,
}
MOST_FILES = 200  # of a package


@dataclass(frozen=True)
class Plugin:
    """Somebody else's code.

    Attributes:
        files: its Python files: all of its package, or the module alone.
        packages: installed packages that it belongs to, with their versions; none of a loose file.
    """

    files: list[Path]
    packages: dict[str, str]


def plugins(values: Mapping[str, Any]) -> Iterator[Plugin]:
    """What a run uses that is not ours, after its parts have been built once.

    Args:
        values: a run's configuration.
    """
    for section, table in SECTIONS.items():
        name = str((values.get(section) or {}).get("name", ""))
        target = name if ":" in name else table.target(name)
        module = (target or "").partition(":")[0]
        top = module.partition(".")[0]
        file = getattr(sys.modules.get(module), "__file__", None)
        if top == "tokenv" or file is None:
            continue
        package = Path(getattr(sys.modules[top], "__file__", None) or file)
        files = sorted(package.parent.rglob("*.py"))[:MOST_FILES] if package.name == "__init__.py" else [Path(file)]
        owners = set(packages_distributions().get(top, ()))
        yield Plugin(files, {owner: version(owner) for owner in sorted(owners)})
