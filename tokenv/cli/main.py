"""The ``tokenv`` command: ``tokenv COMMAND [with NAME key=value ...] [Sacred's flags]``."""

import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tokenv.cli.command_registry import COMMANDS, load_command
from tokenv.cli.usage import FUNCTIONS, overview, summaries
from tokenv.core.errors import REPORT, RunFailedError, UserError, suggest
from tokenv.plotting.characters import escape_line

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a failed write names no file
ALLOCATION_MESSAGE = "can't allocate memory"  # torch's, on a CPU


def run_command(name: str, arguments: list[str]) -> Any:
    """Run a command.

    Args:
        name: command, such as ``train``.
        arguments: words after the command, in Sacred's grammar.

    Returns:
        Result of the command.

    Raises:
        UserError: unknown command, key or value.
    """
    # not above: its imports take time, which --help has no use for
    from tokenv.core.processes import collect_garbage_from_now_on

    if name == "job":
        from tokenv.cli.run_job import run_job

        collect_garbage_from_now_on()
        (path,) = arguments
        return run_job(Path(path), run_command, error_message)
    names = [*COMMANDS.names(), *FUNCTIONS]
    if name not in names:
        raise UserError(f"unknown command {name!r}: {suggest(name, names)}")
    if name != "lm-eval" and (arguments[:1] == ["help"] or {"-h", "--help"} & set(arguments)):
        from tokenv.cli.help import print_help

        return print_help(name, summaries()[name])
    if name != "train" and os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        if os.environ["RANK"] != "0":
            raise SystemExit(0)
        raise UserError(
            f"tokenv {name} works in one process, and torchrun started several: start it without torchrun"
        )
    if name in FUNCTIONS:
        function = resolve_name(FUNCTIONS[name])
        collect_garbage_from_now_on()
        return function(arguments)
    from tokenv.cli.sacred import run  # heavy

    return load_command(name).launch(lambda kind: run(name, kind, arguments))


def error_message(error: BaseException) -> str | None:
    """Return the message for an error which has another cause than a defect of tokenv; None for all other errors.

    Such causes are a wrong value, a file, the disk or the memory. The message is one line, and control characters in
    it are escaped.
    """
    text = None
    if isinstance(error, UserError | RunFailedError):
        text = str(error)
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_ERRORS):
        text = f"{error.strerror}: expected a file or folder that can be read, or written, with room on the disk"
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
    elif (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or ALLOCATION_MESSAGE in str(error)
    ):
        text = f"not enough memory: make the model or train.batch_size smaller ({error})"
    if text is None:
        return None
    return escape_line(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    An error of the command line, a file or the machine ends with one message and exit status 2, failed work with one
    message and status 1. Any other error keeps its traceback and ends with a request for a report.

    Args:
        arguments: words after ``tokenv``; None for those of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        gc.disable()  # until the command has imported what it needs
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's code, which tokenv completion prints
        from tokenv.cli.help import answer_shell

        answer_shell([*COMMANDS.names(), *FUNCTIONS])
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(overview())
        elif arguments[0] in ("-V", "--version", "version"):
            import tokenv

            print(f"tokenv {tokenv.__version__}")
        else:
            name, *words = arguments
            run_command(name, words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output has ended
        from tokenv.plotting.console import discard_output  # loads rich

        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt as stop:
        # a second one would end the process by the signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"tokenv: {escape_line(str(stop)) or 'stopped'}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = error_message(error)
        if message is None:
            error.add_note(REPORT)
            raise
        print(f"tokenv: {message}", file=sys.stderr)
        status = 1 if isinstance(error, RunFailedError) else 2
        raise SystemExit(status) from None
    finally:
        gc.enable()
