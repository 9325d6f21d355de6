"""Score downstream tasks: bits per byte of the right answers, and how often the model prefers them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions, eval_mode
from tokenv.evaluation.task_formats import Question
from tokenv.plotting.theme import with_error


@dataclass(frozen=True)
class TaskScore:
    """Score of a task.

    Attributes:
        questions: number of questions.
        bits_per_byte: ``-log2 p(answer | context) / bytes of the answer`` of the right answers, mean over questions.
            The blank before an answer is one of its bytes.
        standard_error: standard error of that mean, over questions.
        accuracy: share of questions whose right answer has the fewest bits per byte; None without a choice.
        accuracy_standard_error: standard error of the accuracy.
    """

    questions: int
    bits_per_byte: float
    standard_error: float
    accuracy: float | None = None
    accuracy_standard_error: float | None = None

    def __str__(self) -> str:
        bits = f"{with_error(self.bits_per_byte, self.standard_error)} bits per byte"
        if self.accuracy is None:
            return bits
        return f"{bits}, accuracy {with_error(self.accuracy, self.accuracy_standard_error, '.3f')}"


def score_task(
    components: Components,
    questions: Sequence[Question],
    options: EvalOptions = DEFAULTS,
    *,
    seq_len: int,
) -> TaskScore:
    """Score a model's answers to questions.

    Args:
        components: model and agent; they keep their mode.
        questions: at least one question.
        options: how to evaluate.
        seq_len: length of the model's training sequences. Longer contexts lose their beginning; answers stay complete.
    """
    pairs = [(q.context.encode(), choice.encode()) for q in questions for choice in q.choices]
    bits = answer_bits(components, pairs, options, seq_len=seq_len)
    per_byte = iter((bits / torch.tensor([len(answer) for _, answer in pairs])).tolist())
    choices = [[next(per_byte) for _ in q.choices] for q in questions]
    gold_Q = torch.tensor(
        [of[q.gold] for q, of in zip(questions, choices, strict=True)], dtype=torch.float64
    )
    result = {"bits_per_byte": gold_Q.mean().item(), "standard_error": _standard_error(gold_Q)}
    if all(len(q.choices) > 1 for q in questions):
        right = [of.index(min(of)) == q.gold for q, of in zip(questions, choices, strict=True)]
        right_Q = torch.tensor(right, dtype=torch.float64)
        result |= {
            "accuracy": right_Q.mean().item(),
            "accuracy_standard_error": _standard_error(right_Q),
        }
    return TaskScore(len(questions), **result)


def _standard_error(value_Q: Tensor) -> float:
    return (value_Q.std() / math.sqrt(len(value_Q))).item() if len(value_Q) > 1 else math.nan


def answer_bits(
    components: Components,
    pairs: Sequence[tuple[bytes, bytes]],
    options: EvalOptions = DEFAULTS,
    *,
    seq_len: int,
) -> Tensor:
    """Return ``-log2 p(answer | context)`` of each pair of context and answer, both of at least one byte.

    Contexts are cut from the left to ``seq_len`` symbols including the answer, but to no less than one byte. Sequences
    of similar lengths share a pass. The arguments are those of ``score_task``.

    Returns:
        float64 [P], on the CPU.
    """
    device = components.lm.head.weight.device
    rows = [context[-max(seq_len - len(answer), 1) :] + answer for context, answer in pairs]
    by_length = sorted(range(len(rows)), key=lambda p: len(rows[p]))
    bits_P = torch.zeros(len(rows), dtype=torch.float64)
    size = options.sequences_per_pass(seq_len)
    with eval_mode(components, options) as draw:
        starts = range(0, len(rows), size)
        for start in tqdm(
            starts, desc="answers", unit="batch", leave=False, disable=not options.progress
        ):
            chosen = by_length[start : start + size]
            symbol_BN, length_B = _pad([rows[p] for p in chosen], device)
            td = draw(symbol_BN, length_B)
            # positions of the predicted symbols
            position_T = torch.arange(1, symbol_BN.shape[1], device=device)
            begin_B = length_B - torch.tensor([len(pairs[p][1]) for p in chosen], device=device)
            # The log-likelihoods of the padding are zero.
            nats_BT = td[keys.LOG_LIKELIHOOD].double().where(position_T >= begin_B[:, None], 0.0)
            bits_P[chosen] = -nats_BT.sum(-1).cpu() / math.log(2)
    return bits_P


def _pad(rows: Sequence[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return symbols [B, N], zero in the padding, and lengths [B]."""
    length = max(map(len, rows))
    symbol_BN = torch.tensor([list(row.ljust(length, b"\0")) for row in rows], device=device)
    return symbol_BN, torch.tensor([len(row) for row in rows], device=device)
