"""Names that no file system takes, a user without a home, a closed stdout: one line or none, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_runs import FLAGS, arguments, command, train
from written_runs import write_run

import gptlab

ROOT = Path(__file__).parents[2]

LONG = "x" * 300
"""Linux, macOS and Windows take names of at most 255 bytes or characters."""
NUL = "a\0b"


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return train(folder, "run", steps=1)


PATH_OPTIONS = [
    "train --data {}", "train --data.val-source {}", "train --data {}/*", "train --run-dir {}", "train --resume {}",
    "train --from {}", "train {}", "train {}.toml", "train --init-from {}", "train --tokenizer.path {}",
    "train --data.cache-dir {}", "train --eval.core-dir {} --eval.core-every-steps 1", "plan --tokenizer.path {}",
    "plan --init-from {}", "bench --tokenizer.path {}", "data list --cache-dir {}", "data prepare {}",
    "data prepare CORPUS --cache-dir {}", "data prepare CORPUS --tokenizer {}", "data prepare CORPUS --val-source {}",
    "data inspect {}", "tokenizer train --out out --data {}", "tokenizer train --kind byte --data CORPUS --out {}",
    "tokenizer eval {}", "eval {}", "eval RUN --core --core-dir {}", "sample {}", "export {} out", "export RUN {}",
    "import hf {} out", "import hf RUN {}", "import nanogpt {} out", "import nanogpt RUN {}",
    "import nanogpt RUN out --meta {}", "import nanogpt RUN out --tokenizer {}", "import hf RUN out --tokenizer {}",
]  # fmt: skip


@pytest.mark.parametrize("line", PATH_OPTIONS)
def test_a_name_that_no_file_system_takes(
    line: str, folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(run), "CORPUS": str(folder / "corpus")}
    small = arguments(folder, "never", {"runtime.compile": "off", "steps": 1})
    for name in (f"{LONG}/x", NUL):
        argv = [places.get(word, word.replace("{}", name)) for word in line.split()]
        if argv[0] in ("train", "plan", "bench") and argv[1][:2] == "--" and argv[1] not in ("--resume", "--from"):
            argv = [argv[0], *small, *argv[1:]]
        code, _, err = command(argv)
        assert (code, err.count("\n")) == (2, 1), err
        assert len(err) < 2500
        assert "\0" not in err


def test_from_python(folder: Path) -> None:
    for words in ({"run_dir": LONG}, {"data": NUL}, {"resume": LONG}, {"run_dir": Path(NUL)}):
        with pytest.raises(gptlab.UserError):
            gptlab.train("quickstart", **{**FLAGS, "depth": 1, "data": folder / "corpus", "steps": 1, **words})


def started(argv: Sequence[object], *, prelude: str = "", closed: int | None = None, **variables: str) -> object:
    """(exit code, stdout, stderr) of a process with these variables alone, and without one of its streams."""
    script = f"{prelude}\nfrom gptlab.cli.main import entry_point\nentry_point()"
    close = "" if closed is None else f"{closed}>&-"  # for stdin too: sh closes the number, whichever the arrow
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {close}', sys.executable, "-c", script, *map(str, argv)],
        cwd=ROOT, env=variables | {"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


NO_ENTRY = """
import os, pwd
def absent(uid): raise KeyError(uid)
pwd.getpwuid = absent
"""


@pytest.mark.skipif(os.name == "nt", reason="no password database")
class TestNoHome:
    """As in a container with a user id of its own: no HOME, and no entry in the password database."""

    def test_is_one_line_that_names_the_way_out(self) -> None:
        code, out, err = started(["data", "list"], prelude=NO_ENTRY)  # type: ignore[misc]
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "set GPTLAB_CACHE to a folder" in err

    def test_with_a_cache_all_is_well(self, tmp_path: Path) -> None:
        code, out, err = started(["data", "list"], prelude=NO_ENTRY, GPTLAB_CACHE=str(tmp_path))  # type: ignore[misc]
        assert (code, err) == (0, "")
        assert f"prepared in {tmp_path}" in out


@pytest.mark.skipif(os.name == "nt", reason="no sh")
@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_error(closed: int, tmp_path: Path) -> None:
    for argv in (["--help"], ["train", "--list"], ["trian"]):
        code, out, err = command(argv)
        shown = ("", err) if closed == 1 else (out, "")
        assert started(argv, closed=closed, GPTLAB_CACHE=str(tmp_path)) == (code, *shown)


@pytest.mark.skipif(os.name == "nt", reason="no sh")
def test_a_closed_stdin_answers_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [4.0], status="failed")
    code, _, err = started(["runs", "prune", "--failed", tmp_path], closed=0)  # type: ignore[misc]
    assert (code, err.count("\n"), "--yes deletes without asking" in err) == (2, 1, True), err
