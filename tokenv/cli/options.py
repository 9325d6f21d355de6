"""What commands may be asked, and how words of the command line become options. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tokenv.cli.outputs import check_output
from tokenv.config.conversion import check_keys, from_dict
from tokenv.config.files import COMMAND_LINE
from tokenv.config.schema import Config, check_seed
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.rates import check_rate
from tokenv.data.config import DataConfig
from tokenv.evaluation.task_formats import check_tasks
from tokenv.forecasting.config import check_request
from tokenv.storage import run_folders
from tokenv.storage.checksums import verify


def check_budget(flops: float | None, beside: bool, key: str) -> None:
    """Refuse what is no budget, and one beside what it stands for.

    Raises:
        UserError: it is not positive, or ``key`` is given, too.
    """
    if flops is not None and not flops > 0:
        raise UserError(f"flops = {flops}: expected floating-point operations per symbol, such as 1e6")
    if flops is not None and beside:
        raise UserError(f"flops and {key}: expected one of them")


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
            raise UserError("run is missing: expected a run folder, such as run=runs/1")
        check_seed(self.seed)
        if self.checkpoint not in ("best", "latest"):
            raise UserError(f"checkpoint = {self.checkpoint!r}: expected best or latest")

    def check_others(self, other_runs: list[str]) -> None:
        """Refuse further runs that are not there, or are the same ones."""
        for run in other_runs:
            run_folders.find(run, self.checkpoint)
        if len({self.run, *other_runs}) <= len(other_runs):
            raise UserError(f"other_runs = {other_runs!r}: expected other runs than run = {self.run!r}, each once")


@dataclass(frozen=True)
class JsonOutputOptions(RunOptions):
    """Options of every command that finds something in a run.

    Args:
        json: file for all that is found, beside what is printed; null for none.
    """

    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("json", self.json)


@dataclass(frozen=True)
class ServeOptions(RunOptions):
    """Options of ``tokenv serve``.

    Args:
        other_runs: further runs that cut the same text, side by side.
        host: address to listen on; another than this machine's own 127.0.0.1 lets others in.
        port: to listen on; 0 for any that is free.
    """

    other_runs: list[str] = field(default_factory=list, metadata={"was": "also"})
    host: str = "127.0.0.1"
    port: int = 8123

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_others(self.other_runs)
        if not self.host:
            raise UserError("host is empty: expected an address of this machine, such as 127.0.0.1")
        if not 0 <= self.port < 2**16:
            raise UserError(f"port = {self.port}: expected a number from 0 (any free one) to 65535")


@dataclass(frozen=True)
class TextOptions(JsonOutputOptions):
    """Options of commands that read a text.

    Args:
        text: the text itself,
        file: or the file that holds it (UTF-8 or any bytes).
        rate: boundaries per byte. A run that was trained for a range of rates is told it; of any other, segment shifts
            the logits until this text has them. null for the run's own.
    """

    text: str | None = None
    file: str | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate("rate", self.rate)
        if (self.text is None) == (self.file is None):
            raise UserError('expected one of text="..." and file=PATH')
        if self.file is not None and not Path(self.file).is_file():
            raise MissingFileError(f"file = {self.file!r}: there is no such file")

    def read(self) -> bytes:
        """The text's bytes."""
        return Path(self.file).read_bytes() if self.file is not None else encode(self.text or "")


@dataclass(frozen=True)
class TrainOptions:
    """A training run and where it goes on from.

    Args:
        config: the run.
        resume: run folder or checkpoint to go on from; None for a fresh start.
    """

    config: Config
    resume: str | None = None


@dataclass(frozen=True)
class SegmentOptions(TextOptions):
    """Options of ``tokenv segment``.

    Args:
        out: HTML page to write, and further ones beside it (``segments-2.html``) for a long text; none where null.
        other_runs: further runs that cut the same text, side by side.
        tokens: a budget in place of a rate: cut the text into exactly so many; null for none.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        max_chars: characters of it to print at most.
    """

    out: str | None = "segments.html"
    other_runs: list[str] = field(default_factory=list, metadata={"was": "also"})
    tokens: int | None = None
    threshold: bool = False
    max_chars: int = field(default=5_000, metadata={"was": "shown"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("out", self.out)
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"tokens = {self.tokens}: expected at least 1, or null")
        if self.tokens is not None and self.rate is not None:
            raise UserError("tokens and rate: expected one of them")
        if self.max_chars < 0:
            raise UserError(f"max_chars = {self.max_chars}: expected 0 characters or more")
        self.check_others(self.other_runs)


@dataclass(frozen=True)
class GenerateOptions(TextOptions):
    """Options of ``tokenv generate``.

    Args:
        max_new: bytes to write.
        temperature: 0 takes the most probable byte.
        top_p: nucleus that bytes are drawn from.
        stop: text after which to stop.
        flops: budget, in place of rate: floating-point operations per byte (docs/rates.md); null for none.
    """

    max_new: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    stop: str | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.flops, self.rate is not None, "rate")
        if self.max_new < 1:
            raise UserError(f"max_new = {self.max_new}: expected at least 1 byte to write")
        if self.temperature < 0:
            raise UserError(f"temperature = {self.temperature}: expected 0 (the most probable byte) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: expected a number in (0, 1]")
        if self.stop == "":
            raise UserError("stop is empty: expected a text after which to stop, or null")


