"""Resolve YAML files, ``key=value`` words and earlier runs to one complete configuration.

An earlier run may give its agent (``agent.pretrained=runs/3 agent.frozen=true``) or its language model
(``init_from=runs/3 freeze_lm=true``).
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

from tokenv.config.literals import CONFIGURATION_SUFFIXES, parse_yaml
from tokenv.config.schema import Config
from tokenv.core import run_folders, trust
from tokenv.core.conversion import Section, check_keys, from_dict
from tokenv.core.errors import UserError, suggest
from tokenv.core.rates import RateRange
from tokenv.data.config import BUILT_IN, HUB_PREFIX, check_sources
from tokenv.data.kinds import all_kinds
from tokenv.lm.config import UNetConfig

LOADED = "loaded"  # agent.name of an agent of an earlier run


@dataclass(frozen=True)
class TrainedAgent:
    """Configuration of the agent of an earlier run.

    Args:
        rate: rate of that run.
        codec_options: arguments which the data of that run gave its codec.
        codec: codec section of that run.
        model: model section of that run.
        agent: agent section of that run.
    """

    rate: float | RateRange
    codec_options: Section
    codec: Section
    model: UNetConfig
    agent: Section


@dataclass(frozen=True)
class LoadedAgent:
    """Agent section of a run which loads its agent; see ``inherit_section``.

    Args:
        pretrained: checkpoint of the earlier run.
        trained: configuration of the agent in the earlier run.
        frozen: whether the agent is not trained further.

    Raises:
        UserError: the agent of the earlier run is itself a loaded one, or has no name.
    """

    pretrained: str
    trained: TrainedAgent
    frozen: bool = True

    def __post_init__(self) -> None:
        for name in (self.trained.agent.get("name"), self.trained.codec.get("name")):
            if not isinstance(name, str) or name == LOADED:
                raise UserError(
                    f"agent.trained names {name!r}: expected the agent and the codec of an earlier run"
                )

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Self:
        """Build from a section, and check it.

        Raises:
            UserError: a key is missing or unknown, or a value has the wrong type; the message names it.
        """
        return from_dict(
            cls, {key: value for key, value in section.items() if key != "name"}, "agent."
        )


def inherit_section(section: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agent section of a run which loads its agent, complete so that the earlier run may be deleted.

    Args:
        section: agent section of the configuration, with ``pretrained``.
        updates: options of the section on the command line.

    Raises:
        MissingFileError: there is no such run.
        UserError: another option is given, or ``frozen`` is not a bool.
    """
    if "trained" in section and ("trained" in updates or "pretrained" not in updates):
        LoadedAgent.of(section)
        return dict(section)
    for key in updates:
        if key not in ("name", "pretrained", "frozen"):
            raise UserError(
                f"agent.{key}: beside agent.pretrained expected only agent.frozen; all else is the loaded run's"
            )
    frozen = section.get("frozen", True)
    if not isinstance(frozen, bool):
        raise UserError(
            f"agent.frozen = {frozen!r}: expected true (it is not trained further) or false"
        )
    path, config = _best_checkpoint(section["pretrained"])
    trained = config.agent.get("trained") or {
        "rate": config.as_dict()["rate"],
        "codec_options": config.data.options.codec_options,
        "codec": config.codec,
        "model": asdict(config.model),
        "agent": config.agent,
    }
    return {"name": LOADED, "pretrained": str(path.resolve()), "frozen": frozen, "trained": trained}


