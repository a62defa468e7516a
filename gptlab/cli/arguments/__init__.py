"""Command-line arguments of all commands, and their help."""