MAX_ENTROPY_WEIGHTS = 4.0  # logits per nat; beyond, nothing else decides


@dataclass(frozen=True)
class EvaluateOptions(JsonOutputOptions):
    """Options of ``tokenv evaluate``.

    Args:
        data: overrides of the run's data section, such as ``data.validation_source=PATH``.
        split: ``validation`` or, of series, ``test``.
        sequences: at most so many.
        batch_size: sequences of one pass.
        tasks: downstream tasks to score as well, with commas between: piqa, hellaswag, arc_easy, lambada.
        task_files: local files of tasks that are not to come from the hub: ``task_files.lambada=PATH``, or
            ``"task_files.piqa=['ROWS', 'LABELS']"``.
        limit: at most so many questions of each task; null for all.
        calibrate: measure a third time, with the policy's logits shifted to exactly its run's target rate on further
            validation sequences, as many again.
        rates: measure at each of these boundaries per symbol instead, such as [0.05, 0.1, 0.2]: a run that was trained
            for a range is told them; with calibrate=True, and in a run of one rate always, logits are shifted as well.
        flops: measure at the rate that meets this budget: floating-point operations per symbol; null for none.
        entropy_weight: measure at these rates again, with logits raised where the early exit is unsure, by each of
            these numbers for a nat of its entropy, and calibrated to the same rate: as many tokens, spent where they
        may be needed.
        other_runs: further runs to measure at these rates, on the same text and in the same picture.
        out: name of the files that rates are written to, without their endings .csv and .png; null for none.
    """

    data: dict[str, Any] = field(default_factory=dict, metadata={"holds": DataConfig})
    split: str = "validation"
    sequences: int = 2048
    batch_size: int = 64
    tasks: str = ""
    task_files: dict[str, Any] = field(default_factory=dict, metadata={"each": list[str] | str})
    limit: int | None = field(default=None, metadata={"was": "questions"})
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    flops: float | None = None
    entropy_weight: list[float] = field(default_factory=list, metadata={"was": "doubt"})
    other_runs: list[str] = field(default_factory=list, metadata={"was": "also"})
    out: str | None = "rates"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("out", self.out, ".csv", ".png")
        for rate in self.rates:
            check_rate("rates", rate)
        check_budget(self.flops, bool(self.rates), "rates")
        if self.other_runs and not self.at_rates:
            raise UserError(
                f"other_runs = {self.other_runs!r}: expected rates or flops beside it, at which runs are compared"
            )
        if self.entropy_weight and not self.at_rates:
            raise UserError(
                f"entropy_weight = {self.entropy_weight!r}: expected rates or flops beside it, what is spent by it"
            )
        if any(abs(weight) > MAX_ENTROPY_WEIGHTS for weight in self.entropy_weight):
            raise UserError(
                f"entropy_weight = {self.entropy_weight!r}: expected logits per nat, from -{MAX_ENTROPY_WEIGHTS:g} to "
                f"{MAX_ENTROPY_WEIGHTS:g}"
            )
        self.check_others(self.other_runs)
        if self.tasks and self.at_rates:
            raise UserError("tasks are scored at a run's own rate: leave out rates and flops, or tasks")
        if self.split not in ("validation", "test"):
            raise UserError(f"split = {self.split!r}: expected validation or test")
        check_keys(self.data, COMMAND_LINE, DataConfig, "data.")
        check_tasks([*self.task_names, *self.task_files])
        for name in ("sequences", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.limit is not None and not (isinstance(self.limit, int) and self.limit >= 1):
            raise UserError(f"limit = {self.limit!r}: expected a whole number of at least 1, or null for all")
        if self.calibrate and self.split != "validation":
            raise UserError(
                f"calibrate = True with split = {self.split!r}: expected split=validation, half of it to calibrate"
            )
        for name, files in self.task_files.items():
            several = isinstance(files, list | tuple) and all(isinstance(file, str) for file in files)
            if not files or not (several or isinstance(files, str)):
                raise UserError(f"task_files.{name} = {files!r}: expected a path, or a list of paths")
            if name not in self.task_names:
                raise UserError(f"task_files.{name} is given, but tasks = {self.tasks!r}: name the task there, too")

    @property
    def at_rates(self) -> bool:
        """Whether the run is measured at rates that are asked for."""
        return bool(self.rates) or self.flops is not None

    @property
    def task_names(self) -> list[str]:
        """The tasks, one by one."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def files_of(self, task: str) -> list[str]:
        """A task's local files; none where it comes from the hub."""
        files = self.task_files.get(task, [])
        return [files] if isinstance(files, str) else list(files)


@dataclass(frozen=True)
class ForecastOptions(JsonOutputOptions):
    """Options of ``tokenv forecast``.

    Args:
        csv: file to go on from its last rows, CSV or parquet, wide or long (``unique_id, ds, y``); null for the test
            windows of the run's own data, whose forecasts are held against what came.
        horizon: steps to forecast.
        samples: continuations that a forecast is made of.
        rate: boundaries per step that a run is asked for that was trained for a range of rates; null for its mean.
        windows: test windows to forecast, evenly over the test steps; 0 for all, one a step.
        direct: ask the direct head for the densities of all steps at once, instead of drawing value after value.
        season: steps of a season, whose last one is a yardstick; null finds it in the training steps.
        peers: further forecasts to hold the model's against: ``dlinear``, trained on the training windows.
        quantiles: probabilities, ascending; the first and the last bound the interval that is drawn.
        out: name of the files to write, without their endings .csv and .png.
    """

    csv: str | None = None
    horizon: int = 96
    samples: int = 100
    rate: float | None = None
    windows: int = 16
    direct: bool = False
    season: int | None = None
    peers: list[str] | str = field(default_factory=list)
    quantiles: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    out: str = "forecast"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("out", self.out, ".csv", ".png")
        check_rate("rate", self.rate)
        if isinstance(self.peers, str):
            object.__setattr__(self, "peers", [name for name in self.peers.strip("[] ").split(",") if name])
        names = ("horizon", "samples", "windows", "season", "peers")
        check_request(**{name: getattr(self, name) for name in names})
        if self.peers and self.csv is not None:
            raise UserError(f"peers = {self.peers!r} with csv: expected csv=null, for they are held against what came")
        if self.csv is not None and not Path(self.csv).is_file():
            raise MissingFileError(f"csv = {self.csv!r}: there is no such file")
        inside = all(isinstance(q, float) and 0 < q < 1 for q in self.quantiles)
        if not self.quantiles or not inside or list(self.quantiles) != sorted(set(self.quantiles)):
            raise UserError(f"quantiles = {self.quantiles!r}: expected ascending numbers in (0, 1), as [0.1,0.5,0.9]")


def resolve_options(kind: type, names: list[str], updates: dict[str, Any]) -> Any:
    """Options, of this dataclass, of a command that reads no configuration.

    Raises:
        UserError: a word without ``=``, an unknown key, or a wrong value.
    """
    if names:
        raise UserError(f"{names[0]!r} is no option: expected key=value, such as run=runs/1")
    check_keys(updates, COMMAND_LINE, kind)
    options: Any = from_dict(kind, updates)
    run_folders.find(options.run, options.checkpoint)  # before anything is stored
    return options


def encode(text: str) -> bytes:
    """A text's bytes; those that were typed but are no UTF-8 stay as they are."""
    return text.encode(errors="surrogateescape")


def take_own(kind: type, updates: dict[str, Any]) -> dict[str, Any]:
    """Take a command's own keys out of the updates, which leaves those of the run's configuration."""
    own = [item.name for item in fields(kind) if item.name != "config" and item.name in updates]
    return {name: updates.pop(name) for name in own}


def stored_config(key: str, run: str, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of the run that a key names, and the configuration in it.

    Raises:
        DamagedError: a file of the checkpoint is damaged; the message names the newest sound one.
        UserError: other configurations are named, too, or the run names code that the user has not named.
        MissingFileError: there is no such run, or it has no checkpoint.
    """
    if names:
        raise UserError(f"{key}={run} brings its own configuration: drop {', '.join(names)}")
    path = run_folders.find(run)
    verify(path)
    return path, run_folders.load_state(path)["config"]


def check_text(config: Config) -> None:
    """Refuse what only text can be asked for.

    Raises:
        UserError: the run is of series.
    """
    if config.data.kind != "text":
        raise UserError(f"data.kind = {config.data.kind!r}: expected text, this command knows nothing else")
