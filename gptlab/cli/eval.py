"""`gptlab eval RUN`: validation loss and bits per byte of a trained run, CORE, or the bits per byte of any text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.cli.arguments.load_arguments import LoadArguments
from gptlab.cli.arguments.parser import parse
from gptlab.config.errors import UserError, cannot
from gptlab.config.fields import NotNegative, Positive, checked_dataclass
from gptlab.runtime.files.plain_file import listed_sources, open_plain, read_plain, to_json, write_text_atomic
from gptlab.runtime.records.run_directory import require_outside_runs

if TYPE_CHECKING:
    from gptlab.app.run.loaded_run import LoadedRun
    from gptlab.runtime.processes.distributed import Group
    from gptlab.runtime.records.console import Console


MAX_TEXT_BYTES = 64 * 2**20
"""Minutes of a GPU: longer texts are corpora, for --data.val-source."""


@checked_dataclass("--")
class EvalArguments(LoadArguments):
    text: str | None = None
    """Measure this text file (UTF-8) instead of the validation set."""
    data: tuple[str, ...] = ()
    """Where the corpus is now, if it was moved. A relative path of the run's own is one in the current folder."""
    val_source: tuple[str, ...] = ()
    """The same for corpora of --data.val-source."""
    html: str | None = None
    """With --text: a page to write, with each token colored by the bits that it took."""
    tokens: Positive[int] | None = None
    """Maximum target tokens, always the same ones. None: as in the run's configuration; of a text, all."""
    micro_sequences: Positive[int] | None = None
    """Rows in one pass. It changes the speed and, but for rounding, not the result. None: as in the run's
    configuration."""
    core: bool = False
    """Measure CORE instead. It needs the evaluation bundle and no corpus."""
    core_dir: str | None = None
    """Folder of the evaluation bundle. None: as in the run's configuration."""
    core_examples: NotNegative[int] | None = None
    """Maximum examples of each CORE task. 0: all. None: as in the run's configuration."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""

    def __post_init__(self) -> None:
        if self.html is not None and self.text is None:
            raise UserError("--html shows a text of your own: give it with --text FILE")
        if self.text is not None and self.core:
            raise UserError("--text and --core measure different things: give one of them")
        if (self.data or self.val_source) and (self.core or self.text is not None):
            raise UserError("--data and --val-source are the run's own corpus: leave them out with --text and --core")
        if not self.core and (self.core_dir is not None or self.core_examples is not None):
            raise UserError("--core-dir and --core-examples are of CORE: give them with --core")
        if self.core and self.tokens is not None:
            raise UserError("--tokens limits the validation set or a text; --core-examples limits --core")
        both_exist = self.text and self.html and os.path.exists(self.text) and os.path.exists(self.html)
        if both_exist and os.path.samefile(str(self.text), str(self.html)):
            raise UserError(f"--html {self.html} is the text itself: give the page another name")
        if self.html is not None:
            _require_place(Path(self.html))


def _require_place(page: Path) -> None:
    """UserError where the page would have no folder, be a file of a run, or replace what is not a page."""
    require_outside_runs(page, "--html")
    if not page.parent.is_dir():
        raise UserError(f"cannot write {page}: there is no folder {page.parent}: make it, or name a file elsewhere")
    if page.is_file():
        with cannot(f"read {page}"), open_plain(page) as file:
            start = file.read(100).lstrip().lower()
        if start and not start.startswith((b"<!doctype html", b"<html")):
            raise UserError(f"--html {page} exists and is not an HTML page: give the page another name")


def main(argv: Sequence[str]) -> int:
    """Print `key: value` lines on stdout; everything else goes to stderr."""
    arguments = parse(
        EvalArguments,
        argv,
        prog="gptlab eval",
        description="Measure a run on its validation set: loss (nats/token) and bits per byte. Or on a text of your "
        "own, or on CORE.",
    )
    from gptlab.app.run.ranks import together
    from gptlab.eval.bits_per_byte import rows_of_pass
    from gptlab.runtime.hardware.memory import fewer_rows, memory_errors_explained, smaller_model

    text = None if arguments.text is None else _read_text(Path(arguments.text))
    with together() as (group, console):
        with memory_errors_explained(smaller_model):
            run = arguments.load(console, group)
        rows = arguments.micro_sequences or rows_of_pass(run.config, run.device)
        with memory_errors_explained(lambda error: fewer_rows(error, rows)):
            if text is not None:
                figures = _text(run, arguments, text, rows, group)
            else:
                figures = (_core if arguments.core else _validation)(run, arguments, console, group)
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
    from gptlab.app.run.loaded_run import evaluate_run
    from gptlab.data.corpus.documents import NoCorpusError

    own = run.config.data
    source, val_source = listed_sources(arguments.data), listed_sources(arguments.val_source)
    data = replace(own, source=source or own.source, val_source=val_source or own.val_source)
    run = replace(run, config=replace(run.config, data=data))
    # It was not trained on this text, which may be a default that nobody has named.
    is_imported = "imported" in run.directory.recorded()
    try:
        result = evaluate_run(
            run, tokens=arguments.tokens, micro_sequences=arguments.micro_sequences, console=console, group=group
        )
    except NoCorpusError as error:
        raise UserError(f"{error}; if the run's corpus was moved, --data or --val-source says where it is") from None
    except UserError as error:
        if is_imported and run.tokenizer.kind == "char":  # which may lack characters of any text
            text = ", ".join((*data.source, *data.val_source))
            raise UserError(f"{error} (the text is {text}; name another with --data or --val-source)") from None
        raise
    figures = {name: value for name, value in asdict(result).items() if value is not None}
    return {"data": ", ".join(data.val_source or data.source), **figures} if is_imported else figures


def _read_text(path: Path) -> str:
    with cannot(f"read {path}"):
        content = read_plain(path, MAX_TEXT_BYTES)
    try:
        return content.decode("utf-8-sig")  # a byte-order mark is no text, as in a corpus
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start:,}") from None


def _text(run: LoadedRun, arguments: EvalArguments, text: str, rows: int, group: Group) -> dict[str, Any]:
    """The surprise of a text, and its page if one is asked for."""
    from gptlab.eval.surprise import measure_text, pieces
    from gptlab.report.surprise_page import surprise_page

    found = measure_text(
        run.model, run.tokenizer, text, seq_len=run.config.model.seq_len, device=run.device, micro_sequences=rows,
        max_tokens=arguments.tokens, group=group,
    )  # fmt: skip
    figures = {
        "text": arguments.text, "loss": found.loss, "bpb": found.bpb, "target_tokens": found.target_tokens,
        "target_bytes": found.target_bytes,
    }  # fmt: skip
    if arguments.html is None or not group.is_main:
        return figures
    facts = {"run": str(run.directory.path), "step": f"{run.step:,}", "tokens": f"{found.target_tokens:,}",
             "bytes": f"{found.target_bytes:,}", "nats per token": f"{found.loss:.4f}"}  # fmt: skip
    title = Path(str(arguments.text)).name
    page = surprise_page(pieces(found, run.tokenizer), title=title, bpb=found.bpb, facts=facts)
    write_text_atomic(Path(arguments.html), "".join(page))
    return figures | {"html": arguments.html}


def _core(run: LoadedRun, arguments: EvalArguments, console: Console, group: Group) -> dict[str, Any]:
    from gptlab.app.run.loaded_run import core_of_run

    result = core_of_run(
        run, core_dir=arguments.core_dir, examples=arguments.core_examples,
        micro_sequences=arguments.micro_sequences, console=console, group=group,
    )  # fmt: skip
    return {"tasks": result.accuracy, "centered": result.centered, "core_metric": result.core_metric}
