"""The comparison, from top to bottom: one trajectory, some moments, all estimators on the same text."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config import registry
from tokenv.config.components import Components, build_components
from tokenv.config.hardware import check_draws, prepare
from tokenv.config.schema import IDENTITY, Config
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.rates import mean_rate
from tokenv.data.corpus import load_corpus
from tokenv.env.rollout import rollout
from tokenv.estimators.statistics import policy_objective
from tokenv.evaluation.run_state import RunState
from tokenv.lab.costs import measure_costs
from tokenv.lab.credit_distance import credit_by_distance
from tokenv.lab.gradient_statistics import moments
from tokenv.lab.gradients import COMPONENTS, ENUMERABLE, GradientProblem, draw_gradient, true_gradient
from tokenv.lab.variance_config import Specification, VarianceOptions, parse
from tokenv.storage import checkpoints
from tokenv.storage.checksummed import fingerprint, load_tensors, read_json, save_tensors, write_json
from tokenv.storage.checksums import file_digest
from tokenv.training.trainer import train

Result = dict[str, Any]


def run_variance_study(options: VarianceOptions, folder: Path, progress: bool = False) -> Result:
    """Score all estimators at all moments.

    Everything that is done is written to ``folder`` at once; called again with the same folder, it goes on from there.

    Args:
        options: what to compare.
        folder: for the trajectory's checkpoints and the results.
        progress: show bars.

    Returns:
        ``moments``: a list with ``symbols``, ``bits_per_byte``, ``credit`` and, under ``estimators``, by label either
        ``refused`` (why) or ``components`` with value and standard error of every figure of ``statistics.Moments``;
        ``costs`` by label; ``reference``: how the truth was found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prepare(options.config.hardware)
    store = folder / "variance.json"
    owner = options.identity
    result: Result = read_json(store, owner) if store.is_file() else {"moments": [], "costs": {}}

    def keep() -> None:
        write_json(store, result, owner, indent=1)

    exact = options.length <= ENUMERABLE
    result["reference"] = "enumeration" if exact else options.reference
    found = _trajectory(options, folder, progress)
    symbol_BN = _text(options)
    bar = tqdm(found, desc="moments", unit="moment", disable=not progress)
    for number, path in enumerate(bar):
        parts, state = _load(options.config, path)
        scene = GradientProblem(parts, symbol_BN.to(parts.lm.head.weight.device), options.noise_seed)
        if len(result["moments"]) <= number:
            seen: Result = {"symbols": state.symbols, "bits_per_byte": state.loss, "estimators": {}}
            result["moments"].append(seen)
        moment = result["moments"][number]
        if moment["symbols"] != state.symbols:
            raise UserError(
                f"{store}: moment {number + 1} is of {moment['symbols']:,} symbols, {path} of {state.symbols:,}: the "
                "run has other checkpoints now: start the comparison anew"
            )
        with scene.frozen():
            missing = [s for s in options.specifications if s.label not in moment["estimators"]]
            kept = folder / f"reference-{number}.safetensors"
            reference = _reference(options, scene, path, kept, progress) if missing else {}
            for specification in tqdm(missing, desc="estimators", leave=False, disable=not progress):
                moment["estimators"][specification.label] = _score(options, scene, specification, reference, progress)
                keep()
            if "credit" not in moment and options.credit_draws:
                generator = torch.Generator(scene.symbol_BN.device).manual_seed(options.noise_seed + 1)
                moment["credit"] = asdict(credit_by_distance(scene, options.credit_draws, generator))
                keep()
    untimed = [s for s in options.specifications if s.label not in result["costs"] and _valid(result, s.label)]
    if untimed:
        # Ratios are only of one run: if anything is missing, all are timed again.
        built = {s.label: _build(options, scene.device, s) for s in options.specifications if _valid(result, s.label)}
        rate = mean_rate(options.config.rate)
        costs = measure_costs(parts, built, scene.symbol_BN, rate=rate, repeats=options.timings, progress=progress)
        result["costs"] = {label: asdict(cost) for label, cost in costs.items()}
        keep()
    return result


def check_estimators(options: VarianceOptions) -> None:
    """Refuse estimators that cannot be built, before work starts; nothing of a model is built.

    Raises:
        UserError: an option is unknown or out of range, the reference is biased, or the whole cannot fit in memory.
    """
    config, device = options.config, torch.device("meta")
    built = [_build(options, device, specification) for specification in options.specifications]
    if options.length > ENUMERABLE:
        built.append(_build_reference(options, device))
    data, training = replace(config.data, seq_len=options.length), replace(config.train, batch_size=options.batch_size)
    samples = max(estimator.sampling.samples for estimator in built)
    check_draws(replace(config, data=data, train=training), max(options.draws, options.reference_draws), samples)


def _valid(result: Result, label: str) -> bool:
    return "refused" not in result["moments"][-1]["estimators"][label]


