"""tokenv: drawing token boundaries is a reinforcement-learning environment.

Importing this package loads nothing heavy; its public names are imported when they are used::

    import tokenv

    model = tokenv.load("runs/7")  # model.spans("some text"), model.log_likelihood(b"..."), model.generate("def f(")
    env = tokenv.TokenizationEnv(lm, source, batch_size=8)
    td = env.one_pass(agent, estimator.sampling)
    tokenv.check_estimator("rloo", gamma=1.0)
    tokenv.compare_scores({"a": losses, "b": others}).pairs  # losses [seed, document] → intervals and p-values

Parts of estimators are in ``tokenv.estimators``, agents in ``tokenv.agents``.
"""

from pathlib import Path

from tokenv.core import lazy_exports

__version__ = "0.1.0"

_ROOT = Path(__file__).parent.parent
# a checkout: agents, estimators and configs lie beside this folder, not in it
if (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))

GYMNASIUM_ENTRY_POINTS = {  # id: one sequence, many sequences
    "tokenv/Bytes-v0": (
        "tokenv.library.environments:TrainedModelBytesEnv",
        "tokenv.library.environments:TrainedModelBytesVectorEnv",
    ),
    "tokenv/Series-v0": (
        "tokenv.series.series_environments:TrainedModelSeriesEnv",
        "tokenv.series.series_environments:TrainedModelSeriesVectorEnv",
    ),
}

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "core": ("keys",),
        "core.contracts": ("Sampling",),
        "compare.score_statistics": ("compare_scores",),
        "env.generation": ("generate",),
        "env.rollout": ("rollout",),
        "env.stepping": ("TokenizationEnv",),
        "cli.experiment": ("train",),
        "series.frames": ("SeriesModel", "conformal_intervals"),
        "library.model": ("Model", "load"),
        "lm.config": ("UNetConfig",),
        "lm.unet": ("UNet",),
        "evaluation.loaded_run": ("load_run",),
        "testing": ("check_agent", "check_codec", "check_estimator", "check_rate_target"),
    },
)
