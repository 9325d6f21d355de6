"""Drawing token boundaries as a TorchRL environment.

An episode is a sequence. At symbol i the agent sees the encoder's X_i and the last boundaries, and decides whether a
token ends there; the reward is how much better the model then predicts symbol i + 1 than its own early exit does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Unbounded
from torchrl.envs import EnvBase

from tokenv.core import keys
from tokenv.core.contracts import BoundaryAgent, Sampling
from tokenv.core.rates import Rate
from tokenv.core.sequences import Source, SourceOrFactory
from tokenv.env.observation import Observer
from tokenv.env.rollout import ONE_SAMPLE, rollout
from tokenv.env.target_rate import derive_seed, sample_target_rates
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet


class TokenizationEnv(EnvBase):
    """A batch of sequences whose token boundaries are the actions.

    Observation (batch size [B]): ``symbol`` x_i, ``encoding`` X_i [B, D], ``last_actions`` [B, w], ``position`` i,
    ``token_count``, ``decision_mask`` (False at the first symbol, which always closes a token, whatever the action
    says, and at the last, where nothing is left to predict), ``log_likelihood`` and ``log_likelihood_early`` of x_i in
    nats; with ``rates`` also ``target_rate``, which stays the same for a whole episode. Floating-point numbers are
    float32, also where the model computes in bfloat16; ``encoding`` and the likelihoods of a float64 model are float64
    (TorchRL's ``DoubleToFloat`` makes them float32, ``DTypeCastTransform`` anything else).
    Action: 0 or 1, [B]. Reward: ``log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)`` in nats, [B, 1].
    The episode ends with the sequence, after T = N - 1 steps.
    Of the TensorDict that is stepped, only ``action`` and ``boundary`` (an agent's relaxed boundary, if there is one)
    are read: transforms may change the observations in place, and rewards stay as they are.

    Stepping is incremental: a symbol costs the same wherever it stands, but for the tokens it attends to.
    ``one_pass`` lets one of our agents draw all boundaries at once, and returns the same.

    Args:
        lm: the model; its early exit is the baseline of the reward. Its device is the environment's.
        source: where sequences come from; or what opens such a source for a seed, which ``set_seed`` then does, such as
            ``tokenv.data.corpus.CorpusFactory``: environments in several workers, each with a seed of its own, read
            different text. A source that is given as such goes on as it is, whatever the seed.
        batch_size: sequences B stepped together.
        window: earlier actions w in the observation.
        early_entropy: whether the observation holds it: the entropy of p_early(x_{i+1} | x_<=i) in nats, for agents
            that read it.
        rates: range of which every episode's ``target_rate`` is drawn, for agents that are told it, or one number for
            all episodes; None for no such observation.

    Raises:
        ValueError: ``batch_size`` below 1, a negative ``window``, or sources of different lengths.
    """

    batch_locked = True

    def __init__(
        self,
        lm: UNet,
        source: SourceOrFactory,
        batch_size: int,
        *,
        window: int = 8,
        early_entropy: bool = False,
        rates: Rate | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: expected at least one sequence")
        if window < 0:
            raise ValueError(f"window = {window}: expected 0 or more earlier actions")
        super().__init__(device=lm.head.weight.device, batch_size=torch.Size([batch_size]))
        self.lm, self.observer, self.rates = lm, Observer(window, early_entropy, rates is not None), rates
        self._open = source if callable(source) else None
        self.source: Source = source(int(np.random.default_rng().integers(2**31))) if callable(source) else source
        self.generator = torch.Generator()  # on the CPU, so that noise does not depend on the device
        self.rate_generator = torch.Generator()  # of its own, so that a range of rates leaves all other noise alone
        self._rate_B: Tensor | None = None
        length = self.source.seq_len
        self._decoder = Decoder(lm, batch_size, length)
        self._symbol_BN = torch.zeros(
            batch_size, length, *lm.codec.symbol_shape, dtype=lm.codec.symbol_dtype, device=self.device
        )
        self._last_actions_Bw = self.observer.initial_last_actions(batch_size, self.device)
        self.origin: list[str] = [""] * batch_size
        self._make_specs(batch_size)

    def _make_specs(self, batch: int) -> None:
        # Codecs give likelihoods in float32 or finer, whatever the model computes in.
        fine = torch.float64 if self._decoder.dtype == torch.float64 else torch.float32
        number = Unbounded((batch,), dtype=fine, device=self.device)
        self.observation_spec = self.observer.specs(self.lm, batch, self.source.seq_len, number)
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
        """Take fresh sequences and let an agent draw all their boundaries in one pass.

        The same as ``rollout(max_steps, agent)``, TorchRL's, which steps, with the same noise; but with gradients.

        Args:
            agent: draws the boundaries.
            sampling: what an estimator asks for: ``estimator.sampling``.
            noise: see ``tokenv.env.rollout.rollout``; drawn from this environment's generator where not given.
            length_B: see there.
            rate: see there; None draws from ``rates``, or where there are none from the agent's range.

        Returns:
            A rollout of batch size [B, T] or [K, B, T].
        """
        rates = agent.rates if self.rates is None else self.rates
        if rate is None and rates is not None:
            rate = sample_target_rates(rates, self.batch_size[0], self.device, self.rate_generator)
        return rollout(
            self.lm,
            agent,
            self._take(range(self.batch_size[0])),
            sampling,
            noise=noise,
            length_B=length_B,
            generator=self.generator,
            observer=self.observer,
            rate=rate,
        )

    def _take(self, rows: Sequence[int]) -> Tensor:
        batch = self.source.next(len(rows))
        new = dict(zip(rows, batch.origin, strict=True))
        self.origin = [new.get(row, old) for row, old in enumerate(self.origin)]
        symbol_BN = batch.symbol_BN.to(self.device, non_blocking=True)
        return symbol_BN.long() if symbol_BN.dtype == torch.uint8 else symbol_BN

    def _observe(self, symbol_B: Tensor, rows_B: Tensor, late_B: Tensor, early_B: Tensor) -> TensorDict:
        decoder = self._decoder
        position_B, x_BD = decoder.position_B, decoder.encode(symbol_B, rows_B)
        decides_B = (position_B > 0) & (position_B < self.source.seq_len - 1)
        observation = self.observer.static_observation(self.lm, symbol_B, x_BD, position_B, decides_B, self._rate_B)
        observation.update(
            {
                keys.LAST_ACTIONS: self._last_actions_Bw,
                keys.TOKEN_COUNT: decoder.count_B,
                keys.LOG_LIKELIHOOD[1]: late_B,
                keys.LOG_LIKELIHOOD_EARLY[1]: early_B,
            }
        )
        return observation.clone()  # what others do to it does not reach this environment's own state

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        if self.lm.config.direct:
            raise ValueError(
                "model.direct = True: this model predicts its horizon at once and no next symbol, so that there is "
                "nothing to step by: roll out whole sequences (one_pass), or train a model with model.direct=False"
            )
        everyone = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        asked = None if tensordict is None else tensordict.get("_reset", None)
        rows_B = everyone if asked is None else asked.view(self.batch_size)
        self._symbol_BN[rows_B] = self._take(rows_B.nonzero().flatten().tolist())
        self._last_actions_Bw[rows_B] = 0
        self._decoder.reset(rows_B)
        if self.rates is not None:
            fresh_B = sample_target_rates(self.rates, self.batch_size[0], self.device, self.rate_generator)
            self._rate_B = fresh_B if self._rate_B is None else fresh_B.where(rows_B, self._rate_B)
        nothing_B = torch.zeros(self.batch_size, device=self.device, dtype=self.reward_spec.dtype)
        return self._observe(self._symbol_BN[:, 0], rows_B, nothing_B, nothing_B)

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        decoder, rows = self._decoder, torch.arange(self.batch_size[0], device=self.device)
        if bool((decoder.position_B >= self.source.seq_len - 1).any()):
            raise ValueError("a sequence has ended: expected a reset before the next step")
        action_B = torch.where(decoder.position_B > 0, tensordict[keys.ACTION], 1)
        parameters = decoder.decode(action_B, tensordict.get(keys.BOUNDARY, None))
        symbol_B = self._symbol_BN[rows, decoder.position_B]
        late_B = self.lm.codec.log_prob(parameters, symbol_B)
        early_B = self.lm.codec.log_prob(self.lm.early_exit(decoder.x_BD), symbol_B)
        self._last_actions_Bw = self.observer.append_action(self._last_actions_Bw, action_B)
        done = (decoder.position_B == self.source.seq_len - 1).unsqueeze(-1)
        everyone = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        return self._observe(symbol_B, everyone, late_B, early_B).update(
            {"reward": (late_B - early_B).unsqueeze(-1), "done": done, "terminated": done.clone()}
        )

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(0 if seed is None else seed)
        self.rate_generator.manual_seed(derive_seed(0 if seed is None else seed))
        if self._open is None or seed is None:
            return
        source = self._open(seed)
        if source.seq_len != self._symbol_BN.shape[1]:
            raise ValueError(f"a source of {source.seq_len} symbols, expected {self._symbol_BN.shape[1]} as before")
        self.source = source

    def symbols_so_far(self, row: int) -> Tensor:
        """What has been read of a row's sequence, [i + 1, *symbol_shape]."""
        return self._symbol_BN[row, : int(self._decoder.position_B[row]) + 1]
