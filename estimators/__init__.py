"""Estimators, by which a policy learns from reward: chains of stages. They know neither agent, model nor environment.

Recipes, and stages for an estimator of your own, are imported from here: ``from tokenv.estimators import rloo, chain``.
"""

from tokenv.core import lazy_exports

STAGES = {
    "base": ("Chain", "Stage", "chain"),
    "credit": ("BoundaryCredit", "Discount", "EarlyExit", "LambdaReturn", "Likelihood"),
    "baselines": (
        *(
            "BatchCentre",
            "GroupRelative",
            "LeaveOneOutSamples",
            "LeaveOneOutBatch",
            "LinearCritic",
            "MovingAverage",
        ),
        *("RewardCentre", "ShrunkLeaveOneOut", "TextCritic"),
    ),
    "surrogates": (
        *(
            "Clip",
            "ClippedSurrogate",
            "DecisionProposal",
            "FixedRateProposal",
            "Imitation",
            "Kickstart",
            "ScoreFunction",
        ),
        "Standardise",
    ),
    "antithetic": ("ARM", "ARMS", "DisARM"),
    "branching": ("BitFlip", "Branch"),
    "control_variates": ("REBAR", "RELAX"),
    "straight_through": (
        "GumbelRao",
        "GumbelSigmoid",
        "PathGradient",
        "ReinMax",
        "StraightThrough",
    ),
    "rate_targets": ("BinomialPrior", "LogitPressure", "RateTarget", "RatioLoss"),
}

RECIPE_NAMES = (
    *(
        "naive",
        "early_exit",
        "reinforce",
        "leave_one_out",
        "moving_average",
        "lambda_return",
        "standardised",
    ),
    *(
        "rloo",
        "rloo_clipped",
        "boundary_credit",
        "linear_critic",
        "text_critic",
        "reinpatch",
        "ppo",
        "off_policy",
    ),
    *("arm", "disarm", "arms", "bitflip", "branch", "rebar", "relax"),
    *("straight", "gumbel", "reinmax", "gumbel_rao", "path"),
)
RECIPES = {name: f"tokenv.estimators.recipes:{name}" for name in RECIPE_NAMES}  # estimators by name
RATE_TARGETS = {  # rate targets by name
    "logit_pressure": "tokenv.estimators.rate_targets:LogitPressure",
    "binomial": "tokenv.estimators.rate_targets:BinomialPrior",
    "ratio": "tokenv.estimators.rate_targets:RatioLoss",
}

__getattr__, __dir__ = lazy_exports(__name__, STAGES | {"recipes": RECIPE_NAMES})
