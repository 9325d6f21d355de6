"""How a policy learns from reward: small parts, chained. Estimators know neither agent, model nor environment."""

# A foreign package may carry this common name; tokenv checks that it got ours.
TOKENV_ROOM = "estimators"
