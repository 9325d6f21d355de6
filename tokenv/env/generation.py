"""Writing on: an agent draws the boundaries, the model the symbols, one after the other."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import StepAgent
from tokenv.env.observation import Observer
from tokenv.env.target_rate import rate_or_mean, resolve_target_rate
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet


class Generated(NamedTuple):
    """Prompts and what follows them.

    Rows are prompts, or S continuations of each, side by side.

    Attributes:
        symbol_BN: prompt and continuation; ends early once every row has stopped.
        action_BN: 1 where a token ends, in the prompt and in the continuation.
        boundary_prob_BN: the agent's probability of that.
        length_B: symbols of each row up to and including its stop sequence, N without one. What follows in the row
            was written while other rows had not stopped yet.
    """

    symbol_BN: Tensor
    action_BN: Tensor
    boundary_prob_BN: Tensor
    length_B: Tensor


@torch.no_grad()
def generate(
    lm: UNet,
    agent: StepAgent,
    prompt: Tensor,
    max_new: int,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[Any] | bytes | None = None,
    generator: torch.Generator | None = None,
    rate: float | Tensor | None = None,
) -> Generated:
    """Continue prompts.

    All of the boundaries' noise, [B S, P + max_new], is the first thing drawn from ``generator``: a one-pass draw over
    the result with this noise gives the same boundaries. A prompt is read once, whatever the number of its
    continuations: its boundaries are drawn with its first continuation's noise, and are the same for all.

    Args:
        lm: the model.
        agent: draws the boundaries, as it is; call ``agent.eval()`` before, if it has been training.
        prompt: symbols [B, P, *symbol_shape], P >= 1.
        max_new: symbols to write after the prompt.
        samples: continuations S of every prompt.
        temperature: 0 takes the most probable symbol; deterministic but for the boundaries.
        top_p: nucleus that symbols are drawn from.
        stop: a row is finished once this sequence of symbols stands in its continuation.
        generator: of noise and symbols, on the model's device.
        rate: that the agent is told, one number or [B]; None for the mean of its range, if it has one.

    Raises:
        ValueError: the prompt is empty or not [B, P, *symbol_shape], ``max_new`` or ``samples`` is below 1, ``stop`` is
            empty, or ``temperature``, ``top_p`` or ``rate`` is out of range; or the model predicts no next symbol
            (``model.direct``).
    """
    if lm.config.direct:
        raise ValueError(
            "model.direct = True: this model predicts its horizon at once and no next symbol: ask for a direct "
            "forecast (direct=True), or train a model with model.direct=False"
        )
    shape = lm.codec.symbol_shape
    if prompt.ndim != 2 + len(shape) or prompt.shape[2:] != shape:
        raise ValueError(f"prompt of shape {tuple(prompt.shape)}: expected {('B', 'P', *shape)}")
    if 0 in prompt.shape[:2]:
        raise ValueError(f"prompt of shape {tuple(prompt.shape)}: expected at least one row and one symbol")
    for name, value in (("max_new", max_new), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} = {value}: expected at least 1")
    if stop is not None and not len(stop):
        raise ValueError("stop is empty: expected at least one symbol, or None")
    device, dtype = lm.head.weight.device, lm.codec.symbol_dtype
    (batch, given), longest = prompt.shape[:2], prompt.shape[1] + max_new
    ending = None if stop is None else torch.as_tensor(list(stop), dtype=dtype, device=device)

    every_noise_BN = torch.rand(batch * samples, longest, device=device, generator=generator)
    noise_BN = every_noise_BN[::samples]
    decoder = Decoder(lm, batch, longest)
    observer = Observer.of(agent)
    rate_B = resolve_target_rate(observer, agent.rates, rate_or_mean(rate, agent.rates), batch, device)
    last_actions_Bw = observer.initial_last_actions(batch, device)
    symbol_BN = torch.zeros(batch, longest, *shape, dtype=dtype, device=device)
    symbol_BN[:, :given] = prompt
    length_B = torch.full((batch * samples,), longest, device=device)
    actions, probs = [], []
    for i in range(longest):
        position_B, x_BD = decoder.position_B, decoder.encode(symbol_BN[:, i])
        observation = observer.static_observation(lm, symbol_BN[:, i], x_BD, position_B, position_B > 0, rate_B)
        observation.update(
            {keys.LAST_ACTIONS: last_actions_Bw, keys.TOKEN_COUNT: decoder.count_B, keys.NOISE: noise_BN[:, i]}
        )
        acted = agent(observation.clone())  # what an agent does to it changes neither text nor likelihoods
        actions.append(acted[keys.ACTION])
        probs.append(acted[keys.BOUNDARY_PROB])
        if ending is not None and i + 1 - given >= len(ending):
            stands_B = (symbol_BN[:, i + 1 - len(ending) : i + 1] == ending).flatten(1).all(1)
            length_B = torch.where(stands_B, length_B.clamp(max=i + 1), length_B)
            if bool((length_B <= i + 1).all()):
                break
        if i + 1 == longest:
            break
        last_actions_Bw = observer.append_action(last_actions_Bw, acted[keys.ACTION])
        parameters = decoder.decode(acted[keys.ACTION], acted.get(keys.BOUNDARY, None))
        if i + 1 == given and samples > 1:
            decoder.repeat(samples)
            agent.repeat_rows(samples)
            again = partial(torch.repeat_interleave, repeats=samples, dim=0)
            symbol_BN, last_actions_Bw, parameters = map(again, (symbol_BN, last_actions_Bw, parameters))
            actions, probs, noise_BN = list(map(again, actions)), list(map(again, probs)), every_noise_BN
            rate_B = None if rate_B is None else again(rate_B)
        if i + 1 >= given:
            symbol_BN[:, i + 1] = lm.codec.sample(
                parameters, temperature=temperature, top_p=top_p, generator=generator, after=symbol_BN[:, i]
            )
    return Generated(symbol_BN[:, : len(actions)], torch.stack(actions, 1), torch.stack(probs, 1), length_B)
