"""A pretraining system for small GPTs, judged by validation bits per byte.

    import gptlab
    gptlab.train(gptlab.recipes.quickstart(depth=4, minutes=3))

Nothing heavy is imported before it is used: torch loads with the first `gptlab.train(...)`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.cli.train import run as train
    from gptlab.config import recipes as recipes
else:
    from gptlab import train

__all__ = ["__version__", "recipes", "train"]


class _TrainPackage(ModuleType):
    """The package gptlab.train, which is also the act. Python binds a subpackage to its name here as soon as anything
    in it is imported, so a function of that name could not last; a package that can be called does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("gptlab.cli.train").run(*args, **kwargs)


train.__class__ = _TrainPackage


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("gptlab.config.recipes")
    if name == "__version__":
        from importlib import metadata  # 20 ms that `gptlab --help` does not need.

        try:
            return metadata.version("gptlab")
        except metadata.PackageNotFoundError:  # Run from a checkout that was never installed.
            return "0+unknown"
    raise AttributeError(f"module 'gptlab' has no attribute {name!r}")
