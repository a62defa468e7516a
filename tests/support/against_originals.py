"""The original programs beside gptlab's recipes: same weights, same batches, float64.

    git clone https://github.com/karpathy/nanochat && git clone https://github.com/karpathy/autoresearch
    python tests/support/against_originals.py --nanochat nanochat --autoresearch autoresearch

Also --modded-nanogpt and --nanogpt, clones of KellerJordan/modded-nanogpt and karpathy/nanoGPT. Each original is read
from its clone at the commit named below, whatever is checked out, and its training program runs from its first line to
its last: model, groups of parameters, optimizer, schedules, scaling rules and loop are its own. The first weights and
the batches that it saw then go through gptlab's recipe. Reported are the largest absolute differences

- of logits and of gradients, at random weights (fresh ones have zero projections and gates, which hide errors);
- of all weights over the training steps, from random weights and from the program's own first ones. Beside the latter
  is what the original differs from itself where each batch has its rows in reverse order: the same sums in another
  order. AdamW divides by a root that may be as small as its eps of 1e-10, at rates of 0.5 and more, which magnifies a
  rounding of the lambdas' first gradients (they are as small as RMSNorm's eps makes them) five thousand million times.

Exit code 1 where one of them is above its limit, 2 where an original cannot be read.

What is changed in an original, all of it here: sizes; bfloat16 and float32 become float64; RMSNorm's eps stays that of
float32, which PyTorch would take from the type; torch.compile, CUDA, NCCL, autocast and FlashAttention are taken away
(autoresearch gets nanochat's own mask for its windows); the clock of autoresearch advances by one second a step; data,
tokenizer, evaluation, sampling, checkpoints and logs are replaced where they would need files or a network.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # before anything of torch is replaced, since it makes a table of all functions
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config.length import Horizon
from gptlab.config.load import apply_overrides
from gptlab.config.recipes import RECIPES, configure, tiny
from gptlab.config.recipes.nanochat import tiny_model
from gptlab.config.run import BatchConfig, RunConfig
from gptlab.data.loader import Loader, StepBatch
from gptlab.model.gpt import GPT, build_model
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.load import load_weights
from gptlab.training.parallel.strategy import Strategy, whole_optimizer
from gptlab.training.state import Finish, TrainState
from gptlab.training.step import gradients, rates_of_step, update

COMMITS = {
    "nanochat": "07c4dd4cd9368f547229beea5e9fe952ae4bd0a9",  # 2026-02-02
    "autoresearch": "ebf357841b7358ae106b2f7ac378f9ec97b975f6",  # 2026-03-11
    "modded-nanogpt": "b356a1fb5c41a8ee83a8f5aa6a41a5e71a5913f6",  # 2024-10-11, the record of 2024-10-10
    "nanogpt": "93a43d9a5c22450bbf06e78da2cb6eeef084b717",  # 2024-12-09
}
# float64 rounds to 1e-16, and a logit is a sum of some hundred products of size 1. The iteration of Muon and AdamW's
# division magnify what two orders of summation leave.
GRADIENT_LIMIT = 1e-12
TRAINING_LIMIT = 1e-9
# What rounding becomes from autoresearch's own first weights: 3e-6 to 6e-6, by the processor, and the original beside
# itself 1e-8 to 2e-6. The defects that were put back made 19 and 35 of it (docs/LOG.md, 2026-11-21).
OWN_WEIGHTS_LIMITS = {"autoresearch": 1e-4}

CPU = torch.device("cpu")
DEPTH, WIDTH, HEAD_DIM, SEQ_LEN, ROWS, MICRO_BATCHES, STEPS = 4, 64, 16, 32, 2, 2, 20
TOKENS = MICRO_BATCHES * ROWS * SEQ_LEN  # a step
ENTRIES = {"nanochat": 100, "autoresearch": 64, "modded-nanogpt": 64, "nanogpt": 64}
"""Of the vocabulary; nanochat's is no multiple of 64, so that it is padded."""
SIZES = {
    "model.n_layer": DEPTH, "model.n_embd": WIDTH, "model.n_head": WIDTH // HEAD_DIM, "model.seq_len": SEQ_LEN,
    "batch.total_tokens": TOKENS, "batch.micro_sequences": ROWS,
}  # fmt: skip
NAMES = (
    (r"^transformer\.wte\.", "token_embedding."), (r"^transformer\.wpe\.", "position_embedding."),
    (r"^transformer\.ln_f\.", "final_norm."), (r"^transformer\.h\.", "blocks."), (r"^lm_head\.", "head."),
    (r"^value_embeds\.", "value_embeddings."), (r"^resid_lambdas$", "residual_lambdas"),
    (r"\.attn\.c_attn\.", ".attention.qkv."), (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.attn\.ve_gate\.", ".attention.value_gate."), (r"\.mlp\.c_fc\.", ".mlp.up."), (r"\.mlp\.c_proj\.", ".mlp.out."),
    (r"\.ln_1\.", ".attention_norm."), (r"\.ln_2\.", ".mlp_norm."),
)  # fmt: skip
"""Of an original's parameter, and of gptlab's. Query, key and value, three matrices in two originals, are one here."""

Weights = dict[str, Tensor]


@dataclass
class Recording:
    """How an original program is to run, what it did, and the model that it leaves behind."""

    from_random_weights: bool = False
    """0.1 of a normal draw is added to each first weight."""
    reversed_rows: bool = False
    """The model gets the rows of each batch in reverse order."""
    model: nn.Module | None = None
    before: Weights = field(default_factory=dict)
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(inputs, targets) of each pass in training mode, each (ROWS, SEQ_LEN)."""
    after: list[Weights] = field(default_factory=list)
    """The weights behind each update."""

    def watch(self, model: nn.Module) -> None:
        if self.from_random_weights:
            move_at_random(model)
        self.model, self.before = model, weights_of(model)
        self._hook = model.register_forward_pre_hook(self._forward)

    def end(self) -> None:
        self._hook.remove()

    def updated(self) -> None:
        """To be called where gradients are freed, once an update."""
        if self.model is not None:
            self.after.append(weights_of(self.model))

    def _forward(self, model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not model.training:
            return None
        self.batches.append((arguments[0].clone(), arguments[1].clone()))
        return tuple(rows.flip(0) for rows in arguments) if self.reversed_rows else None


@torch.no_grad()
def move_at_random(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))


def in_gptlabs_names(tensors: Mapping[str, Tensor]) -> Weights:
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    for name in [name for name in renamed if name.endswith(".attn.c_q.weight")]:
        block = name.removesuffix(".attn.c_q.weight")
        parts = [renamed.pop(f"{block}.attn.c_{letter}.weight") for letter in "qkv"]
        renamed[f"{block}.attention.qkv.weight"] = torch.cat(parts)
    return renamed


def weights_of(model: nn.Module) -> Weights:
    return in_gptlabs_names({name: p.detach().clone() for name, p in model.named_parameters()})


# ---- the original programs ----


def source_of(clone: Path, commit: str, path: str) -> str:
    shown = subprocess.run(["git", "-C", str(clone), "show", f"{commit}:{path}"], capture_output=True, text=True)
    if shown.returncode:
        print(f"cannot read {path} of commit {commit} in {clone}: {shown.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return shown.stdout


def in_float64(source: str) -> str:
    for narrow, wide in (
        ("torch.bfloat16", "torch.float64"), ("torch.float32", "torch.float64"), (".bfloat16()", ".double()"),
        (".float()", ".double()"),
    ):  # fmt: skip
        source = source.replace(narrow, wide)
    return source


def with_settings(source: str, settings: Mapping[str, object]) -> str:
    """`NAME = value`, at the beginning of a line or within a class, annotated or not."""
    for name, value in settings.items():
        source, count = re.subn(rf"^(\s*{name}(?: : \w+)? = )[^#\n]*", rf"\g<1>{value!r} ", source, flags=re.MULTILINE)
        assert count == 1, name
    return source


def without(source: str, texts: Mapping[str, str]) -> str:
    for text, instead in texts.items():
        assert text in source, text
        source = source.replace(text, instead)
    return source


def stub(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def module_of(name: str, source: str) -> types.ModuleType:
    """To be called within `shims`, which takes it out of sys.modules again."""
    sys.modules[name] = module = stub(name)
    exec(compile(source, name, "exec"), vars(module))
    return module


@contextlib.contextmanager
def shims(recording: Recording, modules: Mapping[str, types.ModuleType], arguments: Sequence[str]) -> Iterator[None]:
    """An original runs on a CPU in float64, quietly, in an empty folder, under observation."""

    def compiled(function: Any = None, **options: object) -> Any:
        if isinstance(function, nn.Module):
            recording.watch(function)
        return function if function is not None else lambda inner: inner

    def free_of(owner: type) -> Any:
        real = cast(Any, owner).zero_grad

        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            recording.updated()
            real(self, set_to_none)

        return mock.patch.object(owner, "zero_grad", zero_grad)

    def data_parallel(model: nn.Module, device_ids: object) -> nn.Module:
        vars(model).update(module=model, no_sync=contextlib.nullcontext)  # not as a submodule of itself
        return model

    def rms_norm(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return real_rms_norm(x, shape, eps=torch.finfo(torch.float32).eps)

    def nothing(*_: object, **__: object) -> int:
        return 0

    real_rms_norm = F.rms_norm
    on_cuda: dict[str, Any] = dict.fromkeys(
        ("synchronize", "manual_seed", "set_device", "max_memory_allocated", "is_bf16_supported"), nothing
    )
    on_cuda |= {"is_available": lambda: True, "get_device_capability": lambda: (9, 0)}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(contextlib.chdir(enter(tempfile.TemporaryDirectory())))
        enter(contextlib.redirect_stdout(io.StringIO()))
        enter(mock.patch.dict(sys.modules, modules))
        enter(mock.patch.dict(os.environ))
        enter(mock.patch.object(sys, "argv", list(arguments)))
        enter(mock.patch.object(torch, "compile", compiled))
        enter(mock.patch.object(F, "rms_norm", rms_norm))
        enter(mock.patch.multiple(torch.cuda, **on_cuda))
        enter(mock.patch.multiple(
            torch.distributed, init_process_group=nothing, all_reduce=nothing, destroy_process_group=nothing,
        ))  # fmt: skip
        enter(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", data_parallel))
        enter(free_of(nn.Module))
        enter(free_of(torch.optim.Optimizer))
        enter(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        try:
            yield
            recording.end()
        finally:
            torch.set_default_dtype(torch.float32)
            gc.enable()  # both of karpathy's newer programs turn it off
            gc.unfreeze()


def batches(n_entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random tokens; the targets of a row are its next ones."""
    generator = torch.Generator().manual_seed(1)
    while True:
        rows = torch.randint(n_entries, (ROWS, SEQ_LEN + 1), generator=generator)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def run_nanochat(clone: Path, recording: Recording) -> None:
    n_entries = ENTRIES["nanochat"]

    def source(path: str) -> str:
        return in_float64(source_of(clone, COMMITS["nanochat"], path))

    class Wandb:
        def log(self, *_: object) -> None: ...
        def finish(self) -> None: ...

    def quiet(*_: object, **__: object) -> None: ...

    def loader(*_: object, **__: object) -> Iterator[tuple[Tensor, Tensor, dict[str, int]]]:
        return ((x, y, {"epoch": 1}) for x, y in batches(n_entries))

    common = stub(
        "nanochat.common", get_dist_info=lambda: (False, 0, 0, 1), print0=quiet, print_banner=quiet, DummyWandb=Wandb,
        compute_init=lambda kind: (False, 0, 0, 1, CPU), compute_cleanup=quiet, get_base_dir=lambda: "",
        autodetect_device_type=lambda: "cpu", get_peak_flops=quiet,
    )  # fmt: skip
    modules = {
        "nanochat": stub("nanochat", __path__=[]), "scripts": stub("scripts", __path__=[]), "wandb": stub("wandb"),
        "nanochat.common": common,
        "nanochat.dataloader": stub(
            "nanochat.dataloader", tokenizing_distributed_data_loader_bos_bestfit=loader,
            tokenizing_distributed_data_loader_with_state_bos_bestfit=loader,
        ),
        "nanochat.tokenizer": stub(
            "nanochat.tokenizer", get_tokenizer=lambda: types.SimpleNamespace(get_vocab_size=lambda: n_entries),
            get_token_bytes=quiet,
        ),
        "nanochat.checkpoint_manager": stub("checkpoint_manager", save_checkpoint=quiet, load_checkpoint=quiet),
        "nanochat.loss_eval": stub("loss_eval", evaluate_bpb=quiet),
        "nanochat.engine": stub("engine", Engine=quiet),
        "nanochat.report": stub("report", get_report=lambda: types.SimpleNamespace(log=quiet)),
        "scripts.base_eval": stub("base_eval", evaluate_core=quiet),
    }  # fmt: skip
    flags = {
        "depth": DEPTH, "aspect-ratio": WIDTH // DEPTH, "head-dim": HEAD_DIM, "max-seq-len": SEQ_LEN,
        "device-batch-size": ROWS, "total-batch-size": TOKENS, "num-iterations": STEPS, "eval-every": -1,
        "core-metric-every": -1, "sample-every": -1, "device-type": "cpu",
    }  # fmt: skip
    with shims(recording, modules, ["base_train", *(f"--{name}={value}" for name, value in flags.items())]):
        for name in ("flash_attention", "optim", "gpt"):
            module_of(f"nanochat.{name}", source(f"nanochat/{name}.py"))
        module_of("base_train", source("scripts/base_train.py"))


def run_autoresearch(clone: Path, recording: Recording) -> None:
    """25 steps: eleven off its clock, and a budget of fourteen seconds."""
    n_entries = ENTRIES["autoresearch"]

    class Clock:
        now = 0.0

        @classmethod
        def time(cls) -> float:
            cls.now += 1.0
            return cls.now

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        """FlashAttention's meaning of window_size: so many keys to the left of the query, and its own."""
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (distance >= 0) & (distance <= window_size[0])
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen).transpose(1, 2)

    kernels = types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(flash_attn_func=attention))
    tokenizer = types.SimpleNamespace(get_vocab_size=lambda: n_entries)
    modules = {
        "kernels": stub("kernels", get_kernel=lambda name: kernels),
        "prepare": stub(
            "prepare", MAX_SEQ_LEN=SEQ_LEN, TIME_BUDGET=STEPS - 6.0,
            Tokenizer=types.SimpleNamespace(from_directory=lambda: tokenizer),
            make_dataloader=lambda *_: ((x, y, 1) for x, y in batches(n_entries)), evaluate_bpb=lambda *_: 0.0,
        ),
    }  # fmt: skip
    source = with_settings(
        in_float64(source_of(clone, COMMITS["autoresearch"], "train.py")),
        {"DEPTH": DEPTH, "ASPECT_RATIO": WIDTH // DEPTH, "HEAD_DIM": HEAD_DIM, "DEVICE_BATCH_SIZE": ROWS,
         "TOTAL_BATCH_SIZE": TOKENS},
    )  # fmt: skip
    source = without(source, {
        "\nimport time\n": "\nfrom clock import Clock as time\n",
        'torch.device("cuda")': 'torch.device("cpu")',
        'torch.amp.autocast(device_type="cuda", dtype=torch.float64)': "__import__('contextlib').nullcontext()",
    })  # fmt: skip
    with shims(recording, modules | {"clock": stub("clock", Clock=Clock)}, ["train.py"]):
        module_of("train", source)


