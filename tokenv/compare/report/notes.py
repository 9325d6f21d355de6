"""How to read a comparison, in sentences."""

from __future__ import annotations

from tokenv.report.words import SERIES, Words, in_words

_OF_TEXT = (
    "BPE guidance reads ahead: where a BPE token ends depends on bytes that are not yet predicted, even with its "
    "boundaries moved right by one.",
)
_OF_SERIES = (
    "Methods are ordered by the loss on validation windows, which come before the test windows in time: choose by "
    "validation, and report test.",
    "Windows that depend on one another are of one group: those at the same time, or those of one synthetic series.",
)


def notes(words: Words, unit: str) -> list[str]:
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
