"""``tokenv.load``: a trained model, and what can be asked of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.data.corpus import CorpusFactory
from tokenv.evaluation.calibration import segment_at_rate
from tokenv.evaluation.loaded_run import LoadedRun, generate_text, load_run, score_texts, segment_texts
from tokenv.forecasting.frames import forecast_frame
from tokenv.library import hub
from tokenv.library.pretokenizer import PreTokenizer, fast_tokenizer
from tokenv.library.spans import Spans
from tokenv.library.texts import One, Several, as_bytes, as_pairs
from tokenv.storage.trust import allowing

if TYPE_CHECKING:
    import pandas as pd

Text = TypeVar("Text", str, bytes)


def load(
    name: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    trust_code: bool | str | list[str] = False,
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Load a trained model.

    Args:
        name: a run folder such as ``runs/7``, one of its checkpoints, a folder that ``Model.save_pretrained`` wrote,
            or, where there is no such folder, ``owner/name`` on the Hugging Face Hub.
        checkpoint: of a run folder: ``best`` by validation loss, or ``latest``.
        device: where to put it: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:1``; None for where
            its run says.
        trust_code: the name of code of your own that the model names, such as ``mytrick:mine``, several, or True for
            all that it names; nothing of it is imported otherwise. It holds for this call.
        revision: of a model on the Hub: a branch, tag or commit.
        token: for a private one; None for the one that is stored on this machine.

    Raises:
        MissingFileError: there is no such run, nor such a model on the Hub.
        UserError: its files are damaged, or it names code that ``trust_code`` does not.
    """
    folder = hub.locate(name, revision=revision, token=token)
    with allowing(trust_code):
        return Model(load_run(str(folder), checkpoint, device=device))


