"""Options of ``tokenv bench`` and ``tokenv variance``, and how an estimator is written as a call."""

import ast
import warnings
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tokenv.config import registry
from tokenv.config.files import merge, nest_key
from tokenv.config.literals import check_plain
from tokenv.config.schema import Config
from tokenv.core.atomic import output
from tokenv.core.conversion import convert, from_dict
from tokenv.core.errors import (
    COUNT,
    POSITIVE,
    SEED,
    SHARE,
    UserError,
    at_least,
    bounds,
    check_bounds,
)

RANKS = "ranks"  # a size which is no key of the configuration
DEFAULT_ESTIMATORS = (
    # the paper's own steps
    "naive",
    "early_exit(gamma=1.0)",
    "early_exit(gamma=GAMMA)",
    "reinforce",
    "leave_one_out",
    # other baselines and scalings
    "moving_average",
    "lambda_return",
    "standardised",
    "off_policy(rollouts=None)",
    # several samples
    "rloo",
    "rloo(reward_only=True)",
    "rloo(num_samples=4, reward_only=True)",
    "reinpatch(gamma=GAMMA)",
    "arm",
    "disarm",
    "arms",
    "bitflip",
    "branch",
    "branch(positions=16)",
    # the model's own gradient
    "rebar",
    "relax",
    "straight",
    "gumbel",
    "reinmax",
    "gumbel_rao",
)

MAY_CHANGE_ON_RESUME = ("estimators", "timings", "resume")

