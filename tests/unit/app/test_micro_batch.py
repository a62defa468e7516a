"""The micro-batch that is tried first on a GPU, and memory that runs out in the warm-up: the run continues with a
micro-batch that fits, and records it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import arguments, command, lines_of, make_config

from gptlab.app.run import micro_batch, run_session, session
from gptlab.app.run.micro_batch import with_rows_that_fit
from gptlab.app.run.run_request import RunRequest
from gptlab.bench import measure as measure_module
from gptlab.bench.plan import make_plan
from gptlab.cli.bench import main as bench
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware import installed
from gptlab.runtime.hardware.memory import fewer_micro_sequences
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place, place_of
from gptlab.runtime.processes.distributed import World
from gptlab.runtime.records.console import Console
from gptlab.training.state import TrainState

FIELDS = {"model.dropout": 0.0, "steps": 4, "checkpoint.every_steps": 2}


def with_room_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with memory for so many rows. Returns the numbers of rows that were tried."""
    tried: list[int] = []

    def warm_up(state: TrainState, passes: Any, config: RunConfig, *rest: Any) -> None:
        tried.append(config.batch.micro_sequences)
        if tried[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    monkeypatch.setattr(run_session, "MEMORY_RUNS_OUT", ("cpu",))
    monkeypatch.setattr(session, "warm_up", warm_up)
    return tried


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run, "train")]


