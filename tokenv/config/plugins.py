"""What other people's code a configuration uses: its files, and the packages they come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from tokenv.config import registry

SECTIONS = {
    "agent": registry.AGENTS,
    "codec": registry.CODECS,
    "estimator": registry.ESTIMATORS,
    "rate_target": registry.RATE_TARGETS,
}
MOST_FILES = 200  # of a package


@dataclass(frozen=True)
class PlugIn:
    """Somebody else's code.

    Attributes:
        files: its Python files: all of its package, or the module alone.
        packages: installed packages that it belongs to, with their versions; none of a loose file.
    """

    files: list[Path]
    packages: dict[str, str]


def plugins(values: Mapping[str, Any]) -> Iterator[PlugIn]:
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
        yield PlugIn(files, {owner: version(owner) for owner in sorted(owners)})
