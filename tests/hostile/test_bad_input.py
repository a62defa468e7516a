"""What a user can get wrong: each gets one clear line and exit code 2, or the recovery that was promised, and leaves
nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import pyarrow
import pyarrow.parquet
import pytest

from gptlab.app.run import session
from gptlab.cli.main import main
from gptlab.config.fields import bare
from gptlab.config.load import leaf_fields
from gptlab.config.run import RunConfig
from gptlab.runtime.files.cache import damage
from gptlab.runtime.records import provenance
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import list_checkpoints

FLAGS = {
    "depth": 1, "steps": 4, "model.seq-len": 32, "model.n-embd": 32, "model.n-head": 2, "batch.total-tokens": 128,
    "batch.micro-sequences": 4, "compile": "off", "device": "cpu", "dtype": "float32", "runtime.threads": 1,
    "tokenizer.kind": "byte", "data": "text.txt", "data.split": "tail", "data.cache-dir": "cache", "run-dir": "run",
    "sample.from-validation": 1, "sample.max-tokens": 4, "checkpoint.every-steps": 2, "log.report": False,
}  # fmt: skip
"""A run of a fraction of a second, in the current folder, that saves steps 2 and 4."""

TEXT = "".join(f"Line {number} of a text that is as dull as {number * number}.\n" for number in range(200))

TYPED_FIELDS = [name for name, kind in leaf_fields(RunConfig).items() if bare(kind)[0] not in (str, tuple[str, ...])]
"""The fields that do not take any text."""

needs_limits = pytest.mark.skipif(resource is None, reason="needs POSIX resource limits")


@dataclass(frozen=True)
class Ended:
    """How a command ended, what it said, and which files came or went."""

    code: int
    out: str
    err: str
    new: set[str]
    gone: set[str]

    def is_refused(self, *says: str) -> None:
        assert self.code == 2, self.err or self.out
        assert self.err.startswith("gptlab: error: ")
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        for part in says:
            assert part in self.err

    def changed_nothing(self) -> None:
        assert (self.new, self.gone) == (set(), set())


def train(**changes: object) -> list[str]:
    """The words of `gptlab train` with `FLAGS` and `changes`: `__` for a dot, `_` for a dash; None leaves one out."""
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    flags = {name: value for name, value in {**FLAGS, **given}.items() if value is not None}
    return ["train", "quickstart", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def files() -> set[str]:
    """Everything below the current folder but lock files, which hold nothing and are left for the next to lock."""
    return {path.as_posix() for path in Path().rglob("*") if path.suffix != ".lock" and path.name != ".lock"}


def gptlab(*argv: str) -> Ended:
    """The command in this process."""
    before, out, err = files(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    after = files()
    return Ended(code, out.getvalue(), err.getvalue(), after - before, before - after)


def gptlab_process(*argv: str) -> Ended:
    """The command as a user runs it."""
    before = files()
    done = subprocess.run([sys.executable, "-m", "gptlab", *argv], capture_output=True, text=True, timeout=120)
    after = files()
    return Ended(done.returncode, done.stdout, done.stderr, after - before, before - after)


@contextlib.contextmanager
def small_files(limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context no file may grow larger, as on a disk that is full."""
    # What git does not have of the code goes into the run folder, and may be of any size.
    no_code = provenance.CodeSnapshot(None, None, "", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "take_code", lambda package: no_code)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cache_is_whole() -> None:
    """Whatever preparation left is complete and intact, or not there."""
    for kind in ("tokens", "tokenizers"):
        for folder in Path("cache", kind).glob("*/"):
            assert not folder.name.startswith("."), f"{folder} is half-made"
            assert damage(folder) is None


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its cache."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT)
        assert gptlab(*train()).code == 0
    return folder


@pytest.fixture
def finished(template: Path, place: Path) -> RunDirectory:
    shutil.copytree(template, place, dirs_exist_ok=True)
    return RunDirectory.open(Path("run"))


@pytest.fixture
def interrupted(finished: RunDirectory) -> RunDirectory:
    """The same run, killed after its last checkpoint."""
    finished.summary_path.unlink()
    finished.set_status("running")
    return finished


