"""The variance study: one trajectory, some of its checkpoints, and all estimators on the same text."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm

from tokenv.config import registry
from tokenv.config.components import Components
from tokenv.config.hardware import check_draws, prepare
from tokenv.core import checkpoints
from tokenv.core.checkpoints import (
    load_measured_tensors,
    read_json,
    save_measured_tensors,
    write_json,
)
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.expectations import policy_objective
from tokenv.core.rates import mean_rate
from tokenv.core.run_folders import file_digest
from tokenv.data.corpus import load_corpus
from tokenv.env.rollout import rollout
from tokenv.evaluation.run_state import RunState, load_components
from tokenv.lab import gradients
from tokenv.lab.config import Specification, VarianceOptions, parse
from tokenv.lab.costs import measure_costs
from tokenv.lab.gradients import COMPONENTS, MAX_ENUMERABLE, GradientProblem
from tokenv.training.trainer import train

Result = dict[str, Any]


def run_variance_study(options: VarianceOptions, folder: Path, progress: bool = False) -> Result:
    """Score all estimators at all checkpoints.

    Every result is written to ``folder`` at once; called again with the same folder, the study resumes.

    Args:
        options: what to compare.
        folder: folder for the trajectory's checkpoints and the results.
        progress: whether to show bars.

    Returns:
        ``moments``: for each checkpoint ``symbols``, ``bits_per_byte``, ``credit`` and, under ``estimators``, by label
        either ``refused`` (the reason) or ``components`` with value and standard error of every figure of
        ``gradient_statistics``; ``costs`` by label; ``reference``: how the true gradient was estimated.
    """
    return VarianceStudy(options, folder, progress).run()


def check_estimators(options: VarianceOptions) -> None:
    """Check that all estimators can be built, before work starts; no model is built.

    Raises:
        UserError: an option is unknown or out of range, the reference is biased, or the study cannot fit in memory.
    """
    config = options.config
    device = torch.device("meta")
    estimators = [
        _build(options, device, specification) for specification in options.specifications
    ]
    if options.length > MAX_ENUMERABLE:
        estimators.append(_build_reference(options, device))
    data = replace(config.data, seq_len=options.length)
    training = replace(config.train, batch_size=options.batch_size)
    samples = max(estimator.sampling.samples for estimator in estimators)
    check_draws(
        replace(config, data=data, train=training),
        max(options.draws, options.reference_draws),
        samples,
    )


class VarianceStudy:
    """A study whose results are kept in a folder; see ``run_variance_study`` for the arguments.

    Attributes:
        result: results so far, as ``run_variance_study`` returns them.
    """

    def __init__(self, options: VarianceOptions, folder: Path, progress: bool) -> None:
        self.options = options
        self.folder = folder
        self._identity = options.identity
        self._bar = partial(tqdm, leave=False, disable=not progress)
        self._progress = progress
        self._path = folder / "variance.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.result: Result = {"moments": [], "costs": {}}
        if self._path.is_file():
            self.result = read_json(self._path, self._identity)

    def run(self) -> Result:
        """Measure all that is missing, and return the results."""
        options = self.options
        result = self.result
        prepare(options.config.hardware)
        result["reference"] = (
            "enumeration" if options.length <= MAX_ENUMERABLE else options.reference
        )
        paths = self.train_trajectory()
        symbol_BN = next(_texts(options, 1_000_003 + options.noise_seed))
        for number, path in enumerate(
            self._bar(paths, desc="checkpoints", unit="checkpoint", leave=True)
        ):
            # the policy with its softcap
            components, state = load_components(path, lambda _: options.config.hardware)
            problem = GradientProblem(
                components, symbol_BN.to(components.lm.head.weight.device), options.noise_seed
            )
            if len(result["moments"]) <= number:
                result["moments"].append(
                    {"symbols": state.symbols, "bits_per_byte": state.loss, "estimators": {}}
                )
            entry = result["moments"][number]
            if entry["symbols"] != state.symbols:
                raise UserError(
                    f"{self._path}: checkpoint {number + 1} is of {entry['symbols']:,} symbols, {path} of "
                    f"{state.symbols:,}: the run has other checkpoints now: start the comparison anew"
                )
            with problem.frozen():
                self.score_estimators(
                    problem, entry, path, self.folder / f"reference-{number}.safetensors"
                )
        self.time_estimators(components, problem.symbol_BN)
        return result

    def train_trajectory(self) -> list[Path]:
        """Train the trajectory unless it is there, and return its checkpoints, earliest first."""
        options = self.options
        folder = self.folder / "checkpoints"
        if options.run:
            paths = checkpoints.list_complete(Path(options.run) / "checkpoints")
            if not paths:
                raise MissingFileError(f"run = {options.run!r} has no checkpoint")
            counts = np.linspace(0, len(paths), options.checkpoints + 1).round().astype(int)
            return [paths[count - 1] for count in np.unique(counts) if count > 0]
        every = -(-options.config.train.symbols // options.checkpoints)
        config = replace(
            options.config,
            checkpoint=replace(
                options.config.checkpoint, every_symbols=every, keep=options.checkpoints + 1
            ),
            validation=replace(options.config.validation, every_symbols=every),
        )
        saved = checkpoints.list_complete(folder)
        if not saved or RunState.read(saved[-1]).symbols < config.train.symbols:
            resume = None
            if saved:
                resume = checkpoints.load(saved[-1])
            # Its metrics are in the checkpoints.
            train(config, folder, lambda *_: None, resume=resume, progress=self._progress)
        paths = checkpoints.list_complete(folder)[-options.checkpoints :]
        for path in paths:
            if RunState.read(path).settings.identity() != config.identity():
                raise UserError(
                    f"{path}: of another run than {self.folder} compares estimators on: start the comparison anew"
                )
        return paths

    def score_estimators(
        self, problem: GradientProblem, entry: Result, checkpoint: Path, path: Path
    ) -> None:
        """Score the estimators which are missing at a checkpoint, and measure credit by distance.

        Args:
            problem: parameters and text.
            entry: results of this checkpoint, which grow.
            checkpoint: the checkpoint.
            path: file which holds the reference gradients.
        """
        options = self.options
        missing = [each for each in options.specifications if each.label not in entry["estimators"]]
        reference = {}
        if missing:
            reference = self.reference_gradients(problem, checkpoint, path)
        for specification in self._bar(missing, desc="estimators"):
            entry["estimators"][specification.label] = self.score(problem, specification, reference)
            self._save()
        if "credit" not in entry and options.credit_draws:
            generator = problem.generator(options.noise_seed + 1)
            entry["credit"] = gradients.credit_by_distance(problem, options.credit_draws, generator)
            self._save()

    def reference_gradients(
        self, problem: GradientProblem, checkpoint: Path, path: Path
    ) -> dict[str, Tensor]:
        """Return the true gradient [1, d], or unbiased draws of it [m, d], of every component: on the CPU."""
        options = self.options
        owner = [self._identity, file_digest(checkpoint / checkpoints.MODEL)]
        measured = load_measured_tensors(path, owner)
        if measured is not None:
            return measured
        if options.length <= MAX_ENUMERABLE:
            exact = TensorDict(gradients.true_gradient(problem))
            reference = exact.cpu().unsqueeze(0).to_dict()
        else:
            estimator = _build_reference(options, problem.device)
            reference = self.draw_gradients(
                problem, estimator, options.reference_draws, options.noise_seed + 2
            )
        save_measured_tensors(reference, path, owner)
        return reference

    def score(
        self, problem: GradientProblem, specification: Specification, reference: dict[str, Tensor]
    ) -> Result:
        """Return the figures of one estimator at one checkpoint."""
        options = self.options
        estimator = _build(options, problem.device, specification)
        if estimator.requires_factorised_policy and problem.components.agent.autoregressive:
            return {"refused": "biased for policies that read earlier boundaries"}
        _warm_up(options, problem, estimator)
        draws = self.draw_gradients(problem, estimator, options.draws, options.noise_seed + 3)
        components = {
            name: gradients.gradient_statistics(draws[name], reference[name]) for name in COMPONENTS
        }
        return {"unbiased": estimator.unbiased, "components": components}

    def draw_gradients(
        self, problem: GradientProblem, estimator: Any, draws: int, seed: int
    ) -> dict[str, Tensor]:
        """Return gradients of every component: [draws, d] on the CPU."""
        generator = problem.generator(seed)
        drawn = [
            TensorDict(gradients.draw_gradient(problem, estimator, generator)).cpu()
            for _ in self._bar(range(draws), desc="draws")
        ]
        return TensorDict.stack(drawn).to_dict()

    def time_estimators(self, components: Components, symbol_BN: Tensor) -> None:
        """Measure the costs of all estimators, all again if any is missing: ratios are valid within one measurement."""
        options = self.options
        scores = self.result["moments"][-1]["estimators"]
        timed = [each for each in options.specifications if "refused" not in scores[each.label]]
        if all(each.label in self.result["costs"] for each in timed):
            return
        estimators = {each.label: _build(options, symbol_BN.device, each) for each in timed}
        self.result["costs"] = measure_costs(
            components,
            estimators,
            symbol_BN,
            rate=mean_rate(options.config.rate),
            repeats=options.timings,
            progress=self._progress,
        )
        self._save()

    def _save(self) -> None:
        write_json(self._path, self.result, self._identity, indent=1)


def _texts(options: VarianceOptions, seed: int) -> Iterator[Tensor]:
    """Yield sequences of the training text [B, N], in another order than the trajectory's."""
    stream = load_corpus(options.config.data).train(seed=options.config.seed + seed)
    while True:
        yield stream.next(options.batch_size).symbol_BN[:, : options.length]


