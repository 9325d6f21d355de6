"""A model of the lm-evaluation-harness, which answers as the library does.

::

    import lm_eval, tokenv.library.lm_eval_model  # which registers the model; so does the command tokenv lm-eval

    lm_eval.simple_evaluate(model="tokenv", model_args="run=runs/7", tasks=["piqa"])

Needs ``pip install tokenv[lm-eval]``. A harness that looks for plug-ins (0.4.13 does not yet) finds it by itself, by
its entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from tokenv.library.model import load

try:
    import lm_eval.models  # noqa: F401  its own, which it looks up only while it knows none
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "tokenv.library.lm_eval_model speaks to the lm-evaluation-harness: pip install tokenv[lm-eval]"
    ) from error

Answer = TypeVar("Answer")
TOGETHER = 1024  # requests whose passes are shared


@register_model("tokenv")
class TokenvLM(LM):
    """A trained model answers the harness's requests: likelihoods in batches, continuations one at a time.

    Texts are bytes, and so are the harness's tokens. All bytes of a context are read, in the windows of
    ``Model.log_likelihood``. The first byte of all has no likelihood: where there is no context it counts nothing.

    Args:
        run: what ``tokenv.load`` takes: a run folder such as ``runs/7``, or a model on the Hugging Face Hub.
        checkpoint: of a run folder: ``best`` or ``latest``.
        device: where to put the model; None for where its run says.
        seed: of the drawn boundaries, and of what is written.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        trust_code: code of your own that the run may name; see ``tokenv.load``.
        max_new: bytes to write where a task does not say.
        **_: the harness's batch sizes, which change nothing.

    Raises:
        UserError: what is not as ``tokenv.load`` needs it.
    """

    def __init__(
        self,
        run: str,
        checkpoint: str = "best",
        device: str | None = None,
        seed: int = 0,
        threshold: bool = False,
        trust_code: bool | str = False,
        max_new: int = 256,
        **_: Any,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # the harness's default, whatever the machine has
        self.model = load(run, checkpoint=checkpoint, device=device, trust_code=trust_code)
        self._seed, self._threshold, self._max_new = seed, threshold, max_new

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """``log p(continuation | context)`` in nats, and whether greedy writing would have written it; see ``score``.

        Args:
            requests: whose ``args`` are a context, which may be empty, and a continuation.
            disable_tqdm: show no bar.
        """
        return self._respond("loglikelihood", requests, self._weigh, disable_tqdm, TOGETHER)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """``log p(text)`` in nats of all bytes but the first.

        Args:
            requests: whose ``args`` are a text.
            disable_tqdm: show no bar.
        """

        def score(texts: Sequence[tuple[str]]) -> list[float]:
            return [nats for nats, _ in self._weigh([("", text) for (text,) in texts])]

        return self._respond("loglikelihood_rolling", requests, score, disable_tqdm, TOGETHER)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes on, up to a stop.

        Args:
            requests: whose ``args`` are a context and options: ``until``, ``max_gen_toks`` (bytes), ``do_sample``,
                ``temperature`` and ``top_p``.
            disable_tqdm: show no bar.
        """
        return self._respond(
            "generate_until", requests, lambda some: [self._write(*each) for each in some], disable_tqdm
        )

    @property
    def tokenizer_name(self) -> str:
        """What the harness calls its stored requests by."""
        return "bytes"

    def _respond(
        self,
        kind: str,
        requests: Sequence[Any],
        answer: Callable[[list[Any]], list[Answer]],
        disable_tqdm: bool,
        together: int = 1,
    ) -> list[Answer]:
        """Answer so many requests at a time, from their arguments, and store each answer where the harness wants it."""
        found: list[Answer] = []
        with tqdm(total=len(requests), desc=kind, disable=disable_tqdm) as bar:
            for first in range(0, len(requests), together):
                some = [request.args for request in requests[first : first + together]]
                for args, one in zip(some, answer(some), strict=True):
                    found.append(one)
                    self.cache_hook.add_partial(kind, args, one)
                bar.update(len(some))
        return found

    def _weigh(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Answers to contexts and their continuations; where nothing can be predicted, 0 and True."""
        asked = [place for place, pair in enumerate(pairs) if pair[1] and len("".join(pair).encode()) > 1]
        contexts, texts = [pairs[place][0] for place in asked], [pairs[place][1] for place in asked]
        answers = [(0.0, True)] * len(pairs)
        weighed = self.model.score(texts, context=contexts, seed=self._seed, threshold=self._threshold)
        for place, answer in zip(asked, weighed, strict=True):
            answers[place] = answer
        return answers

    def _write(self, context: str, wanted: Mapping[str, Any]) -> str:
        until = wanted.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        written = self.model.generate(
            context,
            int(wanted.get("max_gen_toks", self._max_new)),
            temperature=float(wanted.get("temperature", 0)) if wanted.get("do_sample", True) else 0.0,
            top_p=float(wanted.get("top_p", 1)),
            stop=stops[0] if len(stops) == 1 else None,
            seed=self._seed,
        )
        return _before(written[len(context) :], stops)


def _before(text: str, stops: Iterable[str]) -> str:
    """What stands before the first of the stops."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
