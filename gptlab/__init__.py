"""A pretraining system for small GPTs, judged by validation bits per byte.

    import gptlab
    gptlab.train(gptlab.recipes.quickstart(depth=4))

Nothing is imported before it is used: `import gptlab` is free, and torch loads with the first `gptlab.train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.cli.train import run as train
    from gptlab.config import recipes

__all__ = ["__version__", "recipes", "train"]


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "train":
        return import_module("gptlab.cli.train").run
    if name == "recipes":
        return import_module("gptlab.config.recipes")
    if name == "__version__":
        try:
            return metadata.version("gptlab")
        except metadata.PackageNotFoundError:  # Run from a checkout that was never installed.
            return "0+unknown"
    raise AttributeError(f"module 'gptlab' has no attribute {name!r}")
