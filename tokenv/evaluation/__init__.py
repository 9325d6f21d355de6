"""Evaluate trained models: held-out loss, calibration, rate curves, downstream tasks, stored runs."""
