"""What README and docs say is so: commands parse, fields exist, codes and keys are the code's, links lead somewhere."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from tiny_runs import write_bundle, write_corpus

from gptlab.app import api
from gptlab.app.run.attempt import Result
from gptlab.app.run.run_request import RunRequest, TrainArguments
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.main import COMMANDS, HELP, main
from gptlab.config.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TRAINING_FAILED, EXIT_USAGE
from gptlab.config.load import leaf_fields
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.data.tokens import shards

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
README, CONTRACTS, LINEAGES = TEXTS["README.md"], TEXTS["docs/contracts.md"], TEXTS["docs/lineages.md"]

MACHINE = Machine(device="cpu", flops_per_second=4e11)


def blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands(text: str) -> list[str]:
    """Every line of a page or of a help text that calls gptlab, without its comment, and every such `piece` of code."""
    lines = [re.sub(r" {2,}.*", "", line.strip()).removeprefix(".venv/bin/") for line in text.splitlines()]
    found = [line for line in lines if re.match(r"gptlab [a-z]", line)] + re.findall(r"`(gptlab [a-z][^`]*)`", text)
    return [command for command in found if command.split()[1] in COMMANDS]


COMMAND_LINES = sorted({command for text in (README, CONTRACTS, LINEAGES, HELP) for command in commands(text)})
"""CHANGELOG and LOG tell of commands as they were."""


class ParsedError(Exception):
    """Ends a command as soon as its words are read."""


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the words as the command does, and resolve a run that they ask for; nothing else of it happens."""
    module = importlib.import_module(COMMANDS[words[0]][0])

    def stop_behind(read: Any) -> Any:
        def reader(*args: Any, **kwargs: Any) -> None:
            result = read(*args, **kwargs)
            if isinstance(result, RunRequest):
                result.config(lambda _: MACHINE)
            raise ParsedError

        return reader

    for name in ("parse", "read_request"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, stop_behind(getattr(module, name)))
    with pytest.raises(ParsedError):
        module.main(words[1:])


