"""One file per command: the only place that composes the rest."""
