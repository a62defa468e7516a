"""Reading checkpoints: the newest valid one is chosen, every file is hashed as it is read, whole tensors come back and
go into a model.

A checkpoint that differs from its manifest in anything is damaged, and the newest intact one is used instead. Any
number of processes reads what any other number wrote. Nothing here deletes a checkpoint; retention.py does.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT
from gptlab.runtime.files.plain_file import read_plain
from gptlab.runtime.files.tensor_file import (
    DamagedFileError,
    FileRecord,
    parse_json_object,
    read_bytes,
    read_tensors,
    verify_tensors,
)
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import (
    KINDS,
    DamagedCheckpointError,
    Manifest,
    max_manifest_bytes,
    parse_manifest,
    slice_key,
)
from gptlab.training.checkpoint.names import MANIFEST, STATE, candidates, list_checkpoints, step_of

OnDamage = Callable[[str], None]
"""Receives one line that names a damaged checkpoint and what is wrong with it."""
# The odd constant of MurmurHash2 (Austin Appleby, public domain): what is multiplied by it keeps its place.
_MIX = 0x5BD1E995
_MASK = 2**62 - 1
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; its tensors are on the CPU and share no memory. For one of several ranks they are on disk
    until they are used (pieces.py)."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    path: Path

    @contextmanager
    def reading_state(self) -> Iterator[None]:
        """Within the context, what an intact checkpoint (of untrusted origin) lacks or has wrong is a UserError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise UserError(
                f"cannot resume from {self.path}: its state was not written by gptlab ({type(error).__name__}: {error})"
            ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. DamagedCheckpointError names the first thing that is wrong with it."""
    manifest = read_manifest(path)
    return Checkpoint(
        step=manifest.step,
        model=_read_kind(path, manifest, "model"),
        optimizer=_read_kind(path, manifest, "optimizer"),
        state=_read_state(path, manifest),
        path=path,
    )


def verify_checkpoint(path: Path) -> None:
    """What `load_checkpoint` checks, without keeping anything. DamagedCheckpointError if it is not intact."""
    manifest = read_manifest(path)
    for kind in KINDS:
        for name in manifest.files_of(kind):
            _checked(path, name, manifest, partial(verify_tensors, layout=manifest.layout(name)))
    _read_state(path, manifest)


def load_newest(
    folder: Path, on_damage: OnDamage, group: Group | None = None, *, up_to: int | None = None
) -> Checkpoint:
    """The newest checkpoint in `folder`, up to step `up_to`, that is intact for every rank and has rank 0's weights.
    All ranks fall back together from one that is damaged or unreadable for any of them.

    `on_damage` is called for each that is passed over. UserError, on all ranks alike, where none is left.
    """
    group = group or Group()
    present = [path.name for path in reversed(candidates(folder)) if up_to is None or (step_of(path) or 0) <= up_to]
    wrong = []
    for name in group.broadcast("checkpoints", present):
        try:
            return load_checkpoint(folder / name) if group.size == 1 else _load_together(folder / name, group)
        except DamagedCheckpointError as error:
            for line in error.lines:
                on_damage(line)
            wrong.append(f"{name}: {error.reason}")
    if not wrong:
        which = "none has been saved there" if up_to is None else f"none up to step {up_to} is there"
        raise UserError(f"no checkpoint in {folder}: {which}")
    raise UserError(f"no intact checkpoint in {folder}: {'; '.join(wrong)}")


def load_to_train_on(folder: Path, on_damage: OnDamage, group: Group, *, up_to: int | None) -> Checkpoint:
    """`load_newest`, with what training needs beside weights. UserError, on all ranks alike, for a checkpoint that a
    lab saved again without it."""
    checkpoint = load_newest(folder, on_damage, group, up_to=up_to)
    if not checkpoint.optimizer:
        raise UserError(
            f"{checkpoint.path} has no optimizer state, as a lab keeps none: train again with --from {folder.parent}, "
            f"or begin with its weights with --init-from {folder.parent}"
        )
    return checkpoint


def _load_together(path: Path, group: Group) -> Checkpoint:
    """`load_checkpoint` on several ranks, each of which reads of the tensors what it then uses. Ranks that see the same
    files verify a share of them each. DamagedCheckpointError on all ranks if any of them finds something wrong."""
    from gptlab.training.checkpoint.pieces import saved_tensors, shares

    manifest, state, problem = None, {}, None
    found = {"files": str(group.rank), "weights": ""}
    try:
        manifest = read_manifest(path)
        # A copy of a file has other numbers and times. Where a network disk gives each machine its own, each reads all.
        seen = [(name, one.st_ino, one.st_ctime_ns) for name in manifest.files for one in [os.stat(path / name)]]
        weights = [manifest.files[name].sha256 for name in manifest.files_of("model")]
        found = {"files": _digest(seen), "weights": _digest(weights)}
    except DamagedCheckpointError as error:
        problem = error
    everybody = group.gather("checkpoint", found)
    alike = [rank for rank, one in enumerate(everybody) if one["files"] == found["files"]]
    if manifest is not None:
        sizes = {name: manifest.files[name].size_bytes for kind in KINDS for name in manifest.files_of(kind)}
        try:
            for name in shares(sizes, len(alike))[alike.index(group.rank)]:
                _checked(path, name, manifest, partial(verify_tensors, layout=manifest.layout(name)))
            state = _read_state(path, manifest)
        except DamagedCheckpointError as error:
            problem = error
    said = {"error": str(problem or ""), "reason": problem.reason if problem else ""}
    _require_intact(path, everybody, group.gather("checkpoint verified", said))
    assert manifest is not None
    if manifest.index is None:
        return load_checkpoint(path)
    model, optimizer = (saved_tensors(path, manifest, kind, _checked) for kind in KINDS)
    return Checkpoint(manifest.step, model, optimizer, state, path)


def _require_intact(path: Path, found: Sequence[Mapping[str, str]], said: Sequence[Mapping[str, str]]) -> None:
    """DamagedCheckpointError, on all ranks alike, unless no rank finds anything wrong, in its share or in another's of
    the same files, and all have rank 0's weights. `found`, `said`: by rank, see `_load_together`."""
    wrong = {one["files"]: its for one, its in reversed(list(zip(found, said, strict=True))) if its["error"]}
    other = {"reason": "holds other weights than for rank 0"}
    other["error"] = f"checkpoint {path} {other['reason']}"
    problems = {
        rank: wrong.get(one["files"], other)
        for rank, one in enumerate(found)
        if one["files"] in wrong or (one["weights"] != found[0]["weights"] and found[0]["files"] not in wrong)
    }
    if not problems:
        return
    errors = {rank: problem["error"] for rank, problem in problems.items()}
    if len(errors) == len(found) and len(set(errors.values())) == 1:
        lines = [errors[0]]
    else:
        lines = [f"rank {rank}: {text}" for rank, text in errors.items()]
    raise DamagedCheckpointError(path, next(iter(problems.values()))["reason"], lines)


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def select_checkpoint(checkpoints_dir: Path, which: str, *, best_step: int | None = None) -> Path:
    """The checkpoint that `which` names, intact or not: best (`best_step`, which the run's state knows) or a step.
    UserError where there is none."""
    if which == "best":
        if best_step is None:
            raise UserError(f"no checkpoint in {checkpoints_dir} is known as the best: no validation was recorded")
        step = best_step
    elif which.isascii() and which.isdigit() and len(which) < 20:  # int() refuses thousands of digits
        step = int(which)
    else:
        raise UserError(f"checkpoint {which!r}: must be latest, best or the number of a step")
    by_step = {step_of(path): path for path in list_checkpoints(checkpoints_dir)}
    if step not in by_step:
        steps = ", ".join(str(known) for known in by_step) or "none"
        raise UserError(f"no checkpoint of step {step} in {checkpoints_dir} (steps there: {steps})")
    return by_step[step]


def _read_kind(path: Path, manifest: Manifest, kind: str) -> dict[str, Tensor]:
    """The whole tensors of a kind; every file is read straight into them."""
    if manifest.index is None:
        (name,) = manifest.files_of(kind)
        return _checked(path, name, manifest, read_tensors)
    # Takes no more memory than the files have bytes, whose sizes have been checked.
    tensors = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in manifest.index[kind].items()}
    views: dict[str, dict[str, Tensor]] = {name: {} for name in manifest.files_of(kind)}
    for name, stored in manifest.index[kind].items():
        for file, start, count in stored.slices:
            whole, key = tensors[name], slice_key(name, stored.shape, start, count)
            views[file][key] = whole if count == whole.numel() else whole.view(-1)[start : start + count]
    for name, into in views.items():
        _checked(path, name, manifest, partial(read_tensors, into=into))
    return tensors