class TestWrongWords:
    """Refused before any data is read: nothing at all is written."""

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"model__n_head": 3}, ("model.n_head = 3", "must divide the width n_embd = 32", "(nearest valid: 2)")),
            ({"model__n_kv_head": 4}, ("model.n_kv_head = 4", "must divide n_head = 2", "(nearest valid: 2)")),
            ({"model__window_pattern": "SXL"}, ("model.window_pattern = 'SXL'", "S (window)", "(nearest valid: SL)")),
            ({"batch__total_tokens": 100}, ("batch.total_tokens = 100", "4 * 32 = 128", "(nearest valid: 128)")),
            ({"device": "gpu"}, ("runtime.device = 'gpu'", "auto, cpu, cuda, mps", "(nearest valid: cpu)")),
            ({"device": "cuda:9"}, ("runtime.device = 'cuda:9'", "(nearest valid: c")),
            ({"device": "mps:1"}, ("runtime.device = 'mps:1'", "only cuda takes a number", "(nearest valid: mps)")),
            ({"dtype": "bf16"}, ("dtype = 'bf16'", "(nearest valid: bfloat16)")),
            ({"steps": None, "minutes": -1}, ("minutes = -1.0", "a positive number of minutes")),
            ({"steps": 0}, ("steps = 0", "a positive number of steps")),
            ({"minutes": 1}, ("--minutes and --steps", "give one of them")),
            ({"until_val_loss": -1}, ("horizon.until_val_loss = -1.0", "greater than zero")),
            ({"model__n_layers": 3}, ("--model.n-layers = '3'", "no such field", "(nearest valid: --model.n-layer)")),
            ({"model__n_layer": "three"}, ("model.n_layer = 'three'", "must be a whole number")),
            ({"model__n_layer": 0}, ("model.n_layer = 0", "greater than zero")),
            ({"model__norm": "batchnorm"}, ("model.norm = 'batchnorm'", "rmsnorm, layernorm", "(nearest valid: ")),
            ({"tokenizer__vocab_size": 100}, ("tokenizer.vocab_size = 100", "(nearest valid: 257)")),
            ({"data__val_fraction": 1}, ("data.val_fraction = 1.0", "between 0 and 1")),
            ({"optim__muon__iterations": 6}, ("optim.muon.iterations = 6", "five coefficient triples")),
            ({"schedule__warmup_fraction": 0.9}, ("schedule.warmup_fraction = 0.9", "exceed the run")),
            ({"seed": -1}, ("seed = -1", "between 0 and 2^63 - 1")),
        ],
        ids=str,
    )
    def test_a_field_that_cannot_be(self, changes: dict[str, object], says: tuple[str, ...]) -> None:
        ended = gptlab(*train(**changes))
        ended.is_refused(*says)
        ended.changed_nothing()

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ("trian", ("'trian' is not a command", "did you mean train?")),
            ("train quickstrt", ("'quickstrt' is neither a recipe nor a .toml file", "did you mean quickstart?")),
            ("train --minutes", ("--minutes needs a value", "a number")),
            ("train quickstart 3", ("'3' is one word too many",)),
            ("plan --minutes -1", ("minutes = -1.0", "a positive number of minutes")),
            ("plan --model.n-embd 100 --model.n-head 3", ("model.n_head = 3", "n_embd = 100", "(nearest valid: 2)")),
            ("data prepare --data nowhere", ("no corpus 'nowhere'",)),
            ("tokenizer eval nowhere", ("no tokenizer in nowhere",)),
            ("eval nowhere", ("there is no run folder nowhere", "such as runs/NAME")),
            ("sample nowhere --prompt x", ("there is no run folder nowhere",)),
            ("sample run --temperature -1", ("--temperature = -1.0", "must not be negative")),
            ("train --resume nowhere", ("there is no run folder nowhere",)),
            ("train --resume text.txt", ("no run folder text.txt",)),
        ],
    )
    def test_a_command_line_that_cannot_be(self, words: str, says: tuple[str, ...]) -> None:
        ended = gptlab(*words.split())
        ended.is_refused(*says)
        ended.changed_nothing()

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("depth = [", ("run.toml is not TOML: ",)),
            ("depth = 2\ndepth = 3", ("run.toml is not TOML: Cannot overwrite a value",)),
            ("[model]\nn_layers = 3", ("run.toml: model.n_layers = 3", "(nearest valid: model.n_layer)")),
            ('[model]\nn_layer = "3"', ("run.toml: model.n_layer = '3'", "must be a whole number")),
            ("[model]\nn_head = 3\nn_embd = 64", ("model.n_head = 3", "n_embd = 64", "(nearest valid: ")),
            ('recipe = "quickstrt"', ("did you mean quickstart?",)),
            ("minutes = 1\nsteps = 5", ("both say how long to train",)),
            ('device = "gpu"', ("runtime.device = 'gpu'",)),
        ],
    )
    def test_a_file_that_cannot_be(self, text: str, says: tuple[str, ...]) -> None:
        Path("run.toml").write_text(text)
        ended = gptlab("train", "run.toml")
        ended.is_refused(*says)
        ended.changed_nothing()

    def test_files_that_are_no_toml(self) -> None:
        Path("binary.toml").write_bytes(b"\xff\xfe\0")
        gptlab("train", "binary.toml").is_refused("binary.toml is not TOML")
        gptlab("train", "missing.toml").is_refused("cannot read missing.toml: No such file")

    def test_every_field_refuses_what_is_not_of_its_type(self) -> None:
        for field in TYPED_FIELDS:
            ended = gptlab("train", f"--{field.replace('_', '-')}=?!")
            ended.is_refused(f"{field} = '?!': must be ")
            ended.changed_nothing()

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["train", "missing.toml"], "cannot read missing.toml"),
            (train(data="nowhere"), "no corpus 'nowhere'"),
        ],
    )
    def test_as_a_process(self, argv: list[str], says: str) -> None:
        """Nothing but the line: no traceback, no warning of a library, the exit code itself."""
        ended = gptlab_process(*argv)
        ended.is_refused(says)
        ended.changed_nothing()
        assert ended.out == ""

    def test_an_unknown_corpus_is_reported_before_torch_is_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gptlab.app.run.session", None)  # imports torch; importing it now fails
        gptlab("train", "--data", "nowhere").is_refused("no corpus 'nowhere'")


