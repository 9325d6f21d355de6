"""From YAML files and ``key=value`` words on the command line to one complete configuration."""

from __future__ import annotations

import copy
import difflib
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from tokenv.config.from_run import complete_section
from tokenv.config.schema import NAMED, Config, check_keys, make

COMMAND_LINE = "command line"


def named_configs() -> dict[str, Path]:
    """The configurations that come with tokenv, by name."""
    try:
        folder = Path(str(resources.files("tokenv.configs")))
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_path(name: str) -> Path:
    """The file that a word stands for: a path, or the name of a configuration that comes with tokenv.

    Raises:
        ValueError: it is neither.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        if path.stem in named_configs() and path.parent.name in ("", "configs"):
            return named_configs()[path.stem]  # configs/quick.yaml works from any folder
    elif name in named_configs():
        return named_configs()[name]
    close = difflib.get_close_matches(path.stem, named_configs(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"names are {', '.join(named_configs())}"
    raise ValueError(f"no configuration {name!r}: expected a YAML file or a name: {hint}")


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ValueError: it does not.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file and check its keys.

    Raises:
        ValueError: it is no YAML mapping, has an unknown key, or is a comparison's.
    """
    values = load_yaml(path)
    if "methods" in values:
        raise ValueError(f"{path} is a comparison of several runs: expected tokenv compare with {path.stem}")
    check_keys(values, str(path))
    return values


def merge(base: dict[str, Any], update: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """``base`` with the values of ``update``.

    A new ``name`` in a section such as ``agent`` drops that section's options: they belonged to another class.
    """
    merged = copy.deepcopy(base)
    for key, value in update.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            renamed = depth == 0 and key in NAMED and value.get("name", old.get("name")) != old.get("name")
            merged[key] = copy.deepcopy(value) if renamed else merge(old, value, depth + 1)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def resolve(names: list[str], updates: dict[str, Any], base: dict[str, Any] | None = None) -> Config:
    """A complete, checked configuration.

    Args:
        names: configuration files or names, later ones overriding earlier ones.
        updates: nested values of the command line, which override all files.
        base: what the files override; the defaults where None.

    Raises:
        FileNotFoundError: there is no run that ``agent.load`` names.
        ValueError: an unknown file, key or value.
    """
    values = Config().as_dict() if base is None else base
    for name in names:
        values = merge(values, read_yaml(config_path(name)))
    check_keys(updates, COMMAND_LINE)
    values = merge(values, updates)
    if "load" in values["agent"]:
        values["agent"] = complete_section(values["agent"], updates.get("agent", {}))
    config: Config = make(Config, values)
    return config
