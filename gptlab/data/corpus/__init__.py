"""Documents: local files, the hub, named corpora, splits."""
