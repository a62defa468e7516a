"""A whole run as one frozen value. Everything that a user can choose is a field of it."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from gptlab.config.errors import ConfigError
from gptlab.config.fields import Limit, NotNegative, Positive, checked_dataclass, require, require_device
from gptlab.config.length import Horizon
from gptlab.config.model import ModelConfig
from gptlab.config.optim import OptimConfig, ScheduleConfig

TokenizerKind = Literal["bpe", "gpt2", "char", "byte"]
Split = Literal["hash", "tail"]
Rows = Literal["packed", "sequential", "random"]
LongDocuments = Literal["cut", "crop"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Compile = Literal["auto", "on", "off"]
Products = Literal["kernels", "library"]
AutoProducts = Literal["auto", Products]
OnSaveFailure = Literal["stop", "continue"]
ParallelMode = Literal["data", "sharded"]
Mirror = Literal["tensorboard", "wandb", "trackio"]

# The library that learns the merges allocates 70 bytes an entry first, and aborts the process where that fails.
_MOST_BPE = Limit(lambda n: n <= 2**22, "must be 2^22 or less", 2**22)
_LEAST_BPE = Limit(lambda n: n >= 257, "byte-level BPE needs 257 or more", 257)  # 256 bytes and a special token
_NO_SPIKE = "every step would be a spike: must be greater than 1"
_NO_SHARD = "in mode data each process holds a copy: must be 2 or more"
_NO_DOCUMENTS = "only packed rows hold documents that begin with BOS: give data.rows packed"

EXACT_WORLD_SIZES = (1, 2, 4, 8)
"""Numbers of processes that `exact_any_world_size` supports: those that halve down to one."""


@checked_dataclass("tokenizer.")
class TokenizerConfig:
    kind: TokenizerKind = "bpe"
    """bpe (byte-level, trained on the corpus) | gpt2 (50,257 entries) | char (of the corpus) | byte (the 256 bytes)."""
    vocab_size: Annotated[int, _LEAST_BPE, _MOST_BPE] = 4096
    """Entries of a bpe tokenizer, special tokens included."""
    max_digits: Positive[int] = 2
    """Maximum digits in one token."""
    train_bytes: Positive[int] = 100_000_000
    """Maximum bytes of text (UTF-8) to train a bpe tokenizer on: spread over plain text files, else the first ones."""
    path: str | None = None
    """A folder with a tokenizer.json, of gptlab or GPT-2, to use instead of training one."""


@checked_dataclass("data.")
class DataConfig:
    source: tuple[str, ...] = ("stdlib",)
    """Corpora, read in this order: `stdlib`, a file (.txt .jsonl .parquet), a folder, a glob, a named corpus (`gptlab
    data list`) or hub:OWNER/NAME. Or tokens: a nanoGPT folder (train.bin, val.bin), llm.c shards (.bin)."""
    val_source: tuple[str, ...] = ()
    """Corpora (or token shards) to validate on. Empty: the validation files that belong to a named corpus (NAME:val);
    where there are none, `split` holds out a part of `source`."""
    hub_files: Positive[int] | None = None
    """Maximum files of a corpus from the hub to use, in the order of their names. None: as many as its entry says."""
    text_column: str = "text"
    """The column (Parquet) or key (JSONL) that holds the text."""
    split: Split = "hash"
    """hash: a validation document is chosen by a hash of its content | tail: the end of the text (nanoGPT)."""
    val_fraction: Annotated[float, Limit(lambda share: 0 < share < 1, "must be between 0 and 1", 0.05)] = 0.05
    """Share of the corpus held out: of documents (hash) or of characters (tail)."""
    rows: Rows = "packed"
    """packed: rows start with BOS and hold documents, packed best-fit | sequential: contiguous chunks | random: uniform
    windows."""
    long_documents: LongDocuments = "cut"
    """For packed rows. cut: long documents are cut into pieces, and every token is trained on | crop: the overhang is
    dropped, as in nanochat's and autoresearch's training rows, in their order whatever the seed."""
    pack_buffer_documents: Positive[int] = 1000
    """For packed rows: documents among which the best fit is chosen (nanochat, autoresearch: 1000)."""
    mask_documents: bool = False
    """For packed rows: tokens attend only to tokens of their own document (a document begins at BOS). On a GPU that is
    fast in bfloat16 and float16; elsewhere attention is slower than without masks."""
    cache_dir: str | None = None
    """Folder of prepared tokens. None: $GPTLAB_CACHE, or the user's cache folder."""

    def __post_init__(self) -> None:
        named = [*(self.source or [""]), *self.val_source]
        require(all(named), "data.source", self.source, "name at least one corpus, none by an empty name", "stdlib")
        require(not self.mask_documents or self.rows == "packed", "data.mask_documents", True, _NO_DOCUMENTS, False)


