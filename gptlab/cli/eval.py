"""`gptlab eval RUN`: validation loss and bits per byte of a trained run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gptlab.cli.arguments import parse
from gptlab.cli.load_arguments import LoadArguments
from gptlab.config.errors import require_positive

if TYPE_CHECKING:
    from gptlab.cli.loaded_run import LoadedRun
    from gptlab.eval.bits_per_byte import Evaluation
    from gptlab.runtime.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArguments(LoadArguments):
    tokens: int | None = None
    """Target tokens of the validation set, at most; always the same ones. None: as in the run's configuration."""
    micro_sequences: int | None = None
    """Rows in one pass. Changes the speed, not the result. None: as in the run's configuration."""

    def __post_init__(self) -> None:
        require_positive("--tokens", self.tokens)
        require_positive("--micro-sequences", self.micro_sequences)


def main(argv: Sequence[str]) -> int:
    """Prints `key: value` lines on stdout; everything else goes to stderr."""
    arguments = parse(
        EvalArguments,
        argv,
        prog="gptlab eval",
        description="Measure a run on its validation set: loss (nats/token) and bits per byte.",
    )
    from gptlab.runtime.console import Console

    with Console(stream=sys.stderr) as console:
        run = arguments.load(console)
        result = evaluate_run(run, tokens=arguments.tokens, micro_sequences=arguments.micro_sequences, console=console)
    print(f"run: {run.directory.path}")
    print(f"step: {run.step}")
    print(f"val_loss: {result.val_loss:.6f}")
    print(f"val_bpb: {result.val_bpb:.6f}")
    print(f"target_tokens: {result.target_tokens}")
    print(f"target_bytes: {result.target_bytes}")
    return 0


def evaluate_run(
    run: LoadedRun, *, tokens: int | None = None, micro_sequences: int | None = None, console: Console
) -> Evaluation:
    """The validation set of the run's corpus, in the run's own tokens; None: as configured.

    Warns where the corpus is no longer what it was at training. UserError where it cannot be read.
    """
    from gptlab.data.prepare import prepare
    from gptlab.data.rows import validation_rows
    from gptlab.eval.bits_per_byte import evaluate

    config = run.config
    # The run's tokenizer as it lies there: one trained anew, on text that has changed, would have other tokens.
    kept = replace(config.tokenizer, path=str(run.directory.tokenizer_path))
    prepared = prepare(config.data, kept, console=console)
    trained_on = _data_fingerprint(run)
    if trained_on not in (None, prepared.fingerprint):
        console.warn(
            f"the corpus {', '.join(config.data.source)} is not what it was when this run was trained: the numbers do "
            "not compare with the run's own, and text that it was trained on may be among the validation text"
        )
    rows = validation_rows(prepared.val, config.model.seq_len, run.tokenizer.bos_id, tokens or config.eval.tokens)
    return evaluate(
        run.model,
        rows,
        run.tokenizer.token_bytes,
        device=run.device,
        micro_sequences=micro_sequences or config.eval.micro_sequences or config.batch.micro_sequences,
    )


def _data_fingerprint(run: LoadedRun) -> object:
    """What run.json remembers of the training data; None where it does not."""
    if not run.directory.provenance_path.exists():
        return None
    return run.directory.read_provenance().get("data_fingerprint")
