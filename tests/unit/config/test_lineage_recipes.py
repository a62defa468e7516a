"""The lineages' recipes against their documents: every number written out again, every rule worked out by hand.

Numbers are those of the documents and of their sources: nanoGPT's train.py, config/train_shakespeare_char.py,
config/train_gpt2.py, config/finetune_shakespeare.py, its README's CPU command and data/*/prepare.py; autoresearch's
train.py and prepare.py; nanochat's gpt.py and tok_train.py of February 2026.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import command, lines_of, write_corpus
from torch import nn

import gptlab
from gptlab.app.run.run_request import TrainArguments
from gptlab.bench.plan import RunPlan, make_plan
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.arguments.run_help import recipe_list
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.fields import bare
from gptlab.config.length import Horizon, share_of_run
from gptlab.config.load import flatten, leaf_fields
from gptlab.config.model import ModelConfig
from gptlab.config.optim import ScheduleConfig
from gptlab.config.recipes import RECIPES, configure
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine, lr_scale_for_batch, weight_decay_for_depth
from gptlab.data.corpus.known_corpora import named_source
from gptlab.model.gpt import build_model
from gptlab.optim.schedule import lr_scale, muon_momentum, weight_decay_scale
from gptlab.runtime.files.plain_file import read_json_object
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place

MACHINE = Machine(device="cpu", flops_per_second=1e12)

TINY = [name for name in RECIPES if name.endswith("-tiny")]
FULL = [name.removesuffix("-tiny") for name in TINY]
LINEAGES = ["nanogpt/gpt2-124m-tiny", "speedrun/muon-2024-10-tiny", "autoresearch-tiny", "nanochat-tiny"]
"""One of each, to be compared with one another."""

GPT2_PARTS = {
    "model.norm": "layernorm", "model.position": "learned", "model.tied_head": True, "model.init": "gpt2",
    "model.mlp_ratio": 4.0, "model.n_kv_head": None, "model.qk_norm": False, "model.window_pattern": "L",
    "model.value_embeddings": False, "model.residual_lambdas": False, "model.embedding_norm": False,
    "model.logit_softcap": None, "model.attention_residual_scale": None, "model.vocab_multiple": 64,
}  # fmt: skip
NANOGPT = GPT2_PARTS | {
    "model.activation": "gelu", "model.bias": False, "model.dropout": 0.0, "model.vocab_size": None,
    "optim.matrix_optimizer": "adamw", "optim.grad_clip": 1.0,
    "optim.matrix.beta1": 0.9, "optim.matrix.eps": 1e-8, "optim.matrix.weight_decay": 0.1,
    "optim.embedding.beta1": 0.9, "optim.embedding.eps": 1e-8, "optim.embedding.weight_decay": 0.1,
    "optim.vector.beta1": 0.9, "optim.vector.eps": 1e-8, "optim.vector.weight_decay": 0.0,
    "schedule.kind": "cosine", "schedule.final_lr_scale": 0.1, "data.rows": "random",
    "checkpoint.save_best": True, "eval.at_start": True, "init_from": None, "sample.prompts": (),
}  # fmt: skip
CHARACTERS = NANOGPT | {
    "tokenizer.kind": "char", "data.source": ("tinyshakespeare",), "data.split": "tail", "data.val_fraction": 0.1,
    "optim.matrix.lr": 1e-3, "optim.embedding.lr": 1e-3, "optim.vector.lr": 1e-3,
    "optim.matrix.beta2": 0.99, "optim.embedding.beta2": 0.99, "optim.vector.beta2": 0.99,
    "eval.every_steps": 250, "checkpoint.every_steps": None, "horizon.unit": "steps",
}  # fmt: skip
MODERN = {
    "model.norm": "rmsnorm", "model.position": "rope", "model.rope_base": 10_000.0, "model.activation": "relu2",
    "model.rmsnorm_eps": 2**-23, "model.bias": False, "model.dropout": 0.0, "model.tied_head": False,
    "model.qk_norm": True, "model.n_kv_head": None,
    "model.window_pattern": "SSSL", "model.window_tokens": None, "model.value_embeddings": True,
    "model.residual_lambdas": True, "model.embedding_norm": True, "model.logit_softcap": 15.0,
    "model.attention_residual_scale": None, "model.init": "nanochat", "model.seq_len": 2048, "model.mlp_ratio": 4.0,
    "tokenizer.kind": "bpe", "tokenizer.max_digits": 2, "data.rows": "packed", "data.pack_buffer_documents": 1000,
    "data.long_documents": "cut", "batch.total_tokens": 524_288,
    "optim.matrix_optimizer": "muon", "optim.grad_clip": None,
    "optim.muon.momentum": 0.95, "optim.muon.momentum_start": 0.85, "optim.muon.momentum_ramp_steps": 300,
    "optim.muon.nesterov": True, "optim.muon.orthogonalizer": "polar_express", "optim.muon.iterations": 5,
    "optim.muon.update_scale": "aspect", "optim.muon.normuon_beta2": 0.95, "optim.muon.cautious_decay": True,
    "optim.muon.scaled_decay": True, "optim.muon.split_qkv": True,
    **{f"optim.{role}.{name}": value
       for role in ("embedding", "value_embedding", "head", "residual_lambda")
       for name, value in {"beta1": 0.8, "beta2": 0.95, "eps": 1e-10, "weight_decay": 0.0}.items()},
    "optim.x0_lambda.beta1": 0.96, "optim.x0_lambda.beta2": 0.95, "optim.x0_lambda.eps": 1e-10,
    "optim.x0_lambda.weight_decay": 0.0, "model.vocab_multiple": 64,
    "optim.residual_lambda.lr": 0.005, "optim.x0_lambda.lr": 0.5,
    "schedule.kind": "trapezoid", "schedule.warmup_fraction": 0.0, "schedule.warmdown_fraction": 0.5,
    "schedule.final_lr_scale": 0.0, "schedule.weight_decay_final": 0.0, "runtime.max_loss": 100.0,
    "checkpoint.every_steps": None, "checkpoint.every_seconds": None, "checkpoint.save_best": False,
}  # fmt: skip
SPEEDRUN_ADAMW = {"lr": 0.0036, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}

EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "nanogpt/shakespeare-char": CHARACTERS | {
        "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.seq_len": 256, "model.dropout": 0.2,
        "batch.micro_sequences": 64, "batch.total_tokens": 16_384, "horizon.amount": 5000,
        "schedule.warmup_fraction": 101 / 5000, "eval.tokens": 3_276_800, "eval.train_tokens": 3_276_800,
        "runtime.dtype": "auto", "runtime.device": "auto",
    },
    "nanogpt/shakespeare-char-cpu": CHARACTERS | {
        "model.n_layer": 4, "model.n_head": 4, "model.n_embd": 128, "model.seq_len": 64, "model.dropout": 0.0,
        "batch.micro_sequences": 12, "batch.total_tokens": 768, "horizon.amount": 2000,
        "schedule.warmup_fraction": 101 / 2000, "eval.tokens": 15_360, "eval.train_tokens": 15_360,
        "runtime.dtype": "float32", "runtime.device": "cpu",
    },
    "nanogpt/gpt2-124m": NANOGPT | {
        "model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768, "model.seq_len": 1024,
        "tokenizer.kind": "gpt2", "data.source": ("openwebtext",), "data.split": "hash", "data.val_fraction": 0.0005,
        "batch.micro_sequences": 12, "batch.total_tokens": 491_520, "horizon.amount": 600_000, "horizon.unit": "steps",
        "optim.matrix.lr": 6e-4, "optim.embedding.lr": 6e-4, "optim.vector.lr": 6e-4,
        "optim.matrix.beta2": 0.95, "optim.embedding.beta2": 0.95, "optim.vector.beta2": 0.95,
        "schedule.warmup_fraction": 2001 / 600_000, "eval.every_steps": 1000, "eval.tokens": 2_457_600,
        "eval.train_tokens": 2_457_600, "checkpoint.every_steps": 1000,
    },
    "nanogpt/finetune": NANOGPT | {
        "init_from": "gpt2", "model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768, "model.seq_len": 1024,
        "model.bias": True, "model.activation": "gelu_tanh", "model.vocab_size": 50_257,
        "tokenizer.kind": "gpt2", "data.source": ("tinyshakespeare",), "data.split": "tail", "data.val_fraction": 0.1,
        "batch.micro_sequences": 1, "batch.total_tokens": 32_768, "horizon.amount": 20, "horizon.unit": "steps",
        "optim.matrix.lr": 3e-5, "optim.embedding.lr": 3e-5, "optim.vector.lr": 3e-5,
        "optim.matrix.beta2": 0.95, "optim.embedding.beta2": 0.95, "optim.vector.beta2": 0.95,
        "schedule.kind": "trapezoid", "schedule.warmup_fraction": 0.0, "schedule.warmdown_fraction": 0.0,
        "schedule.final_lr_scale": 0.0, "eval.every_steps": 5, "eval.tokens": 40_960, "eval.train_tokens": 40_960,
    },
    "speedrun/muon-2024-10": {
        "model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768, "model.seq_len": 1024, "model.mlp_ratio": 4.0,
        "model.norm": "rmsnorm", "model.position": "rope", "model.rope_base": 10_000.0, "model.activation": "gelu",
        "model.rmsnorm_eps": 1e-6, "model.bias": False, "model.dropout": 0.0, "model.tied_head": True,
        "model.qk_norm": False, "model.window_pattern": "L", "model.value_embeddings": False,
        "model.residual_lambdas": False, "model.embedding_norm": False, "model.logit_softcap": None,
        "model.init": "torch", "model.attention_residual_scale": 24**-0.5,
        "tokenizer.kind": "gpt2", "data.rows": "sequential",
        "data.source": ("fineweb10b-gpt2",), "data.val_source": (),
        "batch.micro_sequences": 64, "batch.total_tokens": 524_288, "horizon.amount": 6200, "horizon.unit": "steps",
        "optim.matrix_optimizer": "muon", "optim.grad_clip": None, "optim.muon.lr": 0.00036,
        "optim.muon.momentum": 0.95, "optim.muon.momentum_start": 0.95, "optim.muon.momentum_ramp_steps": 0,
        "optim.muon.nesterov": True, "optim.muon.orthogonalizer": "newton_schulz", "optim.muon.iterations": 5,
        "optim.muon.update_scale": "max_side", "optim.muon.normuon_beta2": None, "optim.muon.weight_decay": 0.0,
        "optim.muon.split_qkv": True, **{f"optim.embedding.{name}": x for name, x in SPEEDRUN_ADAMW.items()},
        "schedule.kind": "trapezoid", "schedule.warmup_fraction": 0.0, "schedule.warmdown_fraction": 1800 / 6200,
        "schedule.final_lr_scale": 0.0, "eval.every_steps": 125, "eval.at_start": True, "eval.tokens": 10_485_760,
        "checkpoint.every_steps": None, "checkpoint.every_seconds": None, "checkpoint.save_best": False,
        "init_from": None, "sample.prompts": (),
    },
    "autoresearch": MODERN | {
        "model.n_layer": 8, "model.n_embd": 512, "model.n_head": 4, "tokenizer.vocab_size": 8192,
        "tokenizer.train_bytes": 10**9, "data.source": ("climbmix",), "batch.micro_sequences": 128,
        "horizon.amount": 300.0, "horizon.unit": "seconds", "optim.muon.lr": 0.04, "optim.muon.weight_decay": 0.2,
        "optim.embedding.lr": 0.6 * math.sqrt(1.5), "optim.value_embedding.lr": 0.6 * math.sqrt(1.5),
        "optim.head.lr": 0.004 * math.sqrt(1.5), "eval.every_steps": None, "eval.at_start": False,
        "eval.tokens": 20_971_520, "sample.prompts": (), "eval.core_every_steps": None,
    },
    "nanochat": MODERN | {
        "model.n_layer": 20, "model.n_embd": 1280, "model.n_head": 10, "tokenizer.vocab_size": 32_768,
        "tokenizer.train_bytes": 2 * 10**9, "data.source": ("fineweb-edu",), "batch.micro_sequences": 32,
        "horizon.amount": 10.5, "horizon.unit": "tokens_per_param",
        "optim.muon.lr": 0.02, "optim.muon.weight_decay": 0.072, "optim.embedding.lr": 0.3 * math.sqrt(0.6),
        "optim.value_embedding.lr": 0.3 * math.sqrt(0.6), "optim.head.lr": 0.004 * math.sqrt(0.6),
        "eval.every_steps": 250, "eval.at_start": True, "eval.tokens": 10_485_760,
        "eval.core_every_steps": 2000, "eval.core_examples": 500,
        "sample.every_steps": 2000, "sample.max_tokens": 16, "sample.temperature": 0.0, "sample.top_k": None,
        "sample.prompts": (
            "The capital of France is", "The chemical symbol of gold is",
            "If yesterday was Friday, then tomorrow will be", "The opposite of hot is",
            "The planets of the solar system are:", "My favorite color is", "If 5*x + 3 = 13, then x is",
        ),
    },
}  # fmt: skip

OWN = {
    "seed", "model.n_kv_head", "model.vocab_size", "model.vocab_multiple", "data.hub_files", "horizon.until_val_loss",
    "eval.train_tokens", "eval.every_seconds", "eval.micro_sequences", "eval.core_every_steps",
    "sample.from_validation", "sample.every_seconds", "checkpoint.every_steps", "checkpoint.every_seconds",
    "checkpoint.keep_last", "checkpoint.keep_every_steps", "faults.max_skipped", "faults.max_skipped_in_a_row",
    "faults.max_rewinds", "faults.spike_factor", "faults.spike_window", "runtime.threads", "runtime.log_every_steps",
    "runtime.max_loss", "runtime.process_timeout_seconds", "parallel.shard_ranks",
}  # fmt: skip
"""Numbers of which a lineage says nothing: gptlab's defaults, in every recipe whose table does not name them."""


