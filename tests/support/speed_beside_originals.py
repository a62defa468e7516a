"""How fast gptlab's steps are beside those of nanoGPT and nanochat. The programs take turns.

    git clone https://github.com/karpathy/nanoGPT && git clone https://github.com/karpathy/nanochat
    python -m tests.support.speed_beside_originals --nanogpt nanoGPT --nanochat nanochat

Both are read at the commits named below, whatever is checked out: their own model and optimizer, on random tokens.
nanochat is compiled, as by its program. nanoGPT is not on a CPU, as its README says; in bfloat16 it runs within
torch.amp.autocast, as its program does on GPUs. gptlab builds its recipe of the same shape, with the kernels and the
type of products that `gptlab train` chooses here.

With `--device cuda`, other shapes on an NVIDIA GPU, where all programs are compiled and wait for every fifth step.

For each shape, the two programs are processes that wait for their turns; of each turn the median counts. Reported are
the medians of all turns, and of gptlab's speed over the original's in each turn the median and the range. One thread of
work besides this on the same cores makes all of it worthless.

With --text, a file such as tiny Shakespeare, the whole command is timed too: nanoGPT's preparation and training with
its README's flags for a laptop, `gptlab train nanogpt/shakespeare-char-cpu` with an empty cache, and once more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

COMMITS = {
    "nanogpt": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",  # 2025-11-12
    "nanochat": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",  # 2026-07-03, the first that can compute in bfloat16 here
}
ROOT = Path(__file__).parents[2]
MIN_STEPS = 3  # of a turn


@dataclass(frozen=True)
class Case:
    original: str
    recipe: str
    n_layer: int
    n_embd: int
    n_head: int
    vocab_size: int
    seq_len: int
    rows: int
    dtype: str
    dropout: float = 0.0
    micro_batches: int = 1
    device: str = "cpu"

    @property
    def at_once(self) -> int:
        """Steps between two waits for the device."""
        return 1 if self.device == "cpu" else 5

    def __str__(self) -> str:
        rows = f"{self.micro_batches} x " * (self.micro_batches > 1) + str(self.rows)
        shape = f"{self.n_layer} x {self.n_embd}, vocabulary {self.vocab_size:,}, {rows} x {self.seq_len} tokens"
        return f"{self.original}, {shape}, {self.dtype}{f', dropout {self.dropout}' if self.dropout else ''}"


_NANOCHAT = ("nanochat", "nanochat", 4, 256, 2, 8192, 512, 32)
_NANOGPT = ("nanogpt", "nanogpt/shakespeare-char", 6, 384, 6, 65, 256, 16)
CASES = (
    Case(*_NANOCHAT, "bfloat16"),
    Case(*_NANOCHAT, "float32"),
    Case(*_NANOGPT, "bfloat16"),
    Case(*_NANOGPT, "float32"),
    Case(*_NANOGPT, "bfloat16", dropout=0.2),
    Case(*_NANOGPT, "float32", dropout=0.2),
    Case("nanogpt", "nanogpt/shakespeare-char-cpu", 4, 128, 4, 65, 64, 12, "float32"),
)
_GPU = {"dtype": "bfloat16", "device": "cuda"}
GPU_CASES = (
    Case("nanochat", "nanochat", 12, 768, 6, 32768, 2048, 32, micro_batches=8, **_GPU),
    Case("nanogpt", "nanogpt/gpt2-124m", 12, 768, 12, 50304, 1024, 12, micro_batches=40, **_GPU),
    Case("nanogpt", "nanogpt/shakespeare-char", 6, 384, 6, 65, 256, 64, dropout=0.2, **_GPU),
)


# ---- one program: it says when it is ready, and then makes steps for the seconds that each line asks for


def steps_of_nanochat(case: Case) -> Callable[[], object]:
    import torch
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(
        sequence_len=case.seq_len, vocab_size=case.vocab_size, n_layer=case.n_layer, n_head=case.n_head,
        n_kv_head=case.n_head, n_embd=case.n_embd, window_pattern="L",
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=case.device)
    model.init_weights()
    optimizer = model.setup_optimizer()
    compiled = torch.compile(model, dynamic=False)

    def step() -> None:
        for _ in range(case.at_once):
            for _ in range(case.micro_batches):
                rows = torch.randint(case.vocab_size, (case.rows, case.seq_len + 1), device=case.device)
                loss = compiled(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
                (loss / case.micro_batches).backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
        loss.item()

    return step


def steps_of_nanogpt(case: Case) -> Callable[[], object]:
    import torch
    from model import GPT, GPTConfig

    config = GPTConfig(
        block_size=case.seq_len, vocab_size=case.vocab_size, n_layer=case.n_layer, n_head=case.n_head,
        n_embd=case.n_embd, dropout=case.dropout, bias=False,
    )  # fmt: skip
    model = GPT(config).to(case.device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), case.device)
    narrow = case.dtype == "bfloat16"
    passes = model if case.device == "cpu" else torch.compile(model)

    def step() -> None:
        for _ in range(case.at_once):
            for _ in range(case.micro_batches):
                rows = torch.randint(case.vocab_size, (case.rows, case.seq_len + 1), device=case.device)
                with torch.amp.autocast(case.device, dtype=torch.bfloat16) if narrow else contextlib.nullcontext():
                    _, loss = passes(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
                (loss / case.micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def steps_of_gptlab(case: Case) -> Callable[[], object]:
    from gptlab.runtime.hardware.cpu import prepare_torch

    prepare_torch()  # before torch is imported, as the command does
    from gptlab.bench.timing import made_up_run, whole_steps
    from gptlab.config.load import apply_overrides
    from gptlab.config.recipes import configure
    from gptlab.runtime.hardware.place import place_of
    from gptlab.training.compilation import warm_up

    fields = {
        "model.vocab_size": case.vocab_size, "model.seq_len": case.seq_len, "model.dropout": case.dropout,
        "batch.total_tokens": case.micro_batches * case.rows * case.seq_len, "batch.micro_sequences": case.rows,
        "runtime.device": case.device, "runtime.dtype": case.dtype,
    }  # fmt: skip
    if case.original == "nanochat":
        fields["model.window_pattern"] = "L"
    depth = case.n_layer if case.original == "nanochat" else None
    config = apply_overrides(configure(case.recipe, depth=depth), fields)
    model = config.model
    assert (model.n_layer, model.n_embd, model.n_head) == (case.n_layer, case.n_embd, case.n_head), model
    warn = partial(print, file=sys.stderr)
    state, passes = made_up_run(config, place_of(config), warn)
    if case.device != "cpu":
        warm_up(state, passes, config, config.eval_sequences, warn)
    return partial(whole_steps, state, passes.loss_sum, config, case.at_once)


def take_turns(case: Case, program: str) -> None:
    """Lines of standard input are the seconds of a turn; answered with the milliseconds of a step, each time that the
    device was waited for."""
    answers, sys.stdout = sys.stdout, io.StringIO()  # the originals print
    steps = {"nanochat": steps_of_nanochat, "nanogpt": steps_of_nanogpt, "gptlab": steps_of_gptlab}
    step = steps[program](case)
    from gptlab.training.step import quiet_garbage

    with quiet_garbage():
        step()
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            end, times_ms = time.perf_counter() + float(line), list[float]()
            while len(times_ms) < MIN_STEPS or time.perf_counter() < end:
                began = time.perf_counter()
                step()
                times_ms.append(1e3 * (time.perf_counter() - began) / case.at_once)
            print(json.dumps(times_ms), file=answers, flush=True)
    os._exit(0)  # the loader of gptlab reads ahead


# ---- both


class Program:
    """A process that makes steps of `case` when it is asked to."""

    def __init__(self, case: Case, program: str, sources: Path) -> None:
        command = [sys.executable, "-m", "tests.support.speed_beside_originals", "--turns-of", program]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(sources)]), "NANOCHAT_DTYPE": case.dtype,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*command, json.dumps(asdict(case))], cwd=ROOT, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.answer()
        self.turn(0)

    def answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            sys.exit(f"{self.process.args} ended with exit code {self.process.wait()}")
        return line

    def turn(self, seconds: float) -> float:
        """Milliseconds of a step."""
        assert self.process.stdin is not None
        print(seconds, file=self.process.stdin, flush=True)
        return statistics.median(json.loads(self.answer()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare_steps(case: Case, sources: Path, rounds: int, seconds: float) -> None:
    programs = [Program(case, name, sources) for name in (case.original, "gptlab")]
    try:
        turns = [[program.turn(seconds) for program in programs] for _ in range(rounds)]
    finally:
        for program in programs:
            program.end()
    original, ours = (statistics.median(times) for times in zip(*turns, strict=True))
    ratios = sorted(original / ours for original, ours in turns)
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"| {case} | {original:,.1f} ms | {ours:,.1f} ms | {spread} |", flush=True)


def compare_commands(nanogpt: Path, text: Path) -> None:
    """Seconds of the whole command, from preparation to the last evaluation."""
    data = nanogpt / "data/shakespeare_char"
    (data / "input.txt").write_bytes(text.read_bytes())
    flags = {
        "device": "cpu", "compile": False, "eval_iters": 20, "log_interval": 1, "block_size": 64, "batch_size": 12,
        "n_layer": 4, "n_head": 4, "n_embd": 128, "max_iters": 2000, "lr_decay_iters": 2000, "dropout": 0.0,
    }  # fmt: skip
    training = ["train.py", "config/train_shakespeare_char.py", *(f"--{name}={value}" for name, value in flags.items())]
    original = seconds_of(nanogpt, [str(data / "prepare.py")]) + seconds_of(nanogpt, training)
    with tempfile.TemporaryDirectory() as folder:
        recipe = ["-m", "gptlab", "train", "nanogpt/shakespeare-char-cpu", "--data", str(text.resolve()), "--run-dir"]
        cache = {"GPTLAB_CACHE": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        first, second = (seconds_of(Path(folder), [*recipe, f"{folder}/{run}"], cache) for run in ("first", "second"))
    print(f"| the whole command | {original:.1f} s | {first:.1f} s, then {second:.1f} s | {original / first:.2f} |")


def seconds_of(folder: Path, arguments: list[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | (environment or {}), check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - began


def read_original(clone: Path, commit: str, folder: Path) -> None:
    """The files of a clone at this commit, in a folder."""
    for command in (
        ["clone", "--shared", "--no-checkout", str(clone), str(folder)], ["-C", str(folder), "checkout", commit],
    ):  # fmt: skip
        done = subprocess.run(["git", *command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"cannot read commit {commit} in {clone}: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, commit in COMMITS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"a clone with {commit[:12]}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="[cpu]")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each program [7]")
    parser.add_argument("--seconds", type=float, default=4, help="of a turn, which has at least three steps [4]")
    parser.add_argument("--text", type=Path, metavar="FILE", help="time whole commands too, on this text")
    parser.add_argument("--turns-of", help=argparse.SUPPRESS)
    parser.add_argument("case", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns_of:
        take_turns(Case(**json.loads(arguments.case)), arguments.turns_of)
    clones = {name: vars(arguments)[name] for name in COMMITS if vars(arguments)[name] is not None}
    if not clones:
        parser.error("name at least one clone")
    print("| a step of | original | gptlab | gptlab is faster by |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        sources = {name: Path(folder, name) for name in clones}
        for name, clone in clones.items():
            read_original(clone, COMMITS[name], sources[name])
        for case in CASES if arguments.device == "cpu" else GPU_CASES:
            if case.original in sources:
                compare_steps(case, sources[case.original], arguments.rounds, arguments.seconds)
        if arguments.text is not None and "nanogpt" in sources:
            compare_commands(sources["nanogpt"], arguments.text)


if __name__ == "__main__":
    main()
