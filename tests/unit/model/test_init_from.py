"""Runs that begin with trained weights: of a run, a folder of transformers, a name in the hub's local cache."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from test_gpt2_weights import random_gpt2
from tiny_runs import command, differences, killed_at, lines_of, make_config, outcome, train, weights_of

import gptlab
from gptlab.app.run.run_request import TrainArguments
from gptlab.app.run.saved_weights import weights_fingerprint
from gptlab.app.run.session import Session, open_session
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.model import GPT2_SIZES, ModelConfig
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.model.gpt import GPT, build_model
from gptlab.model.interop.hf_config import gpt2_model_config
from gptlab.model.interop.pretrained import require_fits
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.load import load_checkpoint, load_weights
from gptlab.training.checkpoint.names import list_checkpoints

GPT2_PARTS: dict[str, Any] = {
    "model.n_layer": 2, "model.norm": "layernorm", "model.position": "learned", "model.activation": "gelu",
    "model.bias": True, "model.tied_head": True, "model.qk_norm": False, "model.value_embeddings": False,
    "model.embedding_norm": False, "model.residual_lambdas": False, "model.logit_softcap": None,
    "model.window_pattern": "L", "model.dropout": 0.0, "optim.matrix_optimizer": "adamw", "optim.matrix.lr": 0.03,
    "optim.embedding.lr": 0.5,
}  # fmt: skip


def gpt2_flags(**changes: Any) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in GPT2_PARTS.items()} | changes


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A run of GPT-2's parts whose best checkpoint is not its last: the rate rises to what no weights bear."""
    rising = {"schedule__warmup_fraction": 1.0, "schedule__warmdown_fraction": 0.0}
    run = train(folder, "base", **gpt2_flags(checkpoint__every_steps=3, **rising))
    assert best_step(run) < 12
    return run


def best_step(run: Path) -> int:
    saved = {int(path.name.removeprefix("step-")) for path in list_checkpoints(run / "checkpoints")}
    lines = [line for line in lines_of(run, "eval") if line["step"] in saved]
    return min(lines, key=lambda line: line["val_loss"])["step"]


def request(*words: object) -> RunConfig:
    asked = read_request([str(word) for word in words], TrainArguments, prog="gptlab train", description="")
    return asked.config(lambda _: Machine(device="cpu", flops_per_second=1e11))


def opened(config: RunConfig) -> Session:
    with Console() as console:
        return open_session(config, place_of(config), console)


def test_weights_are_those_of_the_best_checkpoint_and_nothing_else_is(folder: Path, base: Path) -> None:
    session = opened(make_config(folder, "x", **gpt2_flags(init_from=base)))
    best = load_checkpoint(base / "checkpoints" / f"step-{best_step(base):08}")
    own = weights_of(session.state)
    assert own.keys() == best.model.keys()
    assert all(torch.equal(value, best.model[name]) for name, value in own.items())
    assert not any(value.any() for value in session.state.optimizer.state_tensors().values())
    assert session.state.step == 0
    assert session.start is not None
    assert session.start.fingerprint == weights_fingerprint(best.model)
    other = {name: value + 1 if name == "final_norm.bias" else value for name, value in best.model.items()}
    assert weights_fingerprint(other) != session.start.fingerprint


def test_eval_only_measures_the_weights_and_trains_nothing(folder: Path, base: Path) -> None:
    """nanoGPT's eval_only on pretrained weights: the very number that the run itself logged for that step."""
    run = train(folder, "measured", **gpt2_flags(init_from=base, eval__only=True))
    logged = {line["step"]: line["val_loss"] for line in lines_of(base, "eval")}
    assert [line["val_loss"] for line in lines_of(run, "eval")] == [logged[best_step(base)]]
    assert lines_of(run, "train") == []
    assert not (run / "checkpoints").exists()
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert len(record["init_from_fingerprint"]) == 64


def test_shape_and_tokenizer_come_from_the_weights_dropout_and_length_from_the_run(base: Path) -> None:
    config = request("quickstart", "--init-from", base, "--model.dropout", "0.2", "--steps", "3")
    stored = json.loads((base / "config.json").read_text())
    for name, value in stored["model"].items():
        assert getattr(config.model, name) == (0.2 if name == "dropout" else value), name
    assert config.tokenizer.path == str(base / "tokenizer")
    assert config.tokenizer.kind == "byte"
    assert config.horizon.amount == 3
    assert request("quickstart", "--init-from", base, "--tokenizer.kind", "char").tokenizer.path is None
    assert request("quickstart", "--init-from", "none", "--depth", "3").model.n_layer == 3


