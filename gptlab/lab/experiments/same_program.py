"""Whether two copies of the package compute the same: comments, docstrings and layout aside."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def same_program(base: Path, tree: Path, files: Iterable[str]) -> bool:
    """Whether the named files of both trees are equal, Python files apart from what only people read."""
    return all(_meaning(base / name) == _meaning(tree / name) for name in files)


def _meaning(path: Path) -> str | bytes | None:
    if not path.is_file() or path.is_symlink():
        return None
    content = path.read_bytes()
    if path.suffix != ".py":
        return content
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return content
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or a text below a field that documents it."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
