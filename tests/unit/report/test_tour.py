"""The tour: its template, docs/tour.md, and what it says of runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import command
from written_runs import write_run

from gptlab.app.commands import longer_command
from gptlab.config.load import config_from_json, leaf_fields
from gptlab.config.run import RunConfig
from gptlab.data.tokenizer.base import ByteTokenizer
from gptlab.report.run_facts import read_facts
from gptlab.report.tour import PLACE, template, tour, values_of
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.records.metrics import MetricsLog

ROOT = Path(__file__).parents[3]
HOSTILE = "```\n<script>alert(1)</script>\x1b]0;x\x07{{command}}"


def trained(folder: Path, prompt: str = "ab cd", **fields: Any) -> Path:
    """A finished run of 30 steps with a checkpoint and, where there is a prompt, a sample."""
    run = write_run(folder, [9.0, 3.0], every_steps=30, tokenizer__kind="byte", model__vocab_size=257, **fields)
    ByteTokenizer().save(run / "tokenizer")
    if prompt:
        with MetricsLog(run / "metrics.jsonl") as log:
            log.write("sample", step=30, prompt=prompt, text=f"{prompt}, and so on")
    saved = run / "checkpoints" / "step-00000030"
    saved.mkdir(parents=True)
    weights = {"token_embedding.weight": [257, 8], "blocks.0.mlp.up.weight": [32, 8], "blocks.1.mlp.up.weight": [32, 8],
               "head.weight": [257, 8]}  # fmt: skip
    manifest = {"model": {name: {"dtype": "F32", "shape": shape, "pieces": []} for name, shape in weights.items()}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    return run


def test_every_place_of_the_template_has_a_value_and_every_value_a_place(tmp_path: Path) -> None:
    names = {*PLACE.findall(template())}
    of_fields = {name for name in names if "." in name}
    assert of_fields < leaf_fields(RunConfig).keys()
    assert names - of_fields == values_of(read_facts(trained(tmp_path / "run")), ascii=True).keys()


def test_every_function_that_it_names_is_there() -> None:
    text = " ".join(template().split())
    named = re.findall(r"`(\w+)` \(`(gptlab/[\w/]+\.py)`\)", text)
    assert len(named) == text.count("(`gptlab/") > 25
    for name, file in named:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", code, re.M), f"{file} has no {name}"
    for phase in re.split(r"^## \d", template(), flags=re.M)[1:]:
        assert "**In the code:** `" in phase, phase[:40]


def test_the_page_in_docs_is_the_template_with_values() -> None:
    """`gptlab tour RUN --out docs/tour.md` writes it again."""
    page = " ".join((ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split())
    place = 0
    for words in re.split(PLACE, " ".join(template().split()))[::2]:
        found = page.find(words.strip(), place)
        assert found >= 0, f"docs/tour.md lacks: {words}"
        place = found + len(words.strip())
    assert "{{" not in page


def test_it_has_the_numbers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tour(read_facts(trained(Path("run"))))
    for words in (
        "The run is `run`",
        "ln(257) = 5.5491",
        "This is the beginning of a text of this run, one token a line",
        "4,624 numbers in all",
        "layer 0, 1",
        "input   BOS  a  b  ·  c",
        "target  a    b  ·  c  d",
        "3.0000 nats a token, which are 4.328 bits (divided by ln 2), and 3.0000 bits per byte",
        "ab cd, and so on",
        "Each of the 256 bytes is a token.",
    ):
        assert words in " ".join(page.split()) or words in page, words
    assert max(map(len, page.splitlines())) <= 120


def test_a_line_of_every_30_steps_is_no_first_and_no_last_step(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    path = run / "summary.json"
    numbers = {"num_steps": 40, "total_tokens_M": 0.04, "total_flops": 4.8e8, "training_seconds": 80.0}
    write_json_atomic(path, {**json.loads(path.read_text()), **numbers})
    page = " ".join(tour(read_facts(run)).split())
    assert "Step 30 had a loss of 3.0000" in page
    assert "40 steps took 80 s, 500 tokens a second. A token costs 12k floating-point operations" in page


def test_rows_that_do_not_begin_with_bos(tmp_path: Path) -> None:
    page = " ".join(tour(read_facts(trained(tmp_path / "run", data__rows="random"))).split())
    assert "input a b · c" in page


def test_without_samples_it_shows_the_tokens_of_an_example(tmp_path: Path) -> None:
    page = " ".join(tour(read_facts(trained(tmp_path / "run", prompt=""))).split())
    assert "This is the beginning of an example sentence, one token a line" in page
    assert "input BOS T h e" in page
    assert "This run drew no samples." in page


def test_texts_of_a_run_stay_text(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", prompt=HOSTILE, data__source=(HOSTILE,))
    path = run / "run.json"
    write_json_atomic(path, {**json.loads(path.read_text()), "argv": ["train", HOSTILE], "device_name": HOSTILE})
    page = tour(read_facts(run))
    assert "\x1b" not in page
    outside = re.sub(r"^(`{3,})\n.*?^\1$", "", page, flags=re.M | re.S)
    outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", outside, flags=re.S)  # code within a sentence
    assert "script" in outside
    assert not re.search(r"(?<!\\)<script", outside)


@pytest.mark.parametrize(
    ("products", "words"),
    [("kernels", "its matrix products, and what is between them"), ("library", "PyTorch multiplies its matrices;")],
)
def test_says_what_multiplies_where_nothing_is_compiled(tmp_path: Path, products: str, words: str) -> None:
    """And no time of compiling: the run's clock notes some microseconds."""
    run = trained(tmp_path / "run")
    for name, changed in (
        ("run.json", {"implementations": {"kernels": "0123", "products": products, "compile": "off"}}),
        ("summary.json", {"compile_seconds": 1.8e-6}),
    ):
        path = run / name
        write_json_atomic(path, {**json.loads(path.read_text()), **changed})
    page = tour(read_facts(run))
    assert f"The model was not compiled: {words}" in " ".join(page.split())
    assert not re.search(r"^compilation ", page, re.M)
    assert re.search(r"^training  ", page, re.M)


