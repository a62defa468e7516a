"""Memory that ran out: how it shows (torch has a type for it on some devices only), and what to lower."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig

# CUDA and HIP raise torch.OutOfMemoryError, Apple GPUs a RuntimeError with these words, the CPU's allocator one that
# names it, cuBLAS its own status; C++ elsewhere bad_alloc.
_SIGNS = re.compile(r"out of memory|DefaultCPUAllocator: |CUBLAS_STATUS_ALLOC_FAILED|bad_alloc", re.IGNORECASE)
_WANTED = re.compile(r"allocate ([\d.]+ ?[KMGT]i?B|\d+ bytes)")
_SMALLER = "a --dtype of fewer bytes or another --device, such as cpu"


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
    fewer = f"--micro-sequences {rows // 2} instead of {rows} gives nearly the same numbers, a little slower; or "
    return f"{_beginning(error)}: {fewer if rows > 1 else ''}{_SMALLER}"


def smaller_model(error: BaseException) -> str:
    """Advice for a model that does not fit."""
    return f"{_beginning(error)}: {_SMALLER}, may have room for it"


def fewer_micro_sequences(rows: int) -> int:
    """Half of `rows`, or the largest number below it that divides them: batch.total_tokens stays a multiple."""
    return max(divisor for divisor in range(1, rows // 2 + 1) if rows % divisor == 0)


def what_to_lower(error: BaseException, config: RunConfig, run: Path | None) -> str:
    """Advice for a run that does not fit: the field to lower, with the value that costs least."""
    rows, seq_len = config.batch.micro_sequences, config.model.seq_len
    if rows > 1:
        fewer = fewer_micro_sequences(rows)
        again = "the command" if run is None else f"gptlab train --from {run}"
        share = "half" if 2 * fewer == rows else f"1/{rows // fewer}"
        advice = (
            f"batch.micro_sequences = {rows}: {again} with --batch.micro-sequences {fewer} needs {share} for "
            f"activations and takes the same steps; or lower model.seq_len = {seq_len}"
        )
    else:
        advice = (
            f"lower model.seq_len = {seq_len} or the model's size (model.n_embd, model.n_layer); batch.micro_sequences "
            "is 1 already"
        )
    if config.eval.micro_sequences is not None and config.eval.micro_sequences > rows:
        advice += f"; eval.micro_sequences = {config.eval.micro_sequences} is more than training's: lower it first"
    return f"{_beginning(error)}: {advice}"


def _beginning(error: BaseException) -> str:
    """With the size of the last allocation, where the error says it."""
    wanted = next((found[1] for link in _chain(error) if (found := _WANTED.search(str(link)))), None)
    if wanted is None:
        return "out of memory"
    if wanted.endswith("bytes") and (size := int(wanted.split()[0])) >= 2**20:
        wanted = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    return f"out of memory (the last {wanted} were not there)"


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
