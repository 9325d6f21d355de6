"""Compute expectations exactly: over all boundaries of a tiny model, or over all cells of the noise, in float64."""

import itertools
from unittest import mock

import torch
from torch import nn

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.expectations import all_boundaries
from tokenv.core.rates import RateRange
from tokenv.env.rollout import rollout
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

EXACT = {"rtol": 1e-10, "atol": 1e-13}


def flat_gradient(loss, inputs, **options):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, inputs, materialize_grads=True, **options)]
    )


def relative_bias(estimate, true):
    return ((estimate - true).norm() / true.norm()).item()


def decisive(mask):
    """Return noise which decides against every logit of the model."""
    return torch.where(mask.bool(), 1e-15, 1 - 1e-15).double()


def cells(breaks):
    """Cut the noise at ``breaks`` ([n, B] for every position); return midpoints [C, B, T] and sizes [C, B] of cells."""
    middle_T = []
    size_T = []
    for at in breaks:
        edge = nn.functional.pad(
            nn.functional.pad(at.sort(0).values, (0, 0, 1, 0)), (0, 0, 0, 1), value=1.0
        )
        middle_T.append((edge[1:] + edge[:-1]) / 2)
        size_T.append(edge.diff(dim=0))
    index = torch.tensor(list(itertools.product(*(range(len(middle)) for middle in middle_T))))
    noise = torch.stack(
        [middle[i] for middle, i in zip(middle_T, index.unbind(1), strict=True)], -1
    )
    size = torch.stack([size[i] for size, i in zip(size_T, index.unbind(1), strict=True)], -1).prod(
        -1
    )
    some = (size > 0).any(1)
    return noise[some], size[some]


def rand_gives(values):
    """Return a context in which ``torch.rand`` returns ``values``."""
    return mock.patch.object(torch, "rand", return_value=values)


