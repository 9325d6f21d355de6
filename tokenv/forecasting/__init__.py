"""Series continued: forecasts, their scores and pictures."""