def test_a_shorter_context_is_cropped(folder: Path, base: Path) -> None:
    """The first positions stay: on as many tokens the model is what it was, to the rounding of float32."""
    session = opened(make_config(folder, "x", **gpt2_flags(init_from=base, model__seq_len=16)))
    model = session.state.model
    best = load_checkpoint(base / "checkpoints" / f"step-{best_step(base):08}").model
    assert model.position_embedding is not None
    assert torch.equal(model.position_embedding.weight, best["position_embedding.weight"][:16])
    whole = build_model(
        replace(model.config, seq_len=32), device=torch.device("cpu"), compute_dtype=torch.float32, seed=0
    )
    load_weights(whole, best)
    tokens = torch.arange(32).view(2, 16)
    torch.testing.assert_close(model.eval()(tokens), whole.eval()(tokens), rtol=1e-5, atol=1e-5)
    assert request("quickstart", "--init-from", base, "--model.seq-len", "16").model.seq_len == 16


def test_cropping_keeps_the_windows_that_the_weights_learned_with(folder: Path) -> None:
    windowed = train(folder, "windowed", steps=1, model__n_layer=2)
    config = request("quickstart", "--init-from", windowed, "--model.seq-len", "24", "--batch.total-tokens", "768")
    assert config.model.layer_windows() == (17, None)  # half of 32, not of 24, and the token itself
    assert request("quickstart", "--init-from", windowed, "--model.seq-len", "8").model.layer_windows() == (None, None)
    session = opened(
        make_config(folder, "x", init_from=windowed, model__n_layer=2, model__seq_len=16, model__window_tokens=16)
    )
    assert session.start is not None


@pytest.mark.parametrize(
    ("field", "value", "there"),
    [
        ("seq_len", 64, "have 32 learned positions"),
        ("n_layer", 3, "have 2"),
        ("n_embd", 64, "have 32"),
        ("n_head", 4, "have 2"),
        ("n_kv_head", 1, "have kv_heads 2"),
        ("mlp_ratio", 2.0, "have mlp_width 128"),
        ("vocab_multiple", 128, "have 32"),
        ("norm", "rmsnorm", "have layernorm"),
        ("position", "rope", "have learned"),
        ("bias", False, "have True"),
        ("tied_head", False, "have True"),
        ("value_embeddings", True, "have False"),
        ("residual_lambdas", True, "have False"),
    ],
)
def test_a_model_that_the_weights_do_not_fit_is_refused_by_name(
    field: str, value: object, there: str, folder: Path, base: Path
) -> None:
    with pytest.raises(ConfigError, match=there) as refused:
        make_config(folder, "x", **gpt2_flags(init_from=base, **{f"model__{field}": value}))
    assert refused.value.field == f"model.{field}"
    config = make_config(folder, "x", **gpt2_flags(init_from=base))
    changed = replace(
        config, model=replace(config.model, **{field: value}), batch=replace(config.batch, total_tokens=512)
    )
    with pytest.raises(ConfigError, match=there):  # and where the configuration was made in Python
        opened(changed)


def test_every_field_that_changes_names_or_shapes_is_fixed() -> None:
    """The list by which fits are judged is complete: a change of any other field leaves all names and shapes alone."""
    plain = ModelConfig(n_layer=2, n_embd=32, n_head=4, seq_len=16, vocab_size=60)
    other: dict[str, Any] = {
        "n_layer": 3, "n_embd": 64, "n_head": 2, "n_kv_head": 2, "seq_len": 8, "vocab_size": 70, "vocab_multiple": 128,
        "mlp_ratio": 2.0, "norm": "layernorm", "rmsnorm_eps": 0.1, "position": "learned", "rope_base": 5.0,
        "activation": "gelu", "bias": True, "dropout": 0.5, "tied_head": True, "qk_norm": False,
        "key_offset": True, "window_pattern": "S", "window_tokens": 4,
        "value_embeddings": False, "residual_lambdas": False, "embedding_norm": False, "logit_softcap": None,
        "attention_residual_scale": 0.5, "init": "gpt2",
    }  # fmt: skip
    assert other.keys() == set(ModelConfig.__dataclass_fields__)

    def shapes(config: ModelConfig) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: parameter.shape for name, parameter in GPT(config).named_parameters()}

    for name, value in other.items():
        config = replace(plain, **{name: value})
        if shapes(config) != shapes(plain):
            with pytest.raises(ConfigError):
                require_fits(config, plain, "x")