def without_effect(config: RunConfig) -> list[str]:
    """How the names of those numbers begin that nothing of such a run depends on."""
    model, rows, none = config.model, config.data.rows, list[str]()
    none += ["optim.matrix."] if config.optim.matrix_optimizer == "muon" else ["optim.muon."]
    none += ["schedule.warmdown_fraction"] if config.schedule.kind == "cosine" else []
    decays = config.optim.matrix_optimizer == "muon" and config.optim.muon.weight_decay > 0
    none += [] if decays else ["schedule.weight_decay_final"]
    none += ["optim.head."] if model.tied_head else []
    none += [] if model.value_embeddings else ["optim.value_embedding."]
    none += [] if model.residual_lambdas else ["optim.residual_lambda.", "optim.x0_lambda."]
    none += [] if model.norm == "layernorm" or model.bias else ["optim.vector."]
    none += [] if model.norm == "rmsnorm" or model.qk_norm else ["model.rmsnorm_eps"]
    none += [] if model.position == "rope" else ["model.rope_base"]
    none += [] if "S" in model.window_pattern else ["model.window_tokens"]
    none += [] if rows == "packed" else ["data.pack_buffer_documents"]
    none += [] if config.tokenizer.kind == "bpe" else [f"tokenizer.{x}" for x in ("vocab", "max_digits", "train_bytes")]
    none += [] if config.eval.core_every_steps else ["eval.core_examples"]
    none += [] if config.sample.prompts else [f"sample.{x}" for x in ("every", "max_tokens", "temperature", "top_k")]
    corpus = named_source(config.data.source[0])
    none += ["data.val_fraction"] if corpus is not None and getattr(corpus.place, "validation", None) else []
    return none


