"""Bits per byte, the inference engine and sampling."""