def _build(options: VarianceOptions, device: torch.device, specification: Specification) -> Any:
    config = options.config
    context = {
        "width": config.model.width,
        "rate": mean_rate(config.rate),
        "seq_len": options.length,
        "gamma": options.gamma,
    }
    torch.manual_seed(options.noise_seed)
    with device:
        return registry.build("estimator", specification.options, registry.ESTIMATORS, **context)


def _build_reference(options: VarianceOptions, device: torch.device) -> Any:
    estimator = _build(options, device, parse(options.reference, options.gamma))
    if not estimator.unbiased:
        raise UserError(
            f"reference = {options.reference!r} is biased: expected an unbiased estimator, gamma=1"
        )
    return estimator


def _warm_up(options: VarianceOptions, problem: GradientProblem, estimator: Any) -> None:
    """Adapt the state of an estimator, if it has one, to the checkpoint, on other text than it is scored on."""
    parameters = list(estimator.parameters())
    if not parameters and not list(estimator.buffers()):
        return
    texts = _texts(options, 2_000_003 + options.noise_seed)
    generator = problem.generator(options.noise_seed + 4)
    optimizer = None
    if parameters:
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
    components = problem.components
    estimator.train()
    for _ in range(options.warmup):
        symbol_BN = next(texts).to(problem.device)
        td = rollout(
            components.lm, components.agent, symbol_BN, estimator.sampling, generator=generator
        )
        loss = policy_objective(estimator(td))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward(inputs=parameters)
            optimizer.step()
    estimator.eval()  # its state stays the same during the draws
