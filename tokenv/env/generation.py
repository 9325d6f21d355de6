"""Generation: continue prompts symbol by symbol."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from tokenv.core import keys
from tokenv.core.contracts import StepAgent
from tokenv.core.errors import COUNT, check_value
from tokenv.env.observation import Observer, SymbolContext
from tokenv.env.random_inputs import rate_or_mean, resolve_target_rate
from tokenv.lm.codecs.base import Codec, check_sampling
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet

NOISE_STEPS = 32  # symbols whose random numbers are drawn together


class Generated(NamedTuple):
    """Prompts and their continuations.

    Rows are prompts, or S continuations of each prompt side by side.

    Attributes:
        symbol_BN: prompt and continuation; N is shorter than requested if every row has stopped earlier.
        action_BN: 1 where a token ends, in the prompt and in the continuation.
        boundary_prob_BN: boundary probability of the agent.
        length_B: symbols of each row: its prompt's and ``max_new_tokens`` further ones, or those up to and including
            its stop sequence. The symbols after them were generated while other rows had not ended yet.
    """

    symbol_BN: Tensor
    action_BN: Tensor
    boundary_prob_BN: Tensor
    length_B: Tensor


class _Sampler:
    """Draws the symbols of all rows as each generator alone would draw those of its rows.

    Args:
        codec: codec of the symbols.
        generators: generators, each of as many rows.
        starts: length of the prompts of each generator's rows.
        rows: rows B.
        max_new_tokens: symbols to draw for each row.
        options: options of ``codec.sample``.
    """

    def __init__(
        self,
        codec: Codec,
        generators: Sequence[Generator | None],
        starts: Sequence[int],
        rows: int,
        max_new_tokens: int,
        options: dict[str, Any],
    ) -> None:
        self.codec = codec
        self.generators = generators
        self.starts = starts
        self.rows = rows // len(generators)
        self.max_new_tokens = max_new_tokens
        self._sample: Callable[..., Tensor] = partial(codec.sample, **options)
        self._noise: Tensor | None = None  # of some steps of every row, [steps, B, ..]
        self._row_B = torch.arange(rows)
        self._start: int | Tensor = starts[0]
        if len(set(starts)) > 1:
            self._start = torch.tensor(starts).repeat_interleave(self.rows)

    def draw(self, i: int, parameters_BP: Tensor, symbol_B: Tensor) -> Tensor:
        """Draw the symbols after ``symbol_B``, those at i: [B, *symbol_shape]; arbitrary ones within a prompt."""
        self._draw_noise(i)
        if self._noise is None:
            return self._draw_by_generator(i, parameters_BP, symbol_B)
        step = (i + 1 - self._start) % NOISE_STEPS
        if isinstance(step, int):
            noise = self._noise[step]
        else:
            noise = self._noise[step, self._row_B]
        return self._sample(parameters_BP, noise=noise, after=symbol_B)

    def _draw_by_generator(self, i: int, parameters_BP: Tensor, symbol_B: Tensor) -> Tensor:
        """Draw the symbols of one generator's rows after the other's."""
        drawn = []
        parameters = parameters_BP.split(self.rows)
        symbols = symbol_B.split(self.rows)
        for generator, start, y, x in zip(
            self.generators, self.starts, parameters, symbols, strict=True
        ):
            if i + 1 >= start:
                x = self._sample(y, generator=generator, after=x)
            drawn.append(x)
        return torch.cat(drawn)

    def _draw_noise(self, i: int) -> None:
        """Draw the random numbers of the next steps of the rows which have none left."""
        for group, (generator, start) in enumerate(zip(self.generators, self.starts, strict=True)):
            at = i + 1 - start
            if at % NOISE_STEPS or not 0 <= at < self.max_new_tokens:
                continue
            steps = min(NOISE_STEPS, self.max_new_tokens - at)
            noise = self.codec.sample_noise(steps * self.rows, generator)
            if noise is None:
                return
            noise = noise.unflatten(0, (steps, self.rows))
            if self._noise is None:
                self._noise = noise.new_ones(
                    NOISE_STEPS,
                    len(self._row_B),
                    *noise.shape[2:],
                )
            self._noise[:steps, group * self.rows : (group + 1) * self.rows] = noise


class _Rows:
    """Rows while they are read and written: what they hold so far, and the states of model and agent.

    Args:
        lm: model.
        agent: agent which draws the boundaries.
        first_B: first symbol of each row.
        rate: see ``generate``.
        steps: largest number of symbols.

    Attributes:
        symbols: symbols of all rows, a tensor [B, *symbol_shape] for each position.
        actions: actions [B] so far.
        probs: boundary probabilities [B] so far.
    """

    def __init__(
        self,
        lm: UNet,
        agent: StepAgent,
        first_B: Tensor,
        rate: float | Tensor | None,
        steps: int,
    ) -> None:
        batch = len(first_B)
        self._lm = lm
        self._agent = agent
        self._decoder = Decoder(lm, batch, steps)
        self._observer = Observer.of(agent)
        rate = rate_or_mean(rate, agent.rates)
        self._rate_B = resolve_target_rate(self._observer, agent.rates, rate, batch, first_B.device)
        history = self._observer.initial_history(batch, first_B.device)
        self._history = {name: x for name, x in history.items() if name in agent.in_keys}
        self.symbols = [first_B]
        self.actions: list[Tensor] = []
        self.probs: list[Tensor] = []

    def decide(self, noise_B: Tensor) -> None:
        """Read the newest symbols, and decide whether a token ends there."""
        symbol_B = self.symbols[-1]
        position_B = self._decoder.position_B
        x_BD = self._decoder.encode(symbol_B)
        at = SymbolContext(self._lm, symbol_B, x_BD, position_B, position_B > 0, self._rate_B)
        observation = {**self._observer.static_values(at), **self._history, keys.NOISE: noise_B}
        self._output = self._agent.step(observation)
        self.actions.append(self._output[keys.ACTION])
        self.probs.append(self._output[keys.BOUNDARY_PROB])

    def predict(self) -> Tensor:
        """Return the parameters of the next symbols' distributions under these decisions, [B, P]."""
        action_B = self.actions[-1]
        self._history = self._observer.append_action(self._history, action_B)
        return self._decoder.decode(action_B, self._output.get(keys.BOUNDARY, None))

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        repeat = partial(torch.repeat_interleave, repeats=times, dim=0)
        self._decoder.repeat(times)
        self._agent.repeat_rows(times)
        self._history = {name: repeat(value) for name, value in self._history.items()}
        self.symbols = [repeat(x) for x in self.symbols]
        self.actions = [repeat(x) for x in self.actions]
        self.probs = [repeat(x) for x in self.probs]
        if self._rate_B is not None:
            self._rate_B = repeat(self._rate_B)