def run_modded_nanogpt(clone: Path, recording: Recording) -> None:
    n_entries = ENTRIES["modded-nanogpt"]
    source = with_settings(
        in_float64(source_of(clone, COMMITS["modded-nanogpt"], "train_gpt2.py")),
        {"input_bin": "train.bin", "input_val_bin": "train.bin", "batch_size": ROWS * MICRO_BATCHES,
         "device_batch_size": ROWS, "sequence_length": SEQ_LEN, "num_iterations": STEPS, "warmdown_iters": 6,
         "val_tokens": ROWS * SEQ_LEN, "num_vocab": n_entries},
    )  # fmt: skip
    source = without(source, {
        "n_layer=12, n_head=12, n_embd=768": f"n_layer={DEPTH}, n_head={WIDTH // HEAD_DIM}, n_embd={WIDTH}",
        ".cuda()": "",
        "['nvidia-smi']": "['true']",
        "torch.amp.autocast(device_type='cuda', dtype=torch.float64)": "__import__('contextlib').nullcontext()",
    })  # fmt: skip
    with shims(recording, {}, ["train.py"]):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        Path("train.py").write_text("")  # which it copies into its log
        tokens = np.random.default_rng(1).integers(n_entries, size=5000, dtype=np.uint16)
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(tokens)
        Path("train.bin").write_bytes(header.tobytes() + tokens.tobytes())
        module_of("train_gpt2", source)


