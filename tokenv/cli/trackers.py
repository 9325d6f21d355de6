"""Metrics for TensorBoard, Weights & Biases and MLflow: observers of Sacred's, beside whatever keeps the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokenv.core.errors import UserError


class Tracker(ABC):
    """An observer that passes a run's configuration and metrics on.

    Args:
        place: what the flag says: where to.

    Raises:
        UserError: the package that it speaks to is not installed.
    """

    package: str
    module: str
    takes: str
    priority = 0

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            self.api: Any = import_module(self.module)
        except ImportError as error:
            raise UserError(f"{self.flag} {place}: needs the package {self.package}: pip install it") from error

    @property
    def flag(self) -> str:
        """On the command line."""
        return f"--{self.package}"

    @abstractmethod
    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """A run of this name and configuration starts."""

    @abstractmethod
    def add(self, name: str, value: float, step: int) -> None:
        """One value of a metric; a step is a training symbol."""

    @abstractmethod
    def end(self, status: str) -> None:
        """The run is over: ``FINISHED``, ``KILLED`` or ``FAILED``."""

    def started_event(
        self, ex_info: Any, command: Any, host_info: Any, start_time: Any, config: Any, meta_info: Any, _id: Any
    ) -> None:
        """Sacred starts the run."""
        number = start_time.strftime("%Y%m%d-%H%M%S") if _id is None else _id
        self.begin(f"{ex_info['name']}-{number}", config)

    def log_metrics(self, metrics_by_name: Mapping[str, Mapping[str, Any]], info: Any) -> None:
        """Sacred gives what has come since the last time."""
        for name, metric in metrics_by_name.items():
            for step, value in zip(metric["steps"], metric["values"], strict=True):
                self.add(name, float(value), int(step))

    def completed_event(self, stop_time: Any, result: Any) -> None:
        """The run is done."""
        self.end("FINISHED")

    def interrupted_event(self, interrupt_time: Any, status: Any) -> None:
        """Somebody stopped it."""
        self.end("KILLED")

    def failed_event(self, fail_time: Any, fail_trace: Any) -> None:
        """It failed."""
        self.end("FAILED")

    def _pass(self, *_: Any, **__: Any) -> None:
        """What else Sacred tells is for others."""
        return

    queued_event = heartbeat_event = resource_event = artifact_event = join = _pass


class TensorBoard(Tracker):
    """Event files in a folder of the run's own under ``place``."""

    package, module, takes = "tensorboard", "torch.utils.tensorboard", "a folder"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Open a writer."""
        self.writer = self.api.SummaryWriter(f"{self.place}/{name}")
        self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def add(self, name: str, value: float, step: int) -> None:
        """A scalar."""
        self.writer.add_scalar(name, value, step)

    def end(self, status: str) -> None:
        """Close the file."""
        self.writer.close()


class WandB(Tracker):
    """A run of the project ``place``."""

    package = module = "wandb"
    takes = "a project"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start one, with training symbols as the axis of all metrics."""
        self.run = self.api.init(project=self.place, name=name, config=dict(config))
        self.run.define_metric("symbols")
        self.run.define_metric("*", step_metric="symbols")

    def add(self, name: str, value: float, step: int) -> None:
        """One value."""
        self.run.log({name: value, "symbols": step})

    def end(self, status: str) -> None:
        """Finish it."""
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


class MLflow(Tracker):
    """A run of the experiment ``place``; ``MLFLOW_TRACKING_URI`` says where."""

    package = module = "mlflow"
    takes = "an experiment"

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """Start one; its configuration is a file, for parameters are short."""
        self.api.set_experiment(self.place)
        self.api.start_run(run_name=name)
        self.api.log_dict(dict(config), "config.json")

    def add(self, name: str, value: float, step: int) -> None:
        """One value."""
        self.api.log_metric(name, value, step=step)

    def end(self, status: str) -> None:
        """End it."""
        self.api.end_run(status=status)


FLAGS: dict[str, type[Tracker]] = {"-T": TensorBoard, "-W": WandB, "-M": MLflow}
