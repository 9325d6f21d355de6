"""The environment: observations, one-pass rollouts, stepping, gymnasium's interface, generation.

Importing this package registers the gymnasium environments and loads no model. Their entry points are those of the
package root (``tokenv.GYMNASIUM_ENTRY_POINTS``), which alone knows every room.
"""

import gymnasium

import tokenv

BYTES_ID = "tokenv/Bytes-v0"
SERIES_ID = "tokenv/Series-v0"


def register() -> None:
    """Register the ids with gymnasium; a second call has no effect."""
    for name, (entry_point, vector_entry_point) in tokenv.GYMNASIUM_ENTRY_POINTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name, entry_point=entry_point, vector_entry_point=vector_entry_point
            )


register()
