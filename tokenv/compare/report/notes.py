"""How to read a comparison, in sentences."""

from __future__ import annotations

from tokenv.report.words import SERIES, Words, in_words

_OF_TEXT = (
    "BPE guidance reads ahead: where a BPE token ends depends on bytes that are not yet predicted, even with its "
    "boundaries moved right by one.",
)
_OF_SERIES = (
    "Methods are ordered by the loss on validation windows, which come before the test windows in time: choose by "
    "validation, and report test, whose ± is the standard error over seeds.",
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
        f"{losses} are of held-out {data}, boundaries drawn as in training. A standard error over seeds says how much "
        f"another seed may move a figure, one over {documents} how much other held-out {data} may.",
        f"A pair's 95% interval holds both errors: the {documents}' by a paired bootstrap of the difference, the "
        "seeds' by Student's t of the differences seed by seed (by Welch's t where methods share no seed), for runs "
        f"of one seed share first parameters and the order of the {data}. Pairs are not corrected for their number: "
        "of twenty that do not differ, one will seem to.",
        *(_OF_SERIES if words == SERIES else _OF_TEXT),
        f"FLOPs are the paper's: 6 per matrix parameter for every {words.symbol} or {words.token}.",
    ]
