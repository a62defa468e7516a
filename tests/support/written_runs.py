"""Run folders with given curves, written without training: for what only reads runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlab.config.load import apply_overrides, config_to_json
from gptlab.config.run import RunConfig
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory, Status

TOKENS_PER_STEP = 1_000
FLOPS_PER_TOKEN = 6_000


def write_run(
    folder: Path,
    bpb: Sequence[float],
    *,
    every_steps: int = 10,
    seconds_per_step: float = 1.0,
    flops_per_token: int = FLOPS_PER_TOKEN,
    status: Status = "finished",
    data_fingerprint: str = "d" * 64,
    **fields: Any,
) -> Path:
    """A run that validated before its first step and then every `every_steps` steps, with the bits per byte `bpb`.

    `fields`: fields of the configuration, with dots written as two underscores.
    """
    config = apply_overrides(RunConfig(), {name.replace("__", "."): value for name, value in fields.items()})
    facts = {"data_fingerprint": data_fingerprint, "start": "2026-11-22T08:00:00+00:00"}
    run = RunDirectory.create(folder, config_to_json(config), facts)
    with MetricsLog(run.metrics_path) as metrics:
        for number, value in enumerate(bpb):
            step = number * every_steps
            tokens, seconds = step * TOKENS_PER_STEP, step * seconds_per_step
            if step:
                metrics.write("train", step=step, tokens=tokens, total_flops=tokens * flops_per_token, loss=value)
            metrics.write("eval", step=step, val_loss=value, val_bpb=value, train_seconds=seconds, tokens=tokens)
    if status == "finished":
        summary = {
            "val_bpb": bpb[-1], "training_seconds": seconds, "total_seconds": seconds, "peak_vram_mb": 1.0,
            "mfu_percent": 1.0, "total_tokens_M": tokens / 1e6, "num_steps": step, "num_params_M": 0.1,
            "depth": config.model.n_layer, "min_val_bpb": min(bpb), "total_flops": tokens * flops_per_token,
        }  # fmt: skip
        write_json_atomic(run.summary_path, summary)
    run.set_status(status)
    return folder
