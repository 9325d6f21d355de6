"""Downstream tasks: questions whose answers a model scores."""
