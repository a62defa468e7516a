"""Models trained elsewhere become run folders: nanoGPT's checkpoints and folders of transformers."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import huggingface_hub
import oracle_nanogpt
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from local_hub import COMMIT, LocalHub
from oracle_nanogpt import ARGUMENTS, random_state, write_checkpoint
from safetensors.torch import load_file, save_file
from test_gpt2_weights import random_gpt2
from tiny_runs import command, start
from torch import Tensor

from gptlab.app.run.loaded_run import LoadedRun, load_run
from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.data.tokenizer.tokenizer import gpt2_tokenizer
from gptlab.model.interop.hf_weights import to_transformers
from gptlab.model.interop.pretrained import with_vocabulary
from gptlab.report.run_facts import read_facts
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.load import load_newest

CHARACTERS = "\n !?abcdefgh"  # 12; with "z" in front, an order that is not the sorted one


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """nanoGPT's meta.pkl of 13 characters."""
    itos = dict(enumerate("z" + CHARACTERS))
    table = {"vocab_size": 13, "itos": itos, "stoi": {character: index for index, character in itos.items()}}
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps(table))
    return path


def loaded(run: Path) -> LoadedRun:
    with Console() as console:
        return load_run(str(run), device="cpu", dtype="float64", console=console)


def refusal(*argv: object) -> str:
    """The one line of a command that ends with exit code 2."""
    code, _, err = command(["import", *argv])
    assert code == 2
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("gptlab: error: ")
    return lines[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_nanogpt_checkpoint_gives_its_logits(bias: bool, prefix: str, tmp_path: Path, meta: Path) -> None:
    """Weights are the same bits; logits agree to 1e-10, both computed in float64 from them."""
    arguments = ARGUMENTS | {"bias": bias}
    state = random_state(arguments)
    written = {prefix + name: value for name, value in state.items()}
    for layer in range(2):  # the causal mask, a buffer of models without flash attention
        written[f"{prefix}transformer.h.{layer}.attn.bias"] = torch.ones(24, 24).tril().view(1, 1, 24, 24)
    path = write_checkpoint(tmp_path / "ckpt.pt", arguments, written)
    code, out, err = command(["import", "nanogpt", path, tmp_path / "run", "--meta", meta])
    assert code == 0, err
    assert "2 layers, width 16, 2 heads, context 24, vocabulary 13 (char)" in out

    run = loaded(tmp_path / "run")
    saved = load_newest(tmp_path / "run" / "checkpoints", pytest.fail).model
    back = to_transformers(saved, run.config.model, "gpt2")
    for name in state.keys() - {"lm_head.weight"}:  # transformers' matrices are the transposes of nanoGPT's
        is_matrix = ".c_" in name and name.endswith("weight")
        assert torch.equal(back[name].T if is_matrix else back[name], state[name]), name
    assert len(saved) == len(state) - 1

    tokens = torch.randint(0, 13, (24,), generator=torch.Generator().manual_seed(1))
    wide = {name: value.double() for name, value in state.items()}
    expected = oracle_nanogpt.logits(arguments, wide, tokens)
    torch.testing.assert_close(run.model(tokens[None])[0], expected, rtol=0, atol=1e-10)
    assert run.tokenizer.decode([0, 1, 5]) == "z\na"

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["imported"]["iter_num"] == 2000
    assert record["imported"]["best_val_loss"] == 1.875
    assert record["imported"]["dataset"] == "shakespeare_char"


def test_an_import_that_was_killed_can_be_repeated(tmp_path: Path, meta: Path) -> None:
    """SIGKILL right behind the checkpoint, the last large file: there is no run, and the same command makes it."""
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    dies = (
        "import os\n"
        "from gptlab.app import foreign_models\n"
        "save = foreign_models.save_checkpoint\n"
        "foreign_models.save_checkpoint = lambda *a, **k: (save(*a, **k), os._exit(9))\n"
    )
    words = ["import", "nanogpt", path, tmp_path / "runs" / "it", "--meta", meta]
    process = start(words, prelude=dies)
    assert process.wait() == 9, process.communicate()[0]
    assert not (tmp_path / "runs" / "it").exists()
    code, _, err = command(words)
    assert (code, err) == (0, "")
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["it"]
    assert loaded(tmp_path / "runs" / "it").step == 0


def test_an_imported_model_samples_and_is_measured(tmp_path: Path, meta: Path) -> None:
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    text = tmp_path / "text.txt"
    text.write_text("a bad cab? fed a ham!\n".replace("m", "d") * 200)
    run = tmp_path / "run"
    code, out, _ = command(["import", "nanogpt", path, run, "--meta", meta, "--data", text])
    assert code == 0
    assert f"gptlab eval {run}, on {text}: --data FILE for your own text" in out
    code, out, _ = command(["sample", run, "--prompt", "abc", "--max-tokens", 5, "--temperature", 0, "--device", "cpu"])
    assert code == 0
    assert out.startswith("abc")
    code, out, err = command(["eval", run, "--device", "cpu", "--dtype", "float32"])
    assert code == 0, err
    assert "val_loss: " in out
    assert "not what it was" not in err  # nothing is known of the text that it was trained on
    assert f"data: {text}\n" in out
    other = tmp_path / "other.txt"
    other.write_text("a dad\n" * 50)
    words = ["eval", run, "--val-source", other, "--device", "cpu", "--dtype", "float32"]
    code, out, err = command(words)
    assert code == 0, err
    assert f"data: {other}\n" in out  # what was measured
    other.write_text("Other characters.\n" * 200)
    code, _, err = command(words)
    assert code == 2
    assert f"(the text is {text}, {other}; name another with --data or --val-source)" in err


def test_text_that_is_not_there_is_refused_before_the_run_is_written(tmp_path: Path, meta: Path) -> None:
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    code, _, err = command(["import", "nanogpt", path, tmp_path / "run", "--meta", meta, "--data", tmp_path / "no.txt"])
    assert code == 2
    assert err.startswith(f"gptlab: error: no corpus '{tmp_path}/no.txt': there is no such file")
    assert not (tmp_path / "run").exists()


def test_nanogpts_padded_vocabulary_is_padding_here(tmp_path: Path) -> None:
    """nanoGPT trains GPT-2's 50,257 entries in a table of 50,304 rows; all of them come along."""
    arguments = ARGUMENTS | {"vocab_size": 50304, "n_embd": 4, "n_layer": 1, "bias": True}
    state = random_state(arguments)
    path = write_checkpoint(tmp_path / "ckpt.pt", arguments, state)
    assert command(["import", "nanogpt", path, tmp_path / "run"])[0] == 0
    run = loaded(tmp_path / "run")
    assert (run.config.model.vocab_size, run.config.model.padded_vocab_size) == (50257, 50304)
    table = load_newest(tmp_path / "run" / "checkpoints", pytest.fail).model["token_embedding.weight"]
    assert torch.equal(table, state["transformer.wte.weight"])
    assert run.tokenizer.fingerprint == gpt2_tokenizer().fingerprint
    assert run.model(torch.tensor([[5]])).shape == (1, 1, 50257)


@pytest.mark.parametrize(("rows", "entries"), [(512, 65), (512, 400), (1024, 513), (50304, 30000)])
def test_a_table_of_many_more_rows_has_another_tokenizer(rows: int, entries: int) -> None:
    """Of 65 entries, 512 rows are a multiple too, but not what anybody pads them to."""
    model, tokenizer = ModelConfig(vocab_size=rows), SimpleNamespace(kind="bpe", vocab_size=entries)
    with pytest.raises(UserError, match=f"x has a vocabulary of {rows:,}, but the bpe tokenizer has {entries:,}"):
        with_vocabulary(model, cast(Any, tokenizer), of="x", remedy="")


@pytest.mark.parametrize(("rows", "entries"), [(128, 65), (512, 460), (50304, 50257), (51200, 50257)])
def test_a_few_more_rows_are_padding(rows: int, entries: int) -> None:
    model, tokenizer = ModelConfig(vocab_size=rows), SimpleNamespace(kind="bpe", vocab_size=entries)
    found = with_vocabulary(model, cast(Any, tokenizer), of="x", remedy="")
    assert (found.vocab_size, found.padded_vocab_size) == (entries, rows)


class Hostile:
    """Pickles to a call of os.system."""

    def __init__(self, call: str) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.call,)


