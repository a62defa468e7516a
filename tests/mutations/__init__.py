"""Deliberate defects of gptlab, each with the tests that must notice it: they show that a test tests what it says.

`python -m tests.mutations` makes them one by one, in a copy of the package, and runs their tests. To add one, write it
into the list of its part of the package. A good one is a mistake that somebody could make (a bound off by one, betas
the wrong way round, a factor left out), not one that breaks whatever runs.
"""

from __future__ import annotations

from . import (
    comparison,
    config,
    dashboard,
    data,
    evaluation,
    interface,
    judge,
    many_runs,
    model,
    night,
    optim,
    plans,
    processes,
    racing,
    reports,
    runtime,
    train,
)
from .mutation import Mutation

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: list[Mutation] = [
    *config.MUTATIONS,
    *runtime.MUTATIONS,
    *data.MUTATIONS,
    *model.MUTATIONS,
    *optim.MUTATIONS,
    *evaluation.MUTATIONS,
    *train.MUTATIONS,
    *processes.MUTATIONS,
    *plans.MUTATIONS,
    *interface.MUTATIONS,
    *judge.MUTATIONS,
    *comparison.MUTATIONS,
    *many_runs.MUTATIONS,
    *racing.MUTATIONS,
    *night.MUTATIONS,
    *reports.MUTATIONS,
    *dashboard.MUTATIONS,
]
