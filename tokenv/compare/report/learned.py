"""What each method's policy has learned about text, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report.numbers import agreement, mean, number, over_seeds
from tokenv.report.characters import visible
from tokenv.run.habits import CLASSES
from tokenv.run.passages import readable

_TOKENS = 12  # of the most frequent ones


def columns(comparison: Comparison) -> list[str]:
    """What is told of a method; nothing where nobody has measured it, as of series.

    Boundaries by class have a column for each class of byte that the text holds, with its share in it.
    """
    if not _classes(comparison):
        return []
    shares = [f"{name} ({number(100 * _mean(comparison.methods, name, 0), '.0f')}%)" for name in _classes(comparison)]
    return ["bytes per token", "F1 with whitespace", *shares, "most frequent tokens"]


def cells(comparison: Comparison) -> Callable[[ComparedMethod], list[str]]:
    """Method to one text for each of ``columns``; a dash where nothing was measured."""
    classes = _classes(comparison)

    def told(method: ComparedMethod) -> list[str]:
        spaces, rate = agreement(method, "whitespace"), over_seeds(method, "boundary_rate")
        return [
            number(1 / rate, ".2f") if rate > 0 else "–",
            number(spaces.f1, ".3f") if spaces else "–",
            *(number(_mean([method], name, 1), ".3f") for name in classes),
            _tokens(method),
        ]

    return told


def _classes(comparison: Comparison) -> list[str]:
    known = {
        name for m in comparison.methods for run in m.runs if (of := run.assessment.learned) for name in of.classes
    }
    return [name for name in CLASSES if name in known]


def _mean(methods: Sequence[ComparedMethod], name: str, which: int) -> float:
    """Share (0) or boundaries per byte (1) of a class, mean over all runs that know it."""
    every = [run.assessment.learned for method in methods for run in method.runs]
    return mean(learned.classes[name][which] for learned in every if learned and name in learned.classes)


def _tokens(method: ComparedMethod) -> str:
    """Those of the first seed, as its passages are."""
    learned = method.runs[0].assessment.learned
    if learned is None or not learned.tokens:
        return "–"
    return "  ".join(visible(readable(token.encode("latin-1"))) for token, _ in learned.tokens[:_TOKENS])