@checked_dataclass("batch.")
class BatchConfig:
    total_tokens: Positive[int] = 16_384
    """Tokens in one optimizer step, over all micro-batches and ranks."""
    micro_sequences: Positive[int] = 32
    """Rows in one forward and backward pass."""


@checked_dataclass("eval.")
class EvalConfig:
    every_steps: Positive[int] | None = None
    """Validate every N steps, and at the end. None: not by steps."""
    every_seconds: Positive[float] | None = None
    """Validate every X seconds of the training clock, and at the end. None: not by time."""
    at_start: bool = True
    """Also validate before the first step, in a run that validates at all."""
    at_end: bool = True
    """Validate at the end even where neither every_steps nor every_seconds is given. False: such a run never validates
    (nanochat's --eval-every -1)."""
    only: bool = False
    """Validate the initial weights and end without training (nanoGPT's eval_only)."""
    tokens: Positive[int] | None = None
    """Maximum target tokens of the validation set; always the same ones. None: the whole set."""
    train_tokens: Positive[int] | None = None
    """Target tokens of the training text, always the same ones, on which the training loss is measured at each
    validation, without dropout (nanoGPT's train loss). None: not measured."""
    micro_sequences: Positive[int] | None = None
    """Rows in one evaluation pass. None: as in training, or more on a CPU, where that is faster. It changes the speed
    and, but for rounding, not the result."""
    core_every_steps: Positive[int] | None = None
    """Measure CORE (DCLM, arXiv:2406.11794) every N steps, and at the end. None: never. Where core_dir is not given and
    there is no evaluation bundle in the cache, the run warns and continues without CORE."""
    core_examples: Positive[int] | None = 500
    """Maximum examples of each CORE task; always the same ones (nanochat: 500). None: all. The worked examples are
    drawn from them, so results with another number are not comparable."""
    core_dir: str | None = None
    """Folder of the DCLM evaluation bundle (core.yaml, eval_meta_data.csv, eval_data/). None: CACHE/core."""

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return self.at_end or self.only or self.every_steps is not None or self.every_seconds is not None


@checked_dataclass("sample.")
class SampleConfig:
    prompts: tuple[str, ...] = ()
    """Texts to continue. Not given: those of `from_validation`. `none`: no samples."""
    from_validation: NotNegative[int] = 0
    """Prompts to take from the validation text where `prompts` is empty. 0, with no prompts: no samples."""
    every_steps: Positive[int] | None = None
    """Sample every N steps, and at the end. None: not by steps."""
    every_seconds: Positive[float] | None = None
    """Sample every X seconds of the training clock, and at the end. None: not by time."""
    max_tokens: Positive[int] = 128
    """Tokens to generate for each prompt."""
    temperature: NotNegative[float] = 0.8
    """Softmax temperature. 0: always the likeliest token (greedy)."""
    top_k: Positive[int] | None = 50
    """Sample from the N likeliest tokens. None: all."""


@checked_dataclass("checkpoint.")
class CheckpointConfig:
    every_steps: Positive[int] | None = None
    """Save every N steps. None: not by steps. A run always ends with a checkpoint."""
    every_seconds: Positive[float] | None = None
    """Save every X seconds of the training clock. None: not by time."""
    keep_last: Positive[int] = 2
    """Newest checkpoints to keep. Two, since a crash may have damaged the newest. 1 needs room for three: the last good
    one stays until the next is known to be good, and meanwhile another may be written."""
    keep_every_steps: Positive[int] | None = None
    """Never remove a checkpoint whose step is a multiple of this. None: no such steps."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest validation loss."""
    save_best: bool = False
    """Save after each validation with the lowest loss so far (nanoGPT)."""
    background: bool = True
    """Save asynchronously, from a copy of the state in host memory. False: training waits for every save. It always
    waits for the last checkpoint and for one that a signal asks for."""
    on_failure: OnSaveFailure = "stop"
    """When a save fails (disk full): stop with an error | continue with a warning, except for a run's last checkpoint.
    Older checkpoints are kept either way. The failure of a background save is noticed at the next step."""


