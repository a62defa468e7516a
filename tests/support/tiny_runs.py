"""Runs that take a fraction of a second, and what two runs must have in common to count as the same run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from torch import Tensor

import gptlab
import gptlab.training.compilation
from gptlab.app.run import run_session
from gptlab.app.run.run_request import TrainArguments
from gptlab.app.run.session import Session, open_session
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.main import main
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog, read_metrics
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.state import TrainState

Flags = dict[str, Any]

FLAGS: Flags = {
    "model.n_layer": 1, "model.n_embd": 32, "model.n_head": 2, "model.seq_len": 32, "model.vocab_multiple": 32,
    "model.window_pattern": "SL", "model.window_tokens": None, "model.dropout": 0.1, "tokenizer.kind": "byte",
    "data.val_fraction": 0.15,
    "batch.micro_sequences": 4, "batch.total_tokens": 2 * 4 * 32, "steps": 12,
    "schedule.warmup_fraction": 0.1, "optim.grad_clip": 1.0, "eval.every_steps": 3, "eval.every_seconds": None,
    "eval.micro_sequences": 20,
    "checkpoint.every_steps": 4, "checkpoint.every_seconds": None, "sample.prompts": ["the ", "fox"],
    "sample.every_steps": 6, "sample.every_seconds": None, "sample.max_tokens": 3,
    "runtime.device": "cpu", "runtime.dtype": "float32",
    "runtime.compile": "off", "runtime.threads": 1, "log.report": False,
}  # fmt: skip
"""Two micro-batches a step, about eight steps an epoch, dropout on; at step 12 everything is due at once. One layer:
tests in which layers matter take two."""

CLOCK_FIELDS = {"step_seconds", "train_seconds", "core_seconds", "tokens_per_second", "mfu"}
"""What a metrics line may have otherwise than another run's."""

_WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "père", "Noël", "naps", "→"]


class Killed(BaseException):
    """Stands for a SIGKILL within the test's own process."""


