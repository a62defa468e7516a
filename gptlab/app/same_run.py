"""Several processes train one run only if they mean the same: the same machine's size, configuration, code and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.processes.distributed import Group

_FACTS = {
    "code_fingerprint": "code of gptlab",
    "data_fingerprint": "training data",
    "tokenizer_fingerprint": "tokenizer",
    "init_from_fingerprint": "weights to begin with",
    "torch_version": "version of torch",
    "dtype": "type",
}
"""What must be the same on every rank, by its name in run.json."""


def sized_together(
    configure: Callable[[Callable[[RunConfig], Machine]], RunConfig],
    measure: Callable[[RunConfig], Machine],
    group: Group,
) -> tuple[RunConfig, Machine | None]:
    """`configure(measure)`, with rank 0's measurements on every rank: a recipe must not make two sizes of
    two measurements. Also returns the last of these; None where the recipe asks for none."""
    measured: list[Machine] = []

    def measured_here(config: RunConfig) -> Machine:
        measured.append(measure(config))
        return measured[-1]

    if group.is_main:
        config = configure(measured_here)
        group.broadcast("machine", [dataclasses.asdict(machine) for machine in measured])
        return config, measured[-1] if measured else None
    measured = [Machine(**said) for said in group.broadcast("machine")]
    # A rank that was started with another recipe may ask for more; `require_same_run` then refuses it.
    replayed = iter(measured)
    config = configure(lambda _: next(replayed, Machine(device="unknown", flops_per_second=None)))
    return config, measured[-1] if measured else None


def require_same_mode(mode: str, group: Group) -> None:
    """UserError on rank 0 where another rank has another parallel.mode, asked before the ranks wait for each other in
    the way that the mode says. The other ranks end by it."""
    modes = group.gather("parallel.mode", mode)
    other = next((rank for rank, theirs in enumerate(modes) if theirs != modes[0]), None)
    if other is None:
        return
    if not group.is_main:
        group.barrier("parallel.mode")  # to which rank 0 does not come: it says what is wrong
    raise UserError(
        f"rank {other} has parallel.mode = {modes[other]!r}, rank 0 has {modes[0]!r}: start all of them alike"
    )


def require_same_run(config: RunConfig, facts: Mapping[str, object], group: Group) -> None:
    """UserError on rank 0 where another rank differs in its configuration, code or data: one line that says which, and
    in what. The other ranks end by it."""
    mine = {"config": config_to_json(config), **{name: facts.get(name) for name in _FACTS}}
    everybody = group.gather("what is trained", mine)
    if group.is_main:
        for rank, theirs in enumerate(everybody):
            if theirs != mine:
                raise UserError(f"rank {rank} has another {_difference(mine, theirs)}: start all of them alike")


def _difference(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    for name, what in _FACTS.items():
        if theirs[name] != mine[name]:
            return f"{what} than rank 0 ({str(theirs[name])[:16]}, not {str(mine[name])[:16]})"
    return f"configuration than rank 0 ({_first_difference(mine['config'], theirs['config'], '')})"


def _first_difference(mine: object, theirs: object, name: str) -> str:
    """The first field that differs, as `optim.muon.lr = 0.01, not 0.02`."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in (*mine, *(key for key in theirs if key not in mine)):
            if mine.get(key) != theirs.get(key):
                return _first_difference(mine.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    return f"{name} = {theirs!r}, not {mine!r}"