SIZES = {
    "recipe", "model.n_layer", "model.n_embd", "model.n_head", "model.seq_len", "model.vocab_size",
    "tokenizer.kind", "tokenizer.vocab_size", "tokenizer.train_bytes", "data.source", "data.val_source", "data.split",
    "data.val_fraction", "batch.total_tokens", "batch.micro_sequences", "horizon.amount", "horizon.unit",
    "eval.every_steps", "eval.tokens", "eval.train_tokens", "sample.every_steps", "checkpoint.every_steps",
}  # fmt: skip
"""What a tiny form may have otherwise than the run that it stands for."""
RULES = {
    "nanogpt/shakespeare-char": set(),
    "nanogpt/shakespeare-char-cpu": set(),
    # The rates of nanoGPT's small networks.
    "nanogpt/gpt2-124m": {"schedule.warmup_fraction"}
    | {f"optim.{role}.{name}" for role in ("matrix", "embedding", "value_embedding", "head", "vector", "x0_lambda",
                                           "residual_lambda") for name in ("lr", "beta2")},
    # The weights that it begins with are a run's, without OpenAI's biases and tanh.
    "nanogpt/finetune": {"init_from", "model.bias", "model.activation"},
    "speedrun/muon-2024-10": {"model.attention_residual_scale"},
    "autoresearch": {f"optim.{role}.lr" for role in ("embedding", "value_embedding", "head", "vector")},
    # CORE would have to be downloaded.
    "nanochat": {"eval.core_every_steps", "optim.muon.lr", "optim.muon.weight_decay"}
    | {f"optim.{role}.lr" for role in ("embedding", "value_embedding", "head", "vector", "x0_lambda",
                                       "residual_lambda")},
}  # fmt: skip
"""And what follows from its size by the lineage's own rules."""


