"""Measure how far BPE boundaries read ahead: how many differ if the tokenizer reads only what a model has read.

    python examples/bpe_lookahead.py [SOURCE] [SEQUENCES] [VOCABULARY]

BPE guidance draws a boundary at byte i where byte i begins a token (arXiv 2602.13940, appendix D.1). Whether it does is
decided here twice: from the whole sequence, as the baseline does, and from bytes 0 to i alone, as a causal policy must.
"""

import sys

from tokenv.agents.bpe import BPE
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.tokenizer import train_bpe


def lookahead(
    source: str = "python", sequences: int = 24, vocabulary: int = 32_000
) -> tuple[float, float]:
    """Return the share of held-out positions where the two differ, and the baseline's boundaries per byte."""
    corpus = load_corpus(DataConfig(source=source, validation=0.1))
    tokenizer = BPE(tokenizer=train_bpe(corpus, vocabulary)).tokenizer
    differ = drawn = places = 0
    for row in corpus.validation(sequences).symbol_BN.tolist():
        text = bytes(row).decode("latin-1")
        begins = {begin for begin, _ in tokenizer.encode(text).offsets}
        prefixes = tokenizer.encode_batch([text[: i + 1] for i in range(1, len(text))])
        for i, prefix in enumerate(prefixes, 1):
            differ += (i in begins) != (prefix.offsets[-1][0] == i)
            drawn += i in begins
            places += 1
    return differ / places, drawn / places


if __name__ == "__main__":
    given = sys.argv[1:]
    differ, rate = lookahead(*given[:1], *map(int, given[1:]))
    print(
        f"{differ:.3f} of all boundary decisions depend on later bytes; {rate:.3f} boundaries per byte"
    )
