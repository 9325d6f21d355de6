"""Tiny problem on which components are checked, and the checker which builds them and reports what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from tokenv.lm.codecs.base import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

BATCH = 2
LENGTH = 5
WIDTH = 8
RATE = 0.4
# arguments of constructors which require them
CONTEXT = {"width": WIDTH, "rate": RATE, "seq_len": LENGTH}
STANDARD_ERRORS = 5.0  # largest accepted deviation of a mean


def tiny_lm(codec: Codec | None = None) -> UNet:
    """Return a model in float64."""
    return UNet(
        UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3), codec
    ).double()


@dataclass
class TinyProblem:
    """Tiny model in float64 with a policy and two sequences."""

    lm: UNet
    agent: Learned
    symbol_BN: Tensor

    @classmethod
    def create(cls, window: int, rate: float = RATE) -> TinyProblem:
        """Create a problem whose policy reads ``window`` earlier boundaries and draws about ``rate`` per symbol."""
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
        """Parameters of policy and encoder."""
        return [*self.agent.parameters(), *self.lm.codec.parameters(), *self.lm.down.parameters()]

    def rollout(
        self, component: Any, seed: int = 0, symbol_BN: Tensor | None = None, **options: Any
    ) -> TensorDictBase:
        """Return the rollout which the ``sampling`` of an estimator, or of another component, requires."""
        symbols = self.symbol_BN if symbol_BN is None else symbol_BN
        generator = torch.Generator().manual_seed(seed)
        sampling = component.sampling
        samples = () if sampling.num_samples is None else (sampling.num_samples,)
        noise = torch.rand(
            *samples, len(symbols), symbols.shape[1] - 1, generator=generator, dtype=torch.float64
        )
        return rollout(
            self.lm, self.agent, symbols, sampling, noise=noise, generator=generator, **options
        )

    def padded_rollout(self, component: Any, shift: int) -> TensorDictBase:
        """Return the same for a shorter second sequence, with ``shift`` added to the symbols in its padding."""
        length_B = torch.tensor([LENGTH, LENGTH - 2])
        padding_BN = torch.arange(LENGTH) >= length_B[:, None]
        symbol_BN = torch.where(padding_BN, (self.symbol_BN + shift) % 256, self.symbol_BN)
        return self.rollout(component, symbol_BN=symbol_BN, length_B=length_B)

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient with respect to all parameters, flattened."""
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    loss, self.parameters, retain_graph=True, materialize_grads=True
                )
            ]
        ).detach()


def has_gradient(loss: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Check whether the gradient of a loss is nonzero for any trained parameter."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        return False
    grads = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
    return any(g is not None and bool(g.any()) for g in grads)


def max_standard_errors(value_SX: Tensor) -> float:
    """Return the largest deviation of the means from 0 in standard errors."""
    error_X = value_SX.std(0) / len(value_SX) ** 0.5
    return float((value_SX.mean(0).abs() / error_X.clamp(min=1e-12)).max())


class Checker:
    """Build a component and report what is wrong with it.

    Args:
        kind: section of the configuration, such as ``estimator``.
        component: registered name, ``module:attribute``, or a class or function which builds the component.
        registered: registered components of this kind.
        options: arguments of the constructor.
        context: arguments which are passed if the constructor requires them.
    """

    def __init__(
        self,
        kind: str,
        component: str | Callable[..., Any],
        registered: registry.Registry,
        options: Mapping[str, Any],
        context: Mapping[str, Any],
    ) -> None:
        self.kind = kind
        self.component = component
        self.registered = registered
        self.options = options
        self.arguments = context
        # a string, too, is its own name
        self.name = getattr(component, "__name__", str(component))

    def build(self, **context: Any) -> Any:
        """Build the component anew, always with the same parameters, in float64.

        Args:
            context: arguments which are passed if the constructor requires them, in place of the checker's.

        Raises:
            UserError: the name or an option is unknown, or the constructor returns something else.
        """
        arguments = dict(self.arguments) | context
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if isinstance(self.component, str):
                config = {"name": self.component} | dict(self.options)
                built = registry.build(self.kind, config, self.registered, **arguments)
            else:
                label = f"{self.kind} {self.name!r}"
                built = registry.construct(label, self.component, self.options, **arguments)
                if not isinstance(built, self.registered.base()):
                    raise UserError(
                        f"{label} has built {built!r}: expected a {self.registered.base().__name__}"
                    )
        return built.double()

    def require(self, condition: bool, message: str) -> None:
        """Raise an error unless a condition holds.

        Raises:
            AssertionError: the condition does not hold.
        """
        if not condition:
            raise AssertionError(f"{self.kind} {self.name}: {message}")

    def require_finite(self, name: str, tensor: Tensor) -> None:
        """Raise an error unless a tensor is finite."""
        self.require(bool(tensor.isfinite().all()), f"{name} is not finite")

    def require_restored(self, used: Any, fresh: Any, evaluate: Callable[[Any], Tensor]) -> None:
        """Raise an error unless a state_dict of one component gives another one the same output."""
        fresh.load_state_dict(used.state_dict())
        same = torch.allclose(evaluate(used), evaluate(fresh), rtol=1e-9, atol=1e-12)
        self.require(
            same, "a state_dict does not bring its state back: register parameters and buffers"
        )

    @contextmanager
    def context(self, action: str) -> Iterator[None]:
        """Report exceptions of the component together with the action during which they occur.

        Raises:
            AssertionError: the component has raised an exception.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, AssertionError) and str(error).startswith(
                f"{self.kind} {self.name}: "
            ):
                raise
            what = ", ".join([repr(error), *getattr(error, "__notes__", ())])
            raise AssertionError(f"{self.kind} {self.name}: {action} fails with {what}") from error
