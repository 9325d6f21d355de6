"""Registries of classes by name, none of which is imported before it is used, and how what they name is built."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from tokenv.core.conversion import convert, parameters
from tokenv.core.errors import MissingFileError, UserError, suggest


@functools.cache
def installed_entry_points(group: str) -> tuple[tuple[str, str, str], ...]:
    """Return name, package and target of all that is registered under a group; searching for it takes long."""
    return tuple(
        (entry.name, getattr(entry.dist, "name", "an unknown package"), entry.value)
        for entry in entry_points(group=group)
    )


class Registry(dict[str, str]):
    """Built-in classes by name, and those which installed packages register under an entry-point group.

    As a dictionary it holds the built-in ones: name to ``package.module:Class``.

    Args:
        group: entry-point group, such as ``tokenv.estimators``.
        builtin: classes of tokenv, or functions which build an instance.
        base: common base class, as ``package.module:Class``.
    """

    def __init__(self, group: str, builtin: Mapping[str, str], *, base: str) -> None:
        super().__init__(builtin)
        self.group = group
        self._base = base

    def names(self) -> list[str]:
        """Return all names, including those of other packages."""
        return sorted({*self, *(name for name, _, _ in installed_entry_points(self.group))})

    def target(self, name: str) -> str | None:
        """Return ``package.module:Class`` for a name; None if it is unknown.

        Raises:
            UserError: two packages claim the name.
        """
        registered = {
            (package, target)
            for entry, package, target in installed_entry_points(self.group)
            if entry == name
        }
        if name in self:
            registered.add(("tokenv", self[name]))
        claims = sorted(registered)
        if len(claims) > 1:
            whose = " and ".join(f"{package} ({value})" for package, value in claims)
            raise UserError(
                f"{name!r} in {self.group} is claimed by {whose}: uninstall one of them, or name the class itself as "
                "package.module:Class"
            )
        return claims[0][1] if claims else None

    def base(self) -> type:
        """Import the common base class."""
        return resolve_name(self._base)


def find(kind: str, name: str, table: Registry, key: str = "") -> Callable[..., Any]:
    """Import the class or function with a name.

    Args:
        kind: section of the configuration, for messages, such as ``agent``.
        name: name in ``table``, or ``package.module:Class`` for one of your own.
        table: registry of names.
        key: what names it, for messages; ``KIND.name`` if empty.

    Raises:
        UserError: the name is unknown, cannot be imported, or does not build an instance of the common base class.
    """
    key = key or f"{kind}.name"
    if not isinstance(name, str):
        raise UserError(f"{key} = {name!r}: expected the name of one, or package.module:Class")
    if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names and ":" in name:
        raise UserError(f"{key} = {name!r} is of Python's own library: {_expected(kind, table)}")
    target = name if ":" in name else table.target(name)
    if target is None:
        hint = suggest(name, table.names())
        raise UserError(
            f"{key} = {name!r} is unknown: {hint} (or name your own as package.module:Class)"
        )
    module = target.partition(":")[0]
    try:
        target_object: Any = resolve_name(target)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        reason = f"{type(error).__name__}: {error}".removeprefix("ModuleNotFoundError: ")
        if isinstance(error, ModuleNotFoundError) and module.split(".")[0] == error.name:
            reason += (
                f": for {error.name}.py in the current folder write PYTHONPATH=. before the command"
            )
        raise UserError(f"{key} = {name!r} cannot be imported from {module}: {reason}") from error
    if not _may_build(target_object, table.base()):
        raise UserError(f"{key} = {name!r} is {target_object!r}: {_expected(kind, table)}")
    return target_object


def _expected(kind: str, table: Registry) -> str:
    return (
        f"expected a class or a function that builds one, a {kind} being a {table.base().__name__}"
    )


def _may_build(target: Any, base: type) -> bool:
    """Return whether a class, or a function by its return annotation, may build an instance of ``base``."""
    if isinstance(target, type):
        return issubclass(target, base)
    if not callable(target) or inspect.isbuiltin(target):
        return False
    annotation = getattr(target, "__annotations__", {}).get("return")
    return not isinstance(annotation, type) or issubclass(annotation, base)


def build(kind: str, options: Mapping[str, Any], table: Registry, **context: Any) -> Any:
    """Build the object which a section of the configuration names.

    Args:
        kind: name of the section, such as ``agent``.
        options: ``name`` and keyword arguments of its constructor.
        table: registry of names.
        context: further arguments (width, rate, ...), passed if the constructor takes them and ``options`` do not
            override them.

    Raises:
        UserError: the constructor does not take an option or rejects a value, or it builds an object of another class.
    """
    own = {name: value for name, value in options.items() if name != "name"}
    result = construct(
        f"{kind} {options['name']!r}", find(kind, options["name"], table), own, **context
    )
    if not isinstance(result, table.base()):
        raise UserError(
            f"{kind}.name = {options['name']!r} has built {result!r}: {_expected(kind, table)}"
        )
    return result


def construct(
    label: str, target: Callable[..., Any], options: Mapping[str, Any], **context: Any
) -> Any:
    """Call a class or function with options, converted to the types of its annotations.

    Args:
        label: section and name for messages, such as ``agent 'learned'``.
        target: class or function.
        options: keyword arguments for it.
        context: further arguments, passed if its signature has them and ``options`` do not override them.

    Raises:
        MissingFileError: a file which an option names does not exist.
        UserError: an option is unknown, missing or of another type, or the class or function rejects a value.
    """
    section = label.partition(" ")[0]
    try:
        signature = parameters(target)
    except ValueError as error:
        raise UserError(f"{label} cannot be built by name: {error}") from error
    known = {
        name: parameter
        for name, parameter in signature.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    arguments = {name: value for name, value in context.items() if name in known}
    for name, value in options.items():
        if name not in known and len(known) == len(signature):
            raise UserError(
                f"{section}.{name} is no option of {label}: {suggest(name, [*known, 'name'])}"
            )
        hint = known[name].annotation if name in known else Any
        arguments[name] = convert(value, hint, f"{section}.{name}")
    for name, parameter in known.items():
        required = (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        )
        if required and name not in arguments:
            raise UserError(f"{section}.{name} is missing: {label} cannot be built without it")
    try:
        return target(**arguments)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(str(error)) from error
    except ValueError as error:
        message = str(error)
        if not message.startswith(section):
            message = f"{section}: {message}"
        raise UserError(message) from error
