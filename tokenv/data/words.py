"""A synthetic language whose true token boundaries are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

WORD_LENGTHS = (2, 8)
DOCUMENT_WORDS = (400, 1000)
LETTERS = 26
FAMILY = 4
FOLLOWERS = 4
RESTART = 0.1


def make_lexicon(size: int, seed: int) -> list[bytes]:
    """Make distinct words of 2 to 8 letters, the most frequent first.

    Words come in families of four that differ in their last letter only, as inflected words do: which word it was is
    known when it ends and not before. All letters are drawn alike, so none marks the beginning or the end of a word.

    Args:
        size: How many words.
        seed: Seed of the language.

    Returns:
        `size` words over a to z.
    """
    generator = np.random.default_rng([seed, 0])
    words: dict[bytes, None] = {}
    while len(words) < size:
        length = generator.integers(WORD_LENGTHS[0] - 1, WORD_LENGTHS[1] - 1, endpoint=True)
        stem = bytes((ord("a") + generator.integers(LETTERS, size=length)).tolist())
        endings = ord("a") + generator.choice(LETTERS, size=FAMILY, replace=False)
        words |= {stem + bytes([ending]): None for ending in endings.tolist()}
    return [list(words)[rank] for rank in generator.permutation(len(words))[:size].tolist()]


def make_chain(size: int, length: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw a sequence of word numbers in which a word says much about the next one.

    Every word has 4 followers, drawn by Zipf's law; it is followed by its k-th one with probability proportional to
    1/k, or, once in ten words, by any word of the lexicon by Zipf's law. Were the words independent, a word that has
    ended would tell nothing about what comes, and nothing would be gained by a token that ends with it.

    Args:
        size: Words in the lexicon.
        length: Words to draw.
        generator: Source of randomness.

    Returns:
        int64 [length], numbers below `size`.
    """
    weight_W = 1 / np.arange(1, size + 1)
    weight_W /= weight_W.sum()
    followers = min(FOLLOWERS, size)
    follower_WF = np.stack([generator.choice(size, size=followers, replace=False, p=weight_W) for _ in range(size)])
    weight_F = 1 / np.arange(1, followers + 1)
    choice_K = generator.choice(followers, size=length, p=weight_F / weight_F.sum()).tolist()
    fresh_K = np.where(generator.random(length) < RESTART, generator.choice(size, size=length, p=weight_W), -1).tolist()
    table, word, chain = follower_WF.tolist(), 0, []
    for choice, fresh in zip(choice_K, fresh_K, strict=True):
        word = fresh if fresh >= 0 else table[word][choice]
        chain.append(word)
    return np.array(chain)


def words_documents(lexicon_size: int, documents: int, seed: int) -> Dataset:
    """Write documents of a few thousand bytes in the synthetic language, without spaces.

    Words follow one another as in `make_chain`.

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
    drawn_K = make_chain(lexicon_size, int(words_D.sum()), generator)

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