def test_of_a_run_that_has_not_trained_or_finished(tmp_path: Path) -> None:
    untrained = write_run(tmp_path / "untrained", [9.0], status="preempted")
    code, _, err = command(["tour", untrained])
    assert (code, err.count("\n")) == (2, 1)
    assert "no training step" in err
    stopped = trained(tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    path = stopped / "run.json"
    write_json_atomic(path, {**json.loads(path.read_text()), "status": "preempted"})
    page = tour(read_facts(stopped))
    assert "was stopped after step 30" in page
    assert re.search(f"^gptlab train --resume {stopped} +# train it on$", page, re.M)
    shutil.rmtree(stopped / "checkpoints")
    page = tour(read_facts(stopped))
    assert not re.search(r"^gptlab (sample|train --resume) |These are its weights|\bIt is written", page, re.M)
    assert re.search(f"^gptlab train --from {stopped} ", page, re.M)


@pytest.mark.parametrize(
    ("fields", "longer"),
    [
        ({}, "--minutes 6"),
        ({"horizon__unit": "steps", "horizon__amount": 30.0}, "--steps 60"),
        ({"horizon__unit": "tokens_per_param", "horizon__amount": 0.5}, "--tokens-per-param 1"),
        ({"horizon__until_val_loss": 3.0, "eval__every_steps": 30}, "--minutes 6 --until-val-loss none"),
    ],
)
def test_a_finished_run_is_trained_to_twice_its_length(tmp_path: Path, fields: dict[str, Any], longer: str) -> None:
    """By the command that the end of training prints."""
    facts = read_facts(trained(tmp_path / "run", **fields))
    config = config_from_json(facts.record.directory.read_config())
    assert longer_command(facts.record.path, config).endswith(f"gptlab train --resume {tmp_path / 'run'} {longer}")
    assert re.search(f"^gptlab train --resume {tmp_path / 'run'} {longer} +# train it on$", tour(facts), re.M)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "The first step that ends past the budget is the last."),
        (
            {"horizon__until_val_loss": 5.0, "eval__every_steps": 30},
            "The run ends at the first validation with a loss of 5 or less, at the latest after the first step "
            "that ends past the budget.",
        ),
        (
            {
                "horizon__until_val_loss": 5.0,
                "horizon__unit": "steps",
                "horizon__amount": 30.0,
                "eval__every_steps": 15,
            },
            "The run ends at the first validation with a loss of 5 or less, at the latest after 30 steps.",
        ),
    ],
)
def test_says_what_ends_the_run(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    assert words in " ".join(tour(read_facts(trained(tmp_path / "run", **fields))).split())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "(`lr_scale` is its share of the full one) is constant, then falls linearly."),
        ({"schedule__warmup_fraction": 0.125}, "rises in the first 12.5% of the run, then is constant, then falls"),
        (
            {"schedule__kind": "cosine", "schedule__warmup_fraction": 0.02},
            "full one) rises in the first 2% of the run, then falls along half a cosine.",
        ),
    ],
)
def test_says_how_the_learning_rate_changes(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    assert words in " ".join(tour(read_facts(trained(tmp_path / "run", **fields))).split())


def test_says_that_the_weights_were_broken_at_the_last_validation(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    with MetricsLog(run / "metrics.jsonl") as metrics:
        metrics.write("eval", step=40, val_loss=math.nan, val_bpb=math.nan, train_seconds=40.0, tokens=40_000)
    page = " ".join(tour(read_facts(run)).split())
    assert "After step 40: nan nats a token, nan bits per byte. What is not finite was computed with broken" in page


def test_one_of_a_thing_is_no_plural(tmp_path: Path) -> None:
    fields = {"model__n_layer": 1, "horizon__unit": "steps", "horizon__amount": 1.0}
    run = write_run(tmp_path / "run", [9.0, 3.0], every_steps=1, tokenizer__kind="byte", status="failed", **fields)
    ByteTokenizer().save(run / "tokenizer")
    counts = {"tokens": 10, "bytes": 10, "documents": 1}
    path = run / "run.json"
    corpus = {"train": counts, "val": counts, "rows_per_epoch": 1}
    write_json_atomic(path, {**json.loads(path.read_text()), "corpus": corpus})
    page = " ".join(tour(read_facts(run)).split())
    assert "A GPT of 1 layer and width" in page
    assert "was to train with the recipe custom on stdlib for 1 step; it failed" in page
    assert "1 step took" in page
    assert "10 bytes, 1 document to train on" in page
    assert "The run ends after 1 step." in page


def test_the_command_takes_the_newest_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["tour"])[::2] == (
        2,
        "gptlab: error: there is no finished run in runs/: train one (`gptlab train`), or name one\n",
    )
    trained(tmp_path / "runs" / "a")
    path = trained(tmp_path / "runs" / "b") / "run.json"
    write_json_atomic(path, {**json.loads(path.read_text()), "start": "2027-01-01"})
    write_run(tmp_path / "runs" / "c", [9.0], status="running")
    code, out, err = command(["tour"])
    assert (code, err) == (0, "")
    assert "The run is `b`" in out
    assert command(["tour", "runs/a", "--out", "tour.md"])[:2] == (0, "tour: tour.md\n")
    code, _, err = command(["tour", "runs/a", "--out", "."])
    assert (code, err.startswith("gptlab: error: cannot write .: ")) == (2, True)
    assert "The run is `a`" in (tmp_path / "tour.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_characters_that_a_terminal_lacks_end_no_command(tmp_path: Path, encoding: str) -> None:
    run = trained(tmp_path / "dé", prompt="π ≠ é")
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    printed = {}
    for name in ("tour", "runs", "report"):
        words = [sys.executable, "-P", "-m", "gptlab", name, str(run)]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name
        printed[name] = done.stdout
    assert b" |*" in printed["tour"]
    assert ("dé" if encoding == "cp1252" else "d?").encode(encoding) in printed["runs"]


def test_its_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the run is, and whatever was typed."""
    monkeypatch.chdir(tmp_path)
    path = trained(Path("my sweep") / "a b") / "run.json"
    typed = ["train", "quickstart", "--sample.prompts", "Hello, big world", "a * b"]
    write_json_atomic(path, {**json.loads(path.read_text()), "argv": typed})
    lines = tour(read_facts(path.parent)).splitlines()
    assert f"gptlab {shlex.join(typed)}" in lines
    assert any(line.startswith("gptlab sample 'my sweep/a b' --interactive ") for line in lines)
    write_json_atomic(path, {**json.loads(path.read_text()), "argv": ["tune it.py", "3"]})
    assert "python 'tune it.py' 3" in tour(read_facts(path.parent)).splitlines()
