"""Every command explains itself: exit code 0, defaults and units named, and quickly where nothing is computed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_limit import cpu_limit

import gptlab
from gptlab.app.run.run_request import TrainArguments
from gptlab.cli.arguments.help import fitted
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.arguments.run_help import recipe_list
from gptlab.cli.main import COMMANDS, HELP, main
from gptlab.config import foreign_names
from gptlab.config.recipes import RECIPES, configure
from gptlab.config.run import RunConfig
from gptlab.data.corpus.known_corpora import CORPORA
from gptlab.optim.schedule import lr_scale

ROOT = Path(__file__).parents[3]

LEAVES = [
    ["train"], ["plan"], ["eval"], ["sample"], ["compare"], ["sweep"], ["ladder"], ["export"], ["bench"],
    ["runs"], ["runs", "prune"], ["clean"], ["report"], ["tour"], ["dash"], ["completion"],
    ["data", "list"], ["data", "prepare"], ["data", "inspect"], ["tokenizer", "train"], ["tokenizer", "eval"],
    ["import", "hf"], ["import", "nanogpt"], ["lab", "try"], ["lab", "run"], ["lab", "status"], ["lab", "show"],
]  # fmt: skip

UNITS = {
    "train": ("tokens", "minutes", "seconds", "nats/token", "steps", "floating-point operations"),
    "plan": ("tokens", "minutes", "seconds", "nats/token", "steps", "floating-point operations"),
    "sample": ("tokens",),
    "eval": ("tokens",),
}

OF_RUNS = ("train", "plan", "bench", "sweep", "ladder")

NANOGPT = """
out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log wandb_project
wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout bias
learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend device
dtype compile
"""
"""The globals of nanoGPT's train.py, which its configurator makes arguments."""

NANOCHAT = """
run device-type depth aspect-ratio head-dim max-seq-len window-pattern num-iterations target-flops
target-param-data-ratio device-batch-size total-batch-size embedding-lr unembedding-lr weight-decay matrix-lr scalar-lr
adam-beta1 adam-beta2 warmup-ratio warmdown-ratio final-lr-frac resume-from-step eval-every eval-tokens
core-metric-every core-metric-max-per-task sample-every save-every model-tag
"""
"""The arguments of nanochat's scripts/base_train.py of February 2026."""

MODDED_NANOGPT = """
input_bin input_val_bin batch_size accumulation sequence_length num_iterations learning_rate warmup_iters
warmdown_iters weight_decay val_loss_every val_max_steps save_every
"""
"""Those of train_gpt2.py of October 2024 (`model`, d12 to d48, is here a group of fields)."""

AUTORESEARCH = """
MAX_SEQ_LEN TIME_BUDGET EVAL_TOKENS ASPECT_RATIO HEAD_DIM WINDOW_PATTERN TOTAL_BATCH_SIZE EMBEDDING_LR UNEMBEDDING_LR
MATRIX_LR SCALAR_LR WEIGHT_DECAY ADAM_BETAS WARMUP_RATIO WARMDOWN_RATIO FINAL_LR_FRAC DEPTH DEVICE_BATCH_SIZE
"""
"""The constants of train.py and prepare.py, which are edited there."""

