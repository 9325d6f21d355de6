"""How a policy learns from reward: small parts, chained. Estimators know neither agent, model nor environment.

What builds an estimator of your own can be taken from here: ``from tokenv.estimators import Part, chain, Discount``.
"""

from tokenv.lazy import face

PARTS = {
    "base": ("Chain", "Part", "chain"),
    "rewards": ("EarlyExit", "Likelihood"),
    "credit": ("BoundaryCredit", "Discount", "LambdaReturn"),
    "critic": ("TextCritic",),
    "baselines": (
        *("BatchCentre", "GroupRelative", "LeaveOneOut", "LeaveOneOutBatch", "MovingAverage", "ShrunkLeaveOneOut"),
    ),
    "scaling": ("Clip", "Standardise"),
    "surrogates": ("ClippedSurrogate", "ScoreFunction"),
    "off_policy": ("FixedRateProposal",),
    "antithetic": ("ARM", "ARMS", "DisARM"),
    "branching": ("BitFlip", "Branch"),
    "control": ("Rebar", "Relax"),
    "straight_through": ("GumbelRao", "GumbelSigmoid", "PathGradient", "ReinMax", "StraightThrough"),
    "rate": ("BinomialPrior", "LogitPressure", "RateTarget", "RatioLoss"),
}

__getattr__, __dir__ = face(__name__, PARTS)
