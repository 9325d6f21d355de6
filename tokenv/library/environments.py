"""gymnasium's environments, played by the model of a trained run: what ``tokenv/Bytes-v0`` and ``Series-v0`` stand for.

::

    env = gymnasium.make("tokenv.env:tokenv/Bytes-v0", run="runs/7", seq_len=128)
    envs = gymnasium.make_vec("tokenv.env:tokenv/Bytes-v0", num_envs=16, run="runs/7")

Without ``run=`` they are those of ``tokenv.env.gym``. A pickle and ``env.spec.to_json()`` hold the run's name and no
weights: the process that reads them opens the run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenv.core.errors import UserError
from tokenv.data.corpus import CorpusFactory
from tokenv.env.arrays import PicklableEnv
from tokenv.env.gym import BytesEnv, BytesVectorEnv, SeriesEnv, SeriesVectorEnv, source_or
from tokenv.env.registration import BYTES_ID, SERIES_ID
from tokenv.library.model import load

IDS = {"text": BYTES_ID, "series": SERIES_ID}


class TrainedModelEnv(PicklableEnv):
    """Before an environment: takes its model, and unless told otherwise its text, from a run.

    Args:
        run: what ``tokenv.load`` takes: a run folder such as ``runs/7``, or a model on the Hugging Face Hub.
        checkpoint: of a run folder: ``best`` or ``latest``.
        device: where to put the model; None for where its run says.
        trust_code: code of your own that the run may name; see ``tokenv.load``.
        **options: of the environment. With a run, ``source`` is its training text where none is given, cut to
            ``seq_len`` symbols; None for the run's own ``data.seq_len``.

    Raises:
        UserError: what is not as ``tokenv.load`` needs it, ``lm`` beside a run, or a run of text for series or of
            series for text.
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
        super().__init__(**(options if run is None else self._opened(options, **opening)))
        PicklableEnv.__init__(self, **opening, **options)

    def _opened(self, options: dict[str, Any], run: Any, **how: Any) -> dict[str, Any]:
        if options.get("lm") is not None:
            raise UserError(f"run = {str(run)!r} beside a model lm: expected one of them")
        model = load(run, **how)
        config, kind = model.config.data, self.default_source.config.kind
        if config.kind != kind:
            raise UserError(f"{run} is a model of {config.kind}: expected one of {kind}; {IDS[config.kind]} takes it")
        options = {**options, "lm": model.lm}
        source = source_or(options.get("source"), CorpusFactory(config), options.pop("seq_len", None))
        return options | {"source": source}


class TrainedModelBytesEnv(TrainedModelEnv, BytesEnv):
    """``tokenv/Bytes-v0``, one sequence at a time."""


class TrainedModelBytesVectorEnv(TrainedModelEnv, BytesVectorEnv):
    """``tokenv/Bytes-v0``, many sequences in every pass."""


class TrainedModelSeriesEnv(TrainedModelEnv, SeriesEnv):
    """``tokenv/Series-v0``, one series at a time."""


class TrainedModelSeriesVectorEnv(TrainedModelEnv, SeriesVectorEnv):
    """``tokenv/Series-v0``, many series in every pass."""