if TYPE_CHECKING:
    import transformers

    Gpt2 = tuple[Path, transformers.GPT2LMHeadModel]


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> Gpt2:
    """A folder of transformers: GPT-2's vocabulary, small in all else."""
    model = random_gpt2(n_layer=2, n_embd=8, n_head=2, n_positions=32, vocab_size=50257).float()
    model.save_pretrained(folder / "hf")
    return folder / "hf", model


def hf_flags(**changes: Any) -> dict[str, Any]:
    gpt2 = {
        "tokenizer__kind": "gpt2", "model__n_embd": 8, "model__vocab_multiple": 64, "model__activation": "gelu_tanh",
        "eval__tokens": 64,
    }  # fmt: skip
    return gpt2_flags() | gpt2 | changes


def test_a_folder_of_transformers(folder: Path, gpt2: Gpt2) -> None:
    """Logits in float64 from the same float32 weights: 1e-10, as in test_gpt2_weights."""
    session = opened(make_config(folder, "x", **hf_flags(init_from=gpt2[0], runtime__dtype="float64")))
    tokens = torch.randint(0, 50257, (2, 32), generator=torch.Generator().manual_seed(4))
    theirs = type(gpt2[1])(gpt2[1].config).double()
    theirs.load_state_dict(gpt2[1].state_dict())
    ours = session.state.model.eval()(tokens)
    torch.testing.assert_close(ours, theirs.eval()(tokens).logits, rtol=0, atol=1e-10)
    assert session.data.tokenizer.kind == "gpt2"

    run = folder / "imported"
    assert command(["import", "hf", gpt2[0], run])[0] == 0
    again = opened(make_config(folder, "x", **hf_flags(init_from=run)))
    assert again.start is not None
    assert session.start is not None
    assert again.start.fingerprint == session.start.fingerprint  # the same weights by another way
    assert "newest checkpoint: step 0" in again.start.text


