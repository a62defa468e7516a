"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("gptlab", deadline=None)
settings.load_profile("gptlab")
