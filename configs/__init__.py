"""The configurations that come with tokenv; each YAML file is one complete, reproducible run."""
