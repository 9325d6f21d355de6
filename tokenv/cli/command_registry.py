"""Commands which have options, of this package and of others, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenv.core.plugins import Registry, find

if TYPE_CHECKING:
    from tokenv.config.commands import Command

COMMANDS = Registry(
    "tokenv.commands",
    {
        "train": "tokenv.cli.train_command:Train",
        "segment": "tokenv.cli.inference:Segment",
        "serve": "tokenv.cli.inference:Serve",
        "evaluate": "tokenv.cli.evaluate:Evaluate",
        "generate": "tokenv.cli.inference:Generate",
        "compare": "tokenv.cli.compare:Compare",
        "variance": "tokenv.cli.lab:Variance",
        "bench": "tokenv.cli.lab:Bench",
    },
    base="tokenv.config.commands:Command",
)


def load_command(name: str) -> type[Command]:
    """Import one command which has options; the modules of the others are not loaded.

    Raises:
        UserError: there is no such command, or it cannot be imported; the message names its package.
    """
    return find("command", name, COMMANDS, key="command")  # type: ignore[return-value]
