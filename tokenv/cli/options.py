"""Options of commands, and their conversion from the command line. Nothing here imports torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tokenv.config.files import COMMAND_LINE
from tokenv.config.schema import Config
from tokenv.core import run_folders
from tokenv.core.atomic import check_output
from tokenv.core.conversion import check_keys, from_dict
from tokenv.core.errors import COUNT, SEED, MissingFileError, UserError, at_least, bounds, check_bounds, choice
from tokenv.core.rates import REQUESTED_RATE, check_rates
from tokenv.core.run_folders import verify
from tokenv.data.config import DataConfig
from tokenv.data.packed import read_unpacked
from tokenv.evaluation.task_formats import check_tasks
from tokenv.series.config import PEER_NAMES, SAMPLES, SEASON, WINDOWS

STANDARD_INPUT = "-"
MAX_ENTROPY_WEIGHTS = 4.0  # logits per nat; larger ones outweigh the policy
FLOPS = bounds("floating-point operations per symbol, such as 1e6", lambda value: value is None or value > 0)
TEMPERATURE = bounds("0 (the most probable byte) or more", lambda value: value >= 0)


@dataclass(frozen=True)
class RunOptions:
    """Options of all commands which load a run.

    Args:
        run: run folder, such as ``runs/7``.
        checkpoint: ``best`` by validation bits per byte, or ``latest``.
        seed: seed of the sampled boundaries and symbols.
    """

    run: str = ""
    checkpoint: str = field(default="best", metadata=choice("best", "latest"))
    seed: int = field(default=0, metadata=SEED)

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("run is missing: expected a run folder, such as run=runs/1")
        check_bounds(self)

    def check_others(self, other_runs: list[str]) -> None:
        """Raise an error unless further runs exist and are different ones."""
        for run in other_runs:
            run_folders.find(run, self.checkpoint)
        if len({self.run, *other_runs}) <= len(other_runs):
            raise UserError(f"other_runs = {other_runs!r}: expected other runs than run = {self.run!r}, each once")


@dataclass(frozen=True)
class JsonOutputOptions(RunOptions):
    """Options of all commands which have results.

    Args:
        json: file for all results, in addition to what is printed; null for none.
    """

    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("json", self.json)


@dataclass(frozen=True)
class ServeOptions(RunOptions):
    """Options of ``tokenv serve``.

    Args:
        other_runs: further runs which segment the same text, side by side.
        host: address to listen on; any but 127.0.0.1 gives access to other machines.
        port: port to listen on; 0 for any free one.
    """

    other_runs: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = field(default=8123, metadata=bounds("0 (any free one) to 65535", lambda port: 0 <= port < 2**16))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_others(self.other_runs)
        if not self.host:
            raise UserError("host is empty: expected an address of this machine, such as 127.0.0.1")


@dataclass(frozen=True)
class TextOptions(JsonOutputOptions):
    """Options of commands which read a text.

    Args:
        text: text, if there is no file.
        file: file with the text (UTF-8 or any bytes; .gz, .xz and .zst are decompressed); - for standard input.
        rate: boundaries per byte. A run which was trained for a range of rates is given the rate; for any other,
            segment shifts the logits until this text has it. null for the run's own.
    """

    text: str | None = None
    file: str | None = None
    rate: float | None = field(default=None, metadata=REQUESTED_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.file is None):
            raise UserError('expected one of text="..." and file=PATH')
        if self.file != STANDARD_INPUT:
            check_input("file", self.file)

    def read(self) -> bytes:
        """Return the bytes of the text.

        Raises:
            UserError: the file is compressed and damaged.
        """
        if self.file is None:
            return encode(self.text or "")
        if self.file == STANDARD_INPUT:
            return sys.stdin.buffer.read()
        return read_unpacked(Path(self.file))


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``tokenv train``.

    Args:
        config: configuration of the run.
        resume: run folder or checkpoint to resume from; None for a new run.
        title: title of the run's pictures; empty for none, null for its number.
    """

    config: Config
    resume: str | None = None
    title: str | None = None