def fields(config: RunConfig) -> dict[str, Any]:
    return flatten(dataclasses.asdict(config))


def steps(amount: int) -> Horizon:
    return Horizon(amount=amount, unit="steps")


def plan(config: RunConfig) -> RunPlan:
    """The plan with a BPE or byte vocabulary of the size asked for, but without its memory, which takes a forward pass
    and is tested by `test_plan.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptlab.bench.plan.count_memory", lambda *_, **__: None)
        return make_plan(config, Place(torch.device("cpu"), torch.bfloat16, 1, Peak(1e15, "table")))


class TestNumbers:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_are_the_documents(self, name: str) -> None:
        got = fields(RECIPES[name]())
        wrong = {
            field: (got[field], value)
            for field, value in EXPECTED[name].items()
            if got[field] != (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
        }
        assert not wrong
        assert got["recipe"] == name

    @pytest.mark.parametrize("name", EXPECTED)
    def test_every_number_is_in_the_table_or_said_to_be_gptlabs_own_or_without_effect(self, name: str) -> None:
        config = RECIPES[name]()
        got, default, none = fields(config), fields(RunConfig()), tuple(without_effect(config))
        numbers = [field for field, kind in leaf_fields(RunConfig).items() if bare(kind)[0] in (int, float)]
        assert len(numbers) > 90
        open_questions = [
            field
            for field in numbers
            if field not in EXPECTED[name]
            and not field.startswith(none)
            and not (field in OWN and got[field] == default[field])
        ]
        assert not open_questions

    def test_every_lineage_has_its_table_and_its_tiny_form(self) -> None:
        assert set(FULL) == set(EXPECTED) == set(RULES)
        assert set(RECIPES) == {"quickstart", "shakespeare-char", *FULL, *TINY}

    def test_names_in_python(self) -> None:
        assert gptlab.recipes.nanogpt_shakespeare_char_cpu().recipe == "nanogpt/shakespeare-char-cpu"
        assert gptlab.recipes.speedrun_muon_2024_10().recipe == "speedrun/muon-2024-10"
        for name, recipe in RECIPES.items():
            assert getattr(gptlab.recipes, name.translate(str.maketrans("/-", "__"))) is recipe

    @pytest.mark.parametrize("name", ["autoresearch", "autoresearch-tiny", "nanochat", "nanochat-tiny"])
    def test_a_window_is_half_the_context_to_the_left_and_the_token(self, name: str) -> None:
        """FlashAttention's window_size = (seq_len // 2, 0), and nanochat's own mask, row - col <= window."""
        model = RECIPES[name]().model
        row = model.seq_len - 1
        seen = sum(0 <= row - col <= model.seq_len // 2 for col in range(model.seq_len))
        pattern = [seen, seen, seen, None] * model.n_layer
        assert list(model.layer_windows()) == [*pattern[: model.n_layer - 1], None]
        assert seen == {256: 129, 2048: 1025}[model.seq_len]

    def test_parameters_of_the_publications(self) -> None:
        """autoresearch prints 50.3M; GPT-2 has 124.4M, 38.6M of them in the table; nanoGPT's without biases, 10.6M for
        Shakespeare's characters, less its 65 of them."""
        assert plan(RECIPES["autoresearch"]()).parameters.total / 1e6 == pytest.approx(50.3, abs=0.05)
        gpt2 = plan(RECIPES["nanogpt/finetune"]()).parameters
        padding = 50_304 - 50_257
        assert gpt2.total - padding * 768 == 124_439_808
        characters = plan(RECIPES["nanogpt/shakespeare-char"]()).parameters
        assert characters.total - 128 * 384 == 12 * 6 * 384**2 + 13 * 384 + 256 * 384

    def test_the_list_has_one_line_each_that_fits_a_terminal(self) -> None:
        lines = recipe_list().splitlines()
        assert [line.split()[0] for line in lines] == list(RECIPES)
        assert max(map(len, lines)) <= 100
        assert len({line.rindex("  ") for line in lines}) == 1  # every text begins in the same column

    @pytest.mark.parametrize("name", FULL)
    def test_corpora_have_those_names(self, name: str) -> None:
        """Where each lies and what of it validates is a table's business: the speedrun's is fineweb_val_*.bin."""
        (source,) = RECIPES[name]().data.source
        named = named_source(source)
        assert named is not None
        if name == "speedrun/muon-2024-10":
            assert named.place.validation == "fineweb_val_*.bin"  # type: ignore[union-attr]


