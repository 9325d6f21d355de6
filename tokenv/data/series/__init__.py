"""Time series: tables, synthetic ones, windows."""
