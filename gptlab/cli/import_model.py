"""`gptlab import hf | nanogpt PATH DIR`: turn a model trained elsewhere into a run folder for all other commands."""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.cli.arguments.parser import Positional, parse, run_subcommand
from gptlab.config.errors import UserError
from gptlab.config.run import DataConfig

PROG = "gptlab import"
HELP = """\
usage: gptlab import {hf,nanogpt} PATH DIR [ARGUMENTS]

  hf       a GPT-2 or NanoChat as transformers keeps it, or what `gptlab export`
           wrote: a folder, or a name on the Hugging Face hub (gpt2,
           gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME), which is downloaded
  nanogpt  nanoGPT's ckpt.pt, read so that nothing in it can run

DIR becomes a run folder for `gptlab sample`, `eval` and `export`, and for
`gptlab train --init-from DIR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfArguments:
    path: Positional[str]
    """hf: folder with config.json and weights, or a name on the hub. nanogpt: nanoGPT's ckpt.pt."""
    dir: Positional[str]
    """Folder of the new run."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer. None: the one beside the weights (nanogpt: of --meta), or GPT-2's."""
    data: tuple[str, ...] = DataConfig().source
    """Text whose last tenth, or 131,072 tokens of it, `gptlab eval DIR` measures on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGptArguments(HfArguments):
    meta: str | None = None
    """meta.pkl of the data that it was trained on, which maps tokens to characters. None: GPT-2's tokens."""


def main(argv: list[str]) -> int:
    return run_subcommand(argv, {"hf": _hf, "nanogpt": _nanogpt}, prog=PROG, usage=HELP)


def _hf(argv: list[str]) -> None:
    description = "Make a run folder of a model that transformers reads."
    arguments = parse(HfArguments, argv, prog=f"{PROG} hf", description=description)
    from gptlab.app.foreign_models import hf_model, require_free_run, write_run
    from gptlab.runtime.records.console import Console

    require_free_run(arguments.dir)
    with Console() as console:
        foreign = hf_model(arguments.path, arguments.tokenizer, console)
        write_run(foreign, arguments.dir, arguments.data, ["import", "hf", *argv], console)


def _nanogpt(argv: list[str]) -> None:
    description = "Make a run folder of a checkpoint of nanoGPT. Only tensors and plain values are read; nothing runs."
    arguments = parse(NanoGptArguments, argv, prog=f"{PROG} nanogpt", description=description)
    if arguments.meta is not None and arguments.tokenizer is not None:
        raise UserError("--meta and --tokenizer both define the tokens: give only one of them")
    from gptlab.app.foreign_models import nanogpt_model, require_free_run, write_run
    from gptlab.runtime.records.console import Console

    require_free_run(arguments.dir)
    with Console() as console:
        foreign = nanogpt_model(arguments.path, arguments.meta, arguments.tokenizer)
        write_run(foreign, arguments.dir, arguments.data, ["import", "nanogpt", *argv], console)
