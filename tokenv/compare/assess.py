"""What a comparison wants to know of one finished run, measured once.

``python -m tokenv.compare.assess FOLDER PASSAGES BPE_VOCABULARY [trust=NAME]`` measures in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.compare.assessment import VERSION, Agreement, Assessment, Passage, assessed, keep
from tokenv.config import registry
from tokenv.config.schema import Config
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.pieces import SequenceBatch
from tokenv.data.series.windows import SeriesData, load_series
from tokenv.data.text.bpe import train_bpe
from tokenv.run.evaluate import (
    boundary_scores,
    evaluate,
    held_out_rollouts,
    joined,
    sequence_losses,
    sequence_sums,
)
from tokenv.run.hardware import prepare
from tokenv.run.interrupt import end_with_parent
from tokenv.run.parts import Parts
from tokenv.run.stored import load_run
from tokenv.run.windows import drawn_windows
from tokenv.storage import trust

LONGEST = {"text": 24, "series": 64}  # tokens at least so long are counted together


def assess(folder: Path, *, passages: int, bpe_vocabulary: int) -> Assessment:
    """Measure a finished run on its held-out data, or read what was measured before.

    Args:
        folder: of the run.
        passages: sequences to keep with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary that boundaries in text are held against.

    Raises:
        FileNotFoundError: the run has no checkpoint.
    """
    known = assessed(folder, passages, bpe_vocabulary)
    if known is not None:
        return known
    made = _measure(folder, passages, bpe_vocabulary)
    keep(made, folder)
    return made


def _measure(folder: Path, passages: int, bpe_vocabulary: int) -> Assessment:
    trained = load_run(str(folder), "latest", fall_back=False)  # figures of a shorter training would mislead
    config, parts, codec = trained.config, trained.parts, trained.parts.lm.codec
    prepare(config.hardware)
    series = load_series(config.data) if config.data.kind == "series" else None
    corpus = load_corpus(config.data) if series is None else Corpus(series, config.data)
    held_out = corpus.validation(config.validation.sequences)
    references = _references(config, corpus, bpe_vocabulary) if series is None else {}
    of = joined(
        [
            sequence_sums(td, codec)
            | {"action": td[keys.ACTION].cpu(), "prob": td[keys.BOUNDARY_PROB].float().cpu()}
            | {name: reference(td).cpu() for name, reference in references.items()}
            for td in held_out_rollouts(parts, held_out, batch_size=config.validation.batch_size)
        ]
    )
    action_BT = of["action"]
    late_B, early_B = sequence_losses(of)
    agreement = {name: _agreement(action_BT, of[name]) for name in references}
    if series is not None and held_out.gold_BN is not None:
        agreement["change points"] = _agreement(action_BT, held_out.gold_BN[:, :-1], config.data.tolerance)
    shown = (held_out, of["prob"][:passages], action_BT[:passages])
    return Assessment(
        version=VERSION,
        checkpoint=trained.path.name,
        passages_wanted=passages,
        bpe_vocabulary=bpe_vocabulary,
        fingerprint=corpus.fingerprint,
        unit=codec.unit,
        loss=late_B.tolist(),
        document=held_out.document_B.tolist(),
        loss_early=early_B.mean().item(),
        loss_test=None if series is None else _test_loss(parts, series, config),
        boundary_rate=action_BT.double().mean().item(),
        token_lengths=token_lengths(action_BT, LONGEST[config.data.kind]),
        agreement=agreement,
        passages=_passages(*shown) if series is None else [],
        windows=[] if series is None else drawn_windows(*shown),
    )


def _test_loss(parts: Parts, series: SeriesData, config: Config) -> float | None:
    try:
        test = series.test(config.validation.sequences)
    except ValueError:  # too short for a window
        return None
    return evaluate(parts, test, batch_size=config.validation.batch_size).loss


def _passages(held_out: SequenceBatch, prob_BT: Tensor, action_BT: Tensor) -> list[Passage]:
    return [
        Passage(bytes(symbol_N[:-1].tolist()).decode("latin-1"), prob_T.tolist(), action_T.tolist())
        for symbol_N, prob_T, action_T in zip(held_out.symbol_BN, prob_BT, action_BT, strict=False)
    ]


def _references(config: Config, corpus: Corpus, bpe_vocabulary: int) -> dict[str, Callable[[TensorDictBase], Tensor]]:
    """Agents whose boundaries in text people know, by name: from a rollout to their actions [B, T]."""
    wanted: dict[str, dict[str, Any]] = {
        "whitespace": {},
        "bpe": {"tokenizer": str(train_bpe(corpus, bpe_vocabulary))},
    }

    def drawing(agent: Any) -> Callable[[TensorDictBase], Tensor]:
        return lambda td: agent.draw(td, torch.zeros(td.shape, device=td.device))[keys.ACTION]

    context = {"rate": config.rate, "seq_len": config.data.seq_len}
    return {
        name: drawing(registry.build("agent", {"name": name} | options, registry.AGENTS, **context))
        for name, options in wanted.items()
    }


def _agreement(action_BT: Tensor, reference_BT: Tensor, tolerance: int = 0) -> Agreement:
    """Without the first symbol, where everybody draws a boundary."""
    scores = boundary_scores(action_BT[:, 1:].bool(), reference_BT[:, 1:].bool(), tolerance)
    return Agreement(**{name.removeprefix("boundary_"): value for name, value in scores.items()})


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


if __name__ == "__main__":
    end_with_parent()
    for word in sys.argv[4:]:
        trust.allow(word.removeprefix("trust="))
    assess(Path(sys.argv[1]), passages=int(sys.argv[2]), bpe_vocabulary=int(sys.argv[3]))
