"""The ``tokenv`` command: ``tokenv COMMAND [with NAME key=value ...] [Sacred's flags]``."""

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokenv.core.errors import REPORT, RunFailedError, UserError, suggest
from tokenv.plotting.characters import escape_line

USAGE = """\
tokenv: learn token boundaries end to end with reinforcement learning

  tokenv train    with quick seed=3          train; a configuration by name or path, then key=value overrides
  tokenv train    with resume=runs/7         go on where run 7 stopped
  tokenv segment  with run=runs/7 text="…"   draw token boundaries in a text (or file=…), in colour
  tokenv serve    with run=runs/7            a page on this machine: boundaries and bits as you type
  tokenv evaluate with run=runs/7            bits per byte on held-out text (tasks=piqa,lambada: of answers, too)
  tokenv generate with run=runs/7 text="…"   continue a text
  tokenv forecast with run=runs/8 csv=my.csv continue a series, with intervals; without csv score test windows
  tokenv compare  with compare-quick jobs=2  methods × seeds at one budget, and one report of all
  tokenv variance with quick                 bias, variance and cost of gradient estimators along one run
  tokenv bench    with bench-d256             speed, memory and the cost of learning boundaries
  tokenv lm-eval  --model tokenv --model_args run=runs/7 --tasks piqa    the lm-evaluation-harness's own command
  tokenv list     agents                     agents, estimators, rate_targets, codecs, configs or datasets, a line each
  tokenv configs                             the configurations that come with tokenv, and where they lie
  tokenv train --help                        all keys: meaning, default, range; the same of every command
  tokenv train print_config with quick       all keys of a run and their values
  tokenv completion bash                     how a shell learns to complete all this (bash, zsh, fish)
  tokenv --version

trust_code=mytrick:mine lets a run that is read name code of your own; SECURITY.md says more.
Flags are Sacred's: -F DIR (where runs are stored, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""
# Each is a file beside this one, imported when it is named.
COMMANDS = (
    *("train", "segment", "serve", "evaluate", "generate", "forecast", "compare", "variance", "bench"),
    *("lm-eval", "list", "configs", "completion"),
)
HELP_OF_ITS_OWN = "lm-eval"
ALONE = [name for name in COMMANDS if name != "train"]  # what torchrun cannot share out
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a write that fails names no file
ALLOCATION = "can't allocate memory"  # torch's, on a CPU


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
        raise UserError(f"unknown command {name!r}: {suggest(name, list(COMMANDS))}")
    if name != HELP_OF_ITS_OWN and (arguments[:1] == ["help"] or {"-h", "--help"} & set(arguments)):
        return import_module("tokenv.cli.help").show(name)
    if name in ALONE and os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        if os.environ["RANK"] != "0":
            raise SystemExit(0)
        raise UserError(f"tokenv {name} works in one process, and torchrun started several: start it without torchrun")
    return import_module(command_module(name)).run(arguments)


def command_module(command: str) -> str:
    """The module of a command, such as ``tokenv.cli.train``."""
    return f"tokenv.cli.{command.replace('-', '_')}"


def error_message(error: BaseException) -> str | None:
    """What a user is told of an error that is not ours: of a value, a file, the disk or the memory; None of all others.

    Control characters are made visible, and the whole stands on one line.
    """
    text = None
    if isinstance(error, UserError | RunFailedError):
        text = str(error)
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in DISK):
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        text = f"{place}{error.strerror}: expected a file or folder that can be read, or written, with room on the disk"
    elif isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or ALLOCATION in str(error):
        text = f"not enough memory: make the model or train.batch_size smaller ({error})"
    return None if text is None else escape_line(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that was typed.

    What is not ours ends with one message: exit status 2 where the command line, a file or the machine is at fault, 1
    where work came to nothing. Anything else keeps its traceback, and ends with the wish for a report.

    Args:
        arguments: what follows ``tokenv``; None for this process's own.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks: tokenv completion says how it comes to do so
        import_module("tokenv.cli.completion").answer()
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(USAGE)
        elif arguments[0] in ("-V", "--version", "version"):
            print(f"tokenv {import_module('tokenv').__version__}")
        else:
            run_command(arguments[0], arguments[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has had enough
        import_module("tokenv.plotting.console").discard_output()  # loads rich
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would end the process by the signal, not by a status
        print(f"tokenv: {escape_line(str(stop)) or 'stopped'}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = error_message(error)
        if message is None:
            error.add_note(REPORT)
            raise
        print(f"tokenv: {message}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunFailedError) else 2) from None
