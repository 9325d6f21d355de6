"""Register the environments' ids with gymnasium without loading what they stand for.

The entry points are the package root's (``tokenv.GYMNASIUM_ENTRY_POINTS``): it alone knows every room, and names the
classes of ``tokenv.library.environments``, which can open a trained run.
"""

import gymnasium

import tokenv

BYTES_ID = "tokenv/Bytes-v0"
SERIES_ID = "tokenv/Series-v0"


def register() -> None:
    """Register the ids; importing ``tokenv.env`` does it. A second call does nothing."""
    for name, (entry_point, vector_entry_point) in tokenv.GYMNASIUM_ENTRY_POINTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(id=name, entry_point=entry_point, vector_entry_point=vector_entry_point)