@dataclass(frozen=True)
class SegmentOptions(TextOptions):
    """Options of ``tokenv segment``.

    Args:
        out: HTML page to write, with further ones (``segments-2.html``) for a long text; null for none.
        other_runs: further runs which segment the same text, side by side.
        tokens: exact number of tokens, in place of a rate; null for none.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        max_chars: maximum number of characters to print.
    """

    out: str | None = "segments.html"
    other_runs: list[str] = field(default_factory=list)
    tokens: int | None = field(default=None, metadata=at_least(1, optional=True))
    threshold: bool = False
    max_chars: int = field(default=5_000, metadata=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("out", self.out)
        if self.tokens is not None and self.rate is not None:
            raise UserError("tokens and rate: expected one of them")
        self.check_others(self.other_runs)


@dataclass(frozen=True)
class GenerateOptions(TextOptions):
    """Options of ``tokenv generate``.

    Args:
        max_new_tokens: number of bytes to write.
        num_return_sequences: number of continuations: those of the seeds ``seed``, ``seed + 1``, and so on.
        temperature: temperature of the bytes' distribution; 0 takes the most probable byte.
        top_p: probability mass of the nucleus from which bytes are sampled.
        stop: text after which generation stops.
        flops: budget of floating-point operations per byte, in place of a rate (docs/rates.md); null for none.
    """

    max_new_tokens: int = field(default=200, metadata=COUNT)
    num_return_sequences: int = field(default=1, metadata=COUNT)
    temperature: float = field(default=0.8, metadata=TEMPERATURE)
    top_p: float = field(default=0.95, metadata=bounds("a number in (0, 1]", lambda value: 0 < value <= 1))
    stop: str | None = None
    flops: float | None = field(default=None, metadata=FLOPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flops is not None and self.rate is not None:
            raise UserError("flops and rate: expected one of them")
        if self.stop == "":
            raise UserError("stop is empty: expected a text after which to stop, or null")


@dataclass(frozen=True)
class EvaluateOptions(JsonOutputOptions):
    """Options of ``tokenv evaluate``.

    Args:
        data: changes of the run's data section, such as ``data.validation_source=PATH``.
        split: ``validation`` or, for series, ``test``.
        sequences: maximum number of sequences.
        batch_size: sequences per forward pass.
        tasks: downstream tasks to score in addition, separated by commas: piqa, hellaswag, arc_easy, lambada.
        task_files: local files of tasks, in place of the Hugging Face Hub: ``task_files.lambada=PATH``, or
            ``"task_files.piqa=['ROWS', 'LABELS']"``.
        limit: maximum number of questions of each task; null for all.
        calibrate: evaluate a third time, with the policy's logits shifted to exactly the run's target rate on as many
            further validation sequences.
        rates: evaluate at each of these boundaries per symbol instead, such as [0.05, 0.1, 0.2]. A run which was
            trained for a range of rates is given them; with calibrate=True, and always for a run of one rate, the
            logits are shifted to them.
        flops: evaluate at the rate with this budget of floating-point operations per symbol; null for none.
        entropy_weight: evaluate at these rates again, with logits raised by each of these numbers per nat of the early
            exit's entropy and calibrated to the same rate: as many tokens, but more of them where it is uncertain.
        other_runs: further runs to evaluate at these rates, on the same sequences and in the same picture.
        out: name of the files with the results at rates, without their endings .csv and .png; null for none.
        title: title of the picture; empty for none, null for one which names the run.
    """

    data: dict[str, Any] = field(default_factory=dict, metadata={"holds": DataConfig})
    split: str = field(default="validation", metadata=choice("validation", "test"))
    sequences: int = field(default=2048, metadata=COUNT)
    batch_size: int = field(default=64, metadata=COUNT)
    tasks: str = ""
    task_files: dict[str, Any] = field(default_factory=dict, metadata={"each": list[str] | str})
    limit: int | None = field(default=None, metadata=at_least(1, optional=True))
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    flops: float | None = field(default=None, metadata=FLOPS)
    entropy_weight: list[float] = field(default_factory=list)
    other_runs: list[str] = field(default_factory=list)
    out: str | None = "rates"
    title: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("out", self.out, ".csv", ".png")
        check_rates(self.rates)
        if self.flops is not None and self.rates:
            raise UserError("flops and rates: expected one of them")
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
        check_keys(self.data, COMMAND_LINE, DataConfig, "data.")
        check_tasks([*self.task_names, *self.task_files])
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
        """Whether the run is evaluated at requested rates."""
        return bool(self.rates) or self.flops is not None

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def files_of(self, task: str) -> list[str]:
        """Return the local files of a task; none if it is read from the Hub."""
        files = self.task_files.get(task, [])
        return [files] if isinstance(files, str) else list(files)


@dataclass(frozen=True)
class ForecastOptions(JsonOutputOptions):
    """Options of ``tokenv forecast``.

    Args:
        csv: CSV or parquet file whose series are continued, wide or long (``unique_id, ds, y``); null for the test
            windows of the run's data, whose forecasts are compared with the actual values.
        horizon: number of steps to forecast.
        samples: number of continuations per forecast.
        rate: boundaries per step, for a run which was trained for a range of rates; null for the mean of the range.
        windows: number of test windows to forecast, evenly over the test steps; 0 for all, one per step.
        direct: take the densities of all steps from the direct head, instead of sampling value after value.
        season: steps of a season, for the seasonal naive baseline; null estimates it on the training steps.
        peers: further models to compare with: ``dlinear``, trained on the training windows.
        quantiles: probabilities, ascending; the first and the last bound the interval in the picture.
        out: name of the output files, without their endings .csv and .png.
        title: title of the picture; empty for none, null for one which names the run.
    """

    csv: str | None = None
    horizon: int = field(default=96, metadata=COUNT)
    samples: int = field(default=100, metadata=SAMPLES)
    rate: float | None = field(default=None, metadata=REQUESTED_RATE)
    windows: int = field(default=16, metadata=WINDOWS)
    direct: bool = False
    season: int | None = field(default=None, metadata=SEASON)
    peers: list[str] | str = field(default_factory=list, metadata=PEER_NAMES)
    quantiles: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    out: str = "forecast"
    title: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.peers, str):
            object.__setattr__(self, "peers", [name for name in self.peers.strip("[] ").split(",") if name])
        super().__post_init__()
        check_output("out", self.out, ".csv", ".png")
        if self.peers and self.csv is not None:
            raise UserError(f"peers = {self.peers!r} with csv: expected csv=null, for they are held against what came")
        check_input("csv", self.csv)
        inside = all(isinstance(q, float) and 0 < q < 1 for q in self.quantiles)
        if not self.quantiles or not inside or list(self.quantiles) != sorted(set(self.quantiles)):
            raise UserError(f"quantiles = {self.quantiles!r}: expected ascending numbers in (0, 1), as [0.1,0.5,0.9]")


def resolve_options(kind: type, names: list[str], updates: dict[str, Any]) -> Any:
    """Return the options of a command which reads no configuration, as an instance of the dataclass ``kind``.

    Raises:
        UserError: for a word without ``=``, an unknown key, or a wrong value.
    """
    if names:
        raise UserError(f"{names[0]!r} is no option: expected key=value, such as run=runs/1")
    check_keys(updates, COMMAND_LINE, kind)
    options: Any = from_dict(kind, updates)
    run_folders.find(options.run, options.checkpoint)  # checked before anything is stored
    return options


def check_input(key: str, path: str | None) -> None:
    """Raise an error unless the file in the option ``key`` exists, or none is given.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is a folder.
    """
    if path is None or Path(path).is_file():
        return
    if Path(path).is_dir():
        raise UserError(f"{key} = {path!r} is a folder: expected one file, such as one of those in it")
    raise MissingFileError(f"{key} = {path!r}: there is no such file")


def encode(text: str) -> bytes:
    """Return the bytes of a text; bytes of the command line which are not UTF-8 are kept."""
    return text.encode(errors="surrogateescape")


def take_own(kind: type, updates: dict[str, Any]) -> dict[str, Any]:
    """Remove a command's own keys from the updates and return them; keys of the run's configuration remain."""
    own = [item.name for item in fields(kind) if item.name != "config" and item.name in updates]
    return {name: updates.pop(name) for name in own}


def stored_config(key: str, run: str, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of the run in the option ``key``, and its configuration.

    Raises:
        DamagedError: if a file of the checkpoint is damaged; the message names the newest intact checkpoint.
        UserError: if configurations are named, too, or the run names code which the user does not trust.
        MissingFileError: if the run does not exist or has no checkpoint.
    """
    if names:
        raise UserError(f"{key}={run} brings its own configuration: drop {', '.join(names)}")
    path = run_folders.find(run)
    verify(path)
    return path, run_folders.load_state(path)["config"]


def check_text(config: Config) -> None:
    """Raise an error unless a run has been trained on text.

    Raises:
        UserError: if it has been trained on series.
    """
    if config.data.kind != "text":
        raise UserError(f"data.kind = {config.data.kind!r}: expected text, this command knows nothing else")
