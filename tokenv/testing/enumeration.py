"""Expected gradients of estimators, by enumeration of boundaries in float64."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.expectations import all_boundaries, forcing_noise
from tokenv.env.rollout import rollout
from tokenv.testing.fixture import TinyProblem

CHUNK = 2**13  # combinations which an estimator sees at a time


@dataclass(frozen=True)
class Shape:
    """Shape of the texts of a batch.

    Args:
        texts: number of texts B.
        length: symbols N of the longest one, with N - 2 free boundaries.
        unequal: whether every other text is shorter by two symbols or more.
    """

    texts: int
    length: int
    unequal: bool = False

    def __str__(self) -> str:
        lengths = "unequal lengths up to " if self.unequal else ""
        return f"{self.texts} texts of {lengths}{self.length} symbols"

    @property
    def lengths(self) -> Tensor:
        """Symbols of each text, [B]."""
        length_B = torch.full((self.texts,), self.length)
        if self.unequal:
            shorter_B = torch.arange(self.texts) % 4 * 2
            length_B = (length_B - shorter_B).clamp(min=3)
        return length_B

    def combinations(self, samples: int) -> int:
        """Return the number of all boundaries of all samples."""
        free = int((self.lengths - 2).sum())
        return 2 ** (samples * free)


class Enumeration:
    """All boundaries of each text of a batch, and samples of its other texts.

    The model is such that a text's likelihood depends on its own boundaries alone. Every text is rolled out with each
    of its C = 2^(N - 2) boundaries once; the batches which an estimator sees are put together from these.

    Args:
        problem: tiny model and policy.
        shape: shape of the texts.
        samples: samples K of each text's boundaries.
        seed: seed of texts and of the drawn boundaries.
        symbol_BN: the texts; None draws them.
    """

    def __init__(
        self,
        problem: TinyProblem,
        shape: Shape,
        samples: int,
        seed: int,
        symbol_BN: Tensor | None = None,
    ) -> None:
        self.problem = problem
        self.shape = shape
        self.samples = samples
        generator = torch.Generator().manual_seed(seed)
        if symbol_BN is None:
            symbol_BN = torch.randint(256, (shape.texts, shape.length), generator=generator)
        bits_CT = all_boundaries(shape.length)[:, 0]
        self.count = len(bits_CT)
        drawn_KBT = torch.rand(
            samples, shape.texts, shape.length - 1, generator=generator, dtype=torch.float64
        )
        forced_CBT = forcing_noise(bits_CT)[:, None, :].expand(-1, shape.texts, -1)
        noise = torch.cat([forced_CBT, drawn_KBT])
        self._pool = rollout(
            problem.lm, problem.agent, symbol_BN, noise=noise, length_B=shape.lengths
        )
        enumerated = self._pool[: self.count]
        free_CBT = enumerated[keys.DECISION_MASK]
        # Boundaries which no decision draws would count a text's boundaries several times.
        spare_CBT = bits_CT[:, None, 1:].bool() & ~free_CBT[..., 1:]
        log_prob_CB = enumerated[keys.ACTION_LOG_PROB].sum(-1)
        self._log_prob_CB = log_prob_CB.masked_fill(spare_CBT.any(-1), -torch.inf)
        self.prob_CB = self._log_prob_CB.detach().exp()
        likelihood_CB = enumerated[keys.LOG_LIKELIHOOD].detach().sum(-1)
        self._expected_B = -(self._log_prob_CB.exp() * likelihood_CB).sum(0)

    def true_gradient(self, weight_B: Tensor) -> Tensor:
        """Return the gradient of the texts' expected negative log-likelihoods, with a weight for each text."""
        return self.problem.gradient((weight_B * self._expected_B).sum())

    def batch(self, index_XKB: Tensor, estimator: Any) -> TensorDictBase:
        """Return rollouts by the numbers of their boundaries, as the estimator would see each: [X, (K,) B, T]."""
        td = self._pool[index_XKB, torch.arange(self.shape.texts)]
        if estimator.sampling.num_samples is None:
            return td[:, 0]
        return td

    @property
    def drawn_index(self) -> Tensor:
        """Numbers of the drawn boundaries, [K, B]."""
        index_K = self.count + torch.arange(self.samples)
        return index_K[:, None].expand(-1, self.shape.texts)

    def losses(self, estimator: Any, td: TensorDictBase) -> Tensor:
        """Return the policy losses of rollouts [X, ..], each computed from the estimator's present state: [X, K, B]."""
        if has_state(estimator):  # all at once, they would share a state
            each = [copy.deepcopy(estimator)(one)[keys.LOSS_POLICY] for one in td.unbind(0)]
            loss = torch.stack(each)
        else:
            loss = estimator(td)[keys.LOSS_POLICY]
        return loss.sum(-1).view(-1, self.samples, self.shape.texts)

    def warm_up(self, estimator: Any, calls: int) -> None:
        """Call the estimator on the drawn boundaries, and move its parameters as training would."""
        for _ in range(calls):
            estimator(self.batch(self.drawn_index[None], estimator)[0])
        if calls:
            with torch.no_grad():
                for parameter in estimator.parameters():
                    parameter.add_(0.1)

    def conditional_bias(self, estimator: Any) -> float:
        """Return how far the expected gradients of single samples' losses are from the true ones, relative to them.

        The boundaries of one sample of one text are enumerated and all others stay as drawn. Of an estimator whose
        baseline does not read the sample's own boundaries, each such expectation is the text's true gradient:
        a property which is sufficient for no bias, but not necessary. The gradients of all samples are added with
        different weights, so that errors do not cancel; of an estimator with a state, which must be copied for each
        of the boundaries, only the last sample's is computed.
        """
        texts = self.shape.texts
        weight_KB = (
            torch.arange(1.0, self.samples * texts + 1, dtype=torch.float64).sqrt().view(-1, texts)
        )
        if has_state(estimator):
            weight_KB[:-1] = 0
            weight_KB[:, :-1] = 0
        error = self.conditional_error(estimator, weight_KB)
        return float(error.norm() / self.true_gradient(weight_KB.sum(0)).norm())

    def conditional_error(self, estimator: Any, weight_KB: Tensor) -> Tensor:
        """Return the weighted sum of the differences between expected gradients of single samples and the true ones.

        See ``conditional_bias``. With weights of 1, its mean over draws of the other boundaries is the bias of the
        summed loss, whatever the estimator's baseline reads: a flat vector of all parameters.
        """
        total = torch.zeros((), dtype=torch.float64)
        for k, b in weight_KB.nonzero().tolist():
            index_CKB = self.drawn_index.expand(self.count, -1, -1).clone()
            index_CKB[:, k, b] = torch.arange(self.count)
            loss_CKB = self.losses(estimator, self.batch(index_CKB, estimator))
            expected = (self.prob_CB[:, b] * loss_CKB[:, k, b]).sum()
            total = total + weight_KB[k, b] * expected
        return self.problem.gradient(total) - self.true_gradient(weight_KB.sum(0))

    def joint_bias(self, estimator: Any) -> float:
        """Return the relative error of the expected gradient over all boundaries of all samples."""
        texts = self.shape.texts
        digits = self.samples * texts
        place_D = self.count ** torch.arange(digits)
        mean = torch.zeros((), dtype=torch.float64)
        for number_X in torch.arange(self.count**digits).split(CHUNK):
            index_XD = number_X[:, None] // place_D % self.count
            index_XKB = index_XD.view(-1, self.samples, texts)
            weight_X = self.prob_CB[index_XKB, torch.arange(texts)].flatten(1).prod(1)
            index_XKB = index_XKB[weight_X > 0]
            loss_XKB = self.losses(estimator, self.batch(index_XKB, estimator))
            loss = (weight_X[weight_X > 0] * loss_XKB.sum((1, 2))).sum() / self.samples
            mean = mean + self.problem.gradient(loss)
        true = self.true_gradient(torch.ones(texts, dtype=torch.float64))
        return float((mean - true).norm() / true.norm())


def has_state(estimator: Any) -> bool:
    """Return whether an estimator keeps buffers from call to call."""
    return any(True for _ in estimator.buffers())
