"""Answer the page's requests as plain values, from a cache of models; nothing here depends on the server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenv.config.schema import Config
from tokenv.core import run_folders
from tokenv.core.errors import MissingFileError, UserError
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.run_state import RunState
from tokenv.evaluation.text_report import colour_scale
from tokenv.library.model import Model
from tokenv.library.spans import Spans
from tokenv.plotting.characters import characters, escape
from tokenv.plotting.html import coloured, legend, render
from tokenv.plotting.theme import in_words

# bytes of a text which a small model segments on a CPU without a noticeable delay
MAX_BYTES = 10_000
CACHED_MODELS = 4  # models in memory, besides one of each run


class ModelCache:
    """Models of several runs; the default checkpoint of each is loaded at once, others when they are requested.

    Args:
        runs: run folders.
        which: default checkpoint: ``best`` or ``latest``.

    Attributes:
        folders: folder of each run, by displayed name.
        defaults: name of the default checkpoint of each run.
        configs: configuration of each run.

    Raises:
        UserError: if a run cannot be loaded: see ``tokenv.evaluation.loaded_run.load_run``.
    """

    def __init__(self, runs: Sequence[str], which: str) -> None:
        self._of_defaults: dict[Path, Model] = {}
        self._load = lru_cache(CACHED_MODELS)(
            lambda path: Model(load_run(str(path), fall_back=False))
        )
        self.defaults: dict[str, str] = {}
        self.configs: dict[str, Config] = {}
        self.folders = {escape(run): run for run in runs}
        for run, folder in self.folders.items():
            trained = load_run(folder, which)
            self.defaults[run] = trained.path.name
            self.configs[run] = trained.config
            self._of_defaults[trained.path] = Model(trained)

    def _checkpoints(self, run: str) -> list[dict[str, Any]]:
        """List the intact checkpoints of a run, oldest first; they change while training continues.

        Returns:
            Of each the ``name`` of its folder, the ``step``, and a ``description``: symbols of training and the loss.
        """
        checkpoints = []
        for path in run_folders.list_all(self.folders[run]):
            try:
                state = RunState.read(path)
            except (UserError, OSError):  # damaged, or deleted in the meantime
                continue
            terms = state.settings.data.options.words
            loss = state.loss
            description = f"{state.symbols:,} {terms.symbol}s of training"
            if loss is not None:
                description += f", {loss:.3f} {in_words(state.unit)} on held-out text"
            checkpoints.append({"name": path.name, "step": state.step, "description": description})
        return checkpoints

    def model(self, run: str, name: str | None = None) -> Model:
        """Return the model of a checkpoint, and keep it in memory.

        Args:
            run: displayed name of the run.
            name: name of the checkpoint; None for the default.

        Raises:
            MissingFileError: if the run has no checkpoint of this name.
            UserError: if the checkpoint is damaged.
        """
        if name is None:
            name = self.defaults[run]
        path = next(
            (path for path in run_folders.list_all(self.folders[run]) if path.name == name), None
        )
        if path is None:
            raise MissingFileError(
                f"{run} has no checkpoint {name!r} any more: reload the page to see which there are"
            )
        return self._of_defaults.get(path) or self._load(path)

    def as_list(self) -> list[dict[str, Any]]:
        """Return all runs with their checkpoints, for JSON."""
        return [
            {
                "run": run,
                "agent": self.configs[run].agent["name"],
                "rate": self.configs[run].rate,
                "default": default,
                "checkpoints": self._checkpoints(run),
            }
            for run, default in self.defaults.items()
        ]


@dataclass(frozen=True)
class SegmentRequest:
    """Request of the page for the tokens of a text.

    Args:
        text: text of at least one character.
        checkpoints: name of the checkpoint by run; the default one for other runs.
        rate: see ``Model.spans``.
        threshold: see ``tokenv.evaluation.evaluator.EvalOptions``.
    """

    text: str
    checkpoints: dict[str, str] = field(default_factory=dict)
    rate: float | None = None
    threshold: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise UserError("the text is empty: expected at least one character")
        length = len(self.text.encode(errors="replace"))
        if length > MAX_BYTES:
            raise UserError(
                f"the text has {length:,} bytes: expected at most {MAX_BYTES:,}; tokenv segment takes longer ones"
            )


def render_page(models: ModelCache, seed: int) -> str:
    """Return the page; it requests what it draws.

    Args:
        models: runs which the page offers.
        seed: seed of the sampled boundaries.
    """
    runs = [escape(run) for run in models.defaults]
    return render(
        "library/page.html.jinja",
        runs=runs,
        seed=seed,
        longest=MAX_BYTES,
        **legend((0.0, 1.0)),
    )


def segment_text(
    models: ModelCache,
    request: SegmentRequest,
    seed: int,
    *,
    check: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Segment a text with each run.

    Args:
        models: runs.
        request: text, and how to segment it.
        seed: seed of the sampled boundaries.
        check: function which is called before each run, and raises an error if the request has been cancelled.

    Returns:
        For JSON: ``runs``, each with ``run``, ``checkpoint`` and either ``spans`` (as ``tokenv segment json=`` has it),
        ``facts`` and ``html`` (the coloured text, escaped) or ``error``; and the ``labels`` of their colour scale.
    """
    spans: dict[str, Spans] = {}
    names = models.defaults | {
        run: name for run, name in request.checkpoints.items() if run in models.defaults
    }
    answers: dict[str, dict[str, Any]] = {
        run: {"run": run, "checkpoint": name} for run, name in names.items()
    }
    for run, name in names.items():
        check()
        try:
            model = models.model(run, name)
            spans[run] = model.spans(
                request.text, seed=seed, threshold=request.threshold, rate=request.rate
            )
        except UserError as error:
            answers[run]["error"] = escape(str(error))
    passages = {
        run: characters(each.text, each.probabilities, each.boundaries)
        for run, each in spans.items()
    }
    scale = colour_scale(*passages.values())
    for run, each in spans.items():
        html = render("library/passage.html.jinja", spans=coloured(passages[run], scale))
        answers[run] |= {"facts": _facts(each), "html": html, "spans": each.as_dict()}
    return {"runs": list(answers.values()), "labels": legend(scale)["labels"]}


def _facts(spans: Spans) -> Mapping[str, str]:
    bits = spans.bits_per_byte
    if spans.logit_bias:
        shifted = {"logits shifted by": f"{spans.logit_bias:+.2f}".replace("-", "−")}
    else:
        shifted = {}
    return {
        "bits per byte": "–" if bits is None else f"{bits:.3f}",
        "boundaries per byte": f"{spans.rate:.3f}",
        "tokens": f"{len(spans):,} of {len(spans.text):,} bytes",
        **shifted,
    }