class TestCorpus:
    @pytest.mark.parametrize(
        ("source", "content", "says"),
        [
            ("nowhere.txt", None, ("no corpus 'nowhere.txt'", "a file, a folder, a glob or a name")),
            ("stdlb", None, ("did you mean stdlib?",)),
            ("*.md", None, ("'*.md' has no files to read", ".parquet")),
            ("empty.txt", b"", ("empty.txt is empty", "needs text")),
            ("binary.txt", b"text\0\x01\x02", ("binary.txt is a binary file", "NUL byte at offset 4")),
            ("latin.txt", "déjà vu".encode("latin-1"), ("latin.txt is not UTF-8", "0xe9 at offset 1", "convert it")),
            ("model.onnx", b"\x00\x01", (".onnx is not a format gptlab reads", ".jsonl and .parquet", ".gz .zst")),
            ("notes.gz", b"\x1f\x8b", (".gz is not a format gptlab reads",)),
            ("notes.txt.gz", b"text", ("notes.txt.gz is damaged or no .gz file: ",)),
            ("notes.jsonl.zst", b"text", ("notes.jsonl.zst is damaged or no .zst file: ",)),
            ("model.bin", b"\x00\x01", ("model.bin is not a token shard", "llm.c's shards with 20240520")),
            ("keys.jsonl", b'{"txt": "a"}\n', ("keys.jsonl:1: no key 'text'", "nearest: txt")),
            ("broken.jsonl", b"text\n", ("broken.jsonl:1: not JSON",)),
            ("broken.parquet", b"PAR1 or so", ("cannot read broken.parquet as Parquet",)),
        ],
    )
    def test_is_refused_at_the_door(self, source: str, content: bytes | None, says: tuple[str, ...]) -> None:
        if content is not None:
            Path(source).write_bytes(content)
        ended = gptlab(*train(data=source))
        ended.is_refused(*says)
        ended.changed_nothing()

    def test_parquet_without_a_text_column(self) -> None:
        pyarrow.parquet.write_table(pyarrow.table({"content": ["a"], "id": [1]}), "table.parquet")
        ended = gptlab(*train(data="table.parquet"))
        ended.is_refused("table.parquet: no column 'text'", "columns there: content, id", "nearest: content")
        ended.changed_nothing()
        gptlab(*train(data="table.parquet", data__text_column="id")).is_refused("column 'id' holds int64, not strings")

    def test_an_empty_folder(self) -> None:
        Path("folder").mkdir()
        ended = gptlab(*train(data="folder"))
        ended.is_refused("'folder' has no files to read")
        ended.changed_nothing()

    @pytest.mark.parametrize(
        ("name", "content", "changes", "says"),
        [
            ("folder/empty.txt", "", {"data": "folder"}, ("folder holds no text (1 empty)",)),
            ("short.txt", "too short a text", {}, ("model.seq_len = 32", "only 16 tokens", "seq_len + 1 = 33")),
            ("one.txt", "a", {}, ("1 characters cannot be cut", "data.val_fraction")),
            ("same.jsonl", '{"text": "words of a document"}\n' * 9, {"data.split": "hash"},
             ("needs two different documents", "all 9 are the same", "--data.split tail")),
            ("brief.txt", "abc " * 50, {"tokenizer.kind": "bpe", "tokenizer.vocab-size": 5000},
             ("tokenizer.vocab_size = 5000", "the text does not give that many entries", "(nearest valid: 2")),
            ("late.jsonl", '{"text": "words of a document"}\n' * 50 + "{", {}, ("late.jsonl:51: not JSON",)),
            ("odd.txt", TEXT, {"model.vocab-size": 300}, ("model.vocab_size = 300", "this data has 257 entries")),
            ("chars.txt", TEXT, {"tokenizer.kind": "char", "sample.prompts": "Ω"},
             ("sample.prompts = 'Ω'", "U+03A9", "bpe or byte")),
            ("chars.txt", TEXT, {"tokenizer.kind": "char", "data.rows": "random", "sample.prompts": ""},
             ("sample.prompts = ''", "no BOS")),
        ],
    )  # fmt: skip
    def test_that_turns_out_not_to_do(
        self, name: str, content: str, changes: dict[str, object], says: tuple[str, ...]
    ) -> None:
        """Known only once the text is read: no run folder, and in the cache only what is whole."""
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
        ended = gptlab(*train(**{"data": name} | changes))
        ended.is_refused(*says)
        assert not Path("run").exists()
        cache_is_whole()


