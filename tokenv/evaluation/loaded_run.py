"""Looking at a trained model: load a run, segment a text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import check_generation
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.env.generation import generate
from tokenv.evaluation.evaluator import eval_mode, shift_noise
from tokenv.evaluation.requested_rate import resolve_rate
from tokenv.evaluation.run_state import RunState
from tokenv.plotting.characters import warn
from tokenv.storage import checkpoints

SYMBOLS_PER_PASS = 8192  # of a text's pieces that are rolled out together; one piece at least


@dataclass(frozen=True)
class LoadedRun:
    """A model as a run left it.

    Attributes:
        parts: model and agent, in evaluation mode.
        config: of the run.
        path: the checkpoint.
        state: how far the run had come.
    """

    parts: Components
    config: Config
    path: Path
    state: RunState

    @property
    def step(self) -> int:
        """Updates done."""
        return self.state.step


@dataclass(frozen=True)
class Segmentation:
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


def load_run(run: str, which: str = "best", *, fall_back: bool = True, device: str | None = None) -> LoadedRun:
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
        if not fall_back or error.intact is None or (Path(run) / checkpoints.STATE).is_file():
            raise
        warn(f"{error.problem}; this goes on with {error.intact}")
        return _load(error.intact, device)


def _load(path: Path, device: str | None) -> LoadedRun:
    tensors, stored = checkpoints.load_model(path)
    state = RunState.from_dict(stored, path)
    config = state.settings
    if device is not None:
        config = replace(config, hardware=replace(config.hardware, device=device))
    parts = build_components(config, pretrained=False)
    checkpoints.check_tensors(tensors, parts.state_dict(), path / checkpoints.MODEL)
    parts.load_state_dict(tensors)
    parts.train(False)
    return LoadedRun(parts, config, path, state)


def segment(
    trained: LoadedRun,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
) -> Segmentation:
    """Draw token boundaries in a text, in pieces of the length that the model was trained on.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        logit_bias: added to the logits of all decisions, hence in their probabilities: see
            ``tokenv.evaluation.calibration``.
        rate: boundaries per symbol that a model is asked for that was trained for a range; None for its mean.

    Raises:
        UserError: the text is empty, or the rate cannot be asked for.
    """
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "logit_bias": logit_bias, "rate": rate}
    return segment_texts(trained, [text], **how)[0]


def segment_texts(
    trained: LoadedRun,
    texts: Sequence[bytes],
    *,
    seed: int = 0,
    threshold: bool = False,
    logit_bias: float = 0.0,
    rate: float | None = None,
) -> list[Segmentation]:
    """Draw token boundaries in several texts: what ``segment``, which has the arguments, draws in each, up to rounding.

    Args:
        trained: the model.
        texts: each of at least one byte.
        seed: see there.
        threshold: see there.
        logit_bias: see there.
        rate: see there.
    """
    batch_size = max(1, SYMBOLS_PER_PASS // trained.config.data.seq_len)
    pieces = [[row for batch in split_text(trained, text) for row in batch] for text in texts]
    found: list[list[Segmentation | None]] = [[None] * len(of) for of in pieces]
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "logit_bias": logit_bias, "rate": rate}
    for places, td in _rollouts(trained, pieces, batch_size=batch_size, **how):
        prob_BT = td[keys.BOUNDARY_PROB].float().clamp(0, 1)
        prob_BT = shift_noise(prob_BT, -logit_bias) if logit_bias else prob_BT
        nats_BT = td[keys.LOG_LIKELIHOOD].double()
        for (index, piece), prob_T, action_T, nats_T in zip(places, prob_BT, td[keys.ACTION], nats_BT, strict=True):
            nats = [math.nan, *nats_T[:-1].tolist()]
            found[index][piece] = Segmentation(b"", prob_T.tolist(), action_T.bool().tolist(), nats, logit_bias)
    return [_concatenate(text, [piece for piece in of if piece]) for text, of in zip(texts, found, strict=True)]


def _concatenate(text: bytes, pieces: Sequence[Segmentation]) -> Segmentation:
    return Segmentation(
        text,
        list(chain.from_iterable(piece.probability_N for piece in pieces)),
        list(chain.from_iterable(piece.boundary_N for piece in pieces)),
        list(chain.from_iterable(piece.log_likelihood_N for piece in pieces)),
        pieces[0].logit_bias,
    )


def _rollouts(
    trained: LoadedRun,
    rows_of: Sequence[Sequence[Tensor]],
    *,
    batch_size: int,
    seed: int,
    threshold: bool,
    rate: float | None,
    logit_bias: float = 0.0,
) -> Iterator[tuple[list[tuple[int, int]], TensorDictBase]]:
    """Roll out the sequences of several texts, each with the noise that it has where its text is alone.

    Sequences of one length share a pass, so that nothing is padded.

    Args:
        trained: the model.
        rows_of: sequences of each text, int64 [N] each.
        batch_size: sequences of one pass.
        seed: see ``segment``.
        threshold: see there.
        rate: see there.
        logit_bias: see there.

    Yields:
        Text and number of B sequences, and their rollout [B, T].
    """
    told = resolve_rate(trained.parts, trained.config, rate)

    def length(place: tuple[int, int]) -> int:
        return len(rows_of[place[0]][place[1]])

    places = sorted(((text, row) for text, rows in enumerate(rows_of) for row in range(len(rows))), key=length)
    with eval_mode(trained.parts, seed=seed, threshold=threshold, logit_bias=logit_bias, rate=told) as draw:
        noises = [draw.noise_of([len(row) for row in rows]) for rows in rows_of]
        for _, alike in groupby(places, key=length):
            same = list(alike)
            for first in range(0, len(same), batch_size):
                some = same[first : first + batch_size]
                symbol_BN = torch.stack([rows_of[text][row] for text, row in some])
                yield some, draw(symbol_BN, noise_BT=torch.stack([noises[text][row] for text, row in some]))


def split_text(trained: LoadedRun, text: bytes) -> list[torch.Tensor]:
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


def generate_text(
    trained: LoadedRun,
    prompt: bytes,
    max_new: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    stop: bytes | None = None,
    seed: int = 0,
    rate: float | None = None,
) -> Segmentation:
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
        rate=resolve_rate(trained.parts, trained.config, rate),
    )
    text = bytes(written.symbol_BN[0].tolist())
    return Segmentation(text, written.boundary_prob_BN[0].tolist(), written.action_BN[0].bool().tolist(), [])


def score_text(
    trained: LoadedRun,
    text: bytes,
    *,
    seed: int = 0,
    threshold: bool = False,
    rate: float | None = None,
    batch_size: int = 16,
    greedy: bool = False,
) -> tuple[list[float], list[bool]]:
    """Score each byte given those before it, and find out which bytes the model itself would have written.

    A text that is longer than the model was trained on is read in windows, each of which begins in the middle of the
    one before, so that every byte has at least half a window before it.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        rate: see ``segment``.
        batch_size: windows of one pass.
        greedy: whether to find out, at the cost of a further pass of the decoder, which bytes are the most probable
            ones after what stands before them, under the same boundaries.

    Returns:
        Log-likelihoods in nats, NaN at the first byte; and whether a byte is the most probable one: False at the
        first, and at all if not asked for.
    """
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "rate": rate}
    return score_texts(trained, [text], **how, batch_size=batch_size, greedy=greedy)[0]


def score_texts(
    trained: LoadedRun,
    texts: Sequence[bytes],
    *,
    seed: int = 0,
    threshold: bool = False,
    rate: float | None = None,
    batch_size: int = 16,
    greedy: bool = False,
) -> list[tuple[list[float], list[bool]]]:
    """Weigh several texts: what ``score_text``, which has the arguments, returns of each, up to rounding.

    Windows of all texts share passes, those of one length each.
    """
    starts_of, rows_of = [], []
    for text in texts:
        length = min(trained.config.data.seq_len, len(text))
        starts = [*range(0, len(text) - length, max(1, length // 2)), len(text) - length] if length > 1 else []
        starts_of.append(starts)
        rows_of.append([torch.tensor(list(text[start : start + length])) for start in starts])
    found = [([math.nan] * len(text), [False] * len(text)) for text in texts]
    how: dict[str, Any] = {"seed": seed, "threshold": threshold, "rate": rate, "batch_size": batch_size}
    for places, td in _rollouts(trained, rows_of, **how):
        likely_BT = _most_probable(trained.parts, td) if greedy else torch.zeros(td.shape, dtype=torch.bool)
        nats_BT = td[keys.LOG_LIKELIHOOD].double()
        for (index, row), nats_T, likely_T in zip(places, nats_BT.tolist(), likely_BT.tolist(), strict=True):
            starts, length = starts_of[index], len(rows_of[index][row])
            known = starts[row - 1] + length - 1 if row else 0  # the last byte that an earlier window predicts
            place, fresh = slice(known + 1, starts[row] + length), slice(known - starts[row], None)
            found[index][0][place], found[index][1][place] = nats_T[fresh], likely_T[fresh]
    return found


@torch.no_grad()
def _most_probable(parts: Components, td: TensorDictBase) -> Tensor:
    """Whether the symbol after each step of a rollout is the one that its model would choose: bool [B, T]."""
    codec = parts.lm.codec
    parameters = parts.whole(lambda: parts.lm.decode(td[keys.ENCODING], td[keys.ACTION], td.get(keys.BOUNDARY, None)))
    chosen: Tensor = codec.sample(parameters, temperature=0) == td["next", keys.SYMBOL]
    return chosen
