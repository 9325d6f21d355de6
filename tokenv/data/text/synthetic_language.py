"""A synthetic language whose true token boundaries are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

STEM_LENGTHS = (2, 6)
STEM_LETTERS = b"abcdef"
ENDINGS = b"ghijklmnopqrstuvwxyz"
DOCUMENT_WORDS = (400, 1000)
NEIGHBOURS = 10  # words that succeed one another in a circle
FOLLOWS = 0.9

Array = np.ndarray[Any, Any]


def make_lexicon(size: int, seed: int) -> list[bytes]:
    """Make distinct words of 3 to 7 letters, the most frequent first.

    A word is a stem of the letters a to f and an ending, one of the others. Its last two letters tell it from the
    119 words before and after it in the lexicon; whatever stands earlier, many words share.

    Args:
        size: How many words.
        seed: Seed of the language.

    Returns:
        `size` words over a to z.
    """
    generator = np.random.default_rng([seed, 0])
    pairs = [bytes([last, ending]) for last in STEM_LETTERS for ending in ENDINGS]
    generator.shuffle(pairs)
    words: dict[bytes, None] = {}
    while len(words) < size:
        length = generator.integers(STEM_LENGTHS[0], STEM_LENGTHS[1], endpoint=True)
        start = bytes(generator.choice(list(STEM_LETTERS), size=length - 1).tolist())
        words[start + pairs[len(words) % len(pairs)]] = None
    return list(words)


def words_documents(lexicon_size: int, documents: int, seed: int) -> Dataset:
    """Write documents of a few thousand bytes in the synthetic language, without spaces.

    A word is followed by its successor with probability 0.9, else by any word, the k-th of the lexicon with
    probability proportional to 1/k (Zipf). Ten words of about one frequency succeed one another in a circle. So the
    end of a word is where it becomes plain what comes, and until the next end nothing of that changes.

    Args:
        lexicon_size: Distinct words of the language.
        documents: How many documents.
        seed: Seed of the language and of the documents.

    Returns:
        Rows `name`, `content` (the bytes) and `gold` (as many bytes, 1 at the last byte of every word).
    """
    lexicon = make_lexicon(lexicon_size, seed)
    generator = np.random.default_rng([seed, 1])
    words_D = generator.integers(*DOCUMENT_WORDS, size=documents, endpoint=True)
    drawn_K = _follow(lexicon_size, words_D, generator)

    length_W = np.array([len(word) for word in lexicon])
    end_K = np.cumsum(length_W[drawn_K])
    content = _spell(lexicon, length_W, drawn_K)
    gold = np.zeros(len(content), dtype=np.uint8)
    gold[end_K - 1] = 1

    end_D = end_K[np.cumsum(words_D) - 1].tolist()
    spans = list(zip([0, *end_D[:-1]], end_D, strict=True))
    return Dataset.from_dict(
        {
            "name": [f"words document {d}" for d in range(documents)],
            "content": [content[begin:end].tobytes() for begin, end in spans],
            "gold": [gold[begin:end].tobytes() for begin, end in spans],
        },
        features=Features({"name": Value("string"), "content": Value("large_binary"), "gold": Value("large_binary")}),
    )


def _follow(lexicon_size: int, words_D: Array, generator: np.random.Generator) -> Array:
    """Numbers of all words of all documents, one document after the other."""
    successor_W = np.empty(lexicon_size, dtype=np.int64)
    for first in range(0, lexicon_size, NEIGHBOURS):
        circle = generator.permutation(np.arange(first, min(first + NEIGHBOURS, lexicon_size)))
        successor_W[circle] = np.roll(circle, -1)
    weight_W = 1 / np.arange(1, lexicon_size + 1)
    shape = (len(words_D), words_D.max())
    word_DK = generator.choice(lexicon_size, size=shape, p=weight_W / weight_W.sum())
    follows_DK = generator.random(shape) < FOLLOWS
    for k in range(1, shape[1]):
        word_DK[:, k] = np.where(follows_DK[:, k], successor_W[word_DK[:, k - 1]], word_DK[:, k])
    return word_DK[np.arange(shape[1]) < words_D[:, None]]


def _spell(lexicon: list[bytes], length_W: Array, drawn_K: Array) -> Array:
    longest = length_W.max()
    letter_WL = np.frombuffer(b"".join(word.ljust(longest) for word in lexicon), dtype=np.uint8)
    letter_WL = letter_WL.reshape(len(lexicon), longest)
    used_WL = np.arange(longest) < length_W[:, None]
    return letter_WL[drawn_K][used_WL[drawn_K]]
