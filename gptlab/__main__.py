"""`python -m gptlab` is `gptlab`."""

from __future__ import annotations

from gptlab.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
