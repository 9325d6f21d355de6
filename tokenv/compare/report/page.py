"""Write a comparison of methods as a self-contained web page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report import forecast_tables, method_tables, rate_tables
from tokenv.compare.report.aggregate import (
    agreement,
    colour_scale,
    conclusion,
    error_on_test,
    number,
    oriented,
    over_seeds,
    passages,
    ranked,
    references,
    styles,
    targets,
    with_error,
)
from tokenv.compare.significance import Difference, sentence
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.figures import Picture
from tokenv.plotting.html import coloured, legend, render
from tokenv.plotting.theme import SERIES, Terminology, in_words

_OF_TEXT = (
    "BPE guidance reads ahead: where a BPE token ends depends on bytes that are not yet predicted, even with its "
    "boundaries moved right by one.",
)
_OF_SERIES = (
    "Methods are ordered by the loss on validation windows, which come before the test windows in time: choose by "
    "validation, and report test.",
    "Windows that depend on one another are of one group: those at the same time, or those of one synthetic series.",
)


def notes(words: Terminology, unit: str) -> list[str]:
    """Sentences on how to read the figures.

    Args:
        words: what things are called.
        unit: of the losses, as metrics are named.
    """
    data, documents, losses = words.data, f"{words.document}s", in_words(unit).capitalize()
    return [
        f"{losses} are of held-out {data}, boundaries drawn as in training. ± is always the standard error over seeds: "
        f"how much another seed may move a figure. The error over {documents}, how much other held-out {data} may, has "
        "a column of its own.",
        f"A pair's 95% interval holds both errors of the difference: over {documents}, and over seeds, seed by seed "
        "(as Welch does where methods do not share two seeds), for runs of one seed share first parameters and the "
        f"order of the {data}; each counts with Student's t of its own degrees of freedom (Cochran and Cox). One seed "
        "alone decides nothing.",
        "Verdicts and intervals are not corrected for the number of pairs: of twenty that do not differ, one will seem "
        "to. Holm's corrected p-values are: where all pairs with one below 0.05 are taken to differ, the chance that "
        "any of them does not is at most 5%.",
        *(_OF_SERIES if words == SERIES else _OF_TEXT),
        f"FLOPs are what the method needs by the paper's rule, 6 per matrix parameter for every {words.symbol} or "
        f"{words.token}, and Muon's matrix products; padding is not counted.",
    ]


T = TypeVar("T")

_MANY = 6  # sentences on pairs that are shown at once


def comparison_page(comparison: Comparison, pictures: Mapping[str, Picture]) -> str:
    """Show who is best, how sure that is, how training went, and the same text or windows, cut by every method.

    Args:
        comparison: what to show.
        pictures: what `tokenv.compare.report.pictures.draw_pictures` drew of it.

    Returns:
        One HTML document, to be written as UTF-8. It loads nothing and runs no script.
    """
    looks = styles(comparison)
    scale = colour_scale(comparison)
    return render(
        "compare/report/comparison.html.jinja",
        title=escape(comparison.title),
        conclusion=[escape(sentence) for sentence in conclusion(comparison)],
        failed=_shown(comparison.failed),
        facts=_shown(comparison.facts),
        looks=[looks[method.name] for method in comparison.methods],
        unit=escape(comparison.unit_in_words),
        words=comparison.words,
        columns=_columns(comparison),
        methods=_rows(comparison, lambda method: (_settings(method), _cells(method, comparison))),
        targets=targets(comparison),
        matrix=_rows(comparison, _differences(comparison)),
        sentences=[_sentence(pair, difference, comparison) for pair, difference in comparison.differences.items()],
        many=len(comparison.differences) > _MANY,
        rates=rate_tables.columns(comparison),
        rate_losses=_named(comparison, rate_tables.losses(comparison)),
        rate_differences=_named(comparison, rate_tables.differences(comparison)),
        rates_against=escape_line(comparison.rates_against),
        forecasts=_forecasts(comparison),
        pictures={name: embedded(picture) for name, picture in pictures.items()},
        windows=[name for name in pictures if name.startswith("window-")],
        references=[escape(name) for name in references(comparison)],
        agreements=_rows(comparison, lambda method: _scores(method, references(comparison))),
        learned=method_tables.columns(comparison),
        habits=_rows(comparison, method_tables.cells(comparison)),
        passages=[
            (f"held-out passage {i + 1}", _rows(comparison, partial(_spans, passage=i, scale=scale)))
            for i in range(max(len(method.runs[0].assessment.passages) for method in comparison.methods))
        ],
        notes=notes(comparison.words, comparison.unit),
        **legend(scale),
    )


def _forecasts(comparison: Comparison) -> dict[str, Any] | None:
    """What the page tells of forecasts; None where there are none."""
    found = comparison.forecasts
    if found is None:
        return None
    number_of = {method.name: i for i, method in enumerate(comparison.methods)}
    return {
        "title": forecast_tables.title(found),
        "conclusion": [escape(said) for said in forecast_tables.conclusion(found)],
        "columns": forecast_tables.columns(found),
        "rows": [
            (number_of.get(each.name), escape_line(each.name), forecast_tables.cells(each, found))
            for each in found.forecasters
        ],
        "names": [escape_line(each.name) for each in found.forecasters],
        "matrix": forecast_tables.matrix(found),
    }


def _rows(comparison: Comparison, shown: Callable[[ComparedMethod], T]) -> list[tuple[int, str, T]]:
    """Number (of its look), name and whatever is shown of every method, best first."""
    number_of = {method.name: i for i, method in enumerate(comparison.methods)}
    return [(number_of[method.name], escape_line(method.name), shown(method)) for method in ranked(comparison)]


def _named(comparison: Comparison, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same rows, which begin with a method's name, with the number of its look before it."""
    number_of = {method.name: i for i, method in enumerate(comparison.methods)}
    return [(number_of[name], escape_line(name), *rest) for name, *rest in rows]


