"""All commands with an example and a summary each, those which are Sacred experiments, and lm-eval."""

from __future__ import annotations

import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tokenv.core.errors import MissingFileError, UserError, suggest

if TYPE_CHECKING:
    from tokenv.cli.sacred import Command

COMMANDS = {  # example of the arguments, and summary
    "train": ("with quick seed=3", "train a model; a configuration by name or path, then key=value overrides"),
    "segment": ('with run=runs/7 text="…"', "draw token boundaries in a text (or file=…), in colour"),
    "serve": ("with run=runs/7", "serve a page on this machine: boundaries and bits as you type"),
    "evaluate": ("with run=runs/7", "measure bits per byte on held-out text (tasks=piqa,lambada: and answers)"),
    "generate": ('with run=runs/7 text="…"', "continue a text"),
    "forecast": ("with run=runs/8 csv=my.csv", "continue a series, with intervals; without csv score test windows"),
    "compare": ("with compare-quick jobs=2", "run methods × seeds at one budget, and write one report of all"),
    "variance": ("with quick", "measure bias, variance and cost of gradient estimators along one run"),
    "bench": ("with bench-d256", "measure speed, memory and the cost of learning boundaries"),
    "lm-eval": ("--model tokenv --model_args run=runs/7 --tasks piqa", "run the lm-evaluation-harness's command"),
    "check": ("mytrick:mine gamma=1.0", "check an estimator, agent, rate target or codec of your own, or of ours"),
    "list": ("agents", "list agents, estimators, rate_targets, codecs, configs or datasets, a line each"),
    "configs": ("", "list the configurations that come with tokenv, and their files"),
    "completion": ("bash", "print the code by which a shell (bash, zsh, fish) completes all this"),
}
EXPERIMENTS = {  # where to find each command which is a Sacred experiment
    "train": "tokenv.cli.train:COMMAND",
    "segment": "tokenv.cli.inference:SEGMENT",
    "serve": "tokenv.cli.inference:SERVE",
    "evaluate": "tokenv.cli.evaluate:COMMAND",
    "generate": "tokenv.cli.inference:GENERATE",
    "forecast": "tokenv.cli.forecast:COMMAND",
    "compare": "tokenv.cli.compare:COMMAND",
    "variance": "tokenv.cli.lab:VARIANCE",
    "bench": "tokenv.cli.lab:BENCH",
}
_LINES = "\n".join(f"  tokenv {f'{name:8} {example}':35} {summary}" for name, (example, summary) in COMMANDS.items())
USAGE = f"""\
tokenv: learn token boundaries end to end with reinforcement learning

{_LINES}

  tokenv train    with resume=runs/7         resume run 7 where it stopped
  tokenv train    --help                     list all keys: meaning, default, range; the same for every command
  tokenv train    print_config with quick    print all keys of a run and their values
  tokenv --version

trust_code=mytrick:mine allows a stored run to import code of your own; SECURITY.md says more.
Flags are Sacred's: -F DIR (folder of stored runs, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""


def load_experiment(name: str) -> Command:
    """Import one command which is a Sacred experiment; the modules of the others are not loaded.

    Raises:
        UserError: there is no such command.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}: {suggest(name, EXPERIMENTS)}")
    command: Command = resolve_name(EXPERIMENTS[name])
    return command


def run_lm_eval(arguments: list[str]) -> None:
    """Run ``lm-eval`` with these arguments: see ``tokenv.library.lm_eval_model``.

    Raises:
        MissingFileError: the package is not installed.
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        import tokenv.library.lm_eval_model  # noqa: F401  registers the model
    except ImportError:
        raise MissingFileError("tokenv lm-eval needs the package lm-eval: pip install tokenv[lm-eval]") from None
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