@checked_dataclass("faults.")
class FaultsConfig:
    """How many broken steps a run tolerates, and whether it rewinds after a loss spike."""

    max_skipped_in_a_row: NotNegative[int] = 3
    """Maximum consecutive skipped updates (non-finite loss or gradient) before the run fails with exit code 3. 0: the
    first such step fails it."""
    max_skipped: NotNegative[int] | None = None
    """Maximum skipped updates in the whole run. None: no limit."""
    spike_factor: Annotated[float, Limit(lambda factor: factor > 1, _NO_SPIKE, 2.0)] | None = None
    """A training loss above this many times the median of the last losses is a spike: the run rewinds to its last good
    checkpoint and continues with the data after the spike. None: never."""
    spike_window: Positive[int] = 128
    """Losses in that median. Until there are that many, nothing is a spike."""
    max_rewinds: NotNegative[int] = 10
    """Maximum rewinds. The next spike fails the run with exit code 3."""


@checked_dataclass("parallel.")
class ParallelConfig:
    """How several processes share the work of one run."""

    mode: ParallelMode = "data"
    """data: replicated weights, sharded optimizer | sharded: weights, gradients and optimizer are sharded, and each
    layer is gathered when it computes. One process holds everything either way."""
    shard_ranks: Annotated[int, Limit(lambda ranks: ranks > 1, _NO_SHARD, 2)] | None = None
    """In mode sharded, how many processes hold one copy of the weights together, such as those of a machine (HSDP). It
    divides their number. None: all of them."""
    reduce_each_micro_batch: bool = False
    """Sum the gradients of each micro-batch over the processes, not only those of the step. Each process then keeps its
    share of them between two micro-batches instead of all: less memory, more traffic."""
    exact_any_world_size: bool = False
    """Deterministic reduction: gradients are added in an order that does not depend on the number of processes (1, 2, 4
    or 8), so that weights and losses are the same bits for each, even if it changes in mid-run. It costs time and
    memory."""

    def __post_init__(self) -> None:
        if self.exact_any_world_size and (self.mode == "sharded" or self.reduce_each_micro_batch):
            reason = "mode sharded and reduce_each_micro_batch add in an order that depends on the number of processes"
            raise ConfigError("parallel.exact_any_world_size", True, reason, False)
        if self.shard_ranks and self.mode != "sharded":
            raise ConfigError("parallel.shard_ranks", self.shard_ranks, 'needs parallel.mode = "sharded"')

    def ranks_per_copy(self, n_ranks: int) -> int:
        """How many of `n_ranks` hold one copy of sharded weights. ConfigError where `shard_ranks` does not divide
        them."""
        size = self.shard_ranks or n_ranks
        if n_ranks % size:
            nearest = min((n for n in range(2, n_ranks + 1) if n_ranks % n == 0), key=lambda n: abs(n - size))
            reason = f"does not divide the number of processes, {n_ranks}"
            raise ConfigError("parallel.shard_ranks", size, reason, nearest)
        return size


@checked_dataclass("log.")
class LogConfig:
    to: tuple[Mirror, ...] = ()
    """Where else the metrics go, as A,B: tensorboard (event files in the run folder), wandb (offline without a login),
    trackio (local). Each needs its library, and none can slow or stop the run."""
    report: bool = True
    """Write report.html and report.md into the run folder once the run has finished, and show the curve of validation
    bits per byte. Another process does it, within a second."""


