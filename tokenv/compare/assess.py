"""What a comparison wants to know of one finished run, measured once and kept beside the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv import checkpoint as checkpoints
from tokenv import keys, registry
from tokenv.config import Config
from tokenv.data.bpe import train_bpe
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.evaluate import boundary_scores, held_out_rollouts, sequence_bits
from tokenv.files import write_atomically
from tokenv.hardware import prepare
from tokenv.looking import load_run

FILE = "assessment.json"
VERSION = 1
LONGEST = 24  # tokens at least so long are counted together


@dataclass(frozen=True)
class Passage:
    """A held-out sequence with the boundaries that a run draws in it.

    Attributes:
        text: its bytes, as latin-1.
        boundary_prob: of every byte.
        action: drawn boundaries, 0 or 1.
    """

    text: str
    boundary_prob: list[float]
    action: list[int]


@dataclass(frozen=True)
class Assessment:
    """Figures of one run on held-out text.

    Attributes:
        version: of this file's layout.
        checkpoint: name of the checkpoint.
        passages_wanted: passages asked for.
        bpe_vocabulary: asked for.
        fingerprint: of the data.
        bits: bits per byte of every held-out sequence.
        document: index of the document that each comes from.
        bits_early: mean of the early exit's bits per byte.
        boundary_rate: boundaries per byte.
        token_lengths: entry l - 1 counts the tokens of l bytes; the last one, those at least so long.
        agreement: reference to precision, recall and F1 of the drawn boundaries against its own.
        passages: the first sequences.
    """

    version: int
    checkpoint: str
    passages_wanted: int
    bpe_vocabulary: int
    fingerprint: str
    bits: list[float]
    document: list[int]
    bits_early: float
    boundary_rate: float
    token_lengths: list[int]
    agreement: dict[str, dict[str, float]]
    passages: list[Passage]


def assess(folder: Path, *, passages: int, bpe_vocabulary: int) -> Assessment:
    """Measure a finished run on its held-out text, or read what was measured before.

    Args:
        folder: of the run.
        passages: sequences to keep with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary that boundaries are held against; the ``tokenizers`` library must
            be installed for that, and BPE is left out where it is not.

    Raises:
        FileNotFoundError: the run has no checkpoint.
    """
    known = assessed(folder, passages, bpe_vocabulary)
    if known is not None:
        return known
    made = _measure(folder, passages, bpe_vocabulary)
    write_atomically(folder / FILE, json.dumps(asdict(made)))
    return made


def assessed(folder: Path, passages: int, bpe_vocabulary: int) -> Assessment | None:
    """What ``assess`` measured of the run's last checkpoint with these arguments before; None if it did not."""
    try:
        values = json.loads((folder / FILE).read_text())
        known = Assessment(**values | {"passages": [Passage(**passage) for passage in values["passages"]]})
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
        return None
    wanted = (VERSION, checkpoints.find(folder).name, passages, bpe_vocabulary)
    return known if (known.version, known.checkpoint, known.passages_wanted, known.bpe_vocabulary) == wanted else None


def _measure(folder: Path, passages: int, bpe_vocabulary: int) -> Assessment:
    trained = load_run(str(folder), "latest")
    config = trained.config
    prepare(config.hardware)
    corpus = load_corpus(config.data)
    held_out = corpus.validation(config.validation.sequences)
    references = _references(config, corpus, bpe_vocabulary)
    drawn: dict[str, list[Tensor]] = {name: [] for name in ("action", "bits", "early", "prob", *references)}
    for td in held_out_rollouts(trained.parts, held_out, batch_size=config.validation.batch_size):
        drawn["action"].append(td[keys.ACTION].cpu())
        drawn["prob"].append(td[keys.BOUNDARY_PROB].float().cpu())
        drawn["bits"].append(sequence_bits(td))
        drawn["early"].append(sequence_bits(td, keys.LOG_LIKELIHOOD_EARLY))
        for name, reference in references.items():
            drawn[name].append(reference(td).cpu())
    of = {name: torch.cat(parts) for name, parts in drawn.items()}
    action_BT = of["action"]
    return Assessment(
        version=VERSION,
        checkpoint=trained.path.name,
        passages_wanted=passages,
        bpe_vocabulary=bpe_vocabulary,
        fingerprint=corpus.fingerprint,
        bits=of["bits"].tolist(),
        document=held_out.document_B.tolist(),
        bits_early=of["early"].mean().item(),
        boundary_rate=action_BT.double().mean().item(),
        token_lengths=token_lengths(action_BT, LONGEST),
        agreement={name: _agreement(action_BT, of[name]) for name in references},
        passages=[
            Passage(bytes(symbol_N[:-1].tolist()).decode("latin-1"), prob_T.tolist(), action_T.tolist())
            for symbol_N, prob_T, action_T in zip(
                held_out.symbol_BN[:passages], of["prob"][:passages], action_BT[:passages], strict=True
            )
        ],
    )


def _references(config: Config, corpus: Corpus, bpe_vocabulary: int) -> dict[str, Callable[[TensorDictBase], Tensor]]:
    """Agents whose boundaries people know, by name: from a rollout to their actions [B, T]."""
    wanted: dict[str, dict[str, Any]] = {"whitespace": {}}
    if find_spec("tokenizers"):
        wanted["bpe"] = {"tokenizer": str(train_bpe(corpus, bpe_vocabulary))}

    def drawing(agent: Any) -> Callable[[TensorDictBase], Tensor]:
        return lambda td: agent.draw(td, torch.zeros(td.shape, device=td.device))[keys.ACTION]

    context = {"rate": config.rate, "seq_len": config.data.seq_len}
    return {
        name: drawing(registry.build("agent", {"name": name} | options, registry.AGENTS, **context))
        for name, options in wanted.items()
    }


def _agreement(action_BT: Tensor, reference_BT: Tensor) -> dict[str, float]:
    """Without the first byte, where everybody draws a boundary."""
    scores = boundary_scores(action_BT[:, 1:].bool(), reference_BT[:, 1:].bool())
    return {name.removeprefix("boundary_"): value for name, value in scores.items()}


def token_lengths(action_BT: Tensor, longest: int) -> list[int]:
    """How many tokens have 1, 2, ... symbols; what follows a sequence's last boundary is no token.

    Args:
        action_BT: 1 where a token ends; the first symbol always does, and is left out.
        longest: tokens of so many symbols or more are counted together, as the last entry.
    """
    row, place = action_BT.nonzero(as_tuple=True)
    same = row[1:] == row[:-1]
    length = (place[1:] - place[:-1])[same].clamp(max=longest)
    return torch.bincount(length, minlength=longest + 1)[1:].tolist()
