"""`gptlab.train(...)`: `gptlab train` as a function."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gptlab.app.run.attempt import Result
from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.run_request import RunRequest, request_from_values
from gptlab.app.run.train_run import train_run
from gptlab.config.errors import UserError, paths_of_the_user
from gptlab.config.load import apply_overrides
from gptlab.config.run import RunConfig

if TYPE_CHECKING:
    import torch

    from gptlab.data.prepare import PreparedData
    from gptlab.data.rows import RowSource
    from gptlab.model.gpt import GPT

_training: tuple[int, int] | None = None
"""The process and the thread that train."""


def train(
    recipe: str | RunConfig | None = None,
    *,
    depth: int | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    flops: float | None = None,
    tokens_per_param: float | None = None,
    until_val_loss: float | None = None,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | dict[str, Any] | None = None,
    seed: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    from_run: str | os.PathLike[str] | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    on_eval: Callable[[dict[str, Any]], object] | None = None,
    rows: Callable[[PreparedData, RunConfig], RowSource] | None = None,
    optimizer: Callable[[GPT], torch.optim.Optimizer] | None = None,
    change_model: Callable[[GPT], None] | None = None,
    **fields: Any,
) -> Result:
    """Train a GPT, resume a run, or repeat one, as `gptlab train` does.

        gptlab.train("quickstart", depth=4, steps=200)
        gptlab.train("nanochat-tiny", data="notes/", model={"window_pattern": "L"}, optim={"muon": {"lr": 0.01}})
        gptlab.train(from_run="runs/NAME", seed=7)
        gptlab.train(resume="runs/NAME")

    Args:
        recipe: a name from `gptlab train --list`, a TOML file, or a configuration (`gptlab.recipes.quickstart()`).
            None: quickstart.
        depth: transformer blocks; width, heads and rates follow.
        minutes, steps, tokens, flops, tokens_per_param: how long to train; give one of them, or none.
        until_val_loss: stop at this validation loss (nats/token), if that is sooner.
        data: files, folders, globs or corpora by name; or a dict of fields of `data`.
        seed: seeds weights, data order, dropout and samples.
        run_dir: folder of the run. None: runs/RECIPE-DATE-TIME.
        resume: the folder of a run to continue, bit for bit.
        from_run: the folder of a run to repeat in a new folder; other fields that are given replace its own.
        on_step, on_eval: called with the fields of each `train` or `eval` line of metrics.jsonl as it is written.
            They run off the clock, and may load or (with one process) train other models: random generators, threads,
            kernels and torch's gradient mode are put back, so they cannot change the run.
        rows: makes the training rows: (prepared data, configuration) -> RowSource.
        optimizer: makes the optimizer of all weights: model -> torch.optim.Optimizer, whose `step` needs no closure.
            Its learning rates are peaks, which the schedule multiplies, so it must not have an lr_scheduler. Of the
            fields of `optim`, only grad_clip applies.
        change_model: changes the model before it is trained, such as `block.mlp = MyMLP(...)` for its blocks. Blocks,
            their `mlp` and `attention`, embeddings and `final_norm` may be replaced. Their inputs are of the run's
            dtype, which may be bfloat16, and their weights float32: make their layers of `gptlab.model.gpt.Linear`,
            an `nn.Linear` that casts its weights, or train with dtype="float32". What gptlab's kernels compute from
            weights alone is refused: layers inside of its MLP, the norms of its blocks, the head. FLOPs
            (`flops`, MFU) count only the `nn.Linear` layers of its own parts, not the products of an own attention.
        fields: every other name that a flag or a TOML file may have, with groups as dicts: `model={"seq_len": 256}`,
            `dtype="float32"`, `eval={"every_steps": 100}`.

    run.json records the names of `rows`, `optimizer` and `change_model` with fingerprints of their source and of the
    values that they hold (defaults, arguments of a functools.partial, variables of a function around them). Resuming
    or repeating such a run needs functions of the same names.

    Returns a Result: exit_code (0 finished, 75 preempted), run_dir, and summary, which holds what summary.json does.

    One thread of a process trains at a time, since torch's random generator and number of threads are the process's.

    Raises UserError for wrong arguments, input or environment; TrainingFailed where training fails; StoppedEarly, a
    KeyboardInterrupt, for a signal before there is a run; PeerFailed where one of several processes is lost.
    """
    started = time.perf_counter()
    own = {"on_step": on_step, "on_eval": on_eval, "rows": rows, "optimizer": optimizer, "change_model": change_model}
    parts = OwnParts(**own) if any(part is not None for part in own.values()) else None  # type: ignore[arg-type]
    named = {
        "depth": depth, "minutes": minutes, "steps": steps, "tokens": tokens, "flops": flops,
        "tokens_per_param": tokens_per_param, "until_val_loss": until_val_loss, "data": data, "seed": seed,
        "run_dir": run_dir, "resume": resume and os.path.abspath(os.path.expanduser(resume)), "from": from_run,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None} | fields
    config = None
    with _only_thread(), paths_of_the_user():
        if isinstance(recipe, RunConfig):
            asked = request_from_values(None, given)
            config, request = _changed(recipe, asked), RunRequest(options=asked.options)
        elif isinstance(recipe, str | os.PathLike | None):
            request = request_from_values(None if recipe is None else os.fspath(recipe), given)
        else:
            raise UserError(f"the first argument names a recipe or is a RunConfig, this is {type(recipe).__name__}")
        return train_run(request, sys.argv, started, config=config, parts=parts, catch=False)


@contextmanager
def _only_thread() -> Iterator[None]:
    """UserError while another thread of this process is in the context; the same one may be, from `on_step`."""
    global _training
    here, before = (os.getpid(), threading.get_ident()), _training
    if before is not None and before != here and before[0] == here[0]:  # not of the process that forked this one
        raise UserError(
            "another thread of this process is training: train in a process of its own "
            "(multiprocessing.get_context('spawn'))"
        )
    _training = here
    try:
        yield
    finally:
        _training = before


def _changed(config: RunConfig, request: RunRequest) -> RunConfig:
    """`config` with the fields of the request."""
    if request.resume is not None or request.from_run is not None:
        raise UserError("give one of: a configuration to train, a run to resume, a run to repeat (from_run)")
    wrong = "depth" if request.depth is not None else next(iter(request.recipe_arguments), None)
    if wrong is not None:
        raise UserError(f"{wrong} is an argument of a recipe: give its name, or make the configuration with it")
    return apply_overrides(config, request.overrides)
