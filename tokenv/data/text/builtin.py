"""Corpora that every Python installation brings along: its standard library and its documentation."""

from __future__ import annotations

import ast
import importlib
import sysconfig
import warnings
from pathlib import Path

from datasets import Dataset, Features, Value

FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


def documents_dataset(names: list[str], contents: list[bytes]) -> Dataset:
    """Make a data set of rows `name` and `content` (the bytes, as they are)."""
    return Dataset.from_dict(
        {"name": names, "content": contents},
        features=Features({"name": Value("string"), "content": Value("large_binary")}),
    )


def python_documents() -> Dataset:
    """Read every .py file of the running interpreter's standard library.

    Returns:
        Rows `name` (the path inside the library) and `content`, sorted by name.
    """
    files = _library_files()
    return documents_dataset(list(files), [path.read_bytes() for path in files.values()])


def prose_documents() -> Dataset:
    """Read the running interpreter's own documentation.

    Returns:
        Rows `name` and `content`: the language reference by topic as `help()` shows it, then one document
        a module of the standard library (its tests left out) that joins the docstrings of the module and
        of its classes and functions.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    texts = {f"topic {name}": text for name, text in sorted(topics.items())}
    for name, path in _library_files().items():
        if not TEST_FOLDERS.intersection(Path(name).parts):
            texts[f"docstrings of {name}"] = _docstrings(path)
    texts = {name: text for name, text in texts.items() if text}
    return documents_dataset(list(texts), [text.encode(errors="replace") for text in texts.values()])


def _library_files() -> dict[str, Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Foreign packages are left out while walking: they may hold many times the files of the library.
    tops = [path for path in root.iterdir() if path.name not in FOREIGN_FOLDERS]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))]
    names = {path.relative_to(root).as_posix(): path for path in files if path.suffix == ".py"}
    return {
        name: path
        for name, path in sorted(names.items())
        if path.is_file() and not FOREIGN_FOLDERS.intersection(Path(name).parts)
    }


def _docstrings(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library's own sources would be warned of is not ours
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library holds some broken files on purpose
            return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text)
