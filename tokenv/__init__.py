"""tokenv: drawing token boundaries is a reinforcement-learning environment.

Importing this package loads nothing heavy; take what you need from its modules::

    from tokenv.env import TokenizationEnv
    from tokenv.lm.unet import UNet
"""

__version__ = "0.1.0"