def table(text: str, heading: str) -> dict[str, str]:
    """{first cell: second cell} of the table whose first heading this is, without backticks."""
    rows = re.search(rf"^\| {heading} \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.M)
    assert rows is not None, f"no table of {heading}"
    cells = (line.strip("| ").split(" | ", 1) for line in rows[1].splitlines())
    return {first.strip("`"): second for first, second in cells}


def words_in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a fraction of a second."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "text.txt").write_text("".join(f"{number} bottles of beer on the wall.\n" for number in range(200)))
    flags = {
        "depth": 1, "steps": 2, "model.n-embd": 32, "model.n-head": 2, "model.seq-len": 32, "batch.total-tokens": 128,
        "batch.micro-sequences": 4, "tokenizer.kind": "byte", "data": folder / "text.txt", "data.split": "tail",
        "data.cache-dir": folder / "cache", "run-dir": folder / "run", "device": "cpu", "dtype": "float32",
        "compile": "off", "runtime.threads": 1, "sample.max-tokens": 4,
    }  # fmt: skip
    flags |= {"eval.train-tokens": 100, "eval.core-every-steps": 2, "eval.core-dir": write_bundle(folder / "bundle")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        assert main(["train", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]) == 0
    return folder / "run"


class TestCommands:
    def test_are_found(self) -> None:
        text = "gptlab plan --depth 3   # look\n`gptlab eval x` and `gptlab COMMAND`\n.venv/bin/gptlab bench\n"
        assert commands(text) == ["gptlab plan --depth 3", "gptlab bench", "gptlab eval x"]
        assert {command.split()[1] for command in commands(README)} == set(COMMANDS)

    def test_parse(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "night.toml").write_text(blocks(README, "toml")[0])
        for command in COMMAND_LINES:
            print(command)  # pytest shows the last one, which failed
            words = shlex.split(command)[1:]
            with monkeypatch.context() as patch:
                if words in (["data"], ["tokenizer"]):
                    assert main(words) == 0
                else:
                    parsed(words, patch)

    def test_that_do_not_parse_would_be_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Exception, match="no such"):
            parsed(["eval", "runs/NAME", "--chekpoint", "best"], monkeypatch)
        with pytest.raises(Exception, match="no such"):
            parsed(["train", "--hours", "3"], monkeypatch)


def test_the_toml_example_is_a_run(tmp_path: Path) -> None:
    path = tmp_path / "night.toml"
    path.write_text(blocks(README, "toml")[0])
    request = read_request([str(path)], TrainArguments, prog="gptlab train", description="")
    config = request.config(lambda _: MACHINE)
    assert (config.model.n_layer, config.model.seq_len, config.model.window_pattern) == (8, 2048, "SSSL")
    assert (config.horizon.amount, config.horizon.unit) == (480 * 60, "seconds")
    assert config.micro_batches == 4
    assert config.data.source == ("notes/", "papers.parquet")


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, on a few words: only text, size and length are smaller, where the example says nothing of them."""
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    real, seen = api.train, list[Any]()
    small: dict[str, Any] = {
        "data": {"source": ["corpus"], "cache_dir": "cache", "val_fraction": 0.15}, "eval": {"tokens": 256},
        "sample": {"prompts": []}, "runtime": {"device": "cpu", "dtype": "float32", "compile": "off", "threads": 1},
        "tokenizer": {"kind": "byte"}, "batch": {"total_tokens": 256, "micro_sequences": 4},
    }  # fmt: skip

    def train(recipe: str | None = None, **given: Any) -> Result:
        seen.append((recipe, dict(given)))
        if recipe is not None:
            given = given | small | {"model": given["model"] | {"n_embd": 32, "n_head": 2, "seq_len": 64}}
            given |= {"minutes": None, "steps": 3}
        result = real(recipe, **given)
        assert result.exit_code == 0
        return result

    monkeypatch.setattr(api, "train", train)
    names: dict[str, Any] = {}
    exec(blocks(README, "python")[0], names)
    (first, _), (again, words) = seen
    assert (first, again) == ("quickstart", None)
    assert words["from_run"] == names["result"].run_dir != names["again"].run_dir
    assert len(names["losses"]) == names["again"].summary["num_steps"] == 3
    result = names["result"]
    last = capsys.readouterr().out
    assert f"\n{result.summary['val_bpb']} 3 {result.run_dir}\n" in last


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = PAGES[page].parent / name if name else PAGES[page]
        assert path.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_fields_in_code_are_fields(page: str) -> None:
    """`data.rows` and `batch.total_tokens / (...)`: whatever begins with a group of fields."""
    groups = {name.partition(".")[0] for name in leaf_fields(RunConfig) if "." in name}
    known = {*leaf_fields(RunConfig), "optim.muon"}
    named = re.findall(r"(?<![\w./-])([a-z]+\.[a-z_][a-z_0-9.]*)", " ".join(words_in_code(TEXTS[page])))
    suffixes = ("py", "json", "jsonl", "md", "txt", "toml", "html", "safetensors")
    for name in named:
        if name.partition(".")[0] in groups and name.rpartition(".")[2] not in suffixes:
            assert name in known, f"{page}: there is no field {name}"


class TestContracts:
    def test_metrics(self, run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        written = {line["kind"]: [name for name in line if name != "kind"] for line in lines}
        listed = {kind: words_in_code(fields) for kind, fields in table(CONTRACTS, "kind").items()}
        assert listed.pop("event") == ["step", "what", "value"]  # a run that nothing befalls has none
        assert listed == written

    def test_run_directory(self, run: Path) -> None:
        listed = set(re.findall(r"^  ([\w.]+/?) ", blocks(CONTRACTS)[0], re.M))
        there = {entry.name + "/" * entry.is_dir() for entry in run.iterdir() if not entry.name.startswith(".")}
        assert there <= listed
        assert listed - there <= {
            "code/",
            "gpu.txt",
            "tensorboard/",
            "report.html",
            "report.md",
        }  # of a changed tree, of a machine with a GPU, with log.to, with log.report

    def test_provenance(self, run: Path) -> None:
        section = CONTRACTS.partition("### run.json")[2].partition("###")[0]
        values = {"running", "finished", "preempted", "failed", "table", "measured", "unknown"}
        assert set(words_in_code(section)) - values == set(json.loads((run / "run.json").read_text()))

    def test_closing_block(self, run: Path) -> None:
        block = (run / "log.txt").read_text().rpartition("---\n")[2]
        keys = [line.partition(":")[0] for line in block.splitlines()]
        assert list(table(CONTRACTS, "key")) == keys
        assert set(keys) <= set(json.loads((run / "summary.json").read_text()))

    def test_checkpoint_files(self, run: Path) -> None:
        (checkpoint,) = (run / "checkpoints").iterdir()
        section = CONTRACTS.partition("## Checkpoints")[2].partition("\n- Written")[0]
        assert set(words_in_code(section)) == {entry.name for entry in checkpoint.iterdir()}

    def test_shards(self) -> None:
        for kind in (shards.UINT16, shards.UINT32):
            assert f"{kind.magic}, version {kind.version} for {kind.dtype.name}" in " ".join(CONTRACTS.split())

    def test_exit_codes(self) -> None:
        codes = {0, EXIT_USAGE, EXIT_TRAINING_FAILED, EXIT_PREEMPTED}
        assert {int(code) for code in table(CONTRACTS, "code")} == codes
        sentence = README.partition("**Exit codes**")[2].partition("\n\n")[0]
        assert {int(code) for code in re.findall(r"(\d+) \(", sentence)} == codes
        assert {int(code) for code in re.findall(r"(\d+) [a-z]", HELP.partition("exit codes:")[2])} == codes
        assert f"training is {EXIT_INTERRUPTED}, a reader that closed the pipe {EXIT_BROKEN_PIPE}" in CONTRACTS


@pytest.mark.skipif(os.name != "posix", reason="runs bash")
class TestSlurmScript:
    """With programs that note their arguments in the place of Slurm's."""

    @pytest.mark.parametrize(
        ("status", "ends_with", "requeued"),
        [
            ("finished", 0, False),
            ("failed", 1, False),
            ("preempted", 1, True),
            ("running", 137, True),
            (None, 2, False),
        ],
    )
    def test_requeues_what_is_not_over_and_else_ends_as_the_run(
        self, tmp_path: Path, status: str | None, ends_with: int, requeued: bool
    ) -> None:
        folder, programs = tmp_path / "my folder", tmp_path / "bin"
        run = folder / "runs" / "d26"
        for path in (programs, run):
            path.mkdir(parents=True)
        noted = f'#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@" >> "{tmp_path}/noted"\n'
        if status is not None:
            (run / "config.json").touch()
            noted += f"""echo '"status": "{status}"' > "{run}/run.json"\n"""
        (programs / "srun").write_text(f"{noted}exit {ends_with}\n")
        (programs / "scontrol").write_text(f"{noted}echo node0\n")
        for program in programs.iterdir():
            program.chmod(0o700)
        (script,) = blocks(TEXTS["docs/cluster.md"], "bash")
        slurm = {"JOB_NAME": "d26", "JOB_ID": "7", "JOB_NODELIST": "node[0-1]", "NNODES": "2", "CPUS_PER_TASK": "64"}
        env = {f"SLURM_{name}": value for name, value in slurm.items()} | {"PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
        said = (tmp_path / "noted").read_text().splitlines()
        started = said[said.index("srun") :]
        assert started[:4] == ["srun", "--cpus-per-task", "64", "torchrun"]
        words = started[started.index("train") + 1 :][: 2 if status else None]
        if status:
            assert words == ["--resume", str(run)]
        else:
            assert words[-2:] == ["--run-dir", str(run)]
            assert "--checkpoint.every-seconds" in words
        assert (started[-3:] == ["scontrol", "requeue", "7"]) == requeued
        assert (done.returncode, done.stderr) == (0 if requeued else ends_with, "")


class TestReliability:
    PAGE = TEXTS["docs/reliability.md"]

    def test_names_tests_that_are_there(self) -> None:
        named = set(re.findall(r"`(tests/[\w/]+\.py)`", self.PAGE))
        assert named
        assert all((ROOT / name).is_file() for name in named)

    def test_figures_are_those_of_the_long_tests(self) -> None:
        """From a real run; here only that every row is there, and that everything survived."""
        figures = self.PAGE.partition(fault_figures.BEGIN)[2].partition(fault_figures.END)[0]
        rows = table(figures, "what is done")
        assert [*rows] == [*fault_figures.ROWS.values(), "all"]
        for figure in rows.values():
            done, survived, _ = figure.split(" | ")
            assert done == survived
        assert re.search(r"; commit [0-9a-f]{10}(, [0-9a-f]{10})*\.\n", figures)


class TestQuickstartOutput:
    """The output in the README is a real run's; here only that it still has the form of one."""

    OUTPUT = README.partition("<!-- quickstart output: begin -->")[2].partition("<!-- quickstart output: end -->")[0]

    def test_ends_in_the_closing_block(self) -> None:
        (block,) = [block for block in blocks(self.OUTPUT) if "\n---\nval_bpb:" in block]
        keys = re.findall(r"^(\w+): +[\d.]+$", block.rpartition("---\n")[2], re.M)
        assert keys == [key for key in table(CONTRACTS, "key") if key != "core_metric"]

    def test_has_step_lines_as_the_recorder_writes_them(self, run: Path) -> None:
        def form(line: str) -> str:
            return re.sub(r"[\d.,]+", "0", line)

        written = next(line for line in (run / "log.txt").read_text().splitlines() if line.startswith("step 00001 ("))
        shown = [line for line in self.OUTPUT.splitlines() if re.match(r"step \d{5} \(", line)]
        assert shown
        assert {form(line) for line in shown} == {form(written)}
