"""A pretraining system for small GPTs, judged by validation bits per byte.

    import gptlab
    result = gptlab.train("quickstart", depth=4, minutes=3)
    print(result.summary["val_bpb"], result.run_dir)

`help(gptlab.train)` has its arguments, `gptlab.recipes` the recipes as functions. Wrong arguments are a
`gptlab.UserError`, training that breaks a `gptlab.TrainingFailed`. Nothing heavy is imported before it is used: torch
loads with the first `gptlab.train(...)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.app.api import train as train
    from gptlab.app.run.attempt import Result as Result
    from gptlab.app.run.loaded_run import load_run as load_run
    from gptlab.config import recipes as recipes
    from gptlab.config.errors import UserError as UserError
    from gptlab.eval.continuation import Drawing as Drawing
    from gptlab.eval.continuation import continue_text as continue_text
    from gptlab.training.faults import TrainingFailed as TrainingFailed

__all__ = [
    "Drawing", "Result", "TrainingFailed", "UserError", "__version__", "continue_text", "load_run", "recipes", "train",
]  # fmt: skip

_WHERE = {
    "Result": "gptlab.app.run.attempt", "UserError": "gptlab.config.errors", "train": "gptlab.app.api",
    "load_run": "gptlab.app.run.loaded_run", "continue_text": "gptlab.eval.continuation",
    "Drawing": "gptlab.eval.continuation", "TrainingFailed": "gptlab.training.faults",
}  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("gptlab.config.recipes")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name == "__version__":
        from importlib import metadata  # 20 ms that `gptlab --help` does not need.

        try:
            return metadata.version("gptlab")
        except metadata.PackageNotFoundError:  # Run from a checkout that was never installed.
            return "0+unknown"
    raise AttributeError(f"module 'gptlab' has no attribute {name!r}")
