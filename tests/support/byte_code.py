"""Make the byte code of what all test processes import, once. Without it, each of the processes that `make test` starts
compiles all of it for itself, at the same time as the others.

    python tests/support/byte_code.py

pip would compile all that it installs, of which the tests import a small part.
"""

from __future__ import annotations

import compileall
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = (
    "huggingface_hub", "hypothesis.strategies", "psutil", "pyarrow.parquet", "regex", "scipy.special", "tiktoken",
    "tiktoken_ext.openai_public", "tokenizers", "tyro",
)  # fmt: skip
"""What the tests import where they are collected. transformers, matplotlib and the like come later, in one process or
two of the three."""


def rewrite_test(path: Path) -> Path:
    """Write the byte code that pytest makes of a test file, with its assertions rewritten; where it is."""
    source_hash, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]  # a configuration: for messages only
    folder = rewrite.get_cache_dir(path)
    folder.mkdir(parents=True, exist_ok=True)
    compiled = folder / (path.stem + rewrite.PYC_TAIL)
    rewrite._write_pyc(SimpleNamespace(trace=print), code, source_hash, compiled)  # type: ignore[arg-type]
    return compiled


def main() -> None:
    # torch is half of the work, in a process of its own; with its tracer and DTensor, which bring sympy and networkx.
    with subprocess.Popen([sys.executable, "-c", "import torch, torch._dynamo, torch.distributed.tensor"]) as torch:
        for path in (ROOT / "tests").rglob("*.py"):
            if path.name.startswith("test_") or path.name == "conftest.py":
                rewrite_test(path)
        for folder in ("gptlab", "tests/support", "tests/mutations"):
            compileall.compile_dir(ROOT / folder, quiet=1)
        for name in WITHOUT_TORCH:
            importlib.import_module(name)
    if torch.returncode:
        sys.exit(torch.returncode)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
