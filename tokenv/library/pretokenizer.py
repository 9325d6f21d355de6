"""A model's boundaries as a pre-tokenizer of Hugging Face's ``tokenizers``, and of a tokenizer of ``transformers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenv.core.errors import MissingFileError
from tokenv.library.spans import Span


class PreTokenizer:
    """Splits text where a model draws boundaries above 1/2.

    ``tokenizers.pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer())`` is one of that library's: a tokenizer that
    is trained behind it learns a vocabulary within the model's tokens. Like all custom ones, it is not saved with it.

    Args:
        spans: cuts a text of at least one character.
    """

    def __init__(self, spans: Callable[[str], Iterable[Span]]) -> None:
        self._spans = spans

    def pre_tokenize_str(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Pieces with their offsets in characters, as all of the library's pre-tokenizers give them.

        A boundary inside a character of several bytes comes after it. Joined, the pieces are the text.
        """
        return [(text[start:end], (start, end)) for start, end in pairwise(self._cuts(text))]

    def pre_tokenize(self, pretok: Any) -> None:
        """Split a ``PreTokenizedString`` in place: what the library calls."""
        pretok.split(lambda _, piece: [piece[start:end] for start, end in pairwise(self._cuts(str(piece)))])

    def _cuts(self, text: str) -> list[int]:
        """Offsets in characters, from 0 to the text's end; none for an empty text."""
        if not text:
            return []
        ends = {span.end for span in self._spans(text)}
        cuts, position = [0], 0
        for i, character in enumerate(text, 1):
            before, position = position, position + len(character.encode(errors="surrogateescape"))
            if not ends.isdisjoint(range(before + 1, position + 1)):
                cuts.append(i)
        return cuts


def fast_tokenizer(pre_tokenizer: PreTokenizer, texts: Iterable[str], vocab_size: int, **options: Any) -> Any:
    """Train a byte-level BPE vocabulary within a pre-tokenizer's pieces.

    Args:
        pre_tokenizer: splits text first.
        texts: that the vocabulary is trained on.
        vocab_size: entries, the 256 bytes included.
        **options: of ``transformers.PreTrainedTokenizerFast``.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``.

    Raises:
        MissingFileError: transformers is not installed.
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
    tokenizer.pre_tokenizer = in_bytes  # transformers copies the tokenizer, and one in Python cannot be copied
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.backend_tokenizer.pre_tokenizer = both
    return fast
