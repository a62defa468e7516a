"""`gptlab.train(...)`: names as in a TOML file, what it returns, functions that watch, parts that replace."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import FLAGS, command, differences, killed_at, lines_of, make_config, outcome, train
from torch import Tensor, nn

import gptlab
from gptlab.app import api
from gptlab.app.run.loaded_run import evaluate_run
from gptlab.config.recipes import configure
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.data.prepare import PreparedData
from gptlab.data.rows import Pair, RowSource, WindowRows
from gptlab.eval.sampling import utf8_pieces
from gptlab.model.gpt import GPT, MLP
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console

MACHINE = Machine(device="cpu", flops_per_second=1e11)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return train(folder, "plain", steps=6)


def given(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The settings of `tiny_runs` as keywords."""
    places = {"data.source": [folder / "corpus"], "data.cache_dir": folder / "cache", "run_dir": folder / name}
    return {**FLAGS, **places, "steps": 6, "depth": 1, **changes}


def sgd(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backwards(data: PreparedData, config: RunConfig) -> RowSource:
    class Backwards(WindowRows):
        def read(self, epoch: int, indices: np.ndarray) -> Pair:
            return super().read(epoch, self.rows_per_epoch - 1 - indices)

    return Backwards(data.train, config.model.seq_len, seed=None)


class Gated(nn.Module):
    """Its passes in training, which it counts, scale it."""

    passes: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("passes", torch.ones((), dtype=torch.int64))
        self.register_buffer("halves", torch.full((width,), 0.5), persistent=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)) * self.passes.log() * self.halves


def gated_mlps(model: GPT) -> None:
    for block in model.blocks:
        block.mlp = Gated(model.config.n_embd)


class SineMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sin(self.up(x)))


def sine_mlps(model: GPT) -> None:
    for block in model.blocks:
        block.mlp = SineMLP(model.config)
        for linear in (block.mlp.up, block.mlp.out):
            nn.init.normal_(linear.weight, std=0.2)


