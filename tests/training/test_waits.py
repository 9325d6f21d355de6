"""What an update asks of a device, each time with a GPU standing still until the host has gone on."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.data.sources import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.training.process_group import Ranks
from tokenv.training.update import accumulate_gradients, make_optimizer, optimizer_step, policy_epochs


class Asked(TorchDispatchMode):
    """Counts what a GPU would be waited for: values that Python reads, and shapes that depend on values."""

    tags = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self) -> None:
        super().__init__()
        self.number = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = args[1] if func is torch.ops.aten.index.Tensor else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in chosen)
        if by_mask or (not chosen and self.tags & set(func.tags)):
            self.number[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Listed(TorchFunctionMode):
    """Counts what torch does behind a dispatcher's back on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.number[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Source(TensorSource):
    """Sequences at hand: what reading asks is asked of the CPU."""

    def next(self, count: int) -> Any:
        with torch._C.DisableTorchFunction():
            return super().next(count)


@pytest.mark.parametrize(("estimator", "reads_tokens"), [("reinforce", 1), ("rloo_clipped", 2), ("straight", 0)])
def test_an_update_asks_a_device_twice_a_pass(estimator: str, reads_tokens: int, tiny_settings: dict[str, Any]) -> None:
    """Whether the draws have settled, and how many tokens came of them; how the update went, nobody asks here.

    Samples that only earn a reward are read out apart, and relaxed boundaries have no number of tokens.
    """
    config = resolve([], merge(tiny_settings, {"estimator": {"name": estimator}}))
    parts = build_components(config)
    parts.train()
    team, passes = (
        Ranks().team(config.train, together=parts.has_cross_step_state),
        config.train.gradient_accumulation_steps,
    )
    source = Source(torch.randint(256, (8, config.data.seq_len)))
    env = TokenizationEnv(parts.lm, source, config.train.batch_size, window=parts.agent.window)
    parameters = parts.named_parameters()
    optimizer = make_optimizer(config.train, parameters)

    def update() -> None:
        _, rollouts = accumulate_gradients(
            lambda _: env.one_pass(parts.agent, parts.sampling), parts, config.loss, team
        )
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)
        policy_epochs(optimizer, rollouts, parts, config, team)

    update()
    with Asked() as asked, Listed() as listed:
        update()
    assert asked.number == {"equal.default": passes}
    assert listed.number == {"tolist": passes * reads_tokens} or (not reads_tokens and not listed.number)


def test_what_asks_is_counted() -> None:
    x = torch.arange(4.0)
    with Asked() as asked, Listed() as listed:
        assert x.sum().item() == 6
        assert bool(x[1] > 0)
        assert torch.equal(x[x > 1], x[2:])
        assert x.nonzero().tolist() == [[1], [2], [3]]
        assert x[torch.tensor([1])].shape == (1,)
    assert asked.number.total() == 5
    assert listed.number == {"tolist": 1}
