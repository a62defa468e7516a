"""`gptlab train` from end to end: what a run computes, logs, prints and keeps, and how it ends."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    FLAGS,
    FakeClock,
    Flags,
    Outcome,
    arguments,
    at_line,
    command,
    differences,
    killed_at,
    lines_of,
    make_config,
    open_tiny,
    outcome,
    start,
    train,
)
from torch import Tensor

import gptlab
from gptlab.app.run import session as session_module
from gptlab.app.run.run_request import TrainArguments
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.main import main
from gptlab.config.errors import UserError
from gptlab.config.load import config_from_json
from gptlab.config.scaling import Machine
from gptlab.data.loader import StepBatch
from gptlab.data.tokenizer.tokenizer import load_tokenizer
from gptlab.eval.bits_per_byte import Evaluation
from gptlab.model.counting import flops_per_token
from gptlab.optim.schedule import lr_scale
from gptlab.runtime.hardware.place import place_of
from gptlab.training.checkpoint import saver as saver_module
from gptlab.training.checkpoint.format import CheckpointError
from gptlab.training.checkpoint.load import load_checkpoint, verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint
from gptlab.training.faults import TrainingFailed
from gptlab.training.loop import fit
from gptlab.training.step import Rates, gradients, update

STEPS, TOKENS_PER_STEP = FLAGS["steps"], FLAGS["batch.total_tokens"]
CLOSING_KEYS = [
    "val_bpb", "training_seconds", "total_seconds", "peak_vram_mb", "mfu_percent", "total_tokens_M", "num_steps",
    "num_params_M", "depth",
]  # fmt: skip


@pytest.fixture(scope="module")
def console_text(folder: Path) -> str:
    """What the command printed that made the run in `folder / "whole"`."""
    code, out, err = command(["train", *arguments(folder, "whole")])
    assert (code, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def whole(folder: Path, console_text: str) -> Path:
    """A run of the command line that nothing disturbed."""
    return folder / "whole"


@pytest.fixture(scope="module")
def expected(whole: Path) -> Outcome:
    return outcome(whole)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def saved_steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run / "checkpoints")]


class TestClosingBlock:
    def test_on_the_console_and_last_in_the_log(self, whole: Path, console_text: str) -> None:
        block = console_text.splitlines()[-10:]
        assert block[0] == "---"
        assert [line.partition(":")[0] for line in block[1:]] == CLOSING_KEYS
        assert all(re.fullmatch(r"\w+: +[0-9.]+", line) for line in block[1:])
        assert (whole / "log.txt").read_text(encoding="utf-8").splitlines()[-10:] == block
        assert len(re.findall(r"^val_bpb:", console_text, re.MULTILINE)) == 1  # what autoresearch greps

    def test_numbers_are_those_of_summary_json(self, whole: Path, console_text: str) -> None:
        summary = read_json(whole / "summary.json")
        assert list(summary)[:9] == CLOSING_KEYS
        for line in console_text.splitlines()[-9:]:
            key, text = line.split(":")
            shown = text.strip()
            decimals = len(shown.partition(".")[2])
            assert shown == f"{summary[key]:.{decimals}f}", key
        assert summary["num_steps"] == STEPS
        assert summary["depth"] == FLAGS["model.n_layer"]
        assert summary["total_tokens_M"] == STEPS * TOKENS_PER_STEP / 1e6
        assert summary["val_bpb"] == lines_of(whole, "eval")[-1]["val_bpb"]
        assert summary["training_seconds"] == lines_of(whole, "train")[-1]["train_seconds"]
        assert summary["total_seconds"] > summary["training_seconds"]
        assert summary["peak_vram_mb"] > 50  # Python with torch alone takes more

    def test_log_holds_what_the_console_showed_and_every_step(self, whole: Path, console_text: str) -> None:
        """Without a terminal the console shows a step every few seconds; the log, like metrics.jsonl, has them all."""
        logged, shown = (whole / "log.txt").read_text(encoding="utf-8").splitlines(), console_text.splitlines()
        step_lines = [line for line in logged if re.match(r"step \d{5} \(", line)]
        assert [int(line.split()[1]) for line in step_lines] == list(range(1, STEPS + 1))
        assert [line for line in logged if line in shown or line not in step_lines] == shown
        assert step_lines[0] in shown
        assert step_lines[-1] in shown

    def test_before_it_stands_what_to_do_next(self, folder: Path, whole: Path, console_text: str) -> None:
        """Commands that work, on the line of their words; the block stays the last one."""
        lines = console_text[: console_text.index("\n---\nval_bpb:")].splitlines()
        at = lines.index(f"run folder: {whole}")
        found = dict(re.split(r": +", line.strip(), maxsplit=1) for line in lines[at + 1 :])
        assert list(found) == ["sample it", "train it on", "change and compare"]
        for text in found.values():
            assert text.startswith("gptlab ")
        code, out, err = command([*shlex.split(found["sample it"])[1:], "--max-tokens", "2"])
        assert (code, err) == (0, "")
        assert out.startswith(FLAGS["sample.prompts"][0])
        assert shlex.split(found["train it on"])[1:] == ["train", "--resume", str(whole), "--steps", str(2 * STEPS)]
        assert shlex.split(found["change and compare"])[1:4] == ["train", "--from", str(whole)]

    def test_evaluating_the_run_again_gives_its_number(self, whole: Path, console_text: str) -> None:
        code, out, _ = command(["eval", whole, "--device", "cpu"])
        line = next(line for line in console_text.splitlines() if line.startswith("val_bpb:"))
        assert code == 0
        assert line.split()[1] in out


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what was drawn."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def drawn(folder: Path) -> str:
    """All that a run drew on a terminal of 80 columns."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(terminal):
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "80")
        patch.setattr("gptlab.runtime.records.terminal._REDRAW_SECONDS", 0.0)
        assert main(["train", *arguments(folder, "terminal")]) == 0
    return terminal.getvalue()