@torch.no_grad()
def generate(
    lm: UNet,
    agent: StepAgent,
    prompt: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[Any] | bytes | None = None,
    generator: Generator | Sequence[Generator] | None = None,
    rate: float | Tensor | None = None,
) -> Generated:
    """Continue prompts: the agent draws the boundaries, the model the symbols, one after the other.

    The noise of all boundaries, [B S, P + max_new_tokens], is drawn from ``generator`` first: a one-pass draw over the
    result with this noise gives the same boundaries. A prompt is read once, whatever the number of its continuations:
    its boundaries are drawn with the noise of its first continuation, and are the same for all.

    Args:
        lm: model.
        agent: agent which draws the boundaries, in its current mode; call ``agent.eval()`` before, after training.
        prompt: symbols [B, P, *symbol_shape], P >= 1; or several prompts [P_b, *symbol_shape] of different lengths.
        max_new_tokens: symbols to generate after each prompt.
        samples: continuations S of every prompt.
        temperature: sampling temperature; 0 takes the most probable symbol, so that only the boundaries are random.
        top_p: probability mass of the nucleus from which symbols are drawn.
        stop: sequence of symbols at which a row is finished once its continuation contains it.
        generator: random generator of noise and symbols, on the model's device; or one for each prompt, with which it
            is continued as it would be alone, up to rounding. Prompts of different lengths need one each.
        rate: target rate for the agent, one number or [B]; None for the mean of its range, if it has one.

    Raises:
        ValueError: the prompt is empty or not [B, P, *symbol_shape], ``max_new_tokens`` or ``samples`` is below 1,
            ``stop`` is empty, ``temperature``, ``top_p`` or ``rate`` is out of range, or the generators do not fit
            the prompts; or the model predicts no next symbol (``Codec.trailing``).
    """
    generators: list[Generator | None]
    if isinstance(generator, Sequence):
        generators = list(generator)
    else:
        generators = [generator]
    check_sampling(temperature, top_p)
    starts = _check_arguments(lm, prompt, max_new_tokens, samples, stop, len(generators))
    batch = len(prompt)
    steps = max(starts) + max_new_tokens
    device = lm.head.weight.device
    dtype = lm.codec.symbol_dtype
    options = {"temperature": temperature, "top_p": top_p}
    sampler = _Sampler(lm.codec, generators, starts, batch * samples, max_new_tokens, options)
    rows_each = batch * samples // len(generators)
    noise_BN = _boundary_noise(generators, starts, rows_each, max_new_tokens, device)
    noise = noise_BN[::samples].unbind(1)
    prompt_BN = pad_sequence(list(prompt), batch_first=True).to(device, dtype)
    start_B = torch.tensor(starts, device=device).repeat_interleave(rows_each)
    length_B = start_B + max_new_tokens
    stop_symbols = None
    if stop is not None:
        stop_symbols = torch.as_tensor(list(stop), dtype=dtype, device=device)
    rows = _Rows(lm, agent, prompt_BN[:, 0], rate, steps)
    for i in range(steps):
        rows.decide(noise[i])
        if stop_symbols is not None and i + 1 - min(starts) >= len(stop_symbols):
            length_B = _stop_rows(rows.symbols, stop_symbols, start_B, length_B)
            if bool((length_B <= i + 1).all()):
                break
        if i + 1 == steps:
            break
        parameters = rows.predict()
        if i + 1 == starts[0] and samples > 1:
            rows.repeat(samples)
            parameters = parameters.repeat_interleave(samples, 0)
            noise = noise_BN.unbind(1)
        if i + 1 < min(starts):
            rows.symbols.append(prompt_BN[:, i + 1])
            continue
        symbol_B = sampler.draw(i, parameters, rows.symbols[i])
        if i + 1 < max(starts):
            of_symbol = (1,) * (symbol_B.dim() - 1)
            in_prompt_B = (i + 1 < start_B).view(-1, *of_symbol)
            symbol_B = torch.where(in_prompt_B, prompt_BN[:, i + 1], symbol_B)
        rows.symbols.append(symbol_B.to(dtype))
    symbol_BN = torch.stack(rows.symbols, 1)
    return Generated(symbol_BN, torch.stack(rows.actions, 1), torch.stack(rows.probs, 1), length_B)


