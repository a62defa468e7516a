"""A run's folder: provenance, code snapshot, environment, metrics, console."""
