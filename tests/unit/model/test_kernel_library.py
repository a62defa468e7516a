"""The kernels in C++: when they are built, and what happens where they cannot be."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forked import run_forked

import gptlab
from gptlab.app.run.session import prepared
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import configure
from gptlab.model.gpt import build_model
from gptlab.model.kernels import decode_kernel, library, ops
from gptlab.runtime.hardware.device import compiler_available
from gptlab.runtime.hardware.installed import cxx_compiler
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.records.console import QuietConsole

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


@needs_compiler
def test_a_machine_that_compiles_has_them() -> None:
    assert library.kernel_library("float32").functions is not None


TABLE = """\
static const volatile char table[1 << 20] = {1, 2};
extern "C" int last() { return table[(1 << 20) - 1] + 7; }
"""
"""A library of more than a megabyte, which is built in a moment."""


def load_table(source: Path) -> None:
    """Print what the library of this source computes, and its hash."""
    built = library.load_built([[source]], ["-fPIC"])
    print(built.functions.last(), built.sha256)


@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "one bit", "no library"])
def test_a_damaged_library_is_never_loaded(tmp_path: Path, damage: str) -> None:
    """One that was cut short ended the process by SIGBUS. Loaded in processes of their own, which may die of it."""
    source = tmp_path / "table.cpp"
    source.write_text(TABLE)
    first = run_forked(lambda: load_table(source), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    (path,) = (tmp_path / "gptlab").glob("*.so")
    whole = path.read_bytes()
    assert first.stdout == f"7 {hashlib.sha256(whole).hexdigest()[:32]}\n", first.stderr
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut short": whole[:middle],
            "one bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "no library": b"\x7fELF, and nothing else",
        }[damage]
    )
    left = path.with_name(f".{path.stem.rpartition('-')[0]}.killed")  # while it built
    left.mkdir()
    (left / "a.o").touch()
    again = run_forked(lambda: load_table(source), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert path.read_bytes() == whole, "the same sources and compiler give the same bytes"
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".lock", ".so"]


@needs_compiler
def test_no_path_of_this_installation_is_in_the_library() -> None:
    """So that its hash says what it computes: the same on two machines, or in two environments of one."""
    built = library.kernel_library("float32")
    assert isinstance(built, library.Library)
    content = Path(built.functions._name).read_bytes()
    assert built.sha256 == hashlib.sha256(content).hexdigest()[:32]
    for folder in (Path(torch.__file__).parent, Path(gptlab.__file__).parent):
        assert str(folder).encode() not in content


@needs_compiler
@pytest.mark.parametrize("changed", ["a source", "a header", "an option", "what is compiled together"])
def test_whatever_they_are_made_of_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """A library of other sources, or of other options, is never taken for these."""
    compiler = cxx_compiler()
    assert compiler is not None
    source, other, header = tmp_path / "a.cpp", tmp_path / "b.cpp", tmp_path / "a.h"
    source.write_text("1")
    other.write_text("1")
    header.write_text("1")
    monkeypatch.setattr(library, "_HEADERS", (header,))
    before = library.library_stem(compiler, [[source, other]], ["-O3"])
    if changed in ("a source", "a header"):
        (source if changed == "a source" else header).write_text("2")
    units = [[source], [other]] if changed == "what is compiled together" else [[source, other]]
    after = library.library_stem(compiler, units, ["-O2" if changed == "an option" else "-O3"])
    assert before != after


PERMITTED = """\
extern "C" {
int products_are_permitted() { return PERMITTED; }
int built_for_amx() { return AMX; }
}
"""


@needs_compiler
@pytest.mark.parametrize("permitted", [True, False])
def test_without_the_permission_to_use_amx_they_are_built_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool
) -> None:
    """As where the compiler finds AMX and the operating system refuses it: the first product would end the process."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the option is of x86-64")
    source = tmp_path / "permitted.cpp"
    source.write_text("#ifdef __AMX_BF16__\n#define AMX 1\n#else\n#define AMX 0\n#endif\n" + PERMITTED)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_UNITS", [[source]])
    monkeypatch.setattr(library, "_FLAGS", ["-fPIC", "-mamx-tile", "-mamx-bf16", f"-DPERMITTED={int(permitted)}"])
    found = library.kernel_library.__wrapped__("float32")
    assert found.functions.built_for_amx() == permitted


