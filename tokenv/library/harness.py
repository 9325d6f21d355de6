"""A model of the lm-evaluation-harness, which answers as the library does.

::

    import lm_eval, tokenv.library.harness  # which registers the model

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
        "tokenv.library.harness speaks to the lm-evaluation-harness: pip install tokenv[lm-eval]"
    ) from error

Answer = TypeVar("Answer")


@register_model("tokenv")
class Harness(LM):
    """A trained model answers the harness's requests, one at a time.

    Texts are bytes, and so are the harness's tokens. All bytes of a context are read, in the windows of
    ``Model.log_likelihood``. The first byte of all has no likelihood: where there is no context it counts nothing.

    Args:
        run: what ``tokenv.load`` takes: a run folder such as ``runs/7``, or a model on the Hugging Face Hub.
        checkpoint: of a run folder: ``best`` or ``latest``.
        device: where to put the model; None for where its run says.
        seed: of the drawn boundaries, and of what is written.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.
        trust: code of your own that the run may name; see ``tokenv.load``.
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
        trust: bool | str = False,
        max_new: int = 256,
        **_: Any,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # the harness's default, whatever the machine has
        self.model = load(run, checkpoint=checkpoint, device=device, trust=trust)
        self._seed, self._threshold, self._max_new = seed, threshold, max_new

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """``log p(continuation | context)`` in nats, and whether greedy writing would have written it; see ``weigh``.

        Args:
            requests: whose ``args`` are a context, which may be empty, and a continuation.
            disable_tqdm: show no bar.
        """
        return self._answers("loglikelihood", requests, self._weigh, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """``log p(text)`` in nats of all bytes but the first.

        Args:
            requests: whose ``args`` are a text.
            disable_tqdm: show no bar.
        """
        return self._answers("loglikelihood_rolling", requests, lambda text: self._weigh("", text)[0], disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes on, up to a stop.

        Args:
            requests: whose ``args`` are a context and options: ``until``, ``max_gen_toks`` (bytes), ``do_sample``,
                ``temperature`` and ``top_p``.
            disable_tqdm: show no bar.
        """
        return self._answers("generate_until", requests, self._write, disable_tqdm)

    @property
    def tokenizer_name(self) -> str:
        """What the harness calls its stored requests by."""
        return "bytes"

    def _answers(
        self, kind: str, requests: Sequence[Any], answer: Callable[..., Answer], disable_tqdm: bool
    ) -> list[Answer]:
        found = []
        for request in tqdm(requests, desc=kind, disable=disable_tqdm):
            found.append(answer(*request.args))
            self.cache_hook.add_partial(kind, request.args, found[-1])
        return found

    def _weigh(self, context: str, text: str) -> tuple[float, bool]:
        if len(f"{context}{text}".encode()) < 2 or not text:
            return 0.0, True  # nothing that could be predicted
        return self.model.weigh(text, context=context, seed=self._seed, threshold=self._threshold)

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
