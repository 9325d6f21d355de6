"""Train one run: the loop, losses, optimizer steps, checkpoints, and several processes that share it."""
