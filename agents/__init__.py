"""Who draws the boundaries. Agents read TensorDict keys only and know neither model, environment nor estimator."""

from tokenv.core.lazy import face

CLASSES = {
    "base": ("Agent", "BoundaryDistribution", "Policy"),
    "learned": ("Learned",),
    "strict": ("Strict",),
    "conditional": ("Conditional",),
    "nawrot": ("Nawrot",),
    "hnet": ("HNet",),
    "fixed": ("Mixed", "Never", "Random", "Uniform"),
    "heuristic": ("Entropy", "Whitespace"),
    "bpe": ("BPE",),
    "pretrained": ("Loaded",),
}

AGENTS = {  # agents by name
    "learned": "tokenv.agents.learned:Learned",
    "strict": "tokenv.agents.strict:Strict",
    "conditional": "tokenv.agents.conditional:Conditional",
    "nawrot": "tokenv.agents.nawrot:Nawrot",
    "hnet": "tokenv.agents.hnet:HNet",
    "uniform": "tokenv.agents.fixed:Uniform",
    "random": "tokenv.agents.fixed:Random",
    "mixed": "tokenv.agents.fixed:Mixed",
    "never": "tokenv.agents.fixed:Never",
    "whitespace": "tokenv.agents.heuristic:Whitespace",
    "entropy": "tokenv.agents.heuristic:Entropy",
    "bpe": "tokenv.agents.bpe:BPE",
}

__getattr__, __dir__ = face(__name__, CLASSES)
