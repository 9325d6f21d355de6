"""Measure estimators and speed: bias, variance and cost of gradients, time and memory of updates."""
