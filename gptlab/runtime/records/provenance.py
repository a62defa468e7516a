"""Where a run's numbers come from: what its folder keeps so that a result can be explained, and the run repeated.

    run.json          the facts: versions, machine, data, code
    code/             the code that ran, beyond its commit: a patch, or all of it
    environment.txt   Python, every installed distribution, the variables that matter
    gpu.txt           what the GPU's own tool prints

In a repository, `git checkout COMMIT && git apply RUN/code/changes.patch` restores the package byte for byte. If no
commit is known (installed by pip, no git), the package itself is kept as gptlab.zip, which PYTHONPATH may name. Run
folders are shared: no host name, user name, home folder or secret goes into them.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gptlab
from gptlab.runtime.hardware.cpu import cpu_model
from gptlab.runtime.processes.one_thread import OneThread

if TYPE_CHECKING:
    from gptlab.runtime.hardware.place import Place

PATCH_NAME = "changes.patch"
ZIP_NAME = "gptlab.zip"

# Variables that change what is computed, how fast, or where: of OpenMP and BLAS, CUDA, torch, the allocator, gptlab.
_RELEVANT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|VECLIB|BLIS|DNNL|ONEDNN|ATEN|GPTLAB|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCR|HSA|MIOPEN"
    r"|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|MALLOC)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|PYTHONHASHSEED|LD_PRELOAD|CXX|CC"
)
_NAME_OR_VERSION = re.compile(r"^(Name|Version):(.*)", re.MULTILINE)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)

_TOOL_SECONDS = 10.0
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold: the same source gives the same bytes

RESUME_FACTS = (
    "start", "argv", "gptlab_version", "git_commit", "git_dirty", "code_fingerprint", "python_version", "torch_version",
    "cuda_version", "platform", "cpu", "device", "device_name", "dtype", "threads", "world_size", "implementations",
)  # fmt: skip
"""What run.json keeps of each process that resumed the run."""


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    commit: str | None
    """None: the package is not part of a repository, or there is no git."""
    dirty: bool | None
    """Whether the package differs from the commit, or cannot be compared with it; None without one."""
    fingerprint: str
    """SHA-256 over the names and bytes of the package's files, whatever git says of them."""
    files: Mapping[str, bytes]
    """What must be kept besides the commit: {name: contents}; empty for a clean tree."""


class Evidence(NamedTuple):
    """The code and environment of a process when it began."""

    code: CodeSnapshot
    files: Mapping[str, bytes]
    """{path inside the run folder: contents}."""


def take_evidence(variables: Mapping[str, str]) -> Evidence:
    """`variables`: of the environment when the process began; it sets some itself later."""
    code, gpu = take_code(Path(gptlab.__file__).parent), gpu_report()
    # A variable may have bytes that are no UTF-8, which Python holds as surrogates.
    files = {"environment.txt": environment_text(variables).encode(errors="backslashreplace")}
    files |= {f"code/{name}": content for name, content in code.files.items()}
    return Evidence(code, files if gpu is None else files | {"gpu.txt": gpu.encode()})


def begin_evidence() -> Future[Evidence]:
    """`take_evidence` in another thread: a slow nvidia-smi must not hold up the start.

    Call it first of all: the sooner, the surer that the files are those that this process imports.
    """
    thread = OneThread("gptlab-evidence")
    evidence = thread.submit(take_evidence, dict(os.environ))
    thread.shutdown(wait=False)
    return evidence


def provenance(
    argv: Sequence[str], code: CodeSnapshot, place: Place, others: Mapping[str, object]
) -> dict[str, object]:
    """The contents of run.json, status aside, with `others` that the caller knows."""
    import torch

    from gptlab.runtime.hardware.device import device_name

    return {
        "gptlab_version": next((own.version for own in importlib.metadata.distributions(name="gptlab")), None),
        "git_commit": code.commit,
        "git_dirty": code.dirty,
        "code_fingerprint": code.fingerprint,
        "argv": list(argv),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "device": str(place.device),
        "device_name": device_name(place.device),
        "dtype": place.dtype_name,
        "threads": place.threads,
        "peak_flops_per_second": place.peak.flops_per_second,
        "peak_source": place.peak.source,
        **others,
        "resumes": [],
    }


def take_code(package: Path) -> CodeSnapshot:
    """The code in `package` as it is now."""
    sources = _sources(package)
    commit = _commit(package)
    patch = None if commit is None else _patch(package, sources)
    files = {ZIP_NAME: _zipped(package.name, sources)} if patch is None else {PATCH_NAME: patch} if patch else {}
    return CodeSnapshot(commit, None if commit is None else bool(files), _fingerprint(sources), files)


def code_fingerprint(package: Path) -> str:
    """The `fingerprint` of the code in `package` as it is now."""
    return _fingerprint(_sources(package))


