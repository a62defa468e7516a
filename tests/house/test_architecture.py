"""The house of docs and README, held true: import order, no cycles, no work at import, nothing unsafe, no grab-bags."""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_forked
from oracle_unsafe import unsafe_uses

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gptlab"

ORDER = (
    "config", "runtime", "data", "model", "optim", "eval", "training", "bench", "lab", "report", "app", "cli",
)  # fmt: skip

TORCH_FREE = re.compile(
    r"gptlab(\.__main__)?|gptlab\.config(\..*)?|gptlab\.app\.run\.run_request|gptlab\.cli\.(main|arguments(\..*)?)"
    r"|gptlab\.report(\.\w+)?|gptlab\.cli\.(report|runs|clean|dash)|gptlab\.training\.checkpoint\.names"
    r"|gptlab\.model\.interop\.(hf_config|pretrained)"
    r"|gptlab\.data\.(corpus\.documents|tokenizer\.(bpe|tokenizer|base)"
    r"|tokens\.shards|rows|prepare)"
)

READS_PICKLE = "gptlab.runtime.files.restricted_pickle"
"""The one module that may: it lets plain values through and refuses whatever names Python objects."""
PICKLE_USES = {"import pickle", "pickle.Unpickler", "pickle.UnpicklingError"}
READS_TORCH_FILES = "gptlab.model.interop.torch_file"
"""The one module that may call torch.load: through torch's restricted unpickler."""
GRAB_BAGS = re.compile(r"(^|_)(utils?|common|helpers?|misc|stuff)$")

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Of every module: parsed when the first rule asks, not by each process that collects the tests."""
    gc.disable()  # it would walk over half a million nodes that all stay
    found = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    gc.freeze()
    gc.enable()
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that an import statement names, at any depth; for `from a import b`, a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where an arrow points"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                # What hangs lazily on the root (gptlab.train) counts as what it leads to.
                yield inner if inner in MODULES or node.module == "gptlab" else str(node.module)


def package_of(module: str) -> str | None:
    """gptlab.data.rows -> data; None for the root (its name and version) and the module that starts the rest."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else None


def wrong_arrow(importer: str, target: str) -> bool:
    here, there = package_of(importer), package_of(target)
    return here is not None and there is not None and place(there) > place(here)


def place(package: str) -> int:
    return ORDER.index(package) if package in ORDER else len(ORDER)


def test_every_package_has_its_place() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set(ORDER)


def test_imports_point_upwards_only() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in trees().items()
        for name in imported(tree)
        if name.startswith("gptlab") and wrong_arrow(module, name)
    ]
    assert not wrong, f"from further down the list {ORDER}"


def test_arrows_by_hand() -> None:
    assert wrong_arrow("gptlab.config.run", "gptlab.runtime.hardware.device")
    assert wrong_arrow("gptlab.training.loop", "gptlab.cli.train")
    assert wrong_arrow("gptlab.data.rows", "gptlab.recipes")
    assert not wrong_arrow("gptlab.app.run.train_run", "gptlab.config.run")
    assert wrong_arrow("gptlab.app.run.session", "gptlab.cli.main")
    assert not wrong_arrow("gptlab.cli.main", "gptlab.__version__")
    assert not wrong_arrow("gptlab.data.rows", "gptlab.data.tokens.shards")
    tree = ast.parse("def f():\n    from gptlab.config import run\n    import gptlab.config.model")
    assert set(imported(tree)) == {"gptlab.config.run", "gptlab.config.model"}
    assert list(imported(ast.parse("from gptlab import train"))) == ["gptlab.train"]


