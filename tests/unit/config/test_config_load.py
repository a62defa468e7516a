"""JSON and TOML to configurations and back: exact, strict, and every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.length import Horizon
from gptlab.config.load import (
    SCHEMA_VERSION,
    apply_overrides,
    config_from_json,
    config_to_json,
    differences,
    leaf_fields,
    value_from_text,
)
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import RECIPES, configure
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.files.plain_file import load_toml

MACHINE = Machine(device="cpu", flops_per_second=1e11)


def through_text(config: RunConfig) -> RunConfig:
    return config_from_json(json.loads(json.dumps(config_to_json(config))))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json_exactly(name: str) -> None:
    config = configure(name, machine=MACHINE)
    again = through_text(config)
    assert again == config
    assert json.loads(json.dumps(config_to_json(config))) == config_to_json(config)


@given(
    lr=st.floats(0, 1e9),
    seed=st.integers(0, 2**63 - 1),
    prompts=st.lists(st.text(), max_size=3),
    amount=st.floats(1e-300, 1e300),
)
def test_every_bit_survives_json(lr: float, seed: int, prompts: list[str], amount: float) -> None:
    values = {"optim.head.lr": lr, "seed": seed, "sample.prompts": prompts, "horizon.amount": amount}
    config = apply_overrides(RunConfig(), values)
    assert through_text(config) == config
    assert config.optim.head.lr.hex() == through_text(config).optim.head.lr.hex()


def put(name: str, value: object) -> Callable[[dict], None]:
    def change(values: dict) -> None:
        *path, last = name.split(".")
        for part in path:
            values = values[part]
        values[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("schema_version", SCHEMA_VERSION + 1), "newer gptlab"),
        (put("schema_version", None), "schema_version = None"),
        (put("schema_version", True), "schema_version = True"),
        (put("model.n_layers", 3), "model.n_layers = 3: there is no such field (nearest valid: model.n_layer)"),
        (put("model.n_layer", "3"), "model.n_layer = '3': must be a whole number"),
        (put("model.n_layer", 3.5), "model.n_layer = 3.5: must be a whole number"),
        (put("model.n_layer", True), "model.n_layer = True: must be a whole number"),
        (put("model.bias", 1), "model.bias = 1: must be True or False"),
        (put("model.n_layer", None), "model.n_layer = None"),
        (put("optim.muon.lr", float("nan")), "optim.muon.lr = nan: must be a finite number"),
        (put("optim.embedding.lr", -1.0), "optim.embedding.lr = -1.0: must not be negative"),
        (put("data.source", "stdlib"), "data.source = 'stdlib': must be a list of texts"),
        (put("data.source", [1]), "data.source = 1: must be a text"),
        (put("runtime.compile", "yes"), "runtime.compile = 'yes': must be one of auto, on, off"),
        (put("model", 3), "model = 3: is a group of fields"),
        (lambda values: values["model"].pop("n_layer"), "lacks model.n_layer"),
        (lambda values: values.pop("optim"), "lacks optim.matrix_optimizer"),
        (lambda values: put("model.n_leyer", values["model"].pop("n_layer"))(values), "model.n_leyer = 4"),
    ],
)
def test_json_is_read_strictly(change: Callable[[dict], None], says: str) -> None:
    values = config_to_json(RunConfig())
    change(values)
    with pytest.raises(UserError) as caught:
        config_from_json(values)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_must_be_an_object() -> None:
    with pytest.raises(UserError, match="list"):
        config_from_json([])


def test_leaf_fields_are_every_choice_by_its_dotted_name() -> None:
    names = list(leaf_fields(RunConfig))
    assert names[:4] == ["recipe", "run_dir", "seed", "init_from"]
    assert "optim.x0_lambda.beta1" in names
    assert len(names) == len(set(names))


class TestOverrides:
    def test_by_hand(self) -> None:
        config = apply_overrides(
            RunConfig(), {"model.n_layer": 6, "optim.muon.lr": 1, "data.source": ["a", "b"], "seed": 5}
        )
        assert (config.model.n_layer, config.optim.muon.lr, config.data.source, config.seed) == (6, 1.0, ("a", "b"), 5)
        assert type(config.optim.muon.lr) is float
        assert config.model.n_embd == RunConfig().model.n_embd

    def test_fields_that_belong_together_are_put_in_together(self) -> None:
        """Either alone is impossible: 96 is no multiple of 5 heads, nor is the start's 256 of 3."""
        start = apply_overrides(RunConfig(), {"model.n_embd": 320, "model.n_head": 5})
        config = apply_overrides(start, {"model.n_embd": 96, "model.n_head": 3})
        assert (config.model.n_embd, config.model.n_head) == (96, 3)
        for alone in ({"model.n_embd": 96}, {"model.n_head": 3}):
            with pytest.raises(ConfigError):
                apply_overrides(start, alone)

    def test_so_are_fields_of_different_groups(self) -> None:
        """A micro-batch of 3 rows fits neither the old step nor the old rows."""
        values = {"batch.micro_sequences": 3, "batch.total_tokens": 300, "model.seq_len": 50}
        assert apply_overrides(RunConfig(), values).micro_batches == 2

    def test_the_whole_is_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"batch.total_tokens"):
            apply_overrides(RunConfig(), {"model.seq_len": 500})

    def test_none_overrides_the_default(self) -> None:
        assert apply_overrides(RunConfig(), {"model.logit_softcap": None}).model.logit_softcap is None

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("model.n_layers", "model.n_layer"),
            ("n_head", "model.n_head"),
            ("optim.mu.nesterov", "optim.muon.nesterov"),
            ("horizon", "horizon.amount"),
            ("modle.n_embd", "model.n_embd"),
        ],
    )
    def test_unknown_names_get_the_nearest(self, name: str, nearest: str) -> None:
        with pytest.raises(ConfigError) as caught:
            apply_overrides(RunConfig(), {name: 1})
        assert caught.value.nearest == nearest


