"""Plain files: untrusted ones read strictly, gptlab's own written whole.

A path may be a pipe that nobody writes to, or a device that never ends; opening the one or reading the other would take
forever. So a file is opened without blocking, and its type is checked before it is read. Symbolic links are followed,
since the Hugging Face cache consists of them. JSON reads back bit for bit, in any parser.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterable
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import IO, Any

from gptlab.config.errors import UserError, cannot
from gptlab.config.load import flatten

MAX_JSON_BYTES = 1 << 24
"""The longest legitimate file, the record of a data set of 6,500 files, has 2 MB."""
MAX_JSON_DEPTH = 100
"""No legitimate file is nested deeper than ten. Code that walks the values may then recurse."""
MAX_TOML_BYTES = 1 << 14
"""All fields of a run take 4 kB."""
MAX_TOML_KEY_PARTS = 16
"""No field's name has more than 4. tomllib's time grows with the square of the parts: 8,000 of them take a second."""

_TEMPORARY = re.compile(r"\..+\.[0-9]+\.tmp")
_TOML_TEXT = re.compile(
    r"""#[^\n]*|"{3}(?:\\.|[^\\])*?(?:"{3,5}|\Z)|"(?:\\.|[^"\\\n])*"?"""  # comments, """strings""", "strings"
    r"""|'{3}.*?(?:'{3,5}|\Z)|'[^'\n]*'?""",  # '''strings''', 'strings'
    re.DOTALL,
)
_OPEN_SECONDS = 2.0
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def open_plain(path: Path) -> BufferedReader:
    """`path.open("rb")` for regular files; OSError for folders, pipes, sockets and devices, without blocking."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def require_plain(path: Path) -> None:
    """OSError unless the path is a regular file. For libraries that open it themselves."""
    open_plain(path).close()


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes`; OSError for a larger one, which is not read."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {max_bytes:,} that it can have", str(path))
        content = file.read(size + 1)
        if len(content) > size:
            raise OSError(errno.EBUSY, "it grows while it is read", str(path))
        return content


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON (RFC 8259), floats by Python's shortest repr, so that they read back bit for bit.

    The standard has no NaN or infinity: they become the strings "nan", "inf" and "-inf", which `float()` reads.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_spell_non_finite(value), allow_nan=False, indent=indent)


def json_sha256(value: object) -> str:
    """SHA-256 of JSON data, hexadecimal; the same for any order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _spell_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_non_finite(item) for item in value]
    return value


def write_json_atomic(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented JSON, as `write_text_atomic` does."""
    write_text_atomic(path, to_json(value, indent=2) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`; after a crash at any moment it holds the old text or the new.

    UserError if the disk is full or the folder cannot be written; the old file is then untouched.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"  # with_name fails for "."
    try:
        with cannot(f"write {path}"):
            # Whatever has this name, such as a link to a file of the user's, is not written through.
            temporary.unlink(missing_ok=True)
            with temporary.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                flush_to_disk(file)
            _replace_when_closed(temporary, path) if os.name == "nt" else temporary.replace(path)
            sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _replace_when_closed(temporary: Path, path: Path) -> None:
    """For Windows, which replaces no open file: others read these for a moment (a dashboard, a virus scanner)."""
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            temporary.replace(path)
            return
        except PermissionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def sweep_temporaries(folder: Path) -> None:
    """Remove, as far as possible, what killed processes left of `write_json_atomic` in `folder`, to which nobody else
    may be writing now."""
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            path.unlink()


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`; UserError if it is missing, damaged, not an object, or refused by `parse_json`."""
    try:
        with cannot(f"read {path}"):
            value = parse_json(read_plain(path, MAX_JSON_BYTES))
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it should hold one JSON object")
    return value


def parse_json(text: bytes) -> Any:
    """The value of strict UTF-8 JSON: no NaN or Infinity, no duplicate key, at most `MAX_JSON_DEPTH` deep. ValueError
    otherwise, as for integers of thousands of digits."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = (item.values() if type(item) is dict else item for item in level if type(item) in (dict, list))
        if not (level := list(chain.from_iterable(nested))):
            return value
    raise ValueError("nested too deep")


def load_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as {dotted name: value}. Names may have dashes; the caller checks them."""
    try:
        text = read_plain(Path(path), MAX_TOML_BYTES).decode("utf-8-sig")  # a byte-order mark is no part of it
        keys_and_numbers = re.split(r"[=,{}\[\]\n]", _TOML_TEXT.sub("_", text))
        if any(part.count(".") >= MAX_TOML_KEY_PARTS for part in keys_and_numbers):
            raise RecursionError
        return flatten(tomllib.loads(text))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise UserError(f"{path} is not a configuration: nested too deep") from None
    except ValueError as error:  # no TOML, no UTF-8, an integer of thousands of digits
        raise UserError(f"{path} is not TOML: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key occurs twice")
    return unique


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def flush_to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut, where the file system can."""
    if os.name == "nt":  # which cannot open a folder, and journals names
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders, and report EINVAL.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def listed_sources(words: Iterable[str]) -> tuple[str, ...]:
    """The sources of text that `words` name: A,B as A B, unless there is a file or folder of that name."""
    lists = ([word] if os.path.exists(os.path.expanduser(word)) else word.split(",") for word in words)
    return tuple(source for sources in lists for source in sources if source)
