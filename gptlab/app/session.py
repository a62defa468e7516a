"""One run built from its configuration: data, model, optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from gptlab.app.loaded_run import Start, load_start_weights, require_tokenizer
from gptlab.app.own_parts import NO_PARTS, OwnParts
from gptlab.app.ranks import rank_0_first, require_same_mode
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import EXACT_WORLD_SIZES, ParallelConfig, RunConfig
from gptlab.data.corpus.core_bundle import core_folder
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.rows import RowSource, make_rows, validation_rows
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.eval.bits_per_byte import Evaluation, evaluate
from gptlab.eval.core import CoreResult, encode_tasks, gpt_logits, measure_core
from gptlab.eval.core_tasks import find_bundle, read_tasks
from gptlab.eval.prompts import validation_prompts
from gptlab.eval.sampling import drawn_together, sample_text
from gptlab.model.counting import FlopsPerToken, ParameterCounts, flops_per_token, parameter_counts
from gptlab.model.interop.pretrained import find_pretrained, require_fits
from gptlab.model.kernels.ops import implementations
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.hardware.rng import seed_everything
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.provenance import CodeSnapshot, provenance
from gptlab.training.compilation import Passes, keep_compiled, make_passes
from gptlab.training.horizon import Finish
from gptlab.training.loop import Work
from gptlab.training.state import TrainState, build_state


@dataclass(slots=True)
class Session:
    """Everything that training needs, before the first file of the run is written."""

    config: RunConfig
    place: Place
    data: PreparedData
    state: TrainState
    passes: Passes
    work: Work
    finish: Finish
    counts: ParameterCounts
    flops: FlopsPerToken
    eval_sequences: int
    rows_per_epoch: int
    start: Start | None
    """None: the initial weights come from the seed or from a checkpoint."""

    def provenance(self, argv: Sequence[str], code: CodeSnapshot, from_run: str | None = None) -> dict[str, object]:
        record = provenance(
            argv, code, self.place,
            data_fingerprint=self.data.fingerprint, tokenizer_fingerprint=self.data.tokenizer.fingerprint,
            world_size=self.work.group.size, from_run=from_run,
        )  # fmt: skip
        return record | ({} if self.start is None else {"init_from_fingerprint": self.start.fingerprint})

    def implementations(self) -> dict[str, str]:
        """{part of the run: what computes it}. `compile` is final after the warm-up, in which a compiler may fail."""
        return implementations(self.place.device, self.place.dtype) | {"compile": self.passes.compiler}


def open_session(
    config: RunConfig,
    place: Place,
    console: Console,
    *,
    restored: bool = False,
    group: Group | None = None,
    parts: OwnParts = NO_PARTS,
) -> Session:
    """Prepare the data and build the run. UserError where that is impossible; no file of the run is written yet.

    `restored`: a checkpoint will bring the weights, so those of `init_from` are not needed. `group`: the processes that
    train together; rank 0 prepares the data, and the others find it in the cache (or prepare it, once a machine, where
    they do not share rank 0's cache). `parts`: what a Python caller puts in place of the configuration's.
    """
    group = group or Group()
    _require_possible_size(config.parallel, group.size)
    pretrained = None if restored or config.init_from is None else find_pretrained(config.init_from)
    if pretrained is not None:
        require_fits(config.model, pretrained.model, pretrained.name)
    keep_compiled()
    seed_everything(config.seed, place.device)
    bundle = None if config.eval.core_every_steps is None else _core_bundle(config, console)
    with rank_0_first("data prepared", group) if group.size > 1 else nullcontext():
        data = prepare(config.data, config.tokenizer, console=console)
    if pretrained is not None:
        require_tokenizer(data.tokenizer, pretrained, console.warn)
    config = _completed(config, data, place)
    prompts = config.sample.prompts or validation_prompts(data.val, data.tokenizer, config.sample.from_validation)
    rows = (parts.rows or _rows)(data, config)
    held_out = validation_rows(data.val, config.model.seq_len, data.tokenizer.bos_id, config.eval.tokens)
    if group.size > 1:
        require_same_mode(config.parallel.mode, group)
    state = build_state(
        config, rows, device=place.device, compute_dtype=place.dtype, group=group,
        change_model=parts.change_model, make_optimizer=parts.make_optimizer,
    )  # fmt: skip
    start = None if pretrained is None else load_start_weights(state, pretrained, console.warn)
    passes = make_passes(state, config, console.warn)
    counts, flops = parameter_counts(state.model), flops_per_token(state.model)
    finish = Finish.of(
        config.horizon,
        tokens_per_step=config.batch.total_tokens,
        flops_per_token=flops.total,
        scaling_params=counts.scaling,
    )
    eval_sequences = min(config.eval_sequences, held_out.rows_per_epoch)
    work = Work(
        config,
        finish,
        passes.loss_sum,
        _validation(config, data, held_out, state, passes, group, eval_sequences),
        _sampling(config, data.tokenizer, state, group),
        None if bundle is None else _core(config, bundle, data.tokenizer, state, group),
        group,
        prompts,
    )
    return Session(
        config, place, data, state, passes, work, finish, counts, flops, eval_sequences, rows.rows_per_epoch, start
    )


def _completed(config: RunConfig, data: PreparedData, place: Place) -> RunConfig:
    """The configuration with what follows from the data and the machine, and must stay so when the run is resumed."""
    tokenizer = data.tokenizer
    if config.model.vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"model.vocab_size = {config.model.vocab_size}, but the tokenizer has {tokenizer.vocab_size} entries; "
            "leave model.vocab_size out"
        )
    _require_encodable(config.sample.prompts, tokenizer)
    runtime = config.runtime
    if config.parallel.exact_any_world_size:  # the bits of a matrix product depend on the number of threads
        runtime = replace(runtime, threads=place.threads)
    return replace(
        config,
        model=replace(config.model, vocab_size=tokenizer.vocab_size),
        # A resumed run, a repeated one and `gptlab eval` split the text as this run does.
        data=replace(config.data, split=data.split),
        runtime=runtime,
    )


def _validation(
    config: RunConfig,
    data: PreparedData,
    held_out: RowSource,
    state: TrainState,
    passes: Passes,
    group: Group,
    eval_sequences: int,
) -> Callable[[], Evaluation]:
    of_training = None
    if config.eval.train_tokens is not None:
        bos_id, tokens = data.tokenizer.bos_id, config.eval.train_tokens
        of_training = validation_rows(data.train, config.model.seq_len, bos_id, tokens)

    def measure(rows: RowSource) -> Evaluation:
        with state.strategy.in_passes():
            return evaluate(
                passes.logits, rows, data.tokenizer.token_bytes,
                device=state.device, micro_sequences=eval_sequences, module=state.model, group=group,
            )  # fmt: skip

    def validate() -> Evaluation:
        train_loss = None if of_training is None else measure(of_training).val_loss
        return replace(measure(held_out), train_loss=train_loss)

    return validate


def _sampling(
    config: RunConfig, tokenizer: Tokenizer, state: TrainState, group: Group
) -> Callable[[Sequence[str]], list[str]]:
    wanted = config.sample

    def sample(prompts: Sequence[str]) -> list[str]:
        streams = [
            sample_text(
                state.model, tokenizer, prompt,
                max_tokens=wanted.max_tokens, temperature=wanted.temperature, top_k=wanted.top_k, seed=config.seed,
            )
            for prompt in prompts
        ]  # fmt: skip
        with state.strategy.whole_weights():
            texts = drawn_together(streams, group, timed=True)
        return [prompt + "".join(pieces) for prompt, pieces in zip(prompts, texts, strict=True)]

    return sample


def _core(
    config: RunConfig, bundle: Path, tokenizer: Tokenizer, state: TrainState, group: Group
) -> Callable[[], CoreResult]:
    seq_len = config.model.seq_len
    tasks = encode_tasks(read_tasks(bundle, config.eval.core_examples), tokenizer, seq_len)

    def measure() -> CoreResult:
        with state.strategy.whole_weights():
            return measure_core(
                gpt_logits(state.model), tasks,
                device=state.device, max_pass_tokens=config.eval_sequences * seq_len, module=state.model, group=group,
            )  # fmt: skip

    return measure


def _require_possible_size(parallel: ParallelConfig, world_size: int) -> None:
    if parallel.exact_any_world_size and world_size not in EXACT_WORLD_SIZES:
        sizes, nearest = ", ".join(map(str, EXACT_WORLD_SIZES)), max(n for n in EXACT_WORLD_SIZES if n < world_size)
        reason = f"its order of additions is made for {sizes} processes, not for {world_size}"
        raise ConfigError("parallel.exact_any_world_size", True, reason, f"{nearest} processes")


def _rows(data: PreparedData, config: RunConfig) -> RowSource:
    bos_id = data.tokenizer.bos_id
    return make_rows(data.train, config.data, config.model.seq_len, bos_id, config.seed, data.folder)


def _core_bundle(config: RunConfig, console: Console) -> Path | None:
    """Where the tasks of CORE are; None, with a warning, where they were not downloaded. ConfigError for a folder that
    is not a bundle."""
    cache = cache_root(config.data.cache_dir)
    bundle = find_bundle(config.eval.core_dir, cache)
    if bundle is None:
        console.warn(
            f"this run goes without CORE, which eval.core_every_steps = {config.eval.core_every_steps} asks for: there "
            f"is no evaluation bundle in {core_folder(cache)}; `gptlab data prepare core` gets it"
        )
    return bundle


def _require_encodable(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """ConfigError for a prompt that cannot be continued: at the start, not at the first sample."""
    for prompt in prompts:
        try:
            tokens = tokenizer.encode(prompt)
        except UserError as error:
            raise ConfigError("sample.prompts", prompt, str(error)) from None
        if not len(tokens) and tokenizer.bos_id is None:
            raise ConfigError("sample.prompts", prompt, "this tokenizer has no BOS: give it a text to continue")