class TestTinyForms:
    @pytest.mark.parametrize("name", FULL)
    def test_differ_in_size_only(self, name: str) -> None:
        full, tiny = fields(RECIPES[name]()), fields(RECIPES[f"{name}-tiny"]())
        differ = {field for field in full if full[field] != tiny[field]} - SIZES - RULES[name]
        # A warm-up or warm-down in steps is the same share of another length.
        assert not differ, {field: (full[field], tiny[field]) for field in differ}

    @pytest.mark.parametrize("name", TINY)
    def test_accumulate_and_need_no_download(self, name: str) -> None:
        config = RECIPES[name]()
        assert config.micro_batches >= 2
        assert config.data.source == ("stdlib",)
        assert config.batch.total_tokens <= 8192
        assert config.eval.core_every_steps is None

    def test_of_the_lineages_can_be_compared(self) -> None:
        shared = {
            "model.n_layer": 4, "model.n_embd": 128, "model.n_head": 2, "model.seq_len": 256,
            "tokenizer.kind": "bpe", "tokenizer.vocab_size": 4096, "tokenizer.path": None, "data.source": ("stdlib",),
            "data.val_source": (), "data.split": "hash", "data.val_fraction": 0.05, "batch.total_tokens": 8192,
            "eval.tokens": 131_072,
        }  # fmt: skip
        configs = {name: fields(RECIPES[name]()) for name in LINEAGES}
        for name, config in configs.items():
            assert {field: config[field] for field in shared} == shared, name
        rows = {config["data.rows"] for config in configs.values()}
        assert rows == {"random", "sequential", "packed"}
        assert configs["nanochat-tiny"]["horizon.unit"] == "tokens_per_param"
        assert configs["autoresearch-tiny"]["horizon.unit"] == "seconds"
        flops = [plan(RECIPES[name]()).flops.total for name in LINEAGES]
        assert max(flops) / min(flops) < 1.15

    def test_nanochats_by_hand(self) -> None:
        """sqrt(2^13 / 2^19) is an eighth; (12 / 4)^2 is nine; sqrt(768 / 128) that of six."""
        config = RECIPES["nanochat-tiny"]()
        assert config.optim.muon.lr == pytest.approx(0.02 / 8)
        assert config.optim.muon.weight_decay == pytest.approx(0.2 * 9)
        assert config.optim.embedding.lr == pytest.approx(0.3 * math.sqrt(6) / 8)
        assert config.optim.residual_lambda.lr == pytest.approx(0.005 / 8)


class TestDepth:
    @pytest.mark.parametrize(
        ("depth", "width", "heads", "scaling", "n_steps", "embedding_lr", "weight_decay"),
        [
            # 12 * 768^2 a layer, gates of 32 x 6 in every other one, 2^15 * 768 in the head; 10.5 tokens each.
            (12, 768, 6, 12 * 7_077_888 + 6 * 192 + 25_165_824, 2205, 0.3, 0.2),
            (20, 1280, 10, 20 * 19_660_800 + 10 * 320 + 41_943_040, 8715, 0.3 * math.sqrt(0.6), 0.072),
            # 13 * 64 = 832 is raised to seven heads of 128.
            (13, 896, 7, 13 * 9_633_792 + 7 * 224 + 29_360_128, 3096, 0.3 * math.sqrt(6 / 7), 0.2 * (12 / 13) ** 2),
        ],
    )
    def test_nanochats_one_dial(
        self, depth: int, width: int, heads: int, scaling: int, n_steps: int, embedding_lr: float, weight_decay: float
    ) -> None:
        config = RECIPES["nanochat"](depth=depth)
        assert (config.model.n_layer, config.model.n_embd, config.model.n_head) == (depth, width, heads)
        planned = plan(config)
        assert planned.parameters.scaling == scaling
        assert planned.steps == n_steps == int(10.5 * scaling) // 524_288
        assert config.optim.embedding.lr == pytest.approx(embedding_lr)
        assert config.optim.muon.weight_decay == pytest.approx(weight_decay)
        assert config.optim.muon.lr == 0.02

    def test_rules_by_hand(self) -> None:
        assert lr_scale_for_batch(2**19) == 1.0
        assert lr_scale_for_batch(2**17) == 0.5
        assert weight_decay_for_depth(0.2, 12) == 0.2
        assert weight_decay_for_depth(0.2, 24) == pytest.approx(0.05)

    def test_autoresearchs_width_follows(self) -> None:
        model = RECIPES["autoresearch"](depth=12).model
        assert (model.n_layer, model.n_embd, model.n_head) == (12, 768, 6)

    def test_is_a_number_of_layers_for_nanogpt_and_the_speedrun(self) -> None:
        for name in ("nanogpt/shakespeare-char", "nanogpt/gpt2-124m", "nanogpt/gpt2-124m-tiny"):
            full, deeper = fields(RECIPES[name]()), fields(RECIPES[name](depth=9))
            assert {field for field in full if full[field] != deeper[field]} == {"model.n_layer"}
        assert RECIPES["speedrun/muon-2024-10"](depth=8).model.attention_residual_scale == 0.25

    @pytest.mark.parametrize("name", [name for name in (*FULL, *TINY) if "finetune" not in name])
    def test_zero_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"depth|n_layer"):
            RECIPES[name](depth=0)

    @pytest.mark.parametrize("name", ["nanogpt/finetune", "nanogpt/finetune-tiny"])
    def test_is_the_weights_own_where_a_run_begins_with_some(self, name: str) -> None:
        with pytest.raises(ConfigError, match="depth = 6: the weights that a run begins with decide it"):
            configure(name, depth=6)