class MeansOfWhatWas(nn.Module):
    """Of all positions up to each one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def means_of_what_was(model: GPT) -> None:
    for block in model.blocks:
        block.mlp = MeansOfWhatWas()


def greedy(run: Any, prompt: str, n_tokens: int) -> list[bytes]:
    """The likeliest continuation, read again for each token."""
    tokens = [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
    with torch.no_grad():
        for _ in range(n_tokens):
            tokens.append(int(run.model(torch.tensor([tokens]))[0, -1].argmax()))
    return [run.tokenizer.tokens[token] for token in tokens[-n_tokens:]]


class TestNames:
    def test_a_recipe_by_name_is_the_command(self, folder: Path, plain: Path) -> None:
        """`gptlab.train('quickstart', steps=...)` was a traceback; it is the run of the same flags, bit for bit."""
        result = gptlab.train("quickstart", **given(folder, "by-name"))
        assert (result.exit_code, result.run_dir) == (0, folder / "by-name")
        assert differences(outcome(plain), outcome(folder / "by-name")) == []

    def test_groups_are_dicts_as_in_toml(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.asked(monkeypatch)
        gptlab.train(
            "nanochat-tiny", depth=2, data=folder / "corpus", model={"window_pattern": "L"}, embedding_lr=0.2,
            optim={"muon": {"lr": 0.01}}, until_val_loss=2, dtype="float32", **{"eval.every-steps": 7},
        )  # fmt: skip
        (config,) = asked
        expected = configure("nanochat-tiny", depth=2, own={"embedding_lr": 0.2})
        assert (config.recipe_arguments, config.model.n_embd) == (expected.recipe_arguments, expected.model.n_embd)
        assert (config.model.window_pattern, config.optim.muon.lr, config.eval.every_steps) == ("L", 0.01, 7)
        assert (config.data.source, config.runtime.dtype) == ((str(folder / "corpus"),), "float32")
        assert config.horizon.until_val_loss == 2.0
        assert config.optim.embedding == expected.optim.embedding

    def test_a_configuration_may_be_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.asked(monkeypatch)
        gptlab.train(gptlab.recipes.quickstart(depth=3), seed=5, steps=9, model={"bias": True})
        assert (asked[0].seed, asked[0].model.n_layer, asked[0].model.bias) == (5, 3, True)
        assert (asked[0].horizon.amount, asked[0].horizon.unit) == (9.0, "steps")

    def test_a_toml_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.asked(monkeypatch)
        (tmp_path / "night.toml").write_text('recipe = "quickstart"\ndepth = 3\nseed = 4\n')
        gptlab.train(tmp_path / "night.toml", seed=6)
        assert (asked[0].model.n_layer, asked[0].seed) == (3, 6)

    @staticmethod
    def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
        """Filled with what would be trained."""
        configs: list[RunConfig] = []

        def note(request: Any, *args: Any, config: RunConfig | None = None, **others: Any) -> None:
            configs.append(config or request.config(lambda *_: MACHINE))

        monkeypatch.setattr("gptlab.app.api.train_run", note)
        return configs

    @pytest.mark.parametrize(
        ("argument", "words", "says"),
        [
            ("quickstrat", {}, "did you mean quickstart"),
            (3, {}, "names a recipe or is a RunConfig, this is int"),
            ("quickstart", {"step": 3}, "step = 3: there is no such field (nearest valid: steps)"),
            ("quickstart", {"steps": "3"}, "steps = '3': must be a whole number"),
            ("quickstart", {"steps": 3, "minutes": 1}, "both say how long to train"),
            ("quickstart", {"max_iters": 3}, "there is no max_iters here: --steps N"),
            ("quickstart", {"model": {"n_layers": 3}}, "model.n_layers = 3: there is no such field"),
            ("quickstart", {"model": 3}, "is a group of fields"),
            ("quickstart", {"data": 3}, "data = 3: must be a list"),
            ("quickstart", {"embedding_lr": 0.1, "depth": 2}, "an argument of nanochat and nanochat-tiny"),
            ("quickstart", {"on_step": 3}, "on_step must be a function, this is int"),
            ("quickstart", {"optimizer": "adamw"}, "optimizer must be a function, this is str"),
            (RunConfig(), {"depth": 3}, "depth is an argument of a recipe"),
            (RunConfig(), {"from_run": "x"}, "give one of"),
            ("quickstart", {"from_run": "x"}, "--from x and quickstart both say what to train"),
        ],
    )
    def test_a_wrong_argument_is_a_user_error(self, argument: Any, words: dict[str, Any], says: str) -> None:
        with pytest.raises(gptlab.UserError) as caught:
            gptlab.train(argument, **words)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


class TestResult:
    def test_summary_holds_what_summary_json_holds(self, folder: Path) -> None:
        result = gptlab.train(make_config(folder, "summary", steps=2))
        assert result.summary == json.loads((folder / "summary" / "summary.json").read_text())
        assert {"val_loss", "val_bpb", "total_flops", "compile_seconds", "num_steps"} <= result.summary.keys()
        assert gptlab.train(resume=folder / "summary").summary == result.summary


class TestDiscovery:
    def test_names(self) -> None:
        assert dir(gptlab) == [
            "Drawing", "Result", "TrainingFailed", "UserError", "__version__", "continue_text", "load_run", "recipes",
            "train",
        ]  # fmt: skip
        assert all(hasattr(gptlab, name) for name in dir(gptlab))

    def test_help_is_that_of_the_function(self) -> None:
        text = pydoc.render_doc(gptlab.train, renderer=pydoc.plaintext)
        for words in ("Train a GPT", "change_model:", "on_step, on_eval:", 'gptlab.train("quickstart", depth=4'):
            assert words in text
        assert list(inspect.signature(gptlab.train).parameters)[:3] == ["recipe", "depth", "minutes"]
        assert "Raises UserError" in str(gptlab.train.__doc__)

    def test_numbers_of_numpy_and_whole_ones(self, folder: Path, plain: Path) -> None:
        named = given(folder, "of-numpy", steps=np.int64(6)) | {"optim.muon.lr": np.float64(0.02), "seed": 1337.0}
        result = gptlab.train("quickstart", **named)
        assert differences(outcome(plain), outcome(result.run_dir)) == []
        with pytest.raises(gptlab.UserError, match="list = True: there is no such field"):
            gptlab.train(list=True)

    def test_the_callers_random_numbers_go_on(self, folder: Path) -> None:
        """A search that drew a rate before each run drew the same one every time."""
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        expected = [[random.random(), float(np.random.rand()), float(torch.rand(()))] for _ in range(2)]
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        for draws in expected:
            assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == draws
            gptlab.train(make_config(folder, f"draws-{draws[0]}", steps=1))

    def test_the_callers_threads_stay(self, folder: Path) -> None:
        """Whatever a notebook computed afterwards took as few threads as the run."""
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            gptlab.train(make_config(folder, "threads", steps=1, runtime__threads=1))
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    def test_the_callers_default_device_stays(self, folder: Path) -> None:
        """What a run makes without naming a device, such as its first weights, was made there."""
        torch.set_default_device("meta")
        try:
            gptlab.train(make_config(folder, "default-device", steps=1))
            assert torch.get_default_device() == torch.device("meta")
        finally:
            torch.set_default_device(None)

    @pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
    def test_a_program_that_turned_gradients_off(self, folder: Path, off: Callable[[], Any]) -> None:
        """As in a notebook that evaluated something before. It failed at the first step."""
        with off():
            gptlab.train(make_config(folder, off.__name__, steps=1))
            assert not torch.is_grad_enabled()

    @pytest.mark.parametrize(("name", "value"), [("max_tokens", 2.5), ("temperature", None), ("heal", 1)])
    def test_a_drawing_of_the_wrong_type(self, name: str, value: Any) -> None:
        """Two and a half tokens never ended."""
        with pytest.raises(gptlab.UserError, match=f"{name} = .*: must be "):
            gptlab.Drawing(**{name: value})


class TestHooks:
    def test_see_every_line_and_change_nothing(self, folder: Path, plain: Path) -> None:
        """They may draw from every generator, and change what they are given."""
        seen: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}

        def watch(kind: str) -> Callable[[dict[str, Any]], None]:
            def hook(line: dict[str, Any]) -> None:
                seen[kind].append(dict(line))
                torch.rand(3), np.random.rand(3)
                line.clear()

            return hook

        config = make_config(folder, "watched", steps=6)
        gptlab.train(config, on_step=watch("train"), on_eval=watch("eval"))
        assert differences(outcome(plain), outcome(folder / "watched")) == []
        for kind, lines in seen.items():
            assert [{"kind": kind, **line} for line in lines] == lines_of(folder / "watched", kind)
        record = json.loads((folder / "watched" / "run.json").read_text())
        assert record["hooks"] == ["on_step", "on_eval"]
        assert "own_parts" not in record

    def test_one_may_go_to_another_folder(
        self, folder: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The folder of a run may be given relative to the one where it began."""
        (folder / "below").mkdir()
        monkeypatch.chdir(folder)
        config = replace(make_config(folder, "elsewhere", steps=6), run_dir="below/elsewhere")

        def go(line: dict[str, Any]) -> None:
            os.chdir(tmp_path)

        result = gptlab.train(config, on_step=go)
        assert result.run_dir == folder / "below" / "elsewhere"
        assert differences(outcome(plain), outcome(result.run_dir)) == []
        monkeypatch.chdir(folder)
        again = gptlab.train(resume="below/elsewhere", steps=8, on_step=go)
        assert (again.run_dir, again.summary["num_steps"]) == (result.run_dir, 8)

    def test_another_thread_does_not_train_meanwhile(self, folder: Path, plain: Path) -> None:
        """Two runs in two threads drew dropout from the one generator of the process: both had other losses."""
        refused: list[str] = []

        def train() -> None:
            try:
                gptlab.train(make_config(folder, "in-another-thread"))
            except gptlab.UserError as error:
                refused.append(str(error))

        def start_another(line: dict[str, Any]) -> None:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

        gptlab.train(make_config(folder, "in-this-thread", steps=6), on_step=start_another)
        assert differences(outcome(plain), outcome(folder / "in-this-thread")) == []
        assert len(refused) == 6
        assert {text.partition(":")[0] for text in refused} == {"another thread of this process is training"}
        assert not (folder / "in-another-thread").exists()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
    def test_a_process_that_was_forked_meanwhile_trains(self) -> None:
        """The thread that trains in its parent does not exist in it."""
        entered, leave = threading.Event(), threading.Event()

        def train() -> None:
            with api._only_thread():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=train)
        thread.start()
        assert entered.wait(60)
        if (child := os.fork()) == 0:
            try:
                with api._only_thread():
                    os._exit(0)
            finally:
                os._exit(1)
        leave.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0

    def test_an_error_in_one_is_the_callers(self, folder: Path) -> None:
        def broken(line: dict[str, Any]) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            gptlab.train(make_config(folder, "broken"), on_step=broken)
        assert json.loads((folder / "broken" / "run.json").read_text())["status"] == "failed"


