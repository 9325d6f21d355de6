"""Generation: continue prompts symbol by symbol."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import StepAgent
from tokenv.env.observation import Observer
from tokenv.env.random_inputs import rate_or_mean, resolve_target_rate
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet


class Generated(NamedTuple):
    """Prompts and their continuations.

    Rows are prompts, or S continuations of each prompt side by side.

    Attributes:
        symbol_BN: prompt and continuation; N is shorter than requested if every row has stopped earlier.
        action_BN: 1 where a token ends, in the prompt and in the continuation.
        boundary_prob_BN: boundary probability of the agent.
        length_B: symbols of each row up to and including its stop sequence, N without one. The symbols after the stop
            sequence were generated while other rows had not stopped yet.
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
    """Continue prompts: the agent draws the boundaries, the model the symbols, one after the other.

    The noise of all boundaries, [B S, P + max_new], is drawn from ``generator`` first: a one-pass draw over the result
    with this noise gives the same boundaries. A prompt is read once, whatever the number of its continuations: its
    boundaries are drawn with the noise of its first continuation, and are the same for all.

    Args:
        lm: model.
        agent: agent which draws the boundaries, in its current mode; call ``agent.eval()`` before, after training.
        prompt: symbols [B, P, *symbol_shape], P >= 1.
        max_new: symbols to generate after the prompt.
        samples: continuations S of every prompt.
        temperature: sampling temperature; 0 takes the most probable symbol, so that only the boundaries are random.
        top_p: probability mass of the nucleus from which symbols are drawn.
        stop: sequence of symbols at which a row is finished once its continuation contains it.
        generator: random generator of noise and symbols, on the model's device.
        rate: target rate for the agent, one number or [B]; None for the mean of its range, if it has one.

    Raises:
        ValueError: the prompt is empty or not [B, P, *symbol_shape], ``max_new`` or ``samples`` is below 1, ``stop`` is
            empty, or ``temperature``, ``top_p`` or ``rate`` is out of range; or the model predicts no next symbol
            (``model.direct``).
    """
    _check_arguments(lm, prompt, max_new, samples, stop)
    batch, prompt_length = prompt.shape[:2]
    length, shape = prompt_length + max_new, lm.codec.symbol_shape
    device, dtype = lm.head.weight.device, lm.codec.symbol_dtype
    stop_symbols = None if stop is None else torch.as_tensor(list(stop), dtype=dtype, device=device)
    all_noise_BN = torch.rand(batch * samples, length, device=device, generator=generator)
    noise_BN = all_noise_BN[::samples]
    decoder, observer = Decoder(lm, batch, length), Observer.of(agent)
    rate_B = resolve_target_rate(observer, agent.rates, rate_or_mean(rate, agent.rates), batch, device)
    history = observer.initial_history(batch, device)
    symbol_BN = torch.zeros(batch, length, *shape, dtype=dtype, device=device)
    symbol_BN[:, :prompt_length] = prompt
    length_B = torch.full((batch * samples,), length, device=device)
    actions, probs = [], []
    for i in range(length):
        position_B, x_BD = decoder.position_B, decoder.encode(symbol_BN[:, i])
        observation = observer.static_observation(lm, symbol_BN[:, i], x_BD, position_B, position_B > 0, rate_B)
        observation.update({**history, keys.NOISE: noise_BN[:, i]})
        output = agent(observation.clone())  # a copy: the agent cannot change symbols or likelihoods
        actions.append(output[keys.ACTION])
        probs.append(output[keys.BOUNDARY_PROB])
        if stop_symbols is not None and i + 1 - prompt_length >= len(stop_symbols):
            stops_B = (symbol_BN[:, i + 1 - len(stop_symbols) : i + 1] == stop_symbols).flatten(1).all(1)
            length_B = torch.where(stops_B, length_B.clamp(max=i + 1), length_B)
            if bool((length_B <= i + 1).all()):
                break
        if i + 1 == length:
            break
        history = observer.append_action(history, output[keys.ACTION])
        parameters = decoder.decode(output[keys.ACTION], output.get(keys.BOUNDARY, None))
        if i + 1 == prompt_length and samples > 1:
            decoder.repeat(samples)
            agent.repeat_rows(samples)
            repeat = partial(torch.repeat_interleave, repeats=samples, dim=0)
            symbol_BN, parameters, noise_BN = repeat(symbol_BN), repeat(parameters), all_noise_BN
            history = {name: repeat(value) for name, value in history.items()}
            actions, probs = [repeat(x) for x in actions], [repeat(x) for x in probs]
            rate_B = None if rate_B is None else repeat(rate_B)
        if i + 1 >= prompt_length:
            symbol_BN[:, i + 1] = lm.codec.sample(
                parameters, temperature=temperature, top_p=top_p, generator=generator, after=symbol_BN[:, i]
            )
    return Generated(symbol_BN[:, : len(actions)], torch.stack(actions, 1), torch.stack(probs, 1), length_B)


def _check_arguments(lm: UNet, prompt: Tensor, max_new: int, samples: int, stop: Sequence[Any] | bytes | None) -> None:
    """Raise a ValueError for arguments of ``generate`` which cannot be right."""
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