class TestNames:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A cache of the hub that is empty, and no network at all."""

        def refuse(*args: object) -> NoReturn:
            raise AssertionError("training must not touch the network")

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(socket.socket, "connect", refuse)
        return tmp_path / "hub"

    def test_a_cached_model_is_found_and_nothing_is_downloaded(
        self,
        cache: Path,
        folder: Path,
        gpt2: Gpt2,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        small = gpt2_model_config(json.loads((gpt2[0] / "config.json").read_text()))
        monkeypatch.setattr("gptlab.model.interop.pretrained.GPT2_SIZES", {"gpt2": small})
        with pytest.raises(ConfigError, match="`gptlab import hf gpt2 DIR`"):
            opened(make_config(folder, "x", **hf_flags(init_from="gpt2")))
        kept = cache / "models--openai-community--gpt2"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text("abc123")
        snapshot = kept / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        shutil.copy(gpt2[0] / "config.json", snapshot)
        with pytest.raises(ConfigError, match="not on this machine"):  # its config.json alone is not the model
            opened(make_config(folder, "x", **hf_flags(init_from="gpt2")))
        shutil.copy(gpt2[0] / "model.safetensors", snapshot)
        for name in ("gpt2", "openai-community/gpt2"):
            session = opened(make_config(folder, "x", **hf_flags(init_from=name)))
            table = session.state.model.token_embedding.weight[:50257]
            assert torch.equal(table, gpt2[1].transformer.wte.weight)

    def test_shapes_are_known_without_the_weights(self, cache: Path) -> None:
        for name, layers in (("gpt2", 12), ("gpt2-medium", 24), ("gpt2-large", 36), ("openai-community/gpt2-xl", 48)):
            config = request("quickstart", "--init-from", name, "--model.seq-len", "512", "--model.dropout", "0.1")
            assert config.model == replace(GPT2_SIZES[name.rpartition("/")[2]], seq_len=512, dropout=0.1)
            assert config.model.n_layer == layers
            assert config.tokenizer.kind == "gpt2"
        own = request("nanogpt/finetune-tiny")  # a recipe's own weights: its shape is theirs
        assert own.init_from is not None
        assert not Path(own.init_from).exists()
        assert own.model.n_layer == 4
        with pytest.raises(ConfigError, match=r"model.n_layer = 6: the weights of gpt2 have 12"):
            request("quickstart", "--init-from", "gpt2", "--depth", "6")
        flags = ["--init-from", "gpt2", "--model.seq-len", "1024", "--device", "cpu", "--dtype", "float32"]
        code, out, err = command(["plan", "quickstart", "--batch.total-tokens", "16384", *flags])
        assert code == 0, err
        # OpenAI's 124,439,808 and 47 rows of padding, 768 wide.
        assert f"{124_439_808 + 47 * 768:,}" in out

    @pytest.mark.parametrize(
        ("name", "named"),
        [
            ("gpt-2", "nearest valid: gpt2"),
            ("gpt3", "there is no such folder"),
            ("scratch", "is nanoGPT's word for random weights: leave it out, or give none"),
            ("corpus/documents.jsonl", "gptlab import nanogpt"),
            ("corpus", "config.json"),
        ],
    )
    def test_what_is_not_there_is_refused(
        self, name: str, named: str, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        code, _, err = command(["train", "quickstart", "--init-from", name, "--depth", "1"])
        assert code == 2
        assert named in err
        assert len(err.strip().splitlines()) == 1

    def test_a_run_without_a_checkpoint_has_no_weights(self, folder: Path, base: Path) -> None:
        shutil.copytree(base, folder / "bare")
        shutil.rmtree(folder / "bare" / "checkpoints")
        with pytest.raises(UserError, match="no checkpoint yet"):
            opened(make_config(folder, "x", **gpt2_flags(init_from=folder / "bare")))


class TestTokenizer:
    def test_one_of_another_size_is_refused(self, folder: Path, base: Path) -> None:
        with pytest.raises(UserError, match=r"know 257 tokens, but the tokenizer has .* leave the fields of"):
            opened(make_config(folder, "x", **gpt2_flags(init_from=base, tokenizer__kind="char")))

    def test_another_one_of_the_same_size_is_told(
        self, folder: Path, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        opened(make_config(folder, "x", **gpt2_flags(init_from=base, tokenizer__kind="bpe", tokenizer__vocab_size=257)))
        assert "not the one that the weights" in capsys.readouterr().out.replace("\n", " ")
        opened(make_config(folder, "x", **gpt2_flags(init_from=base)))
        assert "not the one that the weights" not in capsys.readouterr().out.replace("\n", " ")


class TestResume:
    """What a resumed run needs of the weights that it began with."""

    @pytest.fixture
    def source(self, folder: Path, base: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(base, tmp_path / "source"))

    def config(self, folder: Path, name: str, source: Path) -> RunConfig:
        flags = gpt2_flags(init_from=source, tokenizer__path=source / "tokenizer", model__dropout=0.1)
        return make_config(folder, name, **flags)

    def test_from_a_checkpoint_the_source_is_not_needed(self, folder: Path, source: Path) -> None:
        assert gptlab.train(self.config(folder, "undisturbed", source)).exit_code == 0
        expected = outcome(folder / "undisturbed")
        with killed_at("train", 6):
            gptlab.train(self.config(folder, "killed", source))
        shutil.rmtree(source)
        code, _, err = command(["train", "--resume", folder / "killed"])
        assert code == 0, err
        assert differences(expected, outcome(folder / "killed")) == []

    def test_before_the_first_checkpoint_it_is(self, folder: Path, source: Path, base: Path) -> None:
        assert gptlab.train(self.config(folder, "first", source)).exit_code == 0
        with killed_at("train", 2):
            gptlab.train(self.config(folder, "early", source))
        shutil.move(source, source.with_name("elsewhere"))
        code, _, err = command(["train", "--resume", folder / "early"])
        assert code == 2
        assert "there is no such folder" in err
        other = gpt2_flags(seed=5, steps=3)
        shutil.copytree(train(folder, f"other-{source.parent.name}", **other), source)
        code, _, err = command(["train", "--resume", folder / "early"])
        assert code == 2
        assert "are not those that" in err
        shutil.rmtree(source)
        shutil.move(source.with_name("elsewhere"), source)
        assert command(["train", "--resume", folder / "early"])[0] == 0
        assert differences(outcome(folder / "first"), outcome(folder / "early")) == []