def test_no_import_cycles() -> None:
    graph = {
        module: {name for name in imported(tree) if name in MODULES and name != module}
        for module, tree in trees().items()
        if package_of(module) is not None
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


def test_config_and_command_line_start_without_torch() -> None:
    names = [name for name in MODULES if TORCH_FREE.fullmatch(name)]
    assert {"gptlab", "gptlab.config.run", "gptlab.cli.main", "gptlab.cli.arguments.parser"} <= set(names)
    program = (
        "import sys, importlib\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


class ClassesOfAnyName(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_all() -> None:
    for name in MODULES:
        if name != "gptlab.__main__":
            importlib.import_module(name)


def import_all_twice(folder: Path) -> None:
    """In a process of its own. AssertionError if the second import changes anything."""
    for name in (name for tree in trees().values() for name in imported(tree) if name.startswith("transformers")):
        sys.modules[name] = ClassesOfAnyName(name)  # whose own import takes 4.6 s
    import_all()
    import numpy as np
    import torch

    def state() -> tuple[object, ...]:
        return (
            dict(os.environ), threading.active_count(), torch.get_num_threads(), torch.get_default_dtype(),
            torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),
            torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
            torch.cuda.is_initialized(), os.listdir("."),
        )  # fmt: skip

    for name in [name for name in sys.modules if name.partition(".")[0] == "gptlab"]:
        del sys.modules[name]
    os.chdir(folder)
    os.environ.clear()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7_393_913)
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    before = state()
    import_all()
    for was, now in zip(before, state(), strict=True):
        assert was == now, (str(was)[:300], str(now)[:300])


def test_imports_do_no_work(tmp_path: Path) -> None:
    """Importing everything prints nothing, starts no thread, writes no file, and changes no setting.

    It is imported twice: what libraries do at their own import is not ours. Between the two, settings get values that
    nobody else would choose, so that one which the first import left behind changes again.
    """
    done = run_forked(lambda: import_all_twice(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""


def test_module_level_only_defines() -> None:
    """At module level stand definitions, imports, constants and `if`/`try` around those; no bare call, loop or with."""

    def at_work(body: list[ast.stmt]) -> Iterator[int]:
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                main_guard = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
                if not main_guard:
                    yield from at_work([*node.body, *node.orelse])
                continue
            bare_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            if bare_call or isinstance(node, ast.For | ast.While | ast.With):
                yield node.lineno

    assert [f"{module}:{line}" for module, tree in trees().items() for line in at_work(tree.body)] == []


def test_no_pickle_no_evaluated_text_no_unsafe_load() -> None:
    """Nothing that may run somebody else's code."""
    found = {module: list(unsafe_uses(tree)) for module, tree in trees().items()}
    assert {what for _, what in found.pop(READS_PICKLE)} == PICKLE_USES
    assert {module: uses for module, uses in found.items() if uses} == {}


def test_only_one_module_reads_torch_files() -> None:
    assert [name for name, path in MODULES.items() if "torch.load(" in path.read_text()] == [READS_TORCH_FILES]


UNSAFE = {
    "eval": "eval(text)",
    "exec": "exec(text)",
    "compile": "compile(text, 'x', 'exec')",
    "__import__": "__import__(text)",
    "eval passed on": "rows = map(eval, texts)",
    "builtins.eval": "import builtins\nbuiltins.eval(text)",
    "import pickle": "import pickle",
    "pickle in a function": "def f():\n    from pickle import loads",
    "pickle under another name": "import pickle as p\np.load(file)",
    "_pickle": "import _pickle",
    "marshal": "import marshal",
    "shelve": "import shelve",
    "dill": "import dill",
    "cloudpickle": "import cloudpickle",
    "joblib": "from joblib import load",
    "torch.load without weights_only": "import torch\ntorch.load(path)",
    "torch.load with weights_only=False": "import torch\ntorch.load(path, weights_only=False)",
    "torch.load by a variable": "import torch\ntorch.load(path, weights_only=safe)",
    "torch.load with words": "import torch\ntorch.load(path, weights_only=True, **words)",
    "torch.load by a module of pickle's": "import torch\ntorch.load(path, weights_only=True, pickle_module=mine)",
    "torch.load under another name": "from torch import load as read\nread(path)",
    "torch.load passed on": "import torch\nloader = torch.load",
    "torch.save": "import torch\ntorch.save(x, path)",
    "torch.jit.load": "import torch\ntorch.jit.load(path)",
    "torch.hub.load": "import torch\ntorch.hub.load(repo, name)",
    "add_safe_globals": "from torch.serialization import add_safe_globals\nadd_safe_globals([A])",
    "np.load with allow_pickle": "import numpy as np\nnp.load(path, allow_pickle=True)",
    "np.load that leaves it open": "import numpy as np\nnp.load(path)",
    "np.load from its module": "from numpy import load\nload(path)",
    "read_array with allow_pickle": "from numpy.lib.format import read_array\nread_array(file, allow_pickle=True)",
    "yaml.load": "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "yaml.unsafe_load": "import yaml\nyaml.unsafe_load(text)",
    "yaml.FullLoader": "import yaml\nyaml.parse(text, Loader=yaml.FullLoader)",
    "shell=True": "import subprocess\nsubprocess.run(line, shell=True)",
    "shell by a variable": "import subprocess\nsubprocess.run(line, shell=wanted)",
    "subprocess with words": "import subprocess\nsubprocess.run(line, **words)",
    "os.system": "import os\nos.system(line)",
    "os.popen": "from os import popen\npopen(line)",
    "os.execv": "import os\nos.execv(path, words)",
    "getoutput": "import subprocess\nsubprocess.getoutput(line)",
    "tempfile.mktemp": "import tempfile\ntempfile.mktemp()",
    "mktemp from its module": "from tempfile import mktemp\nmktemp()",
    "zip extractall": "import zipfile\nzipfile.ZipFile(path).extractall(folder)",
    "tar extractall": "def f(archive):\n    archive.extractall()",
    "tarfile": "import tarfile",
    "unpack_archive": "import shutil\nshutil.unpack_archive(path)",
    "xml": "import xml.etree.ElementTree as tree",
    "xml from": "from xml.dom import minidom",
    "lxml": "from lxml import etree",
    "code of the hub": "model = AutoModel.from_pretrained(name, trust_remote_code=True)",
}  # fmt: skip


def test_the_walk_finds_each() -> None:
    assert [kind for kind, source in UNSAFE.items() if not list(unsafe_uses(ast.parse(source)))] == []


def test_the_walk_lets_the_rest_be() -> None:
    sources = [
        "model.eval()\nstate.load(path)\nre.compile(pattern)\ntorch.compile(block)",
        "import torch\ntorch.load(path, map_location='cpu', weights_only=True, mmap=True)",
        "import numpy as np\nnp.load(path, mmap_mode='r', allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)\nlist(yaml.parse(text, Loader=yaml.SafeLoader))",
        "import subprocess\nsubprocess.run(['git', 'status'], shell=False, timeout=1)",
        "import json, tempfile, zipfile\njson.loads(text)\ntempfile.mkdtemp()\nzipfile.ZipFile(path).open(name)",
        "text = 'eval(pickle.loads(x))'  # exec",
    ]
    assert [source for source in sources if list(unsafe_uses(ast.parse(source)))] == []


def test_modules_are_small_and_named_for_what_they_hold() -> None:
    assert [name for name in MODULES if GRAB_BAGS.search(name.rpartition(".")[2])] == []
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_no_room_is_crowded() -> None:
    """A dozen files at most, beside `__init__.py`; `cli/` has one a command, however many commands there are."""
    rooms = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in MODULES.values())
    crowded = {room: files - 1 for room, files in rooms.items() if files - 1 > 12 and room != "cli"}
    assert crowded == {}


def readme_tree(text: str) -> dict[str, str]:
    """{path: phrase} of the fenced block that begins with `gptlab/`, two or more spaces of indent a level.

    An entry is `NAME  phrase`; a name that ends with / is a folder. Lines further down a phrase are indented beyond
    any name and do not look like one.
    """
    block = next((b for b in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) if b.startswith("gptlab/")), None)
    assert block is not None, "README.md has no fenced block that begins with gptlab/"
    entries: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in block.splitlines():
        found = re.match(r"( *)(\S+(?:/|\.py))(?:\s+(.*))?$", line)
        if not found:
            continue
        indent, name, phrase = len(found[1]), found[2], found[3] or ""
        while stack and stack[-1][0] >= indent:
            stack.pop()
        path = "".join(parent for _, parent in stack) + name
        entries[path] = phrase
        if name.endswith("/"):
            stack.append((indent, name))
    return entries


def test_the_stories_name_files_that_exist() -> None:
    """docs/architecture.md tells one step and one run by the files that a reader opens, `package/file.py`."""
    stories = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## The tree")[0]
    named = re.findall(r"`([\w/]+/\w+\.py)`", stories)
    assert len(named) > 30
    assert [name for name in named if not (PACKAGE / name).is_file()] == []


def test_readme_tree_by_hand() -> None:
    text = "# T\n```\nmake train\n```\n```\ngptlab/\n  config/   choices\n    run.py  a run\n  model/    nets\n```\n"
    assert readme_tree(text) == {
        "gptlab/": "",
        "gptlab/config/": "choices",
        "gptlab/config/run.py": "a run",
        "gptlab/model/": "nets",
    }


def test_readme_shows_the_tree() -> None:
    """Every module and package of the tree is in docs/architecture.md with a phrase, and nothing else is."""
    entries = readme_tree((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    files = {str(p.relative_to(ROOT).as_posix()) for p in MODULES.values() if p.name != "__init__.py"}
    folders = {f"{p.parent.relative_to(ROOT).as_posix()}/" for p in MODULES.values()}
    shown = {path for path in entries if path.startswith("gptlab/")}
    assert shown - files - folders == set(), "in docs/architecture.md, not in the tree"
    assert (files | folders) - shown == set(), "in the tree, not in docs/architecture.md"
    assert not [path for path, phrase in entries.items() if not phrase and path != "gptlab/"], "without a phrase"