class TestOnATerminal:
    def test_the_live_line_begins_with_the_time_left_and_fits(self, drawn: str) -> None:
        """Contract: time left first, within 80 columns, with the speedrun's time and average of a step."""
        rows = [re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", row).strip("\r") for row in re.split(r"[\n\r]+", drawn)]
        live = [row for row in rows if " left  " in row]
        assert len(live) >= STEPS
        form = (
            r"\d+:\d\d left  \d+%  step \d+  loss \d+\.\d{3}  time \d+:\d\d  avg \d+ms  [\d.]+[kM]? tok/s(  mfu \d+%)?"
        )
        for row in live:
            assert re.fullmatch(rf"{form}(  mfu \d+%)?", row.rstrip()), row
            assert len(row.rstrip()) <= 80

    def test_the_closing_block_is_the_last_that_is_drawn(self, drawn: str) -> None:
        """No live line is left after it, and the cursor is there again."""
        rows = [re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", row).strip() for row in drawn.splitlines()]
        assert [row.partition(":")[0] for row in rows if row][-len(CLOSING_KEYS) :] == CLOSING_KEYS
        assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h")


class TestMetrics:
    def test_train_lines(self, folder: Path, whole: Path) -> None:
        lines = lines_of(whole, "train")
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        config = make_config(folder, "whole")
        opened = open_tiny(folder)
        rows_per_step = TOKENS_PER_STEP // FLAGS["model.seq_len"]
        rows_per_epoch = opened.state.loader.rows.rows_per_epoch
        peak = opened.place.peak.flops_per_second
        train_seconds = mean = 0.0
        for line in lines:
            step, seconds = line["step"], line["step_seconds"]
            train_seconds += seconds
            mean = 0.9 * mean + (1 - 0.9) * line["loss"]
            assert list(line) == [
                "kind", "step", "tokens", "total_flops", "epoch", "loss", "loss_ema", "lr_scale", "grad_norm",
                "step_seconds", "train_seconds", "tokens_per_second", "mfu",
            ]  # fmt: skip
            assert line["tokens"] == step * TOKENS_PER_STEP
            assert line["total_flops"] == flops_per_token(opened.state.model).total * line["tokens"]
            assert line["epoch"] == step * rows_per_step / rows_per_epoch
            assert line["loss_ema"] == mean / (1 - 0.9**step)
            assert line["lr_scale"] == lr_scale(config.schedule, (step - 1) / STEPS, 1 / STEPS)
            assert line["train_seconds"] == train_seconds
            assert line["tokens_per_second"] == TOKENS_PER_STEP / seconds
            assert peak is not None
            assert line["mfu"] == flops_per_token(opened.state.model).total * line["tokens_per_second"] / peak
            assert line["grad_norm"] > 0
        flops = flops_per_token(opened.state.model).total * STEPS * TOKENS_PER_STEP
        assert read_json(whole / "summary.json")["total_flops"] == flops

    def test_other_lines(self, whole: Path) -> None:
        evaluations, samples = lines_of(whole, "eval"), lines_of(whole, "sample")
        assert [line["step"] for line in evaluations] == [0, 3, 6, 9, 12]
        assert list(evaluations[0]) == ["kind", "step", "val_loss", "val_bpb", "train_seconds", "tokens"]
        assert evaluations[0]["train_seconds"] == 0.0
        assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] - 0.5  # it learns
        assert [(line["step"], line["prompt"]) for line in samples] == [
            (6, "the "),
            (6, "fox"),
            (12, "the "),
            (12, "fox"),
        ]
        assert all(line["text"].startswith(line["prompt"]) for line in samples)
        assert [line["step"] for line in lines_of(whole, "checkpoint")] == [4, 8, 12]

    def test_floats_read_back_exactly(self, whole: Path) -> None:
        """A loss is written with the digits that give the same double again; so is all that is made of it."""
        saved = load_checkpoint(list_checkpoints(whole / "checkpoints")[-1])
        assert lines_of(whole, "eval")[-1]["val_loss"] == saved.state["val_loss"]
        loss_sum = saved.state["loss_ema"]["sum"]
        assert lines_of(whole, "train")[-1]["loss_ema"] == loss_sum / (1 - 0.9**STEPS)
        for text in (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            for value in json.loads(text).values():
                assert not isinstance(value, float) or repr(value) in text

    def test_step_lines_show_the_figures_of_metrics(self, whole: Path) -> None:
        log = (whole / "log.txt").read_text(encoding="utf-8")
        shown = [line for line in log.splitlines() if re.match(r"step \d+ \(", line)]
        for line, figures in zip(shown, lines_of(whole, "train"), strict=True):
            assert line.startswith(
                f"step {figures['step']:05d} ({100 * figures['step'] / STEPS:.1f}%) | "
                f"loss: {figures['loss_ema']:.6f} | lrm: {figures['lr_scale']:.2f} | "
                f"dt: {1000 * figures['step_seconds']:.0f}ms | "
                f"step_avg: {1000 * figures['train_seconds'] / figures['step']:.0f}ms | "
                f"tok/sec: {figures['tokens_per_second']:,.0f} | mfu: {100 * figures['mfu']:.1f}% | "
                f"epoch: {figures['epoch']:.2f} | train_time: {figures['train_seconds']:.0f}s | remaining: "
            )

    def test_only_every_so_many_steps_and_at_the_last(self, folder: Path, expected: Outcome) -> None:
        run = train(folder, "rarely", runtime__log_every_steps=5)
        all_lines = [json.loads(line) for line in expected.lines if json.loads(line)["kind"] == "train"]
        for line in lines_of(run, "train"):
            same = all_lines[line["step"] - 1]
            assert {key: line[key] for key in same} == same  # loss_ema counts the steps in between
        assert [line["step"] for line in lines_of(run, "train")] == [5, 10, 12]


class TestRunFolder:
    def test_config_reproduces_the_run(self, folder: Path, whole: Path, expected: Outcome) -> None:
        stored = read_json(whole / "config.json")
        assert stored["schema_version"] == 1
        assert stored["model"]["vocab_size"] == 257  # resolved: it came from the tokenizer
        again = replace(config_from_json(stored), run_dir=str(folder / "again"))
        result = gptlab.train(again)
        assert (result.exit_code, result.run_dir) == (0, folder / "again")
        assert differences(expected, outcome(folder / "again")) == []
        assert result.summary == read_json(folder / "again" / "summary.json")

    def test_provenance(self, folder: Path, whole: Path) -> None:
        facts = read_json(whole / "run.json")
        assert facts["argv"][:3] == ["train", "quickstart", "--depth"]
        assert facts["status"] == "finished"
        assert facts["start"] <= facts["end"]
        known = {"device": "cpu", "dtype": "float32", "threads": 1, "world_size": 1, "peak_source": "measured"}
        assert {key: facts[key] for key in known} == known
        assert facts["peak_flops_per_second"] > 1e8
        assert facts["torch_version"].split("+")[0] == torch.__version__.split("+")[0]
        assert facts["tokenizer_fingerprint"] == load_tokenizer(whole / "tokenizer").fingerprint
        assert facts["data_fingerprint"] == open_tiny(folder).data.fingerprint
        assert {"gptlab_version", "git_commit", "git_dirty", "python_version", "platform", "cpu"} <= facts.keys()

    def test_resuming_a_finished_run_shows_its_end_and_changes_nothing(self, whole: Path, console_text: str) -> None:
        before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file() and ".lock" not in path.name}
        code, out, _ = command(["train", "--resume", whole])
        assert code == 0
        assert out.splitlines()[-10:] == console_text.splitlines()[-10:]
        assert {path: path.read_bytes() for path in before} == before

    def test_a_finished_run_without_its_summary_ends_again(self, folder: Path, expected: Outcome) -> None:
        run = train(folder, "no-summary")
        (run / "summary.json").unlink()
        assert gptlab.train(resume=run).exit_code == 0
        assert differences(expected, outcome(run)) == []


class TestLoss:
    def test_first_loss_is_the_mean_over_all_micro_batches(self, folder: Path) -> None:
        """Against the definition, in one batch of float64: -log softmax(logits)[target], meant over every target."""
        changes = {"runtime__dtype": "float64", "model__dropout": 0.0}
        run = train(folder, "one-step", steps=1, **changes)
        opened = open_tiny(folder, steps=1, **changes)
        batch = next(opened.state.loader)
        opened.state.loader.close()
        tokens, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        log_probabilities = opened.state.model(tokens).log_softmax(-1)
        losses = [
            -log_probabilities[row, column, targets[row, column]].item()
            for row in range(targets.shape[0])
            for column in range(targets.shape[1])
            if targets[row, column] != -1
        ]
        # 256 terms of about 5.5, each exact to 1e-16 of itself.
        assert lines_of(run, "train")[0]["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-13)

    def test_accumulated_gradients_are_those_of_one_batch(self, folder: Path) -> None:
        """Micro-batches of unequal counts of targets: the mean of their means would be another number."""
        opened = open_tiny(folder, runtime__dtype="float64", model__dropout=0.0)
        state, config = opened.state, opened.config
        generator = torch.Generator().manual_seed(5)
        rows = torch.randint(257, (8, config.model.seq_len), generator=generator)
        targets = rows.roll(-1, 1)
        targets[1:6, 5:] = -1
        n_targets = int((targets != -1).sum())

        def gradient(micro_batches: int) -> tuple[float, dict[str, Tensor]]:
            cut = [t.view(micro_batches, -1, config.model.seq_len) for t in (rows, targets)]
            batch = StepBatch(0, 0.0, cut[0], cut[1], tuple(range(micro_batches)), n_targets)
            loss = float(gradients(state, batch, state.model.loss, config))
            found = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
            state.optimizer.zero_grad()
            return loss, found

        with torch.no_grad():  # projections start at zero and would keep most gradients at zero
            for number, parameter in enumerate(state.model.parameters()):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator.manual_seed(number)))
        mean = F.cross_entropy(state.model(rows).flatten(0, 1), targets.flatten(), ignore_index=-1)
        mean.backward()
        loss = mean.item()
        whole = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
        state.optimizer.zero_grad()
        assert all(g.abs().max() > 1e-6 for g in whole.values())
        for micro_batches in (1, 2, 4, 8):
            cut_loss, cut = gradient(micro_batches)
            assert cut_loss == pytest.approx(loss, rel=1e-13)
            for name, g in whole.items():
                # Sums of a few hundred terms in another order: some 1e-16 of the largest.
                assert torch.allclose(cut[name], g, rtol=0, atol=1e-12 * float(g.abs().max())), (name, micro_batches)

    def test_the_cut_into_micro_batches_does_not_matter_to_a_run(self, folder: Path) -> None:
        changes = {"runtime__dtype": "float64", "model__dropout": 0.0, "optim__grad_clip": 1.0, "steps": 6}
        one, four = (
            lines_of(train(folder, f"cut-{rows}", batch__micro_sequences=rows, **changes), "train") for rows in (8, 2)
        )
        for a, b in zip(one, four, strict=True):
            # float64 rounding, grown by six updates: Adam's first steps divide by tiny second moments.
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-7)

    def test_an_update_frees_the_gradients(self, folder: Path) -> None:
        state, config = (opened := open_tiny(folder)).state, opened.config
        with state.loader:
            gradients(state, next(state.loader), state.model.loss, config)
        assert all(parameter.grad is not None for parameter in state.model.parameters())
        update(state, config, Rates(lr_scale=1.0, momentum=0.9, weight_decay_scale=1.0))
        assert all(parameter.grad is None for parameter in state.model.parameters())

    def test_dropout_is_keyed_by_seed_step_and_micro_batch(self, folder: Path) -> None:
        """And by nothing else: neither what was drawn before nor how many ranks share a step can change it."""
        opened = open_tiny(folder, model__dropout=0.5)
        state, config = opened.state, opened.config
        tokens = torch.randint(257, (1, 4, config.model.seq_len), generator=torch.Generator().manual_seed(1))

        def loss(seed: int = config.seed, step: int = 3, index: int = 1) -> float:
            torch.rand(7)
            batch = StepBatch(step, 0.0, tokens, tokens, (index,), tokens.numel())
            return float(gradients(state, batch, state.model.loss, replace(config, seed=seed)))

        assert loss() == loss()
        assert len({loss(), loss(seed=8), loss(step=4), loss(index=0)}) == 4

    def test_a_cpu_validates_more_rows_at_once_than_it_trains(self, folder: Path) -> None:
        session = open_tiny(folder, eval__micro_sequences=None)
        seen, trained = session.eval_sequences, session.config.batch.micro_sequences
        assert seen == min(2**13 // session.config.model.seq_len, session.held_out.rows_per_epoch) > trained
        session = open_tiny(folder, eval__micro_sequences=trained)
        assert session.eval_sequences == trained

    def test_validation_does_not_depend_on_its_batch(self, folder: Path) -> None:
        """DESIGN: val loss and bpb agree to 1e-6 whatever the micro-batch; here in float32."""
        found = []
        for rows in (1, 3, 4, 100):
            run = train(folder, f"rows-{rows}", eval__only=True, eval__micro_sequences=rows)
            found.append(lines_of(run, "eval")[0])
        for line in found[1:]:
            assert line["val_loss"] == pytest.approx(found[0]["val_loss"], abs=1e-6)
            assert line["val_bpb"] == pytest.approx(found[0]["val_bpb"], abs=1e-6)


class TestClock:
    """With a clock that only the work under its eyes moves (see FakeClock)."""

    @pytest.fixture(autouse=True)
    def _measured(self, folder: Path) -> None:
        place_of(make_config(folder, "never-made"))  # by the true clock

    @pytest.mark.parametrize(("background", "waits"), [(False, 3), (True, 1)])
    def test_training_and_nothing_else(self, folder: Path, expected: Outcome, background: bool, waits: int) -> None:
        """In the background a save is not waited for, but for the last one."""
        with FakeClock.running():
            run = train(folder, f"fake-clock-{background}", checkpoint__background=background)
        assert [line["step_seconds"] for line in lines_of(run, "train")] == [1.0] * STEPS
        assert [line["train_seconds"] for line in lines_of(run, "eval")] == [0.0, 3.0, 6.0, 9.0, 12.0]
        summary = read_json(run / "summary.json")
        assert summary["training_seconds"] == STEPS
        assert summary["compile_seconds"] == FakeClock.WARM_UP
        assert summary["evaluation_seconds"] == 5 * FakeClock.EVALUATION
        assert summary["checkpoint_seconds"] == waits * FakeClock.SAVE
        assert summary["startup_seconds"] == 0.0
        assert differences(expected, outcome(run)) == []

    def test_the_device_is_waited_for_within_the_step(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device that does its work while it is waited for: half a second beyond the one of the update."""
        with FakeClock.running() as clock:

            def wait(device: torch.device) -> None:
                clock.now += 0.5

            monkeypatch.setattr("gptlab.training.step.synchronize", wait)
            run = train(folder, "waits", steps=3, sample__prompts=[])
        assert [line["step_seconds"] for line in lines_of(run, "train")] == [1.5] * 3

    def test_figures_that_are_made_of_the_clock(self, folder: Path) -> None:
        """Steps of one second: MFU and the time left, and the number of parameters, from their definitions."""
        with FakeClock.running():
            run = train(folder, "figures", sample__prompts=[])
        opened = open_tiny(folder)
        peak, flops = opened.place.peak.flops_per_second, flops_per_token(opened.state.model).total
        assert peak is not None
        summary = read_json(run / "summary.json")
        assert summary["mfu_percent"] == pytest.approx(100 * flops * TOKENS_PER_STEP / peak)
        weights = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).model
        assert summary["num_params_M"] == sum(tensor.numel() for tensor in weights.values()) / 1e6
        log = (run / "log.txt").read_text(encoding="utf-8")
        assert [int(seconds) for seconds in re.findall(r"remaining: (\d+)s$", log, re.M)] == list(range(11, -1, -1))

    def test_a_budget_in_seconds(self, folder: Path) -> None:
        """Twelve seconds are twelve steps of one second, not one more; schedules follow the share of the budget."""
        with FakeClock.running():
            run = train(
                folder, "budget", minutes=0.2, eval__every_steps=None, eval__every_seconds=5.0,
                sample__every_steps=None, sample__every_seconds=7.0, checkpoint__every_steps=None,
                checkpoint__every_seconds=4.5, schedule__warmup_fraction=0.0,
            )  # fmt: skip
        lines = lines_of(run, "train")
        assert len(lines) == 12
        assert [line["lr_scale"] for line in lines] == pytest.approx([1.0] * 7 + [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
        assert [line["step"] for line in lines_of(run, "eval")] == [0, 5, 10, 12]
        assert sorted({line["step"] for line in lines_of(run, "sample")}) == [7, 12]
        assert [line["step"] for line in lines_of(run, "checkpoint")] == [5, 9, 12]

    def test_failed_saves_are_tried_again_when_the_next_is_due(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = []

        def refuse(folder: Path, step: int, **parts: Any) -> Path:
            tried.append(step)
            if step < 12:
                raise CheckpointError("the disk is full")
            return save_checkpoint(folder, step, **parts)

        config = make_config(
            folder, "refused", checkpoint__every_steps=None, checkpoint__every_seconds=5.0,
            checkpoint__on_failure="continue",
        )  # fmt: skip
        with FakeClock.running():
            monkeypatch.setattr(saver_module, "save_checkpoint", refuse)
            assert gptlab.train(config).exit_code == 0
        assert tried == [5, 10, 12]
        assert [line["step"] for line in lines_of(folder / "refused", "checkpoint")] == [12]


class TestEnd:
    def test_at_a_validation_loss(self, folder: Path, whole: Path) -> None:
        losses = {line["step"]: line["val_loss"] for line in lines_of(whole, "eval")}
        run = train(folder, "until", until_val_loss=(losses[6] + losses[9]) / 2)
        assert {line["step"]: line["val_loss"] for line in lines_of(run, "eval")} == {
            s: losses[s] for s in (0, 3, 6, 9)
        }
        assert saved_steps(run)[-1] == 9
        assert lines_of(run, "sample")[-1]["step"] == 9
        assert read_json(run / "summary.json")["num_steps"] == 9

    def test_at_the_cap_where_the_loss_is_out_of_reach(self, folder: Path, expected: Outcome) -> None:
        assert differences(expected, outcome(train(folder, "cap", until_val_loss=0.5))) == []

    def test_evaluation_only(self, folder: Path, whole: Path) -> None:
        run = train(folder, "only", eval__only=True, eval__at_start=False)
        assert [line["kind"] for line in map(json.loads, (run / "metrics.jsonl").open())] == ["eval"]
        assert lines_of(run, "eval") == lines_of(whole, "eval")[:1]
        assert read_json(run / "summary.json")["num_steps"] == 0
        assert not (run / "checkpoints").exists()
        assert gptlab.train(resume=run).exit_code == 0

    def test_at_the_very_loss_that_was_asked_for(self, folder: Path, whole: Path) -> None:
        """At or below: the target itself is reached."""
        losses = {line["step"]: line["val_loss"] for line in lines_of(whole, "eval")}
        run = train(folder, "until-exactly", until_val_loss=losses[9])
        assert lines_of(run, "eval")[-1]["step"] == 9
        assert read_json(run / "summary.json")["num_steps"] == 9

    def test_without_any_validation(self, folder: Path, whole: Path) -> None:
        """nanochat's --eval-every -1: not at the start and not at the end; the rest of the run is the same."""
        never = {"eval.every_steps": "none", "eval.at_end": "false", "checkpoint.save_best": "true"}
        code, out, err = command(["train", *arguments(folder, "never-validated", never)])
        run = folder / "never-validated"
        assert (code, err) == (0, "")
        assert re.search(r"^val_bpb: +unknown$", out, re.M)
        assert "minimum val_bpb" not in out
        assert lines_of(run, "eval") == []
        summary = read_json(run / "summary.json")
        assert [summary[key] for key in ("val_bpb", "val_loss", "min_val_bpb", "best_step")] == [None] * 4
        assert saved_steps(run)[-1] == STEPS
        assert [line["loss"] for line in lines_of(run, "train")] == [line["loss"] for line in lines_of(whole, "train")]
        assert command(["train", "--resume", run])[0] == 0
        code, _, err = command(["train", *arguments(folder, "never-reached", never | {"until_val_loss": 1.0})])
        assert code == 2
        assert "horizon.until_val_loss = 1.0" in err

    def test_the_recipes_of_nanochat_turn_it_off_as_nanochat_does(self) -> None:
        for name in ("nanochat", "nanochat-tiny"):
            for words, validates in ([], True), (["--eval.every-steps", "none"], False):
                request = read_request([name, *words], TrainArguments, prog="gptlab train", description="")
                machine = Machine(device="cpu", flops_per_second=1e11)
                assert request.config(lambda _, machine=machine: machine).eval.validates == validates

    def test_wrong_usage(self, folder: Path) -> None:
        code, out, err = command(["train", *arguments(folder, "wrong", {"model.n_head": 5})])
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "model.n_head = 5" in err
        assert not (folder / "wrong").exists()
        with pytest.raises(UserError, match="one of: a configuration to train, a run to"):
            gptlab.train(make_config(folder, "two"), resume=folder / "run")


EXPLODING: Flags = {
    # Rates that no cap on the logits holds back; the warm-up lets the first steps pass.
    "model.logit_softcap": None, "optim.head.lr": 300.0, "optim.embedding.lr": 300.0, "optim.grad_clip": None,
    "schedule.warmup_fraction": 0.9, "schedule.kind": "cosine", "checkpoint.every_steps": 1, "eval.every_steps": None,
}  # fmt: skip


class TestBrokenTraining:
    def test_exploding_loss(self, folder: Path) -> None:
        code, out, err = command(["train", *arguments(folder, "exploding", EXPLODING)])
        run = folder / "exploding"
        done = lines_of(run, "train")[-1]["step"]
        assert code == 3
        assert 0 < done < STEPS
        (line,) = err.splitlines()
        assert line.startswith("gptlab: error: training failed: the training loss")
        assert line.endswith(f"the last checkpoint is {list_checkpoints(run / 'checkpoints')[-1]}")
        assert "training failed" not in out
        assert line.removeprefix("gptlab: ") == (run / "log.txt").read_text(encoding="utf-8").splitlines()[-1]
        facts, event = read_json(run / "run.json"), lines_of(run, "event")[-1]
        assert facts["status"] == "failed"
        failure = facts["failure"]
        assert failure["step"] == event["step"] == done + 1
        assert failure["reason"] == event["reason"] in line
        assert event["what"] == "failed"
        assert failure["loss"] == event["value"]
        assert not 0 <= float(failure["loss"]) <= 100, "the loss that was too much"
        assert not (run / "summary.json").exists()
        assert saved_steps(run)[-1] == done
        verify_checkpoint(list_checkpoints(run / "checkpoints")[-1])
        assert all(line["loss"] <= 100 for line in lines_of(run, "train"))
        assert command(["train", "--resume", run])[0] == 3  # it is the same run, and breaks at the same place

    def test_from_python_it_is_an_exception(self, folder: Path) -> None:
        changes = {name.replace(".", "__"): value for name, value in EXPLODING.items()}
        with pytest.raises(TrainingFailed, match="training loss"):
            gptlab.train(make_config(folder, "exploding-python", **changes))

    def test_validation_that_is_no_number(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights that the last update broke are never saved: they are validated first."""
        prescribe(monkeypatch, [5.0, 4.0, 3.0, 2.0, math.nan])
        code, _, err = command(["train", *arguments(folder, "nan")])
        assert code == 3
        assert "the validation loss at step 12 is nan" in err
        reason = "the validation loss at step 12 is nan"
        assert read_json(folder / "nan" / "run.json")["failure"] == {"reason": reason, "step": 12, "loss": "nan"}
        assert saved_steps(folder / "nan") == [4, 8]


def prescribe(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let validations find these losses, one after the other."""
    left = iter(losses)
    monkeypatch.setattr(session_module, "evaluate", lambda *_, **__: Evaluation(next(left), 1.0, 1, 1))


@pytest.mark.parametrize(
    ("losses", "changes", "kept", "saved"),
    [
        # Validated at 0, 3, 6, 9, 12.
        ([5, 3, 1, 4, 6], {"checkpoint__every_steps": 3}, [6, 12], [3, 6, 9, 12]),
        ([5, 3, 1, 4, 6], {"checkpoint__every_steps": 3, "checkpoint__keep_best": False}, [12], [3, 6, 9, 12]),
        ([5, 3, 1, 1, 6], {"checkpoint__every_steps": 3, "checkpoint__keep_every_steps": 9}, [6, 9, 12], [3, 6, 9, 12]),
        ([1, 5, 4, 4, 4], {"checkpoint__every_steps": 3}, [6, 12], [3, 6, 9, 12]),  # the start is never saved
        ([5, 3, 1, 4, 6], {"checkpoint__every_steps": None, "checkpoint__save_best": True}, [6, 12], [3, 6, 12]),
        # Validated at 0, 2, ..., 12. The best, at 6, is not saved, so that of the best that was saved is kept.
        ([9, 5, 4, 1, 6, 7, 8], {"checkpoint__every_steps": 4, "eval__every_steps": 2}, [4, 12], [4, 8, 12]),
    ],
)
def test_best_checkpoint_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], changes: dict[str, Any],
    kept: list[int], saved: list[int],
) -> None:  # fmt: skip
    prescribe(monkeypatch, [float(loss) for loss in losses])
    run = tmp_path / "run"
    changes = changes | {"checkpoint__keep_last": 1, "sample__prompts": [], "batch__total_tokens": TOKENS_PER_STEP // 2}
    config = make_config(folder, "best", **changes)
    gptlab.train(replace(config, run_dir=str(run)))
    assert saved_steps(run) == kept
    assert [line["step"] for line in lines_of(run, "checkpoint")] == saved
    summary = read_json(run / "summary.json")
    every = 12 // (len(losses) - 1)
    assert (summary["best_val_loss"], summary["best_step"]) == (min(losses), every * losses.index(min(losses)))


def test_the_lowest_bits_per_byte_are_kept_and_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanochat's min_val_bpb: not that of the lowest loss, and not that of the last validation."""
    left = iter([(5.0, 3.0), (4.0, 1.25), (3.0, 1.5), (2.5, 1.75), (2.6, 2.0)])
    monkeypatch.setattr(session_module, "evaluate", lambda *_, **__: Evaluation(*next(left), 1, 1))
    words = [*arguments(folder, "lowest"), "--run-dir", str(tmp_path / "run")]
    with at_line("train", 7, lambda: signal.raise_signal(signal.SIGTERM)):
        assert command(["train", *words])[0] == 75
    code, out, _ = command(["train", "--resume", tmp_path / "run"])
    assert code == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["min_val_bpb"], summary["best_val_loss"], summary["val_bpb"]) == (1.25, 2.5, 2.0)
    assert "minimum val_bpb: 1.250000" in out.splitlines()


def test_a_best_checkpoint_is_not_saved_again_by_the_run_that_resumes_from_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"checkpoint__every_steps": None, "checkpoint__save_best": True, "checkpoint__background": False}
    config = replace(make_config(folder, "best-once", sample__prompts=[], **changes), run_dir=str(tmp_path / "run"))
    with killed_at("checkpoint", 6):
        gptlab.train(config)
    saved, save = [], saver_module.save_checkpoint

    def noted(folder: Path, step: int, **parts: Any) -> Any:
        saved.append(step)
        return save(folder, step, **parts)

    monkeypatch.setattr(saver_module, "save_checkpoint", noted)
    assert gptlab.train(resume=tmp_path / "run").exit_code == 0
    assert saved == [9, 12]