SAMPLES = bounds(
    "whole numbers of at least 2, to measure their spread, such as samples=[2,25,100]",
    lambda numbers: all(number >= 2 for number in numbers),
)
CALLS = bounds(
    "a list of names or calls, such as estimators=[reinforce,rloo]",
    lambda texts: not isinstance(texts, str) and len(texts) > 0,
)
LENGTH = bounds("0 (the run's own) or at least 4", lambda value: value == 0 or value >= 4)


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``tokenv bench``.

    Args:
        config: model, batch (``train.batch_size`` x ``data.seq_len``) and hardware; the data are random bytes.
        repeats: timed rounds; every round times every variant once.
        stepping: whether to step through the environment, too, and compare time and results with the one-pass rollout.
        plain: whether to time a plain transformer in the same rounds: as many layers of the same width, all on all
            bytes, with full attention and the middle's MLP.
        scaling: sizes to measure at instead, by dotted key of the configuration, each in a process of its own, such as
            ``{data.seq_len: [1024, 4096], model.width: [128, 256]}``. With ``ranks: [1, 2, 4]`` so many processes of
            this machine make the same update together.
        rates: boundaries per symbol at which to time reading and writing as well, such as [0.05, 0.2, 0.5].
        samples: numbers of continuations at which to time forecasts of series instead, and those of the direct head
            if the model has one, such as [2, 25, 100].
        horizon: steps of these forecasts.
        plan: whether to predict memory and time on 1, 8 and 64 processors instead, from small updates on the CPU.
        peak_tflops: dense matrix products of one processor in 1e12 FLOPs per second, for ``plan``; 989 is an H100's in
            bfloat16.
        utilisation: share of this peak which training is to reach, for ``plan``.
        out: path of the figures and the picture of ``scaling``, without ending: ``OUT.csv`` and ``OUT.png``.

    Raises:
        UserError: a number is out of range, or ``scaling`` holds something else than lists of sizes of a run.
    """

    config: Config
    repeats: int = field(default=5, metadata=COUNT)
    stepping: bool = True
    plain: bool = False
    scaling: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list, metadata=SAMPLES)
    horizon: int = field(default=24, metadata=COUNT)
    plan: bool = False
    peak_tflops: float = field(default=989.0, metadata=POSITIVE)
    utilisation: float = field(default=0.4, metadata=SHARE)
    out: str = field(default="scaling", metadata=output(".csv", ".png"))

    def __post_init__(self) -> None:
        check_bounds(self)
        for rate in self.rates:
            if not 1 <= rate * self.config.data.seq_len < self.config.data.seq_len:
                raise UserError(
                    f"rates = {rate:g}: expected boundaries per symbol, at least 1 / data.seq_len and below 1, such "
                    "as 0.2"
                )
        others = self.scaling or self.rates
        if self.plan and (self.samples or others):
            raise UserError("plan = True: expected neither samples, scaling nor rates beside it")
        if self.samples and others:
            raise UserError(
                f"samples = {self.samples!r}: expected neither scaling nor rates beside it"
            )
        for key, values in self.scaling.items():
            if (
                not isinstance(values, list)
                or not values
                or not all(type(value) in (int, float) for value in values)
            ):
                raise UserError(
                    f"scaling.{key} = {values!r}: expected a list of sizes, as in "
                    "scaling={data.seq_len: [1024, 4096]}"
                )
        self.sizes()

    def sizes(self) -> list[tuple[str, int | float, Config]]:
        """Return every key and value of ``scaling``, and the configuration with it.

        Raises:
            UserError: a run cannot have this size.
        """
        sizes = []
        for key, values in self.scaling.items():
            for value in values:
                config = self.config
                if key == RANKS:
                    self._check_ranks(value)
                else:
                    config = from_dict(Config, merge(config.as_dict(), nest_key(key, value)))
                sizes.append((key, value, config))
        return sizes

    def _check_ranks(self, value: int | float) -> None:
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"scaling.{RANKS} = {value!r}: expected numbers of processes, such as [1, 2, 4]"
            )
        # imports torch, which help does not need
        from tokenv.config.hardware import BatchAssignment

        BatchAssignment.of(self.config.train, world=value)

    def as_dict(self) -> dict[str, Any]:
        """Return what Sacred stores."""
        options = {name: value for name, value in asdict(self).items() if name != "config"}
        # Sacred's keys hold no dots
        sizes = [{"key": key, "values": values} for key, values in self.scaling.items()]
        return self.config.as_dict() | options | {"scaling": sizes}


@dataclass(frozen=True)
class Specification:
    """An estimator with its options.

    Attributes:
        label: text of the call, with GAMMA replaced by its value.
        options: ``name`` and keyword arguments.
    """

    label: str
    options: dict[str, Any]


def parse(text: str, gamma: float) -> Specification:
    """Read ``name`` or ``name(key=value, ...)``; GAMMA stands for the run's discount factor.

    Raises:
        UserError: the text is no such call, or its name is unknown.
    """
    label = text.replace("GAMMA", f"{gamma:g}")
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            # package.module:Class is not valid Python
            tree = ast.parse(label.replace(":", "."), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("options need names")
        values = {
            keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg
        }
        check_plain(values, "its options")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"estimators: {text[:80]!r} cannot be read ({error}): expected a name or a call such as rloo(num_samples=4)"
        ) from None
    name = label.partition("(")[0].strip()
    registry.find("estimator", name, registry.ESTIMATORS, "estimators")
    return Specification(label, {"name": name} | values)


@dataclass(frozen=True)
class VarianceOptions:
    """Options of ``tokenv variance``.

    Args:
        config: configuration of the trajectory to be trained, or that of ``run``.
        run: run whose checkpoints are measured; if empty, a trajectory is trained.
        checkpoints: number of checkpoints along the trajectory, evenly spaced, the last one at its end.
        estimators: estimators to compare; see ``parse``.
        draws: gradients drawn of each estimator at each checkpoint.
        reference: unbiased estimator against which bias is measured if the sequences are too long for enumeration.
        reference_draws: gradients drawn of the reference.
        batch_size: sequences of one gradient, the same for all estimators.
        seq_len: symbols of a sequence; 0 for the run's own length. Up to 14, all boundaries are enumerated.
        warmup: rollouts on other text, before the draws, for estimators which keep a state.
        timings: timed updates of each estimator, in turn.
        credit_draws: rollouts for the picture of credit by distance; 0 for none.
        noise_seed: seed of the text on which gradients are drawn, and of the noise.
        resume: folder of an earlier, unfinished comparison.
    """

    config: Config
    run: str = ""
    checkpoints: int = field(default=3, metadata=COUNT)
    estimators: tuple[str, ...] = field(default=DEFAULT_ESTIMATORS, metadata=CALLS)
    draws: int = field(default=32, metadata=at_least(4))
    reference: str = "rloo(gamma=1.0, num_samples=8, reward_only=True)"
    reference_draws: int = field(default=64, metadata=at_least(4))
    batch_size: int = field(default=16, metadata=at_least(2))
    seq_len: int = field(default=0, metadata=LENGTH)
    warmup: int = field(default=20, metadata=at_least(0))
    timings: int = field(default=5, metadata=COUNT)
    credit_draws: int = field(default=16, metadata=at_least(0))
    noise_seed: int = field(default=0, metadata=SEED)
    resume: str = ""

    def __post_init__(self) -> None:
        check_bounds(self)
        longest = self.config.data.seq_len
        if self.length > longest:
            raise UserError(
                f"seq_len = {self.seq_len}: expected at most the run's data.seq_len = {longest}"
            )
        for text in self.estimators:
            parse(text, self.gamma)

    @property
    def length(self) -> int:
        """Symbols of a sequence."""
        return self.seq_len or self.config.data.seq_len

    @property
    def identity(self) -> dict[str, Any]:
        """Settings which two comparisons must share for their figures to be comparable."""
        options = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in MAY_CHANGE_ON_RESUME
        }
        return options | {"config": self.config.identity()}

    @property
    def gamma(self) -> float:
        """The run's discount factor, for estimators which take one and are written without.

        Raises:
            UserError: it is not a number.
        """
        return convert(self.config.estimator.get("gamma", 0.99), float, "estimator.gamma")

    @property
    def specifications(self) -> list[Specification]:
        """All estimators, each once.

        Raises:
            ValueError: one cannot be read, or is unknown.
        """
        return list({(s := parse(text, self.gamma)).label: s for text in self.estimators}.values())
