"""`gptlab export`: what transformers loads computes, generates and encodes the same, and comes back bit for bit."""

from __future__ import annotations

import copy
import functools
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import command, train, write_corpus
from torch import Tensor

from gptlab.app.foreign_models import model_card, modelling_source
from gptlab.app.run.loaded_run import load_run
from gptlab.cli.export import ExportArguments
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import RECIPES
from gptlab.config.run import BatchConfig, RunConfig, RuntimeConfig, TokenizerConfig
from gptlab.data.tokenizer.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, gpt2_tokenizer, train_tokenizer
from gptlab.eval.sampling import generate
from gptlab.model import gpt
from gptlab.model.gpt import GPT, build_model
from gptlab.model.interop import hf_config
from gptlab.model.interop.hf_config import Form, choose_form, model_config_of
from gptlab.model.interop.hf_weights import from_transformers, to_transformers
from gptlab.model.interop.pretrained import find_pretrained
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import load_checkpoint, load_weights
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint

SEQ_LEN, WINDOW = 64, 8
TEXT = "To be, or not to be: that is the question. 'Tis naïve — 12345 times!\n  père Noël →\n"
NASTY = ["", " ", "\n\n  \t x", "<|bos|>", "<|endoftext|> a <|bos|>", "don't  WE'LL 1234567", "naïve e\u0301 →",
         "中文😀\U0010ffff", "\0\r\n", "a" * 300]  # fmt: skip

GPT2: dict[str, Any] = {
    "norm": "layernorm", "position": "learned", "activation": "gelu", "tied_head": True, "qk_norm": False,
    "value_embeddings": False, "residual_lambdas": False, "embedding_norm": False, "logit_softcap": None,
}  # fmt: skip
NANOCHAT: dict[str, Any] = {"value_embeddings": False, "residual_lambdas": False}
SPEEDRUN: dict[str, Any] = GPT2 | {"norm": "rmsnorm", "position": "rope", "attention_residual_scale": 8**-0.5}

SHAPES: dict[str, tuple[Form, dict[str, Any]]] = {
    "nanogpt-bias": ("gpt2", GPT2 | {"bias": True, "dropout": 0.1}),
    "nanochat-plain": ("nanochat", NANOCHAT | {"rope_base": 100_000.0, "n_kv_head": 2}),
    "autoresearch": ("gptlab", {"window_pattern": "SSSL", "window_tokens": WINDOW}),
    "nanogpt": ("gpt2", GPT2),
    "gpt2-tanh-untied": ("gpt2", GPT2 | {"bias": True, "activation": "gelu_tanh", "tied_head": False, "mlp_ratio": 3}),
    "nanochat-tied": (
        "nanochat",
        NANOCHAT | {"activation": "gelu_tanh", "tied_head": True, "logit_softcap": None, "rmsnorm_eps": 0.01},
    ),
    "speedrun": ("gptlab", SPEEDRUN | {"rmsnorm_eps": 0.01}),
    "quickstart": ("gptlab", {"key_offset": True}),
    "nanochat-full": ("gptlab", {"window_pattern": "SL", "window_tokens": 1, "n_kv_head": 2, "rope_base": 1e5}),
    "mixed": ("gptlab", GPT2 | {"bias": True, "activation": "gelu_tanh", "window_pattern": "S", "dropout": 0.1}),
}

of_each_kind = pytest.mark.parametrize("exported", list(SHAPES)[:4], indirect=True)
"""Every form with a tokenizer of its own, and both of GPT-2's; first, since pytest sorts by the place in the list."""


@functools.cache
def _their_tokenizer(folder: Path, trust: bool) -> Any:
    import transformers  # not where the tests are only collected: it takes a second

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


@functools.cache
def _their_model(folder: Path, trust: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust, **dict(options)
    )
    return model.eval()


