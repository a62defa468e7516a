"""`gptlab eval RUN`: validation loss and bits per byte of a trained run, or CORE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gptlab.cli.arguments.load_arguments import LoadArguments
from gptlab.cli.arguments.parser import parse
from gptlab.config.errors import UserError, require, require_positive
from gptlab.runtime.files.strict_json import to_json

if TYPE_CHECKING:
    from gptlab.app.loaded_run import LoadedRun
    from gptlab.data.tokens.shards import TokenSplit
    from gptlab.eval.bits_per_byte import Evaluation
    from gptlab.eval.core import CoreResult
    from gptlab.runtime.processes.distributed import Group
    from gptlab.runtime.records.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArguments(LoadArguments):
    tokens: int | None = None
    """Target tokens of the validation set, at most; always the same ones. None: as in the run's configuration."""
    micro_sequences: int | None = None
    """Rows in one pass. Changes the speed, not the result. None: as in the run's configuration."""
    core: bool = False
    """Measure CORE instead, which needs the evaluation bundle and no corpus."""
    core_dir: str | None = None
    """Folder of the evaluation bundle. None: as in the run's configuration."""
    core_examples: int | None = None
    """Examples of each CORE task, at most; 0: all. None: as in the run's configuration."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""

    def __post_init__(self) -> None:
        require_positive("--tokens", self.tokens)
        require_positive("--micro-sequences", self.micro_sequences)
        examples = self.core_examples
        require(examples is None or examples >= 0, "--core-examples", examples, "must not be negative", 0)


def main(argv: Sequence[str]) -> int:
    """Prints `key: value` lines on stdout; everything else goes to stderr."""
    arguments = parse(
        EvalArguments,
        argv,
        prog="gptlab eval",
        description="Measure a run on its validation set: loss (nats/token) and bits per byte; or on CORE.",
    )
    from gptlab.app.ranks import together
    from gptlab.runtime.hardware.out_of_memory import fewer_rows, memory_told, smaller_model

    with together() as (group, console):
        with memory_told(smaller_model):
            run = arguments.load(console, group)
        measure = _core if arguments.core else _validation
        rows = arguments.micro_sequences or run.config.eval_sequences
        with memory_told(lambda error: fewer_rows(error, rows)):
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
    """`key: value`, losses and accuracies with six decimals; each task of CORE with its accuracy against guessing."""
    for key, value in figures.items():
        if key == "tasks":
            for label, accuracy in value.items():
                yield f"{label}: {accuracy:.6f}"
                yield f"{label}_centered: {figures['centered'][label]:.6f}"
        elif key != "centered":
            yield f"{key}: {value:.6f}" if isinstance(value, float) else f"{key}: {value}"


def _validation(run: LoadedRun, arguments: EvalArguments, console: Console, group: Group) -> dict[str, Any]:
    result = evaluate_run(
        run, tokens=arguments.tokens, micro_sequences=arguments.micro_sequences, console=console, group=group
    )
    return {
        "val_loss": result.val_loss,
        "val_bpb": result.val_bpb,
        "target_tokens": result.target_tokens,
        "target_bytes": result.target_bytes,
        **({} if result.train_loss is None else {"train_loss": result.train_loss}),
    }


def _core(run: LoadedRun, arguments: EvalArguments, console: Console, group: Group) -> dict[str, Any]:
    result = core_of_run(
        run,
        core_dir=arguments.core_dir,
        examples=arguments.core_examples,
        micro_sequences=arguments.micro_sequences,
        console=console,
        group=group,
    )
    return {
        "tasks": dict(result.accuracy),
        "centered": {label: result.centered[label] for label in result.accuracy},
        "core_metric": result.core_metric,
    }


def core_of_run(
    run: LoadedRun,
    *,
    core_dir: str | None = None,
    examples: int | None = None,
    micro_sequences: int | None = None,
    console: Console,
    group: Group,
) -> CoreResult:
    """CORE of the loaded weights; None: as configured; no examples (0): all there are. UserError without a bundle."""
    from gptlab.data.corpus.core_bundle import core_folder
    from gptlab.eval.core import encode_tasks, gpt_logits, measure_core
    from gptlab.eval.core_tasks import find_bundle, read_tasks
    from gptlab.runtime.files.cache import cache_root

    config = run.config
    cache = cache_root(config.data.cache_dir)
    bundle = find_bundle(core_dir or config.eval.core_dir, cache)
    if bundle is None:
        raise UserError(
            f"no evaluation bundle in {core_folder(cache)}: `gptlab data prepare core` gets it, or give its --core-dir"
        )
    wanted = config.eval.core_examples if examples is None else examples or None
    tasks = encode_tasks(read_tasks(bundle, wanted), run.tokenizer, config.model.seq_len)
    questions = [question for task in tasks for question in task.questions][group.rank :: group.size]
    total_tokens = sum(len(option) for question in questions for option in question.options)
    with console.progress("CORE", total_tokens, "tokens") as progress:
        return measure_core(
            gpt_logits(run.model),
            tasks,
            device=run.device,
            max_pass_tokens=(micro_sequences or config.eval_sequences) * config.model.seq_len,
            module=run.model,
            advance=progress.advance,
            group=group,
        )


def evaluate_run(
    run: LoadedRun,
    *,
    tokens: int | None = None,
    micro_sequences: int | None = None,
    console: Console,
    group: Group,
) -> Evaluation:
    """The validation set of the run's corpus, in the run's own tokens, and training text where that is configured;
    None: as configured.

    Warns where the corpus is no longer what it was at training. UserError where it cannot be read.
    """
    from gptlab.app.same_run import require_same_run
    from gptlab.data.prepare import prepare
    from gptlab.data.rows import validation_rows
    from gptlab.eval.bits_per_byte import evaluate

    config = run.config
    # The run's tokenizer as it lies there: one trained anew, on text that has changed, would have other tokens.
    kept = replace(config.tokenizer, path=str(run.directory.tokenizer_path))
    if not group.is_main:
        group.barrier("data prepared")  # by rank 0; the others find it, or prepare it where they do not see its cache
    prepared = prepare(config.data, kept, console=console)
    if group.is_main:
        group.barrier("data prepared")
    require_same_run(config, {"data_fingerprint": prepared.fingerprint}, group)
    trained_on = _data_fingerprint(run)
    if trained_on not in (None, prepared.fingerprint):
        console.warn(
            f"the corpus {', '.join(config.data.source)} is not what it was when this run was trained: the numbers do "
            "not compare with the run's own, and text that it was trained on may be among the validation text"
        )

    def measure(split: TokenSplit, max_tokens: int | None) -> Evaluation:
        rows = validation_rows(split, config.model.seq_len, run.tokenizer.bos_id, max_tokens)
        return evaluate(
            run.model,
            rows,
            run.tokenizer.token_bytes,
            device=run.device,
            micro_sequences=micro_sequences or config.eval_sequences,
            group=group,
        )

    result = measure(prepared.val, tokens or config.eval.tokens)
    if config.eval.train_tokens is None:
        return result
    return replace(result, train_loss=measure(prepared.train, config.eval.train_tokens).val_loss)


def _data_fingerprint(run: LoadedRun) -> object:
    """What run.json remembers of the training data; None where it does not."""
    if not run.directory.provenance_path.exists():
        return None
    return run.directory.read_provenance().get("data_fingerprint")
