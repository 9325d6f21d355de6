"""Looking at a trained model: load a run, segment a text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.config.schema import Config
from tokenv.env.generate import generate
from tokenv.errors import UserError
from tokenv.report.characters import warn
from tokenv.run.asked import rate_to_tell
from tokenv.run.evaluate import evaluating, shifted
from tokenv.run.memory import check_generation
from tokenv.run.parts import Parts, build_parts
from tokenv.run.state import RunState
from tokenv.storage import checkpoints

SYMBOLS_PER_PASS = 8192  # of a text's pieces that are rolled out together; one piece at least


@dataclass(frozen=True)
class Trained:
    """A model as a run left it.

    Attributes:
        parts: model and agent, in evaluation mode.
        config: of the run.
        path: the checkpoint.
        state: how far the run had come.
    """

    parts: Parts
    config: Config
    path: Path
    state: RunState

    @property
    def step(self) -> int:
        """Updates done."""
        return self.state.step


@dataclass(frozen=True)
class Segmented:
    """A text of N bytes with its token boundaries.

    Attributes:
        text: its bytes.
        probability_N: of a boundary after each byte, in [0, 1].
        boundary_N: whether one was drawn there.
        log_likelihood_N: of each byte given those before it, in nats; NaN where there are none: at the first byte, and
            where the text was cut because it is longer than the model was trained on.
        logit_bias: by which the logits of all decisions were shifted.
    """

    text: bytes
    probability_N: list[float]
    boundary_N: list[bool]
    log_likelihood_N: list[float]
    logit_bias: float = 0.0


def load_run(run: str, which: str = "best", *, fall_back: bool = True, device: str | None = None) -> Trained:
    """Load a run's model.

    Args:
        run: run folder, such as ``runs/7``.
        which: ``best`` by validation loss, or ``latest``.
        fall_back: if that checkpoint is damaged, take the newest one that is sound, and say so in a line on stderr; a
            checkpoint that ``run`` itself names is never replaced.
        device: where to put it, as ``hardware.device`` says it; None for the run's own.

    Raises:
        DamagedError: a checkpoint is damaged, and no other one may take its place.
        MissingFileError: there is no such run, or it has no checkpoint.
        UserError: the run names code that the user has not named (``tokenv.storage.trust`` lets it), or the checkpoint
            holds another model than its configuration says.
    """
    try:
        return _load(checkpoints.find(run, which), device)
    except checkpoints.DamagedError as error:
        if not fall_back or error.sound is None or (Path(run) / checkpoints.STATE).is_file():
            raise
        warn(f"{error.what}; this goes on with {error.sound}")
        return _load(error.sound, device)


def _load(path: Path, device: str | None) -> Trained:
    tensors, stored = checkpoints.load_model(path)
    state = RunState.from_dict(stored, path)
    config = state.settings
    if device is not None:
        config = replace(config, hardware=replace(config.hardware, device=device))
    parts = build_parts(config, pretrained=False)
    checkpoints.check_tensors(tensors, parts.state_dict(), path / checkpoints.MODEL)
    parts.load_state_dict(tensors)
    parts.train(False)
    return Trained(parts, config, path, state)


def segment(
    trained: Trained,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
) -> Segmented:
    """Draw token boundaries in a text, in pieces of the length that the model was trained on.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        logit_bias: added to the logits of all decisions, hence in their probabilities: see ``tokenv.run.calibrate``.
        rate: boundaries per symbol that a model is asked for that was trained for a range; None for its mean.

    Raises:
        UserError: the text is empty, or the rate cannot be asked for.
    """
    probability_N: list[float] = []
    boundary_N: list[bool] = []
    log_likelihood_N: list[float] = []
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "logit_bias": logit_bias, "rate": rate}
    for td in text_rollouts(trained, text, **how):
        prob_BT = td[keys.BOUNDARY_PROB].float().clamp(0, 1)
        probability_N += (shifted(prob_BT, -logit_bias) if logit_bias else prob_BT).flatten().tolist()
        boundary_N += td[keys.ACTION].bool().flatten().tolist()
        log_likelihood_N += F.pad(td[keys.LOG_LIKELIHOOD][:, :-1].double(), (1, 0), value=math.nan).flatten().tolist()
    return Segmented(text, probability_N, boundary_N, log_likelihood_N, logit_bias)


def text_rollouts(
    trained: Trained,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
) -> Iterator[TensorDictBase]:
    """Rollouts [B, T] of the pieces of a text, a decision a byte; the arguments and errors are those of ``segment``."""
    pieces, told = text_pieces(trained, text), rate_to_tell(trained.parts, trained.config, rate)
    with evaluating(trained.parts, seed=seed, threshold=threshold, logit_bias=logit_bias, rate=told) as draw:
        for symbol_BN in pieces:
            yield draw(symbol_BN)


def text_pieces(trained: Trained, text: bytes) -> list[torch.Tensor]:
    """Split a text into pieces of the length that a model was trained on, in batches to roll out.

    Returns:
        int64 [B, T + 1] each, in the text's order: batches of whole pieces, and a batch of one for a shorter rest. A
        rollout decides nothing at its last symbol, so one more symbol is appended to every piece.

    Raises:
        UserError: the text is empty.
    """
    if not text:
        raise UserError("the text is empty: expected at least one byte in text=... or file=...")
    length = trained.config.data.seq_len
    symbol_N = torch.tensor(list(text))
    whole_N, rest_N = symbol_N.tensor_split([len(text) // length * length])
    batches = [*whole_N.view(-1, length).split(max(1, SYMBOLS_PER_PASS // length)), rest_N[None]]
    return [F.pad(symbol_BT, (0, 1)) for symbol_BT in batches if symbol_BT.numel()]


def write_on(
    trained: Trained,
    prompt: bytes,
    max_new: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    stop: bytes | None = None,
    seed: int = 0,
    rate: float | None = None,
) -> Segmented:
    """Continue a text, boundaries drawn on the way.

    Args:
        trained: the model.
        prompt: at least one byte.
        max_new: bytes to write.
        temperature: 0 takes the most probable byte.
        top_p: nucleus that bytes are drawn from.
        stop: bytes after which to stop.
        seed: of boundaries and bytes.
        rate: see ``segment``.

    Returns:
        Prompt and continuation; no likelihoods.

    Raises:
        UserError: the text is empty, or what is asked for cannot fit in memory, or the rate cannot be asked for.
        ValueError: ``max_new``, ``temperature`` or ``top_p`` is out of range.
    """
    if not prompt:
        raise UserError("the text is empty: expected at least one byte to go on from")
    check_generation(trained.config, 1, len(prompt) + max_new)
    lm, device = trained.parts.lm, trained.parts.lm.head.weight.device
    written = generate(
        lm,
        trained.parts.agent,
        torch.tensor([list(prompt)], device=device),
        max_new,
        temperature=temperature,
        top_p=top_p,
        stop=stop,
        generator=torch.Generator(device).manual_seed(seed),
        rate=rate_to_tell(trained.parts, trained.config, rate),
    )
    text = bytes(written.symbol_BN[0].tolist())
    return Segmented(text, written.boundary_prob_BN[0].tolist(), written.action_BN[0].bool().tolist(), [])


def log_likelihoods(
    trained: Trained,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    rate: float | None = None,
    batch_size: int = 16,
) -> list[float]:
    """Log-likelihood of each byte given those before it, in nats; NaN at the first.

    A text that is longer than the model was trained on is read in windows, each of which begins in the middle of the
    one before, so that every byte has at least half a window before it.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        rate: see ``segment``.
        batch_size: windows of one pass.
    """
    return weigh(trained, text, seed=seed, threshold=threshold, rate=rate, batch_size=batch_size)[0]


def weigh(
    trained: Trained,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    rate: float | None = None,
    batch_size: int = 16,
    greedy: bool = False,
) -> tuple[list[float], list[bool]]:
    """As ``log_likelihoods``, which has the arguments; and which bytes the model itself would have written.

    Args:
        trained: the model.
        text: at least one byte.
        seed: see there.
        threshold: see there.
        rate: see there.
        batch_size: see there.
        greedy: whether to find out, at the cost of a further pass of the decoder, which bytes are the most probable
            ones after what stands before them, under the same boundaries.

    Returns:
        Log-likelihoods, and whether a byte is the most probable one; False at the first, and of all if not asked for.
    """
    length = min(trained.config.data.seq_len, len(text))
    starts = [*range(0, len(text) - length, max(1, length // 2)), len(text) - length]
    found, best = [math.nan] * len(text), [False] * len(text)
    known = 0  # the last byte that has one
    told = rate_to_tell(trained.parts, trained.config, rate)
    with evaluating(trained.parts, seed=seed, threshold=threshold, rate=told) as draw:
        for first in range(0, len(starts) if length > 1 else 0, batch_size):
            some = starts[first : first + batch_size]
            td = draw(torch.tensor([list(text[start : start + length]) for start in some]))
            likely_BT = _most_probable(trained.parts, td) if greedy else torch.zeros(td.shape, dtype=torch.bool)
            figures = zip(some, td[keys.LOG_LIKELIHOOD].double().tolist(), likely_BT.tolist(), strict=True)
            for start, nats_T, likely_T in figures:
                place = slice(known + 1, start + length)
                found[place], best[place] = nats_T[known - start :], likely_T[known - start :]
                known = start + length - 1
    return found, best


@torch.no_grad()
def _most_probable(parts: Parts, td: TensorDictBase) -> Tensor:
    """Whether the symbol after each step of a rollout is the one that its model would choose: bool [B, T]."""
    codec = parts.lm.codec
    parameters = parts.whole(lambda: parts.lm.decode(td[keys.ENCODING], td[keys.ACTION], td.get(keys.BOUNDARY, None)))
    chosen: Tensor = codec.sample(parameters, temperature=0) == td["next", keys.SYMBOL]
    return chosen