def test_halved_until_it_fits_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is, bit for bit, that of the smaller flag, also where it is stopped and resumed."""
    one_row = ["train", *arguments(folder, "asked", FIELDS | {"batch.micro_sequences": 1})]
    assert command(one_row)[0] == 0
    tried = with_room_for(1, monkeypatch)
    code, out, _ = command(["train", *arguments(folder, "found", FIELDS)])
    assert (code, tried) == (0, [4, 2, 1])
    assert "out of memory with batch.micro_sequences = 4: now 2, in 4 micro-batches a step" in out
    assert losses(folder / "found") == losses(folder / "asked")
    assert json.loads((folder / "found" / "config.json").read_text())["batch"]["micro_sequences"] == 1
    changes = json.loads((folder / "found" / "run.json").read_text())["config_changes"]
    assert [change["fields"] for change in changes] == [
        {"batch.micro_sequences": [4, 2]},
        {"batch.micro_sequences": [2, 1]},
    ]
    tried.clear()
    whole = losses(folder / "found")
    resumed = ["train", "--resume", folder / "found", "--resume-from-step", "2"]
    assert command(resumed)[0] == 0
    assert tried == [1]
    assert losses(folder / "found") == whole


def test_a_resumed_run_records_what_fits_once_it_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, more = folder / "resumed", {"checkpoint.keep_last": 9}
    assert command(["train", *arguments(folder, run.name, FIELDS | more)])[0] == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    resumed = ["train", "--resume", run, "--resume-from-step", "2"]
    tried = with_room_for(0, monkeypatch)
    assert (command(resumed)[0], tried) == (2, [4, 2, 1])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    tried = with_room_for(1, monkeypatch)
    assert (command(resumed)[0], tried) == (0, [4, 2, 1])
    (change,) = json.loads((run / "run.json").read_text())["config_changes"]
    assert (change["step"], change["fields"]) == (2, {"batch.micro_sequences": [4, 1]})
    assert (command(resumed)[0], tried) == (0, [4, 2, 1, 1])


@pytest.mark.parametrize("changes", [{"batch.micro_sequences": 1}, {"parallel.exact_any_world_size": True}])
def test_what_must_not_be_halved_ends_with_the_advice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    tried = with_room_for(0, monkeypatch)
    code, _, err = command(["train", *arguments(folder, next(iter(changes)), FIELDS | changes)])
    assert (code, len(tried)) == (2, 1)
    assert "gptlab: error: out of memory" in err


def test_where_one_row_is_too_much_the_advice_is_about_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = with_room_for(0, monkeypatch)
    code, _, err = command(["train", *arguments(folder, "one row", FIELDS)])
    assert (code, tried) == (2, [4, 2, 1])
    assert "model.n_layer); batch.micro_sequences is 1 already" in err


def test_steps_stay_whole() -> None:
    assert [fewer_micro_sequences(rows) for rows in (2, 9, 12, 32)] == [1, 3, 6, 16]


@pytest.mark.parametrize(
    ("free", "compile_", "rows", "counted"),
    [
        (1000, "on", 4, ["off"]),  # 800 uncompiled
        (500, "on", 4, ["off", "on"]),  # 400 compiled
        (400, "on", 2, ["off", "on", "on"]),  # 5% stay free
        (400, "off", 1, ["off", "off", "off", "off"]),
        (10, "on", 1, ["off", "on", "on", "on"]),  # the estimate may be wrong: the warm-up will tell
    ],
)
def test_the_first_try_is_the_largest_that_the_plan_has_room_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    free: int, compile_: str, rows: int, counted: list[str],
) -> None:  # fmt: skip
    """A row takes 100 bytes compiled, 200 uncompiled."""
    plans: list[str] = []

    def plan(config: RunConfig, _: Place) -> Any:
        plans.append(config.runtime.compile)
        return SimpleNamespace(memory_bytes={"on": 100, "off": 200}[plans[-1]] * config.batch.micro_sequences)

    monkeypatch.setattr(micro_batch, "make_plan", plan)
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free if freed else 0, 10_000))
    on_gpu = Place(torch.device("cuda", 0), torch.bfloat16, 1, Peak(None, "unknown"))
    config = make_config(folder, "planned", runtime__compile=compile_)
    with Console() as console:
        found = micro_batch.rows_that_fit(config, on_gpu, console)
    assert (found.batch.micro_sequences, plans) == (rows, counted)
    assert found.batch.total_tokens == config.batch.total_tokens
    said = f"batch.micro_sequences = {rows}" + (" instead of 4" if rows < 4 else "")
    assert (said in capsys.readouterr().out) == (len(counted) > 1)


def test_a_plan_that_fails_ends_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 1 / 0)
    on_gpu = Place(torch.device("cuda", 0), torch.bfloat16, 1, Peak(None, "unknown"))
    config = make_config(folder, "unplanned")
    with Console() as console:
        assert micro_batch.rows_that_fit(config, on_gpu, console) == config
    assert "memory was not planned (ZeroDivisionError" in "".join(capsys.readouterr())


def test_rows_are_planned_for_a_recipe_and_one_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such plan, and a number of rows that was asked for is tried as it is."""
    monkeypatch.setattr(installed, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(micro_batch, "rows_that_fit", lambda *_: pytest.fail("not asked for"))
    assert command(["train", *arguments(folder, "cpu", FIELDS)])[0] == 0
    on_gpu = Place(torch.device("cuda", 0), torch.bfloat16, 1, Peak(None, "unknown"))
    monkeypatch.setattr(micro_batch, "place_of", lambda *_: on_gpu)
    config = make_config(folder, "on-gpu")
    with Console() as console:
        asked = RunRequest(overrides={"batch.micro_sequences": 2})
        assert with_rows_that_fit(config, asked, console, World()) is config
        assert with_rows_that_fit(config, RunRequest(), console, World(0, 2)) is config
        monkeypatch.setattr(micro_batch, "rows_that_fit", lambda config, place, console: (config, place))
        assert with_rows_that_fit(config, RunRequest(), console, World()) == (config, on_gpu)


def test_what_is_timed_has_the_rows_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimedError(Exception):
        pass

    def measured(config: RunConfig, *_: object, **__: object) -> None:
        raise TimedError(config.batch.micro_sequences)

    monkeypatch.setattr(installed, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(
        micro_batch, "with_rows_that_fit",
        lambda config, *_: replace(config, batch=replace(config.batch, micro_sequences=1)),
    )  # fmt: skip
    monkeypatch.setattr(measure_module, "measure", measured)
    with pytest.raises(TimedError, match=r"^1$"):
        bench(["nanochat-tiny", "--device", "cpu"])


ON_GPU: dict[str, Any] = {
    "model.n_layer": 4, "model.n_embd": 256, "model.n_head": 4, "model.seq_len": 512, "model.dropout": 0.0,
    "batch.micro_sequences": 64, "batch.total_tokens": 2 * 64 * 512, "eval.micro_sequences": 16, "steps": 4,
    "runtime.device": "cuda", "runtime.dtype": "bfloat16", "runtime.compile": "on", "sample.prompts": [],
    "checkpoint.every_steps": "none",
}  # fmt: skip
"""What 32 rows of it take is about half of what 64 do."""


def bytes_between(config: RunConfig) -> int:
    """As many as 32 rows need, by their plan, and half of what 64 need beyond that."""
    plans = (
        make_plan(replace(config, batch=replace(config.batch, micro_sequences=rows)), place_of(config))
        for rows in (32, 64)
    )
    few, many = (plan.memory_bytes for plan in plans)
    assert few < 0.65 * many
    return (few + many) // 2


def on_gpu_config(folder: Path, compile_: str) -> RunConfig:
    fields = {name.replace(".", "__"): value for name, value in ON_GPU.items()}
    return make_config(folder, "never-made", **fields | {"runtime__compile": compile_})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_fit_into_what_a_real_gpu_has_free(folder: Path) -> None:
    """Where all but that is taken, by this program or another one, a run begins with the rows that have room."""
    config = on_gpu_config(folder, "off")
    free = bytes_between(config) / micro_batch.FILLED
    torch.cuda.empty_cache()
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] - free), dtype=torch.uint8, device="cuda")
    with Console() as console:
        found = micro_batch.rows_that_fit(config, place_of(config), console)
    assert taken.is_cuda
    assert found.batch.micro_sequences == 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_runs_out_of_memory_and_the_run_is_compiled_again(folder: Path) -> None:
    """A number of rows that was asked for is tried: PyTorch's allocator refuses what goes beyond the limit, the frames
    of the error let go of their tensors, and half of the rows, compiled for their shape, train."""
    torch.compiler.reset()
    limit = bytes_between(on_gpu_config(folder, "on"))
    torch.cuda.empty_cache()
    limit += torch.cuda.memory_reserved()  # by earlier runs of this process
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        code, out, err = command(["train", *arguments(folder, "limited", ON_GPU)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert code == 0, err
    assert "out of memory with batch.micro_sequences = 64: now 32" in out
    assert "now 16" not in out
    assert json.loads((folder / "limited" / "config.json").read_text())["batch"]["micro_sequences"] == 32
    assert json.loads((folder / "limited" / "run.json").read_text())["implementations"]["compile"] == "inductor"
    assert losses(folder / "limited")[-1] < losses(folder / "limited")[0]