def run_nanogpt(clone: Path, recording: Recording) -> None:
    n_entries = ENTRIES["nanogpt"]

    def source(path: str) -> str:
        return source_of(clone, COMMITS["nanogpt"], path)

    settings = {
        "dataset": "random", "device": "cpu", "dtype": "float32", "compile": True, "batch_size": ROWS,
        "block_size": SEQ_LEN, "n_layer": DEPTH, "n_head": WIDTH // HEAD_DIM, "n_embd": WIDTH,
        "gradient_accumulation_steps": MICRO_BATCHES, "max_iters": STEPS - 1, "lr_decay_iters": STEPS,
        "warmup_iters": 4, "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "eval_iters": 1,
    }  # fmt: skip
    with shims(recording, {}, ["train.py", *(f"--{name}={value}" for name, value in settings.items())]):
        module_of("model", source("model.py"))
        Path("configurator.py").write_text(source("configurator.py"))
        data = Path("data", "random")
        data.mkdir(parents=True)
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": n_entries}))
        tokens = np.random.default_rng(1).integers(n_entries, size=5000, dtype=np.uint16)
        for name in ("train.bin", "val.bin"):
            (data / name).write_bytes(tokens.tobytes())
        module_of("train", source("train.py"))


# ---- the same by gptlab ----