def test_many_passes_over_the_data_are_a_warning(folder: Path) -> None:
    """More than four epochs: two steps of four times the tokens are about one of this corpus."""
    small = {"batch.micro_sequences": 16, "batch.total_tokens": 4 * TOKENS_PER_STEP, "sample.prompts": []}
    small |= {"eval.every_steps": None, "checkpoint.every_steps": None}
    few = command(["train", *arguments(folder, "few-epochs", small | {"steps": 4})])[1]
    many = command(["train", *arguments(folder, "many-epochs", small | {"steps": 9})])[1]
    assert "passes over the training data" not in few
    assert re.search(r"^warning: \d+ passes over the training data: beyond 4,", many, re.M)


class TestPreemption:
    """A signal ends the run after the current step; resumed, it equals the run that no signal reached."""

    def test_preempted_again_and_again(self, folder: Path, expected: Outcome) -> None:
        """One run that is stopped right after each of these lines in turn, and resumed in between."""
        run = folder / "preempted"
        # The line of a save in the background is written during a later step; see test_background_save.py.
        argv: list[object] = ["train", *arguments(folder, run.name, {"checkpoint.background": False})]
        for number, kind, step in [
            (signal.SIGTERM, "eval", 0),
            (signal.SIGINT, "train", 3),  # a validation is due
            (signal.SIGTERM, "train", 6),  # validation and samples are due
            (signal.SIGTERM, "eval", 6),  # samples are due
            (signal.SIGTERM, "sample", 6),
            (signal.SIGTERM, "train", 8),  # a checkpoint is due
            (signal.SIGTERM, "checkpoint", 8),
            (signal.SIGINT, "train", 12),  # everything is due, and the run is at its end
            (signal.SIGTERM, "sample", 12),
        ]:
            with at_line(kind, step, lambda number=number: signal.raise_signal(number)):
                code, out, _ = command(argv)
            assert code == 75
            where = f"after step {step}, saved; resume" if step else "before the first step; start it again"
            assert out.splitlines()[-1] == (
                f"{signal.Signals(number).name}: stopped {where} with gptlab train --resume {run}"
            )
            assert read_json(run / "run.json")["status"] == "preempted"
            assert saved_steps(run)[-1:] == ([step] if step else [])  # the initial weights are not saved
            assert not (run / "summary.json").exists()
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            assert (lines[-1]["kind"], lines[-1]["step"]) == (kind, step), "what a signal asks for leaves no line"
            argv = ["train", "--resume", run]
        assert command(argv)[0] == 0
        assert differences(expected, outcome(run)) == []

    def test_in_the_middle_of_a_validation(self, folder: Path, expected: Outcome) -> None:
        """The validation is finished and recorded; what is due after it is left to the resumed run."""
        run, seen = folder / "mid-validation", []
        evaluate = session_module.evaluate

        def interrupted(*args: Any, **kwargs: Any) -> Evaluation:
            seen.append(True)
            if len(seen) == 3:  # at step 6, after 0 and 3: samples are due too
                signal.raise_signal(signal.SIGTERM)
            return evaluate(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session_module, "evaluate", interrupted)
            assert command(["train", *arguments(folder, "mid-validation")])[0] == 75
        assert [line["step"] for line in lines_of(run, "eval")] == [0, 3, 6]
        assert lines_of(run, "sample") == []
        assert saved_steps(run)[-1] == 6
        assert command(["train", "--resume", run])[0] == 0
        assert differences(expected, outcome(run)) == []

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM between processes")
    def test_a_process_that_gets_sigterm(self, folder: Path) -> None:
        run = folder / "sigterm"
        process = start(["train", *arguments(folder, "sigterm", {"steps": 400})])
        while process.poll() is None and not ((run / "metrics.jsonl").exists() and lines_of(run, "train")):
            time.sleep(0.01)
        process.terminate()
        output, _ = process.communicate()
        assert process.returncode == 75, output
        assert "SIGTERM: stopped after step" in output.splitlines()[-1]
        verify_checkpoint(list_checkpoints(run / "checkpoints")[-1])
        assert saved_steps(run)[-1] == lines_of(run, "train")[-1]["step"]

    def test_without_a_durable_checkpoint_it_is_no_preemption(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise CheckpointError("the disk is full")

        monkeypatch.setattr(saver_module, "save_checkpoint", refuse)
        with at_line("train", 2, lambda: signal.raise_signal(signal.SIGTERM)):
            words = arguments(folder, "unsaved", {"checkpoint.on_failure": "continue"})
            code, _, err = command(["train", *words])
        assert (code, err) == (2, "gptlab: error: the disk is full; --resume continues the run\n")


def test_loop_fits_on_a_screen() -> None:
    assert len(inspect.getsource(fit).splitlines()) <= 50
    assert len(inspect.signature(fit).parameters) <= 3
