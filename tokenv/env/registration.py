"""The environments' ids, made known to gymnasium without loading what they stand for.

They stand for the environments that know how to open a trained run: ``tokenv.library.environments``.
"""

import gymnasium

BYTES_ID = "tokenv/Bytes-v0"
SERIES_ID = "tokenv/Series-v0"


def register() -> None:
    """Make the ids known to gymnasium; importing ``tokenv.env`` does it. A second call does nothing."""
    for name, kind in ((BYTES_ID, "Bytes"), (SERIES_ID, "Series")):
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name,
                entry_point=f"tokenv.library.environments:TrainedModelEnv{kind}Env",
                vector_entry_point=f"tokenv.library.environments:TrainedModelEnv{kind}VectorEnv",
            )
