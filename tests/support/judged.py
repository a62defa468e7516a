"""Candidates for the judge: models from patched source in the test's own process, and small programs that answer."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations.mutation import ROOT
from numpy.typing import NDArray
from torch import Tensor, nn
from written_runs import write_run

from gptlab.config.model import ModelConfig
from gptlab.config.run import RunConfig
from gptlab.data.prepare import prepare
from gptlab.data.rows import validation_rows
from gptlab.data.tokenizer.base import ByteTokenizer
from gptlab.lab.judge.judging import Audit, Baseline, Judged, examine, judge_run
from gptlab.lab.judge.questions import Questions
from gptlab.lab.judge.supervise import Limits
from gptlab.model.gpt import build_model
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.write import save_checkpoint

SEED = 11
MODEL = ModelConfig(vocab_size=257, seq_len=32, n_layer=2, n_embd=32, n_head=2, init="gpt2")
"""GPT-2's initial values: no weight begins at zero but biases."""
CPU = torch.device("cpu")
BASELINE = Baseline(config={"seed": SEED}, model=MODEL)
LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_bytes=2**28, output_bytes=2**22, processes=8)


class DrawnRows:
    """Rows of bytes drawn at random, as a RowSource."""

    def __init__(self, rows: int, seq_len: int) -> None:
        self.rows_per_epoch = rows
        self._tokens = np.random.default_rng(0).integers(0, 257, (rows, seq_len + 1))

    def read(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._tokens[indices, :-1], self._tokens[indices, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self._tokens.shape[1] - 1)


def questions(rows: int = 24, seq_len: int = MODEL.seq_len) -> Questions:
    return Questions(DrawnRows(rows, seq_len), ByteTokenizer(), seq_len, "f" * 24, None)


def questions_of(config: RunConfig) -> Questions:
    """Of the validation text of runs with this configuration."""
    data = prepare(config.data, config.tokenizer, console=Console(quiet=True))
    rows = validation_rows(data.val, config.model.seq_len, data.tokenizer.bos_id, config.eval.tokens)
    return Questions(rows, data.tokenizer, config.model.seq_len, data.fingerprint, config.eval.tokens)


def patched(file: str, old: str, new: str) -> types.ModuleType:
    """The module gptlab/FILE with a text replaced, executed; the real one stays as it is."""
    source = (ROOT / "gptlab" / file).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is not once in {file}"
    module = types.ModuleType("gptlab." + file.removesuffix(".py").replace("/", "."))
    exec(compile(source.replace(old, new), file, "exec"), module.__dict__)
    return module


def trained_model(config: ModelConfig = MODEL, code: str = "model/gpt.py", old: str = "", new: str = "") -> nn.Module:
    """A model of patched code with weights that are not the initial ones, in evaluation mode."""
    build = patched(code, old, new).build_model if old else build_model
    model = build(config, device=CPU, compute_dtype=torch.float32, seed=SEED).eval()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    return model


Initial = Callable[[nn.Module, ModelConfig, int], Iterator[tuple[str, Tensor]]]


class Candidate:
    """What `app/answers.py` does, without pipes: the methods of `Answering`."""

    def __init__(self, model: nn.Module, initial: Initial | None) -> None:
        self._model, self._initial = model, initial

    @torch.no_grad()
    def logits(self, tokens: NDArray[np.int32], entries: int) -> Iterator[NDArray[np.float32]]:
        yield self._model(torch.from_numpy(tokens.astype(np.int64))).numpy().reshape(-1, entries)

    def initial_weights(self, seed: int, shapes: Mapping[str, object]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        initial = self._initial or importlib.import_module("gptlab.model.init").initial_weights
        return ((name, values.numpy()) for name, values in initial(self._model, self._model.config, seed))


def begin(make: Callable[[], nn.Module], initial: Initial | None) -> Callable[[], AbstractContextManager[Candidate]]:
    """Fresh candidates; each has a model of its own."""

    @contextmanager
    def fresh() -> Iterator[Candidate]:
        yield Candidate(make(), initial)

    return fresh


def examined(make: Callable[[], nn.Module], initial: Initial | None = None) -> NDArray[np.float64]:
    """The nats of every position, once all audits are passed. Who looks ahead in the second half of rows only is missed
    by 22 cuts once in 10^6 times."""
    return examine(begin(make, initial), questions(120), {}, BASELINE, Audit(rows=20))[0]


# --- programs

HONEST = """
import array, os, random, struct, sys
run, LENGTH, ENTRIES = sys.argv[1], 32, 257
source, sink = sys.stdin.buffer, sys.stdout.buffer
HEADER = struct.Struct("<4sQII")
def entry(token):
    # The logits after a token: drawn once for each, from its number.
    return array.array("f", [draw / 64 for draw in random.Random(token).randbytes(ENTRIES)])
table = [entry(token) for token in range(ENTRIES)]
def answer(row):
    return b"".join(table[token].tobytes() for token in row)
def write(kind, number, first, second, rest):
    sink.write(HEADER.pack(kind, number, first, second) + rest)
    sink.flush()
write(b"RDY1", 0, 0, 0, b"")
while header := source.read(HEADER.size):
    kind, number, rows, length = HEADER.unpack(header)
    if kind == b"DRW1":
        draws = random.Random(str((rows, length)))
        values = array.array("f", (draws.gauss(0, 1) for _ in range(512)))
        name = b"table"
        write(b"TNS1", number, len(name), 1, name + struct.pack("<I", 512) + values.tobytes())
        write(b"END1", number, 0, 0, b"")
        continue
    tokens = array.array("i", source.read(4 * rows * length))
    logits = b"".join(answer(tokens[row * length : (row + 1) * length]) for row in range(rows))
    write(b"LGT1", number, rows, length, struct.pack("<I", ENTRIES) + logits)
"""
"""Answers with a table of pairs of tokens; needs nothing but the standard library, so it starts at once."""


def written_candidate(folder: Path, bpb: Sequence[float] = (5.0, 4.0), **fields: Any) -> Path:
    """A run folder with one checkpoint, whose one weight is the table's, and which reports these bits per byte."""
    run = write_run(folder, bpb, model__seq_len=MODEL.seq_len, seed=SEED, **fields)
    save_checkpoint(run / "checkpoints", 10, model={"table": torch.zeros(512)}, optimizer={}, state={"step": 10})
    return run


def judged_program(
    folder: Path,
    *replacements: tuple[str, str],
    run: Path | None = None,
    baseline: dict[str, object] | None = None,
    hidden: tuple[Path, ...] = (),
    cache: Path | None = None,
    answer_seconds: float = 15,
) -> Judged:
    """What the judge says of a run that the honest program answers for, with texts of it replaced. `baseline`: fields
    of the baseline's config.json that the run does not have."""
    program = HONEST
    for old, new in replacements:
        assert program.count(old) == 1, old
        program = program.replace(old, textwrap.dedent(new))
    path = folder / "answers.py"
    path.write_text(program)
    run = run or written_candidate(folder / "run")
    config = json.loads((run / "config.json").read_text()) | (baseline or {})
    return judge_run(
        run, questions(), tree=folder, limits=LIMITS, hidden=hidden, cache=cache or folder / "none",
        baseline=Baseline(config=config, model=MODEL), command=[sys.executable, "-I", "-S", str(path)],
        audit=Audit(rows=8, start_seconds=15, answer_seconds=answer_seconds), log=folder / "log.txt",
    )  # fmt: skip
