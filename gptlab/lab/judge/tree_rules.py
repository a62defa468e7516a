"""Which code and which fields a proposal may change.

Code: `config/`, `model/`, `optim/` and `training/`, except for what saves and reports. These rules are no wall (changed
code can replace any function at run time, in its own process); they keep the meaning of every number that is recorded,
keep weights from coming with the code, and make a proposal readable as a diff. The judge does not run this code.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptlab.config.errors import ConfigError, UserError, cannot
from gptlab.config.load import apply_overrides, checked_value, leaf_fields
from gptlab.config.run import RunConfig
from gptlab.lab.judge.rules import RuleError

PROTECTED = {
    "__init__.py": "what is imported first",
    "__main__.py": "what is imported first",
    "app/": "how a run is put together, and how it answers the judge",
    "bench/": "how fast a step is",
    "cli/": "which commands there are",
    "data/": "which text trains and validates, its tokens, their bytes and their order",
    "eval/": "how a model is scored",
    "lab/": "the judge",
    "runtime/": "clock, records, files, devices and random generators",
    "training/checkpoint/": "which weights are saved",
    "training/recorder.py": "what a run reports",
}
"""{path below gptlab/: what it decides, which is the same for both sides of a comparison}."""

FIXED_FIELDS = {
    "recipe": "it names the baseline",
    "recipe_arguments": "they size the baseline",
    "run_dir": "the lab keeps the runs",
    "seed": "both sides share it",
    "init_from": "every run begins with weights that its seed draws",
    "data.": "both sides read the same text in the same order",
    "tokenizer.": "bits per byte count its bytes",
    "eval.": "the judge evaluates",
    "sample.": "samples take time and change nothing",
    "horizon.": "the lab makes time equal",
    "checkpoint.": "the lab decides what is saved and judged",
    "parallel.": "the lab decides how many processes train",
    "log.": "the lab reads the log",
    "model.seq_len": "both sides see the same context",
    "model.vocab_size": "it is the tokenizer's",
    "runtime.device": "both sides run on the same device",
    "runtime.threads": "both sides have the same threads",
    "runtime.log_every_steps": "the lab reads the log",
    "runtime.max_loss": "it decides which run fails",
    "runtime.process_timeout_seconds": "the lab limits time",
}
"""{field, or section with its dot: why a proposal cannot change it}."""

SOURCES = (".py", ".cpp", ".h")
MAX_FILE_BYTES = 200_000
"""Of a source: ten times the longest of the package."""
MAX_BYTES = 1 << 20
"""Of any file: five times the largest of the package, a tokenizer's table. A larger one is not read."""
MAX_ADDED_BYTES = 16_384
"""Of all added lines together, compressed, which bounds the information in them whatever its form: 1,200 lines of
ordinary code (gptlab's own take 12 to 15 bytes a line), and the weights of no model that is worth training."""
MAX_LITERAL_CHARACTERS = 1_000
"""Of a string or of a number, docstrings apart: gptlab's longest is a text of 707."""
MAX_LITERAL_ITEMS = 128
"""Constants in one list, tuple, set, dictionary or call: gptlab's longest is a table of 118."""


class Change(NamedTuple):
    """From one package to another."""

    before: dict[str, bytes]
    """{path below gptlab/: content}"""
    after: dict[str, bytes]

    @property
    def names(self) -> list[str]:
        """The files that differ, sorted."""
        names = {*self.before, *self.after}
        return sorted(name for name in names if self.before.get(name) != self.after.get(name))

    @property
    def patch(self) -> str:
        """A unified diff that `git apply` takes, with paths from the folder that holds gptlab/."""
        return "".join(_diff(name, self.before.get(name), self.after.get(name)) for name in self.names)


def read_change(base: Path, changed: Path) -> Change:
    """From the package in `base`/gptlab to that in `changed`/gptlab. Nothing beside gptlab/ is taken.

    RuleError (tree, shipped-data) for what is not read; UserError where `base` cannot be read.
    """
    try:
        before = read_package(base)
    except RuleError as broken:
        raise UserError(f"the baseline's code in {base} cannot be used: {broken.what}") from None
    return Change(before, read_package(changed))


def check_change(change: Change) -> None:
    """RuleError (tree, protected, shipped-data) for one that no proposal may make."""
    before, after, names = change.before, change.after, change.names
    for name in names:
        for part, why in PROTECTED.items():
            if name == part or (part.endswith("/") and name.startswith(part)):
                raise RuleError("protected", f"gptlab/{name} was changed: gptlab/{part} decides {why}")
    for name in names:
        if name in after:
            _check_source(name, after[name], before.get(name, b""))
    added = "".join(line[1:] for line in _lines(change.patch) if line[0] == "+" and line[:4] != "+++ ")
    if (size := len(zlib.compress(added.encode(), 9))) > MAX_ADDED_BYTES:
        raise RuleError("shipped-data", f"the added lines are {size:,} bytes compressed, more than {MAX_ADDED_BYTES:,}")


