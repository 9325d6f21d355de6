"""Files that are complete or not there at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under another name and rename it, so that a kill at any moment leaves the old one.

    Args:
        path: in an existing folder; a file that is there is replaced.
        content: text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    # pid: two processes that write the same file must not share the unfinished one.
    scratch = path.with_name(f".partial-{path.name}-{os.getpid()}")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
