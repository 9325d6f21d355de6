"""``tokenv check NAME key=value ...``: check an agent, estimator, rate target or codec, built in or of one's own."""

import inspect
import shlex
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from tokenv import testing
from tokenv.config import registry
from tokenv.config.field_docs import plain
from tokenv.config.literals import read_words
from tokenv.core.errors import RunFailedError, UserError, suggest
from tokenv.testing import codec_checks, fixture

CHECKS: dict[str, Callable[..., list[str] | None]] = {  # by section of a configuration
    "agent": testing.check_agent,
    "estimator": testing.check_estimator,
    "rate_target": testing.check_rate_target,
    "codec": testing.check_codec,
}


def check(arguments: list[str]) -> None:
    """Check an estimator, agent, rate target or codec of your own, or of ours: ``mytrick:mine gamma=1.0``.

    Args:
        arguments: its name, or ``package.module:attribute``, which may lie in the current folder; options of its
            constructor as ``key=value``; and ``kind=`` where several kinds have the name.

    Raises:
        RunFailedError: a property does not hold.
        UserError: not one name, an unknown name, kind or option.
    """
    options, names = read_words(arguments)
    if len(names) != 1:
        raise UserError(
            f"{shlex.join(['tokenv', 'check', *arguments])}: expected one name, such as rloo or mytrick:two_means"
        )
    name = names[0]
    if ":" in name:
        sys.path.insert(0, "")  # as python -m does
    kind = options.pop("kind", None)
    if kind is None:
        kind = _find_kind(name, options)
    if kind not in CHECKS:
        raise UserError(f"kind = {kind!r}: {suggest(str(kind), CHECKS)}")
    function = CHECKS[kind]
    try:
        unchecked = function(name, **options)
    except AssertionError as error:
        raise RunFailedError(str(error)) from error
    print(f"{kind} {name}: no mistake was found")
    print(f"checked: {_describe(function)}")
    for each in unchecked or ["nothing was left out"]:
        print(f"not checked: {each}")


def _describe(function: Callable[..., Any]) -> str:
    """Return what a check says of itself, without its first sentence and its arguments."""
    said = inspect.getdoc(function) or ""
    _, _, body = said.partition("\n\n")
    return plain(body.partition("\nArgs:")[0])


def _find_kind(name: str, options: dict[str, Any]) -> str:
    """Return the section of a configuration which can name a component.

    Raises:
        UserError: it cannot be imported or built, or not one section can name it.
    """
    tables = {kind: registry.SECTIONS[kind] for kind in CHECKS}
    if ":" in name:
        made = _made_by(name, options)
        kinds = [kind for kind, table in tables.items() if issubclass(made, table.base())]
    else:
        kinds = [kind for kind, table in tables.items() if table.target(name) is not None]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise UserError(
            f"{name!r} is the name of {' and '.join(kinds)}: add kind={kinds[0]} or kind={kinds[1]}"
        )
    if ":" in name:
        raise UserError(f"{name!r} makes a {made.__name__}: expected one of {', '.join(CHECKS)}")
    known = [each for table in tables.values() for each in table.names()]
    raise UserError(
        f"{name!r} is unknown: {suggest(name, known)} (or name your own as package.module:Class)"
    )


def _made_by(name: str, options: dict[str, Any]) -> type:
    """Return the class of what a class or function makes."""
    try:
        target = resolve_name(name)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise UserError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}: expected module:name (the module without "
            ".py), of the current folder or of an installed package"
        ) from error
    if isinstance(target, type):
        return target
    if not callable(target):
        raise UserError(
            f"{name!r} is {target!r}: expected a class, or a function that builds an instance"
        )
    codec = fixture.tiny_lm().codec
    context: dict[str, Any] = {**fixture.CONTEXT, **codec_checks.CONTEXT, "codec": codec}
    return type(registry.construct(f"component {name!r}", target, options, **context))