def _checked(path: Path, name: str, manifest: Manifest, read: Callable[[Path, FileRecord], _T]) -> _T:
    try:
        return read(path / name, manifest.files[name])
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{name}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read ({error.strerror})") from error


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    """state.json; that of a run must be of the manifest's step."""
    state = _checked(path, STATE, manifest, lambda file, expected: parse_json_object(read_bytes(file, expected)))
    if "step" in state and state["step"] != manifest.step:
        raise DamagedCheckpointError(path, f"{STATE} is of another step than {MANIFEST} ({manifest.step})")
    return state


def read_manifest(path: Path) -> Manifest:
    """The manifest, after the check that the folder holds exactly what it names, as plain files of the right sizes. It
    finds truncated files, but not files altered in place."""
    try:
        if path.is_symlink() or not path.is_dir():
            raise DamagedCheckpointError(path, "is not a folder" if os.path.lexists(path) else "is not there")
        # Hidden entries are what file browsers and NFS leave behind; they harm nothing, and nothing reads them.
        names = [name for name in os.listdir(path) if not name.startswith(".")]
        sizes = {name: _plain_file_bytes(path, name) for name in names}
        max_bytes = max_manifest_bytes(len(sizes))
        if sizes.get(MANIFEST, 0) > max_bytes:
            raise DamagedCheckpointError(path, f"{MANIFEST} has {sizes[MANIFEST]:,} bytes")
        if MANIFEST not in sizes:
            raise DamagedCheckpointError(path, f"has no {MANIFEST}")
        manifest = parse_manifest(read_plain(path / MANIFEST, max_bytes))
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{MANIFEST}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"cannot be read ({error.strerror})") from error
    named_step = step_of(path)
    if named_step is not None and named_step != manifest.step:
        raise DamagedCheckpointError(path, f"{MANIFEST} is of step {manifest.step}")
    for name, record in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpointError(path, f"has no {name}")
        if sizes[name] != record.size_bytes:
            reason = f"{name} has {sizes[name]:,} bytes, its manifest says {record.size_bytes:,}"
            raise DamagedCheckpointError(path, reason)
    unknown = sorted(set(sizes) - {*manifest.files, MANIFEST})
    if unknown:
        raise DamagedCheckpointError(path, f"holds {unknown[0]!r}, which its manifest does not name")
    return manifest