@dataclass(frozen=True)
class Exported:
    form: Form
    model: GPT
    """float32, as the run's checkpoint has it."""
    tokenizer: Tokenizer
    run: Path
    folder: Path
    said: str
    """What the command printed."""

    def theirs(self, **options: Any) -> Any:
        """The model as transformers loads it, the same one every time it is asked for."""
        return _their_model(self.folder, self.form == "gptlab", tuple(options.items()))

    def their_tokenizer(self) -> Any:
        return _their_tokenizer(self.folder, self.form == "gptlab")

    def config_json(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))


def shaken(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model whose every weight matters: fresh ones have zero projections and gates."""
    model = build_model(config, device=torch.device("cpu"), compute_dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A tied head says again what went in unless the blocks outweigh it.
            scale = 0.5 if name.startswith("blocks") and config.tied_head else 0.15
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        assert config.vocab_size is not None
        model.head.weight[config.vocab_size - 1] *= 0.1  # BOS, the last entry, would end what is generated
    return model.eval()


def make_run(folder: Path, tokenizer: Tokenizer, **model: Any) -> tuple[Path, GPT]:
    config = RunConfig(
        model=ModelConfig(
            **({"n_layer": 4, "n_embd": 32, "n_head": 4} | model), seq_len=SEQ_LEN, vocab_size=tokenizer.vocab_size
        ),
        batch=BatchConfig(total_tokens=4 * SEQ_LEN, micro_sequences=4),
        runtime=RuntimeConfig(device="cpu", dtype="float32", threads=1),
    )
    run = RunDirectory.create(folder, config_to_json(config), {})
    tokenizer.save(run.tokenizer_path)
    network = shaken(config.model)
    save_checkpoint(run.checkpoints_path, 10, model=dict(network.named_parameters()), optimizer={}, state={})
    with MetricsLog(run.metrics_path) as metrics:
        metrics.write("eval", step=10, val_loss=3.25, val_bpb=1.5, train_seconds=1.0, tokens=2560)
    return run.path, network


@pytest.fixture(scope="module", autouse=True)
def _own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies modelling files that it runs. HF_MODULES_CACHE is read once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        yield


@pytest.fixture(scope="module", params=SHAPES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    form, model = SHAPES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer: Tokenizer = ByteTokenizer()
    if request.param == "nanogpt":
        tokenizer = CharTokenizer(TEXT, bos=False)
    elif request.param == "nanogpt-bias":
        tokenizer = gpt2_tokenizer()
    elif form == "gptlab":
        tokenizer = train_tokenizer(TokenizerConfig(vocab_size=290), [TEXT * 9], bos=True)
    run, network = make_run(folder / "run", tokenizer, **model)
    code, out, err = command(["export", run, folder / "hf"])
    assert (code, err) == (0, "")
    return Exported(form, network, tokenizer, run, folder / "hf", out)


def prompt(exported: Exported, start: int = 0) -> list[int]:
    bos = [] if exported.tokenizer.bos_id is None else [exported.tokenizer.bos_id]
    return bos + exported.tokenizer.encode(TEXT[start : start + 20])[:15].tolist()


def same_weights(found: dict[str, Tensor], model: GPT) -> None:
    """Bit for bit in every row that stands for a token; rows of padding come back as zeros."""
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    for name, parameter in own.items():
        rows = model.config.vocab_size if is_table(name) else len(parameter)
        assert found[name].shape == parameter.shape
        assert torch.equal(found[name][:rows], parameter[:rows])
        assert not found[name][rows:].any()


def is_table(name: str) -> bool:
    return name in ("token_embedding.weight", "head.weight") or "value_embeddings" in name


class TestForm:
    def test_is_the_plainest_that_computes_the_same(self) -> None:
        for name, (form, model) in SHAPES.items():
            config = ModelConfig(n_layer=4, seq_len=SEQ_LEN, vocab_size=9, **model)
            assert choose_form(config)[0] == form, name

    def test_of_every_recipe(self) -> None:
        """nanoGPT's models are GPT-2s; the other lineages have parts that no class of transformers has."""
        for name, recipe in RECIPES.items():
            expected = "gpt2" if name.startswith("nanogpt/") else "gptlab"
            assert choose_form(recipe().model)[0] == expected, name

    def test_says_which_and_why(self, exported: Exported) -> None:
        first, *rest = exported.said.splitlines()
        assert hf_config.ARCHITECTURES[exported.form] in first
        assert f"step 10 of {exported.run}" in first
        assert any("trust_remote_code=True" in line for line in rest) == (exported.form == "gptlab")

    def test_names_what_stands_in_the_way(self) -> None:
        """One field changed each, and so one is named, with the value that would do."""
        for change, text in (
            (NANOCHAT | {"attention_residual_scale": 0.5}, "NanoChat, would need attention_residual_scale None"),
            (NANOCHAT | {"window_pattern": "SL"}, "NanoChat, would need window_pattern L"),
            (GPT2 | {"n_head": 4, "n_kv_head": 2}, "GPT-2, would need n_kv_head 4"),
        ):
            form, why = choose_form(ModelConfig(**change))
            assert (form, why) == ("gptlab", f"the nearest class of transformers, {text}")
        assert choose_form(ModelConfig(**NANOCHAT, window_pattern="S", n_layer=1))[0] == "nanochat"

    def test_the_gate_reads_as_many_channels(self) -> None:
        assert f"GATE_CHANNELS = {gpt.GATE_CHANNELS}" in modelling_source()


class TestComputesTheSame:
    def test_logits(self, exported: Exported) -> None:
        """transformers' NanoChat takes angles and norms in float32 whatever the weights are, and an angle of 60 rounds
        by 2e-6 there. The other two compute in float64, where roundings of 1e-16 stay far below 1e-10."""
        dtype, tolerance = (torch.float32, 2e-4) if exported.form == "nanochat" else (torch.float64, 1e-10)
        ours = build_model(exported.model.config, device=torch.device("cpu"), compute_dtype=dtype, seed=0).eval()
        load_weights(ours, dict(exported.model.named_parameters()))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, exported.tokenizer.vocab_size, (3, SEQ_LEN), generator=generator)
        with torch.no_grad():
            theirs = exported.theirs(dtype=dtype)(tokens).logits
            expected = ours(tokens)
        assert theirs.shape == expected.shape
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs, expected, rtol=0, atol=tolerance, check_dtype=False)

    def test_greedy_tokens(self, exported: Exported) -> None:
        """24 tokens after 15, far beyond the window of 8."""
        start = prompt(exported)
        bos_id = exported.tokenizer.bos_id
        expected = list(generate(exported.model, start, max_tokens=24, temperature=0, bos_id=bos_id))
        ids = torch.tensor([start])
        found = exported.theirs().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, use_cache=True
        )
        assert len(expected) == 24
        assert len(set(expected)) > 2
        assert found[0].tolist() == start + expected

    def test_a_batch_padded_on_the_left(self, exported: Exported) -> None:
        starts = [prompt(exported), prompt(exported, 30)[:6]]
        longest = max(map(len, starts))
        ids = torch.tensor([[0] * (longest - len(start)) + start for start in starts])
        mask = torch.tensor([[0] * (longest - len(start)) + [1] * len(start) for start in starts])
        found = exported.theirs().generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        for row, start in zip(found.tolist(), starts, strict=True):
            expected = list(generate(exported.model, start, max_tokens=12, temperature=0))
            assert row[longest:] == expected

    def test_loads_and_generates_without_a_warning(self, exported: Exported) -> None:
        seen: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                inputs = exported.their_tokenizer()(TEXT[:12], return_tensors="pt")
                assert set(inputs) == {"input_ids", "attention_mask"}
                _their_model.cache_clear()  # loaded again
                text = exported.theirs().generate(**inputs, max_new_tokens=4)
        finally:
            logger.removeHandler(handler)
        assert text.shape[1] > inputs["input_ids"].shape[1]
        assert seen == []

    def test_ends_where_a_document_begins(self, exported: Exported) -> None:
        settings = exported.theirs().generation_config
        bos_id = exported.tokenizer.bos_id
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (bos_id, bos_id, bos_id)


