"""One run built from its configuration: data, model, optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.ranks import (
    agreed_place,
    rank_0_first,
    rank_0_reports,
    require_same_implementations,
    require_same_run,
)
from gptlab.app.run.saved_weights import Start, load_start_weights, require_tokenizer
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import EXACT_WORLD_SIZES, RunConfig
from gptlab.data.prepare import SIDES, PreparedData, prepare
from gptlab.data.rows import RowSource, make_rows, validation_rows
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.eval.bits_per_byte import Evaluation, evaluate, rows_of_pass
from gptlab.eval.core import CoreResult, EncodedTask, encode_tasks, measure_core
from gptlab.eval.core_tasks import core_folder, find_bundle, read_tasks
from gptlab.eval.sampling import prompt_tokens, sample_texts, validation_prompts
from gptlab.model.counting import FlopsPerToken, ParameterCounts, flops_per_token, parameter_counts
from gptlab.model.interop.pretrained import Pretrained, find_pretrained, require_fits
from gptlab.model.kernels.ops import begin_kernels, implementations
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.hardware.device import forget_peak_memory
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.hardware.rng import seed_everything
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.provenance import CodeSnapshot, provenance
from gptlab.training.compilation import Passes, make_passes, warm_up
from gptlab.training.state import Finish, TrainState, build_state


@dataclass(slots=True)
class Session:
    """Everything that training needs, before the first file of the run is written. The loop calls `evaluate`, `sample`
    and `core` (`training.loop.Work`)."""

    config: RunConfig
    place: Place
    group: Group
    data: PreparedData
    state: TrainState
    passes: Passes
    finish: Finish
    counts: ParameterCounts
    flops: FlopsPerToken
    rows_per_epoch: int
    held_out: RowSource
    of_training: RowSource | None
    """Training text on which the loss is measured at each validation. None: not measured."""
    prompts: Sequence[str]
    """Texts that samples continue. Empty: no samples."""
    tasks: Sequence[EncodedTask]
    """Of CORE. Empty: this run does not measure it."""
    start: Start | None
    """None: the initial weights come from the seed or from a checkpoint."""

    @property
    def eval_sequences(self) -> int:
        rows = rows_of_pass(self.config, self.state.device, compiled=self.passes.compiled)
        return min(rows, self.held_out.rows_per_epoch)

    def warm_up(self, warn: Callable[[str], None]) -> None:
        warm_up(self.state, self.passes, self.config, self.eval_sequences, warn)

    def evaluate(self) -> Evaluation:
        found = self._loss_on(self.held_out)
        if self.of_training is None:
            return found
        return replace(found, train_loss=self._loss_on(self.of_training).val_loss)

    def _loss_on(self, rows: RowSource) -> Evaluation:
        with self.state.strategy.in_passes():
            return evaluate(
                self.passes.token_nats, rows, self.data.tokenizer.token_bytes, device=self.state.device,
                micro_sequences=self.eval_sequences, module=self.state.model, group=self.group,
            )  # fmt: skip

    def sample(self, prompts: Sequence[str]) -> list[str]:
        """Each prompt with its continuation."""
        config = self.config
        with self.state.strategy.whole_weights():
            texts = sample_texts(
                self.state.model, self.data.tokenizer, prompts, config.sample,
                seed=config.seed, group=self.group,
            )  # fmt: skip
        return [prompt + "".join(pieces) for prompt, pieces in zip(prompts, texts, strict=True)]

    def core(self) -> CoreResult:
        pass_tokens = rows_of_pass(self.config, self.state.device) * self.config.model.seq_len
        with self.state.strategy.whole_weights():
            return measure_core(self.state.model, self.tasks, max_pass_tokens=pass_tokens, group=self.group)

    def implementations(self) -> dict[str, str]:
        """{part of the run: what computes it}. `compile` is final after the warm-up, in which a compiler may fail."""
        found = implementations(self.place.device, self.place.dtype, compiled=self.passes.compiled)
        if self.place.device.type != "cpu" or self.config.data.mask_documents:
            found["attention"] = self._attention()
        if self.state.captured is not None:
            found["steps"] = "CUDA graphs"
        return found | {"compile": self.passes.compiler}

    def _attention(self) -> str:
        from gptlab.model.kernels.torch_attention import described

        model = self.state.model
        return described(model.config, model.compute_dtype, model.platform, model.document_mask)

    def provenance(self, argv: Sequence[str], code: CodeSnapshot, from_run: str | None = None) -> dict[str, object]:
        """What run.json says of this process."""
        others = {
            "from": from_run, "world_size": self.group.size, "data_fingerprint": self.data.fingerprint,
            "tokenizer_fingerprint": self.data.tokenizer.fingerprint,
            "corpus": {side: self.data.statistics[side] for side in SIDES} | {"rows_per_epoch": self.rows_per_epoch},
            **({} if self.start is None else {"init_from_fingerprint": self.start.fingerprint}),
        }  # fmt: skip
        return provenance(argv, code, self.place, others)


def open_session(
    config: RunConfig, place: Place, console: Console, *, restored: bool = False, group: Group | None = None,
    parts: OwnParts | None = None,
) -> Session:  # fmt: skip
    """Prepare the data and build the run. UserError where that is impossible; no file of the run is written yet.

    `restored`: a checkpoint will bring the weights, so those of `init_from` are not needed. Of several processes, rank
    0 prepares the data first, and those that share its cache find it there.
    """
    group = group or Group()
    forget_peak_memory(place.device)
    if group.size > 1:
        place = agreed_place(place, config.parallel, group)
    if config.parallel.exact_any_world_size:
        with rank_0_reports(group, "any world size"):
            config = _for_any_world_size(config, place, group)
    pretrained = None if restored or config.init_from is None else _pretrained(config.init_from, config)
    seed_everything(config.seed, place.device)
    bundle = None if config.eval.core_every_steps is None else _core_bundle(config, console)
    with rank_0_first(group) if group.size > 1 else nullcontext():
        data = prepared(config, place, console)
    tokenizer = data.tokenizer
    if pretrained is not None:
        require_tokenizer(tokenizer, pretrained, console.warn)
    config, seq_len = _completed(config, data), config.model.seq_len
    prompts = _prompts(config, data) if config.sample.prompts or config.sample.from_validation else ()
    rows = None if parts is None else parts.make_rows(data, config)
    if rows is None:
        rows = make_rows(data.train, config.data, seq_len, tokenizer.bos_id, config.seed, data.folder)
    held_out = validation_rows(data.val, seq_len, tokenizer.bos_id, config.eval.tokens)
    n_train = config.eval.train_tokens
    of_training = None if n_train is None else validation_rows(data.train, seq_len, tokenizer.bos_id, n_train)
    own = {} if parts is None else parts.of_state()
    state = build_state(config, rows, device=place.device, compute_dtype=place.dtype, group=group, **own)
    _choose_products(config, place, group)
    start = None if pretrained is None else load_start_weights(state, pretrained, console.warn)
    counts, flops = parameter_counts(state.model), flops_per_token(state.model)
    finish = Finish.of(config, flops_per_token=flops.total, scaling_params=counts.scaling)
    tasks = [] if bundle is None else encode_tasks(read_tasks(bundle, config.eval.core_examples), tokenizer, seq_len)
    session = Session(
        config, place, group, data, state, make_passes(state, config, console.warn), finish, counts, flops,
        rows.rows_per_epoch, held_out, of_training, prompts, tasks, start,
    )  # fmt: skip
    return _with_masks(session) if config.data.mask_documents else session


def require_agreement(session: Session, facts: Mapping[str, object], console: Console) -> None:
    """UserError on rank 0 where the ranks would not train the same run. A warning where some have nothing to do."""
    config, group = session.config, session.group
    require_same_run(config, facts, group)
    require_same_implementations(session.implementations(), session.place, group)
    if group.size > config.micro_batches and not config.eval.only:
        console.warn(
            f"{group.size - config.micro_batches} of {group.size} processes have no micro-batch: lower "
            f"batch.micro_sequences (now {config.batch.micro_sequences}) or raise batch.total_tokens"
        )


def _choose_products(config: RunConfig, place: Place, group: Group) -> None:
    """Choose what multiplies matrices on a CPU: what was asked for, else the faster one, which rank 0 times for all."""
    from gptlab.model.kernels.choice import faster_products
    from gptlab.model.kernels.ops import multiply_by

    products = place.products
    if products == "auto" and place.device.type == "cpu":
        products = faster_products(config.model, place.dtype) if group.is_main else "kernels"
        products = group.broadcast("products", products) if group.size > 1 else products
    multiply_by("kernels" if products == "auto" else products)


def _pretrained(name: str, config: RunConfig) -> Pretrained:
    """The weights that the run starts from. ConfigError where the model does not fit them."""
    found = find_pretrained(name)
    require_fits(config.model, found.model, found.name)
    return found


def _with_masks(session: Session) -> Session:
    """The session with a model that masks documents, and with rows whose documents are counted as they are read."""
    from gptlab.data.document_capacity import DocumentCapacity

    config, bos_id = session.config, session.data.tokenizer.bos_id
    assert bos_id is not None  # packed rows begin with it
    rows = max(config.batch.micro_sequences, rows_of_pass(config, session.state.device))
    capacity = DocumentCapacity(bos_id, rows, config.model.seq_len)
    session.state.loader.rows = capacity.counted(session.state.loader.rows)
    session.held_out = capacity.counted(session.held_out)
    if session.of_training is not None:
        session.of_training = capacity.counted(session.of_training)
    session.state.model.mask_documents(bos_id, capacity)
    return session


def prepared(config: RunConfig, place: Place, console: Console) -> PreparedData:
    """The tokens, made or found in the cache, while another thread builds the C++ kernels."""
    begin_kernels(place.device, place.dtype)
    return prepare(config.data, config.tokenizer, console=console)


def _completed(config: RunConfig, data: PreparedData) -> RunConfig:
    """The configuration with what follows from the data, and must stay so when the run is resumed."""
    entries = data.tokenizer.vocab_size
    if config.model.vocab_size not in (None, entries):
        raise UserError(
            f"the tokenizer of this data has {entries} entries, not model.vocab_size = {config.model.vocab_size}: to "
            "resume a run, bring back the data that it was trained on; for a new one, leave model.vocab_size out"
        )
    # A resumed run, a repeated one and `gptlab eval` split the text as this run does.
    split = replace(config.data, split=data.split)
    return replace(config, model=replace(config.model, vocab_size=entries), data=split)


def _for_any_world_size(config: RunConfig, place: Place, group: Group) -> RunConfig:
    """With the number of threads, on which the bits of a matrix product depend. ConfigError for a number of processes
    that cannot have the bits of one."""
    if (world_size := group.size) not in EXACT_WORLD_SIZES:
        sizes, nearest = ", ".join(map(str, EXACT_WORLD_SIZES)), max(n for n in EXACT_WORLD_SIZES if n < world_size)
        reason = f"its order of additions is made for {sizes} processes, not for {world_size}"
        raise ConfigError("parallel.exact_any_world_size", True, reason, f"{nearest} processes")
    return replace(config, runtime=replace(config.runtime, threads=place.threads))


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


def _prompts(config: RunConfig, data: PreparedData) -> Sequence[str]:
    """What samples continue: the texts that were given, else beginnings of validation documents."""
    if config.sample.prompts:
        _require_encodable(config.sample.prompts, data.tokenizer)
        return config.sample.prompts
    return validation_prompts(data.val, data.tokenizer, config.sample.from_validation)


def _require_encodable(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """ConfigError for a prompt that cannot be continued: at the start, not at the first sample."""
    for prompt in prompts:
        try:
            prompt_tokens(tokenizer, prompt)
        except UserError as error:
            raise ConfigError("sample.prompts", prompt, str(error)) from None
