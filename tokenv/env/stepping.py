"""Drawing token boundaries as a TorchRL environment.

An episode is a sequence. At symbol i the agent sees the encoder's X_i and the last boundaries, and decides whether a
token ends there; the reward is how much better the model then predicts symbol i + 1 than its own early exit does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from tokenv import keys
from tokenv.data.source import Source
from tokenv.env.rollout import rollout as one_pass
from tokenv.lm.incremental import Decoder
from tokenv.lm.unet import UNet


class TokenizationEnv(EnvBase):
    """A batch of sequences whose token boundaries are the actions.

    Observation (batch size [B]): ``symbol`` x_i, ``encoding`` X_i [B, D], ``last_actions`` [B, w], ``position`` i,
    ``token_count``, ``decision_mask`` (False at the first symbol, which always closes a token, whatever the action
    says, and at the last, where nothing is left to predict), ``log_likelihood`` and ``log_likelihood_early`` of x_i in
    nats.
    Action: 0 or 1, [B]. Reward: ``log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)`` in nats, [B, 1].
    The episode ends with the sequence, after T = N - 1 steps.

    Stepping is incremental: a symbol costs the same wherever it stands, but for the tokens it attends to.
    ``rollout`` with one of our agents takes the one-pass way and returns the same.

    Args:
        lm: the model; its early exit is the baseline of the reward. Its device is the environment's.
        source: where sequences come from.
        batch_size: sequences B stepped together.
        window: earlier actions w in the observation.
        early_entropy: whether the observation holds it: the entropy of p_early(x_{i+1} | x_<=i) in nats, for agents
            that read it.

    Raises:
        ValueError: ``batch_size`` below 1 or a negative ``window``.
    """

    batch_locked = True

    def __init__(
        self, lm: UNet, source: Source, batch_size: int, *, window: int = 8, early_entropy: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: expected at least one sequence")
        if window < 0:
            raise ValueError(f"window = {window}: expected 0 or more earlier actions")
        super().__init__(device=lm.head.weight.device, batch_size=torch.Size([batch_size]))
        self.lm, self.source, self.window, self.early_entropy = lm, source, window, early_entropy
        self.generator = torch.Generator(self.device)
        self._decoder = Decoder(lm, batch_size, source.seq_len)
        self._symbol_BN = torch.zeros(
            batch_size, source.seq_len, *lm.codec.symbol_shape, dtype=lm.codec.symbol_dtype, device=self.device
        )
        self._last_actions_Bw = torch.zeros(batch_size, window, device=self.device)
        self.origin: list[str] = [""] * batch_size
        self._make_specs(batch_size)

    def _make_specs(self, batch: int) -> None:
        codec, device = self.lm.codec, self.device
        # Codecs give likelihoods in float32 or finer, whatever the model computes in.
        fine = torch.float64 if self._decoder.dtype == torch.float64 else torch.float32
        number = Unbounded((batch,), dtype=fine, device=device)
        count = Bounded(0, self.source.seq_len, (batch,), dtype=torch.int64, device=device)
        self.observation_spec = Composite(
            {
                keys.SYMBOL: Unbounded((batch, *codec.symbol_shape), dtype=codec.symbol_dtype, device=device),
                keys.ENCODING: Unbounded((batch, self.lm.config.width), dtype=self._decoder.dtype, device=device),
                keys.LAST_ACTIONS: Bounded(0, 1, (batch, self.window), dtype=torch.float32, device=device),
                keys.POSITION: count,
                keys.TOKEN_COUNT: count.clone(),
                keys.DECISION_MASK: Binary(shape=(batch,), dtype=torch.bool, device=device),
                keys.LOG_LIKELIHOOD[1]: number,
                keys.LOG_LIKELIHOOD_EARLY[1]: number.clone(),
            },
            shape=(batch,),
        )
        if self.early_entropy:
            self.observation_spec[keys.EARLY_ENTROPY] = number.clone()
        self.action_spec = Categorical(2, shape=(batch,), dtype=torch.int64, device=device)
        self.reward_spec = Unbounded((batch, 1), dtype=fine, device=device)

    def rollout(self, max_steps: Any = None, policy: Any = None, *args: Any, **options: Any) -> TensorDictBase:
        """A rollout, one-pass or step by step.

        ``rollout(agent, noise=..., num_samples=...)`` with an agent that can ``draw`` whole sequences takes fresh
        sequences and lets it draw all boundaries in one pass: see ``tokenv.env.rollout.rollout`` for the options and
        the result, which carries gradients. ``rollout(max_steps, policy, ...)`` is TorchRL's: it steps, and with
        the same agent and noise returns the same, without gradients into the model.
        """
        if not hasattr(max_steps, "draw"):
            return super().rollout(max_steps, policy, *args, **options)
        if policy is not None or args:
            raise ValueError("rollout(agent) takes options by keyword only, such as num_samples=4")
        options.setdefault("window", self.window)
        options.setdefault("early_entropy", self.early_entropy)
        options.setdefault("generator", self.generator)
        return one_pass(self.lm, max_steps, self._take(range(self.batch_size[0])), **options)

    def _take(self, rows: Sequence[int]) -> Tensor:
        batch = self.source.next(len(rows))
        new = dict(zip(rows, batch.origin, strict=True))
        self.origin = [new.get(row, old) for row, old in enumerate(self.origin)]
        return batch.symbol_BN.to(self.device)

    def _observe(self, symbol_B: Tensor, rows_B: Tensor, late_B: Tensor, early_B: Tensor) -> TensorDict:
        decoder = self._decoder
        x_BD = decoder.encode(symbol_B, rows_B)
        observation = TensorDict(
            {
                keys.SYMBOL: symbol_B,
                keys.ENCODING: x_BD,
                keys.LAST_ACTIONS: self._last_actions_Bw.clone(),
                keys.POSITION: decoder.position_B.clone(),
                keys.TOKEN_COUNT: decoder.count_B.clone(),
                keys.DECISION_MASK: (decoder.position_B > 0) & (decoder.position_B < self.source.seq_len - 1),
                keys.LOG_LIKELIHOOD[1]: late_B,
                keys.LOG_LIKELIHOOD_EARLY[1]: early_B,
            },
            batch_size=self.batch_size,
            device=self.device,
        )
        if self.early_entropy:
            observation.set(keys.EARLY_ENTROPY, self.lm.early_entropy(x_BD))
        return observation

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        everyone = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        asked = None if tensordict is None else tensordict.get("_reset", None)
        rows_B = everyone if asked is None else asked.view(self.batch_size)
        self._symbol_BN[rows_B] = self._take(rows_B.nonzero().flatten().tolist())
        self._last_actions_Bw[rows_B] = 0
        self._decoder.reset(rows_B)
        nothing_B = torch.zeros(self.batch_size, device=self.device, dtype=self.reward_spec.dtype)
        return self._observe(self._symbol_BN[:, 0].clone(), rows_B, nothing_B, nothing_B.clone())

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        decoder, rows = self._decoder, torch.arange(self.batch_size[0], device=self.device)
        action_B = torch.where(decoder.position_B > 0, tensordict[keys.ACTION], 1)
        x_BD = tensordict[keys.ENCODING]
        parameters = decoder.decode(x_BD, action_B, tensordict.get(keys.BOUNDARY, None))
        symbol_B = self._symbol_BN[rows, decoder.position_B]
        late_B = self.lm.codec.log_prob(parameters, symbol_B)
        early_B = self.lm.codec.log_prob(self.lm.early_exit(x_BD), symbol_B)
        if self.window:
            self._last_actions_Bw = torch.cat([action_B[:, None].float(), self._last_actions_Bw[:, :-1]], 1)
        done = (decoder.position_B == self.source.seq_len - 1).unsqueeze(-1)
        everyone = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        return self._observe(symbol_B, everyone, late_B, early_B).update(
            {"reward": (late_B - early_B).unsqueeze(-1), "done": done, "terminated": done.clone()}
        )

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(0 if seed is None else seed)
