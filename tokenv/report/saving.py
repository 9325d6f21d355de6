"""Pictures that are complete or not there at all."""

import os
from pathlib import Path

from matplotlib.figure import Figure


def save_png(figure: Figure, path: Path) -> Path:
    """Write a picture in an existing folder; one that is there is replaced in one step.

    Raises:
        OSError: If the file cannot be written.
    """
    # pid: two processes that draw the same picture must not share the unfinished file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(unfinished, format="png")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
