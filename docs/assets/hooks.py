"""Hooks of mkdocs: pages from outside of docs/, GitHub's Markdown, equations, a notebook, the package.

Pages are written for GitHub; these hooks convert what mkdocs reads differently while the site is built.
"""

import atexit
import json
import posixpath
import re
import shutil
import tempfile
from html import escape, unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {"README.md": "index.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
}
NOTEBOOK = "tutorial"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TREE = Path(tempfile.mkdtemp(prefix="tokenv-site-"))  # the package as it is installed
atexit.register(shutil.rmtree, TREE, ignore_errors=True)


@event_priority(100)  # before mkdocstrings reads where to look
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copy the package to a tree as it is installed, agents and estimators inside tokenv; the reference reads that."""
    for source, target in (("tokenv", ""), ("agents", "agents"), ("estimators", "estimators")):
        shutil.copytree(ROOT / source, TREE / "tokenv" / target, dirs_exist_ok=True)
    for path in TREE.rglob("*.py"):  # examples in docstrings follow "::", as in reStructuredText
        text = re.sub(r"^( *)::$", r"\1", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        path.write_text(re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE), encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(TREE)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages which are not in docs/."""
    for source, target in OUTSIDE.items():
        files.append(
            File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    notebook = json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=from_notebook(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Convert GitHub's Markdown to Python's."""
    here = page.file.src_uri
    source = next((source for source, target in OUTSIDE.items() if target == here), f"docs/{here}")

    def relative_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    markdown = LINK.sub(relative_link, markdown)
    markdown = re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)  # ```sh quick
    markdown = re.sub(
        r"^```math\n(.*?)^```$", r"$$\n\1$$", markdown, flags=re.MULTILINE | re.DOTALL
    )
    return spaced(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Convert equations to MathML, which browsers draw themselves."""

    def to_mathml(match: re.Match[str]) -> str:
        # the converter's name for it
        latex = unescape(match[2]).strip().replace("{aligned}", "{align*}")
        latex = latex.replace(r"\log ", r"\log\, ")  # it leaves no space after a function
        return convert(latex, display="block" if match[1] == "div" else "inline")

    return MATHS.sub(to_mathml, html)


def spaced(markdown: str) -> str:
    """Insert blank lines before and after lists, tables and fences, which GitHub does not need."""
    lines: list[str] = []
    before, fenced = "blank", False
    for line in markdown.split("\n"):
        text = line.lstrip()
        kind = _kind(text, before)
        if fenced:
            kind, fenced = "fence", not text.startswith("```")
        else:
            fenced = kind == "fence"
            changes = {before, kind} & {"list", "table", "fence"} and before != kind
            if (changes or before == kind == "fence") and "blank" not in (before, kind):
                lines.append("")
        lines.append(line)
        before = kind
    return "\n".join(lines)


def _kind(text: str, before: str) -> str:
    """Return the kind of a line outside of fences, given the kind of the line before it."""
    if not text:
        return "blank"
    if text.startswith("```"):
        return "fence"
    if re.match(r"([-*]|\d+\.) ", text):
        return "list"
    if text.startswith("|"):
        return "table"
    return "list" if before == "list" else "text"  # an item continues


def from_notebook(notebook: dict[str, Any]) -> str:
    """Return a notebook's cells and their outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in data:
                shown = "".join(data["text/html"]).replace("\n", "&#10;")
                parts.append(f'<div class="output">{shown}</div>')
            else:
                parts.append(f'<pre class="output">{escape("".join(data["text/plain"]))}</pre>')
    return "\n\n".join(parts) + f"\n\n[This page as a notebook]({NOTEBOOK}.ipynb)\n"
