"""Run a notebook's cells without Jupyter, and store their outputs: ``python tests/support/notebook.py``."""

import ast
import io
import json
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


def read(path: Path = NOTEBOOK) -> dict[str, Any]:
    """Return the notebook's JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook: dict[str, Any]) -> None:
    """Run all cells in the current folder, and store their printed text and last values in the notebook."""
    space: dict[str, Any] = {"__name__": "notebook"}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, start=1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs(ast.parse("".join(cell["source"])), number, space)


def _outputs(tree: ast.Module, number: int, space: dict[str, Any]) -> list[dict[str, Any]]:
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {
                "output_type": "stream",
                "name": "stdout",
                "text": printed.getvalue().splitlines(keepends=True),
            }
        )
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": data,
            }
        )
    # without folders of this machine
    return json.loads(json.dumps(outputs).replace(f"{Path.cwd()}/", ""))


if __name__ == "__main__":
    sys.path.insert(0, str(NOTEBOOK.parents[1]))
    notebook = read()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        run(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