def check_fields(names: Iterable[str]) -> None:
    """RuleError (field) unless each is `depth` or the dotted name of a field that a proposal may change. Short forms
    and arguments that are no fields (steps, from) are refused: they would decide what the lab decides."""
    known = {"depth", *leaf_fields(RunConfig)}
    for name in names:
        for fixed, why in FIXED_FIELDS.items():
            if name == fixed or (fixed.endswith(".") and name.startswith(fixed)):
                raise RuleError("field", f"{name} cannot be changed: {why}")
        if name not in known:
            raise RuleError("field", f"{name} cannot be changed: no field of a run has this name")


def check_values(fields: Mapping[str, Any], config: RunConfig) -> None:
    """RuleError (field) for values that cannot be, or do not fit together, in `config` by the judge's own code. With
    another depth the recipe decides when the run begins. `fields`: {name that `check_fields` takes: value}."""
    types = {"depth": int, **leaf_fields(RunConfig)}
    try:
        checked = {name: checked_value(types[name], value, name) for name, value in fields.items()}
        if "depth" not in fields:
            apply_overrides(config, checked)
    except ConfigError as error:
        raise RuleError("field", str(error)) from None


def read_package(tree: Path) -> dict[str, bytes]:
    """{path below gptlab/: content} of `tree`/gptlab without its byte code. RuleError (tree) for links, special files,
    names that are not UTF-8 and a folder that is no package."""
    root = tree / "gptlab"
    if root.is_symlink() or not (root / "__init__.py").is_file():
        raise RuleError("tree", f"{tree} holds no package gptlab")
    found: dict[str, bytes] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for path in (Path(folder, name) for name in (*folders, *sorted(files))):
            name, status = path.relative_to(root).as_posix(), path.lstat()
            if name != name.encode(errors="replace").decode():
                raise RuleError("tree", f"the name of gptlab/{name} is not UTF-8")
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise RuleError("tree", f"gptlab/{name} is a link, or not a regular file")
            if status.st_size > (MAX_FILE_BYTES if name.endswith(SOURCES) else MAX_BYTES):
                raise RuleError("shipped-data", f"gptlab/{name} has {status.st_size:,} bytes")
            with cannot(f"read {path}"):
                found[name] = path.read_bytes()
    return found


def _check_source(name: str, content: bytes, before: bytes) -> None:
    if not name.endswith(SOURCES):
        raise RuleError("shipped-data", f"gptlab/{name} is no source file ({', '.join(SOURCES)})")
    try:
        text = content.decode()
        if not name.endswith(".py"):
            return
        tree, own = ast.parse(text), set(map(ast.dump, _literals(ast.parse(before))))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RuleError("tree", f"gptlab/{name} is not Python: {error}") from None
    for node in _literals(tree):
        if (why := _too_large(node)) is not None and ast.dump(node) not in own:
            raise RuleError("shipped-data", f"gptlab/{name} line {node.lineno} has {why}")


def _literals(tree: ast.AST) -> Iterator[ast.expr]:
    """Constants and displays of them, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    kinds = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call, ast.BinOp, ast.JoinedStr)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and id(node) not in docstrings)


def _too_large(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        # An integer by its bits, since Python refuses to write down more than 4,300 digits.
        value, characters = node.value, 0
        if isinstance(value, str | bytes):
            characters = len(value)
        elif isinstance(value, int):
            characters = value.bit_length() // 3
        return f"a literal of {characters:,} characters" if characters > MAX_LITERAL_CHARACTERS else None
    items = sum(isinstance(one, ast.Constant) for one in ast.walk(node))
    return f"an expression of {items:,} constants" if items > MAX_LITERAL_ITEMS else None


def _lines(text: str) -> list[str]:
    """With their ends; only a line feed ends a line, as for git."""
    return io.StringIO(text, newline="\n").readlines()


def _diff(name: str, before: bytes | None, after: bytes | None) -> str:
    """In the form that `git apply` takes. A file that is not UTF-8, which no proposal may add or change, is named."""
    sides = (
        "/dev/null" if before is None else f"a/gptlab/{name}",
        "/dev/null" if after is None else f"b/gptlab/{name}",
    )
    try:
        old, new = (_lines((content or b"").decode()) for content in (before, after))
    except UnicodeDecodeError:
        return f"Binary files {sides[0]} and {sides[1]} differ\n"
    if not (old or new):  # A file that comes or goes, and has no line that could say so.
        change = "new" if before is None else "deleted"
        return f"diff --git a/gptlab/{name} b/gptlab/{name}\n{change} file mode 100644\n"
    lines = difflib.unified_diff(old, new, *sides)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
