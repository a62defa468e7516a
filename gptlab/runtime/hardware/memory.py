"""Memory: allocator settings, and errors of memory that ran out (torch has a type for them on some devices only)."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# glibc takes an int of at most half a heap segment for the mmap threshold; 1 GiB is accepted on 64-bit Linux.
_LARGEST_HEAP_BLOCK_BYTES = 1 << 30
_HEAP_GROWTH_BYTES = 64 << 20

# CUDA and HIP raise torch.OutOfMemoryError, Apple GPUs a RuntimeError with these words, the CPU's allocator one that
# names it, cuBLAS its own status; C++ elsewhere bad_alloc.
_SIGNS = re.compile(r"out of memory|DefaultCPUAllocator: |CUBLAS_STATUS_ALLOC_FAILED|bad_alloc", re.IGNORECASE)
_WANTED = re.compile(r"allocate ([\d.]+ ?[KMGT]i?B|\d+ bytes)")


def set_gpu_allocator(settings: str | None) -> None:
    """Give torch's GPU allocator these settings, unless $PYTORCH_ALLOC_CONF has others. Call it before the first tensor
    is put on a GPU: torch reads the variable then."""
    if settings is not None:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", settings)


def keep_freed_memory() -> bool:
    """Serve blocks of up to 1 GiB from the heap and never trim it. False if the C library is not glibc.

    glibc returns large blocks to the kernel at every free, and page faults bring them back; a training step allocates
    the same activations every time. Measured on two Zen 4 cores (4 layers, width 256, 4,096 tokens, bf16, compiled):
    forward and backward take 451 ms by default and 400 ms with the heap kept, 12% less.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, _HEAP_GROWTH_BYTES),
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that caused it (compilers wrap errors), says that memory ran out."""
    return any(
        isinstance(link, MemoryError) or (isinstance(link, RuntimeError) and _SIGNS.search(str(link)) is not None)
        for link in _chain(error)
    )


@contextmanager
def memory_errors_explained(advice: Callable[[BaseException], str]) -> Iterator[None]:
    """Turns errors of memory that ran out, within the context, into a UserError with the line that `advice` returns."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise UserError(advice(error)) from error


def fewer_rows(error: BaseException, rows: int) -> str:
    """Advice for an evaluation in passes of so many rows."""
    advice = "a --dtype of fewer bytes or another --device, such as cpu"
    if rows > 1:
        advice = f"--micro-sequences {rows // 2} instead of {rows} gives the same numbers, a little slower; or {advice}"
    return f"{_beginning(error)}: {advice}"


def smaller_model(error: BaseException) -> str:
    """Advice for a model that does not fit."""
    return f"{_beginning(error)}: a --dtype of fewer bytes or another --device, such as cpu, may have room for it"


def what_to_lower(error: BaseException, config: RunConfig, run: Path | None) -> str:
    """Advice for a run that does not fit: the field to lower, with the value that costs least."""
    rows, seq_len = config.batch.micro_sequences, config.model.seq_len
    text = f"{_beginning(error)}: "
    # The largest that divides it keeps batch.total_tokens a multiple.
    fewer = max((divisor for divisor in range(1, rows // 2 + 1) if rows % divisor == 0), default=None)
    if fewer is not None:
        again = "the command" if run is None else f"gptlab train --from {run}"
        share = "half" if 2 * fewer == rows else f"1/{rows // fewer}"
        text += (
            f"batch.micro_sequences = {rows}: {again} with --batch.micro-sequences {fewer} needs {share} for "
            f"activations and takes the same steps; or lower model.seq_len = {seq_len}"
        )
    else:
        text += (
            f"lower model.seq_len = {seq_len} or the model's size (model.n_embd, model.n_layer); batch.micro_sequences "
            "is 1 already"
        )
    if config.eval.micro_sequences is not None and config.eval.micro_sequences > rows:
        text += f"; eval.micro_sequences = {config.eval.micro_sequences} is more than training's: lower it first"
    return text


def _beginning(error: BaseException) -> str:
    wanted = _wanted_memory(error)
    return f"out of memory{f' (the last {wanted} were not there)' if wanted else ''}"


def _wanted_memory(error: BaseException) -> str | None:
    """The size of the last allocation, as "2.0 GiB"; None if the error does not say."""
    for link in _chain(error):
        if found := _WANTED.search(str(link)):
            amount = found[1]
            return f"{int(amount.split()[0]) / 2**30:.1f} GiB" if amount.endswith("bytes") else amount
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
