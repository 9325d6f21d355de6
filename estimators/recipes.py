"""Recipes: named estimators, each a chain of a few stages."""

from typing import Literal

from tokenv.core.errors import check_value, choice
from tokenv.estimators import antithetic, branching, control_variates, straight_through
from tokenv.estimators.base import Chain, Stage, chain
from tokenv.estimators.baselines import (
    BatchCentre,
    GroupRelative,
    LeaveOneOutBatch,
    LeaveOneOutSamples,
    LinearCritic,
    MovingAverage,
    RewardCentre,
    ShrunkLeaveOneOut,
    TextCritic,
)
from tokenv.estimators.credit import BoundaryCredit, Discount, EarlyExit, LambdaReturn, Likelihood
from tokenv.estimators.surrogates import (
    Clip,
    ClippedSurrogate,
    DecisionProposal,
    FixedRateProposal,
    ScoreFunction,
    Standardise,
)


def _surrogate(head_epochs: int) -> Stage:
    return ClippedSurrogate(epochs=1, head_epochs=head_epochs) if head_epochs else ScoreFunction()


def naive() -> Chain:
    """REINFORCE on the plain likelihood (Williams 1992; arXiv 2602.13940, eq. 12).

    Bias: none, for every policy. Cost: one forward and one backward pass. Its variance includes that of the likelihood
    of the rest of the text.
    """
    return chain(Likelihood(), Discount(1.0), ScoreFunction())


def early_exit(gamma: float = 1.0) -> Chain:
    """``naive`` relative to the early exit, and discounted if ``gamma`` < 1 (arXiv 2602.13940, eq. 14-16).

    Bias: that of the discount; none for gamma = 1, for every policy. Cost: one forward and one backward pass.

    Args:
        gamma: discount factor.
    """
    return chain(EarlyExit(), Discount(gamma), ScoreFunction())


def reinforce(
    gamma: float = 0.99,
    scaled: bool = False,
    head_epochs: int = 0,
    early_exit: bool = True,
    centred: Literal["advantage", "reward", "none"] = "advantage",
    warm_start: int = 0,
    rate: float = 0.2,
) -> Chain:
    """REINFORCE as in the paper: early-exit rewards, discounted, centred over the batch (arXiv 2602.13940, eq. 14-18).

    ``centred=reward`` with ``warm_start`` is what its authors released; each other option leaves out one of the
    paper's means against variance (docs/released.md).

    Bias: that of the discount for gamma < 1, and a factor (B - 1) / B if centred; for every policy. During the warm
    start also that of ``DecisionProposal``. Cost: one forward and one backward pass, shared with the language model's;
    memory O(B T).

    Args:
        gamma: discount factor.
        scaled: whether advantages are those of ``Discount(scaled=True)``, with the same scale for every gamma.
        head_epochs: further clipped steps of the agent alone on each rollout; see ``ClippedSurrogate``.
        early_exit: whether rewards are relative to the early exit. Without it they are plain log-likelihoods, and the
            early exit is neither computed nor trained unless ``loss.early`` is set.
        centred: what is centred over the batch, position by position: ``advantage``, after discounting, as in the
            paper; ``reward``, before; or ``none``. The first two are equal unless lengths differ.
        warm_start: first rollouts (passes of training) whose boundaries are drawn at ``rate``, independently of the
            policy, which learns from them by likelihood ratios; see ``DecisionProposal``.
        rate: boundary probability of the warm start.

    Raises:
        ValueError: another ``centred``, a negative ``warm_start``, or one with ``head_epochs``.
    """
    check_value("centred", centred, choice("advantage", "reward", "none"))
    if warm_start and head_epochs:
        raise ValueError(
            f"warm_start = {warm_start} with head_epochs = {head_epochs}: expected one of them to be 0, because "
            "further steps take the policy's own draws for granted"
        )
    stages: list[Stage] = [EarlyExit() if early_exit else Likelihood()]
    if centred == "reward":
        stages.append(RewardCentre())
    stages.append(Discount(gamma, scaled))
    if centred == "advantage":
        stages.append(BatchCentre())
    if warm_start:
        stages.append(DecisionProposal(rate, warm_start))
    return chain(*stages, _surrogate(head_epochs))


