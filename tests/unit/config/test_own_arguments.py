"""A recipe's own arguments (nanochat's flags before scaling): what follows from them, where they are kept, refusals."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gptlab.app.run.repeat import repeated_config
from gptlab.app.run.run_request import RunRequest, TrainArguments
from gptlab.cli.arguments.help import field_docs
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import UserError
from gptlab.config.length import Horizon
from gptlab.config.load import config_from_json, config_to_json, flatten
from gptlab.config.recipes import OWN_TYPES, RECIPES, applied_scaling, configure, own_arguments
from gptlab.config.recipes.nanochat import NanochatArguments
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.records.run_directory import RunDirectory

MACHINE = Machine(device="cpu", flops_per_second=1e11)


def request(line: str) -> RunRequest:
    return read_request(shlex.split(line), TrainArguments, prog="gptlab train", description="")


def nanochat(depth: int | None = None, **own: Any) -> RunConfig:
    return configure("nanochat", depth=depth, own=own)


def resolve(line: str) -> RunConfig:
    return request(line).config(lambda _: MACHINE)


def test_what_follows_is_what_base_train_computes() -> None:
    """The arithmetic of scripts/base_train.py and of setup_optimizer, by hand."""
    depth, aspect, head, batch = 5, 96, 64, 2**17
    line = (
        f"nanochat --depth {depth} --aspect-ratio {aspect} --head-dim {head} --total-batch-size {batch} "
        "--embedding-lr 0.2 --unembedding-lr 0.003 --matrix-lr 0.05 --scalar-lr 0.4 --adam-beta1 0.7 --adam-beta2 0.9 "
        "--weight-decay 0.3 --target-param-data-ratio 8 --model.seq-len 1024"
    )
    config = resolve(line)
    width = ((depth * aspect + head - 1) // head) * head
    assert (width, config.model.n_embd, config.model.n_head) == (512, 512, 512 // head)
    batch_lr_scale = (batch / 2**19) ** 0.5
    model_lr_scale = (width / 768) ** -0.5
    optim = config.optim
    expected = {
        "muon": 0.05 * batch_lr_scale,
        "embedding": 0.2 * batch_lr_scale * model_lr_scale,
        "value_embedding": 0.2 * batch_lr_scale * model_lr_scale,
        "head": 0.003 * batch_lr_scale * model_lr_scale,
        "residual_lambda": 0.4 * batch_lr_scale * 0.01,
        "x0_lambda": 0.4 * batch_lr_scale,
    }
    for name, rate in expected.items():
        assert math.isclose(getattr(optim, name).lr, rate, rel_tol=1e-12), name
    assert math.isclose(optim.muon.weight_decay, 0.3 * (12 / depth) ** 2)
    for group in (optim.embedding, optim.value_embedding, optim.head, optim.residual_lambda):
        assert (group.beta1, group.beta2) == (0.7, 0.9)
    assert (optim.x0_lambda.beta1, optim.x0_lambda.beta2) == (0.96, 0.95)
    assert (config.horizon.amount, config.horizon.unit) == (8.0, "tokens_per_param")
    assert (config.batch.total_tokens, config.model.seq_len) == (batch, 1024)


@pytest.mark.parametrize("recipe", ["nanochat", "nanochat-tiny"])
def test_every_argument_changes_what_it_says_and_is_kept(recipe: str) -> None:
    before = RECIPES[recipe]()
    assert before.recipe_arguments == ()
    for name, default in own_arguments(recipe).items():
        other = default * (2 if isinstance(default, int) else 0.7)
        after = configure(recipe, own={name: other})
        assert after.recipe_arguments == (f"{name}={json.dumps(other)}",)
        assert (after.model, after.optim, after.horizon) != (before.model, before.optim, before.horizon), name
        assert configure(recipe, own={name: default}) == before


def test_every_argument_is_explained() -> None:
    texts = field_docs(NanochatArguments)
    assert all(texts[name].endswith(".") for name in own_arguments("nanochat"))
    assert list(own_arguments("nanochat")) == list(own_arguments("nanochat-tiny")) == list(OWN_TYPES)
    assert {name for name in RECIPES if own_arguments(name)} == {"nanochat", "nanochat-tiny"}


def test_a_file_may_give_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('recipe = "nanochat"\nembedding_lr = 0.2\nmatrix_lr = 0.03\n')
    assert resolve(f"{path} --matrix-lr 0.04") == nanochat(embedding_lr=0.2, matrix_lr=0.04)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "quickstart --embedding-lr 0.2",
            "--embedding-lr is an argument of nanochat and nanochat-tiny, not of quickstart; here: --optim.emb",
        ),
        ("--total-batch-size 8192", "not of quickstart; here: --batch.total-tokens"),
        ("nanochat --target-param-data-ratio 8 --steps 5", "--target-param-data-ratio and --steps both say how long"),
        ("nanochat --target-param-data-ratio 8 --horizon.amount 5", "and --horizon.amount both say how long"),
        ("nanochat --embedding-lr x", "embedding_lr = 'x': must be a number"),
        ("nanochat --embedding-lrs 1", "--embedding-lrs = '1': there is no such field"),
        ("nanochat --head-dim 0", "head_dim = 0: must be greater than zero"),
        ("nanochat --total-batch-size -5", "total_batch_size = -5: must be greater than zero"),
        ("nanochat-tiny --embedding-lr -1", "embedding_lr = -1.0: must not be negative"),
        ("nanochat --matrix-lr 1e300", "matrix_lr = 1e+300: is more than any run uses (nearest valid: 1000000000.0)"),
        ("nanochat --scalar-lr -1", "scalar_lr = -1.0: must not be negative"),
        ("nanochat --adam-beta2 2", "adam_beta2 = 2.0: must be in [0, 1)"),
        ("nanochat --weight-decay -1", "weight_decay = -1.0: must not be negative"),
        ("nanochat --target-param-data-ratio 0", "target_param_data_ratio = 0.0: must be greater than zero"),
        ("nanochat --total-batch-size 16384", "micro_sequences * seq_len = 32 * 2048 = 65536 (nearest valid: 65536)"),
        ("nanochat-tiny --head-dim 65", "model.n_head = 2: rotary positions need an even head width, this gives 65"),
        ("autoresearch-tiny --until-val-loss 2 --steps 9", "cannot stop at a loss: give eval.every_steps too"),
        ("nanochat --recipe-arguments x", "there is no --recipe-arguments here: the recipe writes it; its own arg"),
    ],
)
def test_refusals_are_one_line(line: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(line)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("nanochat --total-batch-size 32768 --batch.micro-sequences 8", "batch.total_tokens", 32768),
        ("nanochat --total-batch-size 16384 --model.seq-len 512 --horizon.amount 5", "batch.total_tokens", 16384),
        ("nanochat-tiny --head-dim 65 --model.position learned", "model.n_embd", 130),
        ("autoresearch-tiny --until-val-loss 2 --eval.every-steps 9 --steps 99", "horizon.until_val_loss", 2.0),
    ],
)
def test_the_fields_of_a_request_are_checked_together(line: str, field: str, value: object, tmp_path: Path) -> None:
    """Not against those that the recipe would have had without them, in a run that repeats this one either."""
    config = resolve(line)
    assert flatten(asdict(config))[field] == value
    run = RunDirectory.create(tmp_path / "r", config_to_json(config), {"device": "cpu"})
    assert repeated_config(request(f"--from {run.path} --depth {config.model.n_layer}"), run) == config
    assert applied_scaling(config, MACHINE)


class TestLength:
    def test_the_horizons_fields_are_the_length_that_the_recipe_is_for(self) -> None:
        long = resolve("quickstart --horizon.amount 36000")
        assert long == resolve("quickstart --minutes 600")
        assert long.model.n_layer > resolve("quickstart").model.n_layer
        by_steps = resolve("nanogpt/gpt2-124m --steps 5000")
        assert resolve("nanogpt/gpt2-124m --horizon.amount 5000 --horizon.unit steps") == by_steps
        assert resolve("nanogpt/gpt2-124m --horizon.amount 5000") == by_steps
        ratio = resolve("nanochat-tiny --target-param-data-ratio 2 --horizon.until-val-loss 3")
        assert ratio.horizon == Horizon(amount=2, unit="tokens_per_param", until_val_loss=3.0)

    def test_less_than_a_step_is_refused_before_data_is_read(self) -> None:
        step = "--model.seq-len 128 --batch.total-tokens 2048 --batch.micro-sequences 8"
        with pytest.raises(UserError, match=r"^tokens = 100.0: less than one step of 2,048 tokens$"):
            resolve(f"quickstart {step} --tokens 100")
        assert resolve(f"quickstart {step} --tokens 2048").horizon == Horizon(amount=2048, unit="tokens")

    @pytest.mark.parametrize(
        ("text", "flags", "horizon"),
        [
            ('recipe = "nanochat-tiny"\ntarget_param_data_ratio = 8', "--steps 10", ("steps", 10)),
            ('recipe = "nanochat-tiny"\ntarget_param_data_ratio = 8', "--horizon.amount 9", ("tokens_per_param", 9)),
            ('recipe = "nanochat-tiny"\nsteps = 10', "--target-param-data-ratio 8", ("tokens_per_param", 8)),
            ("steps = 10", "--horizon.amount 20", ("steps", 20)),
            ("steps = 10", "--horizon.unit tokens_per_param", ("tokens_per_param", 10)),
            ("[horizon]\namount = 10", "--minutes 1", ("seconds", 60)),
        ],
    )
    def test_a_length_that_is_given_beats_the_files(
        self, tmp_path: Path, text: str, flags: str, horizon: tuple[str, float]
    ) -> None:
        path = tmp_path / "run.toml"
        path.write_text(text)
        made = resolve(f"{path} {flags}").horizon
        assert (made.unit, made.amount) == horizon


class TestRuns:
    """What a stored run was given is known to --from and --resume."""

    @staticmethod
    def stored(folder: Path, config: RunConfig) -> RunDirectory:
        return RunDirectory.create(folder, config_to_json(config), {"device": "cpu", "peak_flops_per_second": 1e11})

    def repeated(self, run: RunDirectory, line: str = "") -> RunConfig:
        return repeated_config(request(f"--from {run.path} {line}"), run)

    def test_from_is_exact(self, tmp_path: Path) -> None:
        given = nanochat(embedding_lr=0.2, depth=6)
        assert config_from_json(json.loads(json.dumps(config_to_json(given)))) == given
        assert self.repeated(self.stored(tmp_path / "r", given)) == given

    def test_another_depth_scales_the_rate_that_was_given(self, tmp_path: Path) -> None:
        run = self.stored(tmp_path / "r", nanochat(embedding_lr=0.2, depth=6))
        assert self.repeated(run, "--depth 8") == nanochat(embedding_lr=0.2, depth=8)

    def test_another_argument_keeps_the_others(self, tmp_path: Path) -> None:
        run = self.stored(tmp_path / "r", nanochat(embedding_lr=0.2, scalar_lr=0.1, depth=6))
        again = self.repeated(run, "--scalar-lr 0.3 --seed 5 --target-param-data-ratio 4")
        assert again.recipe_arguments == ("target_param_data_ratio=4.0", "embedding_lr=0.2", "scalar_lr=0.3")
        assert (again.horizon.amount, again.optim.x0_lambda.lr, again.seed) == (4.0, 0.3, 5)

    def test_resume_wants_what_the_run_has(self, tmp_path: Path) -> None:
        config = nanochat(embedding_lr=0.2, depth=6)
        for line in ("", "--embedding-lr 0.2", "--embedding-lr 0.2 --scalar-lr 0.5"):
            assert request(f"--resume x {line}").disagreements(config) == []
        assert request("--resume x --embedding-lr 0.3").disagreements(config) == ["embedding_lr: 0.2 vs 0.3"]
        assert request("--resume x --scalar-lr 0.3").disagreements(config) == ["scalar_lr: 0.5 vs 0.3"]

    @pytest.mark.parametrize(
        "text", ["embedding_lr=oops", "embedding_lr", "depth=3", "__class__=1", 'embedding_lr="x"']
    )
    def test_what_no_recipe_wrote_is_refused(self, tmp_path: Path, text: str) -> None:
        values = config_to_json(nanochat(depth=6)) | {"recipe_arguments": [text]}
        run = RunDirectory.create(tmp_path / "r", values, {})
        with pytest.raises(UserError, match=r"embedding_lr|recipe_arguments"):
            self.repeated(run, "--depth 8")
