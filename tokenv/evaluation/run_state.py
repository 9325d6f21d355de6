"""Save and read the state of a run: its progress, metrics and last evaluation, without its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from tokenv.config.components import Components, build_components
from tokenv.config.schema import Config, HardwareConfig
from tokenv.core import checkpoints
from tokenv.core.conversion import convert, from_dict
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange

Log = Callable[[str, float, int], None]
# Agents whose rate depends on the text, or is random.
RATE_FREE_AGENTS = ("bpe", "random_rate", "no_boundaries", "whitespace")
RATE_TOLERANCE = 0.2
History = dict[str, tuple[list[int], list[float]]]


def off_target(config: Config, rate: float) -> bool:
    """Return whether a boundary rate is more than a fifth off the run's target; False without a single target."""
    if isinstance(config.rate, RateRange) or config.agent["name"] in RATE_FREE_AGENTS:
        return False
    return abs(rate / config.rate - 1) > RATE_TOLERANCE


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model on held-out sequences.

    Attributes:
        unit: unit of the losses, which the codec defines, such as ``bits_per_byte``.
        loss: mean over all predicted symbols or values.
        standard_error: standard error of the loss, with documents as the independent units.
        loss_early: loss of the early exit; None if it is not trained.
        boundary_rate: drawn boundaries per symbol.
        entropy: entropy of the policy, in nats per decision.
        imitation_bits: bits per symbol which the boundaries of the teacher cost if the policy predicts them from the
            past: an upper bound on what a teacher which reads ahead tells of later symbols; None without a teacher.
        in_context_score: loss early in a sequence less loss late (``tokenv.evaluation.evaluator.in_context_scores``);
            None for short sequences and series.
        boundary_f1: F1 of the drawn boundaries against the true ones; None if the corpus does not know these.
        boundary_precision: share of drawn boundaries which are true.
        boundary_recall: share of true boundaries which are drawn.
        enrichment_ratio: loss of the symbols after a boundary, relative to that after shifted boundaries
            (``tokenv.evaluation.boundary_metrics.enrichment_sums``); None for series.
        by_name: boundaries per symbol of each class (``boundary_rate_letter``), and precision and F1 against agents
            such as whitespace (``whitespace_f1``), by name.
    """

    unit: str
    loss: float
    standard_error: float
    loss_early: float | None
    boundary_rate: float
    entropy: float
    imitation_bits: float | None = None
    in_context_score: float | None = None
    boundary_f1: float | None = None
    boundary_precision: float | None = None
    boundary_recall: float | None = None
    enrichment_ratio: float | None = None
    by_name: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """Return all figures by the names under which they are logged: the loss is named after its unit."""
        values = asdict(self)
        unit = values.pop("unit")
        by_name = values.pop("by_name")
        names = {"loss": unit, "loss_early": f"{unit}_early"}
        return {names.get(name, name): value for name, value in values.items()} | by_name

    @classmethod
    def from_metrics(cls, values: dict[str, Any], unit: str) -> Self:
        """Build the evaluation whose ``metrics`` are given."""
        names = {unit: "loss", f"{unit}_early": "loss_early"}
        known = {each.name for each in fields(cls)}
        renamed = {names.get(name, name): value for name, value in values.items()}
        figures = {name: value for name, value in renamed.items() if name in known}
        by_name = {name: value for name, value in renamed.items() if name not in known}
        return cls(unit, **figures, by_name=by_name)


@dataclass
class RunState:
    """State of a run without its tensors.

    Attributes:
        config: configuration as plain nested dictionaries; ``settings`` is the checked one.
        unit: unit of the losses, such as ``bits_per_byte``.
        step: number of updates.
        symbols: number of training symbols so far.
        flops: floating-point operations which the method has needed so far: see ``tokenv.lm.flops``.
        flops_linear: the same without attention, by the paper's rule.
        flops_executed: executed operations so far, including padded tokens and recomputed layers.
        data: positions of the streams of training sequences.
        history: all metrics by name: numbers of training symbols, and values.
        validation: last validation.
    """

    config: dict[str, Any]
    unit: str
    step: int = 0
    symbols: int = 0
    flops: int = 0
    flops_linear: int = 0
    flops_executed: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    validation: Evaluation | None = None

    @property
    def settings(self) -> Config:
        """Checked configuration.

        Raises:
            ValueError: if this version cannot read it.
        """
        return from_dict(Config, self.config)

    @property
    def loss(self) -> float | None:
        """Validation loss of the present parameters; None if they have not been validated."""
        symbols, losses = self.history.get(f"validation/{self.unit}", ([], []))
        return losses[-1] if symbols and symbols[-1] == self.symbols else None

    @property
    def missed_rate(self) -> str:
        """Message if the boundary rate of the last validation misses the target; otherwise empty."""
        config = self.settings
        last = self.validation
        if last is None or not off_target(config, last.boundary_rate):
            return ""
        return f"the run draws {last.boundary_rate:.3g} boundaries a step and misses its target, rate = {config.rate:g}"

    def record(
        self, prefix: str, values: Mapping[str, float | None], log: Log, at: int | None = None
    ) -> None:
        """Add metrics which are not None to the history, at ``at`` (or the present number of) symbols, and log them."""
        at = self.symbols if at is None else at
        for name, value in values.items():
            if value is not None:
                symbols, recorded = self.history.setdefault(f"{prefix}/{name}", ([], []))
                symbols.append(at)
                recorded.append(value)
                log(f"{prefix}/{name}", value, at)

    def add_flops(self, flops: Mapping[str, int]) -> None:
        """Add the FLOPs of an update, by the names of this class's fields."""
        for name, count in flops.items():
            setattr(self, name, getattr(self, name) + count)

    def replay(self, log: Log) -> None:
        """Log the whole history."""
        for name, (symbols, values) in self.history.items():
            for seen, value in zip(symbols, values, strict=True):
                log(name, value, seen)

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of ``state.json``; the loss is named after its unit."""
        validation = None if self.validation is None else self.validation.metrics()
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "validation": validation,
            self.unit: self.loss,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: object = "the state") -> Self:
        """Build the state from the result of ``as_dict``.

        Raises:
            UserError: if the values are no state; the message names ``source``.
        """
        where = f"{source}: "
        try:
            unit = convert(values["unit"], str, f"{where}unit")
            validation = values["validation"] or None
            if validation is not None:
                validation = Evaluation.from_metrics(validation, unit)
            return cls(
                config=convert(values["config"], dict[str, Any], f"{where}config"),
                unit=unit,
                step=convert(values["step"], int, f"{where}step"),
                symbols=convert(values["symbols"], int, f"{where}symbols"),
                flops=convert(values["flops"], int, f"{where}flops"),
                flops_linear=convert(values["flops_linear"], int, f"{where}flops_linear"),
                flops_executed=convert(values["flops_executed"], int, f"{where}flops_executed"),
                data=convert(values["data"], dict[str, Any], f"{where}data"),
                history=_read_history(values["history"], where),
                validation=validation,
            )
        except KeyError as error:
            raise UserError(
                f"{where}{error} is missing: expected a state as a checkpoint holds it"
            ) from None
        except (TypeError, AttributeError) as error:
            raise UserError(f"{where}no state as a checkpoint holds it: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the state of a checkpoint."""
        return cls.from_dict(checkpoints.load_state(path), path)


