"""Judges a model by its logits: bits per byte, CORE, sampling."""
