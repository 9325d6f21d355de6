"""All commands: usage, a summary each, and the module of each one which is a Sacred experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenv.core.errors import UserError, suggest

if TYPE_CHECKING:
    from tokenv.cli.sacred import Command

USAGE = """\
tokenv: learn token boundaries end to end with reinforcement learning

  tokenv train    with quick seed=3          train; a configuration by name or path, then key=value overrides
  tokenv train    with resume=runs/7         resume run 7 where it stopped
  tokenv segment  with run=runs/7 text="…"   draw token boundaries in a text (or file=…), in colour
  tokenv serve    with run=runs/7            a page on this machine: boundaries and bits as you type
  tokenv evaluate with run=runs/7            bits per byte on held-out text (tasks=piqa,lambada: of answers, too)
  tokenv generate with run=runs/7 text="…"   continue a text
  tokenv forecast with run=runs/8 csv=my.csv continue a series, with intervals; without csv score test windows
  tokenv compare  with compare-quick jobs=2  methods × seeds at one budget, and one report of all
  tokenv variance with quick                 bias, variance and cost of gradient estimators along one run
  tokenv bench    with bench-d256            speed, memory and the cost of learning boundaries
  tokenv lm-eval  --model tokenv --model_args run=runs/7 --tasks piqa    the lm-evaluation-harness's own command
  tokenv list     agents                     agents, estimators, rate_targets, codecs, configs or datasets, a line each
  tokenv configs                             the configurations that come with tokenv, and their files
  tokenv train --help                        all keys: meaning, default, range; the same of every command
  tokenv train print_config with quick       all keys of a run and their values
  tokenv completion bash                     code by which a shell completes all this (bash, zsh, fish)
  tokenv --version

trust_code=mytrick:mine allows a stored run to import code of your own; SECURITY.md says more.
Flags are Sacred's: -F DIR (folder of stored runs, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""
COMMANDS = {
    "train": "train a model, store it, and show its metrics and boundaries.",
    "segment": "draw token boundaries in a text, in colour.",
    "serve": "serve a page on this machine which draws boundaries in a text as it is typed, by one run or several.",
    "evaluate": "measure bits per byte, boundary rate and answers to tasks on held-out text.",
    "generate": "continue a text.",
    "forecast": "continue a series with intervals, or score forecasts of test windows.",
    "compare": "train and evaluate methods × seeds at one budget, and write one report of all.",
    "variance": "measure bias, variance and cost of gradient estimators along one run.",
    "bench": "measure speed, memory and the cost of learning boundaries.",
    "lm-eval": "run the lm-evaluation-harness's own command, with the model tokenv registered.",
    "list": "list agents, estimators, rate_targets, codecs, configs or datasets, a line each.",
    "configs": "list the configurations that come with tokenv, and their files.",
    "completion": "print the code by which a shell (bash, zsh or fish) completes commands, keys and names.",
}
EXPERIMENTS = list(COMMANDS)[:9]


def load_experiment(name: str) -> Command:
    """Import one command which is a Sacred experiment; the modules of the others are not loaded.

    Raises:
        UserError: there is no such command.
    """
    match name:
        case "train":
            from tokenv.cli import train

            return train.COMMAND
        case "segment":
            from tokenv.cli import segment

            return segment.COMMAND
        case "serve":
            from tokenv.cli import serve

            return serve.COMMAND
        case "evaluate":
            from tokenv.cli import evaluate

            return evaluate.COMMAND
        case "generate":
            from tokenv.cli import generate

            return generate.COMMAND
        case "forecast":
            from tokenv.cli import forecast

            return forecast.COMMAND
        case "compare":
            from tokenv.cli import compare

            return compare.COMMAND
        case "variance":
            from tokenv.cli import variance

            return variance.COMMAND
        case "bench":
            from tokenv.cli import bench

            return bench.COMMAND
    raise UserError(f"no experiment {name!r}: {suggest(name, EXPERIMENTS)}")
