"""Options of the commands beside a run's configuration: every key, its meaning, and what it may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenv.config.schema import Config
from tokenv.tasks.formats import check_tasks


@dataclass(frozen=True)
class TrainOptions:
    """A training run and where it goes on from.

    Args:
        config: the run.
        resume: run folder or checkpoint to go on from; None for a fresh start.
    """

    config: Config
    resume: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What Sacred stores."""
        return self.config.as_dict() | {"resume": self.resume}


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that looks at a run.

    Args:
        run: run folder, such as ``runs/7``.
        checkpoint: ``best`` by validation bits per byte, or ``latest``.
        seed: of drawn boundaries and symbols.
    """

    run: str = ""
    checkpoint: str = "best"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is missing: expected a run folder, such as run=runs/1")
        if self.checkpoint not in ("best", "latest"):
            raise ValueError(f"checkpoint = {self.checkpoint!r}: expected best or latest")


@dataclass(frozen=True)
class TextOptions(RunOptions):
    """Options of commands that read a text.

    Args:
        text: the text itself,
        file: or the file that holds it (UTF-8 or any bytes).
    """

    text: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.file is None):
            raise ValueError('expected one of text="..." and file=PATH')
        if self.file is not None and not Path(self.file).is_file():
            raise FileNotFoundError(f"file = {self.file!r}: there is no such file")

    def read(self) -> bytes:
        """The text's bytes."""
        return Path(self.file).read_bytes() if self.file is not None else (self.text or "").encode()


@dataclass(frozen=True)
class SegmentOptions(TextOptions):
    """Options of ``tokenv segment``.

    Args:
        out: HTML page to write; nothing is written where null.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
    """

    out: str | None = "segments.html"
    threshold: bool = False


@dataclass(frozen=True)
class GenerateOptions(TextOptions):
    """Options of ``tokenv generate``.

    Args:
        max_new: bytes to write.
        temperature: 0 takes the most probable byte.
        top_p: nucleus that bytes are drawn from.
        stop: text after which to stop.
    """

    max_new: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    stop: str | None = None


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """Options of ``tokenv evaluate``.

    Args:
        data: overrides of the run's data section, such as ``data.validation_source=PATH``.
        split: ``validation`` or, of series, ``test``.
        sequences: at most so many.
        batch_size: sequences of one pass.
        tasks: downstream tasks to score as well, with commas between: piqa, hellaswag, arc_easy, lambada.
        task_files: local files of tasks that are not to come from the hub: ``task_files.lambada=PATH``, or
            ``"task_files.piqa=['ROWS', 'LABELS']"``.
        questions: at most so many of each task; null for all.
    """

    data: dict[str, Any] = field(default_factory=dict)
    split: str = "validation"
    sequences: int = 2048
    batch_size: int = 64
    tasks: str = ""
    task_files: dict[str, Any] = field(default_factory=dict)
    questions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("validation", "test"):
            raise ValueError(f"split = {self.split!r}: expected validation or test")
        check_tasks([*self.task_names, *self.task_files])
        if self.questions is not None and not (isinstance(self.questions, int) and self.questions >= 1):
            raise ValueError(f"questions = {self.questions!r}: expected a whole number of at least 1, or null for all")
        for name, files in self.task_files.items():
            if not isinstance(files, str | list | tuple) or not files:
                raise ValueError(f"task_files.{name} = {files!r}: expected a path, or a list of paths")
            if name not in self.task_names:
                raise ValueError(f"task_files.{name} is given, but tasks = {self.tasks!r}: name the task there, too")

    @property
    def task_names(self) -> list[str]:
        """The tasks, one by one."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def files_of(self, task: str) -> list[str]:
        """A task's local files; none where it comes from the hub."""
        files = self.task_files.get(task, [])
        return [files] if isinstance(files, str) else list(files)


@dataclass(frozen=True)
class ForecastOptions(RunOptions):
    """Options of ``tokenv forecast``.

    Args:
        csv: file to go on from its last row; null for the test windows of the run's own data, whose forecasts are
            held against what came.
        horizon: steps to forecast.
        samples: continuations that a forecast is made of.
        windows: test windows to forecast, evenly over the test steps; 0 for all, one a step.
        direct: ask the model's direct head for all steps at once, instead of drawing value after value.
        quantiles: probabilities, ascending; the first and the last bound the interval that is drawn.
        out: name of the files to write, without their endings .csv and .png.
    """

    csv: str | None = None
    horizon: int = 96
    samples: int = 100
    windows: int = 16
    direct: bool = False
    quantiles: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    out: str = "forecast"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("horizon", 1), ("samples", 2), ("windows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least {least}")
        inside = all(isinstance(q, float) and 0 < q < 1 for q in self.quantiles)
        if not self.quantiles or not inside or list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError(f"quantiles = {self.quantiles!r}: expected ascending numbers in (0, 1), as [0.1,0.5,0.9]")
