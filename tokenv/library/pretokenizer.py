"""Pre-tokenize with a model's boundaries, for Hugging Face's ``tokenizers`` and ``transformers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenv.core.errors import MissingFileError
from tokenv.library.spans import Span


class PreTokenizer:
    """Splits text at a model's boundaries.

    ``tokenizers.pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer())`` makes it a pre-tokenizer of that library: a
    tokenizer with it learns a vocabulary within the model's tokens. Like all custom ones, it is not saved.

    Args:
        spans: function which segments a text of at least one character.
    """

    def __init__(self, spans: Callable[[str], Iterable[Span]]) -> None:
        self._spans = spans

    def pre_tokenize_str(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Split a text into pieces with their offsets in characters; joined, the pieces are the text.

        A boundary inside a character of several bytes is moved to its end.
        """
        return [(text[start:end], (start, end)) for start, end in pairwise(self._offsets(text))]

    def pre_tokenize(self, pretok: Any) -> None:
        """Split a ``PreTokenizedString`` in place; the library calls this method."""
        pretok.split(lambda _, piece: [piece[start:end] for start, end in pairwise(self._offsets(str(piece)))])

    def _offsets(self, text: str) -> list[int]:
        """Return offsets in characters, from 0 to the text's end; none for an empty text."""
        if not text:
            return []
        ends = {span.end for span in self._spans(text)}
        offsets, position = [0], 0
        for i, character in enumerate(text, 1):
            before, position = position, position + len(character.encode(errors="surrogateescape"))
            if not ends.isdisjoint(range(before + 1, position + 1)):
                offsets.append(i)
        return offsets


def fast_tokenizer(pre_tokenizer: PreTokenizer, texts: Iterable[str], vocab_size: int, **options: Any) -> Any:
    """Train a byte-level BPE vocabulary within a pre-tokenizer's pieces.

    Args:
        pre_tokenizer: pre-tokenizer which splits text first.
        texts: texts to train the vocabulary on.
        vocab_size: number of entries, including the 256 bytes.
        **options: options of ``transformers.PreTrainedTokenizerFast``.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``.

    Raises:
        MissingFileError: if transformers is not installed.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingFileError("tokenizer() needs the package transformers: pip install transformers") from None
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    both = pre_tokenizers.Sequence([pre_tokenizers.PreTokenizer.custom(pre_tokenizer), in_bytes])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = both, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = in_bytes  # transformers copies the tokenizer, which is impossible with one in Python
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.backend_tokenizer.pre_tokenizer = both
    return fast
