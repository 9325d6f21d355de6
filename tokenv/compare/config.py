"""Options of a comparison, and how they are read from YAML files and the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tokenv.config.class_options import options_given_up
from tokenv.config.files import merge, resolve
from tokenv.config.schema import EARLY_WEIGHT, Config
from tokenv.core.conversion import check_keys, convert, from_dict
from tokenv.core.errors import COUNT, UserError, at_least, bounds, check_bounds, suggest
from tokenv.core.rates import check_rates
from tokenv.data.kinds import forecast_hint

# sections which a run takes from the run named by ``init_from``
LOADED_SECTIONS = ("model", "codec")
# a single value stands for a list of one
LISTS = ("base", "only", "skip", "runs", "only_protocols", "rates")
SEEDS = ("seeds", "tune_seeds")  # where a single value would be taken for a number of seeds

EXECUTOR = bounds(
    "local, dask:ADDRESS (such as dask:tcp://10.0.0.1:8786) or slurm:FILE (a YAML file of submitit's parameters)",
    lambda name: re.fullmatch(r"local|(dask|slurm):.+", name) is not None,
)


def _each_once(values: Sequence[float]) -> bool:
    return len(set(values)) == len(values)


UNIQUE_SEEDS = bounds("whole numbers, every seed once, such as seeds=[0,1,2]", _each_once)
UNIQUE_TUNE_SEEDS = bounds(
    "whole numbers, every seed once, such as tune_seeds=[100,101]", _each_once
)
UNIQUE_RATES = bounds(
    "boundaries per symbol, every rate once, such as rates=[0.05,0.1,0.2]", _each_once
)


@dataclass(frozen=True)
class Task:
    """A run which a comparison needs.

    Attributes:
        method: name of its method.
        config: configuration of the run.
        evaluation_request: what is to be measured of the run; None for nothing.
        protocol: protocol to which the run belongs; empty for a comparison without protocols.
    """

    method: str
    config: Config
    evaluation_request: EvaluationRequest | None
    protocol: str = ""

    @property
    def label(self) -> str:
        """Name of the run for messages."""
        return f"{self.protocol}: {self.method}, seed {self.config.seed}".removeprefix(": ")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure of a finished run.

    Attributes:
        passages: number of held-out sequences to store with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary which boundaries in text are compared with.
        calibrate: whether to measure at exactly the target rate; see ``tokenv.evaluation.calibration``.
        rates: further boundary rates to measure at, in boundaries per symbol.
        forecast: forecasts to score, as the kind of data describes them (``DataKind.forecast``); None for none.
    """

    passages: int = 3
    bpe_vocabulary: int = 32_000
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    forecast: Any = field(default=None, metadata={"hint": forecast_hint})

    def __post_init__(self) -> None:
        object.__setattr__(self, "forecast", convert(self.forecast, forecast_hint(), "forecast"))


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``tokenv compare``.

    Args:
        base: configuration which all methods share: a file or name, or several.
        common: changes of it for all methods.
        methods: name of a method to its own changes. A name may hold any character.
        seeds: seeds of the runs of every method.
        only: methods to run and show; all if empty.
        skip: methods to leave out.
        jobs: runs at a time on this machine, each on a GPU of its own if runs use GPUs; schedulers of other machines
            decide themselves.
        runs_per_gpu: runs which may use a GPU at the same time; small models leave much of one idle. The same number
            holds for all comparisons on a machine: one with a larger number gives company to the runs of the others.
        executor: where runs are trained: ``local``, on this machine; ``dask:ADDRESS``, by the workers of a dask
            scheduler; ``slurm:FILE``, as jobs of Slurm, whose parameters are in a YAML file. See ``docs/scale.md``.
        ranks: processes of one run, each with a GPU, started by torchrun; 1 for a plain process.
        store: folder of Sacred runs, in which finished runs are looked up and new ones are stored.
        runs: folders of existing runs to compare instead; then nothing is trained, and ``base``, ``common``,
            ``methods`` and ``seeds`` are not read.
        passages: held-out sequences to show with the boundaries of every method: text coloured, series drawn.
        bpe_vocabulary: size of the BPE vocabulary with which boundaries in text are compared.
        calibrate: compare learning methods at exactly their target rate, and show the figures before calibration
            beside; see ``tokenv.evaluation.calibration``.
        rates: boundaries per symbol, such as [0.05, 0.1, 0.2], at which every method is measured, too, to draw the loss
            against the cost of reading: conditioned on the rate if a run has a range, and with logits shifted until
            other held-out data have it, or half of the data if there are no others (docs/rates.md). Empty for none.
        forecast: forecasts of test windows to score, of series, beside naive baselines and DLinear: a section of
            horizon (null for all which a run's direct head predicts), windows (0 for all), direct, samples, season and
            peers, as in ``tokenv forecast``; null for none.
        reference: method against which all others are tested, so that Holm's correction counts these pairs alone;
            empty for every pair.
        equal_decoder_passes: whether ``train.batch_size`` counts passes through the decoder: a method which draws K
            samples of a text reads ``batch_size`` / K texts in an update, and makes as many updates.
        pretrain: run whose language model all methods start from (``init_from``), as changes of ``base``; trained
            once, and found again in ``store``. Methods which change ``model`` or ``codec`` start from another, trained
            alike. Empty for none.
        tune: dotted key to the values to try for every method which does not set it, on ``tune_seeds``; the value with
            the lowest mean loss is taken. Keys of the policy, such as ``train.agent_learning_rate``, are tuned only for
            methods which learn.
        tune_seeds: seeds used for tuning only.
        protocols: name to changes of all of the above; each is a comparison of its own with the same methods, and a
            summary compares the methods in all of them. Empty for one comparison.
        only_protocols: protocols to run and show; all if empty.

    Raises:
        UserError: there is nothing to compare, or a value is out of range.
    """

    base: list[str] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict, metadata={"holds": Config})
    methods: dict[str, Any] = field(default_factory=dict, metadata={"each": Config})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata=UNIQUE_SEEDS)
    only: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    jobs: int = field(default=1, metadata=COUNT)
    runs_per_gpu: int = field(default=1, metadata=COUNT)
    executor: str = field(default="local", metadata=EXECUTOR)
    ranks: int = field(default=1, metadata=COUNT)
    store: str = "runs"
    runs: list[str] = field(default_factory=list)
    passages: int = field(default=3, metadata=at_least(0))
    bpe_vocabulary: int = field(default=32_000, metadata=at_least(256))
    calibrate: bool = False
    rates: list[float] = field(default_factory=list, metadata=UNIQUE_RATES)
    forecast: Any = field(default=None, metadata={"hint": forecast_hint})
    reference: str = ""
    equal_decoder_passes: bool = False
    pretrain: dict[str, Any] = field(default_factory=dict, metadata={"holds": Config})
    tune: dict[str, Any] = field(default_factory=dict)
    tune_seeds: list[int] = field(default_factory=lambda: [100, 101], metadata=UNIQUE_TUNE_SEEDS)
    protocols: dict[str, Any] = field(default_factory=dict, metadata={"each": Self})
    only_protocols: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forecast", convert(self.forecast, forecast_hint(), "forecast"))
        if not self.runs and not self.methods:
            raise UserError(
                "methods is missing, so there is nothing to compare: expected a comparison, such as compare-quick, or "
                "runs=[runs/1,runs/2]"
            )
        if not self.runs and not self.seeds:
            raise UserError("seeds = []: expected at least one whole number, such as seeds=[0,1,2]")
        if self.calibrate and self.forecast is not None:
            self.forecast.check_calibrated()
        check_bounds(self)
        check_rates(self.rates)
        _check_tuning(self.tune, self.tune_seeds, self.seeds)
        for name, changes in self.methods.items():
            if not isinstance(changes, dict):
                raise UserError(
                    f"methods.{name} = {changes!r}: expected a section of what it changes, {{}} for nothing"
                )
        self._check_names()

    def _check_names(self) -> None:
        """Raise an error for a method or a protocol which is named, but not defined."""
        if not self.runs:
            named = {"only": self.only, "skip": self.skip}
            if self.reference:
                named["reference"] = [self.reference]
            for key, names in named.items():
                for name in names:
                    if name not in self.methods:
                        raise UserError(
                            f"{key} names {name!r}, which is no method: {suggest(name, self.methods)}"
                        )
        for name in self.only_protocols:
            if name not in self.protocols:
                hint = "leave it out, for this comparison has none"
                if self.protocols:
                    hint = suggest(name, self.protocols)
                raise UserError(f"only_protocols names {name!r}, which is no protocol: {hint}")

    @property
    def evaluation_request(self) -> EvaluationRequest:
        """What is to be measured of every run."""
        return EvaluationRequest(
            self.passages, self.bpe_vocabulary, self.calibrate, self.rates, self.forecast
        )

    @property
    def selected_methods(self) -> dict[str, Any]:
        """Methods to run, in order."""
        chosen = set(self.only or self.methods) - set(self.skip)
        return {name: changes for name, changes in self.methods.items() if name in chosen}

    def split_protocols(self) -> dict[str, CompareOptions]:
        """Return the options of each protocol which has methods, by its name; without protocols, these under "".

        Raises:
            UserError: a protocol has an unknown key or a wrong value, or none has a method to run.
        """
        if not self.protocols:
            return {"": self}
        values = asdict(self) | {"protocols": {}, "only_protocols": []}
        protocols = {}
        for name, changes in self.protocols.items():
            if self.only_protocols and name not in self.only_protocols:
                continue
            if not isinstance(changes, dict):
                raise UserError(
                    f"protocols.{name} = {changes!r}: expected a section of what it changes"
                )
            check_keys(changes, f"protocols.{name}", CompareOptions)
            options = from_dict(CompareOptions, merge(values, as_lists(changes)))
            if options.selected_methods:
                protocols[name] = options
        if not protocols:
            raise UserError(
                f"only = {self.only!r}: skip leaves out all of these in every protocol; name others"
            )
        return protocols

    def make_task(
        self,
        method: str,
        seed: int,
        *,
        start: Path | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Task:
        """Return one run.

        Args:
            method: name of its method.
            seed: seed of the run.
            start: folder of the pretrained run; None before it is trained.
            changes: further changes of the configuration.

        Raises:
            ValueError: the method's configuration has an unknown key or a wrong value.
        """
        check_keys(self.methods[method], f"methods.{method}", Config)
        values = merge(
            merge(merge(self.common, self.methods[method]), changes or {}), {"seed": seed}
        )
        if start is not None:
            values = merge(values, {"init_from": str(start)})
        elif self.pretrain:
            values = merge(values, {"init_from": None, "freeze_lm": False})
        config = resolve(self.base, values)
        if self.equal_decoder_passes:
            config = with_equal_decoder_passes(config)
        return Task(method, config, self.evaluation_request)

    def options_given_up(self) -> list[str]:
        """Return in sentences which options of the base the methods lose by naming another class."""
        base = resolve(
            self.base, merge(self.common, {"init_from": None, "freeze_lm": False})
        ).as_dict()
        sentences = []
        for method in self.selected_methods:
            given_up = options_given_up(base, merge(base, self.methods[method]))
            sentences += [f"{method}: {sentence}" for sentence in given_up]
        return sentences

    def make_tasks(
        self,
        starts: Mapping[str, Path] | None = None,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Task]:
        """Yield all runs: every method with the first seed, then with the second, so that early results show all.

        Args:
            starts: method to the folder of its pretrained run; None before these are trained.
            changes: method to further changes of its configuration.

        Raises:
            ValueError: a method's configuration has an unknown key or a wrong value.
        """
        for seed in self.seeds:
            for method in self.selected_methods:
                start = (starts or {}).get(method)
                own = (changes or {}).get(method)
                yield self.make_task(method, seed, start=start, changes=own)

    def make_pretraining_task(self, method: str) -> Task:
        """Return the run from which a method starts, with the method's own model and codec."""
        check_keys(self.pretrain, "pretrain", Config)
        own = {
            key: self.methods[method][key] for key in LOADED_SECTIONS if key in self.methods[method]
        }
        if own:
            label = f"shared model of {method}"
        else:
            label = "shared model"
        early_exit = {"loss": {"early": EARLY_WEIGHT}}  # methods which start from it may need one
        return Task(label, resolve(self.base, merge(early_exit, merge(self.pretrain, own))), None)

    def make_pretraining_tasks(self) -> dict[str, Task]:
        """Return the run from which each method starts; none without ``pretrain``."""
        if self.pretrain:
            return {method: self.make_pretraining_task(method) for method in self.selected_methods}
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Return the options with names as values, for Sacred refuses keys with ``=``, ``.`` or a leading ``$``."""
        protocols = [
            {"name": name} | changes | _storable(changes.get("methods"), changes.get("tune"))
            for name, changes in self.protocols.items()
        ]
        return asdict(self) | _storable(self.methods, self.tune) | {"protocols": protocols}


def with_equal_decoder_passes(config: Config) -> Config:
    """Return the same run with ``train.batch_size`` passes through the decoder in an update, for any number a text.

    Args:
        config: configuration of a run whose batch size counts passes.
    """
    # Imported here, for --help reads this module and needs neither.
    import torch

    from tokenv.config.components import build_components

    train = config.train
    passes = build_components(config, torch.device("meta"), read_files=False).passes
    texts = max(
        train.batch_size // max(passes.learning + passes.reward_only + passes.relaxed, 1), 1
    )

    def scale(symbols: int) -> int:
        return max(symbols * texts // train.batch_size, 1)

    return replace(
        config,
        train=replace(
            train,
            batch_size=texts,
            symbols=scale(train.symbols),
            warmup_symbols=scale(train.warmup_symbols),
        ),
        validation=replace(config.validation, every_symbols=scale(config.validation.every_symbols)),
    )


def _check_tuning(tune: Mapping[str, Any], tune_seeds: Sequence[int], seeds: Sequence[int]) -> None:
    for key, values in tune.items():
        if not isinstance(values, list) or not values:
            raise UserError(
                f"tune.{key} = {values!r}: expected a list of values to try, such as [0.003, 0.01, 0.03]"
            )
    if tune and not tune_seeds:
        raise UserError(
            "tune_seeds = []: expected at least one whole number, such as tune_seeds=[100,101]"
        )
    both = set(tune_seeds) & set(seeds)
    if tune and both:
        raise UserError(
            f"tune_seeds = {list(tune_seeds)!r} and seeds = {list(seeds)!r} have {min(both)} in common: "
            "expected seeds that no run is compared on, such as tune_seeds=[100,101]"
        )


def _storable(methods: Mapping[str, Any] | None, tune: Mapping[str, Any] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if methods is not None:
        values["methods"] = [{"name": name} | changes for name, changes in methods.items()]
    if tune is not None:
        values["tune"] = [{"key": key, "values": each} for key, each in tune.items()]
    return values


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with single values as lists where a list is expected, and names as text.

    Raises:
        UserError: a single number stands for seeds: seed 3, or three of them?
    """
    values = dict(values)
    for key in SEEDS:
        seeds = values.get(key, [])
        if isinstance(seeds, int):
            raise UserError(
                f"{key}={seeds}: expected a list, such as {key}=[0,1,2]; {key}=[{seeds}] is one seed"
            )
    for key in LISTS:
        if key in values and not isinstance(values[key], list | tuple):
            values[key] = [values[key]]
    for key in ("only", "skip", "only_protocols"):
        if key in values:
            values[key] = [str(name) for name in values[key]]
    return values | ({"reference": str(values["reference"])} if "reference" in values else {})


def check_same_kind(configs: Mapping[str, Config]) -> None:
    """Raise an error unless all configurations are of one kind of data.

    Args:
        configs: name of a run or method to its configuration.

    Raises:
        UserError: two of them are of different kinds of data; the message names both.
    """
    firsts: dict[str, str] = {}
    for name, config in configs.items():
        firsts.setdefault(config.data.kind, name)
    if len(firsts) > 1:
        (kind, name), (other_kind, other) = firsts.items()
        raise UserError(
            f"{name} is of {kind} and {other} of {other_kind}: expected runs of one data.kind, for the losses of two "
            "are in different units; compare them separately"
        )