def recipe_of(lineage: str) -> RunConfig:
    """The recipe as it ships, at the size of the originals here: every rate that follows from a size by its rule."""
    steps = Horizon(amount=STEPS, unit="steps")
    batch = BatchConfig(total_tokens=TOKENS, micro_sequences=ROWS)
    shape = {"aspect": WIDTH // DEPTH, "head_dim": HEAD_DIM}
    if lineage == "nanochat":
        with mock.patch.multiple(tiny, SEQ_LEN=SEQ_LEN, BATCH=batch):
            own = {"aspect_ratio": shape["aspect"], "head_dim": HEAD_DIM, "total_batch_size": TOKENS}
            config = configure("nanochat-tiny", horizon=steps, own=own)
    elif lineage == "autoresearch":
        module = sys.modules["gptlab.config.recipes.autoresearch"]
        smaller = mock.patch.object(module, "tiny_model", partial(tiny_model, **shape))
        with mock.patch.multiple(tiny, SEQ_LEN=SEQ_LEN, BATCH=batch), smaller:
            config = RECIPES["autoresearch-tiny"](horizon=Horizon(amount=STEPS - 6.0, unit="seconds"))
    elif lineage == "modded-nanogpt":
        warmdown = {"schedule.warmdown_fraction": 6 / STEPS}
        config = apply_overrides(RECIPES["speedrun/muon-2024-10"](depth=DEPTH, horizon=steps), SIZES | warmdown)
    else:
        warmup = {"schedule.warmup_fraction": 5 / STEPS}  # four steps below the full rate, the fifth with it
        config = apply_overrides(RECIPES["nanogpt/shakespeare-char-cpu"](horizon=steps), SIZES | warmup)
    return replace(config, model=replace(config.model, vocab_size=ENTRIES[lineage]))


def train_seconds(lineage: str, step: int) -> float:
    """What the original's clock has counted when `step` (from 0) begins."""
    return max(0.0, step - 11.0) if lineage == "autoresearch" else 0.0


def model_with(config: RunConfig, weights: Weights) -> GPT:
    model = build_model(config.model, device=CPU, compute_dtype=torch.float64, seed=0)
    load_weights(model, weights)
    return model


def trained(lineage: str, config: RunConfig, recording: Recording) -> Iterator[Weights]:
    """gptlab's weights behind each update."""
    model = model_with(config, recording.before)
    strategy = Strategy(model, whole_optimizer(model, config), Group())
    state = TrainState(model, strategy.optimizer, strategy, cast(Loader, None), CPU)
    finish = Finish.of(config, flops_per_token=1.0, scaling_params=1)
    for step in range(len(recording.after)):
        passes = recording.batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*passes, strict=True))
        batch = StepBatch(step, 0.0, inputs, targets, tuple(range(MICRO_BATCHES)), int((targets >= 0).sum()))
        gradients(state, batch, model.loss, config)
        state.train_seconds = train_seconds(lineage, step)
        update(state, config, rates_of_step(state, config, finish))
        state.step += 1
        yield {name: p.detach() for name, p in model.named_parameters()}


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[name].detach() - theirs[name].detach()).abs().max()) for name in ours)