def _fingerprint(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _sources(package: Path) -> dict[str, bytes]:
    """{path inside the package: contents} of all but compiled and hidden files, in order of the path."""
    found = {}
    for path in package.rglob("*"):
        name = path.relative_to(package)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if not hidden and not name.name.endswith((".pyc", "~")) and path.is_file():
            found[name.as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def _commit(package: Path) -> str | None:
    """The commit of the tree that holds `package`; None if it is not part of a repository. A package merely installed
    below one (in its .venv) is not."""
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "HEAD") if tracked else None
    return None if commit is None else commit.decode().strip()


def _patch(package: Path, sources: Iterable[str]) -> bytes | None:
    """What `git apply` must do to the commit, new and binary files included; None if git fails.

    A diff shows new files only if the index names them. A temporary index, read from the commit, does: no file is left
    out because it is ignored, or because the user's index marks it as unchanged. The options undo whatever a user's
    configuration does to diffs.
    """
    with tempfile.TemporaryDirectory(prefix="gptlab-") as folder, suppress(OSError):
        own = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        wanted = {os.fsencode(name) for name in sources}

        def missing() -> set[bytes]:
            return wanted.difference((_git(package, "ls-files", "-z", **own) or b"").split(b"\0"))

        if _git(package, "read-tree", "HEAD", **own) is None:
            return None
        if new := missing():
            names = Path(folder, "names")
            names.write_bytes(b"\0".join(new))
            named = f"--pathspec-from-file={names}", "--pathspec-file-nul"
            _git(package, "--literal-pathspecs", "add", "--force", "--intent-to-add", *named, **own)
            if missing():  # as where a repository is inside of the package
                return None
        return _git(
            package, "-c", "diff.relative=false", "-c", "core.fsmonitor=false", "diff", "--binary", "--full-index",
            "--unified=3", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/",
            "--dst-prefix=b/", "HEAD", "--", ".", **own,
        )  # fmt: skip
    return None


def _zipped(package_name: str, sources: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sources.items():
            entry = zipfile.ZipInfo(f"{package_name}/{name}", _ZIP_DATE)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _git(folder: Path, *arguments: str, **variables: str) -> bytes | None:
    # Inside a git hook GIT_DIR and its kin point elsewhere; `git status` must not take the index lock for a refresh.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return _output(["git", *arguments], folder, {**inherited, "GIT_OPTIONAL_LOCKS": "0", **variables})


def _output(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> bytes | None:
    """What `command` prints, or None if it fails, hangs or does not exist."""
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=_TOOL_SECONDS, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None


def environment_text(variables: Mapping[str, str]) -> str:
    """A pip requirements file, with comments for what pip cannot install; `variables`: of the process's environment."""
    installed = dict(installed_distributions())
    own = installed.pop("gptlab", None)
    lines = [
        f"# gptlab {own or 'from a source tree that is not installed'}",
        f"# Python {' '.join(sys.version.split())}",
        f"# {platform.platform()}",
    ]
    for name, value in sorted(variables.items()):
        if _RELEVANT.fullmatch(name) and not _SECRET.search(name):
            lines.append(f"# {name}={_anonymous(value)}")
    if build := re.search(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", installed.get("torch", "")):  # not on PyPI
        lines.append(f"--extra-index-url https://download.pytorch.org/whl/{build[1]}")
    lines += [f"{name}=={version}" for name, version in sorted(installed.items())]
    return "\n".join(lines) + "\n"


def installed_distributions() -> Mapping[str, str]:
    """{name in pip's normal form: version}; of two with one name, the one that is imported."""
    installed: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        with suppress(OSError, KeyError, ValueError):  # a half-removed one
            found = {name: value.strip() for name, value in _NAME_OR_VERSION.findall(_headers(distribution))}
            if found.get("Name") and found.get("Version"):
                installed.setdefault(re.sub(r"[-_.]+", "-", found["Name"]).lower(), found["Version"])
    return installed


def _headers(distribution: importlib.metadata.Distribution) -> str:
    """Of its metadata. `distribution.metadata` parses the description after them too, a thousand lines of it, as an
    e-mail: three times as long for all."""
    for name in ("METADATA", "PKG-INFO", ""):  # of a wheel, of an egg, and of an egg that is a file
        if text := distribution.read_text(name):
            return re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    return ""


def gpu_report() -> str | None:
    """What the GPU's own tool prints, as modded-nanogpt logs it; None without one."""
    for tool in ("nvidia-smi", "rocm-smi"):
        if (output := _output([tool], Path.cwd())) is not None:
            return _without(platform.node(), "HOST", output.decode(errors="replace"))
    return None


def _anonymous(value: str) -> str:
    """`value` without the home folder, the user's name and the machine's."""
    try:
        home, user = str(Path.home()), getpass.getuser()
    except (OSError, KeyError, RuntimeError, ImportError):  # a user id without an entry, as in some containers
        home, user = os.environ.get("HOME", ""), ""
    if len(home) > 1:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    return _without(platform.node(), "HOST", _without(user, "USER", " ".join(value.split())))


def _without(name: str, label: str, text: str) -> str:
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", label, text) if name else text