@needs_compiler
def test_a_compiler_without_openmp_builds_them_for_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As clang does without libomp. Models were computed without the kernels, in three times the memory."""
    source, compiler = tmp_path / "team.cpp", tmp_path / "c++"
    header = Path(library.__file__).with_name("vectors.h")
    source.write_text(f"""#include "{header}"\nextern "C" int n_threads() {{ return omp_get_num_threads(); }}\n""")
    refuse = """case "$*" in *-fopenmp*) echo "error: unsupported option '-fopenmp'" >&2; exit 1;; esac"""
    compiler.write_text(f"""#!/bin/sh\n{refuse}\nexec "{cxx_compiler()}" "$@"\n""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    built = library.load_built([[source]], ["-std=c++17", "-fPIC", "-fopenmp"])
    assert built.functions.n_threads() == 1
    monkeypatch.setattr(ops, "_library", built)
    warning = ops.missing_kernels(CPU, torch.float32)
    assert warning is not None
    assert "compute in one thread: install OpenMP" in warning
    assert "unsupported option '-fopenmp'" in warning


@pytest.mark.parametrize(
    ("lack", "problem"),
    [
        ("no compiler", "no C++ compiler (g++ or clang++) was found"),
        ("no folder", "it cannot be built in the cache: Not a directory"),
        ("no home", "this user has no home folder"),
        ("a broken compiler", "failed: error: out of order"),
    ],
)
def test_without_them_models_compute_all_the_same_and_say_why(tmp_path: Path, lack: str, problem: str) -> None:
    """In a process of its own, as if it had neither built nor loaded them."""
    variables = {}
    if lack == "no compiler":
        variables["PATH"] = str(tmp_path)
    elif lack == "no folder":
        (tmp_path / "file").write_text("in the way")
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "file")
    elif lack == "a broken compiler":
        (tmp_path / "c++").write_text("#!/bin/sh\necho 'c++: some note' >&2\necho 'error: out of order' >&2\nexit 1\n")
        (tmp_path / "c++").chmod(0o755)
        variables["CXX"] = str(tmp_path / "c++")

    def compute() -> None:
        for name in {"CXX", "TORCHINDUCTOR_CACHE_DIR"} - variables.keys():
            os.environ.pop(name, None)
        if lack == "no home":
            import pwd  # not on Windows

            for name in ("HOME", "GPTLAB_CACHE", "XDG_CACHE_HOME"):
                os.environ.pop(name, None)
            pwd.getpwuid = lambda uid: {}[uid]  # type: ignore[assignment]
        library.kernel_library.cache_clear()
        config = ModelConfig(n_layer=1, n_embd=16, n_head=1, seq_len=64, vocab_size=5)
        model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1)
        logits = model(torch.zeros(1, 64, dtype=torch.int64))
        found = ops.implementations(CPU, torch.float32)
        print(found["kernels"], logits.isfinite().all().item())
        print(ops.missing_kernels(CPU, torch.float32))
        print(ops.missing_kernels(CPU, torch.float64))

    done = run_forked(compute, **variables)
    assert done.returncode == 0, done.stderr
    computed, why, of_float64 = done.stdout.splitlines()
    assert computed == "none True"
    assert problem in why
    assert of_float64 == "None", "which the kernels are not for"


def test_on_windows_there_are_none_and_no_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compilers take other options. Sampling warned of a kernel that could not be built there."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(decode_kernel, "load_decode_kernel", decode_kernel.load_decode_kernel.__wrapped__)
    monkeypatch.setenv("CXX", sys.executable)  # a compiler that refuses
    assert library.kernel_library.__wrapped__("float32") == library.Library()
    assert ops.missing_decode_kernel(CPU, torch.float32) is None
    assert not ops.decodes_by_kernel(CPU, torch.float32)


EVENTS = {"looks", "builds", "imports", "waits", "measures"}
IMPORTING = """
from contextlib import nullcontext
from gptlab.app.run import train_run
from gptlab.cli.main import main
from gptlab.model.kernels import library
from gptlab.runtime.hardware import installed

class Building:
    def is_alive(self):
        return True

    def join(self):
        print("waits")

def begin(activations):
    print("builds", activations)
    return Building()

library.begin_kernels = begin
installed.cpu_lists_bfloat16 = lambda: HAS_BFLOAT16
installed.has_nvidia_gpu = lambda: False
train_run.threads_beside_others = lambda: print("looks at the load")
train_run._configured = lambda attempt, request: print("measures")
train_run.Console.busy = lambda self, what: print(what) or nullcontext()
main(["train", *MORE])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are built while data is prepared")
@pytest.mark.parametrize(
    ("has_bfloat16", "more", "activations"),
    [
        (False, [], "float32"),
        (True, [], "bfloat16"),
        (True, ["nanogpt/shakespeare-char-cpu"], "float32"),
        (False, ["--dtype", "float64"], None),
    ],
)
def test_they_are_built_while_torch_is_imported(
    tmp_path: Path, has_bfloat16: bool, more: list[str], activations: str | None
) -> None:
    """Not before other programs' load is measured, and until they are built, nothing of this machine is."""
    (tmp_path / "torch.py").write_text("print('imports torch')")  # in its place
    done = subprocess.run(
        [sys.executable, "-c", f"HAS_BFLOAT16, MORE = {has_bfloat16}, {more}\n{IMPORTING}"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    built = [f"builds {activations}", "imports torch", "waits"] if activations else []
    expected = ["looks at the load", *built, "measures"]
    assert ("building the C++ kernels" in done.stdout) == bool(built)
    assert [line for line in done.stdout.splitlines() if line.partition(" ")[0] in EVENTS][: len(expected)] == expected


def test_they_are_built_while_data_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin: one after the other, neither would end."""
    building, preparing = threading.Event(), threading.Event()

    def build(activations: str) -> None:
        building.set()
        assert preparing.wait(30)

    def prepare(*of_run: object, **more: object) -> str:
        preparing.set()
        assert building.wait(30), "the kernels were not begun"
        return "tokens"

    monkeypatch.setattr(library, "kernel_library", build)
    monkeypatch.setattr("gptlab.app.run.session.prepare", prepare)
    place = Place(CPU, torch.float32, 1, Peak(None, "unknown"))
    config = configure("quickstart", depth=2, horizon=None, machine=None, own={})
    assert prepared(config, place, QuietConsole()) == "tokens"
