"""Agents, which draw the boundaries. They read TensorDict keys only: no model, environment or estimator."""

from tokenv.core import lazy_exports

CLASSES = {
    "base": ("Agent", "BoundaryDistribution", "Policy", "StepState"),
    "learned": ("Learned",),
    "exact_count": ("ConditionalBernoulli", "ExactCount"),
    "boundary_predictors": ("HNet", "Nawrot"),
    "fixed": ("RandomRate", "NoBoundaries", "Random", "Uniform"),
    "heuristic": ("Entropy", "Events", "Whitespace"),
    "bpe": ("BPE",),
    "pretrained": ("PretrainedAgent",),
}

AGENTS = {  # agents by name
    "learned": "tokenv.agents.learned:Learned",
    "exact_count": "tokenv.agents.exact_count:ExactCount",
    "conditional": "tokenv.agents.exact_count:ConditionalBernoulli",
    "nawrot": "tokenv.agents.boundary_predictors:Nawrot",
    "hnet": "tokenv.agents.boundary_predictors:HNet",
    "uniform": "tokenv.agents.fixed:Uniform",
    "random": "tokenv.agents.fixed:Random",
    "random_rate": "tokenv.agents.fixed:RandomRate",
    "no_boundaries": "tokenv.agents.fixed:NoBoundaries",
    "whitespace": "tokenv.agents.heuristic:Whitespace",
    "entropy": "tokenv.agents.heuristic:Entropy",
    "events": "tokenv.agents.heuristic:Events",
    "bpe": "tokenv.agents.bpe:BPE",
}

__getattr__, __dir__ = lazy_exports(__name__, CLASSES)
