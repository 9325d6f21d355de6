"""From names to classes. Nothing is imported until it is named."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

AGENTS: Mapping[str, str] = {
    "learned": "agents.learned:Learned",
    "strict": "agents.strict:Strict",
    "nawrot": "agents.gumbel:Nawrot",
    "hnet": "agents.router:HNet",
    "uniform": "agents.fixed:Uniform",
    "random": "agents.fixed:Random",
}
ESTIMATORS: Mapping[str, str] = {
    name: f"estimators.recipes:{name}"
    for name in (
        "naive",
        "early_exit",
        "reinforce",
        "leave_one_out",
        "moving_average",
        "lambda_return",
        "standardised",
        "rloo",
        "reinpatch",
        "ppo",
        "off_policy",
        "arm",
        "disarm",
        "arms",
        "bitflip",
        "branch",
        "rebar",
        "relax",
        "straight",
        "gumbel",
        "reinmax",
        "gumbel_rao",
        "path",
    )
}
RATE_TARGETS: Mapping[str, str] = {
    "logit_pressure": "estimators.rate:LogitPressure",
    "binomial": "estimators.rate:BinomialPrior",
    "ratio": "estimators.rate:RatioLoss",
}


def nearest(name: str, known: list[str]) -> str:
    """A hint for a mistyped name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


def find(kind: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
    """The class or recipe that a name stands for.

    Args:
        kind: what is looked for, for messages, such as ``agent``.
        name: a name of ``table``, or ``package.module:Class`` for one of your own.
        table: name to ``package.module:Class``.

    Raises:
        ValueError: the name is unknown, or nothing can be imported under it.
    """
    target = name if ":" in name else table.get(name)
    if target is None:
        hint = nearest(name, list(table))
        raise ValueError(f"{kind}.name = {name!r} is unknown: {hint} (or name your own as package.module:Class)")
    module, _, attribute = target.partition(":")
    check_rooms()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind}.name = {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{kind}.name = {name!r} is {found!r}: expected a class or a function that builds one")
    return found


def build(kind: str, options: Mapping[str, Any], table: Mapping[str, str], **context: Any) -> Any:
    """Build what a section of the configuration names.

    Args:
        kind: the section, such as ``agent``.
        options: ``name`` and the keyword arguments that its constructor takes.
        table: see ``find``.
        context: what the program itself knows (width, rate, ...); passed where the constructor asks for it, and
            overridden by ``options``.

    Raises:
        ValueError: an option is unknown to the constructor, or the constructor refuses a value.
    """
    found = find(kind, options["name"], table)
    parameters = inspect.signature(found).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    takes_all = len(known) < len(parameters)
    given = {name: value for name, value in options.items() if name != "name"}
    for name in given:
        if name not in known and not takes_all:
            hint = nearest(name, [*known, "name"])
            raise ValueError(f"{kind}.{name} is no option of {kind} {options['name']!r}: {hint}")
    return found(**{name: value for name, value in context.items() if name in known} | given)


def check_rooms() -> None:
    """Make sure that ``agents`` and ``estimators`` are ours and no foreign packages of the same name.

    Raises:
        ImportError: another package hides one of them.
    """
    for room in ("agents", "estimators"):
        module = importlib.import_module(room)
        if getattr(module, "TOKENV_ROOM", None) != room:
            where = getattr(module, "__file__", None) or getattr(module, "__path__", "an unknown place")
            raise ImportError(
                f"the package {room!r} imported from {where} is not tokenv's and hides it. Another distribution "
                f"installs a package of that name (openai-agents installs 'agents'): install tokenv in a virtual "
                "environment of its own, or uninstall the other one"
            )
