"""A comparison of methods as a web page that needs nothing but itself."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report import forecasts, learned, rates
from tokenv.compare.report.lines import styles
from tokenv.compare.report.notes import notes
from tokenv.compare.report.numbers import (
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
    targets,
    with_error,
)
from tokenv.compare.significance import Difference, sentence
from tokenv.report.canvas import Picture
from tokenv.report.characters import plain, visible
from tokenv.report.html import coloured, legend, render

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
        title=visible(comparison.title),
        conclusion=[visible(sentence) for sentence in conclusion(comparison)],
        failed=_shown(comparison.failed),
        facts=_shown(comparison.facts),
        looks=[looks[method.name] for method in comparison.methods],
        unit=visible(comparison.unit_in_words),
        words=comparison.words,
        columns=_columns(comparison),
        methods=_rows(comparison, lambda method: (_settings(method), _cells(method, comparison))),
        targets=targets(comparison),
        matrix=_rows(comparison, _differences(comparison)),
        sentences=[_sentence(pair, difference, comparison) for pair, difference in comparison.differences.items()],
        many=len(comparison.differences) > _MANY,
        rates=rates.columns(comparison),
        rate_losses=_named(comparison, rates.losses(comparison)),
        rate_differences=_named(comparison, rates.differences(comparison)),
        rates_against=plain(comparison.rates_against),
        forecasts=_forecasts(comparison),
        pictures={name: embedded(picture) for name, picture in pictures.items()},
        windows=[name for name in pictures if name.startswith("window-")],
        references=[visible(name) for name in references(comparison)],
        agreements=_rows(comparison, lambda method: _scores(method, references(comparison))),
        learned=learned.columns(comparison),
        habits=_rows(comparison, learned.cells(comparison)),
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
        "title": forecasts.title(found),
        "conclusion": [visible(said) for said in forecasts.conclusion(found)],
        "columns": forecasts.columns(found),
        "rows": [
            (number_of.get(each.name), plain(each.name), forecasts.cells(each, found)) for each in found.forecasters
        ],
        "names": [plain(each.name) for each in found.forecasters],
        "matrix": forecasts.matrix(found),
    }


def _rows(comparison: Comparison, shown: Callable[[ComparedMethod], T]) -> list[tuple[int, str, T]]:
    """Number (of its look), name and whatever is shown of every method, best first."""
    number_of = {method.name: i for i, method in enumerate(comparison.methods)}
    return [(number_of[method.name], plain(method.name), shown(method)) for method in ranked(comparison)]


def _named(comparison: Comparison, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same rows, which begin with a method's name, with the number of its look before it."""
    number_of = {method.name: i for i, method in enumerate(comparison.methods)}
    return [(number_of[name], plain(name), *rest) for name, *rest in rows]


def _shown(rows: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(visible(name), visible(value)) for name, value in rows.items()]


def _settings(method: ComparedMethod) -> str:
    return ", ".join(f"{plain(key)} = {plain(value)}" for key, value in method.settings.items())


def _columns(comparison: Comparison) -> list[str]:
    words, test = comparison.words, ["test ± seeds"] if comparison.has_test else []
    loss = [f"{visible(comparison.unit_in_words)} ± seeds", f"error over {words.document}s", "each seed"]
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
        tip = f"{said} The cell is {plain(row.name)} − {plain(other.name)}."
        return (difference.verdict.replace(" ", "-"), number(difference.mean, "+.4f"), tip)

    return lambda row: [None if row is other else cell(row, other) for other in columns]


def _sentence(pair: tuple[str, str], difference: Difference, comparison: Comparison) -> str:
    return visible(sentence(*pair, difference, comparison.unit_in_words))


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