class TestRunFolder:
    def test_that_holds_a_run(self, finished: RunDirectory) -> None:
        """Refused at once: the corpus, which has no text, has not been read."""
        Path("empty").mkdir()
        ended = gptlab(*train(data="empty"))
        ended.is_refused("run already holds a run", "--resume run", "name another folder")
        ended.changed_nothing()

    def test_that_holds_something_else(self) -> None:
        Path("run").mkdir()
        Path("run/thesis.tex").touch()
        ended = gptlab(*train())
        ended.is_refused("the run folder run is not empty (it holds thesis.tex)", "another --run-dir")
        ended.changed_nothing()

    @pytest.mark.parametrize("path", ["text.txt", "text.txt/run"])
    def test_that_is_no_folder(self, path: str) -> None:
        ended = gptlab(*train(run_dir=path))
        ended.is_refused(f"cannot make the run folder {path}: ")
        cache_is_whole()
        assert Path("text.txt").read_text() == TEXT

    @pytest.mark.parametrize(
        "given", [{"run_dir": "shared/run"}, {"run_dir": None}, {"depth": None, "steps": None, "run_dir": "shared/run"}]
    )
    def test_that_may_not_be_written(self, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
        """Refused at once, as in the test of a folder that holds a run; also where the recipe sizes the model."""
        Path("empty").mkdir()
        Path("shared").mkdir()
        refused = {Path("shared"), Path("runs"), Path(".")}
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in refused)
        ended = gptlab(*train(data="empty", **given))
        ended.is_refused("cannot make the run folder ", ": Permission denied; name another --run-dir")
        ended.changed_nothing()

    def test_that_another_process_uses(self, finished: RunDirectory) -> None:
        program = (
            "from pathlib import Path; from gptlab.runtime.records.run_directory import RunDirectory\n"
            "with RunDirectory.open(Path('run')).lock():\n    print('locked', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            ended = gptlab("train", "--resume", "run")
            ended.is_refused("run is in use by another process", f"pid {other.pid}", "--run-dir")
            ended.changed_nothing()
            other.stdin.close()
        assert gptlab("train", "--resume", "run").code == 0


class TestResume:
    def test_what_is_no_run(self) -> None:
        Path("folder").mkdir()
        ended = gptlab("train", "--resume", "folder")
        ended.is_refused("folder is not a run folder: it has no config.json")
        ended.changed_nothing()

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ("--model.n-layer 2", "model.n_layer: 1 vs 2"),
            ("--steps 5", "horizon.amount: 4.0 vs 5.0"),
            ("shakespeare-char", "recipe: 'quickstart' vs 'shakespeare-char'"),
        ],
    )
    def test_with_another_configuration(self, interrupted: RunDirectory, words: str, says: str) -> None:
        ended = gptlab("train", "--resume", "run", *words.split())
        ended.is_refused("run has another configuration", says, "leave it out to resume")
        ended.changed_nothing()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema_version": 99}, "schema_version = 99: written by a newer gptlab"),
            ({"seed": "x"}, "seed = 'x': must be a whole number"),
            ({"speed": 3}, "speed = 3: there is no such field (nearest valid: seed)"),
            ({"model": {}}, "the configuration lacks model.n_layer"),
        ],
    )
    def test_with_a_configuration_that_cannot_be(
        self, interrupted: RunDirectory, change: dict[str, Any], says: str
    ) -> None:
        interrupted.config_path.write_text(json.dumps(interrupted.read_config() | change))
        ended = gptlab("train", "--resume", "run")
        ended.is_refused(says)
        ended.changed_nothing()

    def test_with_a_torn_configuration(self, interrupted: RunDirectory) -> None:
        torn = interrupted.path / "config.json"
        torn.write_bytes(torn.read_bytes()[:100])
        gptlab("train", "--resume", "run").is_refused("run/config.json is damaged")

    def test_with_other_data(self, interrupted: RunDirectory) -> None:
        before = interrupted.metrics_path.read_bytes()
        Path("text.txt").write_text(TEXT + "One line more.\n")
        gptlab("train", "--resume", "run").is_refused("the data is not what run was trained on", "bring the corpus")
        Path("text.txt").unlink()
        gptlab("train", "--resume", "run").is_refused("no corpus 'text.txt'")
        assert interrupted.metrics_path.read_bytes() == before
        cache_is_whole()

    def test_without_a_checkpoint(self, interrupted: RunDirectory) -> None:
        shutil.rmtree(interrupted.checkpoints_path)
        for words in (["train", "--resume", "run"], ["eval", "run"], ["sample", "run"]):
            ended = gptlab(*words)
            ended.is_refused("no checkpoint")
            ended.changed_nothing()


