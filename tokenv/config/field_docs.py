"""Help on keys and names, read from docstrings; only dataclasses of options are imported."""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from tokenv.core.conversion import Section, in_words, type_hints
from tokenv.core.errors import UserError
from tokenv.core.plugins import Registry

SECTION = re.compile(r"^(?:Args|Attributes):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)
MAX_REEXPORTS = 5  # modules through which a name is imported


@dataclass(frozen=True)
class Key:
    """A key which a user may set.

    Attributes:
        name: name with its sections, such as ``train.symbols``.
        default: default value; ``dataclasses.MISSING`` for a required key.
        meaning: description in the docstring.
        expected: range of values in words.
    """

    name: str
    default: Any
    meaning: str
    expected: str


def keys_of(kind: type, prefix: str = "") -> Iterator[Key]:
    """Yield all keys of a dataclass of options, including those of its sections, in order.

    Args:
        kind: the dataclass.
        prefix: prefix of the keys' names.
    """
    hints = type_hints(kind)
    descriptions = meanings(kind)
    for item in fields(kind):
        default: Any = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        name = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from keys_of(hints[item.name], f"{name}.")
        elif hints[item.name] == Section:
            kind_name = item.metadata.get("kind", item.name)
            yield Key(
                f"{name}.name",
                default.get("name"),
                descriptions[item.name],
                f"a name that tokenv list {kind_name}s shows",
            )
        else:
            hint = hints[item.name]
            if hint is Any and "hint" in item.metadata:
                hint = item.metadata["hint"]("")
            expected = item.metadata.get("expected", in_words(hint))
            yield Key(name, default, descriptions[item.name], expected)


def meanings(kind: type) -> dict[str, str]:
    """Return the description of each argument or attribute in the docstrings of a class and its bases, on one line."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, *rest = SECTION.split(inspect.cleandoc(base.__doc__ or ""), maxsplit=1)
        descriptions |= {name: plain(text) for name, text in ENTRY.findall("".join(rest))}
    return descriptions


def plain(text: str) -> str:
    """Return a docstring's text on one line, without marks of code."""
    return " ".join(text.replace("`", "").split())


def sentence(target: str) -> str:
    """Return the first paragraph of a docstring on one line, without importing the module.

    Args:
        target: ``package.module:attribute``, or a module.

    Raises:
        LookupError: the module or attribute is not found; the message says which.
    """
    module, _, attribute = target.partition(":")
    node = _node(module, attribute) if attribute else _tree(module)
    return plain((ast.get_docstring(node) or "").partition("\n\n")[0])


def describe(table: Registry) -> Iterator[tuple[str, str]]:
    """Yield each name in a registry, and its description; those of other packages are not imported."""
    for name in table.names():
        try:
            target = table.target(name) or ""
            description = sentence(target)
        # an error of another package: the others are listed all the same
        except (LookupError, UserError) as error:
            yield name, f"cannot be used: {error}"
            continue
        if not target.startswith("tokenv."):
            description = f"{description} (from {target})".strip()
        yield name, description


def _node(module: str, attribute: str, hops: int = MAX_REEXPORTS) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition of a class or function, also if the module imports it from another one."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return node
        if isinstance(node, ast.ImportFrom) and hops:
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return _node(_absolute(module, node), alias.name, hops - 1)
    raise LookupError(f"{module} has no {attribute}")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    package = module
    if _spec(module).submodule_search_locations is None:
        package = module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


@functools.cache
def _tree(module: str) -> ast.Module:
    origin = _spec(module).origin
    try:
        return ast.parse(Path(origin or "").read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise LookupError(f"{module} cannot be read: {error}") from None


def _spec(module: str) -> ModuleSpec:
    """Find a module without importing its packages, as ``find_spec`` would."""
    package = module.rpartition(".")[0]
    if module in sys.modules:
        spec = sys.modules[module].__spec__
    elif package:
        where = _spec(package).submodule_search_locations
        spec = PathFinder.find_spec(module, where or [])
    else:
        spec = find_spec(module)
    if spec is None:
        raise LookupError(f"there is no module {module}")
    return spec
