"""From YAML and key=value to one checked configuration."""
