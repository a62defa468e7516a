"""`gptlab sample RUN`: continue a text with a trained run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, TextIO

from gptlab.cli.arguments.load_arguments import LoadArguments
from gptlab.cli.arguments.parser import parse
from gptlab.config.errors import UserError
from gptlab.config.fields import BelowOne, Limit, NotNegative, Positive, checked_dataclass, require
from gptlab.config.run import SampleConfig
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.console import CONTROLS

if TYPE_CHECKING:
    from gptlab.app.run.loaded_run import LoadedRun
    from gptlab.eval.continuation import Drawing


@checked_dataclass("--")
class SampleArguments(LoadArguments):
    prompt: tuple[str, ...] = ()
    """Text to continue. Several: "A" "B", or repeat the flag; with a leading dash: --prompt="-x". None: the prompts of
    the run, else the start of a document."""
    samples: Positive[int] = 1
    """Continuations of each prompt, drawn as one batch. The first N of M samples are those of N."""
    max_tokens: Positive[int] | None = None
    """Maximum tokens to generate for each prompt. None: as in the run's configuration."""
    temperature: NotNegative[float] | None = None
    """Softmax temperature. 0: always the likeliest token (greedy). None: as in the run's configuration."""
    top_k: NotNegative[int] | None = None
    """Sample from the N likeliest tokens. 0: all. None: as in the run's configuration."""
    top_p: Annotated[float, Limit(lambda p: 0 < p <= 1, "must be in (0, 1]", 1.0)] = 1.0
    """Of these, sample from the fewest tokens whose probabilities sum to at least P. 1: all."""
    min_p: BelowOne = 0.0
    """Of these, sample from tokens with at least P times the likeliest one's probability. 0: all."""
    seed: int | None = None
    """Random seed, combined with the prompt. None: the run's seed."""
    stop: bool = True
    """Stop where the model starts a new document."""
    heal: bool = True
    """Continue the prompt's bytes: its last tokens may be drawn again, as others that begin with the same bytes. With
    --no-heal its tokens stay as they are."""
    interactive: bool = False
    """Read prompts from the terminal, and continue each; /help lists what can be changed in between."""
    json: bool = False
    """Print one JSON object once all texts are sampled."""

    def __post_init__(self) -> None:
        require(self.seed is None or 0 <= self.seed < 2**63, "--seed", self.seed, "must be between 0 and 2^63 - 1", 0)

    def prompts(self, configured: SampleConfig, sampled: Sequence[str]) -> tuple[str, ...]:
        """`sampled`: the prompts that the run sampled itself."""
        return self.prompt or configured.prompts or tuple(sampled) or ("",)

    def drawing(self, configured: SampleConfig) -> Drawing:
        """The run's sample settings, with those given here."""
        from gptlab.eval.continuation import Drawing

        return Drawing(
            max_tokens=configured.max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=configured.temperature if self.temperature is None else self.temperature,
            top_k=configured.top_k if self.top_k is None else self.top_k or None,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_at_bos=self.stop,
            heal=self.heal,
        )


def main(argv: Sequence[str]) -> int:
    """Print each prompt with its continuations on stdout, as they are sampled; with several processes, once all are."""
    arguments = parse(
        SampleArguments,
        argv,
        prog="gptlab sample",
        description="Continue a text with a trained run, token by token.",
    )
    from gptlab.app.run.ranks import together
    from gptlab.eval.continuation import continue_text, text_of
    from gptlab.eval.sampling import shared
    from gptlab.model.kernels.ops import missing_decode_kernel
    from gptlab.runtime.hardware.memory import memory_errors_explained, smaller_model

    with together() as (group, console), memory_errors_explained(smaller_model):
        run = arguments.load(console, group)
        if group.is_main and (missing := missing_decode_kernel(run.device, run.model.compute_dtype)) is not None:
            console.warn(missing)
        drawing = arguments.drawing(run.config.sample)
        seed = run.config.seed if arguments.seed is None else arguments.seed
        if arguments.interactive:
            if group.size > 1 or arguments.json or arguments.prompt:
                raise UserError("--interactive asks one process for prompts: leave out torchrun, --json and --prompt")
            from gptlab.cli.interactive import converse

            return converse(run, drawing, show, samples=arguments.samples, seed=seed)
        prompts = arguments.prompts(run.config.sample, sampled_prompts(run))
        # All are set up before the first is printed, so that a prompt that cannot be encoded leaves no partial output.
        batches = [
            continue_text(run.model, run.tokenizer, prompt, drawing, samples=arguments.samples, seed=seed)
            for prompt in prompts
        ]
        texts = shared([text_of(tokens) for tokens in chain(*batches)], group)
    of_text = [prompt for prompt in prompts for _ in range(arguments.samples)]
    if group.is_main:
        with memory_errors_explained(smaller_model):
            if arguments.json:
                print(to_json(_samples(run, of_text, texts), indent=2))
            else:
                show(of_text, texts)
    return 0


def _samples(run: LoadedRun, prompts: Sequence[str], texts: Sequence[Iterable[str]]) -> dict[str, object]:
    """Each prompt, and the text that follows it."""
    drawn = [{"prompt": prompt, "text": "".join(pieces)} for prompt, pieces in zip(prompts, texts, strict=True)]
    return {"run": str(run.directory.path), "step": run.step, "samples": drawn}


def sampled_prompts(run: LoadedRun) -> list[str]:
    """The distinct prompts in the run's metrics, in order; empty if it has no samples yet."""
    from gptlab.runtime.records.metrics import read_metrics

    path = run.directory.metrics_path
    lines = read_metrics(path) if path.exists() else []
    return list(dict.fromkeys(str(line.get("prompt", "")) for line in lines if line.get("kind") == "sample"))


def show(prompts: Sequence[str], texts: Sequence[Iterable[str]]) -> None:
    for number, (prompt, pieces) in enumerate(zip(prompts, texts, strict=True)):
        write_stream(sys.stdout, (*(["---\n"] if number else []), prompt))
        write_stream(sys.stdout, pieces)
        write_stream(sys.stdout, ["\n"])


def write_stream(out: TextIO, pieces: Iterable[str]) -> None:
    """Write text as it is sampled: without control characters on a terminal, with ? for what `out` cannot encode."""
    encoding = out.encoding or "utf-8"
    for piece in pieces:
        text = piece.translate(CONTROLS) if out.isatty() else piece
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()