class Enumeration:
    """All boundaries of B sequences of N symbols, as the samples K of one rollout, and their probabilities.

    Where sequences do not see each other, it is enough to give both the same boundaries, and to weigh each by its own
    probabilities [C, B]: ``masks_CT`` are all boundaries of one sequence.

    With ``rates`` the policy reads every sequence's own target rate.
    """

    rates = None

    def __init__(self, window, batch=2, length=5):
        torch.manual_seed(window + batch + length)
        config = UNetConfig(width=8, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3)
        self.lm = UNet(config).double()
        rate_range = (
            None if self.rates is None else RateRange(min(self.rates) / 2, max(self.rates) * 1.2)
        )
        self.rate_B = None if self.rates is None else torch.tensor(self.rates[:batch]).double()
        self.agent = Learned(
            8, rate=0.4, window=window, scale=1.0, softcap=15.0, rates=rate_range
        ).double()
        with torch.no_grad():
            self.agent.projection.weight.normal_(std=0.5)
            if rate_range is not None:
                self.agent.film.last.weight.normal_(std=0.5)
            self.lm.early_head.weight.normal_()
        self.symbol_BN = torch.randint(256, (batch, length))
        self.mask_KBT = all_boundaries(length, batch)
        self.masks_CT = all_boundaries(length)[:, 0]
        self.encoder = [*self.lm.codec.parameters(), *self.lm.down.parameters()]
        self.policy = list(self.agent.parameters())
        self.inputs = [*self.policy, *self.encoder]

    def rollout(self, **options):
        noise = decisive(self.mask_KBT)
        td = rollout(self.lm, self.agent, self.symbol_BN, noise=noise, rate=self.rate_B, **options)
        assert torch.equal(td[keys.ACTION], self.mask_KBT)
        prob_K = td[keys.ACTION_LOG_PROB].sum((1, 2)).exp()
        torch.testing.assert_close(prob_K.sum().item(), 1.0, rtol=0, atol=1e-12)
        return td, prob_K

    def likelihood(self):
        """Return the log-likelihood of both sequences under each of the boundaries, directly from the model: [K]."""
        samples = len(self.mask_KBT)
        given = self.symbol_BN[:, :-1].repeat(samples, 1)
        log_prob = self.lm.codec.logits(self.lm(given, self.mask_KBT.flatten(0, 1))).log_softmax(-1)
        return (
            log_prob.gather(-1, self.symbol_BN[:, 1:].repeat(samples, 1)[..., None])
            .view(samples, -1)
            .sum(1)
        )

    def true(self, inputs=None):
        """Return the gradient of -E_a[sum log p] by the boundaries' probabilities."""
        _, prob_K = self.rollout()
        return flat_gradient(-(prob_K * self.likelihood().detach()).sum(), inputs or self.inputs)

    def expected(self, estimator, inputs=None):
        """Return E[gradient of the summed policy loss] over all boundaries."""
        td, prob_K = self.rollout()
        loss_K = estimator(td)[keys.LOSS_POLICY].sum((1, 2))
        return flat_gradient((prob_K.detach() * loss_K).sum(), inputs or self.inputs)

    def samples(self, noise_CKBT, **options):
        """Return C independent rollouts of K samples: [C, K, B, T]."""
        shape = noise_CKBT.shape
        batch = self.symbol_BN.shape[0]
        noise = noise_CKBT.expand(*shape[:2], batch, shape[-1]).flatten(0, 1)
        td = rollout(self.lm, self.agent, self.symbol_BN, noise=noise, rate=self.rate_B, **options)
        return td.unflatten(0, shape[:2])

    def tuples(self, samples):
        """Return all K-tuples of one sequence's boundaries: [C, K, 1, T]."""
        number = len(self.masks_CT)
        return self.masks_CT[
            torch.tensor(list(itertools.product(range(number), repeat=samples)))
        ].unsqueeze(2)

    def gradient(self, estimator, td_CKBT, weight_CB, inputs=None):
        """Return the weighted gradient of the policy loss, averaged over samples and summed over the sequence."""
        loss_CB = estimator(td_CKBT)[keys.LOSS_POLICY].mean(1).sum(-1)
        return flat_gradient((weight_CB * loss_CB).sum(), inputs or self.inputs)

    def breaks(self):
        """Return all values which p_i can take: [n, B] for every position."""
        prob_CBT = (
            self.samples(decisive(self.masks_CT[:, None, None]))
            .detach()[keys.BOUNDARY_PROB]
            .squeeze(1)
        )
        nothing = prob_CBT[:0, :, 0]
        later = [
            prob_CBT[(self.masks_CT[:, t:] == 0).all(1), :, t] for t in range(1, prob_CBT.shape[-1])
        ]
        return [nothing, *later]

    def coupled(self, estimator, noise_CBT, samples, offset_CP=None):
        """Return rollouts of K samples each, coupled by the estimator: [C, K, B, T]."""
        noise = noise_CBT.unsqueeze(1).expand(-1, samples, -1, -1)
        mask = torch.ones(noise.shape[-2:], dtype=torch.bool)
        mask[:, 0] = False
        with rand_gives(None if offset_CP is None else offset_CP[:, None, None]):
            coupled = estimator.sampling.couple(noise, mask, None)
        return self.samples(coupled)

    def branched(self, estimator, samples, positions=1):
        """Return rollouts [C, K, B, T] and weights [C, B] of all choices of positions, times all cells of the noise."""
        noise, size = cells(self.breaks())
        decisions = self.symbol_BN.shape[1] - 2
        # Enough steps that every stretch's length divides their number: each decision gets its exact chance.
        steps = decisions * (decisions - 1)
        at = (torch.arange(steps).double() + 0.5) / steps
        grid = torch.cartesian_prod(*[at] * positions).view(-1, positions)
        offset_CP = grid.repeat_interleave(len(noise), 0)
        td = self.coupled(estimator, noise.repeat(len(grid), 1, 1), samples, offset_CP)
        return td, size.repeat(len(grid), 1) / len(grid)