def _plain_file_bytes(path: Path, name: str) -> int:
    """Size of a folder's entry, which must be a file itself, not a link to one elsewhere."""
    status = os.lstat(path / name)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(path, f"{name} is not a regular file")
    return status.st_size


def checksum(tensors: Iterable[Tensor]) -> int:
    """0 <= checksum < 2^62 over the bits of tensors, in their order. Each contributes the sum of its words, which
    detects different rounding, the purpose here, but not moved elements."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(_WORDS.get(flat.element_size(), torch.uint8))
        total = (total * _MIX + int(words.sum(dtype=torch.int64))) & _MASK
    return total


# --- what a saved state may hold

_MAX_STEPS = 2**40
"""Far above any run, and far below where a row's number, a product with it, leaves 64 bits."""

_BEST = (None, {"step": int, "val_loss": float})
_VALUES: Mapping[str, object] = {
    "step": int,
    "train_seconds": float,
    "loss_ema": {"sum": float, "count": int},
    "faults": {
        "skipped": int, "skipped_in_a_row": int, "rewinds": int, "good_step": (None, int), "losses": [float],
    },
    "loader": {"next_step": int},
    "val_loss": (None, float),
    "val_bpb": (None, float),
    "min_val_bpb": (None, float),
    "core_metric": (None, float),
    "best": _BEST,
    "best_saved": _BEST,
}  # fmt: skip
"""Of state.json: int is a count, float any number, a tuple alternatives, [x] any number of x."""
_MARK = (None, {"step": int}, {"step": int, "train_seconds": float})


def require_values(saved: Mapping[str, Any]) -> None:
    """ValueError that names the first invalid value: the file is untrusted. A missing one raises KeyError where it is
    read."""
    marks = saved.get("marks", {})
    kinds = {**_VALUES, "marks": dict.fromkeys(marks, _MARK) if isinstance(marks, dict) else {}}
    for name, kind in kinds.items():
        if name in saved and not _is(saved[name], kind):
            raise ValueError(f"{name} = {str(saved[name])[:100]}")


def _is(value: object, kind: object) -> bool:
    if isinstance(kind, dict):
        return isinstance(value, dict) and value.keys() == kind.keys() and all(_is(value[k], kind[k]) for k in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(one, kind[0]) for one in value)
    if isinstance(kind, tuple):
        return any(_is(value, one) for one in kind)
    if kind is None:
        return value is None
    if kind is int:
        return type(value) is int and 0 <= value < _MAX_STEPS
    # Also false for NaN; integers of JSON may be longer than a float can be.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


# --- into a model


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights and persistent buffers by name. UserError, with nothing changed, unless names and shapes are exactly
    the model's."""
    own = model.saved_tensors()
    require_same_shapes(own, tensors)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def require_weights_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """UserError unless these are the weights of such a model. Called before a model is built: a configuration from a
    file may have any size."""
    if len(tensors) < config.n_layer:
        raise UserError(
            f"the checkpoint is of another model: it has {len(tensors):,} tensors for {config.n_layer:,} layers"
        )
    with torch.device("meta"):
        require_same_shapes(dict(GPT(config).named_parameters()), tensors)


def require_same_shapes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """UserError unless names and shapes of a checkpoint's `tensors` are exactly the model's."""
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        raise UserError(f"the checkpoint is of another model: {different[0]} is in only one of the two")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint is of another model: {name} is {tuple(tensors[name].shape)} there, "
                f"{tuple(parameter.shape)} here"
            )
