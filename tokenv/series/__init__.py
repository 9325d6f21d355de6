"""Forecast series: forecasts, baselines, scores and pictures."""
