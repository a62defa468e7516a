"""quickstart on a GPU: rows, the rate that is assumed before a step was timed, and no more epochs than teach."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gptlab.config.length import Horizon
from gptlab.config.scaling import MANY_EPOCHS, Machine, Shape, shape_for_depth

# Tokens of a micro-batch at most: a GPU needs many to be busy. By `gptlab plan`, 2^14 of depth 10 take 4.8 GB, 2^15 of
# depth 16, for which steps must be as fast as in a data center, 24 GB, both before torch.compile saves some. Apple's
# GPUs share the machine's memory: 2^13 of depth 6 take 1.2 GB in float32.
MOST_MICRO_TOKENS = {"cuda": 2**15, "mps": 2**13}

# Before a step is timed: this share of what steps can reach at most, which is 0.55 of the products' peak. nanochat's
# depth 12 reaches 0.41 of an H100's peak at width 768, and narrower matrices less.
ASSUMED_SHARE = 0.5


def assumed_flops_per_second(machine: Machine) -> float | None:
    """None where its products' peak is unknown."""
    most = machine.most_flops_per_second
    return None if most is None else ASSUMED_SHARE * most


def most_tokens(machine: Machine) -> float:
    """Tokens of a run of the default length, at most.

    A GPU would repeat Python's sources twenty times in three minutes. Beyond the epochs that teach, a larger model does
    not help either: both overfit (Kim et al., arXiv:2509.14786).
    """
    return math.inf if machine.training_tokens is None else float(MANY_EPOCHS * machine.training_tokens)


def within_the_text(
    machine: Machine,
    shape: Shape,
    horizon: Horizon,
    flops_per_second: float,
    tokens_per_param: float,
    size: Mapping[str, int],
    *,
    least_depth: int,
) -> tuple[Shape, Horizon]:
    """The default run's shape and length where the text is the limit, not the time."""
    tokens = most_tokens(machine)
    while shape.n_layer > least_depth and tokens_per_param * shape.scaling_params > tokens:
        shape = shape_for_depth(shape.n_layer - 1, **size)
    if horizon.amount * flops_per_second > tokens * shape.flops_per_token:
        horizon = Horizon(amount=tokens, unit="tokens")
    return shape, horizon


def micro_rows(machine: Machine, step_tokens: int, seq_len: int, *, cpu_tokens: int) -> int:
    """Rows of a micro-batch: a power of two, as `step_tokens` is, with at least one micro-batch for each process.
    `cpu_tokens`: of a micro-batch on a CPU, at most."""
    most = min(step_tokens / machine.processes, MOST_MICRO_TOKENS.get(machine.device.partition(":")[0], cpu_tokens))
    return 2 ** max(0, math.floor(math.log2(most / seq_len)))


def why_so_short(machine: Machine) -> str:
    """Why the run ends before its three minutes, and what would fill them."""
    return (
        f"{MANY_EPOCHS} epochs of {machine.training_tokens:,} tokens: this machine reads them in less than three "
        "minutes, and more of them teach ever less. A larger text fills the time: `gptlab data prepare fineweb-edu "
        "--hub-files 4` (0.5 GB), then `gptlab train --data fineweb-edu --data.hub-files 4`"
    )
