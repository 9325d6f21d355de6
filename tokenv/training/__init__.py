"""One training run: its parts, losses, updates, state, and how it is evaluated and read again."""
