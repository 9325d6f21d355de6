"""Callbacks: what a run does before and after its training."""

from typing import Any

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


def build_callbacks(config: Any, codec: Any) -> list[Callback]:
    """Build the callbacks of a run, and check that it can have them; see ``Callback.check`` for the arguments.

    Raises:
        UserError: one is unknown, rejects an option, or does not fit the run.
    """
    callbacks = []
    for section in config.callbacks:
        callback: Callback = build("callbacks", section, CALLBACKS)
        callback.check(config, codec)
        callbacks.append(callback)
    return callbacks