def test_differences_are_by_field() -> None:
    a = RunConfig()
    b = RunConfig(model=ModelConfig(n_layer=6), horizon=Horizon(amount=10, unit="steps"))
    assert differences(a, a) == []
    assert differences(a, b) == [
        "model.n_layer: 4 vs 6",
        "horizon.amount: 180.0 vs 10.0",
        "horizon.unit: 'seconds' vs 'steps'",
    ]


class TestToml:
    def test_tables_become_dotted_names(self, tmp_path: Path) -> None:
        path = tmp_path / "run.toml"
        path.write_text('depth = 4\ndata = ["a"]\n[optim.muon]\nlr = 0.1\n[model]\nn-layer = 6\n', encoding="utf-8")
        assert load_toml(path) == {"depth": 4, "data": ["a"], "optim.muon.lr": 0.1, "model.n_layer": 6}

    def test_dots_in_strings_and_comments_are_no_nesting(self, tmp_path: Path) -> None:
        path, dots = tmp_path / "run.toml", "1. " * 40
        path.write_text(
            f"""# {dots}\na = "{dots}\\" {dots}"\nb = '{dots}'\nc = '''{dots}\n{dots}'''\n""", encoding="utf-8"
        )
        assert load_toml(path) == {"a": f'{dots}" {dots}', "b": dots, "c": f"{dots}\n{dots}"}

    def test_a_byte_order_mark_is_dropped(self, tmp_path: Path) -> None:
        """Windows editors write it."""
        path = tmp_path / "run.toml"
        path.write_bytes(b"\xef\xbb\xbfdepth = 4\r\n")
        assert load_toml(path) == {"depth": 4}

    def test_what_cannot_be_read_is_one_line_with_the_path(self, tmp_path: Path) -> None:
        broken, binary, missing = tmp_path / "broken.toml", tmp_path / "binary.toml", tmp_path / "missing.toml"
        broken.write_text("depth = = 4", encoding="utf-8")
        binary.write_bytes(b"\xff\xfe\x00")
        for path in (broken, binary, missing, tmp_path):
            with pytest.raises(UserError) as caught:
                load_toml(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)


def test_choices_are_separated_by_commas_too() -> None:
    """`--log.to a,b`; texts keep their commas."""
    kinds = leaf_fields(RunConfig)
    assert value_from_text(kinds["log.to"], "wandb,trackio", "log.to") == ("wandb", "trackio")
    assert value_from_text(kinds["sample.prompts"], "a,b", "sample.prompts") == ("a,b",)
    with pytest.raises(ConfigError, match="tensorboard, wandb, trackio"):
        value_from_text(kinds["log.to"], "wandb,wanbd", "log.to")
