"""Data classes, YAML and paths of a run's config, without Lightning."""
