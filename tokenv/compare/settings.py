"""What tells runs apart: their configurations, key by key."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenv.compare.comparison import ComparedRun
from tokenv.config.build import is_trainable
from tokenv.config.schema import SETTINGS, Config
from tokenv.core.errors import UserError

LEARNERS_SETTING = ("estimator", "rate_target")
LEARNERS_LOSS = ("policy", "rate")
LONGEST_NAME = 40


def check_same_kind(configs: Mapping[str, Config]) -> None:
    """Refuse to hold text against series.

    Args:
        configs: name of a run or method to its configuration.

    Raises:
        UserError: two of them are of different kinds of data; the message names both.
    """
    firsts: dict[str, str] = {}
    for name, config in configs.items():
        firsts.setdefault(config.data.kind, name)
    if len(firsts) > 1:
        (kind, name), (other_kind, other) = firsts.items()
        raise UserError(
            f"{name} is of {kind} and {other} of {other_kind}: expected runs of one data.kind, for the losses of two "
            "are in different units; compare them apart"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        pairs |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return pairs


def differing_settings(configs: Mapping[str, Config]) -> dict[str, dict[str, str]]:
    """What each of several configurations does differently from some other: key to value, as text."""
    every = {name: _settings(config) for name, config in configs.items()}
    known = dict.fromkeys(itertools.chain.from_iterable(every.values()))
    varying = [key for key in known if len({repr(values.get(key)) for values in every.values()}) > 1]
    return {name: {key: str(values[key]) for key in varying if key in values} for name, values in every.items()}


def _settings(config: Config) -> dict[str, Any]:
    """All that says what a run does, with dotted keys; an agent that does not learn has no estimator."""
    learning = is_trainable(config.agent)
    told = [key for key in SETTINGS if learning or key not in LEARNERS_SETTING]
    values = {key: value for key, value in config.as_dict().items() if key in told}
    if not learning:
        values["loss"] = {name: weight for name, weight in values["loss"].items() if name not in LEARNERS_LOSS}
    return flat(values)


def group_into_methods(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Runs that differ in nothing but the seed, as methods named by what tells them apart.

    A name that would be too long for a table says where the method's first run lies instead; what tells it apart stands
    among its settings.

    Raises:
        UserError: two runs are the same, seed included.
    """
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        key = repr({k: v for k, v in run.config.as_dict().items() if k in SETTINGS})
        same = [other for other in groups.get(key, []) if other.config.seed == run.config.seed]
        if same:
            raise UserError(f"runs: {run.folder} and {same[0].folder} are the same run, seed included: drop one")
        groups.setdefault(key, []).append(run)
    settings = differing_settings({key: group[0].config for key, group in groups.items()})
    agents = [group[0].config.agent["name"] for group in groups.values()]
    briefly = _brief_keys(key for of in settings.values() for key in of)
    places = {key: Path(group[0].folder) for key, group in groups.items()}
    short = {key: "/".join(place.parts[-2:]) for key, place in places.items()}
    names = {}
    for key, group in groups.items():
        name = group[0].config.agent["name"]
        others = [f"{briefly[k]}={v}" for k, v in settings[key].items() if k != "agent.name"]
        names[key] = name if agents.count(name) == 1 else ", ".join([name, *others])
        if len(names[key]) > LONGEST_NAME:
            unique = list(short.values()).count(short[key]) == 1
            names[key] = f"{name}, {short[key] if unique else places[key]}"
    return {names[key]: group for key, group in groups.items()}


def _brief_keys(keys: Iterable[str]) -> dict[str, str]:
    """Dotted keys to their last parts, or to themselves where others end alike."""
    every = set(keys)
    ends = [key.rpartition(".")[2] for key in every]
    return {key: end if ends.count(end) == 1 else key for key in every for end in [key.rpartition(".")[2]]}
