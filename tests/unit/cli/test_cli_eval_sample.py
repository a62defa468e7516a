"""`gptlab eval` and `gptlab sample` on a run in a temporary folder: what they print, and how they refuse."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gptlab.cli.main import main
from gptlab.cli.sample import write_stream
from gptlab.config.load import config_to_json
from gptlab.config.model import ModelConfig
from gptlab.config.run import BatchConfig, DataConfig, RunConfig, RuntimeConfig, SampleConfig, TokenizerConfig
from gptlab.data.prepare import prepare
from gptlab.data.rows import validation_rows
from gptlab.data.tokenizer.tokenizer import CharTokenizer, Tokenizer
from gptlab.eval.sampling import sample_text
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels import decode_kernel
from gptlab.runtime.hardware import device
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import checkpoint_path
from gptlab.training.checkpoint.write import save_checkpoint

SEQ_LEN = 32
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "père", "Noël", "naps", "→"]
LOSSES = {10: 3.0, 20: 2.0, 30: 2.5}
"""Recorded validation loss of each step that was saved."""


def text(seed: int, n_words: int = 60) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n_words)) + "\n"


def shaken(config: ModelConfig, seed: int) -> GPT:
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True)
class Run:
    path: Path
    corpus: Path
    config: RunConfig
    models: dict[int, GPT]
    tokenizer: Tokenizer


def make_run(folder: Path, kind: str = "byte", **changes: object) -> Run:
    """A run with checkpoints of random models at steps 10, 20 and 30."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(8):
        (corpus / f"{number}.txt").write_text(text(number), encoding="utf-8")
    packed = kind == "byte"
    config = RunConfig(
        model=ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=SEQ_LEN, vocab_multiple=8, **changes),  # type: ignore[arg-type]
        tokenizer=TokenizerConfig(kind=kind),  # type: ignore[arg-type]
        data=DataConfig(
            source=(str(corpus),), cache_dir=str(folder / "cache"), val_fraction=0.3,
            rows="packed" if packed else "random",
        ),
        batch=BatchConfig(total_tokens=4 * SEQ_LEN, micro_sequences=4),
        sample=SampleConfig(prompts=("the ", "quick"), max_tokens=12, temperature=0.0),
        runtime=RuntimeConfig(device="cpu", dtype="float32", threads=1),
    )  # fmt: skip
    prepared = prepare(config.data, config.tokenizer)
    config = replace(config, model=replace(config.model, vocab_size=prepared.tokenizer.vocab_size))
    run = RunDirectory.create(folder / "run", config_to_json(config), {"data_fingerprint": prepared.fingerprint})
    prepared.tokenizer.save(run.tokenizer_path)
    models = {step: shaken(config.model, step) for step in LOSSES}
    with MetricsLog(run.metrics_path) as metrics:
        metrics.write("eval", step=0, val_loss=1.0, val_bpb=1.0)  # the best of all, but never saved
        for step, model in models.items():
            save_checkpoint(run.checkpoints_path, step, model=dict(model.named_parameters()), optimizer={}, state={})
            metrics.write("eval", step=step, val_loss=LOSSES[step], val_bpb=1.0)
        metrics.write("eval", step=30, val_loss=float("nan"), val_bpb=1.0)
    return Run(run.path, corpus, config, models, prepared.tokenizer)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def figures(out: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in out.splitlines())


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that exit code 2 comes with."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("gptlab: error:")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


