"""The strategy of a run, and the model and optimizer that it distributes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gptlab.config.errors import ConfigError
from gptlab.config.run import RunConfig
from gptlab.model.gpt import GPT, build_model
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.hardware.rng import capture_rng, fold_seed, restore_rng, seed_everything
from gptlab.runtime.processes.distributed import Group
from gptlab.training.parallel.single import Single
from gptlab.training.parallel.strategy import Strategy, whole_optimizer


def build_strategy(
    config: RunConfig,
    group: Group,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    change_model: Callable[[GPT], None] | None = None,
    make_optimizer: Callable[[GPT, RunConfig], CombinedOptimizer] | None = None,
) -> Strategy:
    """Arguments as for `build_state`. What only several processes need is imported where it is needed."""
    if config.parallel.mode == "sharded" and group.size > 1:
        return _fully_sharded(config, group, device, compute_dtype)
    model = build_model(config.model, device=device, compute_dtype=compute_dtype, seed=config.seed)
    if change_model is not None:
        _change(model, change_model, config.seed, device)
    if group.size > 1 and not config.parallel.exact_any_world_size:
        from gptlab.training.parallel.zero import Zero

        return Zero(model, config, group)
    optimizer = (make_optimizer or whole_optimizer)(model, config)
    if config.parallel.exact_any_world_size:
        from gptlab.training.parallel.deterministic import Deterministic

        return Deterministic(model, optimizer, group, micro_batches=config.micro_batches)
    return Single(model, optimizer, group)


def _fully_sharded(config: RunConfig, group: Group, device: torch.device, compute_dtype: torch.dtype) -> Strategy:
    if compute_dtype == torch.float16:
        why = 'its loss scale would have to be one over all ranks, which parallel.mode = "sharded" does not see to'
        raise ConfigError("runtime.dtype", "float16", why, "float32")
    from gptlab.training.parallel.fsdp import Fsdp  # 0.7 s of imports

    group.start_collectives(device, timeout_seconds=config.runtime.process_timeout_seconds)
    return Fsdp(config, group, device=device, compute_dtype=compute_dtype)


def _change(model: GPT, change: Callable[[GPT], None], seed: int, device: torch.device) -> None:
    """Let `change` draw from generators that depend on the run's seed alone, and that nothing else draws from."""
    generators = capture_rng(device)
    seed_everything(fold_seed(seed, 1), device)
    change(model)
    restore_rng(generators, device)
    model.to(device)
