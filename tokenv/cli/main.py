"""The ``tokenv`` command: ``tokenv COMMAND [with NAME key=value ...] [Sacred's flags]``."""

import signal
import sys
from importlib import import_module
from typing import Any

from tokenv.config.files import named_configs
from tokenv.errors import UserError, nearest

USAGE = """\
tokenv: learn token boundaries end to end with reinforcement learning

  tokenv train    with quick seed=3          train; a configuration by name or path, then key=value overrides
  tokenv train    with resume=runs/7         go on where run 7 stopped
  tokenv segment  with run=runs/7 text="…"   draw token boundaries in a text (or file=…), in colour
  tokenv evaluate with run=runs/7            bits per byte on held-out text (tasks=piqa,lambada: of answers, too)
  tokenv generate with run=runs/7 text="…"   continue a text
  tokenv forecast with run=runs/8 csv=my.csv continue a series, with intervals; without csv score test windows
  tokenv compare  with compare-quick jobs=2  methods × seeds at one budget, and one report of all
  tokenv variance with quick                 bias, variance and cost of gradient estimators along one run
  tokenv bench    with bench-d256             speed, memory and the cost of learning boundaries
  tokenv configs                             the configurations that come with tokenv
  tokenv train print_config with quick       all keys of a run and their values

trust=mytrick:mine lets a run that is read name code of your own; SECURITY.md says more.
Flags are Sacred's: -F DIR (where runs are stored, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""
# Each is a file beside this one, imported when it is named.
COMMANDS = ("train", "segment", "evaluate", "generate", "forecast", "compare", "variance", "bench", "configs")
# Shown as one message; anything else is ours, and keeps its traceback.
SHOWN = (UserError, ValueError, FileNotFoundError, ImportError)


def run_command(name: str, arguments: list[str]) -> Any:
    """Run a command.

    Args:
        name: such as ``train``.
        arguments: what follows on the command line, in Sacred's grammar.

    Returns:
        What the command found.

    Raises:
        UserError: unknown command, key or value.
    """
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {nearest(name, list(COMMANDS))}")
    return import_module(f"tokenv.cli.{name}").run(arguments)


def main() -> None:
    """Run the command that was typed; user errors end with one message and exit status 2."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return
    if arguments[0] == "configs":  # without torch, which takes seconds
        print("\n".join(f"{name:16} {path}" for name, path in named_configs().items()))
        return
    try:
        run_command(arguments[0], arguments[1:])
    except SHOWN as error:
        print(f"tokenv: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would end the process by the signal, not by a status
        print(f"tokenv: {str(stop) or 'stopped'}", file=sys.stderr)
        raise SystemExit(130) from None
