"""Measure speed, memory and the cost of learning boundaries in one interleaved run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import peak_resident_memory, prepare, resolve_device
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.data.sources import TensorSource
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lab.config import BenchOptions
from tokenv.lab.generation_speed import reading_and_writing, speeds
from tokenv.lm.attention import select_attention
from tokenv.lm.codecs.base import ByteCodec, make_head
from tokenv.lm.config import UNetConfig
from tokenv.lm.encoder import make_layers
from tokenv.lm.flops import early_exit_share, matrix_parameters, policy_flops, policy_share, update_flops
from tokenv.lm.layers import RMSNorm, RotaryTable
from tokenv.lm.unet import UNet
from tokenv.training.update import backward, make_optimizer, optimizer_flops, optimizer_step

STAGES = {
    "encoding": keys.ENCODING,
    "boundary probability": keys.BOUNDARY_PROB,
    "early log-likelihood": keys.LOG_LIKELIHOOD_EARLY,
    "log-likelihood": keys.LOG_LIKELIHOOD,
}


@torch.no_grad()
def stepping_differences(env: TokenizationEnv, parts: Components) -> dict[str, tuple[float, float]]:
    """Step through a batch of episodes, roll the same symbols out with the same actions, and compare.

    Args:
        env: whose next sequences are taken.
        parts: its model, and who acts.

    Returns:
        Stage to the mean and the largest absolute difference: of ``encoding`` relative to the encodings' root mean
        square, of ``boundary probability`` (whose mean is the share of decisions that come out differently for the
        same noise), and of both log-likelihoods in nats per symbol.
    """
    stepped = env.rollout(env.source.seq_len, parts.agent)
    symbol_BN = torch.cat([stepped[keys.SYMBOL], stepped["next", keys.SYMBOL][:, -1:]], 1)
    forcing_BT = 1.0 - stepped[keys.ACTION].float()  # 0 forces a boundary, 1 forces none
    asked = stepped.get(keys.TARGET_RATE, None)
    rate = None if asked is None else asked[:, 0]
    at_once = rollout(parts.lm, parts.agent, symbol_BN, noise=forcing_BT, rate=rate)
    found = {}
    for stage, key in STAGES.items():
        one, other = stepped[key].float(), at_once[key].float()
        apart = (one - other).abs()
        if key == keys.ENCODING:
            apart = apart / _root_mean_square(other)
        found[stage] = (apart.mean().item(), apart.max().item())
    return found


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


class PlainTransformer(nn.Module):
    """A byte-level transformer as wide and deep as the U-Net, each layer with full attention and the middle's MLP.

    Args:
        config: of the U-Net.
        compute_dtype: precision of the activations; None keeps the parameters'.
    """

    def __init__(self, config: UNetConfig, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.codec = ByteCodec(config.width, softcap=config.output_softcap)
        layers = config.down_layers + config.mid_layers + config.up_layers
        self.layers = make_layers(config, layers, config.token_mlp)
        self.norm, self.head = RMSNorm(config.width), make_head(self.codec, config.width)

    def loss(self, symbol_BN: Tensor) -> Tensor:
        """Nats per byte of x_2, ..., x_N: []."""
        x_BTD = self.codec.embed(symbol_BN[:, :-1])
        x_BTD = x_BTD if self.compute_dtype is None else x_BTD.to(self.compute_dtype)
        length, config = x_BTD.shape[1], self.config
        position_T = torch.arange(length, device=x_BTD.device)
        rotary = RotaryTable(position_T, config.head_size, config.rope_base, x_BTD.dtype)
        attention = select_attention(length, x_BTD.device, config.attention_softcap)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, attention)
        return -self.codec.log_prob(self.head(self.norm(x_BTD)), symbol_BN[:, 1:]).mean()

    def compile_layers(self) -> None:
        """Compile every layer."""
        for layer in self.layers:
            layer.compile(dynamic=False)


def bench(options: BenchOptions, *, progress: bool = False) -> dict[str, dict[str, Any]]:
    """Measure.

    Returns:
        ``tables``: title to printable rows; ``figures``: name to number.
    """
    config = options.config
    prepare(config.hardware)
    device = resolve_device(config.hardware.device)
    parts = build_components(config, device)
    parts.train()
    batch, length = config.train.batch_size, config.data.seq_len
    symbol_BN = torch.randint(0, 256, (batch, length))
    env = TokenizationEnv(parts.lm, TensorSource(symbol_BN), batch, window=parts.agent.window, rates=parts.agent.rates)
    parameters = parts.named_parameters()
    optimizer = make_optimizer(config.train, parameters)
    symbol_BN = symbol_BN.to(device)
    last: list[Tensor] = []  # boundaries that were learned from last: given, they are as much work

    def learned() -> None:
        td, _ = backward(partial(env.one_pass, parts.agent, parts.sampling), parts, config.loss)
        last[:] = [td[keys.ACTION].detach().view(-1, batch, length - 1)[0]]
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    def given(early: bool = False) -> None:
        _given_loss(parts.lm, symbol_BN, last[0], early=early).backward()
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    with torch.no_grad():
        observation = env.one_pass(parts.agent)
    noise = torch.rand(batch, length - 1, device=device)

    @torch.no_grad()
    def draw() -> None:
        parts.agent.draw(observation, noise)

    variants: dict[str, Callable[[], None]] = {
        "learned": learned,
        "given": given,
        "given_early": partial(given, early=True),
        "draw": draw,
    }
    for _ in range(2):  # with the optimiser's moments
        learned()
    memory = peak_memory(device)
    if options.plain:
        variants["plain"] = _plain_step(config, parts, symbol_BN)
    seconds = interleave(variants, options.repeats, device, progress=progress)

    median = {name: statistics.median(values) for name, values in seconds.items()}
    policy = policy_flops(parts.agent)
    symbols, tokens = batch * length, int(last[0].sum())
    passes = parts.passes
    flops = update_flops(parts.lm, symbols, passes.tokens(tokens), policy, passes)
    flops += optimizer_flops(config.train, parts)
    peak = _matrix_peak(parts, device)
    figures: dict[str, Any] = {
        **figures_of_time(seconds["learned"], symbols),
        "peak_memory_gib": memory,
        "draw_share": median["draw"] / median["learned"],
        "time_over_given": _ratio(seconds["learned"], seconds["given"]),
        "time_over_given_with_early_exit": _ratio(seconds["learned"], seconds["given_early"]),
        "flops_policy_share": policy_share(parts.lm, symbols, tokens, policy),
        "flops_early_exit_share": early_exit_share(parts.lm, symbols, tokens),
        "model_tflops_per_second": flops / median["learned"] / 1e12,
        "matrix_peak_tflops_per_second": peak / 1e12,
        "model_flops_utilisation": flops / median["learned"] / peak,
    }
    if options.plain:
        figures["plain_over_learned"] = _ratio(seconds["plain"], seconds["learned"])
    if options.rates:
        parts.train(False)
        work = reading_and_writing(parts.lm, options.rates, symbol_BN)
        timed = interleave(work, options.repeats, device, progress=progress)
        taken = {name: statistics.median(of) for name, of in timed.items()}
        figures["rates"] = speeds(parts.lm, options.rates, symbol_BN, taken)
        parts.train(True)
    if options.stepping:
        figures["stepping_over_one_pass"] = _stepping_ratio(env, parts, device)
        figures["stepping_differences"] = stepping_differences(env, parts)
    return {"tables": _tables(figures, parts, config, device), "figures": figures}


def _given_loss(lm: UNet, symbol_BN: Tensor, action_BT: Tensor, *, early: bool) -> Tensor:
    """An ordinary language-model step with given boundaries, with or without the early exit's loss."""
    x_BTD, target = lm.encode(symbol_BN)[:, :-1], symbol_BN[:, 1:]
    loss = -lm.codec.log_prob(lm.decode(x_BTD, action_BT), target).mean()
    return loss - 0.1 * lm.codec.log_prob(lm.early_exit(x_BTD), target).mean() if early else loss


