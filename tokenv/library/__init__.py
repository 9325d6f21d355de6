"""Trained models in a few lines of Python: ``tokenv.load``, its ``Model``, and sharing it."""