def leave_one_out(gamma: float = 0.99, scaled: bool = False, head_epochs: int = 0) -> Chain:
    """``reinforce`` with the mean of the *other* sequences as baseline.

    Bias: that of the discount only; for every policy. Cost: as ``reinforce``.

    Args:
        gamma: discount factor.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
    """
    return chain(EarlyExit(), Discount(gamma, scaled), LeaveOneOutBatch(), _surrogate(head_epochs))


def moving_average(seq_len: int, gamma: float = 0.99, decay: float = 0.95) -> Chain:
    """REINFORCE with a running mean per position as baseline.

    Bias: that of the discount only; for every policy. Cost: as ``reinforce``.

    Args:
        seq_len: symbols of a sequence.
        gamma: discount factor.
        decay: decay of the running mean.
    """
    return chain(EarlyExit(), Discount(gamma), MovingAverage(seq_len, decay), ScoreFunction())


def lambda_return(gamma: float = 0.99, lam: float = 0.9) -> Chain:
    """Generalised discounting with the other sequences as critic.

    Bias: as of a discount gamma * lambda; for every policy. Cost: as ``reinforce``.

    Args:
        gamma: discount factor.
        lam: lambda in [0, 1].
    """
    return chain(EarlyExit(), LambdaReturn(gamma, lam), ScoreFunction())


def standardised(gamma: float = 0.99, limit: float = 3.0) -> Chain:
    """``leave_one_out`` in units of its standard deviation, clipped.

    Bias: a common factor, and large credits count less. Cost: as ``reinforce``.

    Args:
        gamma: discount factor.
        limit: largest advantage, in standard deviations.
    """
    return chain(
        EarlyExit(),
        Discount(gamma),
        LeaveOneOutBatch(),
        Standardise(),
        Clip(limit),
        ScoreFunction(),
    )


def rloo(
    gamma: float = 0.99,
    num_samples: int = 2,
    reward_only: bool = False,
    scaled: bool = False,
    head_epochs: int = 0,
    early_exit: bool = True,
) -> Chain:
    """Leave-one-out over K samples of the same sequence (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    Bias: that of the discount only; for every policy. Cost: one pass through the encoder and K through middle and
    decoder; with ``reward_only`` all but the first without a backward pass, a third of the cost.

    Args:
        gamma: discount factor.
        num_samples: samples K of the boundaries per sequence.
        reward_only: whether the language model learns from the first sample alone.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
        early_exit: whether rewards are relative to the early exit. It reads no boundary, so all samples of a text have
            the same, and it cancels; without it, advantages are equal, and it is neither computed nor trained unless
            ``loss.early`` is set.
    """
    stages = (
        EarlyExit() if early_exit else Likelihood(),
        Discount(gamma, scaled),
        LeaveOneOutSamples(reward_only),
        _surrogate(head_epochs),
    )
    return chain(*stages, num_samples=num_samples)


def rloo_clipped(
    gamma: float = 0.99,
    num_samples: int = 2,
    reward_only: bool = True,
    epsilon: float = 0.2,
    epochs: int = 3,
    scaled: bool = False,
    head_epochs: int = 0,
) -> Chain:
    """``rloo`` advantages and several clipped steps on one rollout, since samples are expensive.

    Bias: that of the discount in the first step; see ``ClippedSurrogate`` for the later ones. Cost: as ``rloo`` with
    ``reward_only``, and a pass through encoder and policy for each further step.

    Args:
        gamma: discount factor.
        num_samples: samples K of the boundaries per sequence.
        reward_only: whether the language model learns from the first sample alone.
        epsilon: clipping range.
        epochs: gradient steps on one rollout.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
    """
    surrogate = ClippedSurrogate(epsilon, epochs, head_epochs)
    return chain(
        EarlyExit(),
        Discount(gamma, scaled),
        LeaveOneOutSamples(reward_only),
        surrogate,
        num_samples=num_samples,
    )


def boundary_credit(
    gamma: float = 0.95,
    boundaries: int = 3,
    anneal: int = 100,
    num_samples: int = 2,
    reward_only: bool = False,
) -> Chain:
    """``rloo`` with credit until the k-th next boundary, annealed in.

    Bias: see ``BoundaryCredit``; for every policy. Cost: as ``rloo``.

    Args:
        gamma: discount factor.
        boundaries: number k of boundaries until which rewards are credited.
        anneal: rollouts until the cut is complete.
        num_samples: samples K of the boundaries per sequence.
        reward_only: whether the language model learns from the first sample alone.
    """
    credit = BoundaryCredit(gamma, boundaries, anneal)
    return chain(
        EarlyExit(),
        credit,
        LeaveOneOutSamples(reward_only),
        ScoreFunction(),
        num_samples=num_samples,
    )