class TestOwnForm:
    """What only the modelling file has to get right by itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def own(cls, tmp_path_factory: pytest.TempPathFactory) -> Exported:
        folder = tmp_path_factory.mktemp("own")
        run, network = make_run(folder / "run", ByteTokenizer(), window_pattern="SSSL", window_tokens=WINDOW)
        assert command(["export", run, folder / "hf"])[0] == 0
        return Exported("gptlab", network, ByteTokenizer(), run, folder / "hf", "")

    def test_needs_trust(self, own: Exported) -> None:
        import transformers

        with pytest.raises(ValueError, match="trust_remote_code"):
            transformers.AutoModelForCausalLM.from_pretrained(
                own.folder, local_files_only=True, trust_remote_code=False
            )

    def test_loss_and_gradients(self, own: Exported) -> None:
        """transformers shifts the labels itself. float32 gradients of two orders of summation: 1e-4."""
        tokens = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(2))
        theirs = own.theirs()
        output = theirs(tokens, labels=tokens)
        output.loss.backward()
        own.model.zero_grad()
        loss = own.model.loss(tokens[:, :-1], tokens[:, 1:].contiguous()) / (2 * 39)
        loss.backward()
        torch.testing.assert_close(output.loss, loss, rtol=0, atol=1e-5)
        grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        for name, parameter in own.model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(grads[name], parameter.grad[: len(grads[name])], rtol=0, atol=1e-4)

    def test_last_logits_only(self, own: Exported) -> None:
        tokens = torch.arange(20)[None]
        theirs = own.theirs()
        with torch.no_grad():
            last = theirs(tokens, logits_to_keep=1).logits
            torch.testing.assert_close(last, theirs(tokens).logits[:, -1:], rtol=0, atol=1e-5)

    def test_outputs_are_those_that_are_asked_for(self, own: Exported) -> None:
        """As of transformers' own models: what each layer reads, and what the head reads."""
        tokens, theirs = torch.arange(20)[None], own.theirs()
        with torch.no_grad():
            plain, whole = theirs(tokens), theirs(tokens, output_hidden_states=True)
            assert plain.hidden_states is None
            assert len(whole.hidden_states) == own.model.config.n_layer + 1
            assert torch.equal(whole.hidden_states[0], theirs.embedding_norm(theirs.token_embedding(tokens)))
            cap = theirs.config.logit_softcap
            assert torch.equal(cap * torch.tanh(theirs.head(whole.hidden_states[-1]) / cap), plain.logits)
            logits, *_ = theirs(tokens, return_dict=False)
            assert torch.equal(logits, plain.logits)
            picked = theirs(tokens, logits_to_keep=torch.tensor([3, 7])).logits
            torch.testing.assert_close(picked, plain.logits[:, [3, 7]], rtol=0, atol=1e-5)

    def test_other_caches_and_ways_to_generate(self, own: Exported) -> None:
        """A static cache has room for more keys than there are; beams reorder the cache, and look-up crops it."""
        ids = torch.tensor([prompt(own)])
        expected = list(generate(own.model, prompt(own), max_tokens=20, temperature=0))
        found = own.theirs().generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=3)
        assert found[0].tolist() == prompt(own) + expected
        padded = torch.cat((torch.zeros(1, 2, dtype=torch.int64), ids), dim=1)
        found = own.theirs().generate(
            padded, attention_mask=(torch.arange(padded.shape[1]) >= 2)[None].long(), max_new_tokens=20,
            do_sample=False, cache_implementation="static",
        )  # fmt: skip
        assert found[0, 2:].tolist() == prompt(own) + expected
        beams = [
            own.theirs().generate(ids, max_new_tokens=20, num_beams=3, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert torch.equal(*beams)

    def test_eager_attention_is_the_same(self, own: Exported) -> None:
        tokens = torch.arange(30)[None]
        with torch.no_grad():
            eager = own.theirs(attn_implementation="eager")(tokens).logits
            torch.testing.assert_close(eager, own.theirs()(tokens).logits, rtol=0, atol=1e-5)

    def test_refuses_what_is_beyond_its_context(self, own: Exported) -> None:
        with pytest.raises(ValueError, match=f"context of {SEQ_LEN}"):
            own.theirs()(torch.zeros(1, SEQ_LEN + 1, dtype=torch.int64))

    def test_new_tokens(self, own: Exported, tmp_path: Path) -> None:
        """Each entry of the vocabulary is also one of every value embedding; what was there stays, bit for bit."""
        import transformers

        options = {"local_files_only": True, "trust_remote_code": True}
        larger = transformers.AutoModelForCausalLM.from_pretrained(own.folder, **options).eval()
        old = own.tokenizer.vocab_size
        larger.resize_token_embeddings(old + 2)
        larger.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
        new, tokens = torch.tensor([[3, old + 1]]), torch.arange(30)[None]
        with torch.no_grad():
            assert torch.equal(larger(tokens).logits[..., :old], own.theirs()(tokens).logits)
            assert torch.equal(larger(new).logits, again(new).logits)
            assert again(new).logits.shape == (1, 2, old + 2)

    def test_the_file_stands_alone(self, own: Exported) -> None:
        source = (own.folder / "modeling_gptlab.py").read_text()
        assert source == modelling_source()
        assert "import gptlab" not in source
        assert "from gptlab" not in source


class TestTokenizer:
    def test_encodes_as_gptlab(self, exported: Exported) -> None:
        theirs = exported.their_tokenizer()
        bos = [] if exported.tokenizer.bos_id is None else [exported.tokenizer.bos_id]
        for text in NASTY:
            if exported.tokenizer.kind == "char":  # transformers drops what is not in the vocabulary
                text = "".join(character for character in text if character in TEXT)
            ours = exported.tokenizer.encode(text).tolist()
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours, text
            assert theirs(text)["input_ids"] == bos + ours, text
            assert theirs.decode(bos + ours, skip_special_tokens=True) == exported.tokenizer.decode(ours), text

    def test_knows_its_bos_and_the_context(self, exported: Exported) -> None:
        theirs = exported.their_tokenizer()
        bos_id = exported.tokenizer.bos_id
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (bos_id, bos_id, bos_id)
        assert theirs.model_max_length == SEQ_LEN


class TestComesBack:
    @of_each_kind
    def test_as_a_run(self, exported: Exported, tmp_path: Path) -> None:
        """`gptlab import hf` of the folder: the same model, tokenizer and text; weights bit for bit."""
        code, _, err = command(["import", "hf", exported.folder, tmp_path / "run"])
        assert (code, err) == (0, "")
        with Console(stream=io.StringIO()) as console:
            run = load_run(str(tmp_path / "run"), device="cpu", dtype="float32", console=console)
        assert run.config.model == exported.model.config
        assert run.tokenizer.fingerprint == exported.tokenizer.fingerprint
        same_weights({name: parameter.detach() for name, parameter in run.model.named_parameters()}, exported.model)
        words = ["--prompt", TEXT[:9], "--max-tokens", 10, "--temperature", 0, "--device", "cpu", "--dtype", "float32"]
        outputs = [command(["sample", path, *words]) for path in (exported.run, tmp_path / "run")]
        assert outputs[0] == outputs[1]
        assert outputs[0][0] == 0

        assert command(["export", tmp_path / "run", tmp_path / "again"])[0] == 0
        assert "Imported from hf (hf)." in (tmp_path / "again" / "README.md").read_text()
        first, second = (folder / "model.safetensors" for folder in (exported.folder, tmp_path / "again"))
        assert first.read_bytes() == second.read_bytes()

    def test_from_the_folder(self, exported: Exported) -> None:
        config = model_config_of(exported.config_json())
        assert config == exported.model.config
        assert find_pretrained(str(exported.folder)).model == config, "what --init-from reads"
        same_weights(
            from_transformers(load_file(exported.folder / "model.safetensors"), config, exported.form), exported.model
        )

    def test_after_transformers_saved_it_again(self, exported: Exported, tmp_path: Path) -> None:
        """A GPT-2 with its biases, of which transformers has trained one here."""
        theirs = copy.deepcopy(exported.theirs())  # which other tests have, too
        is_trained = exported.form == "gpt2" and not exported.model.config.bias
        if is_trained:
            theirs.transformer.h[1].ln_1.bias.data.fill_(0.5)
        theirs.save_pretrained(tmp_path)
        config = model_config_of(json.loads((tmp_path / "config.json").read_text()))
        assert config == replace(exported.model.config, bias=exported.model.config.bias or is_trained)
        found = from_transformers(load_file(tmp_path / "model.safetensors"), config, exported.form)
        if is_trained:
            biases = {name: found.pop(name) for name in [*found] if name.endswith(".bias")}
            assert [name for name, value in biases.items() if value.any()] == ["blocks.1.attention_norm.bias"]
        same_weights(found, exported.model)

    @of_each_kind
    def test_in_bfloat16_as_rounded(self, exported: Exported, tmp_path: Path) -> None:
        assert command(["export", exported.run, tmp_path / "hf", "--dtype", "bfloat16"])[0] == 0
        tensors = load_file(tmp_path / "hf" / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        full = load_file(exported.folder / "model.safetensors")
        assert all(torch.equal(tensor, full[name].bfloat16()) for name, tensor in tensors.items())
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", local_files_only=True, trust_remote_code=exported.form == "gptlab"
        )
        assert model.dtype == torch.bfloat16
        assert torch.isfinite(model(torch.tensor([prompt(exported)])).logits).all()

    def test_a_record_that_contradicts_the_rest_or_lacks_a_field_is_not_believed(self, exported: Exported) -> None:
        """As where transformers has enlarged the vocabulary; weights may need another value than the default."""
        content = exported.config_json()
        record = {name: value for name, value in content["gptlab"].items() if name != "init"}
        for changed in (content | {"vocab_size": content["vocab_size"] + 5}, content | {"gptlab": record}):
            if exported.form == "gptlab":
                with pytest.raises(UserError, match="no longer what gptlab exported"):
                    model_config_of(changed)
            else:
                derived = model_config_of(changed)
                assert derived.vocab_size == changed["vocab_size"]
                assert derived.n_embd == exported.model.config.n_embd


def test_nanochats_weights_by_hand() -> None:
    """One head of two queries' rows, one of keys', one of values', in this order; the vocabulary cut to 3 of 4."""
    config = ModelConfig(
        n_layer=1, n_embd=4, n_head=2, n_kv_head=1, seq_len=4, vocab_size=3, vocab_multiple=4, mlp_ratio=1, **NANOCHAT
    )
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors["blocks.0.attention.qkv.weight"] = torch.arange(32.0).view(8, 4)
    found = to_transformers(tensors, config, "nanochat")
    layer = "model.layers.0.self_attn"
    assert found[f"{layer}.q_proj.weight"][:, 0].tolist() == [0, 4, 8, 12]
    assert found[f"{layer}.k_proj.weight"][:, 0].tolist() == [16, 20]
    assert found[f"{layer}.v_proj.weight"][:, 0].tolist() == [24, 28]
    assert found["model.embed_tokens.weight"].shape == (3, 4)
    assert set(found) == {
        "model.embed_tokens.weight", "lm_head.weight", f"{layer}.q_proj.weight", f"{layer}.k_proj.weight",
        f"{layer}.v_proj.weight", f"{layer}.o_proj.weight", "model.layers.0.mlp.fc1.weight",
        "model.layers.0.mlp.fc2.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("lm_head.weight"), "lack lm_head.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "have extra"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2, 4)}), r"lm_head.weight has the shape \(2, 4\)"),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), "no finite numbers"),
    ],
)
def test_refuses_other_weights(change: Any, reason: str) -> None:
    config = ModelConfig(n_layer=1, n_embd=4, n_head=2, seq_len=4, vocab_size=3, **NANOCHAT)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    tensors = to_transformers({name: p.detach() for name, p in model.named_parameters()}, config, "nanochat")
    change(tensors)
    with pytest.raises(UserError, match=reason):
        from_transformers(tensors, config, "nanochat")