def _shown(rows: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(escape(name), escape(value)) for name, value in rows.items()]


def _settings(method: ComparedMethod) -> str:
    return ", ".join(f"{escape_line(key)} = {escape_line(value)}" for key, value in method.settings.items())


def _columns(comparison: Comparison) -> list[str]:
    words, test = comparison.words, ["test ± seeds"] if comparison.has_test else []
    loss = [f"{escape(comparison.unit_in_words)} ± seeds", f"error over {words.document}s", "each seed"]
    raw = ["before calibration", "its rate"] if comparison.calibrated else []
    return [*loss, *test, "mean over training", "early exit", f"boundaries / {words.symbol}", *raw, "FLOPs", "seconds"]


def _cells(method: ComparedMethod, comparison: Comparison) -> list[str]:
    """One text for each of ``_columns``."""
    raw = [number(over_seeds(method, "loss_raw")), number(over_seeds(method, "boundary_rate_raw"), ".3f")]
    return [
        with_error(method.loss, method.seed_error),
        number(method.document_error),
        " ".join(number(run.loss) for run in method.runs),
        *([with_error(over_seeds(method, "loss_test"), error_on_test(method))] if comparison.has_test else []),
        number(over_seeds(method, "area")),
        number(over_seeds(method, "loss_early")),
        number(over_seeds(method, "boundary_rate"), ".3f"),
        *(raw if comparison.calibrated else []),
        number(over_seeds(method, "flops"), ".2e"),
        number(over_seeds(method, "seconds"), ",.0f"),
    ]


def _differences(comparison: Comparison) -> Callable[[ComparedMethod], list[tuple[str, str, str] | None]]:
    """Method to its cells of the matrix: style class, text and tooltip against every other; None against itself."""
    pairs, columns = oriented(comparison), ranked(comparison)

    def cell(row: ComparedMethod, other: ComparedMethod) -> tuple[str, str, str]:
        pair = (row.name, other.name)
        difference = pairs.get(pair)
        if difference is None:
            return ("unknown", "–", "not compared")
        said = _sentence(pair, difference, comparison)
        tip = f"{said} The cell is {escape_line(row.name)} − {escape_line(other.name)}."
        return (difference.verdict.replace(" ", "-"), number(difference.mean, "+.4f"), tip)

    return lambda row: [None if row is other else cell(row, other) for other in columns]


def _sentence(pair: tuple[str, str], difference: Difference, comparison: Comparison) -> str:
    return escape(sentence(*pair, difference, comparison.unit_in_words))


def embedded(picture: Picture) -> dict[str, str]:
    """A picture as a page shows it: caption, and both variants as data."""
    light, dark = (
        "data:image/png;base64," + base64.b64encode(image).decode("ascii") for image in (picture.light, picture.dark)
    )
    return {"caption": picture.caption, "light": light, "dark": dark}


def _scores(method: ComparedMethod, held: Sequence[str]) -> list[str]:
    """Precision, recall and F1 against each of the references."""
    cells = []
    for reference in held:
        found = agreement(method, reference)
        cells += [number(x, ".3f") for x in (found.precision, found.recall, found.f1)] if found else ["–"] * 3
    return cells


def _spans(method: ComparedMethod, passage: int, scale: tuple[float, float]) -> list[tuple[str, str, str]]:
    """The passage as the first seed cut it; empty if there is none."""
    texts = passages(method)
    return coloured(texts[passage], scale) if passage < len(texts) else []