def _trajectory(options: VarianceOptions, folder: Path, progress: bool) -> list[Path]:
    """Checkpoints of the moments, earliest first."""
    if options.run:
        found = checkpoints.list_complete(Path(options.run) / "checkpoints")
        if not found:
            raise MissingFileError(f"run = {options.run!r} has no checkpoint")
        wanted = {round((i + 1) * len(found) / options.checkpoints) - 1 for i in range(options.checkpoints)}
        return [found[i] for i in sorted(wanted) if i >= 0]
    every = -(-options.config.train.symbols // options.checkpoints)
    config = replace(
        options.config,
        checkpoint=replace(options.config.checkpoint, every_symbols=every, keep=options.checkpoints + 1),
        validation=replace(options.config.validation, every_symbols=every),
    )
    saved = checkpoints.list_complete(folder / "checkpoints")
    if not saved or RunState.read(saved[-1]).symbols < config.train.symbols:
        resume = checkpoints.load(saved[-1]) if saved else None
        train(config, folder / "checkpoints", _discard_metric, resume=resume, progress=progress)
    found = checkpoints.list_complete(folder / "checkpoints")[-options.checkpoints :]
    for path in found:
        if fingerprint(_identity(RunState.read(path).settings)) != fingerprint(_identity(config)):
            raise UserError(f"{path}: of another run than {folder} compares estimators on: start the comparison anew")
    return found


def _identity(config: Config) -> Result:
    return {key: value for key, value in config.as_dict().items() if key in IDENTITY}


def _discard_metric(name: str, value: float, step: int) -> None:
    """The trajectory's own metrics are in its checkpoints."""


def _load(config: Config, path: Path) -> tuple[Components, RunState]:
    tensors, stored = checkpoints.load_model(path)
    state = RunState.from_dict(stored, path)
    parts = build_components(replace(state.settings, hardware=config.hardware), pretrained=False)
    checkpoints.check_tensors(tensors, parts.state_dict(), path / checkpoints.MODEL)
    parts.load_state_dict(tensors)
    parts.train()  # the policy as it is trained: with its softcap
    return parts, state


def _text(options: VarianceOptions) -> Tensor:
    """Sequences of the training text that the trajectory has not seen in this order."""
    stream = load_corpus(options.config.data).train(seed=options.config.seed + 1_000_003 + options.noise_seed)
    return stream.next(options.batch_size).symbol_BN[:, : options.length]


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
        raise UserError(f"reference = {options.reference!r} is biased: expected an unbiased estimator, gamma=1")
    return estimator


def _reference(
    options: VarianceOptions, scene: GradientProblem, checkpoint: Path, path: Path, progress: bool
) -> dict[str, Tensor]:
    """The true gradient [1, d], or unbiased draws of it [m, d], of every component at one checkpoint."""
    owner = [options.identity, file_digest(checkpoint / checkpoints.MODEL)]
    if path.is_file():
        return load_tensors(path, owner)
    if options.length <= ENUMERABLE:
        reference = {name: value.unsqueeze(0) for name, value in true_gradient(scene).items()}
    else:
        estimator = _build_reference(options, scene.device)
        reference = _draw(scene, estimator, options.reference_draws, options.noise_seed + 2, progress)
    save_tensors(reference, path, owner)
    return reference


def _draw(scene: GradientProblem, estimator: Any, draws: int, seed: int, progress: bool) -> dict[str, Tensor]:
    generator = torch.Generator(scene.symbol_BN.device).manual_seed(seed)
    rows: dict[str, list[Tensor]] = {name: [] for name in COMPONENTS}
    for _ in tqdm(range(draws), desc="draws", leave=False, disable=not progress):
        for name, value in draw_gradient(scene, estimator, generator).items():
            rows[name].append(value.cpu())
    return {name: torch.stack(values) for name, values in rows.items()}


def _score(
    options: VarianceOptions,
    scene: GradientProblem,
    specification: Specification,
    reference: dict[str, Tensor],
    progress: bool,
) -> Result:
    """One estimator at one moment."""
    estimator = _build(options, scene.device, specification)
    if estimator.requires_factorised_policy and scene.parts.agent.autoregressive:
        return {"refused": "biased for policies that read earlier boundaries"}
    _warm_up(options, scene, estimator)
    draws = _draw(scene, estimator, options.draws, options.noise_seed + 3, progress)
    components = {
        name: {key: [m["value"], m["error"]] for key, m in asdict(moments(draws[name], reference[name])).items()}
        for name in COMPONENTS
    }
    return {"unbiased": estimator.unbiased, "components": components}


def _warm_up(options: VarianceOptions, scene: GradientProblem, estimator: Any) -> None:
    """Let an estimator with a state of its own get used to this moment, on other text."""
    parameters = list(estimator.parameters())
    if not parameters and not list(estimator.buffers()):
        return
    stream = load_corpus(options.config.data).train(seed=options.config.seed + 2_000_003 + options.noise_seed)
    generator = torch.Generator(scene.symbol_BN.device).manual_seed(options.noise_seed + 4)
    optimizer = torch.optim.Adam(parameters, lr=1e-2) if parameters else None
    parts = scene.parts
    estimator.train()
    for _ in range(options.warmup):
        symbol_BN = stream.next(options.batch_size).symbol_BN[:, : options.length].to(scene.symbol_BN.device)
        td = rollout(parts.lm, parts.agent, symbol_BN, generator=generator, sampling=estimator.sampling)
        loss = policy_objective(estimator(td))
        if optimizer is not None:
            grads = torch.autograd.grad(loss, parameters)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
    estimator.eval()  # the draws themselves must not teach it
