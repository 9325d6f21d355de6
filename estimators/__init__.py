"""How a policy learns from reward: small parts, chained. Estimators know neither agent, model nor environment."""