def linear_critic(
    width: int,
    vocabulary: int = 256,
    gamma: float = 0.99,
    warmup: int = 20,
    scaled: bool = False,
    head_epochs: int = 0,
) -> Chain:
    """``leave_one_out`` with a linear critic of single rewards in place of the early exit (ours; see ``LinearCritic``).

    It reads no early exit, which is then neither computed nor trained (``loss.early=null``).

    Bias: that of the discount only; for every policy. Cost: one forward and one backward pass, shared with the language
    model's, and 3 D products per symbol.

    Args:
        width: model width D.
        vocabulary: symbols of the text.
        gamma: discount factor.
        warmup: rollouts in which the critic is trained and nothing is subtracted.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
    """
    critic = LinearCritic(width, vocabulary, warmup)
    return chain(
        Likelihood(), critic, Discount(gamma, scaled), LeaveOneOutBatch(), _surrogate(head_epochs)
    )


def text_critic(
    width: int,
    gamma: float = 0.99,
    hidden: int = 64,
    warmup: int = 20,
    num_samples: int = 1,
    reward_only: bool = False,
    scaled: bool = False,
    head_epochs: int = 0,
) -> Chain:
    """``leave_one_out`` with a critic which reads the whole text (Mao et al. 2018, arXiv 1807.02264).

    With several samples of a text, the mean of the others is subtracted besides, multiplied by a learned factor: see
    ``ShrunkLeaveOneOut``.

    Bias: that of the discount only; for every policy. Cost: as ``leave_one_out`` (or ``rloo``) and a small network.

    Args:
        width: model width D.
        gamma: discount factor.
        hidden: hidden units of the critic.
        warmup: rollouts in which the critic is trained and nothing is subtracted.
        num_samples: samples K per sequence; 1 compares with the other sequences of the batch.
        reward_only: with several samples, whether the language model learns from the first alone.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
    """
    stages = EarlyExit(), TextCritic(width, hidden, warmup), Discount(gamma, scaled)
    if num_samples == 1:
        return chain(*stages, LeaveOneOutBatch(), _surrogate(head_epochs))
    return chain(
        *stages, ShrunkLeaveOneOut(reward_only), _surrogate(head_epochs), num_samples=num_samples
    )


def reinpatch(
    gamma: float = 1.0, num_samples: int = 4, reward_only: bool = False, centred_only: bool = False
) -> Chain:
    """Group-relative policy gradient (ReinPatch, arXiv 2603.26097), here with the early exit's reward.

    With ``codec.direct`` and gamma = 1 every boundary is credited with the log-likelihood of the forecast; the early
    exit's, which boundaries do not affect, is the same in all samples of a group and cancels.

    Bias: see ``GroupRelative``. Cost: as ``rloo``. Its advantages have the same scale for every gamma.

    Args:
        gamma: discount factor.
        num_samples: samples K of the boundaries per sequence.
        reward_only: whether the language model learns from the first sample alone.
        centred_only: whether advantages are not divided by the group's standard deviation; see ``GroupRelative``.
    """
    group = GroupRelative(reward_only=reward_only, centred_only=centred_only)
    return chain(EarlyExit(), Discount(gamma), group, ScoreFunction(), num_samples=num_samples)


def ppo(
    gamma: float = 0.99,
    epsilon: float = 0.2,
    epochs: int = 2,
    scaled: bool = False,
    head_epochs: int = 0,
) -> Chain:
    """PPO's clipped surrogate on ``leave_one_out`` advantages (Schulman et al. 2017, arXiv 1707.06347).

    Bias: that of the discount in the first of the gradient steps; see ``ClippedSurrogate`` for the later ones.
    Cost: as ``reinforce``, and a pass through encoder and policy for each further step.

    Args:
        gamma: discount factor.
        epsilon: clipping range.
        epochs: gradient steps on one rollout.
        scaled: see ``reinforce``.
        head_epochs: see ``reinforce``.
    """
    surrogate = ClippedSurrogate(epsilon, epochs, head_epochs)
    return chain(EarlyExit(), Discount(gamma, scaled), LeaveOneOutBatch(), surrogate)


