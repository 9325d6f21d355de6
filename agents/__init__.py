"""Who draws the boundaries. Agents read TensorDict keys only and know neither model, environment nor estimator."""

from tokenv.lazy import face

AGENTS = {
    "base": ("Agent", "BoundaryDistribution"),
    "learned": ("Learned",),
    "strict": ("Strict",),
    "gumbel": ("Nawrot",),
    "router": ("HNet",),
    "fixed": ("Mixed", "Never", "Random", "Uniform"),
    "heuristic": ("Entropy", "Whitespace"),
    "guided": ("BPE",),
    "loaded": ("Loaded",),
}

__getattr__, __dir__ = face(__name__, AGENTS)
