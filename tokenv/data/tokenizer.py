"""Train a byte-level BPE tokenizer on a corpus, for agents which draw its boundaries."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tokenv.core.atomic import write_atomically
from tokenv.core.errors import COUNT, at_least, check_value
from tokenv.data.corpus import Corpus

BYTES = 256
# GPT-2's pattern for splitting text into words, for bytes: each is one character, and all from 128 on count as
# letters, because most of them belong to letters of other scripts.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)"
    r"| ?[A-Za-z\u0080-\u00ff]+"
    r"| ?[0-9]+"
    r"| ?[^ \t\n\r\f\vA-Za-z0-9\u0080-\u00ff]+"
    r"|[ \t\n\r\f\v]+(?![^ \t\n\r\f\v])"
    r"|[ \t\n\r\f\v]+"
)


def user_cache() -> Path:
    """Return the folder of this user's caches: ``$XDG_CACHE_HOME/tokenv`` or ``~/.cache/tokenv``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenv"


def train_bpe(
    corpus: Corpus,
    vocabulary_size: int,
    cache: str | Path | None = None,
    *,
    max_bytes: int = 100_000_000,
) -> Path:
    """Train a tokenizer on a corpus' training sequences, or return the cached one.

    A byte b is the character ``chr(b)``, so that any bytes are a text, and a token's offsets are bytes. Text is
    split into words as for GPT-2 before pairs are merged; tokens never cross them.

    Args:
        corpus: corpus whose training sequences are read, each once.
        vocabulary_size: number of tokens including the 256 bytes; a text without repeated pairs gives fewer.
        cache: folder for tokenizers, by their training data; None for the user's (``user_cache() / "bpe"``).
        max_bytes: largest number of bytes to read.

    Returns:
        The tokenizer's JSON file.

    Raises:
        UserError: ``vocabulary_size`` below 256, or ``max_bytes`` below 1.
    """
    check_value("vocabulary_size", vocabulary_size, at_least(BYTES))  # a token for each byte
    check_value("max_bytes", max_bytes, COUNT)
    folder = user_cache() / "bpe" if cache is None else Path(cache)
    key = repr((corpus.fingerprint, vocabulary_size, max_bytes, WORDS)).encode()
    path = folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"
    if path.is_file():
        return path

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    alphabet = [chr(byte) for byte in range(BYTES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_training_texts(corpus, max_bytes), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tokenizer.to_str(pretty=True))
    return path


def _training_texts(corpus: Corpus, max_bytes: int, batch_size: int = 64) -> Iterator[list[str]]:
    """Yield every training sequence once; the stream is endless and repeats after an epoch."""
    stream = corpus.train(seed=0)
    seen = set[str]()
    for _ in range(0, max_bytes, batch_size * corpus.seq_len):
        batch = stream.next(batch_size)
        first = {origin: row for row, origin in reversed(list(enumerate(batch.origin)))}
        fresh = sorted(row for origin, row in first.items() if origin not in seen)
        seen.update(first)
        yield [bytes(batch.symbol_BN[row].tolist()).decode("latin-1") for row in fresh]
        if len(fresh) < len(batch):
            return
