"""Registries: built-in names, names of installed packages, and classes by module."""

import sys

import pytest

from tokenv.config import registry
from tokenv.config.build import build_agent
from tokenv.config.registry import ESTIMATORS, build, construct, find
from tokenv.core import plugins
from tokenv.core.errors import MissingFileError, UserError


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages have registered estimators: (package, name, target)."""

    def pretend(*claims):
        entries = [(name, package, target) for package, name, target in claims]
        monkeypatch.setattr(
            plugins,
            "installed_entry_points",
            lambda group: entries if group == "tokenv.estimators" else [],
        )

    return pretend


def test_names_of_installed_packages_are_found(installed):
    installed(("strange", "odd", "tokenv.estimators.recipes:rloo"))
    assert (
        build("estimator", {"name": "odd", "num_samples": 3}, ESTIMATORS).sampling.num_samples == 3
    )


def test_nothing_is_imported_before_it_is_named(installed):
    installed(
        ("strange", "odd", "antigravity_of_ours:fly"),
        ("other", "even", "tokenv.estimators.recipes:rloo"),
    )
    find("estimator", "even", ESTIMATORS)
    assert "antigravity_of_ours" not in sys.modules
    with pytest.raises(ValueError, match="'odd' cannot be imported"):
        find("estimator", "odd", ESTIMATORS)


@pytest.mark.parametrize("second", ["tokenv", "other"])
def test_two_packages_with_one_name_are_an_error(installed, second):
    name = "rloo" if second == "tokenv" else "odd"
    claims = [("strange", name, "a:b")] + ([] if second == "tokenv" else [("other", name, "c:d")])
    installed(*claims)
    with pytest.raises(ValueError, match="is claimed by") as raised:
        find("estimator", name, ESTIMATORS)
    assert second in str(raised.value)
    assert "strange (a:b)" in str(raised.value)
    find("estimator", "reinforce", ESTIMATORS)  # others are not touched


def test_a_package_listed_twice_is_one_package(installed):
    claim = ("strange", "odd", "tokenv.estimators.recipes:rloo")
    installed(claim, claim)
    assert find("estimator", "odd", ESTIMATORS)


def test_misspelt_names_get_the_nearest_of_all(installed):
    installed(("strange", "median_baseline", "a:b"))
    with pytest.raises(ValueError, match="did you mean 'median_baseline'"):
        find("estimator", "median_basline", ESTIMATORS)
    with pytest.raises(ValueError, match="did you mean 'reinforce'"):
        find("estimator", "reinforc", ESTIMATORS)


def test_agents_and_rate_targets_have_groups_of_their_own():
    assert {
        table.group for table in (registry.AGENTS, registry.ESTIMATORS, registry.RATE_TARGETS)
    } == {
        "tokenv.agents",
        "tokenv.estimators",
        "tokenv.rate_targets",
    }


@pytest.mark.parametrize("table", [registry.AGENTS, registry.ESTIMATORS, registry.RATE_TARGETS])
def test_every_built_in_name_can_be_imported(table):
    for name in table:
        assert callable(find("thing", name, table))


def test_missing_required_options_are_named():
    with pytest.raises(ValueError, match=r"agent\.pretrained is missing: expected text"):
        build_agent({"name": "loaded"}, rate=0.2)


def refuse(value: float):
    raise ValueError(f"value = {value}: expected another")


def miss():
    open("/nowhere/at/all").close()


def test_value_errors_of_constructors_are_user_errors_and_others_are_not():
    with pytest.raises(UserError, match=r"^agent: value = 3.0: expected another$") as raised:
        construct("agent 'x'", refuse, {"value": 3})
    assert type(raised.value.__cause__) is ValueError
    with pytest.raises(MissingFileError, match="/nowhere/at/all"):
        construct("agent 'x'", miss, {})
    with pytest.raises(UserError, match="agent 'int' cannot be built by name"):
        construct("agent 'int'", int, {})
    with pytest.raises(ZeroDivisionError):
        construct("agent 'x'", lambda: 1 / 0, {})


class Bare:
    def __init__(self, anything, later: "Unknown" = None, **others):  # noqa: F821
        self.got = (anything, later, others)


def test_values_without_annotation_are_not_changed():
    thing = object()
    assert construct("agent 'x'", Bare, {"anything": "1e1", "later": thing, "more": 1}).got == (
        "1e1",
        thing,
        {"more": 1},
    )