class TestParts:
    @pytest.mark.parametrize(
        ("parts", "state"),
        [
            ({"optimizer": sgd, "change_model": gated_mlps}, "momentum_buffer"),
            ({"optimizer": adamw, "rows": backwards}, "exp_avg"),
        ],
        ids=["sgd, model", "adamw, rows"],
    )
    def test_each_takes_its_place_and_resumes(
        self, folder: Path, plain: Path, parts: dict[str, Any], state: str
    ) -> None:
        """Bit for bit, and only with the same parts."""
        whole = gptlab.train(make_config(folder, f"{state}-whole", steps=6), **parts).run_dir
        expected = outcome(whole)
        first, of_plain = (lines_of(run, "train")[0]["loss"] for run in (whole, plain))
        assert first != of_plain, "another model, or other rows"
        kinds = {name.rpartition(".")[2] for name in expected.tensors}
        assert state in kinds, "another optimizer"
        assert "momentum" not in kinds, "Muon's"
        killed = folder / f"{state}-killed"
        with killed_at("train", 5):
            gptlab.train(make_config(folder, killed.name, steps=6), **parts)
        record = json.loads((killed / "run.json").read_text())["own_parts"]
        for argument, function in parts.items():
            assert record[argument]["name"] == f"test_api.{function.__name__}"
            others = {name: part for name, part in parts.items() if name != argument}
            for words in (others, others | {argument: gated_mlps if function is not gated_mlps else sgd}):
                with pytest.raises(
                    gptlab.UserError, match=rf"was trained with {argument}=test_api.{function.__name__}"
                ) as caught:
                    gptlab.train(resume=killed, **words)
                assert all(f" {name}={part.__name__}" in str(caught.value) for name, part in parts.items())
        assert gptlab.train(resume=killed, **parts).exit_code == 0
        assert differences(expected, outcome(killed)) == []
        if change := parts.get("change_model"):
            held = gptlab.load_run(whole, change_model=change).model.state_dict()
            saved = {name: expected.tensors[name] for name in held if "head" not in name}
            assert all(torch.equal(held[name], tensor) for name, tensor in saved.items())
            assert held["blocks.0.mlp.passes"] > 6, "at least one in each step"
            assert "blocks.0.mlp.halves" not in expected.tensors
        again = gptlab.train(from_run=whole, run_dir=folder / f"{state}-again", **parts).run_dir
        assert differences(expected, outcome(again)) == []

    def test_the_call_that_resumes_a_stopped_run_is_shown(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def stop(line: dict[str, Any]) -> None:
            signal.raise_signal(signal.SIGTERM)

        config = make_config(folder, "stopped", steps=9)
        run = gptlab.train(config, change_model=gated_mlps, on_step=stop).run_dir
        said = f"stopped after step 1, saved; resume with gptlab.train(resume={str(run)!r}, change_model=...)"
        assert said in capsys.readouterr().out

    def test_the_command_line_names_what_is_missing(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = gptlab.train(make_config(folder, "own", steps=1), change_model=gated_mlps).run_dir
        said = capsys.readouterr().out
        longer = f"to train it on: in Python, gptlab.train(resume={str(run)!r}, steps=2, change_model=...)"
        assert longer in said
        assert "gptlab sample" not in said
        assert longer in command(["train", "--resume", run])[1]
        again, load = "repeat it from Python, by gptlab.train(from_run=", "load it from Python, by gptlab.load_run("
        asked = {"eval": load, "sample": load, "train": again}
        for name, how in asked.items():
            code, out, err = command([name, *(["--run-dir", folder / "x", "--from"] if name == "train" else ()), run])
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"change_model=test_api.gated_mlps: {how}{str(run)!r}, change_model=gated_mlps)" in err

    def test_a_changed_model_is_loaded_and_sampled(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """By its own computation: its MLPs have gptlab's names and shapes, but are no gated ones."""
        parts: dict[str, Any] = {"change_model": sine_mlps, "optimizer": sgd}
        result = gptlab.train(make_config(folder, "sine", steps=3), **parts)
        run = gptlab.load_run(str(result.run_dir), change_model=sine_mlps)
        assert type(run.model.blocks[0].mlp) is SineMLP
        found = evaluate_run(run, console=Console(), group=Group())
        assert found.val_loss == result.summary["val_loss"]
        expected = greedy(run, "the ", 5)
        drawing = gptlab.Drawing(max_tokens=5, temperature=0.0, heal=False)
        for stream in gptlab.continue_text(run.model, run.tokenizer, "the ", drawing, samples=2):
            assert [token.piece for token in stream] == expected
        with pytest.raises(gptlab.UserError, match=r"with change_model=test_api\.sine_mlps, not test_api.gated_mlps"):
            gptlab.load_run(str(result.run_dir), change_model=gated_mlps)
        with pytest.raises(gptlab.UserError, match="was trained without change_model: leave it out to load it"):
            gptlab.load_run(str(gptlab.train(make_config(folder, "no", steps=1)).run_dir), change_model=gated_mlps)

    def test_a_part_that_the_run_did_not_have_is_refused(self, folder: Path, plain: Path) -> None:
        with pytest.raises(gptlab.UserError, match="was trained without optimizer: leave it out to repeat it"):
            gptlab.train(from_run=plain, optimizer=sgd)

    def test_other_source_is_told(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = gptlab.train(make_config(folder, "edited", steps=1), optimizer=sgd).run_dir
        record = json.loads((run / "run.json").read_text())
        record["own_parts"]["optimizer"]["sha256"] = "0" * 64
        (run / "run.json").write_text(json.dumps(record))
        gptlab.train(from_run=run, run_dir=folder / "edited-again", optimizer=sgd)
        warning = f"warning: the source of optimizer, or a value that it holds, is not what {run} was trained with"
        assert warning in capsys.readouterr().out

    def test_rates_follow_the_schedule(self, folder: Path) -> None:
        made: list[torch.optim.Optimizer] = []

        def keep(model: GPT) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(model.parameters(), lr=0.5))
            return made[0]

        rates: list[float] = []
        run = gptlab.train(
            make_config(folder, "rates", steps=5), optimizer=keep,
            on_step=lambda line: rates.append(made[0].param_groups[0]["lr"]),
        ).run_dir  # fmt: skip
        assert rates == [0.5 * line["lr_scale"] for line in lines_of(run, "train")]
        assert len({*rates}) > 2

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda model: None, "must return a torch.optim.Optimizer, this is NoneType"),
            (lambda model: torch.optim.SGD([*model.parameters()][1:], lr=1.0), "SGD lacks residual_lambdas"),
            (
                lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=1.0),
                "SGD has parameters that are not the model's",
            ),
        ],
    )
    def test_an_optimizer_that_is_none_is_refused(self, folder: Path, make: Any, says: str) -> None:
        with pytest.raises(gptlab.UserError, match=says):
            gptlab.train(make_config(folder, "none"), optimizer=make)
        assert not (folder / "none").exists()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ("model.blocks[0].mlp.up = nn.Linear(64, 256)", r"blocks\.0\.mlp\.up, .* replace blocks\.0\.mlp, which"),
            ("model.blocks[0].mlp_norm = nn.LayerNorm(64)", r"blocks\.0\.mlp_norm, .* replace blocks\.0, which"),
            ("model.blocks[0].mlp_norm.register_forward_hook(print)", r"replaced or hooked blocks\.0\.mlp_norm"),
            ("model.head = nn.Linear(64, 512)", "hooked head, .* the loss is computed from its weights"),
            ("model.head.forward = lambda x: x", "replaced or hooked head"),
            ("model.blocks[0].mlp.out.forward = lambda x: x", r"replaced or hooked blocks\.0\.mlp\.out"),
            ("model.final_norm.requires_grad_(False); model.head.requires_grad_(False)", r"froze head\.weight"),
        ],
    )
    def test_a_change_that_training_would_not_follow_is_refused(self, folder: Path, change: str, says: str) -> None:
        """Kernels would have trained another function than the one that `forward` computes."""
        config = make_config(folder, "bypassed")
        with pytest.raises(gptlab.UserError, match=f"change_model .*{says}"):
            gptlab.train(config, change_model=lambda model: exec(change, {"model": model, "nn": nn}))
        with pytest.raises(gptlab.UserError, match="change_model returned something"):
            gptlab.train(config, change_model=lambda model: nn.Sequential(model))  # type: ignore[arg-type, return-value]
        assert not (folder / "bypassed").exists()

    def test_hooks_and_changes_that_mix_positions_are_sampled(self, folder: Path, plain: Path) -> None:
        """The cache of keys and values knows nothing of them."""
        parts: dict[str, Any] = {"change_model": means_of_what_was}
        settings = {"sample__prompts": "the ", "sample__max_tokens": 6, "sample__temperature": 0.0}
        result = gptlab.train(make_config(folder, "mixing", steps=3, **settings), **parts)
        run = gptlab.load_run(result.run_dir, **parts)
        drawn = greedy(run, "the ", 6)
        assert lines_of(result.run_dir, "sample")[-1]["text"] == "the " + "".join(utf8_pieces(drawn))
        hooked = gptlab.load_run(plain)
        hooked.model.blocks[0].register_forward_hook(lambda module, given, y: y - 3 * y.roll(1, -1))
        drawing = gptlab.Drawing(max_tokens=6, temperature=0.0)
        (stream,) = gptlab.continue_text(hooked.model, hooked.tokenizer, "the ", drawing)
        assert [token.piece for token in stream] == greedy(hooked, "the ", 6)
        assert greedy(hooked, "the ", 6) != greedy(gptlab.load_run(plain), "the ", 6)

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("seq_len", 16, "rows of 16 tokens: give at least one, of model.seq_len = 32"),
            ("rows_per_epoch", 0, "rows returned 0 rows"),
            ("read", lambda epoch, indices: np.array([[[0] * 32], [[-100] * 32]]), "targets of shape .* from -100"),
            ("read", lambda epoch, indices: np.array([[[9999] * 32], [[0] * 32]]), "inputs of .* to 9999"),
            ("read", lambda epoch, indices: np.full((2, 1, 32), 1.5), r"inputs of shape \(1, 32\) of type float64: "),
            ("read", lambda epoch, indices: ([[1] * 32], np.full((1, 32), np.nan)), "targets of .* of type float64: "),
            ("read", lambda epoch, indices: np.zeros((2, 0, 32), int), r"inputs of shape \(0, 32\) of type int64: "),
            ("read", lambda epoch, indices: None, "no inputs and targets: `read` returns an array of each"),
        ],
    )
    def test_rows_that_cannot_be_trained_on_are_refused(self, folder: Path, name: str, value: Any, says: str) -> None:
        def rows(data: PreparedData, config: RunConfig) -> RowSource:
            made = backwards(data, config)
            setattr(made, name, value)
            return made

        with pytest.raises(gptlab.UserError, match=says):
            gptlab.train(make_config(folder, "none"), rows=rows)

    def test_a_later_row_that_cannot_be_trained_on_ends_the_run(self, folder: Path) -> None:
        """The kernels would look up a token that is not in the vocabulary beyond the end of the embedding table."""

        def rows(data: PreparedData, config: RunConfig) -> RowSource:
            made = backwards(data, config)
            read = made.read

            def broken(epoch: int, indices: np.ndarray) -> Any:
                inputs, targets = read(epoch, indices)
                inputs[indices == 9, 3] = 9999
                return inputs, targets

            made.read = broken  # type: ignore[method-assign]
            return made

        with pytest.raises(gptlab.UserError, match=r"rows returned inputs of shape \(8, 32\) from \d+ to 9999"):
            gptlab.train(make_config(folder, "later", checkpoint__background=False), rows=rows)
        assert [line["step"] for line in lines_of(folder / "later", "train")] == [1]

    def test_rows_that_are_none_are_refused(self, folder: Path) -> None:
        with pytest.raises(gptlab.UserError, match="rows must return a RowSource, this is NoneType"):
            gptlab.train(make_config(folder, "none"), rows=lambda data, config: None)  # type: ignore[arg-type, return-value]
