"""The registries of what a configuration names, and the plugins of a configuration."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from tokenv import agents, estimators
from tokenv.core import trust
from tokenv.core.callbacks import CALLBACKS
from tokenv.core.plugins import Registry, build, construct, find
from tokenv.data.kinds import DATA
from tokenv.lm import codecs

__all__ = ["Registry", "build", "construct", "find"]

AGENTS = Registry("tokenv.agents", agents.AGENTS, base="tokenv.agents.base:Agent")
ESTIMATORS = Registry("tokenv.estimators", estimators.RECIPES, base="tokenv.estimators.base:Chain")
CODECS = Registry("tokenv.codecs", codecs.CODECS, base="tokenv.lm.codecs.base:Codec")
RATE_TARGETS = Registry(
    "tokenv.rate_targets", estimators.RATE_TARGETS, base="tokenv.estimators.rate_targets:RateTarget"
)

SECTIONS = {  # of a configuration, which name a class
    "agent": AGENTS,
    "imitation.teacher": AGENTS,
    "estimator": ESTIMATORS,
    "rate_target": RATE_TARGETS,
    "codec": CODECS,
}
MAX_FILES = 200  # of a package


def section_of(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section of nested values, such as ``imitation.teacher``; an empty one where it is missing."""
    for key in section.split("."):
        values = values.get(key) or {}
    return values


@dataclass(frozen=True)
class Plugin:
    """Code of another package which a run uses.

    Attributes:
        top: name of its package, or of its module if that is a single file.
        module: Python file of the module which is named.
    """

    top: str
    module: Path

    def files(self) -> list[Path]:
        """Return the module's file, and the Python files of its package, at most ``MAX_FILES``."""
        package = Path(getattr(sys.modules[self.top], "__file__", None) or self.module)
        if package.name != "__init__.py":
            return [self.module]
        return [self.module, *sorted(package.parent.rglob("*.py"))[:MAX_FILES]]

    def packages(self) -> dict[str, str]:
        """Return the versions of the installed distributions which contain it; none for a single file."""
        owners = set(packages_distributions().get(self.top, ()))
        return {owner: version(owner) for owner in sorted(owners)}


def plugins(values: Mapping[str, Any], *, load: bool = False) -> Iterator[Plugin]:
    """Yield the plugins of a run.

    Args:
        values: configuration of the run.
        load: whether to import modules which have not been imported yet; else they are left out.
    """
    named = [(CALLBACKS, callback) for callback in values.get("callbacks", ())]
    named += [(table, section_of(values, section)) for section, table in SECTIONS.items()]
    named.append((DATA, {"name": section_of(values, "data").get("kind")}))
    targets = set(trust.code_names(values))
    for table, options in named:
        targets.add(table.target(str(options.get("name"))) or "")
    for target in sorted(targets):
        module = target.partition(":")[0]
        top = module.partition(".")[0]
        if top in ("", "tokenv"):
            continue
        if load:
            import_module(module)
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None:
            yield Plugin(top, Path(file))