@pytest.mark.parametrize("where", ["model", "config", "model_args", "optimizer"])
def test_code_in_a_checkpoint_is_refused_and_never_runs(where: str, tmp_path: Path, meta: Path) -> None:
    trace = tmp_path / "trace"
    hostile = {where: {"x": Hostile(f"touch {trace}")}}
    path = write_checkpoint(tmp_path / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS), **hostile)
    line = refusal("nanogpt", path, tmp_path / "run", "--meta", meta)
    assert "system" in line
    assert "nothing in it was run" in line
    assert not trace.exists()
    assert not (tmp_path / "run").exists()
    with path.open("rb") as file:  # the trap works: an ordinary load would have sprung it
        torch.load(file, weights_only=False)
    assert trace.exists()


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


def test_checkpoints_that_cannot_be_are_refused_in_one_line(tmp_path: Path, meta: Path) -> None:
    state = random_state(ARGUMENTS)
    wpe, tied = "transformer.wpe.weight", ("transformer.wte.weight", "lm_head.weight")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": without(state, wpe)}, "lack wpe.weight"),
        ({"model": state | {wpe: torch.zeros(24, 15)}}, "(24, 15)"),
        ({"model": state | {wpe: torch.full((24, 16), torch.nan)}}, "no finite numbers"),
        (
            {"model": state | dict.fromkeys(tied, state[tied[0]] * torch.nan)},
            "wte.weight holds values that are no finite",
        ),
        ({"model": state | {wpe: torch.zeros(24, 16, dtype=torch.int32)}}, "wpe.weight is of torch.int32"),
        ({"model": state | {"transformer.h.2.ln_1.weight": torch.ones(16)}}, "h.2.ln_1.weight"),
        ({"model": state | {"lm_head.weight": torch.ones(13, 16)}}, "lm_head.weight differs"),
        ({"model": {"wte": 1}}, "no table of tensors"),
        ({"model_args": ARGUMENTS | {"n_head": 3}}, "n_head = 3"),
        ({"model_args": without(ARGUMENTS, "block_size")}, "block_size = None"),
        ({"model_args": ARGUMENTS | {"bias": True}}, "lack h.0.ln_1.bias"),
        ({"model_args": None}, "not a nanoGPT checkpoint"),
        ({"model_args": ARGUMENTS | {"vocab_size": 11}}, "vocabulary of 11, but the char tokenizer has 13"),
    ]
    for number, (change, named) in enumerate(cases):
        path = write_checkpoint(tmp_path / f"{number}.pt", ARGUMENTS, state, **change)
        line = refusal("nanogpt", path, tmp_path / "run", "--meta", meta)
        assert named in line, line
        assert str(path) in line
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, meta: Path) -> None:
    good = write_checkpoint(tmp_path / "good.pt", ARGUMENTS, random_state(ARGUMENTS))
    (tmp_path / "short.pt").write_bytes(good.read_bytes()[:-2000])
    (tmp_path / "text.pt").write_text("weights, honestly")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("short.pt", "text.pt", "empty.pt", "list.pt", "none.pt", "."):
        assert str(tmp_path / name) in refusal("nanogpt", tmp_path / name, tmp_path / "run", "--meta", meta)
    line = refusal("nanogpt", good, tmp_path / "run")  # 13 characters are not GPT-2's vocabulary
    assert "--meta data/shakespeare_char/meta.pkl" in line