@pytest.mark.parametrize(
    ("form", "head", "table"),
    [("nanochat", "lm_head.weight", "model.embed_tokens.weight"), ("gptlab", "head.weight", "token_embedding.weight")],
)
def test_a_tied_head_may_be_written_twice_but_not_otherwise(form: Form, head: str, table: str) -> None:
    config = ModelConfig(n_layer=1, n_embd=4, n_head=2, seq_len=4, vocab_size=3, tied_head=True, **NANOCHAT)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    tensors = to_transformers({name: p.detach() for name, p in model.named_parameters()}, config, form)
    assert head not in tensors
    same_weights(from_transformers(tensors | {head: tensors[table]}, config, form), model)
    with pytest.raises(UserError, match=f"{head} differs from {table}"):
        from_transformers(tensors | {head: tensors[table] + 1}, config, form)


class TestForeignNanoChat:
    def test_is_read(self, tmp_path: Path) -> None:
        """One that gptlab never saw: transformers' own class with random weights."""
        import transformers

        settings = transformers.NanoChatConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )  # fmt: skip
        theirs = transformers.NanoChatForCausalLM(settings).eval()
        with torch.no_grad():
            theirs.lm_head.weight.normal_(0, 1)
        theirs.save_pretrained(tmp_path)
        config = model_config_of(json.loads((tmp_path / "config.json").read_text()))
        ours = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
        load_weights(ours, from_transformers(load_file(tmp_path / "model.safetensors"), config, "nanochat"))
        tokens = torch.arange(32)[None]
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        "change",
        [{"rms_norm_eps": 0.0}, {"rms_norm_eps": "1e-6"}, {"attention_bias": True}, {"hidden_act": "silu"},
         {"head_dim": 3}, {"rope_parameters": {"rope_type": "yarn"}}],
        ids=str,
    )  # fmt: skip
    def test_that_gptlab_has_no_part_for(self, change: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=f"config.json has {next(iter(change))}|config.json has rope_type"):
            model_config_of({"model_type": "nanochat", "hidden_size": 32, "num_attention_heads": 4} | change)


