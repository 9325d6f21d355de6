"""Train a new network with TorchRL's PPO to draw token boundaries for the model of a trained run.

    tokenv train with quick
    python examples/torchrl_ppo_run.py runs/1

The model is not trained. A boundary costs ``PRICE`` nats; otherwise a boundary after every byte would be best.
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import Compose, ObservationNorm, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import tokenv
from tokenv.core import keys
from tokenv.data.corpus import CorpusFactory

BATCH, PRICE = 32, 0.5


def main(run: str, batches: int = 50, epochs: int = 4, seed: int = 0) -> list[dict[str, float]]:
    """Train, and print mean reward (nats per symbol, without the price) and boundary rate of every batch."""
    model = tokenv.load(run)
    torch.manual_seed(seed)
    base = tokenv.TokenizationEnv(model.lm, CorpusFactory(model.config.data), BATCH, window=4)
    normalise = ObservationNorm(
        in_keys=[keys.ENCODING], out_keys=[keys.ENCODING], standard_normal=True
    )
    env = TransformedEnv(base, Compose(normalise))
    env.set_seed(seed)
    normalise.init_stats(base.source.seq_len - 1, reduce_dim=(0, 1), cat_dim=1)

    inputs, width = [keys.ENCODING, keys.LAST_ACTIONS], model.lm.config.width + 4
    network = MLP(in_features=width, out_features=2, num_cells=[64])
    policy = ProbabilisticActor(
        TensorDictModule(network, in_keys=inputs, out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=width, out_features=1, num_cells=[64]), in_keys=inputs)
    advantage = GAE(gamma=0.95, lmbda=0.9, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(policy, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    frames, results = BATCH * (base.source.seq_len - 1), []
    collector = Collector(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=batches * frames,
        auto_register_policy_transforms=False,
    )
    for td in collector:
        results.append(
            {"reward": td[keys.REWARD].mean().item(), "rate": td[keys.ACTION].float().mean().item()}
        )
        print(", ".join(f"{name} {value:.4f}" for name, value in results[-1].items()))
        td[keys.REWARD] = td[keys.REWARD] - PRICE * td[keys.ACTION].unsqueeze(-1)
        for _ in range(epochs):
            losses = loss_module(advantage(td))
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    collector.shutdown()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run folder such as runs/1, or what else tokenv.load takes")
    parser.add_argument("--batches", type=int, default=50, help="episodes of 32 sequences")
    parser.add_argument(
        "--epochs", type=int, default=4, help="updates of the network for each of them"
    )
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
