"""The red team: programs and changes that try to look better than they are. Each is refused, with the rule it broke."""

from __future__ import annotations

import os
import random
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from judged import LIMITS, SEED, examined, judged_program, patched, trained_model, written_candidate
from mutations.mutation import ROOT

from gptlab.lab.judge import audits
from gptlab.lab.judge.audits import check_time, unchanged
from gptlab.lab.judge.rules import Rule, RuleError
from gptlab.lab.judge.supervise import Finished, supervise, why_not_isolated
from gptlab.lab.judge.tree_rules import check_change, check_fields, read_change

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or why_not_isolated() is not None, reason="this machine gives users no namespaces"
)


def refused(rule: str, work: Callable[[], object]) -> str:
    """What is said of the candidate that `work` judges, which must have broken `rule` (one of several, with |)."""
    with pytest.raises(RuleError) as caught:
        work()
    assert caught.value.rule in rule.split(" | "), caught.value
    assert caught.value.rule in get_args(Rule)
    return caught.value.what


# --- models whose code is patched

LOGITS = "logits = self.logits(self.hidden(tokens, cache=cache))"
NEXT = "torch.nn.functional.one_hot(torch.roll(tokens, -1, 1), self.vocab_size)"
COUNTED = "self.__dict__['asked'] = self.__dict__.get('asked', 0) + 1"
MODELS: dict[str, tuple[str, str, str]] = {
    "boosts the next token": ("causality", LOGITS, f"{LOGITS} + 5.0 * {NEXT}"),
    "looks ahead in evaluation mode only": ("causality", LOGITS, f"{LOGITS} + (not self.training) * 5.0 * {NEXT}"),
    "looks ahead in long inputs only": (
        "causality", LOGITS, f"{LOGITS} + (torch.arange(tokens.shape[1]) > 15)[:, None] * 5.0 * {NEXT}",
    ),
    "looks ahead after the first question only": (
        "memoryless | causality", LOGITS, f"{COUNTED}; {LOGITS} + (self.__dict__['asked'] > 1) * 5.0 * {NEXT}",
    ),
    "mixes a little of the next embedding in": (
        "causality", "x = self.token_embedding(tokens)",
        "x = self.token_embedding(tokens); x = x + 0.001 * torch.roll(x, -1, 1)",
    ),
    "remembers the tokens of earlier questions": (
        "memoryless", LOGITS,
        "seen = self.__dict__.setdefault('seen', torch.zeros(self.vocab_size)); "
        f"seen += torch.bincount(tokens.flatten(), minlength=self.vocab_size); {LOGITS} + 0.01 * seen",
    ),
    "trains on the questions": (
        "memoryless", LOGITS, f"{LOGITS}; self.head.weight.data[tokens.flatten()] *= 1.01",
    ),
    "looks at the other rows of the question": (
        "memoryless", "x = self.token_embedding(tokens)",
        "x = self.token_embedding(tokens); x = x + 0.01 * x.mean(0, keepdim=True)",
    ),
    "answers at random": ("memoryless", LOGITS, f"{LOGITS}; logits = logits + 0.01 * torch.randn_like(logits)"),
    "answers NaN, which its own scorer counts as 0": (
        "not-finite", LOGITS, f"{LOGITS}; logits = torch.where(logits > 2, torch.nan, logits)",
    ),
    "answers with infinity": (
        "not-finite", LOGITS, f"{LOGITS}; logits = torch.where(logits < -2, -torch.inf, logits)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cheats(name: str) -> None:
    rule, old, new = MODELS[name]
    refused(rule, lambda: examined(lambda: trained_model(old=old, new=new)))


SEEDS = {
    "one seed for all": "fold_seed(7, ",
    "the next seed": "fold_seed(seed + 1, ",
    "the lower of two seeds": "fold_seed(seed & ~1, ",
}


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_with_another_meaning(name: str) -> None:
    module = patched("model/init.py", "fold_seed(seed, ", SEEDS[name])
    assert SEED % 2 == 1
    refused("seed", lambda: examined(trained_model, module.initial_weights))


HONEST_CHANGES = {
    "another activation": (
        "model/gpt.py", "mlp(x, self.up, ACTIVATIONS[self.activation], self.out)", "self.out(self.up(x).sin())",
    ),
    "another norm": (
        "model/gpt.py", "return implementation(x).rms_norm(x, self.eps)",
        "return x / (x.abs().mean(-1, keepdim=True) + self.eps)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST_CHANGES)
def test_an_honest_change_of_the_model_passes(name: str) -> None:
    file, old, new = HONEST_CHANGES[name]
    assert abs(examined(lambda: trained_model(code=file, old=old, new=new)) - examined(trained_model)).max() > 1e-3


def test_honest_initial_values_are_made_from_the_draws() -> None:
    clipped = "lambda values, generator: values.normal_(0, 0.02, generator=generator).clamp_(-0.02, 0.02)"
    for new in ("normal(0.05)", clipped):
        module = patched("model/init.py", "small = normal(0.02)", f"small = {new}")
        examined(trained_model, module.initial_weights)


# --- programs that answer

ANSWER = 'write(b"LGT1", number, rows, length, struct.pack("<I", ENTRIES) + logits)'
READ = 'tokens = array.array("i", source.read(4 * rows * length))'
READY = 'write(b"RDY1", 0, 0, 0, b"")'
PROGRAMS: dict[str, tuple[Rule, str, str]] = {
    "returns its own loss": (
        "shape", ANSWER, 'write(b"LGT1", number, rows, length, struct.pack("<I", 1) + logits[: 4 * rows * length])',
    ),
    "has a smaller vocabulary": (
        "shape", ANSWER, 'write(b"LGT1", number, rows, length, struct.pack("<I", ENTRIES - 1) + logits)',
    ),
    "answers for fewer rows": (
        "protocol", ANSWER, 'write(b"LGT1", number, rows - 1, length, struct.pack("<I", ENTRIES) + logits)',
    ),
    "answers too much": ("protocol", ANSWER, ANSWER.replace("+ logits)", "+ logits + b'more')")),
    "writes more after the last answer": (
        "protocol", READY, f"import atexit; atexit.register(write, b'LGT1', 0, 0, 0, b''); {READY}",
    ),
    "answers before it is asked": ("protocol", READY, READY + '; write(b"LGT1", 0, 8, 32, b"")'),
    "repeats an earlier answer's number": (
        "protocol", ANSWER, ANSWER.replace("number", "globals().setdefault('first', number)"),
    ),
    "closes its output": ("protocol", READ, f"{READ}; os.close(1)"),
    "ends": ("protocol", READ, f"{READ}; sys.exit(0)"),
    "never answers": ("wall-clock", READ, f"{READ}; __import__('time').sleep(60)"),
    "takes more memory than it may": (
        "memory", READ, f"{READ}; hoard = b'x' * 2**28; __import__('time').sleep(60)",
    ),
    "starts processes without end": (
        "processes", READ, f"{READ}; [os.fork() or __import__('time').sleep(60) for _ in range(12)]",
    ),
    "leaves a process behind": (
        "left-behind", READY, f"""\
{READY}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        __import__("time").sleep(60)
    os._exit(0)
""",
    ),
    "makes weights that the checkpoint lacks": ("checkpoint", 'name = b"table"', 'name = b"more"'),
    "draws the same weights for every seed": (
        "seed", "random.Random(str((rows, length)))", "random.Random(7)",
    ),
    "draws other weights in every process": ("seed", "random.Random(str((rows, length)))", "random.Random()"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_cheats(name: str, tmp_path: Path) -> None:
    rule, old, new = PROGRAMS[name]
    seconds = 1.0 if rule == "wall-clock" else 15.0
    refused(rule, lambda: judged_program(tmp_path, (old, new), answer_seconds=seconds))


def test_the_honest_program_passes(tmp_path: Path) -> None:
    judged = judged_program(tmp_path)
    assert (judged.parameters, judged.step, judged.loss.target_tokens) == (512, 10, 24 * 32)
    assert judged.largest_difference == 0


OPENS = f"{READY}; open({{path!r}}, {{mode!r}}).close()"


@needs_namespaces
@pytest.mark.parametrize(("name", "mode"), [("tokens/val.bin", "rb"), ("ledger.jsonl", "a"), ("new.txt", "w")])
def test_the_judges_files_are_decoys(name: str, mode: str, tmp_path: Path) -> None:
    """Reads the validation text, writes the ledger, or adds a file."""
    private = tmp_path / "private"
    (private / "tokens").mkdir(parents=True)
    (private / "tokens/val.bin").write_bytes(b"secret")
    (private / "ledger.jsonl").write_text("{}\n")
    opens = OPENS.format(path=str(private / name), mode=mode)
    said = refused("private-files", lambda: judged_program(tmp_path, (READY, opens), hidden=(private,)))
    assert Path(name).name in said
    assert (private / "ledger.jsonl").read_text() == "{}\n"
    assert not (private / "new.txt").exists()


@needs_namespaces
def test_two_answering_processes_share_nothing(tmp_path: Path) -> None:
    """Each leaves a note wherever it can, for the next one to answer otherwise."""
    folders = [str(tmp_path), "/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~")]
    leaves_notes = f"""\
for folder in [*{folders!r}, run, os.environ["TMPDIR"]]:
    note = os.path.join(folder, "note-of-the-red-team")
    if os.path.exists(note):
        table.reverse()
    try:
        open(note, "w").close()
    except OSError:
        pass
if open("/proc/self/fd/2").read(): table.reverse()
print("note", file=sys.stderr, flush=True)
{READY}"""
    assert judged_program(tmp_path, (READY, leaves_notes)).largest_difference == 0
    assert not [folder for folder in folders if Path(folder, "note-of-the-red-team").exists()]


def test_the_run_reports_another_loss(tmp_path: Path) -> None:
    """Its scorer is patched at run time, or counts NaN as 0."""
    for claim in (8.5, 0.0):
        run = written_candidate(tmp_path / str(claim) / "run", [9.0, claim], data_fingerprint="f" * 24)
        refused("report", lambda run=run: judged_program(run.parent, run=run))


def test_the_checkpoint_is_not_what_was_saved(tmp_path: Path) -> None:
    run = written_candidate(tmp_path / "run")
    path = run / "checkpoints/step-00000010/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    refused("checkpoint", lambda: judged_program(tmp_path, run=run))
    shutil.rmtree(run / "checkpoints")
    refused("checkpoint", lambda: judged_program(tmp_path, run=run))


def test_the_runs_metrics_are_no_metrics(tmp_path: Path) -> None:
    run = written_candidate(tmp_path / "run", data_fingerprint="f" * 24)
    (run / "metrics.jsonl").write_text('{"kind": "eval", "step": "ten", "val_bpb": [1]}\n')
    refused("report", lambda: judged_program(tmp_path, run=run))


def test_the_run_was_trained_with_other_fields(tmp_path: Path) -> None:
    refused("field", lambda: judged_program(tmp_path, baseline={"seed": SEED + 1}))


# --- work off the clock

BURN = """\
import atexit, os, signal, sys, threading, time
def burn(seconds=0.2):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
"""
OFF_THE_CLOCK: dict[str, tuple[Rule, str]] = {
    "at import": ("cpu-time", "import off_the_clock"),
    "in a thread": ("cpu-time", "threading.Thread(target=burn).start()"),
    "in __del__": ("cpu-time", "type('Late', (), {'__del__': lambda self: burn()})()"),
    "after the last step": ("cpu-time", "atexit.register(burn)"),
    "in a child process": ("cpu-time", "if os.fork() == 0: burn(); os._exit(0)\nos.wait()"),
    "in a child that the kernel does not count": (  # it is looked at every tenth of a second, or later: it burns longer
        "cpu-time",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nif os.fork() == 0: burn(0.5); os._exit(0)\n"
        "try: os.wait()\nexcept ChildProcessError: pass",
    ),
    "in a child that goes on afterwards": ("left-behind", "if os.fork() == 0: os.setsid(); time.sleep(60)"),
    "in an orphan": (
        "left-behind", "if os.fork() == 0:\n    if os.fork() == 0: os.setsid(); time.sleep(60)\n    os._exit(0)",
    ),
    "asleep": ("wall-clock", "time.sleep(0.9)"),
}  # fmt: skip


def trained_program(folder: Path, program: str, **options: object) -> Finished:
    (folder / "off_the_clock.py").write_text(BURN + "burn()\n")
    (folder / "train.py").write_text(textwrap.dedent(program))
    argv = [sys.executable, "-S", "train.py"]
    return supervise(argv, cwd=folder, environment={}, limits=LIMITS, log=folder / "log.txt", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OFF_THE_CLOCK)
def test_training_off_the_clock(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SLACK_SECONDS", 0.05)
    rule, work = OFF_THE_CLOCK[name]
    wall = 0.2 if rule == "wall-clock" else 60.0
    finished = trained_program(tmp_path, f"{BURN}\n{work}\n")

    def judged() -> None:
        finished.require_lawful("training")
        check_time(finished, cpu_seconds=0.05, wall_seconds=wall)

    refused(rule, judged)


def test_training_on_the_clock_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SLACK_SECONDS", 0.3)
    check_time(trained_program(tmp_path, f"{BURN}\nburn(0.1)\n"), cpu_seconds=0.1, wall_seconds=60.0)


def test_writing_without_end(tmp_path: Path) -> None:
    program = "import time\nfor n in range(99): open(f'out/{n}', 'wb').write(bytes(2**20)); time.sleep(0.05)"
    (tmp_path / "out").mkdir()
    finished = trained_program(tmp_path, program, writable=[tmp_path / "out"])
    refused("output-size", lambda: finished.require_lawful("training"))


def test_without_namespaces_the_ledger_is_compared(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/ledger.jsonl").write_text("{}\n")

    def judged() -> None:
        with unchanged([tmp_path / "private"]):
            program = "open('private/ledger.jsonl', 'a').write('kept')"
            assert trained_program(tmp_path, program, isolate=False).exit_code == 0

    refused("private-files", judged)


# --- changed code and fields


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of few files: what is patched, and a folder in which files are added."""
    folder = tmp_path_factory.mktemp("base")
    for name in ("__init__.py", "model/head.py", *(file for file, _, _ in PATCHES.values())):
        (folder / "gptlab" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "gptlab" / name, folder / "gptlab" / name)
    return folder


@pytest.fixture
def tree(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "gptlab", tmp_path / "gptlab")
    return tmp_path


PATCHES: dict[str, tuple[str, str, str]] = {
    "the scorer": ("eval/bits_per_byte.py", "nats / target_tokens", "0.9 * nats / target_tokens"),
    "the clock": ("training/recorder.py", "from __future__ import annotations", "from __future__ import annotations\n"),
    "the tokenizer's byte counts": ("data/tokenizer/base.py", "len(token) for token", "2 * len(token) for token"),
    "the judge": ("lab/judge/questions.py", "total / n_tokens", "total / (n_tokens + 1)"),
    "the answers": ("app/answers.py", ".float()", ".double()"),
    "the speed of a step": ("bench/training_rate.py", "import", "import "),
    "the checkpoint": ("training/checkpoint/write.py", "import", "import "),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patching_what_judges_and_counts(name: str, base: Path, tree: Path) -> None:
    file, old, new = PATCHES[name]
    path = tree / "gptlab" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refused("protected", lambda: check_change(read_change(base, tree)))


NOISE = random.Random(0).randbytes(40_000)
SHIPPED: dict[str, tuple[str, str]] = {
    "a file of weights": ("model/weights.npz", "numbers"),
    "a long string": ("model/more.py", f"WEIGHTS = {NOISE[:800].hex()!r}"),
    "a long number": ("model/more.py", f"WEIGHTS = {int.from_bytes(NOISE[:800])}"),
    "a long list": ("model/more.py", f"WEIGHTS = {list(NOISE[:200])}"),
    "many short lists": (
        "model/more.py", "\n".join(f"W{n} = {list(NOISE[100 * n :][:100])}" for n in range(200)),
    ),
    "a comment that it reads": (
        "model/more.py", "\n".join(f"# {NOISE[60 * n :][:60].hex()}" for n in range(400)),
    ),
    "a long file": ("model/more.py", "x = 1\n" * 40_000),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipping_weights_with_the_code(name: str, base: Path, tree: Path) -> None:
    file, content = SHIPPED[name]
    (tree / "gptlab" / file).write_text(content + "\n")
    refused("shipped-data", lambda: check_change(read_change(base, tree)))


def test_links_in_the_tree(base: Path, tree: Path) -> None:
    (tree / "gptlab/model/head.py").unlink()
    (tree / "gptlab/model/head.py").symlink_to(base / "gptlab/model/head.py")
    refused("tree", lambda: check_change(read_change(base, tree)))


@pytest.mark.parametrize(
    "name",
    [
        "seed", "data.val_source", "tokenizer.path", "eval.tokens", "init_from", "run_dir", "model.seq_len",
        "steps", "minutes", "tokens", "flops", "tokens_per_param", "until_val_loss", "from", "resume", "data", "device",
        "model.seq-len", "model",
    ],
)  # fmt: skip
def test_fields_of_the_judge(name: str) -> None:
    refused("field", lambda: check_fields(["model.activation", name]))
