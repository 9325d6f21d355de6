"""From YAML files and ``key=value`` words on the command line to one complete configuration."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from tokenv.config.convert import check_keys, make, renamed
from tokenv.config.from_run import complete_section, start_from
from tokenv.config.plain import check_plain
from tokenv.config.schema import Config
from tokenv.data.config import check_sources
from tokenv.errors import UserError
from tokenv.storage import trust

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
        UserError: it is neither.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        if path.is_file():
            return path
        if path.stem in named_configs() and path.parent.name in ("", "configs"):
            return named_configs()[path.stem]  # configs/quick.yaml works from any folder
    elif name in named_configs():
        return named_configs()[name]
    close = difflib.get_close_matches(path.stem, named_configs(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"names are {', '.join(named_configs())}"
    raise UserError(f"no configuration {name!r}: expected a YAML file or a name: {hint}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: 1e1 is a number (and 1_000), on, yes and 1:30 are text; and no key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's.

        Raises:
            UserError: a key is given twice.
        """
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                at = key.start_mark
                raise UserError(f"{at.name}, line {at.line + 1}: {key.value} is given twice: drop one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """10, 0o10 or 0x10."""
        text = str(self.construct_scalar(node)).lower()
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


for _kind, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?\d+(_\d+)*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.\d+|\d+(_\d+)*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: it does not, or holds a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except RecursionError:
        raise UserError(f"{path} is nested too deeply: expected a configuration") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last four: a wrong !!tag
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not valid YAML: {error}") from error
    check_plain(values, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of keys to values")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file and check its keys.

    Raises:
        UserError: it is no YAML mapping, has an unknown key, or is a comparison's.
    """
    values = load_yaml(path)
    if "methods" in values:
        word = path.stem if path.stem in named_configs() and path == named_configs()[path.stem] else path
        raise UserError(f"{path} is a comparison of several runs: expected tokenv compare with {word}")
    if path.suffix == ".json":  # a stored run's, which has resume= besides, and whose word is not the user's
        values = renamed(Config, {key: value for key, value in values.items() if key != "resume"})
        trust.check(values, path)
    else:
        trust.allow_named(values)
    check_keys(values, str(path), Config)
    return values


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``update``.

    A new ``name`` in a section such as ``agent`` drops that section's options: they belonged to another class.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in update.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            renamed = isinstance(value.get("name"), str) and value["name"] != old.get("name")
            merged[key] = copy.deepcopy(value) if renamed else merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b`` as ``{"a": {"b": value}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def resolve(names: list[str], updates: dict[str, Any], base: dict[str, Any] | None = None) -> Config:
    """A complete, checked configuration.

    Args:
        names: configuration files or names, later ones overriding earlier ones.
        updates: nested values of the command line, which override all files.
        base: what the files override, possibly stored by an earlier version; the defaults where None.

    Raises:
        MissingFileError: there is no run that ``agent.load`` or ``start.model`` names.
        UserError: an unknown file, key or value.
    """
    values = Config().as_dict() if base is None else renamed(Config, base)
    for name in names:
        values = merge(values, read_yaml(config_path(name)))
    check_keys(updates, COMMAND_LINE, Config)
    trust.allow_named(updates)
    values = merge(values, updates)
    if "load" in values["agent"]:
        values["agent"] = complete_section(values["agent"], updates.get("agent", {}))
    started = values.get("start", {}).get("model")
    if started is not None and started != (base or {}).get("start", {}).get("model"):  # a stored one is complete
        values = start_from(values, updates)
    config = make(Config, values)
    check_sources(config.data)
    return config
