"""Files which are complete or do not exist: atomic writes, checkpoints, checksums, processes, trust."""
