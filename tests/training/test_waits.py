"""An update makes the device wait as seldom as possible."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.data.corpus import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.optimizers import make_optimizer, optimizer_step
from tokenv.training.process_group import Ranks
from tokenv.training.update import accumulate_gradients, policy_epochs


class WaitCounter(TorchDispatchMode):
    """Count operations which wait for a GPU: values read by Python, and shapes which depend on values."""

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


class ReadCounter(TorchFunctionMode):
    """Count reads which the dispatcher does not see on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.number[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Source(TensorSource):
    """Source in memory, whose reads do not count."""

    def next(self, count: int) -> Any:
        with torch._C.DisableTorchFunction():
            return super().next(count)


@pytest.mark.parametrize(("estimator", "reads_tokens"), [("reinforce", 1), ("rloo_clipped", 2), ("straight", 0)])
def test_an_update_waits_for_the_device_twice_a_pass(
    estimator: str, reads_tokens: int, tiny_settings: dict[str, Any]
) -> None:
    """Whether the draws have settled, and how many tokens came of them; how the update went, nobody asks here.

    Samples that only earn a reward are read out apart, and relaxed boundaries have no number of tokens.
    """
    config = resolve([], merge(tiny_settings, {"estimator": {"name": estimator}}))
    parts = build_components(config)
    parts.train()
    team, passes = (
        DataParallelGroup.create(Ranks(), config.train, together=parts.has_cross_step_state),
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
    with WaitCounter() as asked, ReadCounter() as listed:
        update()
    assert asked.number == {"equal.default": passes}
    assert listed.number == {"tolist": passes * reads_tokens} or (not reads_tokens and not listed.number)


def test_waiting_operations_are_counted() -> None:
    x = torch.arange(4.0)
    with WaitCounter() as asked, ReadCounter() as listed:
        assert x.sum().item() == 6
        assert bool(x[1] > 0)
        assert torch.equal(x[x > 1], x[2:])
        assert x.nonzero().tolist() == [[1], [2], [3]]
        assert x[torch.tensor([1])].shape == (1,)
    assert asked.number.total() == 5
    assert listed.number == {"tolist": 1}
