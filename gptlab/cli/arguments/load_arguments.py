"""Arguments that eval, sample and others share: which trained weights to load, and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlab.cli.arguments.parser import Positional
from gptlab.config.errors import UserError
from gptlab.config.run import DType

if TYPE_CHECKING:
    from gptlab.app.run.loaded_run import LoadedRun
    from gptlab.runtime.processes.distributed import Group
    from gptlab.runtime.records.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    run: Positional[str]
    """Folder of the run, such as runs/NAME."""
    checkpoint: str = "latest"
    """latest | best (lowest recorded validation loss) | the number of a step."""
    device: str | None = None
    """auto | cpu | cuda | cuda:N | mps. None: as in the run's configuration."""
    dtype: DType | None = None
    """Type of activations and matrix products. None: as in the run's configuration."""

    def load(self, console: Console, group: Group) -> LoadedRun:
        """The named run; see `load_run`. UserError if the ranks of `group` were given different arguments."""
        everybody = group.gather("arguments", repr(self))
        if group.is_main and (unlike := [rank for rank, one in enumerate(everybody) if one != everybody[0]]):
            raise UserError(f"rank {unlike[0]} was given other arguments than rank 0: start all ranks alike")
        from gptlab.app.run.loaded_run import load_run

        return load_run(
            self.run, checkpoint=self.checkpoint, device=self.device, dtype=self.dtype, console=console, group=group
        )