class TestEval:
    def test_prints_what_the_validation_set_says(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        """Loss from the model's own loss, bytes from the validation documents: every one of their bytes is a target."""
        out = figures(printed(capsys, "eval", run.path))
        prepared = prepare(run.config.data, run.config.tokenizer)
        rows = validation_rows(prepared.val, SEQ_LEN, run.tokenizer.bos_id)
        inputs, targets = rows.read(0, np.arange(rows.rows_per_epoch))
        with torch.no_grad():
            nats = run.models[30].loss(torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()).item()
        assert out["run"] == str(run.path)
        assert out["step"] == "30"
        assert int(out["target_tokens"]) == (targets >= 0).sum()
        assert int(out["target_bytes"]) == prepared.val.n_bytes
        assert float(out["val_loss"]) == pytest.approx(nats / (targets >= 0).sum(), abs=1e-5)
        assert float(out["val_bpb"]) == pytest.approx(nats / math.log(2) / prepared.val.n_bytes, abs=1e-5)

    def test_batch_size_changes_nothing(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        bpb = [float(figures(printed(capsys, "eval", run.path, "--micro-sequences", n))["val_bpb"]) for n in (1, 5, 64)]
        assert max(bpb) - min(bpb) <= 1.5e-6  # 1e-6, and the rounding of the print

    def test_tokens(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        assert figures(printed(capsys, "eval", run.path, "--tokens", 100))["target_tokens"] == "100"

    @pytest.mark.parametrize(("checkpoint", "step"), [("latest", 30), ("best", 20), ("10", 10)])
    def test_checkpoints(self, run: Run, capsys: pytest.CaptureFixture[str], checkpoint: str, step: int) -> None:
        assert figures(printed(capsys, "eval", run.path, "--checkpoint", checkpoint))["step"] == str(step)

    def test_checkpoints_differ(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        losses = {figures(printed(capsys, "eval", run.path, "--checkpoint", step))["val_loss"] for step in LOSSES}
        assert len(losses) == 3

    def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
        self, run: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        weights = checkpoint_path(run.path / "checkpoints", 30) / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        assert main(["eval", str(run.path)]) == 0
        captured = capsys.readouterr()
        assert figures(captured.out)["step"] == "20"
        assert "step-00000030" in captured.err
        assert "damaged" in captured.err
        assert "damaged" in refusal(capsys, "eval", run.path, "--checkpoint", 30)

    def test_a_corpus_that_has_changed_is_told(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["eval", str(run.path)]) == 0
        assert "warning" not in capsys.readouterr().err
        for number in range(100, 120):
            (run.corpus / f"{number}.txt").write_text(text(number), encoding="utf-8")
        assert main(["eval", str(run.path)]) == 0
        assert f"the corpus {run.corpus} is not what it was" in capsys.readouterr().err

    def test_other_validation_text_is_told(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "other.txt").write_text(text(50), encoding="utf-8")
        assert main(["eval", str(run.path), "--val-source", str(tmp_path / "other.txt")]) == 0
        told = f"the corpus {run.corpus}, validated on {tmp_path / 'other.txt'}, is not what it was"
        assert told in capsys.readouterr().err

    def test_the_training_text_of_a_lab_is_not_measured_as_if_it_validated(
        self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokens = tmp_path / "lab" / "data" / "tokens"
        tokens.mkdir(parents=True)
        (tmp_path / "lab" / "lab.json").touch()
        data = replace(run.config.data, source=(str(tokens),))
        (run.path / "config.json").write_text(json.dumps(config_to_json(replace(run.config, data=data))))
        says = f"{tokens} is a lab's training text, and its judge keeps what validates (`gptlab lab show` has"
        assert says in refusal(capsys, "eval", run.path)
        assert says in refusal(capsys, "train", "--from", run.path, "--run-dir", tmp_path / "again")
        record = json.loads((run.path / "run.json").read_text()) | {"data_fingerprint": "of the lab's own tokens"}
        (run.path / "run.json").write_text(json.dumps(record))
        assert main(["eval", str(run.path), "--data", str(run.corpus)]) == 0
        measured = capsys.readouterr()
        assert "val_bpb" in measured.out
        assert "is not what it was" not in measured.err

    def test_a_damaged_run_json_ends_nothing(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        whole = printed(capsys, "eval", run.path)
        (run.path / "run.json").write_text("{")
        assert printed(capsys, "eval", run.path) == whole

    def test_dtype(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        single = float(figures(printed(capsys, "eval", run.path))["val_loss"])
        double = float(figures(printed(capsys, "eval", run.path, "--dtype", "float64"))["val_loss"])
        half = float(figures(printed(capsys, "eval", run.path, "--dtype", "bfloat16"))["val_loss"])
        assert double == pytest.approx(single, abs=1e-4)
        assert half == pytest.approx(single, abs=0.05)
        assert half != single

    def test_a_tied_head_and_characters(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = make_run(tmp_path, kind="char", tied_head=True, position="learned")
        out = figures(printed(capsys, "eval", run.path))
        # A character of two or three bytes counts as such: fewer tokens than bytes.
        assert int(out["target_tokens"]) < int(out["target_bytes"])

    def test_changes_nothing_in_the_run(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        printed(capsys, "eval", run.path)
        printed(capsys, "sample", run.path)
        assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


class TestText:
    """A text of the user's own."""

    def test_prints_what_the_text_says(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A text that fits the context, against the model's own loss of it."""
        mine, page = tmp_path / "mine.txt", tmp_path / "page.html"
        mine.write_text("Noël naps", encoding="utf-8")
        words = ("eval", run.path, "--text", mine, "--checkpoint", 20)
        out = figures(printed(capsys, *words))
        ids = torch.from_numpy(run.tokenizer.encode("Noël naps").astype(np.int64))
        row = torch.cat([torch.tensor([run.tokenizer.bos_id]), ids])[None]
        with torch.no_grad():
            nats = float(run.models[20].eval()(row[:, :-1]).log_softmax(-1).gather(2, row[:, 1:, None]).neg().sum())
        assert (out["text"], out["step"], out["target_tokens"], out["target_bytes"]) == (str(mine), "20", "10", "10")
        assert float(out["bpb"]) == pytest.approx(nats / math.log(2) / 10, abs=2e-6)  # six decimals
        assert float(out["loss"]) == pytest.approx(nats / 10, abs=2e-6)
        assert not page.exists()
        mine.write_text("Noël naps", encoding="utf-8-sig")
        assert figures(printed(capsys, *words)) == out  # a byte-order mark is no text

        as_json = json.loads(printed(capsys, *words, "--html", page, "--json"))
        assert as_json["html"] == str(page)
        assert as_json["bpb"] == pytest.approx(nats / math.log(2) / 10, rel=1e-6)
        assert f"{as_json['bpb']:.4f} <small>" in page.read_text(encoding="utf-8")

    def test_of_which_a_part_is_measured(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine = tmp_path / "mine.txt"
        mine.write_text("the quick brown fox", encoding="utf-8")
        assert figures(printed(capsys, "eval", run.path, "--text", mine, "--tokens", 9))["target_tokens"] == "9"

    def test_that_cannot_be_measured(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        binary, page = tmp_path / "binary", tmp_path / "page.html"
        binary.write_bytes(b"ab\xff")
        empty = tmp_path / "empty"
        empty.write_text("")
        assert "not text in UTF-8: invalid start byte at byte 2" in refusal(capsys, "eval", run.path, "--text", binary)
        assert "too short" not in refusal(capsys, "eval", run.path, "--text", tmp_path / "nowhere")
        assert "too short" in refusal(capsys, "eval", run.path, "--text", empty)
        assert "give it with --text" in refusal(capsys, "eval", run.path, "--html", page)
        assert "give one of them" in refusal(capsys, "eval", run.path, "--text", empty, "--core")
        nowhere = tmp_path / "no" / "page.html"  # which is refused before anything is measured
        assert "there is no folder" in refusal(capsys, "eval", run.path, "--text", empty, "--html", nowhere)

    def test_is_not_overwritten_by_its_page(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine, link = tmp_path / "mine.txt", tmp_path / "link.html"
        mine.write_text("the quick brown fox")
        link.symlink_to(mine)
        for page in (mine, f"{tmp_path}/./mine.txt", link):
            assert "is the text itself" in refusal(capsys, "eval", run.path, "--text", mine, "--html", page)
        assert mine.read_text() == "the quick brown fox"

    def test_page_replaces_only_a_page(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mine, other, page = tmp_path / "mine.txt", tmp_path / "other.txt", tmp_path / "page.html"
        mine.write_text("the quick brown fox")
        other.write_text("notes")
        words = ("eval", run.path, "--text", mine, "--html")
        before = (run.path / "config.json").read_bytes()
        for inside in (run.path / "config.json", run.path / "checkpoints" / "page.html"):
            assert "inside the run folder" in refusal(capsys, *words, inside)
        assert (run.path / "config.json").read_bytes() == before
        assert "is not an HTML page" in refusal(capsys, *words, other)
        assert other.read_text() == "notes"
        for _ in range(2):
            printed(capsys, *words, page)


class TestSample:
    def test_prints_prompt_and_continuation(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        settings = ("--max-tokens", 20, "--temperature", 0.9, "--top-k", 5, "--seed", 3)
        out = printed(capsys, "sample", run.path, "--prompt", "lazy ", *settings)
        pieces = sample_text(
            run.models[30], run.tokenizer, "lazy ", max_tokens=20, temperature=0.9, top_k=5, seed=3
        )  # fmt: skip
        assert out == "lazy " + "".join(pieces) + "\n"

    def test_without_its_kernel_it_is_said_to_be_slow_and_why(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        command = ["sample", str(run.path), "--prompt", "lazy "]
        assert main(command) == 0
        quick = capsys.readouterr()
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
        monkeypatch.setattr(decode_kernel, "load_decode_kernel", decode_kernel.load_decode_kernel.__wrapped__)
        assert main(command) == 0
        slow = capsys.readouterr()
        assert slow.out == quick.out
        assert slow.err.count("half as fast: it cannot be built in the cache: Not a directory") == 1
        assert "half as fast" not in quick.err

    def test_a_gpu_that_torch_cannot_use_is_told(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device, "has_nvidia_gpu", lambda: True)
        monkeypatch.setattr(device, "cuda_problem", lambda index: "the driver is too old")
        for named, told in ((["--device", "auto"], 1), (["--device", "cpu"], 0)):
            assert main(["sample", str(run.path), "--prompt", "lazy ", *named]) == 0
            assert capsys.readouterr().err.count("which will not be used: the driver is too old") == told

    def test_seed(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        settings = ("sample", run.path, "--prompt", "the", "--temperature", 2, "--top-k", 0, "--max-tokens", 40)
        first, again, other = (printed(capsys, *settings, "--seed", seed) for seed in (1, 1, 2))
        assert first == again
        assert first != other

    def test_settings_of_the_run_are_the_defaults(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        out = printed(capsys, "sample", run.path)
        parts = [
            prompt + "".join(sample_text(run.models[30], run.tokenizer, prompt, max_tokens=12, temperature=0.0))
            for prompt in ("the ", "quick")
        ]
        assert out == f"{parts[0]}\n---\n{parts[1]}\n"

    def test_several_prompts(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        prompts = ("one", "two", "-x")
        out = printed(capsys, "sample", run.path, "--prompt", "one", "two", "--prompt=-x")
        parts = [
            prompt + "".join(sample_text(run.models[30], run.tokenizer, prompt, max_tokens=12, temperature=0.0))
            for prompt in prompts
        ]
        assert out == "\n---\n".join(parts) + "\n"

    def test_an_empty_prompt_starts_a_document(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        pieces = sample_text(run.models[30], run.tokenizer, "", max_tokens=12, temperature=0.0)
        assert printed(capsys, "sample", run.path, "--prompt", "") == "".join(pieces) + "\n"

    def test_no_stop_goes_on_behind_a_document(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A model that says BOS (id 256) and b (id 98) with equal probability, whatever the context."""
        run = make_run(tmp_path, logit_softcap=None)
        model = run.models[30]
        with torch.no_grad():
            model.head.weight.zero_()
            model.token_embedding.weight[:, 0] = 100.0
            model.head.weight[[98, 256], 0] = 10.0
            for block in model.blocks:
                block.attention.out.weight.zero_()
                block.mlp.out.weight.zero_()
        save_checkpoint(run.path / "checkpoints", 40, model=dict(model.named_parameters()), optimizer={}, state={})
        words = ("sample", run.path, "--prompt", "a", "--temperature", 1, "--max-tokens", 60, "--seed", 0)
        stopped, endless = printed(capsys, *words).strip(), printed(capsys, *words, "--no-stop").strip()
        assert endless.startswith(stopped)
        assert set(endless[1:]) == {"b"}
        assert len(stopped) < 15 < len(endless) < 50

    def test_a_terminal_gets_no_control_characters_and_nothing_that_it_cannot_show(self) -> None:
        class Terminal(io.TextIOWrapper):
            def isatty(self) -> bool:
                return True

        raw = io.BytesIO()
        with Terminal(raw, encoding="ascii", newline="") as terminal:
            write_stream(terminal, ["a\x1b[2Jb\r\n", "\tc\x07é"])
            assert raw.getvalue() == b"a[2Jb\n\tc?"
        assert write_and_read(["a\x1b[2J", "→\n"]) == "a\x1b[2J→\n"


def write_and_read(pieces: list[str]) -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        write_stream(file, pieces)
        return raw.getvalue().decode()


class TestRefusals:
    """Exit code 2 and one line that says what is wrong."""

    @pytest.mark.parametrize("command", ["eval", "sample"])
    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            (["--checkpoint", "99"], "steps there: 10, 20, 30"),
            (["--checkpoint", "newest"], "latest, best"),
            (["--device", "tpu"], "tpu"),
            (["--dtype", "int8"], "int8"),
            (["--tokans", "3"], "no such option"),
        ],
    )
    def test_flags(
        self, run: Run, capsys: pytest.CaptureFixture[str], command: str, flags: list[str], word: str
    ) -> None:
        assert word in refusal(capsys, command, run.path, *flags)

    @pytest.mark.parametrize(
        ("command", "flags"),
        [
            ("eval", ["--tokens", "0"]),
            ("eval", ["--micro-sequences", "-1"]),
            ("sample", ["--temperature", "-1"]),
            ("sample", ["--top-k", "-2"]),
            ("sample", ["--max-tokens", "-1"]),
            ("sample", ["--seed", "-1"]),
        ],
    )
    def test_numbers(self, run: Run, capsys: pytest.CaptureFixture[str], command: str, flags: list[str]) -> None:
        assert flags[0] in refusal(capsys, command, run.path, *flags)

    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            (["--core-dir", "nowhere"], "give them with --core"),
            (["--core-examples", "0"], "give them with --core"),
            (["--core", "--tokens", "5"], "--core-examples limits --core"),
        ],
    )
    def test_flags_of_another_measurement(
        self, run: Run, capsys: pytest.CaptureFixture[str], flags: list[str], word: str
    ) -> None:
        assert word in refusal(capsys, "eval", run.path, *flags)

    @pytest.mark.parametrize("command", ["eval", "sample"])
    def test_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
        assert "RUN" in refusal(capsys, command)
        assert "no run folder" in refusal(capsys, command, tmp_path / "nowhere")
        assert "not a run folder" in refusal(capsys, command, tmp_path)

    def test_no_checkpoint_yet(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        (run.path / "checkpoints").rename(run.path / "elsewhere")
        assert "no checkpoint" in refusal(capsys, "eval", run.path)
        (run.path / "checkpoints").mkdir()
        assert "no checkpoint" in refusal(capsys, "eval", run.path)

    def test_nothing_recorded_as_best(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        (run.path / "metrics.jsonl").unlink()
        assert "best" in refusal(capsys, "eval", run.path, "--checkpoint", "best")

    def test_another_tokenizer(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        CharTokenizer("abc", bos=True).save(run.path / "tokenizer")
        assert "tokenizer" in refusal(capsys, "eval", run.path)

    @pytest.mark.parametrize("change", [{"n_layer": 3}, {"n_layer": 1}, {"n_kv_head": 1}])
    def test_another_model(self, run: Run, capsys: pytest.CaptureFixture[str], change: dict[str, int]) -> None:
        values = json.loads((run.path / "config.json").read_text())
        values["model"] |= change
        (run.path / "config.json").write_text(json.dumps(values))
        assert "another model" in refusal(capsys, "sample", run.path)

    def test_a_configuration_that_lacks_a_field(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        path = run.path / "config.json"
        values = json.loads(path.read_text())
        del values["log"]["report"]
        path.write_text(json.dumps(values))
        says = f"{path} cannot be used: the configuration lacks log.report: the file is incomplete"
        assert says in refusal(capsys, "sample", run.path)

    def test_a_corpus_that_is_gone(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        out = printed(capsys, "eval", run.path)
        moved = run.corpus.rename(run.corpus.with_name("moved"))
        assert "no such file or folder" in (line := refusal(capsys, "eval", run.path))
        assert "--data" in line
        assert printed(capsys, "eval", run.path, "--data", moved).endswith(out)
        assert "no corpus 'x': " in refusal(capsys, "eval", run.path, "--data", moved, "--val-source", "x,y")
        assert "leave them out" in refusal(capsys, "eval", run.path, "--data", moved, "--core")
        assert printed(capsys, "sample", run.path)  # which needs no corpus

    def test_a_prompt_that_cannot_be_encoded(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = make_run(tmp_path, kind="char")
        assert "'Ω'" in refusal(capsys, "sample", run.path, "--prompt", "the", "Ω")
        assert "prompt" in refusal(capsys, "sample", run.path, "--prompt", "")


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, command, "--help")
    assert "--checkpoint" in page
    assert "as in the run's configuration" in " ".join(page.split())