class Model:
    """A trained model: it cuts text, weighs it and writes it; or, of series, continues them.

    What draws numbers takes ``seed`` and gives the same for the same; ``threshold=True`` draws a boundary where its
    probability is above 1/2 instead. Texts are str, taken as UTF-8, or bytes. A model that was trained for a range of
    rates takes ``rate``, the boundaries per byte that it is asked for; None is the range's mean.

    Args:
        trained: model, agent and configuration as a run left them.

    Attributes:
        config: of its run.
        lm: the U-Net, a ``torch.nn.Module`` in evaluation mode.
        agent: draws the boundaries.
    """

    def __init__(self, trained: LoadedRun) -> None:
        self._trained = trained
        self.config: Config = trained.config
        self.lm, self.agent = trained.parts.lm, trained.parts.agent

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Model:
        """The same as ``tokenv.load``."""
        return load(name, **options)

    def spans(self, text: str | bytes, *, seed: int = 0, threshold: bool = False, rate: float | None = None) -> Spans:
        """A text in tokens, with boundary probabilities and the bits of each byte.

        Args:
            text: at least one byte.
            seed: of the drawn boundaries.
            threshold: see the class.
            rate: boundaries per byte that this text is to have. A model that was trained for a range of rates is told
                it; the logits of any other are shifted until it has them, as near as it can. None for the model's own.

        Raises:
            UserError: the text is empty, the rate none or nothing that this model can be moved to, or the model is of
                series.
        """
        cut = segment_at_rate(self._of_text(), as_bytes(text), rate, seed=seed, threshold=threshold)
        return Spans(cut, self._trained.step)

    @overload
    def tokens(
        self, text: One, *, seed: int = 0, threshold: bool = False, rate: float | None = None
    ) -> list[bytes]: ...
    @overload
    def tokens(
        self, text: Several, *, seed: int = 0, threshold: bool = False, rate: float | None = None
    ) -> list[list[bytes]]: ...
    def tokens(
        self, text: One | Several, *, seed: int = 0, threshold: bool = False, rate: float | None = None
    ) -> list[bytes] | list[list[bytes]]:
        """Cut a text into tokens; joined, they are its bytes. The arguments are those of ``spans``.

        Several texts share passes of the model and have one answer each: that of the text alone, up to rounding.
        """
        if not isinstance(text, list | tuple):
            return self.spans(text, seed=seed, threshold=threshold, rate=rate).tokens
        if rate is not None and self.agent.rates is None:  # each text's logits are shifted by a number of its own
            return [self.tokens(each, seed=seed, threshold=threshold, rate=rate) for each in text]
        cuts = segment_texts(self._of_text(), list(map(as_bytes, text)), seed=seed, threshold=threshold, rate=rate)
        return [Spans(cut, self._trained.step).tokens for cut in cuts]

    def pre_tokenizer(self, *, rate: float | None = None) -> PreTokenizer:
        """The boundaries for Hugging Face's ``tokenizers``.

        Args:
            rate: of a model that was trained for a range of rates; see the class.

        Raises:
            UserError: the model is of series.
        """
        self._of_text()
        return PreTokenizer(functools.partial(self.spans, threshold=True, rate=rate))

    def tokenizer(
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
            texts: that the vocabulary is trained on; None for training text of the run.
            vocab_size: entries, the 256 bytes included.
            sequences: of the run's training text, where no ``texts`` are given.
            rate: of a model that was trained for a range of rates; see the class.
            **options: of ``transformers.PreTrainedTokenizerFast``, such as ``eos_token="</s>"``.

        Returns:
            A ``transformers.PreTrainedTokenizerFast``. ``save_pretrained`` cannot write the model's boundaries, which
            are computed in Python: call this again where it is needed.

        Raises:
            MissingFileError: transformers is not installed.
            UserError: the model is of series.
        """
        pieces = self.pre_tokenizer(rate=rate)
        if texts is None:
            batch = CorpusFactory(self.config.data)(0).next(sequences)
            texts = [bytes(row).decode(errors="replace") for row in batch.symbol_BN.tolist()]
        return fast_tokenizer(pieces, texts, vocab_size, **options)

    @overload
    def log_likelihood(
        self, text: One, *, context: One = b"", seed: int = 0, threshold: bool = False, rate: float | None = None
    ) -> float: ...
    @overload
    def log_likelihood(
        self,
        text: Several,
        *,
        context: One | Several = b"",
        seed: int = 0,
        threshold: bool = False,
        rate: float | None = None,
    ) -> list[float]: ...
    def log_likelihood(
        self,
        text: One | Several,
        *,
        context: One | Several = b"",
        seed: int = 0,
        threshold: bool = False,
        rate: float | None = None,
    ) -> float | list[float]:
        """``log p(text | context)`` in nats; without a context, of all bytes but the first.

        Several texts share passes of the model and have one answer each: that of the text alone, up to rounding.

        Texts longer than the model was trained on are read in overlapping windows: see
        ``tokenv.evaluation.loaded_run.score_text``. The boundaries are drawn once, which bounds the likelihood
        over all of them from below only on average.

        Args:
            text: at least one byte, two where there is no context; or a list of texts.
            context: what stands before it; of several texts also a list, one for each.
            seed: of the drawn boundaries.
            threshold: see the class.
            rate: of a model that was trained for a range of rates; see the class.

        Raises:
            UserError: there is nothing to predict, the model is of series, or it is not told a rate.
        """
        nats = [one for one, _ in self._weigh(as_pairs(text, context), seed=seed, threshold=threshold, rate=rate)]
        return nats if isinstance(text, list | tuple) else nats[0]

    @overload
    def score(
        self, text: One, *, context: One = b"", seed: int = 0, threshold: bool = False, rate: float | None = None
    ) -> tuple[float, bool]: ...
    @overload
    def score(
        self,
        text: Several,
        *,
        context: One | Several = b"",
        seed: int = 0,
        threshold: bool = False,
        rate: float | None = None,
    ) -> list[tuple[float, bool]]: ...
    def score(
        self,
        text: One | Several,
        *,
        context: One | Several = b"",
        seed: int = 0,
        threshold: bool = False,
        rate: float | None = None,
    ) -> tuple[float, bool] | list[tuple[float, bool]]:
        """As ``log_likelihood``, which has the arguments; and whether the model itself would have written this text.

        Returns:
            ``log p(text | context)`` in nats, and whether each of these bytes is the most probable one after those
            before it, under the same boundaries.
        """
        answers = self._weigh(as_pairs(text, context), seed=seed, threshold=threshold, rate=rate, greedy=True)
        return answers if isinstance(text, list | tuple) else answers[0]

    def _weigh(self, pairs: Sequence[tuple[bytes, bytes]], **how: Any) -> list[tuple[float, bool]]:
        firsts, wholes = [max(len(context), 1) for context, _ in pairs], [context + text for context, text in pairs]
        if any(len(whole) <= first for first, whole in zip(firsts, wholes, strict=True)):
            raise UserError("nothing to predict: expected a text of at least one byte after the first, or a context")
        found = score_texts(self._of_text(), wholes, **how)
        return [
            (math.fsum(nats_N[first:]), all(best_N[first:]))
            for first, (nats_N, best_N) in zip(firsts, found, strict=True)
        ]

    def generate(
        self,
        prompt: Text,
        max_new: int = 200,
        *,
        temperature: float = 0.8,
        top_p: float = 0.95,
        stop: str | bytes | None = None,
        seed: int = 0,
        rate: float | None = None,
    ) -> Text:
        """Continue a text.

        Args:
            prompt: at least one byte.
            max_new: bytes to write.
            temperature: 0 takes the most probable byte.
            top_p: nucleus that bytes are drawn from.
            stop: text after which to stop.
            seed: of boundaries and bytes.
            rate: of a model that was trained for a range of rates; see the class.

        Returns:
            Prompt and continuation, of the prompt's type; in a str, bytes that are no UTF-8 are replaced.

        Raises:
            UserError: the prompt is empty, the model is of series, or it is not told a rate.
            ValueError: ``max_new``, ``temperature``, ``top_p`` or ``stop`` cannot be.
        """
        ending = None if stop is None else as_bytes(stop)
        given = as_bytes(prompt)
        written = generate_text(
            self._of_text(), given, max_new, temperature=temperature, top_p=top_p, stop=ending, seed=seed, rate=rate
        )
        if isinstance(prompt, bytes):
            return written.text
        return prompt + written.text[len(given) :].decode("utf-8", errors="replace")

    def forecast(
        self,
        frame: pd.DataFrame,
        horizon: int = 96,
        *,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
        samples: int = 100,
        direct: bool | None = None,
        seed: int = 0,
        rate: float | None = None,
    ) -> pd.DataFrame:
        """Continue series from their last rows.

        Args:
            frame: a row for every step: long, with the columns ``unique_id``, ``ds`` and ``y``, or wide, with a column
                for every series (those that the run's ``data.series.columns`` names, or all) beside the dates, which
                are the column that ``data.series.date`` names or a ``DatetimeIndex``. Series may differ in length.
            horizon: steps to forecast.
            quantiles: probabilities in (0, 1), ascending.
            samples: continuations that a forecast is made of, where it is drawn value by value.
            direct: ask the direct head for exact quantiles of every step; None where it reaches so far.
            seed: of boundaries and values.
            rate: of a model that was trained for a range of rates; see the class.

        Returns:
            A row for every series and step: ``unique_id``, ``ds`` (the dates that follow, at the series' frequency; the
            number of the step where there are none), ``mean`` and a column such as ``q0.1`` for every quantile. The
            series come as they do in the frame.

        Raises:
            UserError: the model is of text; the horizon is longer than the direct head, or leaves no history; or the
                frame lacks columns, repeats or disorders dates, has irregular steps, or holds too short a series.
        """
        if self.config.data.kind != "series":
            raise UserError("data.kind = 'text': expected a model of series; generate continues text")
        how: dict[str, Any] = {"samples": samples, "direct": direct, "seed": seed, "rate": rate}
        return forecast_frame(self._trained, frame, horizon, quantiles, **how)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model, so that ``tokenv.load`` and every command that takes ``run=`` can read it.

        Args:
            folder: made where it is missing: parameters (safetensors), configuration and history (JSON), a model card.

        Returns:
            The folder.
        """
        return hub.save(self._trained, Path(folder), facts=self._facts())

    def push_to_hub(
        self, name: str, *, private: bool | None = None, token: str | None = None, message: str | None = None
    ) -> str:
        """Upload what ``save_pretrained`` writes to the Hugging Face Hub.

        Args:
            name: ``owner/name``; made where it is missing.
            private: whether only its owner sees it, if it is made; None for the owner's default.
            token: with write access; None for the one that is stored on this machine.
            message: of the commit.

        Returns:
            Where it can be seen.
        """
        return hub.push(self._trained, name, private=private, token=token, message=message, facts=self._facts())

    def _of_text(self) -> LoadedRun:
        if self.config.data.kind != "text":
            raise UserError(f"data.kind = {self.config.data.kind!r}: expected a model of text; forecast does these")
        return self._trained

    def _facts(self) -> dict[str, str]:
        state, config = self._trained.state, self.config
        parameters = sum(p.numel() for module in (self.lm, self.agent) for p in module.parameters())
        facts = {
            "trained on": f"{state.symbols:,} symbols of {config.data.source}",
            "parameters": f"{parameters:,}",
            "agent": f"{config.agent['name']}, rate {config.rate:g}",
        }
        if state.validation is not None:
            facts[state.unit.replace("_", " ")] = f"{state.validation.loss:.4f} ± {state.validation.standard_error:.4f}"
        return facts

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"Model({self._trained.path}: {told})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in self._facts().items())
        return f"<table><caption>{escape(str(self._trained.path))}</caption>{rows}</table>"