def _read_history(stored: Any, where: str) -> History:
    """Check and return the numbers of training symbols and the values of all metrics."""
    metrics = convert(stored, dict[str, Any], f"{where}history")
    return {
        name: _metric_history(each, f"{where}history of {name}") for name, each in metrics.items()
    }


def _metric_history(stored: Any, where: str) -> tuple[list[int], list[float]]:
    """Check and return the numbers of training symbols and the values of one metric."""
    pair = (
        isinstance(stored, list | tuple)
        and len(stored) == 2
        and all(isinstance(x, list | tuple) for x in stored)
    )
    if (
        not pair
        or len(stored[0]) != len(stored[1])
        or not all(isinstance(x, int | float) for x in chain(*stored))
    ):
        raise UserError(
            f"{where}: expected two lists of numbers: training symbols, and as many values"
        )
    return list(stored[0]), list(stored[1])


def load_components(
    path: Path, choose: Callable[[HardwareConfig], HardwareConfig]
) -> tuple[Components, RunState]:
    """Build the components of a checkpoint in training mode, with its parameters, and return them with its state.

    Args:
        path: checkpoint.
        choose: function from the run's hardware to that which is built for.

    Raises:
        UserError: the checkpoint does not hold the tensors of its configuration.
    """
    tensors, stored = checkpoints.load_model(path)
    state = RunState.from_dict(stored, path)
    config = state.settings
    components = build_components(
        replace(config, hardware=choose(config.hardware)), read_files=False
    )
    checkpoints.check_tensors(tensors, components.state_dict(), path / checkpoints.MODEL)
    components.load_state_dict(tensors)
    components.train()
    return components, state