class TestDamage:
    """Noticed, named, and worked around where something intact is left; nothing is deleted."""

    # Each harm of each file: test_hostile_checkpoints.py, without a run.
    @pytest.mark.parametrize(("name", "how"), [("model.safetensors", "flipped"), ("manifest.json", "gone")])
    def test_of_the_newest_checkpoint(self, interrupted: RunDirectory, name: str, how: str) -> None:
        newest = interrupted.checkpoints_path / "step-00000004"
        spoil(newest / name, how)
        looked = gptlab("eval", "run")
        assert looked.code == 0
        assert "step: 2\n" in looked.out
        assert looked.err.count(f"warning: checkpoint {newest} is damaged: ") == 1
        looked.changed_nothing()
        resumed = gptlab("train", "--resume", "run")
        assert (resumed.code, resumed.err) == (0, "")
        assert f"warning: checkpoint {newest} is damaged: " in resumed.out
        assert resumed.out.count("num_steps:        4") == 1
        assert gptlab("eval", "run").err == ""  # step 4 has been saved again

    def test_of_every_checkpoint(self, interrupted: RunDirectory) -> None:
        for path in list_checkpoints(interrupted.checkpoints_path):
            spoil(path / "model.safetensors", "flipped")
        for words in (["train", "--resume", "run"], ["eval", "run"], ["sample", "run"]):
            ended = gptlab(*words)
            assert ended.code == 2
            *warnings, error = ended.err.splitlines()
            assert all(line.startswith("warning: checkpoint ") for line in warnings)
            assert error.startswith("gptlab: error: no intact checkpoint in run")
            assert "step-00000002: model.safetensors" in error
            assert "step-00000004: model.safetensors" in error
            ended.changed_nothing()

    # Each harm of each file: test_prepare.py, without a run.
    @pytest.mark.parametrize(("name", "how"), [("train_000000.bin", "flipped"), ("manifest.json", "gone")])
    def test_of_prepared_tokens(self, finished: RunDirectory, name: str, how: str) -> None:
        (folder,) = Path("cache/tokens").glob("[0-9a-f]*/")
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        spoil(folder / name, how)
        ended = gptlab(*train(run_dir="again"))
        assert (ended.code, ended.err) == (0, "")
        assert f"warning: damaged tokens of text.txt in {folder} (" in ended.out
        assert {path: path.read_bytes() for path in before} == before
        assert losses("again") == losses("run")
        cache_is_whole()

    def test_of_a_kept_tokenizer(self) -> None:
        assert gptlab(*train(tokenizer__kind="char")).code == 0
        (folder,) = Path("cache/tokenizers").glob("[0-9a-f]*/")
        for how in ("flipped", "gone"):
            spoil(folder / "tokenizer.json", how)
            ended = gptlab(*train(tokenizer__kind="char", run_dir=how))
            assert (ended.code, ended.err) == (0, "")
            assert f"warning: damaged tokenizer of text.txt in {folder} (" in ended.out
            assert losses(how) == losses("run")
            cache_is_whole()

    def test_of_a_packing_plan(self, finished: RunDirectory) -> None:
        for path in list(Path("cache").rglob("segment_starts.npy")):
            spoil(path, "flipped")
        assert gptlab(*train(run_dir="again")).code == 0
        assert losses("again") == losses("run")


