"""Measure speed, memory and the cost of learning boundaries in training, and the speed of inference."""

import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config import registry
from tokenv.config.components import Components, build_components
from tokenv.config.hardware import prepare, resolve_device
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.sequences import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lab.bench_report import peak_matrix_size, speed_tables
from tokenv.lab.config import RANKS, BenchOptions
from tokenv.lab.costs import (
    bench_ranks,
    count_flops,
    interleave,
    peak_memory,
    set_first_learning_rate,
    time_figures,
    time_once,
)
from tokenv.lm.flops import (
    Batch,
    Passes,
    early_exit_share,
    policy_flops,
    policy_share,
    reading_flops,
)
from tokenv.training.optimizers import make_optimizer, optimizer_flops, optimizer_step
from tokenv.training.update import PassInput, TrainingStep

STAGES = {
    "encoding": keys.ENCODING,
    "boundary probability": keys.BOUNDARY_PROB,
    "early log-likelihood": keys.LOG_LIKELIHOOD_EARLY,
    "log-likelihood": keys.LOG_LIKELIHOOD,
}
PROMPT = 8  # symbols; texts which are written at once
TOGETHER = 64
LONG_PRODUCT = 0.1  # seconds


def bench(options: BenchOptions, *, progress: bool = False) -> dict[str, dict[str, Any]]:
    """Measure updates of the configured run on random bytes.

    Returns:
        ``tables``: printable rows by title; ``figures``: numbers by name.
    """
    config = options.config
    prepare(config.hardware)
    work = UpdateWork(config)
    components = work.components
    device = work.symbol_BN.device
    for _ in range(2):  # the second one with the optimizer's moments
        work.update()
    memory = peak_memory(device)
    variants: dict[str, Callable[[], None]] = {
        "learned": work.update,
        "given": work.update_with_given_boundaries,
        "given_early": partial(work.update_with_given_boundaries, early=True),
        "draw": work.draw,
    }
    if options.plain:
        variants["plain"] = _transformer_work(config).update_with_given_boundaries
    seconds = interleave(variants, options.repeats, device, progress=progress)
    figures = _update_figures(work, seconds) | {"peak_memory_gib": memory}
    if options.rates:
        components.train(False)
        figures["rates"] = bench_generation(components, work.symbol_BN, options, progress=progress)
        components.train(True)
    if options.stepping:
        figures["stepping_over_one_pass"] = _stepping_ratio(work.env, components, device)
        figures["stepping_differences"] = stepping_differences(work.env, components)
    return {"tables": speed_tables(figures, components, config, device), "figures": figures}


def scale(options: BenchOptions, *, progress: bool = False) -> list[dict[str, Any]]:
    """Measure at every value of ``options.scaling``, one key at a time and the rest as configured.

    Returns:
        A row for each value: ``key``, ``value``, and the figures of ``bench``, or for ``ranks`` those
        of ``bench_ranks``.
    """
    rows = []
    for key, value, config in tqdm(
        options.sizes(), desc="scaling", unit="size", disable=not progress
    ):
        if key == RANKS:
            figures: dict[str, Any] = bench_ranks(options, int(value))
        else:
            options_of_size = replace(options, config=config, scaling={}, stepping=False)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                figures = process.submit(bench, options_of_size).result()["figures"]
        rows.append({"key": key, "value": value} | figures)
    return rows


class UpdateWork:
    """The work of updates on random bytes, as a whole and in parts.

    Args:
        config: configuration of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        device = resolve_device(config.hardware.device)
        self.components = components = build_components(config, device)
        components.train()
        agent = components.agent
        rows = config.train.batch_size
        length = config.data.seq_len
        source = TensorSource(torch.randint(0, 256, (rows, length)))
        self.env = TokenizationEnv(
            components.lm, source, rows, window=agent.window, rates=agent.rates
        )
        self._step = TrainingStep(components, config.loss)
        self._seeds = itertools.count()
        self._parameters = components.named_parameters()
        self._optimizer = make_optimizer(config.train, self._parameters)
        set_first_learning_rate(self._optimizer, config)
        self.symbol_BN = source.symbol_BN.to(device)
        with torch.no_grad():
            self._observation = self.env.one_pass(agent)
        self._noise_BT = torch.rand(rows, length - 1, device=device)
        self.action_BT = torch.zeros(rows, length - 1, dtype=torch.bool, device=device)

    def update(self) -> None:
        """Make an update."""
        self.backward()
        self.step()

    def backward(self, noise: Tensor | None = None) -> None:
        """Compute gradients, and keep the boundaries, so that an update with given boundaries is as much work."""
        losses = self._step(PassInput(self.symbol_BN, next(self._seeds), noise=noise))
        losses.total.backward()
        self.action_BT = losses.rollout[keys.ACTION].view(-1, *self.action_BT.shape)[0]

    def step(self) -> None:
        """Make the optimizer's step, which clears the gradients."""
        optimizer_step(self._optimizer, self._parameters, self.config.train.max_grad_norm)

    def update_with_given_boundaries(self, early: bool = False) -> None:
        """Make an ordinary language-model update with given boundaries, with or without the early exit's loss."""
        lm = self.components.lm
        symbol_BN = self.symbol_BN
        x_BTD = lm.encode(symbol_BN)[:, :-1]
        target = symbol_BN[:, 1:]
        loss = -lm.codec.log_prob(lm.decode(x_BTD, self.action_BT), target).mean()
        if early:
            loss = loss - 0.1 * lm.codec.log_prob(lm.early_exit(x_BTD), target).mean()
        loss.backward()
        optimizer_step(self._optimizer, self._parameters, self.config.train.max_grad_norm)

    @torch.no_grad()
    def draw(self) -> None:
        """Draw the boundaries of all sequences."""
        self.components.agent.draw(self._observation, self._noise_BT)