FOREIGN = sorted({*f"{NANOGPT} {NANOCHAT} {MODDED_NANOGPT} {AUTORESEARCH} lr wandb".split()})


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def resolve(*words: str) -> RunConfig:
    return read_request(words, TrainArguments, prog="gptlab train", description="Train.").config(pytest.fail)


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("sweep --vary model.seq_len=8,16", ["--run-dir x"]),
        ("ladder --depths 1,2", ["--run-dir x", "--depth 3"]),
        ("lab new first", ["--run-dir x", "--seed 3", "--until-val-loss 2", "--flops 1e9", "--tokens-per-param 2"]),
        ("lab new first --steps 2", ["--init-from x"]),
    ],
)
def test_no_help_offers_what_the_command_refuses(
    command: str, refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gptlab.app.new_lab.sized", lambda request, *_: (request.config(pytest.fail), []))
    for given in refused:
        assert main([*command.split(), *given.split()]) == 2, given
    capsys.readouterr()
    for page in ("--help", "--help-all"):
        assert main([*command.split(), page]) == 0
        shown = set(re.findall(r"^ *--([a-z.-]+)", capsys.readouterr().out, re.MULTILINE))
        assert not shown & {given.split()[0].removeprefix("--") for given in refused}
        assert {"data", "minutes", "model.seq-len"} <= shown


def test_every_command_has_a_leaf() -> None:
    assert {leaf[0] for leaf in LEAVES} == set(COMMANDS)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints that ends well, on stdout alone."""
    assert main([*argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("leaf", LEAVES, ids=" ".join)
def test_help_names_every_argument_with_its_default(leaf: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, *leaf, "--help-all" if leaf[0] in OF_RUNS else "--help")
    assert f"usage: gptlab {' '.join(leaf)}" in out
    assert (
        re.search(r"--[\w.-]+ \S+ \[\S+\]", out)
        or leaf == ["data", "list"]
        or leaf[0] in ("import", "compare", "runs", "lab", "report", "tour", "dash", "completion")
    )
    for unit in UNITS.get(leaf[0], ()):
        assert unit in " ".join(out.split()), f"{leaf[0]} --help does not name {unit}"


def test_usage_has_optional_words_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("tour [RUN]", "compare [RUNS ...]", "eval RUN", "lab try NAME", "lab show NAME NUMBER"):
        assert f"usage: gptlab {words} [--ARGUMENT" in shown(
            capsys, *words.lower().split()[: 1 + ("lab" in words)], "--help"
        )


@pytest.mark.parametrize("leaf", LEAVES, ids=" ".join)
def test_help_is_plain_text_in_80_columns(leaf: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No type in Python's notation, no empty default, and no lineage by a number that only this project gave it."""
    pages = [shown(capsys, *leaf, "--help")]
    if leaf[0] in OF_RUNS:  # which print the same fields by one function
        recipes = RECIPES if leaf == ["train"] else ["quickstart"]
        pages += [shown(capsys, *leaf, recipe, flag) for recipe in recipes for flag in ("--help", "--help-all")]
    for page in pages:
        assert max(map(len, page.splitlines())) <= 80
        for wrong in ("{None}", "|STR", "INT", "default: )", "None]", "[]", "MISSING"):
            assert wrong not in page
        assert not re.search(r"\bseeds? \d", page)


@pytest.mark.parametrize("command", OF_RUNS)
def test_the_page_of_a_run_fits_on_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One page of what people change; the 110 fields of a run behind --help-all, or by part."""
    page = shown(capsys, command, "--help")
    assert len(page.splitlines()) <= (45 if command in ("train", "plan") else 50)
    depth = "--depths" if command == "ladder" else "--depth"
    for name in ("--data", depth, "--minutes", "--steps", "--batch.total-tokens", "--seed", "--dtype"):
        assert f"  {name} " in page
    assert "--faults.max-rewinds" not in page
    everything = shown(capsys, command, "--help-all")
    assert "--faults.max-rewinds N [10]" in everything


def test_help_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*argv: str) -> set[str]:
        return set(re.findall(r"^  (--[\w.-]+)", shown(capsys, "train", *argv), re.MULTILINE))

    assert names("--help", "schedule") == {f"--schedule.{n}" for n in (
        "kind", "warmup-fraction", "warmdown-fraction", "final-lr-scale", "weight-decay-final",
    )}  # fmt: skip
    assert {name.partition(".")[0] for name in names("--help=optim")} == {"--optim"}
    assert names("--help", "optim.muon") < names("--help", "optim")
    assert {"--optim.muon.lr", "--optim.head.lr"} <= names("--help", "lr")
    assert names("nanochat", "--help", "recipe") >= {"--embedding-lr", "--aspect-ratio"}
    assert "  --optim.muon.weight-decay X [0.072]" in shown(capsys, "train", "--help", "optim", "nanochat")


@pytest.mark.parametrize(
    ("topic", "says"), [("optin", "did you mean optim?"), ("max_iters", "--steps"), ("zzzz", "--help-all")]
)
def test_help_on_nothing(topic: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", topic]) == 2
    assert says in capsys.readouterr().err


def test_names_of_other_programs_are_answered_by_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Each argument of the four programs is one of ours, or is answered by a name that we have."""
    offered = set(re.findall(r"--[a-z][\w.-]*", shown(capsys, "train", "nanochat", "--help-all"))) | {"--help"}
    foreign = [f"--{name}" for name in FOREIGN if f"--{name}".lower().replace("_", "-") not in offered]
    assert len(foreign) > 30
    for spelling in dict.fromkeys(s for f in foreign for s in (f, f.replace("_", "-"), f.replace("-", "_"))):
        assert main(["train", spelling, "7"]) == 2, spelling
        answer = capsys.readouterr().err
        assert answer.count("\n") == 1, answer
        named = re.findall(r"--[a-z][\w.-]*\w", answer)
        unknown = {spelling.lower().replace("_", "-"), spelling.replace("_", "-")}
        ours = [one for one in named if one not in unknown]
        assert ours or "metrics.jsonl" in answer or "chosen by" in answer, answer
        assert set(ours) <= offered, answer


def test_answers_name_only_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    offered = set(re.findall(r"--[a-z][\w.-]*", shown(capsys, "train", "nanochat", "--help-all")))
    for name, text in foreign_names._ANSWERS.items():
        assert set(re.findall(r"--[a-z][\w.-]*\w", text)) <= offered, name


def test_nanogpts_config_files_are_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config/train_shakespeare_char.py", "--device=cpu"]) == 2
    assert "gptlab train nanogpt/shakespeare-char\n" in capsys.readouterr().err
    for command in foreign_names._CONFIG_FILES.values():
        assert command.split()[2] in RECIPES
        assert resolve(*command.split()[2:]).recipe == command.split()[2]


@pytest.mark.parametrize("size", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_evaluating_gpt2_measures_as_much_of_the_same_text_as_nanogpt(size: str) -> None:
    command = foreign_names.config_file_answer(f"config/eval_{size.replace('-', '_')}.py")
    assert command is not None
    config = resolve(*command.split()[2:])
    assert (config.init_from, config.eval.only) == (size, True)
    assert config.eval.tokens == config.eval.train_tokens == 500 * 8 * 1024
    assert config.data == configure("nanogpt/gpt2-124m").data  # OpenWebText, of which 0.0005 are held out


@pytest.mark.parametrize("recipe", ["nanogpt/gpt2-124m", "nanogpt/finetune"])
def test_the_answer_to_decay_lr_gives_nanogpts_constant_rate(recipe: str) -> None:
    answer = foreign_names.answer("decay_lr")
    assert answer is not None
    schedule = resolve(recipe, *answer.partition(" keeps")[0].split()).schedule
    assert {lr_scale(schedule, step / 10, 1 / 10) for step in range(10)} == {1.0}


def test_the_answer_to_warmup_iters_gives_nanogpts_rates() -> None:
    """train.py: learning_rate * (it + 1) / (warmup_iters + 1)."""
    answer = foreign_names.answer("warmup_iters")
    assert answer is not None
    assert "X = (warmup_iters + 1) / all steps" in answer
    schedule = resolve("nanogpt/gpt2-124m", "--schedule.warmup-fraction", str((3 + 1) / 16)).schedule
    assert [lr_scale(schedule, step / 16, 1 / 16) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("command", ["data", "tokenizer", "import", "lab"])
def test_groups_list_their_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for group, *names in LEAVES if group == command for name in names)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80])
def test_the_lists_fit_the_terminal(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    recipes = shown(capsys, "train", "--list")
    assert max(map(len, recipes.splitlines())) <= width
    assert re.findall(r"^\S+", recipes, re.MULTILINE) == list(RECIPES)
    assert " ".join(recipes.split()) == " ".join(recipe_list().split())
    listed = shown(capsys, "data", "list", "--cache-dir", str(tmp_path)).partition("\nprepared in ")[0]
    assert max(len(line) for line in listed.splitlines() if "https://" not in line) <= width
    assert all(f"\n    {corpus.place.address}\n" in listed for corpus in CORPORA)


def test_long_lines_go_on_where_their_last_column_begins() -> None:
    assert fitted("usage: one\n\n  name   one two three four\none two three four\n", 16) == (
        "usage: one\n\n  name   one two\n         three\n         four\none two three\nfour\n"
    )
    assert fitted("  name  https://example.org/a-b", 16) == "  name\n        https://example.org/a-b"


def test_the_first_page(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        assert capsys.readouterr().out == HELP
    assert all(f"\n  {name} " in HELP for name in COMMANDS)
    assert max(map(len, HELP.splitlines())) <= 80


def test_help_on_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for words in (["help", "bench"], ["bench", "--help"]):
        assert main(words) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert "allows. --bench-steps" in pages[0], "a text is one paragraph"


@pytest.mark.parametrize(
    ("variables", "prints"),
    [({"RANK": "1"}, True), ({"RANK": "1", "WORLD_SIZE": ""}, True), ({"RANK": "1", "WORLD_SIZE": "2"}, False)],
)
def test_only_one_of_several_processes_is_silent(
    variables: dict[str, str], prints: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program may have left a RANK behind."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--version"]) == 0
    assert bool(capsys.readouterr().out) == prints


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gptlab {gptlab.__version__}\n"


def test_the_first_page_takes_under_half_a_second() -> None:
    """As a process of its own, interpreter start included, in seconds of processor time."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "gptlab", "--help"], cwd=ROOT, capture_output=True, timeout=60)
    after = os.times()
    assert done.returncode == 0
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < cpu_limit(0.5)


def test_no_torch_where_nothing_is_computed() -> None:
    """In one process, from the lightest to the heaviest, so that the first that imports it is named."""
    lines = ["import sys, gptlab; gptlab.recipes; dir(gptlab); gptlab.UserError", "from gptlab.cli.main import main"]
    lines[1:1] = ["assert not {'torch', 'numpy', 'tyro'} & {*sys.modules}"]
    for argv in (
        ["--help"], ["--version"], ["trian"], ["train", "--help"], ["train", "--list"], ["eval", "--help"],
        ["sample", "--help"],
    ):  # fmt: skip
        lines += [f"main({argv})", f"assert 'torch' not in sys.modules, {argv}"]
    lines += ["import gptlab.cli.data", "assert 'torch' not in sys.modules, 'gptlab.cli.data'"]
    done = fresh("\n".join(lines))
    assert done.returncode == 0, done.stderr


def test_python_has_the_same_names() -> None:
    config = gptlab.recipes.quickstart(depth=4)
    assert (config.model.n_layer, config.horizon.amount) == (4, 180.0)
    importlib.import_module("gptlab.training.checkpoint.retention")
    assert callable(gptlab.train)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = gptlab.nothing_like_it


def test_a_run_that_a_signal_stopped_does_not_wait_for_its_threads() -> None:
    """Such as one that waits for a compiler: further signals are ignored, and the command stayed for a minute."""
    busy = "threading.Thread(target=time.sleep, args=(60,)).start()"
    replaced = f"cli.main = lambda argv: ({busy}, print('saved', flush=True), 75)[-1]"
    program = f"import threading, time\nfrom gptlab.cli import main as cli\n{replaced}"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}\ncli.entry_point()"], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (ended.returncode, ended.stdout) == (75, "saved\n"), ended.stderr


@pytest.mark.parametrize("words", [["--help"], ["clean", "--help"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    """`gptlab --help | true`: no traceback, and the exit code that shells give to a broken pipe."""
    program = "import time; time.sleep(0.5); from gptlab.cli.main import entry_point; entry_point()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], env={**os.environ, "PYTHONUNBUFFERED": ""},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gptlab", "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "gptlab: error: cannot write the output: No space left on device\n")
