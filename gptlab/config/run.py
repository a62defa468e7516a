"""A whole run as one frozen value. What is not in here is not a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.errors import ConfigError, require, require_choice, require_positive
from gptlab.config.faults import FaultsConfig
from gptlab.config.horizon import Horizon
from gptlab.config.model import ModelConfig
from gptlab.config.optim import OptimConfig, ScheduleConfig
from gptlab.config.parallel import ParallelConfig

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Compile = Literal["auto", "on", "off"]
OnSaveFailure = Literal["stop", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    total_tokens: int = 16_384
    """Tokens in one optimizer step, over all micro-batches and ranks."""
    micro_sequences: int = 32
    """Rows in one forward and backward pass."""

    def __post_init__(self) -> None:
        require_positive("batch.total_tokens", self.total_tokens)
        require_positive("batch.micro_sequences", self.micro_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    every_steps: int | None = None
    """Validate every so many steps, and at the end. None: not by steps."""
    every_seconds: float | None = None
    """Validate every so many seconds of the training clock, and at the end. None: not by time."""
    at_start: bool = True
    """Validate before the first step too, in a run that validates at all."""
    at_end: bool = True
    """Validate at the end also where neither every_steps nor every_seconds is given. False: such a run never validates
    (nanochat's --eval-every -1)."""
    only: bool = False
    """Validate the weights as they are, and end without training (nanoGPT's eval_only)."""
    tokens: int | None = None
    """Target tokens of the validation set, at most; always the same ones. None: the whole set."""
    train_tokens: int | None = None
    """Target tokens of the training text, at most and always the same ones, whose loss is measured beside the
    validation loss, without dropout (nanoGPT's train loss). None: not measured."""
    micro_sequences: int | None = None
    """Rows in one evaluation pass. None: as in training. Changes the speed, not the result."""
    core_every_steps: int | None = None
    """Measure CORE (DCLM, arXiv:2406.11794) every so many steps, and at the end. None: never. Without the evaluation
    bundle, a run that was not told where it is goes on without CORE, and says so."""
    core_examples: int | None = 500
    """Examples of each CORE task, at most; always the same ones (nanochat: 500). None: all. Worked examples come from
    among them, so another number is another test."""
    core_dir: str | None = None
    """Folder of the DCLM evaluation bundle (core.yaml, eval_meta_data.csv, eval_data/). None: CACHE/core."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_seconds", "tokens", "train_tokens", "micro_sequences",
                     "core_every_steps", "core_examples"):  # fmt: skip
            require_positive(f"eval.{name}", getattr(self, name))

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return self.at_end or self.only or self.every_steps is not None or self.every_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    prompts: tuple[str, ...] = ()
    """Texts to continue. None given: those of `from_validation`."""
    from_validation: int = 0
    """Prompts to take from the validation text where none are given. 0 and none given: no samples."""
    every_steps: int | None = None
    """Sample every so many steps. None: only at the end."""
    max_tokens: int = 128
    """Tokens to generate for each prompt."""
    temperature: float = 0.8
    """0: the likeliest token every time (greedy)."""
    top_k: int | None = 50
    """Draw among so many likeliest tokens. None: all."""

    def __post_init__(self) -> None:
        require(self.from_validation >= 0, "sample.from_validation", self.from_validation, "must not be negative", 0)
        require_positive("sample.every_steps", self.every_steps)
        require_positive("sample.max_tokens", self.max_tokens)
        require_positive("sample.top_k", self.top_k)
        require(self.temperature >= 0, "sample.temperature", self.temperature, "must not be negative", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int | None = None
    """Save every so many steps. None: not by steps. A run always ends with a checkpoint."""
    every_seconds: float | None = None
    """Save every so many seconds of the training clock. None: not by time."""
    keep_last: int = 2
    """Newest checkpoints to keep; two, since the newest may be the one a crash damaged."""
    keep_every_steps: int | None = None
    """Keep each checkpoint whose step is a multiple of this for good. None: none."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest validation loss."""
    save_best: bool = False
    """Save whenever a validation is the best so far (nanoGPT)."""
    background: bool = True
    """Save while training goes on, from a copy of the state in host memory. False: training waits for every save. The
    last checkpoint, and one that a signal asks for, are always waited for."""
    on_failure: OnSaveFailure = "stop"
    """When a save fails (disk full): stop with a clear error | continue with a warning, except for a run's last one.
    Older ones stay either way. Of a save in the background it is known with the next step."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_seconds", "keep_last", "keep_every_steps"):
            require_positive(f"checkpoint.{name}", getattr(self, name))
        require_choice("checkpoint.on_failure", self.on_failure, get_args(OnSaveFailure))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    device: str = "auto"
    """auto (cuda, mps, cpu: the first there is) | cpu | cuda | cuda:N | mps."""
    dtype: DType = "auto"
    """Type of activations and matrix products; weights are float32. auto: bfloat16 where the hardware has it."""
    compile: Compile = "auto"
    """torch.compile: auto (on where a compiler is found) | on | off."""
    coordinate_descent_tuning: bool = False
    """Let torch.compile tune its GPU kernels further, block size by block size (the speedrun): minutes more to compile,
    no effect on a CPU."""
    allocator: str | None = None
    """Settings of the GPU memory allocator, as $PYTORCH_ALLOC_CONF takes them (expandable_segments:True); that variable
    goes first. None: torch's own."""
    threads: int | None = None
    """CPU threads for computation. None: one a physical core; with parallel.exact_any_world_size those of the run's
    first start from then on."""
    log_every_steps: int = 1
    """Write a training line every so many steps."""
    max_loss: float = 100.0
    """A training loss above this (nats/token) ends the run with exit code 3 (autoresearch: 100)."""
    process_timeout_seconds: float = 600.0
    """With several processes: one that keeps the others waiting for so long is taken for lost, and the run ends with
    exit code 3. More than the slowest sample takes, which rank 0 makes while the others wait."""

    def __post_init__(self) -> None:
        kinds = ("auto", "cpu", "cuda", "mps")
        kind, _, index = self.device.partition(":")
        require_choice("runtime.device", kind, kinds)
        if ":" in self.device and (kind != "cuda" or not index.isdigit()):
            raise ConfigError("runtime.device", self.device, "only cuda takes a number, as in cuda:0", kind)
        require_choice("runtime.dtype", self.dtype, get_args(DType))
        require_choice("runtime.compile", self.compile, get_args(Compile))
        require_positive("runtime.threads", self.threads)
        require_positive("runtime.log_every_steps", self.log_every_steps)
        require_positive("runtime.max_loss", self.max_loss)
        require_positive("runtime.process_timeout_seconds", self.process_timeout_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    recipe: str = "custom"
    """The recipe that this configuration came from."""
    run_dir: str | None = None
    """Folder of the run. None: runs/RECIPE-DATE-TIME."""
    seed: int = 1337
    """Seeds weights, data order, dropout and samples."""
    init_from: str | None = None
    """Weights to begin with: a folder of a run, or of a GPT-2 or exported model as transformers keeps it, or the name
    of one of OpenAI's (gpt2, gpt2-medium, gpt2-large, gpt2-xl). None: drawn from the seed."""
    recipe_arguments: tuple[str, ...] = ()
    """Arguments of the recipe's own that were given, each as NAME=VALUE (JSON); the recipe writes it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    horizon: Horizon = field(default_factory=Horizon)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2^63 - 1")
        micro_tokens = self.micro_tokens
        if self.batch.total_tokens % micro_tokens:
            nearest = max(1, round(self.batch.total_tokens / micro_tokens)) * micro_tokens
            raise ConfigError(
                "batch.total_tokens",
                self.batch.total_tokens,
                f"must be a multiple of micro_sequences * seq_len = {self.batch.micro_sequences} * "
                f"{self.model.seq_len} = {micro_tokens}",
                nearest,
            )
        saves = self.checkpoint
        if self.faults.spike_factor is not None and not (saves.every_steps or saves.every_seconds or saves.save_best):
            raise ConfigError(
                "faults.spike_factor",
                self.faults.spike_factor,
                "a run that saves nothing before its end has nothing to go back to: give checkpoint.every_steps too",
            )
        if self.horizon.until_val_loss is not None and not self.eval.validates:
            reason = "a run that never validates cannot stop at a validation loss: give eval.every_steps too"
            raise ConfigError("horizon.until_val_loss", self.horizon.until_val_loss, reason)

        if self.parallel.exact_any_world_size and self.horizon.unit == "seconds":
            raise ConfigError(
                "parallel.exact_any_world_size",
                True,
                "a run that is measured in seconds follows its clock, which is another one every time: give its length "
                "in steps or tokens",
            )

    @property
    def micro_tokens(self) -> int:
        """Tokens in one micro-batch."""
        return self.batch.micro_sequences * self.model.seq_len

    @property
    def eval_sequences(self) -> int:
        """Rows in one evaluation pass."""
        return self.eval.micro_sequences or self.batch.micro_sequences

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step, over all ranks."""
        return self.batch.total_tokens // self.micro_tokens