def write_corpus(folder: Path, *, documents: int = 20) -> Path:
    """Documents of 3 to 40 words, drawn by SHA-256: the same text under every Python."""
    folder.mkdir(parents=True)
    with (folder / "documents.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for number in range(documents):
            draws = [byte for i in range(2) for byte in hashlib.sha256(f"{number}/{i}".encode()).digest()]
            words = [_WORDS[draw % len(_WORDS)] for draw in draws[: 3 + draws[-1] % 38]]
            file.write(json.dumps({"text": " ".join(words) + "\n"}) + "\n")
    return folder


def write_bundle(folder: Path) -> Path:
    """A CORE bundle of three tasks, one of each kind, in the layout of DCLM's."""
    words = [word for word in _WORDS if word.isascii()]
    choice = [
        {"query": f"the {a}", "choices": [b, f"{b} {a}", "x"], "gold": i % 3}
        for i, (a, b) in enumerate(zip(words, words[3:], strict=False))
    ]
    schema = [
        {"context_options": [a, f"{a} {b}"], "continuation": f"over the {b}.", "gold": i % 2}
        for i, (a, b) in enumerate(pairwise(words))
    ]
    language = [{"context": f" the {a} ", "continuation": b} for a, b in pairwise(words)]
    core = """\
icl_tasks:
- {label: pick, dataset_uri: a/pick.jsonl, num_fewshot: [2], icl_task_type: multiple_choice, \
continuation_delimiter: "\\nAnswer: "}
- {label: fit, dataset_uri: b/fit.jsonl, num_fewshot: [0], icl_task_type: schema}
- {label: go on, dataset_uri: b/go-on.jsonl, num_fewshot: [1], icl_task_type: language_modeling, has_categories: true}
"""
    table = "Eval Task,Task Category,Random baseline\npick,a,25\nunused,a,3\nfit,b,50\ngo on,b,0\n"
    for name, examples in (("a/pick", choice), ("b/fit", schema), ("b/go-on", language)):
        path = folder / "eval_data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    (folder / "core.yaml").write_text(core, encoding="utf-8")
    (folder / "eval_meta_data.csv").write_text(table, encoding="utf-8")
    return folder


def arguments(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> list[str]:
    """The command line of `FLAGS` and `changes`, on the corpus in `folder`, into the run folder `name`."""
    flags = FLAGS | {"data.source": [folder / "corpus"], "data.cache_dir": folder / "cache", "run_dir": folder / name}
    words: list[str] = ["quickstart", "--depth", "1"]  # With a depth, the recipe needs no measurement.
    flags |= changes or {}
    if "minutes" in flags:
        del flags["steps"]
    for field, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{field.replace('_', '-')}", *map(str, values)]
    return words


def make_config(folder: Path, name: str, **changes: Any) -> RunConfig:
    """The same as a value; `changes` have dots written as two underscores."""
    words = arguments(folder, name, {field.replace("__", "."): value for field, value in changes.items()})
    return read_request(words, TrainArguments, prog="gptlab train", description="").config(
        lambda _: Machine(device="cpu", flops_per_second=1e11)
    )


def train(folder: Path, name: str, **changes: Any) -> Path:
    """A finished run from Python; its folder."""
    assert gptlab.train(make_config(folder, name, **changes)).exit_code == 0
    return folder / name


def open_tiny(folder: Path, **changes: Any) -> Session:
    """A session of which no run is made."""
    config = make_config(folder, "never-made", **changes)
    with Console() as console:
        return open_session(config, place_of(config), console)


def weights_of(state: TrainState) -> dict[str, Tensor]:
    """The live weights, by name."""
    return {name: parameter.detach() for name, parameter in state.model.named_parameters()}


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Weights, moments and generators of one process, by name: live, as a checkpoint holds them."""
    return {one.name: one.tensor for kind in state.slices() for one in kind}


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The metrics lines of one kind."""
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def command(argv: Sequence[object]) -> tuple[int, str, str]:
    """`gptlab ARGV` in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def start(argv: Sequence[object], *, prelude: str = "") -> Forked:
    """`gptlab ARGV` in a process of its own, after the Python statements of `prelude`."""

    def work() -> int:
        exec(prelude, {"__name__": "prelude"})
        return main([str(word) for word in argv])

    return Forked(work)


@contextlib.contextmanager
def at_line(kind: str, step: int, action: Callable[[], None], *, before: bool = False) -> Iterator[None]:
    """Within the context, `action` is called right after (or before) the first metrics line of this kind and step."""
    write, lines = MetricsLog.write, []

    def write_and_act(log: MetricsLog, line_kind: Any, /, **fields: object) -> None:
        if not before:
            write(log, line_kind, **fields)
        lines.append((line_kind, fields["step"]))
        if lines[-1] == (kind, step) and lines.count((kind, step)) == 1:
            action()
        if before:
            write(log, line_kind, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "write", write_and_act)
        yield
    assert (kind, step) in lines, "the run never came to that line"


@contextlib.contextmanager
def killed_at(kind: str, step: int, *, before: bool = False) -> Iterator[None]:
    """Within the context, training ends right after (or before) the first metrics line of this kind and step."""

    def die() -> None:
        raise Killed

    with at_line(kind, step, die, before=before), pytest.raises(Killed):
        yield


class FakeClock:
    """Stands still by itself: a step takes one second, and each thing that is no training a hundred or more."""

    EVALUATION, SAMPLE, SAVE, WARM_UP = 100.0, 1_000.0, 10_000.0, 100_000.0
    now = 0.0

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[FakeClock]:
        """Within the context, time.perf_counter reads this clock."""
        clock = cls()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda: clock.now)
            clock._charge(patch, "gptlab.training.step.update", 1.0)
            clock._charge(patch, "gptlab.app.run.session.evaluate", cls.EVALUATION)
            clock._charge(patch, "gptlab.eval.sampling.sample_text", cls.SAMPLE)
            clock._charge(patch, "gptlab.training.checkpoint.saver.save_checkpoint", cls.SAVE)
            warm_up = run_session._warm_up
            patch.setattr(run_session, "_warm_up", lambda *of_run: clock._charged(warm_up(*of_run)))
            yield clock

    def _charged(self, seconds: float) -> float:
        self.now += self.WARM_UP
        return seconds + self.WARM_UP

    def _charge(self, patch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
        work = pkgutil.resolve_name(name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            # What goes on in the background takes no time of the thread that reads this clock.
            self.now += seconds * (threading.current_thread() is threading.main_thread())
            return work(*args, **kwargs)

        patch.setattr(name, slow)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind, except what a clock or a place in a file decides."""

    lines: list[str]
    """metrics.jsonl; a line is its JSON text, and equal texts are equal bits."""
    tensors: dict[str, Tensor]
    """Weights, moments and generators of the last checkpoint."""
    state: dict[str, Any]
    """Its state.json, without the run's own name and folder."""
    summary: dict[str, Any]
    logged_steps: list[str]
    """Step numbers of log.txt, in order; a validation repeats one."""
    clock_goes_on: bool
    """Whether train_seconds only ever grows."""


def outcome(run: Path) -> Outcome:
    metrics = read_metrics(run / "metrics.jsonl")
    seconds = [float(str(line["train_seconds"])) for line in metrics if line["kind"] == "train"]
    last = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    return Outcome(
        lines=[json.dumps({key: value for key, value in line.items() if key not in CLOCK_FIELDS}) for line in metrics],
        tensors=last.model | last.optimizer,
        state=_without_clock({name: value for name, value in last.state.items() if name != "run"}),
        summary=_without_clock(json.loads((run / "summary.json").read_text())),
        logged_steps=[line.split()[1] for line in log if line.startswith("step ")],
        clock_goes_on=all(before < after for before, after in pairwise(seconds)),
    )


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What keeps two runs from being the same, bit for bit; empty where nothing does."""
    found = [f"line {a} vs {b}" for a, b in zip(one.lines, other.lines, strict=False) if a != b][:3]
    if len(one.lines) != len(other.lines):
        found.append(f"{len(one.lines)} lines vs {len(other.lines)}")
    if one.tensors.keys() != other.tensors.keys():
        return [*found, f"tensors {sorted(one.tensors.keys() ^ other.tensors.keys())}"]
    found += [name for name, tensor in one.tensors.items() if not _same_bits(tensor, other.tensors[name])]
    for name in ("state", "summary", "logged_steps", "clock_goes_on"):
        if getattr(one, name) != getattr(other, name):
            found.append(f"{name}: {getattr(one, name)} vs {getattr(other, name)}")
    return found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _without_clock(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out seconds, bytes, and figures made of them, at any depth."""
    clocks = ("seconds", "_bytes", "_mb", "mfu_percent", "off_clock")
    return {
        key: _without_clock(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if not key.endswith(clocks)
    }
