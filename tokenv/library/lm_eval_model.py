"""Evaluate a trained model with the lm-evaluation-harness.

::

    import lm_eval, tokenv.library.lm_eval_model  # which registers the model; so does the command tokenv lm-eval

    lm_eval.simple_evaluate(model="tokenv", model_args="run=runs/7", tasks=["piqa"])

Needs ``pip install tokenv[lm-eval]``. A harness which looks for plug-ins (0.4.13 does not yet) finds the model by its
entry point.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from tokenv.library.model import Keywords, Writing, load

try:
    import lm_eval.models  # noqa: F401  registers its own models, which it does only while none is registered
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "tokenv.library.lm_eval_model needs the lm-evaluation-harness: pip install tokenv[lm-eval]"
    ) from error

Answer = TypeVar("Answer")
BATCH_SIZE = 1024  # requests which are scored together


@register_model("tokenv")
class TokenvLM(LM):
    """Model of the harness: requests are answered in batches.

    The harness's tokens are bytes. All bytes of a context are read, in the windows of ``Model.log_likelihood``. The
    first byte of a text without a context has no likelihood and is not counted.

    Args:
        run: name of a model for ``tokenv.load``: a run folder such as ``runs/7``, or one on the Hugging Face Hub.
        checkpoint: see ``tokenv.load``.
        device: see ``tokenv.load``.
        seed: see ``tokenv.evaluation.evaluator.EvalOptions``.
        threshold: see there.
        trust_code: code of your own that the run may name; see ``tokenv.load``.
        max_new_tokens: number of bytes to generate if a task does not set it.
        **_: batch sizes of the harness, which are ignored.

    Raises:
        UserError: see ``tokenv.load``.
    """

    def __init__(
        self,
        run: str,
        checkpoint: str = "best",
        device: str | None = None,
        seed: int = 0,
        threshold: bool = False,
        trust_code: bool | str = False,
        max_new_tokens: int = 256,
        **_: Any,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # the harness's default, even without a GPU
        self.model = load(run, checkpoint=checkpoint, device=device, trust_code=trust_code)
        self._options: Keywords = {"seed": seed, "threshold": threshold}
        self._max_new = max_new_tokens

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return ``log p(continuation | context)`` in nats, and whether it is the greedy one: see ``Model.score``.

        Args:
            requests: requests whose ``args`` are a context, which may be empty, and a continuation.
            disable_tqdm: whether to hide the progress bar.
        """
        return self._respond("loglikelihood", requests, self._score, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return ``log p(text)`` in nats of all bytes but the first.

        Args:
            requests: requests whose ``args`` are a text.
            disable_tqdm: whether to hide the progress bar.
        """

        def score(texts: Sequence[tuple[str]]) -> list[float]:
            pairs = [("", text) for (text,) in texts]
            return [nats for nats, _ in self._score(pairs)]

        return self._respond("loglikelihood_rolling", requests, score, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to a stop.

        Args:
            requests: requests whose ``args`` are a context and options: ``until``, ``max_gen_toks`` (bytes),
                ``do_sample``, ``temperature`` and ``top_p``.
            disable_tqdm: whether to hide the progress bar.
        """
        return self._respond("generate_until", requests, self._generate, disable_tqdm)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's stored requests."""
        return "bytes"

    def _respond(
        self,
        kind: str,
        requests: Sequence[Any],
        answer: Callable[[list[Any]], list[Answer]],
        disable_tqdm: bool,
    ) -> list[Answer]:
        """Answer ``BATCH_SIZE`` requests at a time, and store the answers in the harness's cache."""
        answers: list[Answer] = []
        with tqdm(total=len(requests), desc=kind, disable=disable_tqdm) as bar:
            for first in range(0, len(requests), BATCH_SIZE):
                some = [request.args for request in requests[first : first + BATCH_SIZE]]
                for args, one in zip(some, answer(some), strict=True):
                    answers.append(one)
                    self.cache_hook.add_partial(kind, args, one)
                bar.update(len(some))
        return answers

    def _score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score continuations of contexts; 0 and True if nothing is to be predicted."""
        scored = [i for i, pair in enumerate(pairs) if pair[1] and len("".join(pair).encode()) > 1]
        contexts = [pairs[i][0] for i in scored]
        texts = [pairs[i][1] for i in scored]
        scores = [(0.0, True)] * len(pairs)
        answers = self.model.score(texts, context=contexts, **self._options)
        for i, score in zip(scored, answers, strict=True):
            scores[i] = score
        return scores

    def _generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue texts, those with equal options together."""
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        stops_of = []
        for i, (_, options) in enumerate(requests):
            until = options.get("until") or []
            stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            stops_of.append(stops)
            if options.get("do_sample", True):
                temperature = float(options.get("temperature", 0))
            else:
                temperature = 0.0
            max_new_tokens = int(options.get("max_gen_toks", self._max_new))
            top_p = float(options.get("top_p", 1))
            groups[
                max_new_tokens, temperature, top_p, stops[0] if len(stops) == 1 else None
            ].append(i)
        texts = [""] * len(requests)
        for (max_new_tokens, temperature, top_p, stop), rows in groups.items():
            contexts = [requests[i][0] for i in rows]
            how: Writing = {
                "temperature": temperature,
                "top_p": top_p,
                "stop": stop,
                "seed": self._options["seed"],
            }
            written = self.model.generate(contexts, max_new_tokens, **how)
            for i, text in zip(rows, written, strict=True):
                texts[i] = _cut_at(text[len(requests[i][0]) :], stops_of[i])
        return texts


def _cut_at(text: str, stops: Iterable[str]) -> str:
    """Return the text before the first of the stops."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