def _plain_step(config: Config, parts: Components, symbol_BN: Tensor) -> Callable[[], None]:
    """An update of a plain transformer."""
    peer = PlainTransformer(config.model, parts.lm.compute_dtype).to(symbol_BN.device)
    if config.hardware.compile == "on" or (config.hardware.compile == "auto" and symbol_BN.is_cuda):
        peer.compile_layers()
    parameters = {f"lm.{name}": parameter for name, parameter in peer.named_parameters()}
    optimizer = make_optimizer(config.train, parameters)

    def step() -> None:
        peer.loss(symbol_BN).backward()
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    return step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(work: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def interleave(
    variants: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, *, progress: bool = False
) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in tqdm(range(repeats + 2), desc="bench", unit="round", disable=not progress):
        for name, work in variants.items():
            elapsed = _time(work, device)
            if number >= 2:
                seconds[name].append(elapsed)
    return seconds


def figures_of_time(seconds: Sequence[float], symbols: int) -> dict[str, float]:
    """Seconds of an update of so many symbols: median, least, most; and symbols per second."""
    median = statistics.median(seconds)
    return {
        "step_seconds": median,
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "symbols_per_second": symbols / median,
    }


def _ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios of neighbours in time."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _peak_size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 2048


def _matrix_peak(parts: Components, device: torch.device) -> float:
    """FLOP/s of a large square matrix product in the model's precision, best of ten."""
    size = _peak_size(device)
    dtype = parts.lm.compute_dtype or parts.lm.head.weight.dtype
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / min(_time(lambda: a @ b, device) for _ in range(10))


@torch.no_grad()
def _stepping_ratio(env: TokenizationEnv, parts: Components, device: torch.device) -> float:
    """Seconds of an episode step by step, over seconds of the same in one pass."""
    one_pass = [_time(lambda: env.one_pass(parts.agent), device) for _ in range(3)]
    stepping = _time(lambda: env.rollout(env.source.seq_len, parts.agent), device)
    return stepping / statistics.median(one_pass)


def peak_memory(device: torch.device) -> float:
    """GiB so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_memory()


def _tables(
    figures: dict[str, Any], parts: Components, config: Config, device: torch.device
) -> dict[str, dict[str, str]]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    model = config.model
    size = sum(p.numel() for p in parts.lm.parameters())
    speed = {
        "machine": f"{name}, torch {torch.__version__}",
        "model": f"{size / 1e6:.1f}M parameters ({matrix_parameters(parts.lm) / 1e6:.1f}M in matrices), width "
        f"{model.width}, {model.down_layers}/{model.mid_layers}/{model.up_layers} layers",
        "batch": f"{config.train.batch_size} x {config.data.seq_len} bytes, {parts.lm.compute_dtype}",
        "step": f"{figures['step_seconds']:.3f} s ({figures['step_seconds_min']:.3f} to "
        f"{figures['step_seconds_max']:.3f})",
        "speed": f"{figures['symbols_per_second']:,.0f} bytes per second",
        "peak memory": f"{figures['peak_memory_gib']:.2f} GiB",
        "utilisation": f"{figures['model_flops_utilisation']:.1%} of {figures['matrix_peak_tflops_per_second']:.3g} "
        f"TFLOP/s, measured: a matrix product of {_peak_size(device):,} squared",
    }
    if "plain_over_learned" in figures:
        speed["plain transformer"] = f"{figures['plain_over_learned']:.2f} times the seconds a step"
    cost = {
        "drawing boundaries": f"{figures['draw_share']:.1%} of a step",
        "time over given boundaries": f"{figures['time_over_given'] - 1:+.1%}",
        "the same, early exit in both": f"{figures['time_over_given_with_early_exit'] - 1:+.1%}",
        "FLOPs of the policy": f"{figures['flops_policy_share']:.4%} of the model with given boundaries",
        "FLOPs of the early exit": f"{figures['flops_early_exit_share']:.3%} of it",
    }
    if "stepping_over_one_pass" in figures:
        cost["stepping over one pass"] = f"{figures['stepping_over_one_pass']:.0f} times the seconds"
    tables = {"speed": speed, "cost of learning the boundaries": cost}
    if "rates" in figures:
        tables["bytes per second by rate, boundaries evenly spaced"] = {
            f"rate {rate}, {of['flops']:,.0f} FLOPs": f"reading {of['reading']:,.0f}, writing {of['writing']:,.0f}"
            for rate, of in figures["rates"].items()
        }
    differences = figures.get("stepping_differences", {})
    if differences:
        told = {stage: f"{mean:.2g}, at most {most:.2g}" for stage, (mean, most) in differences.items()}
        tables["stepping and one pass apart by, in the mean"] = told
    return tables
