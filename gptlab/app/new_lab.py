"""A new lab from a request for a run: its configuration, its data, its folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptlab.app.run.run_request import DEFAULT_RECIPE, RunRequest
from gptlab.app.sizing import sized
from gptlab.config.errors import UserError
from gptlab.config.fields import flag_of
from gptlab.config.run import LogConfig
from gptlab.data.prepare import prepare
from gptlab.lab.experiments.folder import Lab, Settings, create
from gptlab.lab.judge.audits import MIN_ROWS
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.processes.distributed import ALONE
from gptlab.runtime.records.console import Console

_FIXED = {
    "run_dir": "NAME is the lab's folder",
    "seed": "a lab trains with seeds 1, 2, ...",
    "horizon.until_val_loss": "a lab's runs have one length, and its judge validates",
}
"""{field that a lab decides: why}."""


def new_lab(path: Path, request: RunRequest, asked: Sequence[str], console: Console) -> Lab:
    """A lab in `path` for the run that is requested, by the words `asked`; nothing is trained yet. If there is one that
    was made by the same words, with the same values in a TOML file, that one. `request.options`: seeds, at.

    UserError where the run, its data or the folder cannot be used.
    """
    if (path / "lab.json").is_file():
        lab = Lab.open_to_judge(path)
        if asked and list(asked) != list(lab.settings.asked):
            made_by = shlex.join([str(path), *lab.settings.asked])
            raise UserError(f"{path} is a lab already, made by `gptlab lab new {made_by}`")
        given, was = _given(request), lab.settings.given
        if asked and was and (changed := [name for name in {**was, **given} if given.get(name) != was.get(name)]):
            raise UserError(
                f"the TOML file of {path} was edited after `gptlab lab new` ({', '.join(changed)}): undo that, or make "
                "another lab of it"
            )
        return lab
    for field, instead in _FIXED.items():
        if field in request.overrides:
            raise UserError(f"{flag_of(field.removeprefix('horizon.'))} cannot be given: {instead}")

    config, measured = sized(request, ALONE, console, console.warn)
    # A lab has its own report, and a night of runs should not start as many processes.
    config = replace(config, log=LogConfig(report=False))
    horizon = config.horizon
    if horizon.unit not in ("seconds", "steps", "tokens"):  # tokens: also quickstart's default on a fast GPU
        raise UserError("a lab needs a length in --minutes, --steps or --tokens, the same for all its candidates")
    if config.init_from is not None:
        raise UserError("a lab trains from the weights that its seeds draw: leave init_from out")
    settings = Settings(
        name=path.name,
        recipe=request.recipe or DEFAULT_RECIPE,
        seconds=horizon.amount if horizon.unit == "seconds" else None,
        steps=horizon.total_steps(tokens_per_step=config.batch.total_tokens, flops_per_token=1, scaling_params=1),
        at=request.options.get("at", "time"),
        seeds=request.options.get("seeds", 3),
        validation_bytes={},
        asked=tuple(asked),
        given=_given(request),
    )
    data = prepare(config.data, config.tokenizer, console=console)
    rows = -(-(data.val.n_tokens // 2) // config.model.seq_len)
    if rows < MIN_ROWS:  # found only after the first run, it could not be corrected in a lab that is there
        raise UserError(
            f"half of the validation text has {rows} rows of {config.model.seq_len:,} tokens, and the judge needs "
            f"{MIN_ROWS}: hold out more with --data.val-fraction, or give --data.val-source"
        )
    lab = create(path, config, data, settings, measured[-1] if measured else None)
    if shown := lab.texts()[1]:
        console.warn(
            f"candidate code can read the validation text from {', '.join(shown)}, because Python itself is there; to "
            "try code that you do not trust, choose another text with --data"
        )
    return lab


def _given(request: RunRequest) -> dict[str, Any]:
    """{name: value} of all that was asked for, as lab.json keeps it."""
    values: dict[str, Any] = json.loads(to_json({"recipe": request.recipe, **request.given}))
    return values
