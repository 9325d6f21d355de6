"""tokenv: drawing token boundaries is a reinforcement-learning environment.

Importing this package loads nothing heavy; take what you need from its modules::

    from tokenv.env.stepping import TokenizationEnv
    from tokenv.lm.unet import UNet
"""

from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).parent.parent
if (_ROOT / "pyproject.toml").is_file():  # a checkout: agents, estimators and configs lie beside this folder, not in it
    __path__.append(str(_ROOT))