def logits_and_gradients(lineage: str, config: RunConfig, recording: Recording) -> tuple[float, float]:
    """Largest differences on one batch, at random weights."""
    original = cast(nn.Module, recording.model)
    move_at_random(original)
    original.zero_grad()
    tokens, targets = recording.batches[0]
    targets = targets.clone()
    targets[0, ::5] = -1  # they do not count
    with mock.patch.object(F, "rms_norm", partial(F.rms_norm, eps=torch.finfo(torch.float32).eps)):
        if lineage in ("nanochat", "autoresearch"):
            theirs, loss = original(tokens), original(tokens, targets)
        else:
            theirs, loss = original(tokens, targets)
    loss.backward()
    model = model_with(config, weights_of(original))
    ours = model(tokens)
    (model.loss(tokens, targets) / int((targets >= 0).sum())).backward()
    gradient = largest_difference(
        {name: cast(Tensor, p.grad) for name, p in model.named_parameters()},
        in_gptlabs_names({name: cast(Tensor, p.grad) for name, p in original.named_parameters()}),
    )
    return largest_difference({"": ours}, {"": theirs}), gradient


ORIGINALS: Mapping[str, Callable[[Path, Recording], None]] = {
    "nanochat": run_nanochat,
    "autoresearch": run_autoresearch,
    "modded-nanogpt": run_modded_nanogpt,
    "nanogpt": run_nanogpt,
}