def off_policy(
    rate: float, gamma: float = 0.99, horizon: int | None = 8, rollouts: int | None = 100
) -> Chain:
    """Boundaries from a fixed-rate Bernoulli with importance weights, as warm start for ``early_exit``.

    Bias: that of the discount and the horizon. There is no baseline, which would be biased, because the mean of the
    score is not 0 under another policy's actions. Cost: as ``reinforce``.

    Args:
        rate: boundary probability of the proposal.
        gamma: discount factor.
        horizon: decisions before a reward which are weighed; None for all.
        rollouts: length of the warm start; None for the whole run.
    """
    return chain(
        EarlyExit(), FixedRateProposal(rate, horizon, rollouts), Discount(gamma), ScoreFunction()
    )


def _coupled(part: Stage, gamma: float, num_samples: int) -> Chain:
    return chain(EarlyExit(), Discount(gamma), part, num_samples=num_samples)


def arm(gamma: float = 0.99, num_samples: int = 2) -> Chain:
    """ARM (Yin & Zhou 2019, arXiv 1807.11143). Bias and cost: see ``antithetic.ARM``; window 0 only."""
    return _coupled(antithetic.ARM(), gamma, num_samples)


def disarm(gamma: float = 0.99, num_samples: int = 2) -> Chain:
    """DisARM / U2G (Dong et al. 2020, arXiv 2006.10680). Bias and cost: see ``antithetic.DisARM``; window 0 only."""
    return _coupled(antithetic.DisARM(), gamma, num_samples)


def arms(gamma: float = 0.99, num_samples: int = 4) -> Chain:
    """ARMS (Dimitriev & Zhou 2021, arXiv 2105.14141). Bias and cost: see ``antithetic.ARMS``; window 0 only."""
    return _coupled(antithetic.ARMS(), gamma, num_samples)


def bitflip(gamma: float = 0.99, positions: int = 1) -> Chain:
    """One decision forced both ways. Bias and cost: see ``branching.BitFlip``; every policy."""
    return _coupled(branching.BitFlip(positions), gamma, 2)


def branch(gamma: float = 0.99, positions: int = 1, num_samples: int = 2) -> Chain:
    """Boundaries forced in forward-only copies. Bias and cost: see ``branching.Branch``; every policy."""
    return _coupled(branching.Branch(positions), gamma, num_samples)


def rebar(temperature: float = 0.5) -> Chain:
    """REBAR (Tucker et al. 2017, arXiv 1703.07370). Bias and cost: see ``control_variates.REBAR``; window 0 only."""
    return chain(EarlyExit(), Discount(1.0), control_variates.REBAR(temperature))


def relax(width: int, temperature: float = 0.5) -> Chain:
    """RELAX (Grathwohl et al. 2018, arXiv 1711.00123). Bias and cost: see ``control_variates.RELAX``; window 0 only."""
    return chain(EarlyExit(), Discount(1.0), control_variates.RELAX(width, temperature))


def straight() -> Chain:
    """Plain straight-through (Bengio et al. 2013, arXiv 1308.3432). See ``straight_through.StraightThrough``."""
    return chain(straight_through.StraightThrough())


def gumbel(temperature: float = 0.5) -> Chain:
    """Straight-through Gumbel-sigmoid (as in Nawrot et al. 2023). See ``straight_through.GumbelSigmoid``."""
    return chain(straight_through.GumbelSigmoid(temperature))


def reinmax() -> Chain:
    """ReinMax (Liu et al. 2023, arXiv 2304.08612). See ``straight_through.ReinMax``."""
    return chain(straight_through.ReinMax())


def gumbel_rao(temperature: float = 0.5, draws: int = 16) -> Chain:
    """Gumbel-Rao (Paulus et al. 2021, arXiv 2010.04838). See ``straight_through.GumbelRao``."""
    return chain(straight_through.GumbelRao(temperature, draws))


def path() -> Chain:
    """Pathwise gradient through the agent's own differentiable boundaries. See ``straight_through.PathGradient``."""
    return chain(straight_through.PathGradient())
