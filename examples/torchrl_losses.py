"""Train tokenv's policy with TorchRL's own losses, step by step, on a frozen language model.

    python examples/torchrl_losses.py            # under a minute on one core

The environment, the agent, the collector and the losses are used unchanged. The adapter is ``credit``: a few lines
which turn rewards into the advantage which TorchRL's losses read, with tokenv's own stages instead of a critic.
"""

import argparse

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.common import LossModule

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators.base import chain
from tokenv.estimators.baselines import LeaveOneOutBatch
from tokenv.estimators.credit import Discount
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

BATCH, LENGTH, WIDTH, RATE = 64, 24, 32, 0.3
CREDIT = chain(Discount(gamma=0.8), LeaveOneOutBatch())


def credit(td: TensorDictBase) -> TensorDictBase:
    """Return advantages [B, T, 1] from rewards [B, T, 1], without a critic."""
    td = CREDIT(td)
    advantage = td[keys.ADVANTAGE]
    decided = td[keys.DECISION_MASK]
    scale = advantage[decided].std()
    return td.set(keys.ADVANTAGE, (advantage / scale * decided).unsqueeze(-1))


def pretrain(env: TokenizationEnv, agent: Learned, steps: int) -> None:
    """Train the language model on boundaries which the untrained policy draws at random."""
    optimizer = torch.optim.AdamW(env.lm.parameters(), lr=1e-2)
    for _ in range(steps):
        td = env.one_pass(agent)
        loss = -td[keys.LOG_LIKELIHOOD].mean() - td[keys.LOG_LIKELIHOOD_EARLY].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    env.lm.requires_grad_(False)


def make_loss(name: str, agent: Learned) -> LossModule:
    """Return TorchRL's loss without a critic, with a small entropy bonus."""
    if name == "A2CLoss":
        # A2CLoss insists on a critic
        unused = ValueOperator(torch.nn.Linear(WIDTH, 1), in_keys=[keys.ENCODING])
        return A2CLoss(agent, unused, critic_coeff=None, entropy_coeff=1e-3)
    return ClipPPOLoss(agent, None, critic_coeff=None, entropy_coeff=1e-3, clip_epsilon=0.2)


def train(env: TokenizationEnv, agent: Learned, name: str, batches: int, epochs: int) -> None:
    """Collect rollouts, compute advantages, and update the policy."""
    loss_module = make_loss(name, agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.03)
    steps = BATCH * (LENGTH - 1)
    collector = Collector(
        env,
        agent,
        frames_per_batch=steps,
        total_frames=steps * batches,
        auto_register_policy_transforms=False,
    )
    for collected in collector:
        td = credit(collected)
        for _ in range(epochs):
            losses = loss_module(td)
            # Nothing in A2CLoss or ClipPPOLoss holds the rate: an even push on all logits does, as in the paper.
            dist = agent.get_dist(td)
            decided = td[keys.DECISION_MASK]
            pressure = dist.logits[decided].mean() * (dist.mean[decided].mean().detach() - RATE)
            (losses["loss_objective"] + losses["loss_entropy"] + 5 * pressure).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    collector.shutdown()


@torch.no_grad()
def measure(env: TokenizationEnv, agent: Learned) -> dict[str, float]:
    """Return mean reward (nats per symbol), entropy (nats per decision) and boundary rate over sixteen rollouts."""
    env.set_seed(1)
    td = TensorDict.cat([env.one_pass(agent) for _ in range(16)])
    return {
        "reward": td[keys.REWARD].mean().item(),
        "entropy": td[keys.ENTROPY][td[keys.DECISION_MASK]].mean().item(),
        "rate": td[keys.ACTION].double().mean().item(),
    }


def main(pretraining: int = 150, batches: int = 60, seed: int = 0) -> dict[str, dict[str, float]]:
    """Train a policy with each loss and print its results."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    corpus = load_corpus(
        DataConfig(
            source="words", seq_len=LENGTH, lexicon_size=40, words_documents=2000, cut="chunk"
        )
    )
    lm = UNet(UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=8))
    env = TokenizationEnv(lm, corpus.train(seed=seed), BATCH, window=1)
    pretrain(env, Learned(WIDTH, rate=RATE, window=1), pretraining)
    found = {}
    for name, epochs in (("A2CLoss", 1), ("ClipPPOLoss", 3)):
        agent = Learned(WIDTH, rate=RATE, window=1, scale=1.0)
        with torch.no_grad():
            agent.projection.weight.zero_()
        found[f"{name} before"] = measure(env, agent)
        train(env, agent, name, batches, epochs)
        found[f"{name} after"] = measure(env, agent)
    for name, values in found.items():
        print(f"{name:18}" + "".join(f"  {key} {value:.4f}" for key, value in values.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pretraining",
        type=int,
        default=150,
        help="updates of the language model before it is frozen",
    )
    parser.add_argument(
        "--batches", type=int, default=60, help="episodes of 64 sequences for each loss"
    )
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
