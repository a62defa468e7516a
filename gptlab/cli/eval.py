"""`gptlab eval RUN`: validation loss and bits per byte of a trained run, or CORE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gptlab.cli.arguments.load_arguments import LoadArguments
from gptlab.cli.arguments.parser import parse
from gptlab.config.errors import NotNegative, Positive, checked_dataclass
from gptlab.runtime.files.plain_file import to_json

if TYPE_CHECKING:
    from gptlab.app.loaded_run import LoadedRun
    from gptlab.runtime.processes.distributed import Group
    from gptlab.runtime.records.console import Console


@checked_dataclass("--")
class EvalArguments(LoadArguments):
    tokens: Positive[int] | None = None
    """Maximum target tokens of the validation set; always the same ones. None: as in the run's configuration."""
    micro_sequences: Positive[int] | None = None
    """Rows in one pass. It changes the speed, not the result. None: as in the run's configuration."""
    core: bool = False
    """Measure CORE instead. It needs the evaluation bundle and no corpus."""
    core_dir: str | None = None
    """Folder of the evaluation bundle. None: as in the run's configuration."""
    core_examples: NotNegative[int] | None = None
    """Maximum examples of each CORE task. 0: all. None: as in the run's configuration."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""


def main(argv: Sequence[str]) -> int:
    """Print `key: value` lines on stdout; everything else goes to stderr."""
    arguments = parse(
        EvalArguments,
        argv,
        prog="gptlab eval",
        description="Measure a run on its validation set: loss (nats/token) and bits per byte; or on CORE.",
    )
    from gptlab.app.ranks import together
    from gptlab.runtime.hardware.memory import fewer_rows, memory_errors_explained, smaller_model

    with together() as (group, console):
        with memory_errors_explained(smaller_model):
            run = arguments.load(console, group)
        measure = _core if arguments.core else _validation
        rows = arguments.micro_sequences or run.config.eval_sequences
        with memory_errors_explained(lambda error: fewer_rows(error, rows)):
            figures = measure(run, arguments, console, group)
    if not group.is_main:
        return 0
    figures = {"run": str(run.directory.path), "step": run.step} | figures
    if arguments.json:
        print(to_json(figures, indent=2))
    else:
        print("\n".join(_lines(figures)))
    return 0


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """`key: value`, losses and accuracies with six decimals; of a CORE task also corrected for guessing."""
    for key, value in figures.items():
        if key == "tasks":
            for label, accuracy in value.items():
                yield f"{label}: {accuracy:.6f}"
                yield f"{label}_centered: {figures['centered'][label]:.6f}"
        elif key != "centered":
            yield f"{key}: {value:.6f}" if isinstance(value, float) else f"{key}: {value}"


def _validation(run: LoadedRun, arguments: EvalArguments, console: Console, group: Group) -> dict[str, Any]:
    from gptlab.app.loaded_run import evaluate_run

    result = evaluate_run(
        run, tokens=arguments.tokens, micro_sequences=arguments.micro_sequences, console=console, group=group
    )
    return {name: value for name, value in asdict(result).items() if value is not None}


def _core(run: LoadedRun, arguments: EvalArguments, console: Console, group: Group) -> dict[str, Any]:
    from gptlab.app.loaded_run import core_of_run

    result = core_of_run(
        run, core_dir=arguments.core_dir, examples=arguments.core_examples,
        micro_sequences=arguments.micro_sequences, console=console, group=group,
    )  # fmt: skip
    return {"tasks": result.accuracy, "centered": result.centered, "core_metric": result.core_metric}
