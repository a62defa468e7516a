"""Checkpoints: format, save, load, retention."""
