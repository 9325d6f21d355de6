"""Several methods held against one another: plain figures, which no model is needed to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenv.compare.forecast_comparison import ForecastComparison
from tokenv.compare.rate_curves import MethodRateCurve
from tokenv.compare.run_evaluation import RunEvaluation
from tokenv.compare.significance import Difference
from tokenv.config.schema import Config
from tokenv.core.rates import mean_rate
from tokenv.plotting.theme import TERMINOLOGY, Terminology, in_words


@dataclass(frozen=True)
class ComparedRun:
    """A finished run and what was measured of it.

    Attributes:
        folder: where it is stored.
        config: of the run.
        flops: of the whole training.
        seconds: of the whole training.
        history: metric to training symbols and values, such as ``train/flops``, ``train/boundary_rate``,
            ``train/neg_log_prob`` (nats per decision), and under the unit's name ``train/bits_per_byte`` and
            ``validation/bits_per_byte``; each may be missing.
        assessment: its figures on held-out data.
    """

    folder: str
    config: Config
    flops: float
    seconds: float
    history: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    assessment: RunEvaluation

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.config.seed

    @property
    def loss(self) -> float:
        """On held-out data, mean over all that is predicted."""
        return float(np.mean(self.assessment.loss))

    @property
    def loss_early(self) -> float:
        """The early exit's; NaN where the run has no use for one."""
        return math.nan if self.assessment.loss_early is None else self.assessment.loss_early

    @property
    def loss_test(self) -> float:
        """On the test split; NaN where there is none."""
        return math.nan if self.assessment.loss_test is None else self.assessment.loss_test

    @property
    def boundary_rate(self) -> float:
        """Boundaries per symbol, as drawn on held-out data."""
        return self.assessment.boundary_rate

    @property
    def loss_raw(self) -> float:
        """The loss before calibration; NaN where there was none."""
        before = self.assessment.calibration
        return math.nan if before is None else before.loss

    @property
    def boundary_rate_raw(self) -> float:
        """Boundaries per symbol before calibration; NaN where there was none."""
        before = self.assessment.calibration
        return math.nan if before is None else before.boundary_rate

    @property
    def area(self) -> float:
        """Mean held-out loss over training: the area under the curve of the validations, calibrated where they are.

        NaN with fewer than two.
        """
        unit = self.assessment.unit
        curve = self.history.get(f"calibrated/{unit}") or self.history.get(f"validation/{unit}", ((), ()))
        symbols, losses = curve
        if len(symbols) < 2:
            return math.nan
        return float(np.trapezoid(losses, symbols) / (symbols[-1] - symbols[0]))


@dataclass(frozen=True)
class ComparedMethod:
    """The runs of one method, and what they say together.

    Attributes:
        name: of the method.
        runs: one a seed, at least one.
        settings: what distinguishes it, such as ``agent.name`` to ``uniform``.
        loss: mean over the seeds.
        seed_error: standard error of that mean over the seeds; NaN for one.
        document_error: its standard error over held-out documents.
    """

    name: str
    runs: Sequence[ComparedRun]
    settings: Mapping[str, str]
    loss: float
    seed_error: float
    document_error: float


@dataclass(frozen=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        title: of the page.
        facts: name to value: data, budget, seeds, machine and so on.
        methods: at least one, of different names, all of one kind of data, measured in one unit; their order gives them
            their colours, reports show the best first.
        differences: every pair of methods, once, to the first one's loss minus the second one's.
        failed: run to what went wrong, for runs that did not finish.
        rates: the methods at rates that they were asked for; empty where nobody asked.
        rates_against: the method that ``rates`` are held against; empty for none.
        forecasts: of test windows; None where nobody asked for them.
    """

    title: str
    facts: Mapping[str, str]
    methods: Sequence[ComparedMethod]
    differences: Mapping[tuple[str, str], Difference]
    failed: Mapping[str, str] = field(default_factory=dict)
    rates: Sequence[MethodRateCurve] = ()
    rates_against: str = ""
    forecasts: ForecastComparison | None = None

    @property
    def unit(self) -> str:
        """What losses are measured in, as metrics are named."""
        return self.methods[0].runs[0].assessment.unit

    @property
    def unit_in_words(self) -> str:
        """Such as ``bits per byte``."""
        return in_words(self.unit)

    @property
    def words(self) -> Terminology:
        """What symbols, tokens and so on are called."""
        return TERMINOLOGY[self.methods[0].runs[0].config.data.kind]

    @property
    def has_test(self) -> bool:
        """Whether losses on a test split are shown."""
        return self.methods[0].runs[0].config.data.kind == "series"

    @property
    def calibrated(self) -> bool:
        """Whether any run was calibrated."""
        return any(run.assessment.calibration is not None for method in self.methods for run in method.runs)

    @property
    def target_rates(self) -> list[float]:
        """Boundaries per symbol that methods with a choice aim at, each once."""
        return sorted({mean_rate(run.config.rate) for method in self.methods for run in method.runs})