class TestHorizon:
    def test_of_nanochat_takes_what_is_asked_for_over_the_ratio(self) -> None:
        for horizon in (steps(100), Horizon(amount=1e18, unit="flops"), Horizon(amount=20.0, unit="tokens_per_param")):
            assert RECIPES["nanochat"](horizon=horizon).horizon == horizon
        with pytest.raises(UserError, match="--steps and --flops both say how long to train: give one of them"):
            read_request(["nanochat", "--steps", "5", "--flops", "1e18"], TrainArguments, prog="", description="")

    def test_phases_counted_in_steps_stay_so_where_they_fit(self) -> None:
        assert share_of_run(1800, steps(6200), 6200) == 1800 / 6200
        assert share_of_run(1800, steps(3600), 6200) == 0.5
        assert share_of_run(1800, steps(1800), 6200) == 1.0
        for other in (steps(1000), Horizon(amount=1e9, unit="tokens"), Horizon(amount=60.0, unit="seconds")):
            assert share_of_run(1800, other, 6200) == 1800 / 6200
        assert RECIPES["speedrun/muon-2024-10"](horizon=steps(3600)).schedule.warmdown_fraction == 0.5
        assert RECIPES["nanogpt/gpt2-124m"](horizon=steps(4002)).schedule.warmup_fraction == 0.5


def nanogpt_get_lr(it: int, *, peak: float, warmup_iters: int, lr_decay_iters: int, min_lr: float) -> float:
    """nanoGPT's get_lr, as train.py has it since 2024."""
    if it < warmup_iters:
        return peak * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - min_lr)


def speedrun_get_lr(it: int, num_iterations: int) -> float:
    """modded-nanogpt's get_lr."""
    return 1.0 if it < num_iterations - 1800 else (num_iterations - it) / 1800


def nanochat_get_lr(it: int, num_iterations: int) -> float:
    """nanochat's get_lr_multiplier with its default ratios."""
    warmdown = round(0.5 * num_iterations)
    return 1.0 if it <= num_iterations - warmdown else (num_iterations - it) / warmdown


