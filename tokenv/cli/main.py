"""The ``tokenv`` command: ``tokenv COMMAND [with NAME key=value ...] [Sacred's flags]``."""

import sys

from tokenv.config.files import named_configs

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

Flags are Sacred's: -F DIR (where runs are stored, default runs), -u (store nothing), -m DB (MongoDB), -l LEVEL, ...
"""


def main() -> None:
    """Run one command; user errors end with one message and exit status 2."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return
    if arguments[0] == "configs":  # without torch, which takes seconds
        print("\n".join(f"{name:16} {path}" for name, path in named_configs().items()))
        return
    try:
        from tokenv.cli.experiment import run_command

        run_command(arguments[0], arguments[1:])
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"tokenv: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt as stop:
        print(f"tokenv: {stop or 'stopped'}", file=sys.stderr)
        raise SystemExit(130) from None