if TYPE_CHECKING:
    import transformers

    Gpt2 = tuple[Path, transformers.GPT2LMHeadModel]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Gpt2:
    """A folder as save_pretrained leaves it, with GPT-2's vocabulary: float32, small in all but that."""
    model = random_gpt2(n_layer=2, n_embd=8, n_head=2, n_positions=12, vocab_size=50257).float()
    folder = tmp_path_factory.mktemp("hf") / "tiny-gpt2"
    model.save_pretrained(folder)
    return folder, model


def check_imported(run_folder: Path, theirs: transformers.GPT2LMHeadModel) -> None:
    """The same bits, and so the same logits; float64 on both sides."""
    run = loaded(run_folder)
    state = theirs.state_dict()
    back = to_transformers(load_newest(run_folder / "checkpoints", pytest.fail).model, run.config.model, "gpt2")
    assert all(torch.equal(value, state[name]) for name, value in back.items())
    tokens = torch.randint(0, 50257, (2, 12), generator=torch.Generator().manual_seed(2))
    wide = type(theirs)(theirs.config).double()
    wide.load_state_dict(state)
    torch.testing.assert_close(run.model(tokens), wide.eval()(tokens).logits, rtol=0, atol=1e-10)


def test_a_folder_of_transformers(gpt2: Gpt2, tmp_path: Path) -> None:
    code, out, err = command(["import", "hf", gpt2[0], tmp_path / "run"])
    assert code == 0, err
    assert "vocabulary 50,257 (gpt2)" in out
    check_imported(tmp_path / "run", gpt2[1])
    train_from = f"gptlab train nanogpt/finetune --init-from {tmp_path / 'run'}"
    line = refusal("hf", gpt2[0], tmp_path / "run")
    assert "already holds a run: name another folder" in line
    assert line.endswith(train_from)
    facts = read_facts(tmp_path / "run")
    assert train_from == facts.train_on == dict(facts.commands())["train from its weights"]
    assert not [text for _, text in facts.commands() if "--from" in text or "--resume" in text]
    code, out, err = command(["runs", tmp_path])
    assert code == 0, err
    assert out.splitlines()[-1].endswith("imported depth=2")
    for flag in ("--resume", "--from"):
        code, _, err = command(["train", flag, tmp_path / "run"])
        assert code == 2
        assert "was imported, not trained: to begin with its weights, --init-from" in err