class TestCommand:
    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        write_corpus(folder / "corpus")
        return train(folder, "run")

    def test_a_trained_run(self, trained: Path, tmp_path: Path) -> None:
        code, _, err = command(["export", trained, tmp_path / "deep" / "hf", "--checkpoint", "best"])
        assert (code, err) == (0, "")
        card = (tmp_path / "deep" / "hf" / "README.md").read_text()
        evals = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        best = min((line for line in evals if line["kind"] == "eval" and line["step"] > 0), key=lambda e: e["val_loss"])
        assert f"{best['val_bpb']:.4f} bits per byte" in card
        assert f"step {best['step']}" in card
        assert "max_new_tokens=27)" in card, "32 positions hold BOS, four bytes of the prompt, and what is generated"
        assert str(tmp_path.parent) not in card, "folders are named by their last part"
        assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["hf"], "nothing temporary is left"
        tensors = load_file(tmp_path / "deep" / "hf" / "model.safetensors")
        saved = {c.name: c for c in list_checkpoints(trained / "checkpoints")}[f"step-{best['step']:08d}"]
        lambdas = load_checkpoint(saved).model["residual_lambdas"]
        assert torch.equal(tensors["residual_lambdas"], lambdas)

    def test_refusals_are_one_line(self, trained: Path, tmp_path: Path) -> None:
        filled = tmp_path / "filled"
        filled.mkdir()
        (filled / "mine.txt").write_text("x")
        empty = tmp_path / "no-checkpoint"
        RunDirectory.create(empty, config_to_json(RunConfig()), {})
        for words, reason in (
            ([trained, filled], "not empty (it holds mine.txt): name another folder"),
            ([trained, filled / "mine.txt"], "is a file"),
            ([trained, tmp_path / "x", "--format", "gguf"], "must be one of hf"),
            ([trained, tmp_path / "x", "--checkpoint", "77"], "no checkpoint of step 77"),
            ([tmp_path / "nothing", tmp_path / "x"], "there is no run folder"),
            ([empty, tmp_path / "x"], "has no checkpoint yet"),
            ([trained], "needs FOLDER"),
        ):
            code, out, err = command(["export", *words])
            assert (code, out) == (2, "")
            assert reason in err
            assert err.count("\n") == 1
        assert not (tmp_path / "x").exists()
        assert (filled / "mine.txt").read_text() == "x"

    def test_the_card_says_that_documents_were_masked(self, trained: Path) -> None:
        run = load_run(trained, device="cpu")
        data = replace(run.config.data, mask_documents=True)
        masked = replace(run, config=replace(run.config, data=data))
        cards = [model_card(one, "gptlab", n_params=1) for one in (run, masked)]
        assert ["give each document alone" in card for card in cards] == [False, True]

    def test_a_warning_says_that_documents_were_masked(self, trained: Path, tmp_path: Path) -> None:
        masked = train(trained.parent, "masked", data__mask_documents=True, steps=1)
        for run, is_masked in ((trained, False), (masked, True)):
            folder = tmp_path / run.name
            code, out, _ = command(["export", run, folder])
            assert (code, "give each document alone" in out) == (0, is_masked)
            assert hf_config.read_hf_config(folder)[hf_config.MASKED_DOCUMENTS] is is_masked
            code, out, _ = command(["import", "hf", folder, tmp_path / f"{run.name}-again"])
            assert (code, "give each document alone" in " ".join(out.split())) == (0, is_masked)

    def test_a_warning_says_that_float64_was_rounded(self, trained: Path, tmp_path: Path) -> None:
        wide = train(trained.parent, "wide", runtime__dtype="float64", steps=1)
        for run, is_rounded in ((trained, False), (wide, True)):
            code, out, _ = command(["export", run, tmp_path / run.name])
            assert (code, "the weights are float64, and were rounded" in out) == (0, is_rounded)

    def test_an_empty_folder_will_do(self, trained: Path, tmp_path: Path) -> None:
        assert command(["export", trained, tmp_path])[0] == 0
        assert (tmp_path / "config.json").exists()

    def test_a_lost_run_json_ends_nothing(self, trained: Path, tmp_path: Path) -> None:
        with_record, without = tmp_path / "whole" / "README.md", tmp_path / "lost" / "README.md"
        assert command(["export", trained, with_record.parent])[0] == 0
        record = (trained / "run.json").rename(tmp_path / "run.json")
        try:
            assert command(["export", trained, without.parent])[0] == 0
        finally:
            record.rename(trained / "run.json")
        assert without.read_text() == with_record.read_text()

    def test_a_full_disk_leaves_nothing(self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("gptlab.app.foreign_models.write_bytes", full)
        code, _, err = command(["export", trained, tmp_path / "hf"])
        assert code == 2
        assert "No space left" in err
        assert list(tmp_path.iterdir()) == []

    def test_default_type_is_the_masters(self) -> None:
        assert ExportArguments(run="a", folder="b").dtype == "float32"
