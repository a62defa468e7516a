"""`gptlab COMMAND ...`: finds the command and turns its end into an exit code. Imports nothing heavy."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import NoReturn

from gptlab.config.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    UserError,
    nearest_name,
    one_line,
    paths_of_the_user,
)

COMMANDS = {
    "train": ("gptlab.cli.train", "train a GPT, or resume a run (--resume); --list shows the recipes"),
    "plan": ("gptlab.cli.plan", "size up a run in advance: parameters, FLOPs, memory, steps, hours"),
    "data": ("gptlab.cli.data", "list | prepare | inspect a corpus"),
    "tokenizer": ("gptlab.cli.tokenizer", "train | eval a tokenizer"),
    "eval": ("gptlab.cli.eval", "measure a run: validation loss and bits per byte, or CORE"),
    "compare": ("gptlab.cli.compare", "which runs are better, by how much, and whether it may be noise"),
    "sweep": ("gptlab.cli.sweep", "train variants of a run, each with several seeds, and compare them"),
    "ladder": ("gptlab.cli.ladder", "train a recipe at several depths, and fit a power law"),
    "runs": ("gptlab.cli.runs", "list run folders, or delete some or their checkpoints (runs prune)"),
    "clean": ("gptlab.cli.clean", "free disk space that the cache and old checkpoints hold"),
    "report": ("gptlab.cli.report", "write what a run did: curves, samples, provenance (HTML, Markdown)"),
    "tour": ("gptlab.cli.tour", "walk through a run, from text to sample, with its own numbers"),
    "dash": ("gptlab.cli.dash", "show runs as a live page on this machine, with a box to prompt them"),
    "import": ("gptlab.cli.import_model", "hf | nanogpt: turn a model trained elsewhere into a run folder"),
    "sample": ("gptlab.cli.sample", "continue a text with a trained run"),
    "export": ("gptlab.cli.export", "write a trained model as a folder that transformers loads"),
    "lab": ("gptlab.cli.lab", "experiments: change something, train, learn whether it is better"),
    "completion": ("gptlab.cli.completion", "bash | zsh | fish: a script that completes commands and arguments"),
    "bench": ("gptlab.cli.bench", "measure this machine: peak FLOP/s, tokens/s, MFU, time of each part"),
}

TOGETHER = ("train", "eval", "sample")
"""Commands that several processes, started by torchrun, run together."""

READERS = ("compare", "runs", "clean", "report", "tour", "completion")
"""Commands that never load torch, and skip the preparation for it: 40 of the 300 ms of a report."""

HELP = f"""\
usage: gptlab COMMAND [ARGUMENTS]

A pretraining system for small GPTs, judged by validation bits per byte.

commands:
{chr(10).join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())}

options:
  -h, --help   this text; `gptlab COMMAND --help` has the arguments of a command
  --version    the version of gptlab

examples:
  gptlab train                             three minutes, sized to this machine
  gptlab train --data notes/ --minutes 20  on your own text files
  gptlab train quickstart --depth 6 --steps 500 --model.window-pattern SSSL
  gptlab train --resume runs/NAME          continue a stopped run
  gptlab train --from runs/NAME --seed 7   repeat a run with one field changed
  gptlab sample runs/NAME --prompt "def main("

exit codes: 0 finished, 2 wrong usage, input or environment, 3 training failed,
            75 preempted (--resume continues)
"""


def entry_point() -> None:
    """The console script."""
    _open_standard_streams()
    gc.set_threshold(100_000)  # With Python's default of 700, importing torch takes 0.4 s longer.
    code = main(sys.argv[1:])
    if code == EXIT_PREEMPTED:  # The interpreter would wait for threads, such as of a compiler: minutes.
        os._exit(code)
    gc.freeze()  # Otherwise the interpreter collects the garbage of torch's compiler before it exits: 0.9 s.
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open closed standard streams (`gptlab ... >&-`) on the null device. Otherwise Python has no sys.stdout, and the
    next file to be opened would get its number, and everything that libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # A terminal may lack a character of a name or a curve; stderr escapes those already.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. A UserError becomes one line on stderr and exit code 2."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE") else "0"  # a RANK alone is another program's
    try:
        with paths_of_the_user(), nullcontext() if rank == "0" else _silent():
            try:
                code = _dispatch(list(argv))
            except SystemExit as end:  # after --help
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()  # A closed pipe shows here, not at interpreter exit.
        return code
    except UserError as error:
        print(f"gptlab: error: {'' if rank == '0' else f'rank {rank}: '}{one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _output_lost(error)


def _output_lost(error: OSError) -> int:
    """The exit code where stdout was closed or its disk is full. Raises any other error again."""
    is_closed = isinstance(error, BrokenPipeError)  # `gptlab train --list | head -1` is no error
    if not is_closed and (error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO)):
        raise error
    # Buffered output must not raise again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_closed:
        return EXIT_BROKEN_PIPE
    print(f"gptlab: error: cannot write the output: {error.strerror}", file=sys.stderr)
    return EXIT_USAGE


@contextmanager
def _silent() -> Iterator[None]:
    """Of several processes, only rank 0 writes to stdout."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _refuse_several(name: str) -> NoReturn:
    """UserError on rank 0; the other processes exit silently with the same code."""
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(EXIT_USAGE)
    raise UserError(
        f"gptlab {name} runs in one process, but torchrun has started {os.environ['WORLD_SIZE']}: start it without "
        f"torchrun, which is for {', '.join(TOGETHER)}"
    )


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:]:
        argv = [*argv[1:], "--help"]
    name = argv[0] if argv else "--help"
    if name not in COMMANDS:
        return _without_command(name)
    if name not in TOGETHER and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        _refuse_several(name)
    if name not in READERS:
        from gptlab.runtime.hardware.cpu import prepare_torch

        prepare_torch()
    return importlib.import_module(COMMANDS[name][0]).main(argv[1:])


def _without_command(word: str) -> int:
    """--help and --version. UserError for a word that is no command."""
    if word in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if word == "--version":
        from gptlab import __version__

        print(f"gptlab {__version__}")
        return 0
    nearest = nearest_name(word, [*COMMANDS, "--help", "--version"])
    hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(COMMANDS)}"
    raise UserError(f"{word!r} is not a command: {hint}")
