"""What to compare: a comparison's keys and their meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenv.compare.evaluation_request import EvaluationRequest, ForecastRequest
from tokenv.config.conversion import check_keys, from_dict
from tokenv.config.files import merge, resolve
from tokenv.config.schema import EARLY_WEIGHT, Config
from tokenv.core.errors import UserError
from tokenv.core.rates import check_rate

LOADED_SECTIONS = ("model", "codec")  # what a run takes of the one that ``init_from`` names
LISTS = ("base", "seeds", "only", "skip", "runs", "tune_seeds", "only_protocols", "rates")


@dataclass(frozen=True)
class Task:
    """One run to be had.

    Attributes:
        method: its method's name.
        config: the whole run.
        evaluation_request: what is to be measured of it; None for nothing.
        protocol: the part of the comparison that it belongs to; empty where there is but one.
    """

    method: str
    config: Config
    evaluation_request: EvaluationRequest | None
    protocol: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.protocol}: {self.method}, seed {self.config.seed}".removeprefix(": ")


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``tokenv compare``.

    Args:
        base: configuration that all methods share: a file or name, or several.
        common: what all methods change of it.
        methods: method to what it alone changes. A name may hold any character.
        seeds: runs of every method.
        only: methods to run and show; all where empty.
        skip: methods that are not.
        jobs: runs at a time on this machine, each on a GPU of its own where runs take any; schedulers of other machines
            decide themselves.
        executor: where runs are trained: ``local``, on this machine; ``dask:ADDRESS``, by the workers of a dask
            scheduler; ``slurm:FILE``, as jobs of Slurm, whose parameters are in a YAML file. See ``docs/scale.md``.
        ranks: processes of one run, each with a GPU, started by torchrun; 1 for a plain process.
        store: folder of Sacred runs, where finished runs are looked for and new ones are put.
        runs: folders of existing runs to compare instead; then nothing is trained, and ``base``, ``common``,
            ``methods`` and ``seeds`` are not read.
        passages: held-out sequences to show as every method cuts them: text coloured, series drawn.
        bpe_vocabulary: size of the BPE vocabulary that boundaries in text are held against.
        calibrate: hold learning methods against one another at exactly their target rate, and show their raw figures
            beside; see ``tokenv.evaluation.calibration``.
        rates: measure every method at each of these boundaries per symbol besides, such as [0.05, 0.1, 0.2], and draw
            the loss against what reading costs: told the rate where a run has a range, logits shifted until held-out
            data of their own have it, half of them where there are no others (docs/rates.md). Empty for none.
        forecast: forecasts of test windows to score, of series, beside yardsticks and DLinear: a section of horizon
            (null for all that a run's direct head predicts), windows (0 for all), direct, samples, season and peers, as
            in ``tokenv forecast``; null for none.
        reference: a method that all others are tested against, so that Holm's correction counts these pairs alone;
            empty for every pair.
        equal_compute: whether ``train.batch_size`` counts passes through the decoder: a method that draws K samples of
            a text reads ``batch_size`` / K texts in an update, and makes as many updates.
        pretrain: a run whose language model all methods start from (``init_from``), as what it changes of ``base``;
            trained once, and found again in ``store``. Methods that change ``model`` or ``codec`` start from another,
            trained alike. Empty for none.
        tune: dotted key to the values that are tried for every learning method that does not set it, on
            ``tune_seeds``; the one with the lowest mean loss is taken.
        tune_seeds: seeds that nothing but tuning sees.
        protocols: name to what it changes of all of the above; each is a comparison of its own with the same methods,
            and a summary says how methods fare in all of them. Empty for one comparison.
        only_protocols: protocols to run and show; all where empty.

    Raises:
        UserError: there is nothing to compare, or a value is out of range.
    """

    base: list[str] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict, metadata={"holds": Config})
    methods: dict[str, Any] = field(default_factory=dict, metadata={"each": Config})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    only: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    jobs: int = 1
    executor: str = "local"
    ranks: int = 1
    store: str = "runs"
    runs: list[str] = field(default_factory=list)
    passages: int = 3
    bpe_vocabulary: int = 32_000
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    forecast: ForecastRequest | None = None
    reference: str = field(default="", metadata={"was": "against"})
    equal_compute: bool = field(default=False, metadata={"was": "equal_passes"})
    pretrain: dict[str, Any] = field(default_factory=dict, metadata={"holds": Config, "was": "shared"})
    tune: dict[str, Any] = field(default_factory=dict)
    tune_seeds: list[int] = field(default_factory=lambda: [100, 101])
    protocols: dict[str, Any] = field(default_factory=dict, metadata={"each": Self})
    only_protocols: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.runs and not self.methods:
            raise UserError("nothing to compare: expected a comparison, such as compare-quick, or runs=[runs/1,runs/2]")
        if not self.runs and not self.seeds:
            raise UserError("seeds is empty: expected at least one whole number, such as seeds=[0,1,2]")
        for key in ("seeds", "tune_seeds"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise UserError(f"{key} = {getattr(self, key)!r}: expected every seed once, such as {key}=[0,1,2]")
        if not re.fullmatch(r"local|(dask|slurm):.+", self.executor):
            raise UserError(
                f"executor = {self.executor!r}: expected local, dask:ADDRESS (such as dask:tcp://10.0.0.1:8786) or "
                "slurm:FILE (a YAML file of submitit's parameters)"
            )
        for rate in self.rates:
            check_rate("rates", rate)
        if len(set(self.rates)) < len(self.rates):
            raise UserError(f"rates = {self.rates!r}: expected every rate once, such as rates=[0.05,0.1,0.2]")
        _check_tuning(self.tune, self.tune_seeds, self.seeds)
        for name, changes in self.methods.items():
            if not isinstance(changes, dict):
                raise UserError(
                    f"methods.{name} = {changes!r}: expected a section of what it changes, {{}} for nothing"
                )
        for key, names in (
            ("only", self.only),
            ("skip", self.skip),
            ("reference", [self.reference] if self.reference else []),
        ):
            for name in names:
                if name not in self.methods and not self.runs:
                    raise UserError(f"{key} names {name!r}, which is no method: they are {', '.join(self.methods)}")
        for name in self.only_protocols:
            if name not in self.protocols:
                raise UserError(
                    f"only_protocols names {name!r}, which is none: they are {', '.join(self.protocols) or 'not given'}"
                )
        if self.calibrate and self.forecast is not None and not self.forecast.direct:
            raise UserError(
                "calibrate = True with forecast.direct = False: expected direct forecasts, which alone are made at a "
                "shifted rate, or no calibration"
            )
        for name, least in (("jobs", 1), ("ranks", 1), ("passages", 0), ("bpe_vocabulary", 256)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least {least}")

    @property
    def evaluation_request(self) -> EvaluationRequest:
        """What is to be measured of every run."""
        return EvaluationRequest(self.passages, self.bpe_vocabulary, self.calibrate, self.rates, self.forecast)

    @property
    def chosen(self) -> dict[str, Any]:
        """The methods to be run, in order."""
        return {
            name: changes
            for name, changes in self.methods.items()
            if (not self.only or name in self.only) and name not in self.skip
        }

    def parts(self) -> dict[str, CompareOptions]:
        """One comparison a protocol that has methods, by its name; this one under an empty name where there are none.

        Raises:
            UserError: a protocol has an unknown key or a wrong value, or none has a method to run.
        """
        if not self.protocols:
            return {"": self}
        values = asdict(self) | {"protocols": {}, "only_protocols": []}
        found = {}
        for name, changes in self.protocols.items():
            if self.only_protocols and name not in self.only_protocols:
                continue
            if not isinstance(changes, dict):
                raise UserError(f"protocols.{name} = {changes!r}: expected a section of what it changes")
            check_keys(changes, f"protocols.{name}", CompareOptions)
            part = from_dict(CompareOptions, merge(values, as_lists(changes)))
            if part.chosen:
                found[name] = part
        if not found:
            raise UserError(f"only = {self.only!r}: skip leaves out all of these in every protocol; name others")
        return found

    def task(self, method: str, seed: int, *, start: Path | None = None, more: Mapping[str, Any] | None = None) -> Task:
        """One run.

        Args:
            method: which.
            seed: of the run.
            start: folder of the shared run; None before there is one.
            more: what is changed besides.

        Raises:
            ValueError: the method's configuration has an unknown key or a wrong value.
        """
        check_keys(self.methods[method], f"methods.{method}", Config)
        changes = merge(merge(merge(self.common, self.methods[method]), more or {}), {"seed": seed})
        if start is not None:
            changes = merge(changes, {"init_from": str(start)})
        elif self.pretrain:
            changes = merge(changes, {"init_from": None, "freeze_lm": False})
        config = resolve(self.base, changes)
        if self.equal_compute:
            from tokenv.compare.plan import with_equal_compute  # it takes torch, and --help reads this file

            config = with_equal_compute(config)
        return Task(method, config, self.evaluation_request)

    def tasks(
        self, starts: Mapping[str, Path] | None = None, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Iterator[Task]:
        """All runs: every method with the first seed, then with the second, so that an early look compares all.

        Args:
            starts: method to the folder of its shared run; None before there are any.
            more: method to what is changed of it besides.

        Raises:
            ValueError: a method's configuration has an unknown key or a wrong value.
        """
        for seed in self.seeds:
            for method in self.chosen:
                yield self.task(method, seed, start=(starts or {}).get(method), more=(more or {}).get(method))

    def shared_task(self, method: str) -> Task:
        """The run that a method starts from, of its own model and codec."""
        check_keys(self.pretrain, "pretrain", Config)
        own = {key: self.methods[method][key] for key in LOADED_SECTIONS if key in self.methods[method]}
        label = f"shared model of {method}" if own else "shared model"
        early_exit = {"loss": {"early": EARLY_WEIGHT}}  # which methods that start from it may need
        return Task(label, resolve(self.base, merge(early_exit, merge(self.pretrain, own))), None)

    def shared_tasks(self) -> dict[str, Task]:
        """Methods to the runs that they start from; none where there is no ``pretrain``."""
        return {method: self.shared_task(method) for method in self.chosen} if self.pretrain else {}

    def as_dict(self) -> dict[str, Any]:
        """What Sacred stores: names are values in lists, for it refuses keys with ``=``, ``.`` or a leading ``$``."""
        protocols = [
            {"name": name} | changes | _storable(changes.get("methods"), changes.get("tune"))
            for name, changes in self.protocols.items()
        ]
        return asdict(self) | _storable(self.methods, self.tune) | {"protocols": protocols}


def _check_tuning(tune: Mapping[str, Any], tune_seeds: Sequence[int], seeds: Sequence[int]) -> None:
    for key, values in tune.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"tune.{key} = {values!r}: expected a list of values to try, such as [0.003, 0.01, 0.03]")
    if tune and not tune_seeds:
        raise UserError("tune_seeds is empty: expected at least one whole number, such as tune_seeds=[100,101]")
    both = sorted(set(tune_seeds) & set(seeds))
    if tune and both:
        raise UserError(
            f"tune_seeds = {list(tune_seeds)!r} and seeds = {list(seeds)!r} have {both[0]} in common: expected seeds "
            "that tuning has not seen"
        )


def _storable(methods: Mapping[str, Any] | None, tune: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if methods is not None:
        found["methods"] = [{"name": name} | changes for name, changes in methods.items()]
    if tune is not None:
        found["tune"] = [{"key": key, "values": values} for key, values in tune.items()]
    return found


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one value as a list where a list is expected, and names as text."""
    made = dict(values)
    for key in LISTS:
        if key in made and not isinstance(made[key], list | tuple):
            made[key] = [made[key]]
    for key in ("only", "skip", "only_protocols"):
        if key in made:
            made[key] = [str(name) for name in made[key]]
    return made | ({"reference": str(made["reference"])} if "reference" in made else {})
