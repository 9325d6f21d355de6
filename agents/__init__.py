"""Who draws the boundaries. Agents read TensorDict keys only and know neither model, environment nor estimator."""
