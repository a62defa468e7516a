"""torch.compile where it is available: before the clock starts, and without a trace in the run's state."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gptlab.config.errors import ConfigError
from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.eval.bits_per_byte import TokenNats, nats_by, nats_of
from gptlab.model.kernels.ops import kernels_lack_compiler, missing_kernels, outrun_compiler
from gptlab.optim.torch_optimizer import TorchOptimizer
from gptlab.runtime.files.cache import keep_compiled
from gptlab.runtime.hardware.device import compiler_available, synchronize
from gptlab.runtime.hardware.installed import cxx_compiler
from gptlab.runtime.hardware.memory import ran_out_of_memory
from gptlab.runtime.hardware.rng import capture_rng, restore_rng
from gptlab.training.own_buffers import KeptBuffers
from gptlab.training.state import TrainState
from gptlab.training.step import LossFunction, gradients

F = TypeVar("F", bound=Callable[..., Any])

RECOMPILE_LIMIT = 256
"""Graphs of one function in a process: torch's limit for all objects that share its code."""


_VECTOR_OPTIONS = (
    "-mfma", "-mf16c", "-mavx2", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni", "-mavx512bf16",
    "-mamx-tile", "-mamx-bf16", "-mamx-int8",
)  # fmt: skip
"""Of every x86 instruction set that Inductor (torch 2.13) generates code for."""


@dataclass(slots=True)
class Passes:
    """The model's forward passes, for training and for validation, compiled or plain."""

    loss_sum: LossFunction
    token_nats: TokenNats
    compiler: str = "off"
    """What compiled them: "off", or "inductor"; on a CPU, after the warm-up, with the instruction set that Inductor
    generates code for ("inductor avx512")."""
    plain: Passes | None = None
    """The same without compilation, in case the compiler fails."""

    @property
    def compiled(self) -> bool:
        return self.compiler != "off"


def make_passes(state: TrainState, config: RunConfig, warn: Callable[[str], None]) -> Passes:
    """The passes as configured. Without a compiler: ConfigError where compilation is required, else a warning."""
    device, dtype = state.device, state.model.compute_dtype
    if (missing := missing_kernels(device, dtype)) is not None:
        warn(missing)
    plain = Passes(state.strategy.as_forward(state.model.loss), nats_of(state.model))
    return plain if config.runtime.compile == "off" else _compiled(plain, state, config, warn)


