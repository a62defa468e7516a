"""`--json` prints one object and nothing else, with unrounded numbers; `--quiet` prints how a run ends and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import arguments, command, lines_of, train

CONTRACTS = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return train(folder, "run", steps=3)


def answer(*argv: object) -> dict[str, Any]:
    """The object that a command prints on stdout, alone."""
    code, out, _ = command([*argv, "--json"])
    assert code == 0
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


def documented(name: str) -> set[str]:
    """The keys that docs/contracts.md names for a command."""
    row = re.search(rf"^\| `{name}(?: [A-Z]+)?` \| (.*) \|$", CONTRACTS, re.MULTILINE)
    assert row is not None
    return set(re.findall(r"`(\w+)`", row[1]))


def test_eval(run: Path) -> None:
    figures = answer("eval", run)
    last = lines_of(run, "eval")[-1]
    assert (figures["val_loss"], figures["val_bpb"]) == (last["val_loss"], last["val_bpb"])
    assert (figures["run"], figures["step"]) == (str(run), 3)
    assert figures.keys() <= documented("gptlab eval")
    text = command(["eval", run])[1]
    assert f"val_bpb: {figures['val_bpb']:.6f}\n" in text


def test_eval_core(folder: Path, run: Path) -> None:
    figures = answer("eval", run, "--core", "--core-dir", folder / "bundle", "--core-examples", 4)
    assert figures["tasks"].keys() == figures["centered"].keys() == {"pick", "fit", "go on"}
    assert figures["core_metric"] == pytest.approx(sum(figures["centered"].values()) / 3)
    assert figures.keys() <= documented("gptlab eval")


def test_sample(run: Path) -> None:
    words = ["sample", run, "--prompt", "the ", "fox", "--max-tokens", 5]
    drawn = answer(*words)
    assert [one["prompt"] for one in drawn["samples"]] == ["the ", "fox"]
    texts = [one["prompt"] + one["text"] for one in drawn["samples"]]
    assert command(words)[1] == "\n---\n".join(texts) + "\n"
    assert drawn.keys() == documented("gptlab sample") - {"prompt", "text"}


def test_plan(folder: Path) -> None:
    words = arguments(folder, "planned")
    plan = answer("plan", *words)
    assert plan.keys() == documented("gptlab plan")
    assert (plan["steps"], plan["tokens"]) == (12, 12 * 256)
    assert plan["total_flops"] == plan["tokens"] * plan["flops_per_token"]
    assert sum(plan["parameters_by_role"].values()) == plan["parameters"]
    assert plan["config"]["model"]["n_layer"] == 1
    assert sum(plan["memory_bytes_by_part"].values()) == plan["memory_bytes"]


def test_data_list(folder: Path, run: Path) -> None:
    listed = answer("data", "list", "--cache-dir", folder / "cache")
    assert listed.keys() == documented("gptlab data list")
    (prepared,) = listed["prepared"]
    assert (prepared["tokenizer"], prepared["vocab_size"], prepared["damage"]) == ("byte", 257, None)
    assert {"fineweb-edu", "tinyshakespeare"} <= {corpus["name"] for corpus in listed["corpora"]}
    assert f"{prepared['tokens']:,}" in command(["data", "list", "--cache-dir", folder / "cache"])[1]


@pytest.mark.parametrize("argv", [["eval", "nowhere"], ["sample", "nowhere"], ["plan", "--depth", "0"]])
def test_an_error_prints_no_object(argv: list[str]) -> None:
    code, out, err = command([*argv, "--json"])
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_quiet_is_the_closing_block_and_warnings(folder: Path) -> None:
    code, out, err = command(["train", *arguments(folder, "quiet", {"steps": 3}), "--quiet"])
    assert (code, err) == (0, "")
    first, *block = out.splitlines()
    assert first == "---"
    assert [line.partition(":")[0] for line in block][:2] == ["val_bpb", "training_seconds"]
    log = (folder / "quiet" / "log.txt").read_text()
    assert log.endswith(out)
    assert "step 00003 (100.0%)" in log


def test_quiet_lets_warnings_through(folder: Path) -> None:
    words = arguments(folder, "warned", {"steps": 1, "eval.core_every_steps": 1})
    assert "warning: this run goes without CORE" in command(["train", *words, "--quiet"])[1]
