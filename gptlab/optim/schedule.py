"""Multipliers over the run, as pure functions of its progress: nothing to save, nothing that can drift after a resume.

Progress is the fraction of the horizon already spent when a step begins: step s of N (counted from 0) has progress s/N,
and under a budget in seconds it is train_seconds / budget. It is 0 for the first step and stays below 1 for the last.
"""

from __future__ import annotations

import math

from gptlab.config.optim import MuonConfig, ScheduleConfig


def lr_scale(schedule: ScheduleConfig, progress: float, step_fraction: float = 0.0) -> float:
    """The factor on every learning rate. `step_fraction`: the fraction of the horizon that one step takes (1/N).

    A warm-up counts from the end of the step, (s + 1) / warmup_steps, as in modded-nanogpt and nanochat: from its
    beginning, as in autoresearch, the first step would have rate zero and be wasted. Warm-down and cosine count from
    the beginning, as in all four programs: the last step still has a rate. The cosine begins at the last step of the
    warm-up, the first with the full rate: nanoGPT's step warmup_iters.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < schedule.warmup_fraction:
        return min((progress + step_fraction) / schedule.warmup_fraction, 1.0)
    if schedule.kind == "cosine":
        start = max(schedule.warmup_fraction - step_fraction, 0.0)
        return _between(schedule.final_lr_scale, 1.0, _cosine(progress, start))
    remaining = 1.0 - progress
    if remaining >= schedule.warmdown_fraction:
        return 1.0
    return _between(schedule.final_lr_scale, 1.0, remaining / schedule.warmdown_fraction)


def weight_decay_scale(schedule: ScheduleConfig, progress: float) -> float:
    """The factor on Muon's weight decay: linear from 1 to `weight_decay_final` (autoresearch, nanochat)."""
    return _between(1.0, schedule.weight_decay_final, min(max(progress, 0.0), 1.0))


def muon_momentum(config: MuonConfig, step: int) -> float:
    """Momentum of step `step` (from 0): a ramp over the first steps, whatever the horizon (autoresearch,
    nanochat)."""
    if step >= config.momentum_ramp_steps:
        return config.momentum
    return _between(config.momentum_start, config.momentum, step / config.momentum_ramp_steps)


def _cosine(progress: float, start: float) -> float:
    """Half a cosine from 1 at `start` to 0 at the end (nanoGPT)."""
    share = (progress - start) / (1.0 - start) if start < 1.0 else 0.0
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _between(zero: float, one: float, share: float) -> float:
    return (1.0 - share) * zero + share * one
