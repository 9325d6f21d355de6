"""Shared definitions: TensorDict keys, contracts, errors, rates, distributed batches. Imports no other room."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenv.core import keys as keys


def lazy_exports(
    package: str, public: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package which imports its public names when they are used.

    Args:
        package: ``__name__`` of the package.
        public: names by the module which defines them, relative to the package.
    """
    modules = {name: module for module, names in public.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules)
