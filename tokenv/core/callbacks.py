"""Callbacks: what a run does before and after its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenv.core.errors import UserError
from tokenv.core.plugins import Registry, build


class Callback:
    """Something to do before or after the training of a run, to be subclassed.

    The key ``callbacks`` lists the callbacks of a run, each with its ``name`` and options, which are the arguments of
    its constructor. A callback has no state which a checkpoint would hold. Every process of a run calls it.
    """

    def check(self, config: Any, codec: Any) -> None:
        """Check that a run can have this callback, before anything is loaded.

        Args:
            config: configuration of the run, a ``tokenv.config.schema.Config``.
            codec: codec of its model.

        Raises:
            UserError: it cannot.
        """

    def on_train_begin(self, trainer: Any) -> None:
        """Act before the first update of a ``tokenv.training.trainer.Trainer``, or of what a resumed run has left."""

    def on_train_end(self, trainer: Any) -> None:
        """Act after the last update, before the last validation and the last checkpoint."""


CALLBACKS = Registry("tokenv.callbacks", {}, base="tokenv.core.callbacks:Callback")


def build_callbacks(sections: Sequence[Mapping[str, Any]]) -> list[Callback]:
    """Build the callbacks of a run.

    Raises:
        UserError: one has no name, is unknown, or rejects an option.
    """
    callbacks = []
    for section in sections:
        if "name" not in section:
            raise UserError(f"callbacks = {list(sections)}: expected a name in each, such as [{{'name': 'shrink'}}]")
        callbacks.append(build("callbacks", section, CALLBACKS))
    return callbacks