def _update_figures(work: UpdateWork, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the figures of timed updates by name.

    Args:
        work: timed work; its last update gives the number of tokens.
        seconds: seconds of every round by variant, as ``bench`` measures them.
    """
    components = work.components
    batch = Batch(*work.symbol_BN.shape[:2])
    rate = int(work.action_BT.sum()) / batch.symbols
    flops = count_flops(components, batch, rate)
    flops += optimizer_flops(work.config.train, components)
    policy = policy_flops(components.agent)
    given = Passes().tokens(batch, rate)
    peak = _matrix_peak(components, work.symbol_BN.device)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {
        **time_figures(seconds["learned"], batch.symbols),
        "draw_share": median["draw"] / median["learned"],
        "time_over_given": _median_ratio(seconds["learned"], seconds["given"]),
        "time_over_given_with_early_exit": _median_ratio(
            seconds["learned"], seconds["given_early"]
        ),
        "flops_policy_share": policy_share(components.lm, batch, given, policy),
        "flops_early_exit_share": early_exit_share(components.lm, batch, given),
        "model_tflops_per_second": flops / median["learned"] / 1e12,
        "matrix_peak_tflops_per_second": peak / 1e12,
        "model_flops_utilisation": flops / median["learned"] / peak,
    }
    if "plain" in seconds:
        figures["plain_over_learned"] = _median_ratio(seconds["plain"], seconds["learned"])
    return figures


def _median_ratio(a: list[float], b: list[float]) -> float:
    """Return the median of the ratios of measurements which are neighbours in time."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _matrix_peak(components: Components, device: torch.device) -> float:
    """Return the FLOP/s of large square matrix products in the model's precision, the best of ten of each size.

    Sizes double up to ``peak_matrix_size``, or until a product takes ``LONG_PRODUCT`` seconds: without instructions for
    bfloat16 a CPU would compute for minutes, and is no faster at larger sizes.
    """
    dtype = components.lm.compute_dtype or components.lm.head.weight.dtype
    size = 256
    first = 0.0
    best = 0.0
    while size <= peak_matrix_size(device) and first <= LONG_PRODUCT:
        product = partial(torch.matmul, *torch.randn(2, size, size, device=device).to(dtype))
        first = time_once(product, device)
        repeats = 10
        if first > LONG_PRODUCT:
            repeats = 2
        best = max(best, 2 * size**3 / min(time_once(product, device) for _ in range(repeats)))
        size *= 2
    return best


@torch.no_grad()
def _stepping_ratio(env: TokenizationEnv, components: Components, device: torch.device) -> float:
    """Return the seconds of an episode step by step, over those of the same episode in one pass."""
    one_pass = [time_once(lambda: env.one_pass(components.agent), device) for _ in range(3)]
    stepping = time_once(lambda: env.rollout(env.source.seq_len, components.agent), device)
    return stepping / statistics.median(one_pass)


@torch.no_grad()
def stepping_differences(
    env: TokenizationEnv, components: Components
) -> dict[str, tuple[float, float]]:
    """Step through a batch of episodes, and compare with a rollout of the same symbols and actions in one pass.

    Args:
        env: environment, whose next sequences are used.
        components: its model, and the agent.

    Returns:
        Mean and largest absolute difference by stage: of ``encoding`` relative to the encodings' root mean square, of
        ``boundary probability`` (whose mean is the share of decisions which differ for the same noise), and of both
        log-likelihoods in nats per symbol.
    """
    stepped = env.rollout(env.source.seq_len, components.agent)
    symbol_BN = torch.cat([stepped[keys.SYMBOL], stepped["next", keys.SYMBOL][:, -1:]], 1)
    forcing_BT = 1.0 - stepped[keys.ACTION].float()  # 0 forces a boundary, 1 forces none
    target_rate = stepped.get(keys.TARGET_RATE, None)
    rate = None
    if target_rate is not None:
        rate = target_rate[:, 0]
    parallel = rollout(components.lm, components.agent, symbol_BN, noise=forcing_BT, rate=rate)
    differences = {}
    for stage, key in STAGES.items():
        one = stepped[key].float()
        other = parallel[key].float()
        difference = (one - other).abs()
        if key == keys.ENCODING:
            difference = difference / other.square().mean().sqrt()
        differences[stage] = (difference.mean().item(), difference.max().item())
    return differences


def _transformer_work(config: Config) -> UpdateWork:
    """Return the work of a plain transformer: as wide and deep, with full attention and the middle's MLP everywhere.

    All layers but those of the decoder are in the encoder, and the one token of each sequence has a layer more.
    """
    model = replace(
        config.model,
        down_layers=config.model.down_layers + config.model.mid_layers,
        mid_layers=1,
        byte_mlp=config.model.token_mlp,
        window=config.data.seq_len,
    )
    work = UpdateWork(replace(config, model=model))
    work.action_BT[:, 0] = True
    return work


def bench_generation(
    components: Components, symbol_BN: Tensor, options: BenchOptions, *, progress: bool = False
) -> dict[str, dict[str, float]]:
    """Time reading and writing at each of ``options.rates``, with evenly spaced boundaries.

    Args:
        components: language model, in evaluation mode.
        symbol_BN: symbols read in one pass; one row of as many symbols is written, and ``TOGETHER`` rows.
        options: rates and rounds.
        progress: whether to show a bar.

    Returns:
        By rate: symbols per second of ``reading``, ``writing`` and ``writing_together``, and ``flops`` per symbol.
    """
    lm = components.lm
    length = symbol_BN.shape[1]
    prompt = symbol_BN[:1, :PROMPT]
    reading: dict[str, Callable[[], object]] = {}
    writing: dict[str, Callable[[], object]] = {}
    for rate in options.rates:
        agent = registry.build(
            "agent", {"name": "uniform"}, registry.AGENTS, rate=rate, seq_len=length
        )
        reading[f"reading {rate:g}"] = torch.no_grad()(partial(rollout, lm, agent, symbol_BN))
        for way, prompts in (
            ("writing", prompt),
            ("writing_together", prompt.expand(TOGETHER, -1)),
        ):
            generators = [torch.Generator(symbol_BN.device) for _ in prompts]
            writing[f"{way} {rate:g}"] = partial(
                generate, lm, agent, prompts, length - PROMPT, generator=generators
            )
    measure = partial(
        interleave, repeats=options.repeats, device=symbol_BN.device, progress=progress
    )
    # One after the other, since passes are slower for a while after numpy's threads, which write.
    seconds = measure(reading) | measure(writing)
    symbols = {
        "reading": symbol_BN.shape[0] * length,
        "writing": length,
        "writing_together": TOGETHER * length,
    }
    speeds = {}
    for rate in options.rates:
        of_rate = {
            way: count / statistics.median(seconds[f"{way} {rate:g}"])
            for way, count in symbols.items()
        }
        of_rate["flops"] = reading_flops(lm, rate, torch.nn.Module(), length)
        speeds[f"{rate:g}"] = of_rate
    return speeds


def bench_forecasts(options: BenchOptions, *, progress: bool = False) -> dict[str, dict[str, Any]]:
    """Time forecasts of random histories, in batches of the size which ``tokenv forecast`` uses.

    Returns:
        ``tables``: printable rows by title; ``figures``: ``forecasts_per_second`` by the number of samples, and of
        the direct head where its horizon is long enough.

    Raises:
        UserError: the horizon does not fit the configuration, or the samples do not fit into memory.
    """
    config = options.config
    prepare(config.hardware)
    assert config.data.options.forecast_work is not None
    prepare_forecasts = resolve_name(config.data.options.forecast_work)
    what, batches = prepare_forecasts(config, options.horizon, options.samples)
    work = {name: forecast for name, (_, forecast) in batches.items()}
    seconds = interleave(work, options.repeats, torch.device("cpu"), progress=progress)
    speed = {}
    rows = {}
    for name, (count, _) in batches.items():
        speed[name] = count / statistics.median(seconds[name])
        label = name
        if name.isdigit():
            label = f"{name} samples"
        rows[label] = f"{speed[name]:,.3g}"
    tables = {f"forecasts per second, {what}": rows}
    return {"tables": tables, "figures": {"forecasts_per_second": speed}}
