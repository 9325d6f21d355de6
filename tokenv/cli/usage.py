"""The overview of all commands, and those among them which take words in place of options."""

import sys

from tokenv.cli.command_registry import COMMANDS
from tokenv.config.field_docs import describe, sentence
from tokenv.core.errors import MissingFileError

FUNCTIONS = {  # commands which take words, and leave no record
    "lm-eval": "tokenv.cli.usage:run_lm_eval",
    "check": "tokenv.cli.check:check",
    "list": "tokenv.cli.help:list_names",
    "completion": "tokenv.cli.help:print_completion",
}
EXAMPLES = """\
  tokenv train with resume=runs/7         resume run 7 where it stopped
  tokenv train --help                     list all keys: meaning, default, range; the same for every command
  tokenv train print_config with quick    print all keys of a run and their values
  tokenv --version

trust_code=mytrick:mine allows a stored run to import code of your own; SECURITY.md says more.
Flags are Sacred's: -F DIR (folder of stored runs, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""


def summaries() -> dict[str, str]:
    """Return what each command does, by its name; none is imported for it."""
    described = dict(describe(COMMANDS))
    ordered = {name: described[name] for name in (*COMMANDS, *described)}
    return ordered | {name: sentence(target) for name, target in FUNCTIONS.items()}


def overview() -> str:
    """Return the text of ``tokenv --help``."""
    lines = "\n".join(f"  tokenv {name:10} {text}" for name, text in summaries().items())
    return f"tokenv: learn token boundaries end to end with reinforcement learning\n\n{lines}\n\n{EXAMPLES}"


def run_lm_eval(arguments: list[str]) -> None:
    """Run the lm-evaluation-harness's command: ``--model tokenv --model_args run=runs/7 --tasks piqa``.

    Raises:
        MissingFileError: the package is not installed.
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        import tokenv.library.lm_eval_model  # noqa: F401  registers the model
    except ImportError:
        raise MissingFileError(
            "tokenv lm-eval needs the package lm-eval: pip install tokenv[lm-eval]"
        ) from None
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