def moments(n: int, *phases: int) -> list[int]:
    """The first and last steps of a run, and those about the edges of its phases."""
    near = {edge + off for edge in (0, *phases, n // 2, n) for off in (-2, -1, 0, 1, 2)}
    return sorted(step for step in near if 0 <= step < n)


class TestLearningRates:
    @pytest.mark.parametrize(
        ("name", "n", "formula"),
        [
            ("nanogpt/shakespeare-char", 5000, {"peak": 1e-3, "warmup_iters": 100, "min_lr": 1e-4}),
            ("nanogpt/shakespeare-char-cpu", 2000, {"peak": 1e-3, "warmup_iters": 100, "min_lr": 1e-4}),
            ("nanogpt/shakespeare-char-cpu", 700, {"peak": 1e-3, "warmup_iters": 100, "min_lr": 1e-4}),
            ("nanogpt/gpt2-124m", 600_000, {"peak": 6e-4, "warmup_iters": 2000, "min_lr": 6e-5}),
        ],
    )
    def test_of_nanogpt(self, name: str, n: int, formula: dict[str, Any]) -> None:
        config = RECIPES[name](horizon=steps(n))
        for it in moments(n, formula["warmup_iters"]):
            wanted = nanogpt_get_lr(it, lr_decay_iters=n, **formula)
            for role in (config.optim.matrix, config.optim.embedding, config.optim.vector):
                got = role.lr * lr_scale(config.schedule, it / n, 1 / n)
                assert got == pytest.approx(wanted, rel=1e-9), it

    def test_of_finetuning_are_constant(self) -> None:
        config = RECIPES["nanogpt/finetune"]()
        assert {3e-5 * lr_scale(config.schedule, it / 20, 1 / 20) for it in range(20)} == {3e-5}

    @pytest.mark.parametrize("n", [6200, 2000])
    def test_of_the_speedrun(self, n: int) -> None:
        schedule = RECIPES["speedrun/muon-2024-10"](horizon=steps(n)).schedule
        for it in moments(n, n - 1800):
            assert lr_scale(schedule, it / n, 1 / n) == pytest.approx(speedrun_get_lr(it, n), rel=1e-9), it

    def test_of_the_speedrun_by_hand(self) -> None:
        """The last 1800 of 6200 steps fall: step 5300 is half-way down, and step 6199 an 1800th."""
        config = RECIPES["speedrun/muon-2024-10"]()
        by_hand = {0: 1.0, 125: 1.0, 4399: 1.0, 4400: 1.0, 5300: 0.5, 6020: 0.1, 6199: 1 / 1800}
        for it, wanted in by_hand.items():
            assert lr_scale(config.schedule, it / 6200, 1 / 6200) == pytest.approx(wanted), it
            assert muon_momentum(config.optim.muon, it) == 0.95
        assert config.optim.muon.weight_decay == 0.0
        assert config.optim.embedding.lr * 0.5 == pytest.approx(0.0018)
        assert config.optim.muon.lr * 0.5 == pytest.approx(0.00018)

    def test_of_nanochat_by_hand(self) -> None:
        """8000 steps: rates fall over the last 4000, decay over all of them, momentum rises in 300."""
        config = RECIPES["nanochat"](horizon=steps(8000))
        by_hand = {
            0: (1.0, 0.85, 0.072), 150: (1.0, 0.9, 0.07065), 300: (1.0, 0.95, 0.0693), 4000: (1.0, 0.95, 0.036),
            6000: (0.5, 0.95, 0.018), 7999: (0.00025, 0.95, 0.000009),
        }  # fmt: skip
        for it, (rate, momentum, decay) in by_hand.items():
            assert lr_scale(config.schedule, it / 8000, 1 / 8000) == pytest.approx(rate), it
            assert muon_momentum(config.optim.muon, it) == pytest.approx(momentum), it
            got = config.optim.muon.weight_decay * weight_decay_scale(config.schedule, it / 8000)
            assert got == pytest.approx(decay), it

    @pytest.mark.parametrize("n", [2205, 8715])
    def test_of_nanochat_with_its_momentum_and_decay(self, n: int) -> None:
        config = RECIPES["nanochat"](horizon=steps(n))
        for it in moments(n, 300, n - round(0.5 * n)):
            # An odd number of steps has no half: nanochat rounds it to a whole step.
            assert lr_scale(config.schedule, it / n, 1 / n) == pytest.approx(nanochat_get_lr(it, n), abs=0.6 / (n / 2))
            assert weight_decay_scale(config.schedule, it / n) == pytest.approx(1 - it / n)
            share = min(it / 300, 1)
            assert muon_momentum(config.optim.muon, it) == pytest.approx((1 - share) * 0.85 + share * 0.95)

    def test_of_autoresearch_on_the_clock(self) -> None:
        schedule = RECIPES["autoresearch"]().schedule
        by_hand = {0.0: 1.0, 30.0: 1.0, 150.0: 1.0, 165.0: 0.9, 225.0: 0.5, 299.0: 1 / 150}
        for seconds, wanted in by_hand.items():
            assert lr_scale(schedule, seconds / 300, 0.6 / 300) == pytest.approx(wanted)

    def test_momentum_and_decay_of_autoresearch(self) -> None:
        """Momentum by its steps, decay by the clock."""
        config = RECIPES["autoresearch"]()
        momentum = [muon_momentum(config.optim.muon, step) for step in (0, 75, 150, 300, 480)]
        assert momentum == pytest.approx([0.85, 0.875, 0.9, 0.95, 0.95])
        decay = [0.2 * weight_decay_scale(config.schedule, seconds / 300) for seconds in (0, 75, 150, 300)]
        assert decay == pytest.approx([0.2, 0.15, 0.1, 0.0])
        assert config.optim.muon.weight_decay == 0.2

    def test_the_cosine_begins_at_the_first_step_with_the_full_rate(self) -> None:
        """Ten steps, of which four warm up: 1/4, 2/4, 3/4, 1, and from that fourth on half a cosine over seven."""
        schedule = ScheduleConfig(kind="cosine", warmup_fraction=0.4, final_lr_scale=0.0)
        got = [lr_scale(schedule, it / 10, 0.1) for it in range(10)]
        cosine = [0.5 + 0.5 * math.cos(math.pi * k / 7) for k in range(7)]
        assert got == pytest.approx([0.25, 0.5, 0.75, *cosine])


class TestTorchInit:
    """model.init = "torch" against what torch's own modules draw."""

    config = ModelConfig(
        n_layer=2, n_embd=256, n_head=4, seq_len=128, vocab_size=2048, position="learned", norm="layernorm",
        activation="gelu", bias=True, tied_head=True, residual_lambdas=False, init="torch",
    )  # fmt: skip

    def weights(self, **changes: Any) -> dict[str, torch.Tensor]:
        config = dataclasses.replace(self.config, **changes)
        model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def same_distribution(self, got: torch.Tensor, reference: torch.Tensor) -> None:
        """Two-sample Kolmogorov-Smirnov: one pair in a thousand of the same distribution is this far apart."""
        n = min(got.numel(), 100_000)
        ours, theirs = got.flatten()[:n].sort().values, reference.flatten()[:n].sort().values
        share = torch.arange(1, n + 1) / n
        distance = (torch.searchsorted(theirs, ours) / n - share).abs().max().item()
        assert distance < 1.95 * math.sqrt(2 / n)

    def test_matrices_are_drawn_as_nn_linear_draws(self) -> None:
        torch.manual_seed(0)
        weights = self.weights()
        for name, (inputs, outputs) in {
            "attention.qkv": (256, 768), "attention.out": (256, 256), "mlp.up": (256, 1024), "mlp.out": (1024, 256),
        }.items():  # fmt: skip
            linear = nn.Linear(inputs, outputs)
            bound = inputs**-0.5
            got = weights[f"blocks.1.{name}.weight"]
            self.same_distribution(got, linear.weight.detach())
            assert 0.999 * bound < got.abs().max() <= bound
            assert linear.weight.abs().max() <= bound
            bias = weights[f"blocks.1.{name}.bias"]
            assert 0.9 * bound < bias.abs().max() <= bound

    def test_a_tied_table_is_the_heads(self) -> None:
        torch.manual_seed(0)
        head = nn.Linear(256, 2048, bias=False).weight.detach()
        self.same_distribution(self.weights()["token_embedding.weight"], head)
        untied = self.weights(tied_head=False)
        self.same_distribution(untied["head.weight"], head)
        self.same_distribution(untied["token_embedding.weight"], nn.Embedding(2048, 256).weight.detach())

    def test_other_tables_and_norms(self) -> None:
        weights = self.weights()
        for name, weight in weights.items():
            if name == "position_embedding.weight" or name.startswith("value_embeddings"):
                self.same_distribution(weight, nn.Embedding(*weight.shape).weight.detach())
            if name.endswith("norm.weight"):
                assert (weight == 1).all()
            if name.endswith(("norm.bias", "value_gate.weight")):
                assert not weight.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lineages")
    write_corpus(folder / "corpus", documents=60)
    return folder


def train_smaller(folder: Path, name: str, *more: object) -> tuple[int, str, Path]:
    """Three steps of a recipe at a toy's size, from its own command line: exit code, standard error, its folder."""
    run = folder / name.replace("/", "-")
    smaller = {
        "steps": 3, "data": folder / "corpus", "data.cache-dir": folder / "cache", "run-dir": run,
        "tokenizer.vocab-size": 300, "model.seq-len": 32, "batch.micro-sequences": 4, "batch.total-tokens": 256,
        "data.val-fraction": 0.2, "sample.max-tokens": 4,
        "device": "cpu", "dtype": "float32", "compile": "off", "runtime.threads": 1, "log.report": False,
    }  # fmt: skip
    words = [word for field, value in smaller.items() for word in (f"--{field}", value)]
    code, _, error = command(["train", name, *words, *more])
    return code, error, run


class TestRuns:
    @pytest.mark.parametrize("name", [name for name in TINY if "finetune" not in name])
    def test_each_trains_and_ends(self, folder: Path, name: str) -> None:
        code, error, run = train_smaller(folder, name)
        assert code == 0, error
        trained = lines_of(run, "train")
        assert [line["step"] for line in trained] == [1, 2, 3]
        assert all(math.isfinite(line["loss"]) for line in trained)
        assert read_json_object(run / "run.json")["status"] == "finished"
        evaluated = [line["step"] for line in lines_of(run, "eval")]
        assert evaluated == ([0, 3] if RECIPES[name]().eval.at_start else [3])
        assert len(lines_of(run, "sample")) == len(RECIPES[name]().sample.prompts)
        assert (run / "checkpoints" / "step-00000003").is_dir()

    def test_finetuning_goes_on_from_a_run_of_the_tiny_gpt2(self, folder: Path) -> None:
        start = folder / "nanogpt-gpt2-124m-tiny"
        if not start.exists():
            assert train_smaller(folder, "nanogpt/gpt2-124m-tiny")[0] == 0
        words = ["--steps", 3, "--init-from", start, "--run-dir", folder / "tuned"]
        code, error, _ = train_smaller(folder, "nanogpt/finetune-tiny", *words)
        assert code == 0, error
        before, after = lines_of(start, "eval")[-1], lines_of(folder / "tuned", "eval")[0]
        assert after["val_loss"] == before["val_loss"]  # its weights, before the first step
        assert [line["lr_scale"] for line in lines_of(folder / "tuned", "train")] == [1.0, 1.0, 1.0]

    def test_finetuning_says_what_it_could_begin_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        code, _, error = command(["train", "nanogpt/finetune-tiny", "--device", "cpu"])
        assert code == 2
        assert error.count("\n") == 1
        assert "`gptlab train nanogpt/gpt2-124m-tiny --run-dir runs/nanogpt-gpt2-124m-tiny` makes it" in error
        words = re.search(r"`gptlab train (.*)`", error)[1].split()  # type: ignore[index]
        config = read_request(words, TrainArguments, prog="", description="").config(lambda _: MACHINE)
        assert config.run_dir == RECIPES["nanogpt/finetune-tiny"]().init_from

    def test_the_lineages_read_the_same_tokens(self, folder: Path) -> None:
        fingerprints = set()
        for name in LINEAGES:
            run = folder / name.replace("/", "-")
            if not run.exists():
                assert train_smaller(folder, name)[0] == 0
            fingerprints.add(read_json_object(run / "run.json")["data_fingerprint"])
        assert len(fingerprints) == 1


@pytest.mark.parametrize("name", [*FULL, *TINY])
def test_no_lineage_depends_on_the_machine(name: str) -> None:
    assert configure(name, machine=MACHINE) == RECIPES[name]()