def compare(lineage: str, clone: Path) -> bool:
    """Whether gptlab's recipe is within the limits; prints the differences."""
    config = recipe_of(lineage)
    own, reversed_rows = Recording(), Recording(reversed_rows=True)
    at_random = Recording(from_random_weights=True)
    for recording in (own, reversed_rows, at_random):
        ORIGINALS[lineage](clone, recording)
        assert len(recording.after) >= STEPS

    def over_the_steps(ours: Iterable[Weights], theirs: Sequence[Weights]) -> list[float]:
        return [largest_difference(*pair) for pair in zip(ours, theirs, strict=True)]

    from_random = over_the_steps(trained(lineage, config, at_random), at_random.after)
    from_own = over_the_steps(trained(lineage, config, own), own.after)
    itself = over_the_steps(reversed_rows.after, own.after)
    logit, gradient = logits_and_gradients(lineage, config, at_random)
    print(f"{lineage} at {COMMITS[lineage][:12]}")
    print(f"  logits {logit:.1e}, gradients {gradient:.1e}")
    print(f"  {len(from_random)} steps from random weights: {max(from_random):.1e}")
    print(f"  {len(from_own)} steps from its own first weights: {max(from_own):.1e}, the first step {from_own[0]:.1e}")
    print(f"    the original with its rows reversed: {max(itself):.1e}, the first step {itself[0]:.1e}", flush=True)
    return (
        max(logit, gradient) <= GRADIENT_LIMIT
        and max(from_random) <= TRAINING_LIMIT
        and max(from_own) <= OWN_WEIGHTS_LIMITS.get(lineage, TRAINING_LIMIT)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for lineage in ORIGINALS:
        parser.add_argument(f"--{lineage}", type=Path, metavar="PATH", help=f"a clone with {COMMITS[lineage][:12]}")
    clones = {name.replace("_", "-"): clone for name, clone in vars(parser.parse_args()).items() if clone is not None}
    if not clones:
        parser.error("name at least one clone")
    within = [compare(name, clone.resolve()) for name, clone in clones.items()]
    print(
        f"limits: {GRADIENT_LIMIT:.0e} for logits and gradients, {TRAINING_LIMIT:.0e} for weights, "
        f"{OWN_WEIGHTS_LIMITS['autoresearch']:.0e} from autoresearch's own first ones"
    )
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