def test_shards_pickle_and_half_precision(gpt2: Gpt2, tmp_path: Path) -> None:
    folder, model = gpt2
    model.save_pretrained(tmp_path / "sharded", max_shard_size="400KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    for name in ("sharded", "pickled"):
        assert command(["import", "hf", tmp_path / name, tmp_path / f"{name}-run"])[0] == 0
        check_imported(tmp_path / f"{name}-run", model)
    half = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(half, tmp_path / "half" / "model.safetensors")
    assert command(["import", "hf", tmp_path / "half", tmp_path / "half-run"])[0] == 0
    saved = load_newest(tmp_path / "half-run" / "checkpoints", pytest.fail).model
    assert {value.dtype for value in saved.values()} == {torch.float32}
    norm = saved["final_norm.weight"]
    assert torch.equal(norm, half["transformer.ln_f.weight"].float())


@pytest.mark.parametrize("words", [["sample"], ["eval"], ["train", "--resume"], ["report"]], ids=" ".join)
def test_commands_for_runs_name_the_import(words: list[str], gpt2: Gpt2) -> None:
    code, _, err = command([*words, gpt2[0]])
    assert code == 2
    assert f"holds a model of transformers, not a run: `gptlab import hf {gpt2[0]} RUN`" in err
    assert err.count("\n") == 1


def test_folders_that_cannot_be_are_refused(gpt2: Gpt2, tmp_path: Path) -> None:
    config = json.loads((gpt2[0] / "config.json").read_text())
    content = (gpt2[0] / "model.safetensors").read_bytes()
    trace = tmp_path / "trace"

    def folder(name: str, changes: dict[str, Any] | None = None, weights: bytes | None = None) -> Path:
        path = tmp_path / name
        path.mkdir()
        if changes is not None:
            (path / "config.json").write_text(json.dumps(config | changes))
        if weights is not None:
            (path / "model.safetensors").write_bytes(weights)
        return path

    pickled = folder("pickled", {})
    torch.save({"x": Hostile(f"touch {trace}")}, pickled / "pytorch_model.bin")
    outside = folder("outside", {})
    (outside / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"wte.weight": "../x.safetensors"}})
    )
    lost = folder("lost", {})
    (lost / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": "x.safetensors"}}))
    llama = folder("llama", {"model_type": "llama"}, content)
    small = folder("small", {"vocab_size": 300}, content)
    cases = [
        (folder("empty"), "config.json"),
        (folder("weightless", {}), "holds no weights"),
        (llama, "model_type 'llama'"),
        (folder("scaled", {"scale_attn_by_inverse_layer_idx": True}, content), "scale_attn_by_inverse_layer_idx"),
        (folder("wider", {"n_embd": 16}, content), "has the shape"),
        (folder("damaged", {}, content[:-100]), "damaged"),
        (folder("no-header", {}, b"hello"), "damaged"),
        (pickled, "nothing in it was run"),
        (outside, "outside the folder"),
        (lost, "x.safetensors"),
        (small, "vocabulary of 300, but GPT-2's tokenizer has 50,257 entries"),
        (tmp_path / "x" / "y" / "z", "there is no folder"),
        (tmp_path / "nowhere", "there is no folder"),
    ]
    for path, named in cases:
        line = refusal("hf", path, tmp_path / "run")
        assert named in line, line
    assert not trace.exists()
    assert not (tmp_path / "run").exists()
    assert "there are hf, nanogpt" in refusal("gguf", "x", "y")


class ModelHub(LocalHub):
    """The loopback hub, its one repository under the name of OpenAI's model."""

    def answer(self, request: Any) -> None:
        for ours in ("/api/models/openai-community/gpt2", "/openai-community/gpt2"):
            kind = "/api/datasets" if ours.startswith("/api") else "/datasets"
            request.path = request.path.replace(ours, f"{kind}/lab/texts", 1)
        super().answer(request)


def test_a_name_is_downloaded_once(gpt2: Gpt2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a real huggingface_hub client from a hub on loopback."""
    constants = huggingface_hub.constants  # what HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE set at its import
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set and it is not in the local cache" in refusal("hf", "gpt2", tmp_path / "run")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = {path.name: path.read_bytes() for path in gpt2[0].iterdir()} | {"pytorch_model.bin": b"never asked for"}
    with ModelHub(files).running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        code, _, err = command(["import", "hf", "gpt2", tmp_path / "run"])
        assert code == 0, err
        assert "has no such model, and there is no such folder here" in refusal("hf", "lab/other", tmp_path / "other")
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors"]
    check_imported(tmp_path / "run", gpt2[1])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["imported"]["commit"] == COMMIT

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert command(["import", "hf", "openai-community/gpt2", tmp_path / "again"])[0] == 0  # now from the cache


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As snapshot_download raises it; the real one first tries five times, for fourteen seconds."""

    def fail(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("An error happened\nwhile trying") from OSError("[Errno 111] Connection refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    line = refusal("hf", "gpt2-xl", tmp_path / "run")
    assert "cannot fetch openai-community/gpt2-xl: [Errno 111] Connection refused" in line
    assert "with no network, name a folder" in line
