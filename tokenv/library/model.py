"""Load a trained model with ``tokenv.load``; segment, score, continue and forecast with it."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Self, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np
from huggingface_hub import HfApi

from tokenv.config.schema import Config
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.trust import allowing
from tokenv.data.corpus import CorpusFactory
from tokenv.evaluation.calibration import options_for_text, segment_at_rate
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import (
    LoadedRun,
    draw_boundaries,
    generate_texts,
    load_run,
    score_texts,
    segment_texts,
)
from tokenv.library import model_hub
from tokenv.library.spans import PreTokenizer, Spans
from tokenv.plotting.theme import with_error

Text = TypeVar("Text", str, bytes)
One: TypeAlias = str | bytes
Several: TypeAlias = list[str] | list[bytes] | list[str | bytes] | tuple[str | bytes, ...]


class Keywords(TypedDict, total=False):
    """Keyword arguments of a model's methods: the fields of ``EvalOptions`` with these names."""

    seed: int
    threshold: bool
    rate: float | None


class Writing(TypedDict, total=False):
    """Keyword arguments of ``Model.generate``, which describes them."""

    temperature: float
    top_p: float
    stop: str | bytes | None
    seed: int
    rate: float | None


def load(
    name: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    precision: Literal["auto", "float32", "bfloat16", "float64"] | None = None,
    trust_code: bool | str | list[str] = False,
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Load a trained model.

    Args:
        name: run folder such as ``runs/7``, one of its checkpoints, a folder which ``Model.save_pretrained`` wrote, or,
            if there is no such folder, ``owner/name`` on the Hugging Face Hub.
        checkpoint: checkpoint of a run folder: ``best`` by validation loss, or ``latest``.
        device: device of the model: ``auto`` (CUDA if available), ``cpu``, ``cuda`` or ``cuda:1``; None for the device
            which its run's configuration names.
        precision: precision of activations, ``float32``, ``bfloat16`` or ``auto`` (float32 on a CPU), or ``float64``
            (of parameters, too); None for that of the run's configuration.
        trust_code: name of code of your own which the model names, such as ``mytrick:mine``, several names, or True for
            all. No other code is imported. The permission ends with this call.
        revision: branch, tag or commit of a model on the Hub.
        token: access token for a private model on the Hub; None for the one which is stored on this machine.

    Returns:
        The model, of the class which its kind of data names: ``Model`` for text, ``tokenv.SeriesModel`` for series.

    Raises:
        MissingFileError: if neither a run nor a model on the Hub has this name.
        UserError: if its files are damaged, or it names code which ``trust_code`` does not name.
    """
    folder = model_hub.locate(name, revision=revision, token=token)
    with allowing(trust_code):
        trained = load_run(str(folder), checkpoint, device=device, precision=precision)
        target = trained.config.data.options.model
        if target is None:
            return Model(trained)
        return resolve_name(target)(trained)


class Model:
    """Trained model, which segments, scores and continues texts.

    Other kinds of data have a class of their own, derived from this one, with further methods: ``tokenv.SeriesModel``
    forecasts series.

    Methods take ``seed``, ``threshold`` and ``rate`` as keyword arguments: see
    ``tokenv.evaluation.evaluator.EvalOptions``. The same seed gives the same result. Texts are str, encoded as UTF-8,
    or bytes.

    Args:
        trained: model, agent and configuration of a run.

    Attributes:
        config: configuration of the run.
        lm: U-Net, a ``torch.nn.Module`` in evaluation mode.
        agent: agent which draws the boundaries.
    """

    def __init__(self, trained: LoadedRun) -> None:
        self._trained = trained
        self.config: Config = trained.config
        self.lm = trained.components.lm
        self.agent = trained.components.agent

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Load a model of this class; the arguments are those of ``tokenv.load``.

        Raises:
            UserError: see ``tokenv.load``; or if the model is of another kind of data.
        """
        model = load(name, **options)
        if not isinstance(model, cls):
            raise UserError(
                f"data.kind = {model.config.data.kind!r}: expected a model for tokenv.{cls.__name__}; tokenv.load "
                "chooses the class itself"
            )
        return model

    def spans(self, text: One, **options: Unpack[Keywords]) -> Spans:
        """Segment a text into tokens with boundary probabilities and the bits of each byte.

        Args:
            text: text of at least one byte.
            **options: see the class. A rate-conditioned model is given the ``rate``; the logits of any other model are
                shifted until this text has the rate, as nearly as possible. None is the model's own rate.

        Raises:
            UserError: if the text is empty, the rate is out of range or cannot be reached, or the model is one of
                series.
        """
        segmentation = segment_at_rate(
            self._text_model(),
            to_bytes(text),
            EvalOptions(**options),
        )
        return Spans(segmentation, self._trained.state.step)

    @overload
    def tokens(self, text: One, **options: Unpack[Keywords]) -> list[bytes]: ...
    @overload
    def tokens(self, text: Several, **options: Unpack[Keywords]) -> list[list[bytes]]: ...
    def tokens(
        self, text: One | Several, **options: Unpack[Keywords]
    ) -> list[bytes] | list[list[bytes]]:
        """Segment a text into tokens; joined, they are its bytes. The arguments are those of ``spans``.

        Several texts share forward passes; the result for each is that of the text alone, up to rounding.
        """
        if not isinstance(text, list | tuple):
            return self.spans(text, **options).tokens
        # each text has its own shift of the logits
        if options.get("rate") is not None and self.agent.rates is None:
            return [self.spans(each, **options).tokens for each in text]
        segmentations = segment_texts(
            self._text_model(),
            list(map(to_bytes, text)),
            EvalOptions(**options),
        )
        return [Spans(each, self._trained.state.step).tokens for each in segmentations]

    def offsets(self, text: One, **options: Unpack[Keywords]) -> np.ndarray[Any, Any]:
        """Return the offsets at which the tokens of a text end, the last of which is its end.

        These are the ends of ``spans``. Only the encoder and the policy run, so that this is about ten times as fast.

        Args:
            text: text of at least one byte.
            **options: see ``spans``.

        Returns:
            Offsets in bytes, increasing, int64 [M].

        Raises:
            UserError: see ``spans``.
        """
        trained = self._text_model()
        data = to_bytes(text)
        shifted = options_for_text(trained, data, EvalOptions(**options))
        boundary_N = draw_boundaries(trained, data, shifted).numpy()
        boundary_N[-1] = True
        return np.flatnonzero(boundary_N) + 1

    def pre_tokenizer(self, *, rate: float | None = None) -> PreTokenizer:
        """Return a pre-tokenizer for Hugging Face's ``tokenizers`` which splits text at the boundaries above 1/2.

        Args:
            rate: see ``spans``.

        Raises:
            UserError: if the model is one of series.
        """
        self._text_model()
        return PreTokenizer(functools.partial(self.offsets, threshold=True, rate=rate))

    def train_tokenizer(
        self,
        texts: Iterable[str] | None = None,
        vocab_size: int = 8192,
        *,
        sequences: int = 1024,
        rate: float | None = None,
        **options: Any,
    ) -> Any:
        """Train a byte-level BPE vocabulary within the model's tokens, for ``transformers``.

        Args:
            texts: texts to train the vocabulary on; None for training text of the run.
            vocab_size: number of entries, including the 256 bytes and the special tokens.
            sequences: number of the run's training sequences to train on if no ``texts`` are given.
            rate: see ``spans``.
            **options: options of ``transformers.PreTrainedTokenizerFast``, such as ``eos_token="</s>"``; the
                ``pad_token`` is ``<pad>`` by default.

        Returns:
            A ``transformers.PreTrainedTokenizerFast``. Its ``save_pretrained`` stores this model, too, so that
            ``AutoTokenizer.from_pretrained(folder, trust_remote_code=True)`` and ``tokenv.load(folder)`` read it.

        Raises:
            MissingFileError: if transformers is not installed.
            UserError: if the model is one of series.
        """
        self._text_model()
        try:
            from tokenv.library.hf_tokenizer import ModelTokenizer
        except ImportError:
            raise MissingFileError(
                "train_tokenizer() needs the package transformers: pip install transformers"
            ) from None
        if texts is None:
            batch = CorpusFactory(self.config.data)(0).next(sequences)
            texts = [bytes(row).decode(errors="replace") for row in batch.symbol_BN.tolist()]
        options.setdefault("pad_token", "<pad>")
        return ModelTokenizer.train(self, texts, vocab_size, rate=rate, **options)

    @overload
    def log_likelihood(
        self, text: One, *, context: One = b"", **options: Unpack[Keywords]
    ) -> float: ...
    @overload
    def log_likelihood(
        self, text: Several, *, context: One | Several = b"", **options: Unpack[Keywords]
    ) -> list[float]: ...
    def log_likelihood(
        self, text: One | Several, *, context: One | Several = b"", **options: Unpack[Keywords]
    ) -> float | list[float]:
        """Return ``log p(text | context)`` in nats; without a context, of all bytes but the first.

        Several texts share forward passes; the result for each is that of the text alone, up to rounding. Texts which
        are longer than the model's training sequences are read in overlapping windows: see
        ``tokenv.evaluation.loaded_run.score_texts``. The boundaries are drawn once; the result is a lower bound of the
        likelihood over all boundaries only on average.

        Args:
            text: text of at least one byte, or two without a context; or a list of texts.
            context: text before it; for several texts also a list with one for each.
            **options: see the class.

        Raises:
            UserError: if nothing is to be predicted, the model is one of series, or it is not rate-conditioned and a
                rate is given.
        """
        nats = [each for each, _ in self._score(_pairs(text, context), EvalOptions(**options))]
        if isinstance(text, list | tuple):
            return nats
        return nats[0]

    @overload
    def score(
        self, text: One, *, context: One = b"", **options: Unpack[Keywords]
    ) -> tuple[float, bool]: ...
    @overload
    def score(
        self, text: Several, *, context: One | Several = b"", **options: Unpack[Keywords]
    ) -> list[tuple[float, bool]]: ...
    def score(
        self, text: One | Several, *, context: One | Several = b"", **options: Unpack[Keywords]
    ) -> tuple[float, bool] | list[tuple[float, bool]]:
        """Return the log-likelihood of a text, and whether greedy decoding would have generated the text.

        The arguments and errors are those of ``log_likelihood``.

        Returns:
            ``log p(text | context)`` in nats, and whether each byte of the text is the most probable one after the
            preceding bytes, with the same boundaries.
        """
        scores = self._score(
            _pairs(text, context),
            EvalOptions(**options),
            greedy=True,
        )
        if isinstance(text, list | tuple):
            return scores
        return scores[0]

    def _score(
        self, pairs: Sequence[tuple[bytes, bytes]], options: EvalOptions, *, greedy: bool = False
    ) -> list[tuple[float, bool]]:
        starts = [max(len(context), 1) for context, _ in pairs]
        texts = [context + text for context, text in pairs]
        if any(len(text) <= start for start, text in zip(starts, texts, strict=True)):
            raise UserError(
                "nothing to predict: expected a text of at least one byte after the first, or a context"
            )
        scores = score_texts(self._text_model(), texts, options, greedy=greedy)
        return [
            (math.fsum(nats_N[start:]), all(greedy_N[start:]))
            for start, (nats_N, greedy_N) in zip(starts, scores, strict=True)
        ]

    @overload
    def generate(
        self,
        prompt: Text,
        max_new_tokens: int = 200,
        *,
        num_return_sequences: None = None,
        **options: Unpack[Writing],
    ) -> Text: ...
    @overload
    def generate(
        self,
        prompt: list[Text] | tuple[Text, ...],
        max_new_tokens: int = 200,
        *,
        num_return_sequences: None = None,
        **options: Unpack[Writing],
    ) -> list[Text]: ...
    @overload
    def generate(
        self,
        prompt: Text,
        max_new_tokens: int = 200,
        *,
        num_return_sequences: int,
        **options: Unpack[Writing],
    ) -> list[Text]: ...
    @overload
    def generate(
        self,
        prompt: list[Text] | tuple[Text, ...],
        max_new_tokens: int = 200,
        *,
        num_return_sequences: int,
        **options: Unpack[Writing],
    ) -> list[list[Text]]: ...
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 200,
        *,
        num_return_sequences: int | None = None,
        temperature: float = 0.8,
        top_p: float = 0.95,
        stop: str | bytes | None = None,
        seed: int = 0,
        rate: float | None = None,
    ) -> Any:
        """Continue a text, or several, which takes hardly longer; each is continued as it is alone, up to rounding.

        Args:
            prompt: text of at least one byte, or a list of texts.
            max_new_tokens: number of bytes to write after each.
            num_return_sequences: number of continuations of each text: those of the seeds ``seed``, ``seed + 1``, ...
            temperature: temperature of the bytes' distribution; 0 takes the most probable byte.
            top_p: probability mass of the nucleus from which bytes are sampled.
            stop: text after which generation stops.
            seed: see the class.
            rate: see the class.

        Returns:
            Prompt and continuation, of the prompt's type; in a str, bytes which are not UTF-8 are replaced. A list of
            them for a list of texts, or with ``num_return_sequences``; with both, a list for each text.

        Raises:
            UserError: if a prompt is empty, ``num_return_sequences`` is below 1, the model is one of series, or
                it is not rate-conditioned and a rate is given.
            ValueError: if ``max_new_tokens``, ``temperature``, ``top_p`` or ``stop`` is out of range.
        """
        several = isinstance(prompt, list | tuple)
        if several:
            prompts = list(prompt)
        else:
            prompts = [prompt]
        samples = 1
        if num_return_sequences is not None:
            samples = num_return_sequences
        end = None if stop is None else to_bytes(stop)
        written = generate_texts(
            self._text_model(),
            list(map(to_bytes, prompts)),
            max_new_tokens,
            EvalOptions(seed=seed, rate=rate),
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            stop=end,
        )
        texts: list[Any] = []
        for start, continuations in zip(prompts, written, strict=True):
            of_prompt = [_continued(start, each.text) for each in continuations]
            if num_return_sequences is None:
                texts.extend(of_prompt)
            else:
                texts.append(of_prompt)
        if several:
            return texts
        return texts[0]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Save the model for ``tokenv.load`` and for all commands which take ``run=``.

        Args:
            folder: folder for parameters (safetensors), configuration and history (JSON), and a model card; it is
                created if it is missing.

        Returns:
            The folder.
        """
        return model_hub.save(
            self._trained,
            Path(folder),
            facts=self._facts(),
        )

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        message: str | None = None,
    ) -> str:
        """Upload what ``save_pretrained`` writes to the Hugging Face Hub.

        Args:
            name: ``owner/name``; it is created if it is missing.
            private: whether only its owner can see it, if it is created; None for the owner's default.
            token: access token with write permission; None for the one which is stored on this machine.
            message: commit message.

        Returns:
            The model's address.
        """
        api = HfApi(token=token)
        message = message or "Upload a tokenv model"
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_hub.save(
                self._trained,
                Path(scratch) / "model",
                facts=self._facts(),
                name=name,
            )
            url = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message)
        return str(url)

    def _text_model(self) -> LoadedRun:
        if self.config.data.kind != "text":
            raise UserError(f"data.kind = {self.config.data.kind!r}: expected a model of text")
        return self._trained

    def _facts(self) -> dict[str, str]:
        state = self._trained.state
        config = self.config
        parameters = sum(p.numel() for p in [*self.lm.parameters(), *self.agent.parameters()])
        facts = {
            "trained on": f"{state.symbols:,} symbols of {config.data.source}",
            "parameters": f"{parameters:,}",
            "agent": f"{config.agent['name']}, rate {config.rate:g}",
        }
        if state.validation is not None:
            facts[state.unit.replace("_", " ")] = with_error(
                state.validation.loss, state.validation.standard_error
            )
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({self._trained.path}: {facts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in self._facts().items()
        )
        return f"<table><caption>{escape(str(self._trained.path))}</caption>{rows}</table>"


def _pairs(text: One | Several, context: One | Several) -> list[tuple[bytes, bytes]]:
    """Return the context and the text of each text.

    Raises:
        UserError: if the number of contexts is neither one nor that of the texts.
    """
    if isinstance(text, list | tuple):
        texts = text
    else:
        texts = [text]
    if isinstance(context, list | tuple):
        contexts = context
    else:
        contexts = [context] * len(texts)
    if len(contexts) != len(texts):
        raise UserError(
            f"context = {len(contexts)} contexts for {len(texts)} texts: expected one, or one for each"
        )
    return [
        (to_bytes(before, "context"), to_bytes(each))
        for before, each in zip(contexts, texts, strict=True)
    ]


def _continued(prompt: One, text: bytes) -> One:
    """Return a prompt's continuation, with it, in the prompt's type."""
    if isinstance(prompt, bytes):
        return text
    return prompt + text[len(to_bytes(prompt)) :].decode("utf-8", errors="replace")


def to_bytes(text: str | bytes, name: str = "text") -> bytes:
    """Return the bytes of a text, an argument of this name.

    Raises:
        UserError: if it is no text, or holds a lone surrogate.
    """
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str):
        raise UserError(f"{name} = {text!r:.80}: expected str or bytes")
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise UserError(f"{name} = {text[:80]!a}: expected Unicode text, or bytes") from None
