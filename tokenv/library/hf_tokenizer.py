"""A tokenizer of Hugging Face's transformers which learns and reads within a model's tokens; it needs transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tokenv
from tokenv.core.atomic import write_atomically

CODE = "tokenv_tokenizer"
SOURCE = '''"""The tokenizer of this folder, for transformers."""

from tokenv.library.hf_tokenizer import {name}
'''
RATE = "tokenv_rate"  # key of the stored configuration


class ModelTokenizer(PreTrainedTokenizerFast):
    """Byte-level BPE within a model's tokens; its ``tokenv_rate`` is the rate of ``Model.spans``.

    transformers copies, pickles and stores the Rust object of a tokenizer, which is impossible while a part of it is
    written in Python. So the model's pre-tokenizer is taken out for that, and the model is stored beside it.

    ``train`` and ``from_pretrained`` make one. Models are ``tokenv.library.model.Model``.
    """

    _model: Any

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, **options: Any) -> Any:
        """Read what ``save_pretrained`` wrote, from a folder or the Hub; ``AutoTokenizer`` calls this method."""
        tokenizer = super().from_pretrained(name, *args, **options)
        source = {key: options[key] for key in ("revision", "token") if key in options}
        return tokenizer._split_by(tokenv.load(name, **source))

    @classmethod
    def train(
        cls,
        model: Any,
        texts: Iterable[str],
        vocab_size: int,
        *,
        rate: float | None = None,
        **options: Any,
    ) -> ModelTokenizer:
        """Train a vocabulary of ``vocab_size`` entries, which hold the 256 bytes and the special tokens."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.pre_tokenizer = _both(model, rate)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[token for key, token in options.items() if key.endswith("_token")],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.pre_tokenizer = _in_bytes()
        return cls(tokenizer_object=tokenizer, **options, **{RATE: rate})._split_by(model)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> Any:
        """Save tokenizer and model in one folder, which ``AutoTokenizer`` (``trust_remote_code``) and ``load`` read."""
        folder = self._model.save_pretrained(save_directory)
        name = type(self).__name__
        write_atomically(folder / f"{CODE}.py", SOURCE.format(name=name))
        self.init_kwargs["auto_map"] = {"AutoTokenizer": [None, f"{CODE}.{name}"]}
        with self._without_model():
            return super().save_pretrained(save_directory, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        with self._without_model():
            backend = self.backend_tokenizer.to_str()
        return _rebuild, (type(self), self._model, backend, self.init_kwargs)

    def _split_by(self, model: Any) -> ModelTokenizer:
        self._model = model
        self.backend_tokenizer.pre_tokenizer = _both(model, self.init_kwargs[RATE])
        return self

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        self.backend_tokenizer.pre_tokenizer = _in_bytes()
        try:
            yield
        finally:
            self._split_by(self._model)


def _rebuild(
    kind: type[ModelTokenizer], model: Any, backend: str, options: dict[str, Any]
) -> ModelTokenizer:
    return kind(tokenizer_object=Tokenizer.from_str(backend), **options)._split_by(model)


def _in_bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _both(model: Any, rate: float | None) -> Any:
    by_model = pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer(rate=rate))
    return pre_tokenizers.Sequence([by_model, _in_bytes()])
