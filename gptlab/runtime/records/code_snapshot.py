"""The code that ran, kept so that it can be restored: a commit, with a patch if the tree differs from it, or all of it.

In a repository, `git checkout COMMIT && git apply RUN/code/changes.patch` restores the package byte for byte. If no
commit is known (installed by pip, no git), the package itself is kept as gptlab.zip, which PYTHONPATH may name.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATCH_NAME = "changes.patch"
ZIP_NAME = "gptlab.zip"

_GIT_SECONDS = 10.0
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold: the same source gives the same bytes


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    commit: str | None
    """None: the package is not part of a repository, or there is no git."""
    dirty: bool | None
    """Whether the package differs from the commit; None without one."""
    fingerprint: str
    """SHA-256 over the names and bytes of the package's files, whatever git says of them."""
    files: Mapping[str, bytes]
    """What must be kept besides the commit: {name: contents}; empty for a clean tree."""

    def facts(self) -> dict[str, object]:
        """What run.json says of it."""
        return {"git_commit": self.commit, "git_dirty": self.dirty, "code_fingerprint": self.fingerprint}


def take_code(package: Path) -> CodeSnapshot:
    """The code in `package` as it is now."""
    sources = _sources(package)
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    state = git_state(package)
    patch = _patch(package) if state["git_dirty"] else None
    files = {} if patch is None else {PATCH_NAME: patch}
    if state["git_commit"] is None or (patch is None and state["git_dirty"] is not False):
        files[ZIP_NAME] = _zipped(package.name, sources)
    return CodeSnapshot(state["git_commit"], state["git_dirty"], digest.hexdigest(), files)  # type: ignore[arg-type]


def git_state(package: Path) -> dict[str, str | bool | None]:
    """`git_commit` of the tree that holds `package`, and `git_dirty`: whether the package differs from that commit.

    Both None if the package is not part of a repository; a package merely installed below one (in its .venv) is not.
    """
    commit, dirty = None, None
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git(package, "rev-parse", "HEAD")
        changes = _git(package, "status", "--porcelain", "--", ".")
        dirty = None if changes is None else bool(changes)
    return {"git_commit": commit.decode() if commit else None, "git_dirty": dirty if commit else None}


def _patch(package: Path) -> bytes | None:
    """What `git apply` must do to the commit, new and binary files included; None if git fails.

    A diff shows new files only if the index names them. A copy of the index does, so that the user's stays as it is.
    The options undo whatever a user's configuration does to diffs.
    """
    index = _git(package, "rev-parse", "--git-path", "index")
    if index is None:
        return None
    with tempfile.TemporaryDirectory(prefix="gptlab-") as folder:
        copy = Path(folder) / "index"
        try:
            shutil.copyfile(package / os.fsdecode(index), copy)
        except OSError:
            return None
        environment = {"GIT_INDEX_FILE": str(copy)}
        if _git(package, "add", "--intent-to-add", "--", ".", environment=environment) is None:
            return None
        return output_of(
            ["git", "-c", "diff.relative=false", "diff", "--binary", "--full-index", "--unified=3", "--no-color",
             "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--", "."],
            package, environment=_git_environment() | environment,
        )  # fmt: skip


def _sources(package: Path) -> dict[str, bytes]:
    """{path inside the package: contents} of all but compiled and hidden files, in order of the path."""
    found = {}
    for path in package.rglob("*"):
        name = path.relative_to(package)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if not hidden and not name.name.endswith((".pyc", "~")) and path.is_file():
            found[name.as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def _zipped(package_name: str, sources: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sources.items():
            entry = zipfile.ZipInfo(f"{package_name}/{name}", _ZIP_DATE)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _git(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> bytes | None:
    output = output_of(["git", *arguments], folder, environment=_git_environment() | dict(environment or {}))
    return None if output is None else output.strip()


def _git_environment() -> dict[str, str]:
    # Inside a git hook GIT_DIR and its kin point elsewhere; `git status` must not take the index lock for a refresh.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return inherited | {"GIT_OPTIONAL_LOCKS": "0"}


def output_of(command: list[str], folder: Path, *, environment: Mapping[str, str] | None = None) -> bytes | None:
    """What `command` prints, or None if it fails, hangs or does not exist."""
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
