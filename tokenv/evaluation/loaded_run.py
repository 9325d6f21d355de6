"""Load the model of a run; segment, score and continue texts with it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.hardware import check_generation, for_inference
from tokenv.config.schema import Config, HardwareConfig
from tokenv.core import checkpoints, keys
from tokenv.core.errors import COUNT, UserError, check_value
from tokenv.core.rates import FIXED_RATE
from tokenv.env.generation import generate
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions, EvalSampler, eval_mode, shift_noise
from tokenv.evaluation.run_state import RunState, load_components
from tokenv.lm.flops import rate_of_flops, reading_flops
from tokenv.plotting.console import warn

ROWS_PER_PASS = 64  # texts which are continued together
WINDOWS_PER_PASS = 16  # windows of scored texts in one forward pass where no batch size is set


@dataclass(frozen=True)
class LoadedRun:
    """Model of a stored run.

    Attributes:
        components: model and agent, in evaluation mode.
        config: configuration of the run.
        path: folder of the checkpoint.
        state: state of the run at the checkpoint.
    """

    components: Components
    config: Config
    path: Path
    state: RunState


@dataclass(frozen=True)
class Segmentation:
    """Text of N bytes with its token boundaries.

    Attributes:
        text: bytes of the text.
        probability_N: probability of a boundary after each byte, in [0, 1].
        boundary_N: whether a boundary was drawn there.
        log_likelihood_N: log-likelihood of each byte given the preceding ones of its piece, in nats; NaN for the first
            byte of each piece. A text which is longer than the model's training sequences is split into pieces.
        logit_bias: number which was added to the logits of all decisions.
    """

    text: bytes
    probability_N: list[float]
    boundary_N: list[bool]
    log_likelihood_N: list[float]
    logit_bias: float = 0.0


def load_run(
    run: str,
    which: str = "best",
    *,
    fall_back: bool = True,
    device: str | None = None,
    precision: str | None = None,
) -> LoadedRun:
    """Load a run's model.

    Args:
        run: run folder, such as ``runs/7``, or one of its checkpoints.
        which: checkpoint of a run folder: ``best`` by validation loss, or ``latest``.
        fall_back: if the checkpoint of a run folder is damaged, load the newest intact one and warn.
        device: device as in ``hardware.device``; None for the one which the run's configuration names.
        precision: precision as in ``hardware.precision``; None for that of the run's configuration, of which ``auto``
            is float32 on a CPU.

    Raises:
        DamagedError: if the checkpoint is damaged and must not or cannot be replaced.
        MissingFileError: if the run does not exist or has no checkpoint.
        UserError: if the run names code which the user does not trust (see ``tokenv.core.trust``), or the
            checkpoint does not match its configuration.
    """
    settings = {"device": device, "precision": precision}
    hardware = {key: value for key, value in settings.items() if value is not None}
    try:
        return _load(checkpoints.find(run, which), hardware)
    except checkpoints.DamagedError as error:
        if not fall_back or error.intact is None or (Path(run) / checkpoints.STATE).is_file():
            raise
        warn(f"{error.problem}; this goes on with {error.intact}")
        return _load(error.intact, hardware)


def _load(path: Path, hardware: Mapping[str, Any]) -> LoadedRun:
    def choose(stored: HardwareConfig) -> HardwareConfig:
        return for_inference(replace(stored, **hardware))

    components, state = load_components(path, choose)
    components.train(False)
    config = state.settings
    config = replace(config, hardware=replace(config.hardware, **hardware))
    return LoadedRun(components, config, path, state)


def resolve_rate(components: Components, config: Config, rate: float | None) -> float | None:
    """Return the target rate for a model's agent, and warn if it is outside the range of the agent's training.

    Args:
        components: model and agent.
        config: configuration of their run.
        rate: requested boundaries per symbol; None for the mean of the agent's range.

    Returns:
        The rate; None for an agent which was trained for one rate.

    Raises:
        UserError: if the rate is not in (0, 1), or is requested from an agent which was trained for one rate.
    """
    rates = components.agent.rates
    if rate is None:
        return None if rates is None else rates.mean
    check_value("rate", rate, FIXED_RATE)
    if rates is None:
        raise UserError(
            f"rate = {rate:g}: this run was trained for one rate, {config.rate:g}: leave it out, or take a run whose "
            "rate is a range (docs/rates.md)"
        )
    if not rates.min <= rate <= rates.max:
        warn(f"rate = {rate:g} is outside the range that this run was trained for, {rates:g}")
    return rate


def rate_for_flops(components: Components, flops: float, length: int) -> float:
    """Return the rate at which reading or writing a symbol costs ``flops``: see ``tokenv.lm.flops.reading_flops``.

    Args:
        components: model and agent.
        flops: floating-point operations per symbol.
        length: symbols of a sequence.

    Raises:
        UserError: if no rate in (0, 1) has this cost.
    """
    rate = rate_of_flops(components.lm, flops, components.agent, length)
    if not 0 < rate < 1:
        least, most = (reading_flops(components.lm, at, components.agent, length) for at in (0, 1))
        raise UserError(
            f"flops = {flops:g}: expected more than {least:.4g} a symbol, which this model costs without tokens, and "
            f"less than {most:.4g}, where every symbol is one"
        )
    return rate


def segment(trained: LoadedRun, text: bytes, options: EvalOptions = DEFAULTS) -> Segmentation:
    """Draw token boundaries in a text: see ``segment_texts``."""
    return segment_texts(trained, [text], options)[0]


def segment_texts(
    trained: LoadedRun, texts: Sequence[bytes], options: EvalOptions = DEFAULTS
) -> list[Segmentation]:
    """Draw token boundaries in texts, each in pieces of the length of the model's training sequences.

    The result for a text does not depend on the other texts, up to rounding.

    Args:
        trained: model of a run.
        texts: texts of at least one byte each.
        options: how to draw; the boundary probabilities of the result include the logit bias.

    Raises:
        UserError: if a text is empty, or see ``resolve_rate``.
    """
    pieces = [split_text(trained, text) for text in texts]
    bias = options.logit_bias
    length = trained.config.data.seq_len
    result = [
        Segmentation(text, [0.0] * len(text), [False] * len(text), [0.0] * len(text), bias)
        for text in texts
    ]
    with eval_mode(trained.components, _with_rate(trained, options)) as draw:
        for places, symbol_BN, noise_BT in iterate_batches(
            draw, pieces, options.sequences_per_pass(length)
        ):
            td = draw(symbol_BN, noise_BT=noise_BT)
            prob_BT = td[keys.BOUNDARY_PROB].float().clamp(0, 1)
            prob_BT = shift_noise(prob_BT, -bias) if bias else prob_BT
            rows = (
                x.tolist()
                for x in (prob_BT, td[keys.ACTION].bool(), td[keys.LOG_LIKELIHOOD].double())
            )
            for (i, j), prob_T, action_T, nats_T in zip(places, *rows, strict=True):
                piece = slice(j * length, j * length + len(prob_T))
                result[i].probability_N[piece], result[i].boundary_N[piece] = prob_T, action_T
                result[i].log_likelihood_N[piece] = [math.nan, *nats_T[:-1]]
    return result


def draw_boundaries(trained: LoadedRun, text: bytes, options: EvalOptions = DEFAULTS) -> Tensor:
    """Draw the token boundaries in a text as ``segment`` does; only encoder and policy run.

    Args:
        trained: model of a run.
        text: text of N >= 1 bytes.
        options: how to draw.

    Returns:
        Whether a boundary was drawn after each byte, bool [N], on the CPU.

    Raises:
        UserError: if the text is empty, or see ``resolve_rate``.
    """
    size = options.sequences_per_pass(trained.config.data.seq_len)
    with eval_mode(trained.components, _with_rate(trained, options)) as draw:
        batches = iterate_batches(draw, [split_text(trained, text)], size)  # in the text's order
        drawn = [
            draw.boundaries(symbol_BN, noise_BT=noise_BT).flatten()
            for _, symbol_BN, noise_BT in batches
        ]
    return torch.cat(drawn).cpu()


def _with_rate(trained: LoadedRun, options: EvalOptions) -> EvalOptions:
    return replace(options, rate=resolve_rate(trained.components, trained.config, options.rate))


def iterate_batches(
    draw: EvalSampler, texts: Sequence[Sequence[Tensor]], batch_size: int
) -> Iterator[tuple[list[tuple[int, int]], Tensor, Tensor]]:
    """Batch the sequences of texts by length, so that nothing is padded.

    Args:
        draw: source of the noise, which is the same for a text whatever the other texts are.
        texts: sequences of each text, int64 [N] each.
        batch_size: sequences per batch.

    Yields:
        The indices (text, sequence) of B sequences, their symbols [B, N] and their noise [B, N - 1].
    """
    noise = [draw.text_noise([len(symbol_N) for symbol_N in rows]) for rows in texts]
    by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, rows in enumerate(texts):
        for j, symbol_N in enumerate(rows):
            by_length[len(symbol_N)].append((i, j))
    for places in by_length.values():
        for start in range(0, len(places), batch_size):
            some = places[start : start + batch_size]
            symbol_BN = torch.stack([texts[i][j] for i, j in some])
            yield some, symbol_BN, torch.stack([noise[i][j] for i, j in some])


def split_text(trained: LoadedRun, text: bytes) -> list[Tensor]:
    """Split a text into pieces of the length of the model's training sequences; the last one may be shorter.

    Returns:
        The pieces as int64 [T + 1] each. Since a rollout decides nothing at its last symbol, one symbol is appended.

    Raises:
        UserError: if the text is empty.
    """
    if not text:
        raise UserError("the text is empty: expected at least one byte")
    symbol_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [F.pad(piece_T, (0, 1)) for piece_T in symbol_N.split(trained.config.data.seq_len)]


def generate_texts(
    trained: LoadedRun,
    prompts: Sequence[bytes],
    max_new_tokens: int,
    options: EvalOptions = DEFAULTS,
    *,
    samples: int = 1,
    temperature: float = 0.8,
    top_p: float = 0.95,
    stop: bytes | None = None,
) -> list[list[Segmentation]]:
    """Continue texts, and draw their boundaries on the way; each as it would be continued alone, up to rounding.

    Args:
        trained: model of a run.
        prompts: texts of at least one byte each.
        max_new_tokens: number of bytes to write after each.
        options: seed and rate.
        samples: continuations of each text, the first with the seed, the next ones with the seeds after it.
        temperature: temperature of the bytes' distribution; 0 takes the most probable byte.
        top_p: probability mass of the nucleus from which bytes are sampled.
        stop: bytes after which generation stops.

    Returns:
        The continuations of each prompt, each with the prompt before it, without likelihoods.

    Raises:
        UserError: if a prompt is empty, ``samples`` is below 1, or the texts do not fit in memory; or see
            ``resolve_rate``.
        ValueError: if ``max_new_tokens``, ``temperature`` or ``top_p`` is out of range.
    """
    if not all(prompts):
        raise UserError("the text is empty: expected at least one byte to go on from")
    check_value("num_return_sequences", samples, COUNT)
    components = trained.components
    device = trained.components.lm.head.weight.device
    rate = resolve_rate(components, trained.config, options.rate)
    rows = [(i, options.seed + j) for i in range(len(prompts)) for j in range(samples)]
    # a batch takes as many steps as its longest text
    rows.sort(key=lambda row: len(prompts[row[0]]))
    written: list[list[Segmentation]] = [[] for _ in prompts]
    for start in range(0, len(rows), ROWS_PER_PASS):
        some = rows[start : start + ROWS_PER_PASS]
        check_generation(trained.config, len(some), len(prompts[some[-1][0]]) + max_new_tokens)
        result = generate(
            components.lm,
            components.agent,
            [torch.tensor(list(prompts[i])) for i, _ in some],
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=stop,
            generator=[torch.Generator(device).manual_seed(seed) for _, seed in some],
            rate=rate,
        )
        lists = (
            x.tolist() for x in (result.symbol_BN, result.boundary_prob_BN, result.action_BN.bool())
        )
        for (i, _), length, *row in zip(some, result.length_B.tolist(), *lists, strict=True):
            text_N, prob_N, action_N = (each[:length] for each in row)
            written[i].append(Segmentation(bytes(text_N), prob_N, action_N, []))
    return written


def score_texts(
    trained: LoadedRun,
    texts: Sequence[bytes],
    options: EvalOptions = DEFAULTS,
    *,
    greedy: bool = False,
) -> list[tuple[list[float], list[bool]]]:
    """Compute the log-likelihood of each byte of texts given the preceding ones.

    A text which is longer than the model's training sequences is read in windows. Each begins in the middle of the
    preceding one, so that every byte is predicted from at least half a window. The result for a text does not depend on
    the other texts, up to rounding.

    Args:
        trained: model of a run.
        texts: texts of at least one byte each.
        options: how to draw the boundaries.
        greedy: whether to compute also, by a further pass of the decoder with the same boundaries, which bytes are the
            most probable ones after the preceding bytes.

    Returns:
        For each text the log-likelihoods in nats, NaN at the first byte; and whether a byte is the most probable one,
        which is False at the first byte and without ``greedy``.
    """
    starts_of = []
    windows = []
    for text in texts:
        length = min(trained.config.data.seq_len, len(text))
        starts: list[int] = []
        if length > 1:
            last = len(text) - length
            starts = [*range(0, last, max(1, length // 2)), last]
        starts_of.append(starts)
        windows.append([torch.tensor(list(text[start : start + length])) for start in starts])
    scores = [([math.nan] * len(text), [False] * len(text)) for text in texts]
    with eval_mode(trained.components, _with_rate(trained, options)) as draw:
        for places, symbol_BN, noise_BT in iterate_batches(
            draw, windows, options.batch_size or WINDOWS_PER_PASS
        ):
            td = draw(symbol_BN, noise_BT=noise_BT)
            greedy_BT = torch.zeros(td.shape, dtype=torch.bool)
            if greedy:
                greedy_BT = _most_probable(trained.components, td)
            nats_BT = td[keys.LOG_LIKELIHOOD].double()
            for (i, j), nats_T, greedy_T in zip(
                places, nats_BT.tolist(), greedy_BT.tolist(), strict=True
            ):
                starts = starts_of[i]
                length = symbol_BN.shape[1]
                # last byte which an earlier window predicts
                known = starts[j - 1] + length - 1 if j else 0
                place = slice(known + 1, starts[j] + length)
                fresh = slice(known - starts[j], None)
                scores[i][0][place], scores[i][1][place] = nats_T[fresh], greedy_T[fresh]
    return scores


@torch.no_grad()
def _most_probable(components: Components, td: TensorDictBase) -> Tensor:
    """Return whether the symbol after each step of a rollout is the model's most probable one: bool [B, T]."""
    lm = components.lm
    parameters = lm.decode(td[keys.ENCODING], td[keys.ACTION], td.get(keys.BOUNDARY, None))
    return lm.codec.sample(parameters, temperature=0) == td["next", keys.SYMBOL]