def _boundary_noise(
    generators: Sequence[Generator | None],
    starts: Sequence[int],
    rows: int,
    max_new_tokens: int,
    device: torch.device,
) -> Tensor:
    """Draw the noise of all boundaries as each generator alone would draw that of its rows: [B S, N], 1 as padding."""
    noise: list[Tensor] = []
    for generator, start in zip(generators, starts, strict=True):
        noise.extend(
            torch.rand(
                rows,
                start + max_new_tokens,
                device=device,
                generator=generator,
            )
        )
    return pad_sequence(noise, batch_first=True, padding_value=1.0)


def _stop_rows(
    symbols: Sequence[Tensor], stop: Tensor, start_B: Tensor, length_B: Tensor
) -> Tensor:
    """Return the length of each row, which ends here at the latest if its continuation ends with ``stop``: [B]."""
    last_BN = torch.stack(list(symbols[-len(stop) :]), 1)
    ends_B = (last_BN == stop).flatten(1).all(1)
    within_B = len(symbols) - start_B >= len(stop)
    return torch.where(
        ends_B & within_B,
        length_B.clamp(max=len(symbols)),
        length_B,
    )


def _check_arguments(
    lm: UNet,
    prompt: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    samples: int,
    stop: Sequence[Any] | bytes | None,
    generators: int,
) -> list[int]:
    """Raise a ValueError for arguments of ``generate`` which cannot be right; return the prompts' length, or lengths.

    One length for each generator is returned.
    """
    if lm.codec.trailing:
        raise ValueError(
            f"the codec predicts the last {lm.codec.trailing} symbols of a sequence at once and no next one: ask for a "
            "direct forecast (direct=True), or train a model with codec.direct=False"
        )
    shape = lm.codec.symbol_shape
    if isinstance(prompt, Tensor) and (prompt.ndim != 2 + len(shape) or prompt.shape[2:] != shape):
        raise ValueError(f"prompt of shape {tuple(prompt.shape)}: expected {('B', 'P', *shape)}")
    lengths = [len(row) for row in prompt]
    if not min(lengths, default=0):
        raise ValueError(f"prompts of {lengths} symbols: expected at least one row and one symbol")
    check_value("max_new_tokens", max_new_tokens, COUNT)
    check_value("samples", samples, COUNT)
    if stop is not None and not len(stop):
        raise ValueError("stop is empty: expected at least one symbol, or None")
    allowed = {len(lengths)}
    if len(set(lengths)) == 1:
        allowed.add(1)
    if generators not in allowed:
        raise ValueError(
            f"{generators} generators for prompts of {lengths} symbols: expected one for each"
        )
    if samples > 1 and len(set(lengths)) > 1:
        raise ValueError(
            f"samples = {samples} of prompts of {lengths} symbols: expected prompts of one length"
        )
    return lengths[:generators]
