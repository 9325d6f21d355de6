"""The tiny world that parts are tried in, and how they are built and told what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.agents.learned import Learned
from tokenv.config import registry
from tokenv.core.errors import UserError
from tokenv.env.rollout import rollout
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

BATCH, LENGTH, WIDTH, RATE = 2, 5, 8, 0.4
CONTEXT = {"width": WIDTH, "rate": RATE, "seq_len": LENGTH}  # of parts that ask for it


def tiny_lm() -> UNet:
    """A model in float64."""
    return UNet(UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3)).double()


@dataclass
class TinyProblem:
    """A tiny model in float64 with a policy, and two sequences, one of them shorter."""

    lm: UNet
    agent: Learned
    symbol_BN: Tensor

    @classmethod
    def make(cls, window: int, rate: float = RATE) -> TinyProblem:
        """One whose policy reads ``window`` earlier boundaries, and draws about ``rate`` of them."""
        generator = torch.Generator().manual_seed(window)
        with torch.random.fork_rng():
            torch.manual_seed(window)
            lm = tiny_lm()
            agent = Learned(WIDTH, rate=rate, window=window, scale=1.0).double()
            with torch.no_grad():
                agent.projection.weight.normal_(std=0.5)
                lm.early_head.weight.normal_()
        return cls(lm, agent, torch.randint(256, (BATCH, LENGTH), generator=generator))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of policy and encoder."""
        return [*self.agent.parameters(), *self.lm.codec.parameters(), *self.lm.down.parameters()]

    def rollout(self, estimator: Any, seed: int = 0, symbol_BN: Tensor | None = None, **options: Any) -> TensorDictBase:
        """What an estimator, or what else has a ``sampling``, asks for."""
        symbols = self.symbol_BN if symbol_BN is None else symbol_BN
        generator = torch.Generator().manual_seed(seed)
        sampling = estimator.sampling
        samples = () if sampling.num_samples is None else (sampling.num_samples,)
        noise = torch.rand(*samples, len(symbols), symbols.shape[1] - 1, generator=generator, dtype=torch.float64)
        return rollout(self.lm, self.agent, symbols, sampling, noise=noise, generator=generator, **options)

    def gradient(self, loss: Tensor) -> Tensor:
        """With respect to all parameters, in one row."""
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, self.parameters, retain_graph=True, materialize_grads=True)]
        ).detach()


class Checker:
    """Says what is wrong with a part.

    Args:
        kind: such as ``estimator``.
        part: what is checked: its name, or a class or function.
    """

    def __init__(self, kind: str, part: str | Callable[..., Any]) -> None:
        self.name = part if isinstance(part, str) else getattr(part, "__name__", str(part))
        self.kind = kind

    def need(self, condition: bool, message: str) -> None:
        """Go on if ``condition`` holds.

        Raises:
            AssertionError: it does not.
        """
        if not condition:
            raise AssertionError(f"{self.kind} {self.name}: {message}")

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """What the part itself raises is told with what was asked of it.

        Raises:
            AssertionError: it has raised something.
        """
        try:
            yield
        except AssertionError as error:
            if str(error).startswith(f"{self.kind} {self.name}: "):
                raise
            raise AssertionError(f"{self.kind} {self.name}: {what} fails with {error!r}") from error
        except Exception as error:
            raise AssertionError(f"{self.kind} {self.name}: {what} fails with {error!r}") from error


def builder(
    kind: str,
    part: str | Callable[..., Any],
    table: registry.Registry,
    options: Mapping[str, Any],
    context: Mapping[str, Any],
) -> Callable[[], Any]:
    """What builds a part anew, always with the same parameters, in float64.

    Args:
        kind: section of the configuration, such as ``agent``.
        part: a registered name, ``module:attribute``, or what builds one.
        table: of the registered ones.
        options: for its constructor.
        context: given where the constructor asks for it.

    Raises:
        UserError: the name or an option is unknown, or it builds something else.
    """
    name = part if isinstance(part, str) else getattr(part, "__name__", str(part))

    def build() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if isinstance(part, str):
                made = registry.build(kind, {"name": part} | dict(options), table, **context)
            else:
                made = registry.construct(f"{kind} {name!r}", part, options, **context)
                if not isinstance(made, table.base()):
                    raise UserError(f"{kind} {name!r} has built {made!r}: expected a {table.base().__name__}")
        return made.double()

    return build
