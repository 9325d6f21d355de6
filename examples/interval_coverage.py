"""Measure how often `tokenv compare`'s 95% interval contains the true difference.

Run `python examples/interval_coverage.py`.

Losses are drawn as the comparison models them: a normal error of every seed, another of every document, and no true
difference. The tables say for which share of draws the interval contained zero, with 40 documents of one length, and
with few documents whose lengths are log-normal.
"""

import itertools
import math

import numpy as np
from rich.console import Console
from rich.table import Table

from tokenv.compare.score_statistics import Difference, compare_scores

RATIOS, SEEDS, DOCUMENTS = (0.0, 0.3, 1.0, 3.0, 10.0), (2, 3, 5, 10), 40
# unequal documents; standard deviations of their lengths' logarithms
FEW, SPREADS = (5, 10, 20, 40), (0.7, 1.0, 1.5)


def draw(
    generator: np.random.Generator,
    ratio: float,
    seeds: int,
    *,
    paired: bool,
    documents: int,
    spread: float,
) -> Difference:
    """Draw one comparison of two methods that are equally good.

    Args:
        generator: of the draws.
        ratio: the documents' standard error over the seeds', of the mean.
        seeds: of each method.
        paired: whether both methods have the same seeds.
        documents: held out.
        spread: standard deviation of the logarithm of a document's sequences, 4 in the median; 0 for two each.
    """
    length_C = np.full(documents, 2)
    if spread:
        length_C = np.maximum(
            np.exp(generator.normal(math.log(4), spread, documents)).round().astype(int), 1
        )
    document_B = np.repeat(np.arange(documents), length_C)
    second_SB = np.zeros((seeds, len(document_B)))
    seed_S = generator.normal(0, math.sqrt(seeds), seeds)
    if not paired:
        seed_S = seed_S / math.sqrt(2)
        second_SB = np.repeat(
            generator.normal(0, math.sqrt(seeds / 2), (seeds, 1)), len(document_B), 1
        )
    effective = length_C.sum() ** 2 / np.square(length_C).sum()
    document_C = generator.normal(0, ratio * math.sqrt(effective), documents)
    rows = {"first": range(seeds), "second": range(seeds) if paired else range(seeds, 2 * seeds)}
    scores = {"first": seed_S[:, None] + document_C[document_B], "second": second_SB}
    return compare_scores(scores, documents=document_B, seeds=rows).differences["first", "second"]


def coverage(
    ratio: float,
    seeds: int,
    trials: int,
    *,
    paired: bool = True,
    documents: int = DOCUMENTS,
    spread: float = 0.0,
) -> float:
    """Return the share of intervals which contain the truth; arguments as for ``draw``, and the number of draws."""
    generator = np.random.default_rng(0)
    how = {"paired": paired, "documents": documents, "spread": spread}
    found = [draw(generator, ratio, seeds, **how) for _ in range(trials)]
    for each in found:
        assert (each.p < 0.05) == (each.verdict != "not separable")
    return sum(each.low < 0 < each.high for each in found) / trials


def main(trials: int = 4000) -> None:
    """Print the tables."""
    title = f"coverage of 95% intervals ({trials:,} draws each), by the documents' error over the seeds'"
    table = Table("seeds", *map(str, RATIOS), title=title)
    pairings = {"the same": True, "others": False}
    for (name, paired), seeds in itertools.product(pairings.items(), SEEDS):
        shares = (coverage(ratio, seeds, trials, paired=paired) for ratio in RATIOS)
        table.add_row(f"{seeds}, {name}", *(f"{share:.1%}" for share in shares))
    Console().print(table)
    table = Table(
        "documents, spread",
        *map(str, RATIOS),
        title="the same with 5 seeds and documents of unequal length",
    )
    for documents, spread in itertools.product(FEW, SPREADS):
        shares = (
            coverage(ratio, 5, trials, documents=documents, spread=spread) for ratio in RATIOS
        )
        table.add_row(f"{documents}, {spread}", *(f"{share:.1%}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
