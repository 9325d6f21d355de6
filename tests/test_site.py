"""The site is built without a warning, links lead somewhere, and nothing is fetched. Needs the extra ``docs``."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

for module in ("mkdocs", "mkdocstrings", "material", "latex2mathml"):
    pytest.importorskip(module, reason="pip install -e '.[docs]'")

ROOT = Path(__file__).parents[1]
SOURCES = ("docs", "tokenv", "agents", "estimators")
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^>]*>"
)


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "assets" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_nothing_is_fetched(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert LOADED.findall(page.read_text()) == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style.name


def test_equations_are_drawn_by_the_browser(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "arithmatex" not in text, page.name
        for drawn in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert not re.search(r"[\\$]|&amp;|&#x00026;", drawn), (page.name, drawn)
    assert (site / "method.html").read_text().count(
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"'
    ) > 6


def test_pages_from_outside_of_docs_are_linked(site: Path) -> None:
    assert 'href="SECURITY.html"' in (site / "python.html").read_text()
    assert 'href="../CONTRIBUTING.html"' in (site / "howto" / "agent.html").read_text()
    assert 'href="tutorials/compare.html"' in (site / "index.html").read_text()


def test_a_broken_link_fails(tmp_path: Path) -> None:
    for name in SOURCES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("*.md")):
        shutil.copy(path, tmp_path)
    with (tmp_path / "docs" / "start.md").open("a") as page:
        page.write("\n[nowhere](nothing.md) and [no such heading](method.md#nothing)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "nothing.md" in done.stderr
    assert "#nothing" in done.stderr


@pytest.mark.parametrize(
    ("githubs", "pythons"),
    [
        ("text\n- one\n  more\n- two\n\nafter", "text\n\n- one\n  more\n- two\n\nafter"),
        ("text:\n| a |\n|---|\nafter", "text:\n\n| a |\n|---|\n\nafter"),
        (
            "text\n```sh\n- no list\n| no table\n```\nafter",
            "text\n\n```sh\n- no list\n| no table\n```\n\nafter",
        ),
        ("```\na\n```\n```\nb\n```", "```\na\n```\n\n```\nb\n```"),
        ("- one\n\n    | a |\n    |---|\n- two", "- one\n\n    | a |\n    |---|\n\n- two"),
        ("1. one\n2. two", "1. one\n2. two"),
        ("plain\ntext with 0.5. And\n-1 is no list", "plain\ntext with 0.5. And\n-1 is no list"),
    ],
)
def test_what_github_does_without(hooks: ModuleType, githubs: str, pythons: str) -> None:
    assert hooks.spaced(githubs) == pythons
    assert hooks.spaced(pythons) == pythons
