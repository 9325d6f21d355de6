"""Files that are complete or not there at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under another name and rename it, so that a kill at any moment leaves the old one."""
    scratch = path.with_name(f".partial-{path.name}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
