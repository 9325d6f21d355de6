"""``tokenv configs``: the configurations that come with tokenv."""

from tokenv.config.files import named_configs


def run(_arguments: list[str]) -> None:
    """Run the command: see ``tokenv.cli.main``."""
    print("\n".join(f"{stem:16} {path}" for stem, path in named_configs().items()))
