"""Who draws the boundaries. Agents read TensorDict keys only and know neither model, environment nor estimator."""

# A foreign package may carry this common name; tokenv checks that it got ours.
TOKENV_ROOM = "agents"
