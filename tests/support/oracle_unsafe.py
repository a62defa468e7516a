"""What in a source may run somebody else's code or follow somebody else's path, found by walking its syntax tree.

Names are followed through their imports (`import torch as t`, `from os import system as run`), and count wherever they
stand, not only where they are called: `loader = torch.load` is as bad as a call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg"})
OTHER_MODULES = frozenset({"xml", "lxml", "tarfile", "runpy", "code", "codeop", "imp", "pty"})
"""XML knows entities that grow and that read files; tar archives know links; the others run text or shells."""
EVALUATES = frozenset({"eval", "exec", "compile", "__import__", "breakpoint"})
NEVER = frozenset({
    *(f"builtins.{name}" for name in EVALUATES), "torch.save", "torch.jit.load", "torch.hub.load",
    "torch.package.PackageImporter", "torch.serialization.add_safe_globals", "torch.serialization.load",
    "numpy.lib.npyio.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.load", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader",
    "yaml.YAMLObject", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "tempfile.mktemp", "os.tempnam", "shutil.unpack_archive",
})  # fmt: skip
NEVER_BEGINNINGS = ("os.exec", "os.spawn")
METHODS = frozenset({"extractall"})
"""Of whatever object: archives unpack by them to wherever the names within lead."""
DEMANDED = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "pandas.read_pickle": ("", None),
}
"""Functions that are only ever called, and with this word given literally."""
FORBIDDEN_WORDS = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "pickle_module": None}
"""Words of a call that may only ever have this literal value."""


def unsafe_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) for each use; nothing for a source without any."""
    nodes = list(ast.walk(tree))
    aliases = _aliases(nodes)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name.partition(".")[0] in PICKLES | OTHER_MODULES:
                    yield node.lineno, f"import {name.partition('.')[0]}"
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _dotted(node, aliases)
            if name in NEVER or name.startswith(NEVER_BEGINNINGS) or (name in EVALUATES and isinstance(node, ast.Name)):
                yield node.lineno, name
            if name in DEMANDED and id(node) not in called and not _is_part(node, tree):
                yield node.lineno, f"{name} passed on"
            if name.partition(".")[0] in PICKLES and "." in name:
                yield node.lineno, name
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.lineno, f".{node.attr}"
        if isinstance(node, ast.Call):
            yield from _wrong_words(node, _dotted(node.func, aliases))


def _wrong_words(call: ast.Call, name: str) -> Iterator[tuple[int, str]]:
    given = {word.arg: word.value for word in call.keywords}
    for word, only in FORBIDDEN_WORDS.items():
        if word in given and not _is_literally(given[word], only):
            yield call.lineno, f"{word}={ast.unparse(given[word])}"
    if name in DEMANDED:
        word, only = DEMANDED[name]
        if word not in given or not _is_literally(given[word], only) or None in given:  # **words hide what is given
            yield call.lineno, f"{name} without {word}={only}"
    if name.startswith("subprocess.") and None in given:
        yield call.lineno, f"{name} with words that cannot be seen"


def _is_literally(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """{name in this source: what it stands for}."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """`np.load` as numpy.load; empty for what is no name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, aliases)):
        return f"{owner}.{node.attr}"
    return ""


def _is_part(node: ast.AST, tree: ast.AST) -> bool:
    """Whether the name only leads to another one (numpy.load.__doc__)."""
    return any(isinstance(other, ast.Attribute) and other.value is node for other in ast.walk(tree))