class TestFullDisk:
    @needs_limits
    @pytest.mark.parametrize("file_bytes", [10, 200, 3000])
    def test_while_a_run_folder_is_made(
        self, finished: RunDirectory, file_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tokens are prepared; not even run.json, or not the tokenizer, can be written."""
        with small_files(file_bytes, monkeypatch):
            ended = gptlab(*train(run_dir="again"))
        ended.is_refused("cannot write ", "again", "File too large")
        ended.changed_nothing()

    @needs_limits
    def test_while_tokens_are_prepared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with small_files(5000, monkeypatch):
            ended = gptlab(*train())
        ended.is_refused("cannot keep the tokens of text.txt in cache/tokens ", "GPTLAB_CACHE", "File too large")
        assert not Path("run").exists()
        cache_is_whole()

    @needs_limits
    def test_at_the_first_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with small_files(30_000, monkeypatch):
            ended = gptlab(*train())
        ended.is_refused("cannot save the checkpoint of step 2", "bytes needed", "none was saved before", "ulimit -f")
        assert RunDirectory.open(Path("run")).read_provenance()["status"] == "failed"
        assert list(Path("run/checkpoints").iterdir()) == []
        assert gptlab("train", "--resume", "run").code == 0  # from the start, with room

    def test_at_a_later_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with full_disk_after(1, monkeypatch):
            ended = gptlab(*train())
        ended.is_refused(
            "cannot save the checkpoint of step 4", "No space left", "checkpoints are untouched", "--resume"
        )
        assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]
        assert RunDirectory.open(Path("run")).read_provenance()["status"] == "failed"
        resumed = gptlab("train", "--resume", "run")
        assert (resumed.code, resumed.err) == (0, "")
        assert [path.name for path in list_checkpoints(Path("run/checkpoints"))] == ["step-00000002", "step-00000004"]

    def test_that_a_run_is_told_to_bear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is room again for the last checkpoint."""
        with full_disk_for("step-00000002", monkeypatch):
            ended = gptlab(*train(checkpoint__on_failure="continue"))
        assert (ended.code, ended.err) == (0, "")
        (warning,) = (line for line in ended.out.splitlines() if line.startswith("warning"))
        assert warning.startswith("warning: cannot save the checkpoint of step 2")
        assert warning.endswith("none was saved before: free some space; training continues")
        assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000004"]

    @pytest.mark.parametrize("background", ["True", "False"])
    def test_the_last_checkpoint_must_be_saved(self, monkeypatch: pytest.MonkeyPatch, background: str) -> None:
        """Whatever failures a run is configured to survive: "finished" means that its final weights are on the disk."""
        words = train(
            checkpoint__on_failure="continue", checkpoint__background=background, checkpoint__save_best="True"
        )
        with full_disk_after(1, monkeypatch):
            ended = gptlab(*words)
            ended.is_refused("cannot save the checkpoint of step 4", "No space left", "--resume")
            assert RunDirectory.open(Path("run")).read_provenance()["status"] == "failed"
            assert not Path("run/summary.json").exists()
            assert gptlab("train", "--resume", "run").code == 2  # still full
        resumed = gptlab("train", "--resume", "run")
        assert (resumed.code, resumed.err) == (0, "")
        assert [path.name for path in list_checkpoints(Path("run/checkpoints"))] == ["step-00000002", "step-00000004"]
        assert RunDirectory.open(Path("run")).read_provenance()["status"] == "finished"

    def test_best_weights_that_could_not_be_saved_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        words = train(
            checkpoint__on_failure="continue", checkpoint__save_best="True", checkpoint__every_steps=None,
            eval__every_steps=2,
        )  # fmt: skip
        with worse_after(2, monkeypatch), full_disk_for("step-00000002", monkeypatch):
            ended = gptlab(*words)
        assert ended.code == 0
        assert "the lowest validation loss, of step 2, could not be saved; the best checkpoint is that" in ended.out

    @pytest.mark.parametrize("harm", [shutil.rmtree, lambda path: spoil(path / "model.safetensors", "flipped")])
    def test_a_finished_run_without_its_final_weights_trains_on(self, finished: RunDirectory, harm: Any) -> None:
        last = finished.checkpoints_path / "step-00000004"
        weights = (last / "model.safetensors").read_bytes()
        harm(last)
        resumed = gptlab("train", "--resume", "run")
        assert (resumed.code, resumed.err) == (0, "")
        assert "is marked as finished, but its final weights are not intact" in resumed.out
        assert "run is finished" not in resumed.out
        assert (last / "model.safetensors").read_bytes() == weights
        assert "run is finished; to train it on" in gptlab("train", "--resume", "run").out


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])


def losses(run: str) -> list[object]:
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@contextlib.contextmanager
def full_disk_for(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context the disk has no room left while the checkpoint `name` is written."""
    mkdir = Path.mkdir

    def full(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith(f".{name}.tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        yield


@contextlib.contextmanager
def worse_after(best: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context validations come out worse from the one behind number `best` (from 0) on."""
    evaluate, calls = session.evaluate, 0

    def turned(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = evaluate(*args, **options)
        return replace(result, val_loss=result.val_loss + 9.0 * (calls > best))

    with monkeypatch.context() as patch:
        patch.setattr(session, "evaluate", turned)
        yield


@contextlib.contextmanager
def full_disk_after(saves: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context the disk has no room left for another checkpoint after so many."""
    calls = 0

    def disk_usage(path: Path) -> SimpleNamespace:
        nonlocal calls
        calls += 1
        return SimpleNamespace(free=0 if calls > saves else 2**40)

    with monkeypatch.context() as patch:
        patch.setattr("gptlab.training.checkpoint.write.shutil.disk_usage", disk_usage)
        yield
