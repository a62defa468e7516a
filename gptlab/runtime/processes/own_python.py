"""Other Python processes with the gptlab that runs here, wherever it lies and whatever is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import gptlab

# PYTHONPATH would put site-packages, where gptlab may be installed, before the standard library.
_FIND = "import sys; root = sys.argv.pop(1); sys.path[:0] = [root] * (root not in sys.path); "


def own_python(code: str, *arguments: str) -> list[str]:
    """The command that runs `code`, which has `sys` and finds this very gptlab; sys.argv[1:] are `arguments`."""
    # -P: files of the current folder, such as a json.py, are not imported.
    return [sys.executable, "-P", "-c", _FIND + code, str(Path(gptlab.__file__).parents[1]), *arguments]
