"""A synthetic language whose true token boundaries are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

WORD_LENGTHS = (2, 8)
DOCUMENT_WORDS = (400, 1000)
LETTERS = 26


def make_lexicon(size: int, seed: int) -> list[bytes]:
    """Make distinct words of 2 to 8 letters, the most frequent first.

    Every letter of every word is drawn alike, so no letter marks the beginning or the end of a word: what
    gives a word away is only that its letters recur together.

    Args:
        size: How many words.
        seed: Seed of the language.

    Returns:
        `size` words over a to z.
    """
    generator = np.random.default_rng([seed, 0])
    words: dict[bytes, None] = {}
    while len(words) < size:
        length = generator.integers(WORD_LENGTHS[0], WORD_LENGTHS[1], endpoint=True)
        words[bytes(ord("a") + letter for letter in generator.integers(LETTERS, size=length).tolist())] = None
    return list(words)


def words_documents(lexicon_size: int, documents: int, seed: int) -> Dataset:
    """Write documents of a few thousand bytes in the synthetic language, without spaces.

    Words follow one another independently, the k-th most frequent with probability proportional to 1/k.

    Args:
        lexicon_size: Distinct words of the language.
        documents: How many documents.
        seed: Seed of the language and of the documents.

    Returns:
        Rows `name`, `content` (the bytes) and `gold` (as many bytes, 1 at the last byte of every word).
    """
    lexicon = make_lexicon(lexicon_size, seed)
    generator = np.random.default_rng([seed, 1])
    weight_W = 1 / np.arange(1, lexicon_size + 1)
    words_D = generator.integers(*DOCUMENT_WORDS, size=documents, endpoint=True)
    drawn_K = generator.choice(lexicon_size, size=words_D.sum(), p=weight_W / weight_W.sum())

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


def _spell(lexicon: list[bytes], length_W: np.ndarray[Any, Any], drawn_K: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    longest = WORD_LENGTHS[1]
    letter_WL = np.frombuffer(b"".join(word.ljust(longest) for word in lexicon), dtype=np.uint8)
    letter_WL = letter_WL.reshape(len(lexicon), longest)
    used_WL = np.arange(longest) < length_W[:, None]
    return letter_WL[drawn_K][used_WL[drawn_K]]
