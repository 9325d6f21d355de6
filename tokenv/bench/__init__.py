"""Speed, memory and the cost of learning boundaries."""