def _compiled(plain: Passes, state: TrainState, config: RunConfig, warn: Callable[[str], None]) -> Passes:
    """`plain`, compiled; as they are where that is not possible, or not faster."""
    model, device, dtype = state.model, state.device, state.model.compute_dtype
    if config.runtime.compile == "auto" and outrun_compiler(device, dtype):
        return plain
    if config.runtime.compile == "auto" and kernels_lack_compiler(device, dtype):
        return plain  # the warning about the kernels says why
    if (problem := _cannot_compile(state.device)) is not None:
        if config.runtime.compile == "on":
            raise ConfigError("runtime.compile", "on", problem, "auto")
        slower = "" if state.device.type == "mps" else ", which is slower"
        warn(f"training without torch.compile{slower}: {problem}")
        return plain

    import torch._dynamo

    # With more graphs than the limit, 8, a function runs uncompiled, without an error. Each number of rows that is
    # tried, and each size whose steps are timed, has some of its own.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT

    def compiled(function: F) -> F:
        # Shapes never change within a run. On a CPU, kernels are called from C++ instead of Python, which makes a step
        # of 40 ms faster by 2 to 4% and takes no longer to build (docs/LOG.md, 2026-11-20).
        options: dict[str, Any] = {"cpp_wrapper": True} if state.device.type == "cpu" else {}
        if config.runtime.coordinate_descent_tuning:
            options["coordinate_descent_tuning"] = True
        return cast(F, torch.compile(function, dynamic=False, options=options))

    if model.platform == "cuda" and state.optimizer.muon is not None:
        state.optimizer.muon.compile(compiled)

    # Block by block: layers of one kind share their code, so compile time does not grow with depth. For a GPU, twelve
    # layers take 36 s cold instead of 118 for the whole model (docs/LOG.md, 2026-11-27). The gradients of several GPUs
    # leave while earlier blocks compute, and blocks that are computed again are so one at a time. Dropout is drawn by
    # graphs, and these are cut alike for any number of processes.
    blocks = state.strategy.compiled_blocks(compiled)
    head_loss, head_logits = compiled(model.head_loss), compiled(model.logits)
    is_gpu = model.platform == "cuda"
    embed = compiled(model.embed) if is_gpu else None
    # Uncompiled, value embeddings take three times as long: gradients are copied to float32, and the tokens sorted
    # (docs/LOG.md, 2026-11-28). With FSDP2, whose hooks are around a table, nothing would be left to compile.
    look_up = compiled(model.look_up) if is_gpu and not state.strategy.is_sharded else None

    def loss_sum(tokens: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        return head_loss(model.hidden(tokens, blocks, embed, look_up), targets, scale)

    def logits(tokens: Tensor) -> Tensor:
        # Gradients on, so that validation uses the blocks that training compiled. Another number of rows compiles its
        # own, which keep nothing for a backward pass.
        with torch.set_grad_enabled(len(tokens) == state.loader.micro_sequences):
            hidden = model.hidden(tokens, blocks, embed, look_up).detach()
        return head_logits(hidden)

    return Passes(state.strategy.as_forward(loss_sum), nats_by(state.strategy.as_forward(logits)), "inductor", plain)


def _cannot_compile(device: torch.device) -> str | None:
    """Why torch.compile is not available, as far as is known without trying; None where it seems to be."""
    if device.type == "mps":
        return "for Apple GPUs it is a prototype (https://github.com/pytorch/pytorch/issues/150121)"
    if not compiler_available(device):
        needed = "Triton" if device.type == "cuda" else "a C++ compiler (g++ or clang++)"
        return f"torch.compile needs {needed}, and none was found"
    folder = keep_compiled()
    if device.type == "cpu":
        _skip_vector_probes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"torch.compile needs a cache, and {folder} cannot be written: {error.strerror or error}"


def _skip_vector_probes() -> None:
    """Tell Inductor that the compiler knows the processor's instruction sets, if it accepts their options.

    Otherwise Inductor compiles a program with ATen's headers for each and loads it in a process of its own: 21.9 s of a
    cold start and 3.0 s of a later one, instead of 0.6, to choose the same set (docs/LOG.md, 2026-11-22).
    """
    compiler, is_x86 = cxx_compiler(), sys.platform == "linux" and platform.machine() == "x86_64"
    if compiler is None or not is_x86 or "TORCHINDUCTOR_VEC_ISA_OK" in os.environ:
        return
    command = [compiler, *_VECTOR_OPTIONS, "-fsyntax-only", "-x", "c++", os.devnull]
    with suppress(OSError, subprocess.SubprocessError):  # an older compiler: Inductor finds out what it can do
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


def warm_up(
    state: TrainState, passes: Passes, config: RunConfig, eval_sequences: int, warn: Callable[[str], None]
) -> None:
    """Compile: run a forward, a backward, an update and a validation pass on made-up tokens, then put back weights,
    buffers, moments and generators. Uncompiled passes on a CPU are ready.

    Where the compiler fails or compiles nothing, `passes` become the plain ones, and `warn` is called; ConfigError
    where compilation is required, or where weights are sharded, since the other ranks are then in the middle of a pass.
    """
    if passes.compiled:
        _compile(state, passes, config, eval_sequences, warn)
    elif state.device.type != "cpu":
        run_once(state, passes, config, eval_sequences)
    if state.device.type == "cuda":
        from gptlab.training.captured_steps import capture

        state.captured = None  # that of a warm-up for which memory was too small
        validate = partial(validate_once, state, passes, config, eval_sequences)
        state.captured = capture(state, passes.loss_sum, config, validate, warn)


def _compile(
    state: TrainState, passes: Passes, config: RunConfig, eval_sequences: int, warn: Callable[[str], None]
) -> None:
    from torch._dynamo.exc import TorchDynamoException  # 0.7 s, which compiling takes anyway
    from torch._dynamo.utils import counters

    try:
        run_once(state, passes, config, eval_sequences)
    except (TorchDynamoException, OSError, _NoGradientsError) as error:
        if state.device.type != "cpu" and ran_out_of_memory(error):
            raise
        problem = f"torch.compile failed: {_what_failed(error)}"
        if config.runtime.compile == "on" or state.strategy.is_sharded:
            raise ConfigError("runtime.compile", config.runtime.compile, problem, "off") from error
        _give_up_compiling(state, passes)
        warn(f"training without torch.compile, which is slower: {problem}")
        run_once(state, passes, config, eval_sequences)
    else:
        if counters["stats"]["unique_graphs"] > 0:  # of this process: a second model may find those of the first
            passes.compiler = _compiler(state.device)
        else:  # TORCHDYNAMO_DISABLE is set
            _give_up_compiling(state, passes)
            warn("training without torch.compile, which is slower: it compiled nothing")


def _give_up_compiling(state: TrainState, passes: Passes) -> None:
    assert passes.plain is not None
    passes.loss_sum, passes.token_nats, passes.compiler = passes.plain.loss_sum, passes.plain.token_nats, "off"
    if state.optimizer.muon is not None:
        state.optimizer.muon.compile(None)


def _compiler(device: torch.device) -> str:
    """What compiled for this device, and on a CPU with which vectors: Inductor uses the widest ones that the processor
    and the C++ compiler both have."""
    vectors = sys.modules.get("torch._inductor.cpu_vec_isa")
    if device.type != "cpu" or vectors is None or not vectors.valid_vec_isa_list.cache_info().currsize:
        return "inductor"  # it has not looked for them: that takes seconds, since it compiles programs to try
    return f"inductor {vectors.pick_vec_isa()}"


def _what_failed(error: Exception) -> str:
    """One line of an error of torch.compile; of a C++ compiler, its first error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    compilers = (line for line in lines if re.search(r"\berror: ", line))  # "CppCompileError: ..." is Inductor's
    others = (line for line in lines if "error" in line.lower())
    return next((line for found in (compilers, others, lines) for line in found), type(error).__name__)[:300]


def run_once(state: TrainState, passes: Passes, config: RunConfig, eval_sequences: int) -> None:
    """What `warm_up` runs."""
    rng, strategy = capture_rng(state.device), state.strategy
    kept = [*(p.detach() for p in strategy.updated_weights()), *state.optimizer.state_tensors().values()]
    copies, buffers = [tensor.to("cpu", copy=True) for tensor in kept], KeptBuffers(state.model)
    try:
        gradients(state, _made_up_batch(state, config), passes.loss_sum, config, reduce=strategy.is_sharded)
        if passes.compiled and not strategy.is_sharded:
            _require_gradients(state)
        strategy.use_local_gradients()
        if not isinstance(state.optimizer, TorchOptimizer):  # whose state comes to be in its first step
            state.optimizer.step(1.0, config.optim.muon.momentum, 1.0)
        strategy.zero_grad()  # as in the run: beside them, a validation may take more memory than any step
        validate_once(state, passes, config, eval_sequences)
    finally:
        strategy.zero_grad()
        with torch.no_grad():
            for tensor, copy in zip(kept, copies, strict=True):
                tensor.copy_(copy)
        buffers.put_back()
        restore_rng(rng, state.device)
        synchronize(state.device)


def validate_once(state: TrainState, passes: Passes, config: RunConfig, eval_sequences: int) -> None:
    """A validation pass on made-up tokens."""
    state.model.eval()
    with torch.no_grad():
        zeros = torch.zeros(eval_sequences, config.model.seq_len, dtype=torch.int64, device=state.device)
        passes.token_nats(zeros, zeros)


class _NoGradientsError(Exception):
    pass


def _require_gradients(state: TrainState) -> None:
    """torch 2.11 compiled backward passes of zeros, without an error, from code that 2.12 compiles correctly."""
    if not any(weight.grad is not None and weight.grad.any() for weight in state.model.parameters()):
        raise _NoGradientsError(f"torch {torch.__version__} compiled a backward pass whose gradients are all zero")


def _made_up_batch(state: TrainState, config: RunConfig) -> StepBatch:
    """Micro-batches of made-up tokens in the run's shape: one, or, where memory may run out, two if a step has as many,
    since the second needs that of the first one's gradients too."""
    assert config.model.vocab_size is not None
    is_gpu = state.device.type != "cpu"
    count = 2 if is_gpu and config.micro_batches > state.strategy.group.size else 1
    shape = (count, config.batch.micro_sequences, config.model.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(state.device)
    return StepBatch(0, 0.0, tokens, tokens, tuple(range(count)), tokens.numel())
