"""``tokenv lm-eval``: run the lm-evaluation-harness's own command, which then knows the model ``tokenv``."""

from __future__ import annotations

import sys

from tokenv.core.errors import MissingFileError


def run(arguments: list[str]) -> None:
    """Run ``lm-eval`` with these arguments: see ``tokenv.library.lm_eval_model``.

    Raises:
        MissingFileError: the package is not installed.
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        import tokenv.library.lm_eval_model  # noqa: F401  registers the model
    except ImportError:
        raise MissingFileError("tokenv lm-eval needs the package lm-eval: pip install tokenv[lm-eval]") from None
    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