@checked_dataclass("runtime.")
class RuntimeConfig:
    device: str = "auto"
    """auto (the first available of cuda, mps, cpu) | cpu | cuda | cuda:N | mps."""
    dtype: DType = "auto"
    """Type of activations and matrix products; weights are float32. auto: bfloat16 where it is faster."""
    fp8: bool = False
    """Multiply matrices in 8-bit floating point while training: large linear layers and the head, on NVIDIA GPUs from
    Ada and Hopper on (nanochat's --fp8). Evaluation and samples are in bfloat16."""
    compile: Compile = "auto"
    """torch.compile: auto (on where there is a compiler, except on a CPU with gptlab's C++ kernels, as fast or faster)
    | on | off."""
    products: AutoProducts = "auto"
    """What multiplies matrices on a CPU, but for those of Muon and attention: gptlab's kernels, or the library of
    torch. auto: the faster one, timed once for a machine and a model."""
    activation_checkpointing: bool = False
    """Keep only what goes into each block for the backward pass, which computes the rest again: much less memory, a
    third more work, the same bits."""
    coordinate_descent_tuning: bool = False
    """Let torch.compile tune the block sizes of its GPU kernels (the speedrun). Compilation takes minutes longer; no
    effect on a CPU."""
    allocator: str | None = None
    """Settings of the GPU memory allocator, in the form of $PYTORCH_ALLOC_CONF (expandable_segments:True), which takes
    precedence. None: expandable segments on NVIDIA GPUs under Linux, else PyTorch's defaults."""
    threads: Positive[int] | None = None
    """CPU threads for computation. None: one per physical core that other programs leave; a run that began beside some
    keeps its number, and so does one with parallel.exact_any_world_size."""
    log_every_steps: Positive[int] = 1
    """Write a training line every N steps, and at the end of the horizon's amount."""
    max_loss: Positive[float] = 100.0
    """A training loss above this (nats/token) fails the run with exit code 3 (autoresearch: 100)."""
    process_timeout_seconds: Positive[float] = 600.0
    """With several processes: a process that keeps the others waiting this long is considered lost, and the run fails
    with exit code 3. It must exceed the time of the slowest sample, which rank 0 draws while the others wait."""

    def __post_init__(self) -> None:
        require((self.threads or 0) <= 1024, "runtime.threads", self.threads, "is more than can be started", 1024)
        require_device(self.device)


@checked_dataclass("")
class RunConfig:
    recipe: str = "custom"
    """The recipe that made this configuration."""
    run_dir: str | None = None
    """Folder of the run. None: runs/RECIPE-DATE-TIME."""
    seed: int = 1337
    """Random seed of weights, data order, dropout and samples."""
    init_from: str | None = None
    """Weights to start from: a run folder, a folder of transformers with a GPT-2 or an exported model, or one of
    OpenAI's names (gpt2, gpt2-medium, gpt2-large, gpt2-xl). None: random, from the seed."""
    recipe_arguments: tuple[str, ...] = ()
    """The recipe's own arguments that were given, each as NAME=VALUE (JSON). Written by the recipe."""
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
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2^63 - 1")
        if self.batch.total_tokens % self.micro_tokens:
            raise self._indivisible_batch()
        if self.faults.spike_factor or self.horizon.until_val_loss or self.parallel.exact_any_world_size:
            self._check_dependent_options()

    def _indivisible_batch(self) -> ConfigError:
        tokens, micro_tokens = self.batch.total_tokens, self.micro_tokens
        rows, seq_len = self.batch.micro_sequences, self.model.seq_len
        reason = f"must be a multiple of micro_sequences * seq_len = {rows} * {seq_len} = {micro_tokens}"
        nearest = max(1, round(tokens / micro_tokens)) * micro_tokens
        return ConfigError("batch.total_tokens", tokens, reason, nearest)

    def _check_dependent_options(self) -> None:
        """ConfigError for an option whose precondition is not met."""
        spike_factor, saves = self.faults.spike_factor, self.checkpoint
        if spike_factor is not None and not (saves.every_steps or saves.every_seconds or saves.save_best):
            reason = "a run that saves nothing before its end cannot rewind: give checkpoint.every_steps too"
            raise ConfigError("faults.spike_factor", spike_factor, reason)
        if self.horizon.until_val_loss is not None and not (self.eval.every_steps or self.eval.every_seconds):
            reason = "a run that does not validate on the way cannot stop at a loss: give eval.every_steps too"
            raise ConfigError("horizon.until_val_loss", self.horizon.until_val_loss, reason)
        if self.parallel.exact_any_world_size and self.horizon.unit == "seconds":
            reason = "seconds are counted on the clock, which differs each time: give the length in steps or tokens"
            raise ConfigError("parallel.exact_any_world_size", True, reason)

    @property
    def micro_tokens(self) -> int:
        """Tokens in one micro-batch."""
        return self.batch.micro_sequences * self.model.seq_len

    @property
    def eval_sequences(self) -> int:
        """Rows in one evaluation pass; see `eval.bits_per_byte.rows_of_pass`."""
        return self.eval.micro_sequences or self.batch.micro_sequences

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step, over all ranks."""
        return self.batch.total_tokens // self.micro_tokens
