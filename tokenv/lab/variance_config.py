"""What is compared, and how an estimator is written: as a call, ``rloo(gamma=0.9, num_samples=4)``."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field, fields
from typing import Any

from tokenv.config import registry
from tokenv.config.conversion import convert
from tokenv.config.literals import check_plain
from tokenv.config.schema import IDENTITY, Config, check_seed
from tokenv.core.errors import UserError

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


@dataclass(frozen=True)
class Specification:
    """An estimator with its options.

    Attributes:
        label: as it was written, with GAMMA filled in.
        options: ``name`` and keyword arguments.
    """

    label: str
    options: dict[str, Any]


def parse(text: str, gamma: float) -> Specification:
    """Read ``name`` or ``name(key=value, ...)``; GAMMA stands for the run's discount factor.

    Raises:
        UserError: it is no such call, or its name is unknown.
    """
    label = text.replace("GAMMA", f"{gamma:g}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(label.replace(":", "."), mode="eval").body  # package.module:Class is no Python
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        if call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("options need names")
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        check_plain(values, "its options")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"estimators: {text[:80]!r} cannot be read ({error}): expected a name or a call such as rloo(num_samples=4)"
        ) from None
    name = label.partition("(")[0].strip()
    registry.find("estimator", name, registry.ESTIMATORS)
    return Specification(label, {"name": name} | values)


@dataclass(frozen=True)
class VarianceOptions:
    """Options of ``tokenv variance``.

    Args:
        config: the trajectory to be trained, or that of ``run``.
        run: a run whose checkpoints are the moments; a trajectory is trained where empty.
        checkpoints: checkpoints along the trajectory, evenly spaced, the last one at its end.
        estimators: what to compare; see ``parse``.
        draws: gradients drawn of each estimator at each moment.
        reference: the unbiased estimator that bias is measured against where the sequences are too long for
            enumeration.
        reference_draws: gradients drawn of it.
        batch_size: sequences of one gradient; the same ones for all.
        seq_len: symbols of a sequence; 0 for the run's own. Up to 14, all boundaries are enumerated.
        warmup: rollouts on other text, before the draws, for estimators that keep a state.
        timings: full updates of each estimator that are timed, in turn.
        credit_draws: rollouts for the picture of credit by distance; 0 for none.
        noise_seed: of the text that gradients are drawn on, and of the noise.
        resume: folder of an earlier, unfinished comparison.
    """

    config: Config
    run: str = ""
    checkpoints: int = field(default=3, metadata={"was": "moments"})
    estimators: tuple[str, ...] = DEFAULT_ESTIMATORS
    draws: int = 32
    reference: str = "rloo(gamma=1.0, num_samples=8, reward_only=True)"
    reference_draws: int = 64
    batch_size: int = 16
    seq_len: int = 0
    warmup: int = 20
    timings: int = 5
    credit_draws: int = 16
    noise_seed: int = 0
    resume: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.estimators, str):
            raise UserError(f"estimators = {self.estimators!r}: expected a list, such as ['reinforce', 'rloo']")
        low = {"checkpoints": 1, "draws": 4, "reference_draws": 4, "batch_size": 2, "warmup": 0, "timings": 1}
        low |= {"seq_len": 0, "credit_draws": 0}
        for name, least in low.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least {least}")
        check_seed(self.noise_seed, "noise_seed")
        if self.seq_len and self.seq_len < 4:
            raise UserError(f"seq_len = {self.seq_len}: expected 0 (the run's own) or at least 4 symbols")
        if self.length > self.config.data.seq_len:
            raise UserError(
                f"seq_len = {self.seq_len} is longer than the run's data.seq_len = {self.config.data.seq_len}"
            )
        if not self.specifications:
            raise UserError("estimators is empty: expected at least one name, such as ['reinforce']")

    @property
    def length(self) -> int:
        """Symbols of a sequence."""
        return self.seq_len or self.config.data.seq_len

    @property
    def identity(self) -> dict[str, Any]:
        """What two comparisons must have in common for their figures to stand side by side."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in MAY_CHANGE_ON_RESUME}
        return own | {"config": {key: value for key, value in self.config.as_dict().items() if key in IDENTITY}}

    @property
    def gamma(self) -> float:
        """The run's discount factor, for estimators that take one and name none.

        Raises:
            UserError: it is no number.
        """
        found: float = convert(self.config.estimator.get("gamma", 0.99), float, "estimator.gamma")
        return found

    @property
    def specifications(self) -> list[Specification]:
        """All estimators, each once.

        Raises:
            ValueError: one cannot be read, or is unknown.
        """
        return list({(s := parse(text, self.gamma)).label: s for text in self.estimators}.values())
