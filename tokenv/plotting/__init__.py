"""A kit of drawing parts that knows no feature: what is drawn comes as plain values."""
