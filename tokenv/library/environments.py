"""Environments of gymnasium with the model of a trained run: ``tokenv/Bytes-v0`` and ``tokenv/Series-v0``.

::

    env = gymnasium.make("tokenv.env:tokenv/Bytes-v0", run="runs/7", seq_len=128)
    envs = gymnasium.make_vec("tokenv.env:tokenv/Bytes-v0", num_envs=16, run="runs/7")

Without ``run=`` they are those of ``tokenv.env.gym``. A pickle and ``env.spec.to_json()`` hold the name of the run and
no weights: the process which reads them loads the run again.
"""

from pathlib import Path
from typing import Any

from tokenv.core.errors import UserError
from tokenv.data.corpus import CorpusFactory
from tokenv.env import BYTES_ID, SERIES_ID
from tokenv.env.arrays import PicklableEnv
from tokenv.env.gym import BytesEnv, BytesVectorEnv, source_or
from tokenv.library.model import load

IDS = {"text": BYTES_ID, "series": SERIES_ID}


class TrainedModelEnv(PicklableEnv):
    """Mixin which takes an environment's model, and by default its data, from a run.

    Args:
        run: name of a model for ``tokenv.load``: a run folder such as ``runs/7``, or one on the Hugging Face Hub.
        checkpoint: see ``tokenv.load``.
        device: see ``tokenv.load``.
        trust_code: code of your own that the run may name; see ``tokenv.load``.
        **options: options of the environment. With a run, ``source`` is by default its training data, in sequences of
            ``seq_len`` symbols; None for the run's ``data.seq_len``.

    Raises:
        UserError: see ``tokenv.load``; or if ``lm`` is given with a run, or the run has another kind of data.
    """

    default_source: CorpusFactory

    def __init__(
        self,
        *,
        run: str | Path | None = None,
        checkpoint: str = "best",
        device: str | None = None,
        trust_code: bool | str | list[str] = False,
        **options: Any,
    ) -> None:
        opening = {"run": run, "checkpoint": checkpoint, "device": device, "trust_code": trust_code}
        settings = options if run is None else self._load_options(options, **opening)
        super().__init__(**settings)
        PicklableEnv.__init__(self, **opening, **options)

    def _load_options(self, options: dict[str, Any], run: Any, **loading: Any) -> dict[str, Any]:
        if options.get("lm") is not None:
            raise UserError(f"run = {str(run)!r} beside a model lm: expected one of them")
        model = load(run, **loading)
        config = model.config.data
        kind = self.default_source.config.kind
        if config.kind != kind:
            raise UserError(
                f"{run} is a model of {config.kind}: expected one of {kind}; {IDS[config.kind]} takes it"
            )
        options = {**options, "lm": model.lm}
        source = source_or(
            options.get("source"),
            CorpusFactory(config),
            options.pop("seq_len", None),
        )
        return options | {"source": source}


class TrainedModelBytesEnv(TrainedModelEnv, BytesEnv):
    """``tokenv/Bytes-v0``, one sequence at a time."""


class TrainedModelBytesVectorEnv(TrainedModelEnv, BytesVectorEnv):
    """``tokenv/Bytes-v0``, many sequences in every pass."""
