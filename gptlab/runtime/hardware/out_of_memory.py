"""Out of memory: how it differs from other errors (torch has a type for it on some devices only), and what helps."""

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


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that it wraps (as compilers do), is out of memory."""
    return any(
        isinstance(link, MemoryError) or (isinstance(link, RuntimeError) and _SIGNS.search(str(link)) is not None)
        for link in _chain(error)
    )


@contextmanager
def memory_told(advice: Callable[[BaseException], str]) -> Iterator[None]:
    """Within, memory that runs out is a UserError with the line that `advice` makes of the error."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise UserError(advice(error)) from error


def fewer_rows(error: BaseException, rows: int) -> str:
    """One line for an evaluation in passes of so many rows."""
    advice = "a --dtype of fewer bytes or another --device, such as cpu"
    if rows > 1:
        advice = f"--micro-sequences {rows // 2} instead of {rows} gives the same numbers, a little slower; or {advice}"
    return f"{_beginning(error)}: {advice}"


def smaller_model(error: BaseException) -> str:
    """One line for a model that does not fit as it is."""
    return f"{_beginning(error)}: a --dtype of fewer bytes or another --device, such as cpu, may have room for it"


def what_to_lower(error: BaseException, config: RunConfig, run: Path | None) -> str:
    """One line for a run that does not fit: the field to lower, with the value that makes it fit soonest."""
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
    """How much was asked for at last, as "2.0 GiB"; None where the error does not tell."""
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
