"""Files that commands write, checked before their work."""

from pathlib import Path

from tokenv.core.errors import UserError


def check_output(key: str, path: str | None, *endings: str) -> None:
    """Refuse a file that cannot be written, before hours of work.

    Args:
        key: that names it.
        path: as given; None for no file.
        endings: of the files that are written, where the path is the beginning of their names.

    Raises:
        UserError: it is a folder or a device, or the folder that it shall lie in is not there.
    """
    for ending in endings or ("",) if path is not None else ():
        target = Path(f"{path}{ending}")
        if not Path(str(path)).name or (target.exists() and not target.is_file()):
            raise UserError(f"{key} = {path!r}: expected the name of a file to write, such as {key}=found")
        if not target.parent.is_dir():
            raise UserError(f"{key} = {path!r}: there is no folder {target.parent}: make it, or name another file")
