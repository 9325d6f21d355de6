"""Names such as ``tokenv.core.keys`` in docstrings, messages, pages and settings exist."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tokenv", "agents", "estimators", "docs", "configs", "examples")
ENDINGS = (".py", ".md", ".yaml", ".jinja")
OTHERS = {
    "tokenv.rate_targets",
    "tokenv.codecs",
    "tokenv.densities",
    "tokenv.commands",
    "tokenv.callbacks",
    "tokenv.testing.check_",
}  # groups of entry points; "check_…"
DOTTED = re.compile(r"(?<![\w/.-])tokenv(?:\.[A-Za-z]\w*)+(?![\w-])")


def dotted_names(text: str) -> set[str]:
    return set(DOTTED.findall(text)) - OTHERS


def exists(name: str) -> bool:
    """Return whether a name can be imported; a module which needs a package that is not installed exists."""
    owner: Any = import_module("tokenv")
    for part in name.split(".")[1:]:
        try:
            owner = (
                import_module(f"{owner.__name__}.{part}")
                if inspect.ismodule(owner)
                else getattr(owner, part)
            )
        except (ImportError, AttributeError) as error:
            missing = error.name or ""
            if isinstance(error, ImportError) and not missing.startswith("tokenv"):
                return True
            if part in getattr(owner, "__annotations__", {}):
                return True
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
    return True


def places() -> dict[str, list[str]]:
    """Return the files in which each dotted name stands."""
    # a changelog is history
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml", "pyproject.toml")
    files = [ROOT / name for name in names]
    for folder in FOLDERS:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in ENDINGS]
    files_by_name: dict[str, list[str]] = {}
    for file in files:
        for name in dotted_names(file.read_text(encoding="utf-8")):
            files_by_name.setdefault(name, []).append(str(file.relative_to(ROOT)))
    return files_by_name


@pytest.mark.filterwarnings("default")  # of packages which are imported for it
def test_every_dotted_name_exists() -> None:
    files_by_name = places()
    assert len(files_by_name) > 100
    assert {name: files for name, files in files_by_name.items() if not exists(name)} == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokenv.load", True),
        ("tokenv.core.keys", True),
        ("tokenv.agents.learned.Learned", True),
        ("tokenv.config.schema.Config.seed", True),
        ("tokenv.config.schema.Config.data", True),
        ("tokenv.compare.plan", False),
        ("tokenv.nowhere.keys", False),
        ("tokenv.core.errors.UserErorr", False),
        ("tokenv.config.schema.Config.sed", False),
    ],
)
def test_only_existing_names_exist(name: str, expected: bool) -> None:
    assert exists(name) is expected


def test_where_a_name_ends() -> None:
    text = "See `tokenv.load`. With tokenv.core.errors:UserError, https://x.org/tokenv.html, my-tokenv.a, tokenv.a-b"
    assert dotted_names(text) == {"tokenv.load", "tokenv.core.errors"}