def inherit_model(values: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the model and codec sections of the run which ``init_from`` names.

    Args:
        values: configuration, with ``init_from``.
        updates: nested values of the command line.

    Raises:
        MissingFileError: there is no such run.
        UserError: the command line names another model or codec.
    """
    path, config = _best_checkpoint(values["init_from"])
    sections = {"model": asdict(config.model), "codec": config.codec}
    for section, options in sections.items():
        for key, value in updates.get(section, {}).items():
            changed = {
                "data": asdict(config.data),
                "codec": config.codec,
                section: {**options, key: value},
            }
            own = from_dict(Config, changed)
            if getattr(own, section) != getattr(config, section):
                raise UserError(
                    f"{section}.{key} = {value!r}: the run that init_from names has {options.get(key)!r}, and its "
                    "model and codec sections are taken; leave this out, or start from another run"
                )
    return {**values, **sections, "init_from": str(path.resolve())}


def _best_checkpoint(run: Any) -> tuple[Path, Config]:
    trust.check_path(str(run))
    path = run_folders.find(str(run), "best")
    trust.allow_named({"init_from": str(path.resolve())})
    return path, from_dict(Config, run_folders.load_state(path)["config"])


COMMAND_LINE = "command line"
COMMAND_OPTIONS = ("resume", "title")  # of tokenv train, beside its configuration


def named_configs() -> dict[str, Path]:
    """Return the files of the configurations that come with tokenv, by name."""
    folder = Path(str(resources.files("tokenv.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_path(name: str) -> Path:
    """Return the file of a configuration, given a path or the name of one that comes with tokenv.

    Raises:
        UserError: there is neither.
    """
    path = Path(name)
    if path.suffix in CONFIGURATION_SUFFIXES:
        if path.is_file():
            return path
        if path.stem in named_configs() and path.parent.name in ("", "configs"):
            return named_configs()[path.stem]  # configs/quick.yaml works from any folder
    elif name in named_configs():
        return named_configs()[name]
    hint = suggest(path.stem, named_configs())
    raise UserError(f"no configuration {name!r}: expected a YAML file or a name: {hint}")


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: it does not hold a mapping, or holds a key twice.
    """
    content = trust.read_bytes(path, limit=trust.MAX_CONFIG_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of keys to values")
    return values


def without_command_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a stored training run, whose file holds the options of the command, too."""
    return {key: value for key, value in values.items() if key not in COMMAND_OPTIONS}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file and check its keys.

    Raises:
        UserError: it is not a YAML mapping, has an unknown key, or is a comparison.
    """
    values = load_yaml(path)
    if "methods" in values:
        word = str(path)
        if path == named_configs().get(path.stem):
            word = path.stem
        raise UserError(
            f"{path} is a comparison of several runs: expected tokenv compare with {word}"
        )
    if path.suffix == ".json":  # of a stored run: its names of code are not the user's
        values = without_command_options(values)
        trust.check(values, path)
    else:
        trust.allow_named(values)
    check_keys(values, str(path), Config)
    return values


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated by ``update``, section by section.

    A new ``name`` in a section such as ``agent`` drops that section's options, which belong to another class, a new
    ``kind`` of data its ``options``, and an empty ``teacher`` the teacher.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in update.items():
        old = merged.get(key)
        merged[key] = copy.deepcopy(value)
        if isinstance(value, dict) and isinstance(old, dict):
            other_class = isinstance(value.get("name"), str) and value["name"] != old.get("name")
            no_teacher = key == "teacher" and not value
            if "kind" in value and value["kind"] != old.get("kind"):
                old = {name: each for name, each in old.items() if name != "options"}
            if not (other_class or no_teacher):
                merged[key] = merge(old, value)
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys; ``nest_key`` turns one of these back."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            pairs |= flatten(value, f"{prefix}{key}.")
        else:
            pairs[f"{prefix}{key}"] = value
    return pairs


def nest_key(key: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the key ``a.b``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def resolve(
    names: list[str], updates: dict[str, Any], base: dict[str, Any] | None = None
) -> Config:
    """Return a complete, checked configuration.

    Args:
        names: configuration files or names, of which later ones override earlier ones.
        updates: nested values of the command line, which override all files.
        base: values which the files override; None for the defaults.

    Raises:
        MissingFileError: there is no run which ``agent.pretrained`` or ``init_from`` names.
        UserError: an unknown file, key or value.
    """
    values = base or Config().as_dict()
    stored_model = values.get("init_from")
    for name in names:
        values = merge(values, _with_absolute_paths(read_yaml(config_path(name))))
    check_keys(updates, COMMAND_LINE, Config)
    trust.allow_named(updates)
    updates = _with_absolute_paths(updates)
    values = merge(values, updates)
    if "pretrained" in values["agent"]:
        values["agent"] = inherit_section(values["agent"], updates.get("agent", {}))
    teacher = values.get("imitation", {}).get("teacher", {})
    if "pretrained" in teacher:
        given = updates.get("imitation", {}).get("teacher", {})
        values["imitation"] = {**values["imitation"], "teacher": inherit_section(teacher, given)}
    if values.get("init_from") not in (None, stored_model):  # a stored configuration is complete
        values = inherit_model(values, updates)
    config = from_dict(Config, values)
    check_sources(config.data)
    return config


def _with_absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values whose paths of existing files are absolute, so that the stored run is read from any folder."""
    absolute = copy.deepcopy(dict(values))
    no_files = set(BUILT_IN).union(*(kind.sources for kind in all_kinds().values()))
    for section, key in trust.path_options(absolute):
        path = section[key]
        prefix = HUB_PREFIX if path.startswith(HUB_PREFIX) else ""
        if path not in no_files and os.path.exists(trust.local_path(path)):
            section[key] = prefix + trust.local_path(path)
    return absolute
