"""`gptlab plan --ranks 8,64,1024`: what each rank of a run on many GPUs would hold, send and save, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from gptlab.bench.many_ranks import STRATEGIES, RankPlan, StrategyName, plan_rank
from gptlab.bench.memory import activations_of_rows, model_on_meta
from gptlab.bench.training_rate import assumed_vocab_size
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.device import Platform

# Those of GPUs that have fast links; the compute type is bfloat16 on all of them.
PLATFORM: Platform = "cuda"
DTYPE = torch.bfloat16

# At which each rank writes its share of a checkpoint: a fast local disk, or a shared one's rate over the ranks.
DISK_BYTES_PER_SECOND = 1e9

_HEADINGS = (
    "depth", "parameters", "ranks", "strategy", "weights", "moments", "step", "activations", "all", "fits", "sent",
    "messages", "saved", "seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    depth: int
    parameters: int
    plan: RankPlan
    activations: int
    """Bytes of one micro-batch."""
    gpu_bytes: float

    @property
    def bytes(self) -> int:
        """More than there ever is at one time: activations go as gradients come."""
        return self.plan.held + self.activations

    @property
    def fits(self) -> bool:
        return self.bytes <= self.gpu_bytes

    @property
    def save_seconds(self) -> float:
        return self.plan.saved / DISK_BYTES_PER_SECOND

    def as_json(self) -> dict[str, object]:
        own = {"depth": self.depth, "parameters": self.parameters, "activations": self.activations}
        return own | asdict(self.plan) | {"bytes": self.bytes, "fits": self.fits, "save_seconds": self.save_seconds}

    def cells(self) -> tuple[str, ...]:
        plan = self.plan
        sizes = [_gigabytes(n) for n in (plan.weights, plan.moments, plan.working, self.activations, self.bytes)]
        return (
            str(self.depth), _billions(self.parameters), f"{plan.ranks:,}", plan.strategy, *sizes,
            "yes" if self.fits else "no", _gigabytes(sum(plan.sent.values())), f"{sum(plan.messages.values()):,}",
            _gigabytes(plan.saved), f"{self.save_seconds:.3g}",
        )  # fmt: skip


def rows(
    configs: Iterable[RunConfig],
    ranks: Sequence[int],
    *,
    gpu_gb: float,
    strategies: Sequence[StrategyName] = STRATEGIES,
) -> list[Row]:
    """A row for one rank alone, and one for each number of ranks and strategy that it allows."""
    made = []
    for config in configs:
        config = replace(config, model=replace(config.model, vocab_size=assumed_vocab_size(config)[0]))
        model = model_on_meta(config, DTYPE, PLATFORM)
        activations = activations_of_rows(model, config)
        for count in dict.fromkeys((1, *ranks)):
            several = count > (config.parallel.shard_ranks or count)
            for strategy in strategies:
                if (strategy == "single") == (count == 1) and (strategy != "hsdp" or several):
                    made.append(
                        Row(
                            depth=config.model.n_layer,
                            parameters=sum(parameter.numel() for parameter in model.parameters()),
                            plan=plan_rank(config, strategy, count, DTYPE, PLATFORM),
                            activations=activations,
                            gpu_bytes=gpu_gb * 1e9,
                        )
                    )
    return made


UNITS = (
    "GB (10^9 bytes) of one rank: `all` it holds in a step, in a GPU of --gpu-gb; `sent` in `messages` (collectives) a "
    f"step; `saved` in a checkpoint, in `seconds` at {DISK_BYTES_PER_SECOND / 1e9:g} GB/s."
)


def table(made: Sequence[Row]) -> str:
    """In Markdown, sizes in GB, with a sentence for each depth and number of ranks at which nothing fits."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *(row.cells() for row in made)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([text, *(f"\n{sentence}" for sentence in _what_would_fit(made))])


def _what_would_fit(made: Sequence[Row]) -> Iterable[str]:
    for depth in dict.fromkeys(row.depth for row in made):
        rows = [row for row in made if row.depth == depth]
        fitting = {row.plan.ranks for row in rows if row.fits}
        without = [f"{ranks:,}" for ranks in dict.fromkeys(row.plan.ranks for row in rows) if ranks not in fitting]
        if not without:
            continue
        first = min((row for row in rows if row.fits), key=lambda row: row.plan.ranks, default=None)
        would = (
            "fewer tokens in a micro-batch may, or tensor or pipeline parallelism: torchtitan has them, gptlab does not"
            if first is None
            else f"{first.plan.strategy} on {first.plan.ranks:,} does"
        )
        yield f"Depth {depth} does not fit with {', '.join(without)} rank{'s' * (without != ['1'])}: {would}."


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}" if count < 1e11 else f"{count / 1e9:,.0f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}B"
