"""The public names of tokenv, tokenv.agents and tokenv.estimators."""

import importlib
import inspect
import pkgutil

import pytest

import tokenv
import tokenv.agents
import tokenv.estimators
from tokenv.agents.base import Agent
from tokenv.estimators.base import Stage

FACES = [tokenv, tokenv.agents, tokenv.estimators]


@pytest.mark.parametrize("package", FACES, ids=lambda package: package.__name__)
def test_every_public_name_is_there(package):
    for name in dir(package):
        assert getattr(package, name).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("package", FACES, ids=lambda package: package.__name__)
def test_another_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize(("package", "kind"), [(tokenv.agents, Agent), (tokenv.estimators, Stage)])
def test_nothing_public_is_forgotten(package, kind):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for name, member in inspect.getmembers(
            importlib.import_module(module.name), inspect.isclass
        ):
            if (
                issubclass(member, kind)
                and member.__module__ == module.name
                and not name.startswith("_")
            ):
                assert name in dir(package) or inspect.isabstract(member), f"{module.name}.{name}"
