"""Puts a run together from its parts; the Python API; knows no command line."""
