"""The TorchRL environment whose actions are token boundaries.

An episode is a sequence. At symbol i the agent reads the encoder's X_i and the last boundaries, and decides whether a
token ends there. The reward is the log-likelihood of symbol i + 1 less that of the model's own early exit.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Unbounded
from torchrl.envs import EnvBase

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent, Sampling
from tokenv.core.errors import COUNT, NOT_NEGATIVE, check_value
from tokenv.core.rates import Rate
from tokenv.core.rewards import relative_log_likelihood
from tokenv.core.sequences import Source, SourceOrFactory
from tokenv.env.observation import Observer
from tokenv.env.random_inputs import derive_seed, sample_target_rates
from tokenv.env.rollout import ONE_SAMPLE, rollout
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet

GENERATORS = ("generator", "rate_generator")  # attributes


class TokenizationEnv(EnvBase):
    """A batch of sequences whose token boundaries are the actions.

    Observation (batch size [B]): ``symbol`` x_i, ``encoding`` X_i [B, D], ``last_actions`` [B, w], ``position`` i,
    ``token_count``, ``decision_mask`` (False at the first symbol, which always ends a token, whatever the action, and
    at the last, where nothing is left to predict), ``log_likelihood`` and ``log_likelihood_early`` of x_i in nats; with
    ``rates`` also ``target_rate``, which is constant in an episode. Floating-point numbers are float32, also if the
    model computes in bfloat16; ``encoding`` and the likelihoods of a float64 model are float64 (TorchRL's
    ``DoubleToFloat`` makes them float32, ``DTypeCastTransform`` anything else).
    Action: 0 or 1, [B]. Reward: ``log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)`` in nats, [B, 1].
    The episode ends with the sequence, after T = N - 1 steps.
    ``step`` reads only ``action`` and ``boundary`` (an agent's relaxed boundary, if there is one) of its input:
    transforms may change the observations in place without an effect on rewards.

    Stepping is incremental: the cost of a symbol does not depend on its position, but for the tokens it attends to.
    ``one_pass`` lets an agent of this project draw all boundaries at once, and returns the same.

    Args:
        lm: model; its early exit is the baseline of the reward. Its device is the environment's.
        source: source of sequences; or a function from a seed to a source, which ``set_seed`` then calls, such as
            ``tokenv.data.corpus.CorpusFactory``: environments in several workers, each with a seed of its own, read
            different text. The seed has no effect on a source which is passed itself.
        batch_size: sequences B stepped together.
        window: earlier actions w in the observation.
        optional_keys: optional keys which the observation holds besides, such as ``["early_entropy"]``, the entropy of
            p_early(x_{i+1} | x_<=i) in nats, for agents which read them; see ``tokenv.env.observation``.
        rates: range from which the ``target_rate`` of each episode is drawn, for agents which read it, or one number
            for all episodes; None for no such observation.

    Raises:
        ValueError: ``batch_size`` below 1, a negative ``window``, an unknown optional key, sources of different
            lengths, or a source without ``seq_len``.
    """

    batch_locked = True

    def __init__(
        self,
        lm: UNet,
        source: SourceOrFactory,
        batch_size: int,
        *,
        window: int = 8,
        optional_keys: Collection[str] = (),
        rates: Rate | None = None,
    ) -> None:
        check_value("batch_size", batch_size, COUNT)
        check_value("window", window, NOT_NEGATIVE)
        super().__init__(device=lm.head.weight.device, batch_size=torch.Size([batch_size]))
        held = frozenset(optional_keys)
        if rates is not None:
            held |= {keys.TARGET_RATE}
        self.lm = lm
        self.observer = Observer(window, held)
        self.rates = rates
        self._open: Callable[[int], Source] | None = None
        if callable(source):
            self._open = source
            source = source(int(np.random.default_rng().integers(2**31)))
        if not hasattr(source, "seq_len"):
            raise ValueError(
                f"source is a {type(source).__name__}: expected one with seq_len and next(count), such as "
                "tokenv.data.corpus.TensorSource(symbol_BN)"
            )
        self.source: Source = source
        # on the CPU, so that noise does not depend on the device
        self.generator = torch.Generator()
        # of its own, so that a range of rates leaves all other noise alone
        self.rate_generator = torch.Generator()
        self._rate_B: Tensor | None = None
        length = self.source.seq_len
        self._symbol_BN = torch.zeros(
            batch_size,
            length,
            *lm.codec.symbol_shape,
            dtype=lm.codec.symbol_dtype,
            device=self.device,
        )
        self._history = self.observer.initial_history(batch_size, self.device)
        self.origin: list[str] = [""] * batch_size
        self._make_specs(batch_size)

    @cached_property
    def _decoder(self) -> Decoder:
        """Decoder of all rows; one-pass rollouts, such as those of a sharded model, need none."""
        return Decoder(self.lm, self.batch_size[0], self._symbol_BN.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with arrays for generators.

        A generator's own pickle makes a tensor which nobody holds; its file is closed before the process is started
        which a collector sends it to.
        """
        state = self.__dict__.copy()
        for name in GENERATORS:
            state[name] = state[name].get_state().numpy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.__dict__.update(state)
        for name in GENERATORS:
            generator = torch.Generator()
            generator.set_state(torch.from_numpy(state[name]))
            self.__dict__[name] = generator

    def _make_specs(self, batch: int) -> None:
        # Codecs give likelihoods in float32 or finer, whatever the model computes in.
        fine = torch.promote_types(
            self.lm.compute_dtype or self.lm.head.weight.dtype, torch.float32
        )
        number = Unbounded((batch,), dtype=fine, device=self.device)
        self.observation_spec = self.observer.specs(self.lm, self.source.seq_len, number)
        self.action_spec = Categorical(2, shape=(batch,), dtype=torch.int64, device=self.device)
        self.reward_spec = Unbounded((batch, 1), dtype=fine, device=self.device)

    def one_pass(
        self,
        agent: BoundaryAgent,
        sampling: Sampling = ONE_SAMPLE,
        *,
        noise: Tensor | None = None,
        length_B: Tensor | None = None,
        rate: float | Tensor | None = None,
    ) -> TensorDictBase:
        """Read new sequences and let an agent draw all their boundaries in one pass.

        The result is that of TorchRL's ``rollout(max_steps, agent)``, which steps, with the same noise; but with
        gradients.

        Args:
            agent: agent which draws the boundaries.
            sampling: requirements of an estimator: ``estimator.sampling``.
            noise: see ``tokenv.env.rollout.rollout``; None draws it from this environment's generator.
            length_B: see there.
            rate: see there; None draws from ``rates``, or if there are none from the agent's range.

        Returns:
            A rollout of batch size [B, T] or [K, B, T].
        """
        rates: Rate | None = self.rates
        if rates is None:
            rates = agent.rates
        if rate is None and rates is not None:
            rate = sample_target_rates(rates, self.batch_size[0], self.device, self.rate_generator)
        return rollout(
            self.lm,
            agent,
            self._next_sequences(range(self.batch_size[0])),
            sampling,
            noise=noise,
            length_B=length_B,
            generator=self.generator,
            observer=self.observer,
            rate=rate,
        )

    def _next_sequences(self, rows: Sequence[int]) -> Tensor:
        """Read sequences for some rows from the source, and set the origins of these rows."""
        batch = self.source.next(len(rows))
        new = dict(zip(rows, batch.origin, strict=True))
        self.origin = [new.get(row, old) for row, old in enumerate(self.origin)]
        return batch.symbols_on(self.device)

    def _observe(
        self,
        symbol_B: Tensor,
        rows_B: Tensor,
        log_prob_B: Tensor,
        early_B: Tensor,
    ) -> TensorDict:
        """Read symbols in the rows which are True, and return the observations at them."""
        decoder = self._decoder
        position_B = decoder.position_B
        x_BD = decoder.encode(symbol_B, rows_B)
        decides_B = (position_B > 0) & (position_B < self.source.seq_len - 1)
        observation = self.observer.static_observation(
            self.lm,
            symbol_B,
            x_BD,
            position_B,
            decides_B,
            self._rate_B,
        )
        likelihoods = {keys.LOG_LIKELIHOOD[1]: log_prob_B, keys.LOG_LIKELIHOOD_EARLY[1]: early_B}
        # A copy, so that changes of the observation do not change the state of this environment.
        return observation.update(self._history | likelihoods).clone()

    @torch.no_grad()
    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        if self.lm.codec.trailing:
            raise ValueError(
                f"the codec predicts the last {self.lm.codec.trailing} symbols of a sequence at once and no next one, "
                "so that there is nothing to step by: roll out whole sequences (one_pass), or train a model with "
                "codec.direct=False"
            )
        rows_B = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        if tensordict is not None and "_reset" in tensordict:
            rows_B = tensordict["_reset"].view(self.batch_size)
        self._symbol_BN[rows_B] = self._next_sequences(rows_B.nonzero().flatten().tolist())
        self._history = self.observer.reset_history(self._history, rows_B)
        self._decoder.reset(rows_B)
        if self.rates is not None:
            rate_B = sample_target_rates(
                self.rates, self.batch_size[0], self.device, self.rate_generator
            )
            if self._rate_B is not None:
                rate_B = rate_B.where(rows_B, self._rate_B)
            self._rate_B = rate_B
        zero_B = torch.zeros(self.batch_size, device=self.device, dtype=self.reward_spec.dtype)
        return self._observe(
            self._symbol_BN[:, 0],
            rows_B,
            zero_B,
            zero_B,
        )

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        decoder = self._decoder
        rows = torch.arange(self.batch_size[0], device=self.device)
        if bool((decoder.position_B >= self.source.seq_len - 1).any()):
            raise ValueError("a sequence has ended: expected a reset before the next step")
        action_B = torch.where(
            decoder.position_B > 0,
            tensordict[keys.ACTION],
            1,
        )
        parameters = decoder.decode(action_B, tensordict.get(keys.BOUNDARY, None))
        symbol_B = self._symbol_BN[rows, decoder.position_B]
        log_prob_B = self.lm.codec.log_prob(parameters, symbol_B)
        early_B = self.lm.codec.log_prob(self.lm.early_exit(decoder.x_BD), symbol_B)
        self._history = self.observer.append_action(self._history, action_B)
        done = (decoder.position_B == self.source.seq_len - 1).unsqueeze(-1)
        every_row_B = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        following = self._observe(symbol_B, every_row_B, log_prob_B, early_B)
        reward_B1 = relative_log_likelihood(log_prob_B, early_B)
        return following.update({"reward": reward_B1, "done": done, "terminated": done.clone()})

    def _set_seed(self, seed: int | None) -> None:
        own = seed or 0
        self.generator.manual_seed(own)
        self.rate_generator.manual_seed(derive_seed(own))
        if self._open is None or seed is None:
            return
        source = self._open(seed)
        if source.seq_len != self._symbol_BN.shape[1]:
            raise ValueError(
                f"a source of {source.seq_len} symbols, expected {self._symbol_BN.shape[1]} as before"
            )
        self.source = source

    def symbols_so_far(self, row: int) -> Tensor:
        """Return the symbols of a row which have been read, [i + 1, *symbol_shape]."""
        return self._symbol_BN[row, : int(self._decoder.position_B[row]) + 1]
