"""What the options of several commands share, and how words of the command line become options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE
from tokenv.config.schema import Config, check_seed
from tokenv.errors import MissingFileError, UserError
from tokenv.storage import checkpoints, folders


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that looks at a run.

    Args:
        run: run folder, such as ``runs/7``.
        checkpoint: ``best`` by validation bits per byte, or ``latest``.
        seed: of drawn boundaries and symbols.
    """

    run: str = ""
    checkpoint: str = "best"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("run is missing: expected a run folder, such as run=runs/1")
        check_seed(self.seed)
        if self.checkpoint not in ("best", "latest"):
            raise UserError(f"checkpoint = {self.checkpoint!r}: expected best or latest")


@dataclass(frozen=True)
class TextOptions(RunOptions):
    """Options of commands that read a text.

    Args:
        text: the text itself,
        file: or the file that holds it (UTF-8 or any bytes).
    """

    text: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.file is None):
            raise UserError('expected one of text="..." and file=PATH')
        if self.file is not None and not Path(self.file).is_file():
            raise MissingFileError(f"file = {self.file!r}: there is no such file")

    def read(self) -> bytes:
        """The text's bytes."""
        return Path(self.file).read_bytes() if self.file is not None else encode(self.text or "")


def resolve_options(kind: type, names: list[str], updates: dict[str, Any]) -> Any:
    """Options, of this dataclass, of a command that reads no configuration.

    Raises:
        UserError: a word without ``=``, an unknown key, or a wrong value.
    """
    if names:
        raise UserError(f"{names[0]!r} is no option: expected key=value, such as run=runs/1")
    check_keys(updates, COMMAND_LINE, kind)
    # Sacred reads text=42 as a number; what should be text stays what was typed.
    texts = {name for name, hint in get_type_hints(kind).items() if hint in (str, str | None)}
    typed = {key: _text(value) if key in texts else value for key, value in updates.items()}
    options: Any = make(kind, typed)
    folders.find(options.run, options.checkpoint)  # before anything is stored
    return options


def _text(value: Any) -> Any:
    """What was typed, of a value that was read as a number or a switch; null stays null."""
    return str(value).lower() if isinstance(value, bool) else value if value is None else str(value)


def encode(text: str) -> bytes:
    """A text's bytes; those that were typed but are no UTF-8 stay as they are."""
    return text.encode(errors="surrogateescape")


def take_own(kind: type, updates: dict[str, Any]) -> dict[str, Any]:
    """Take a command's own keys out of the updates, which leaves those of the run's configuration."""
    own = [item.name for item in fields(kind) if item.name != "config" and item.name in updates]
    return {name: updates.pop(name) for name in own}


def stored_config(key: str, run: str, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of the run that a key names, and the configuration in it.

    Raises:
        DamagedError: a file of the checkpoint is damaged; the message names the newest sound one.
        UserError: other configurations are named, too, or the run names code that the user has not named.
        MissingFileError: there is no such run, or it has no checkpoint.
    """
    if names:
        raise UserError(f"{key}={run} brings its own configuration: drop {', '.join(names)}")
    path = checkpoints.find(run)
    checkpoints.verify(path)
    return path, checkpoints.load_state(path)["config"]


def check_text(config: Config) -> None:
    """Refuse what only text can be asked for.

    Raises:
        UserError: the run is of series.
    """
    if config.data.kind != "text":
        raise UserError(f"data.kind = {config.data.kind!r}: expected text, this command knows nothing else")
