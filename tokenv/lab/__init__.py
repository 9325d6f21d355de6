"""A laboratory for gradient estimators: bias, variance and cost, all at the same parameters on the same text."""
