"""A drawing kit for all reports: it takes plain values and imports no feature."""
