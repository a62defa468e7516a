"""A page that walks through one run, from text to sample, with the run's own numbers: `assets/tour.md`, filled in.

Everything comes from the run's folder. docs/tour.md is this page of a committed example.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.base import Tokenizer
from gptlab.data.tokenizer.tokenizer import load_tokenizer
from gptlab.lab.run_record import number
from gptlab.report.curves import Columns
from gptlab.report.markdown import bpb_curve, code, fenced, prose
from gptlab.report.run_facts import RunFacts, counted, duration, plain
from gptlab.report.saved_model import SavedModel, newest_saved
from gptlab.report.token_fate import token_fate
from gptlab.runtime.records.console import short_number
from gptlab.runtime.records.table import table

COLUMNS = 120
"""Of a paragraph."""
PLACE = re.compile(r"\{\{([\w.]+)\}\}")
_BAR = 40
_SHOWN_TOKENS = 12
_ROW_TOKENS = 8
_SAMPLE_CHARACTERS = 600
_FALLBACK_TEXT = "The quick brown fox jumps over the lazy dog."

_SPLITS = {
    "hash": "A hash of its content decides on which side a document is, so that the order of files does not matter.",
    "tail": "What is held out is the end of the text.",
}
_TOKENIZERS = {
    "bpe": "It was learned from the training text: starting from the 256 bytes, the pair of neighbors that occurs most "
    "often became a token of its own, again and again (byte-pair encoding).",
    "gpt2": "It is that of GPT-2.",
    "byte": "Each of the 256 bytes is a token.",
    "char": "Each character is a token.",
}
_ROWS = {
    "packed": "Documents are packed into rows so that almost nothing is padded; each begins with the token BOS.",
    "sequential": "A row is the next {} tokens of the text.",
    "random": "A row is {} tokens from a random place of the text.",
}
_SCHEDULES = {
    "trapezoid": "is constant, then falls linearly.",
    "cosine": "falls along half a cosine.",
}
_OPTIMIZERS = {
    "muon": "Muon turns the gradients of the matrices inside the blocks into steps of equal size in every direction; "
    "AdamW does the rest, each weight with a step size of its own.",
    "adamw": "AdamW gives each weight a step size of its own, by the mean and the spread of its gradients so far.",
}


def tour(facts: RunFacts, *, ascii: bool = False) -> str:
    """The page; `ascii`: its curve has such characters alone. UserError for a run that has not trained, and for a
    damaged folder."""
    if "imported" in facts.record.provenance or not len(facts.metrics.train["step"]):
        raise UserError(f"{facts.record.path} has no training step to walk through: name a run that has trained")
    values = values_of(facts, ascii=ascii)

    def value(found: re.Match[str]) -> str:
        return _field(facts, found[1]) if "." in found[1] else values[found[1]]

    parts = (PLACE.sub(value, part) for part in template().split("\n\n"))
    return "\n\n".join(filter(None, map(_wrapped, parts))).rstrip() + "\n"


def template() -> str:
    """`{{name}}` is to be replaced by that one of `values_of`, `{{group.name}}` by that field of the configuration."""
    return (resources.files("gptlab.report") / "assets" / "tour.md").read_text(encoding="utf-8")


def _wrapped(part: str) -> str:
    if part.startswith(("#", "`" * 3)):
        return part
    words = " ".join(part.split())
    return textwrap.fill(words, COLUMNS, break_long_words=False, break_on_hyphens=False)


def values_of(facts: RunFacts, *, ascii: bool) -> dict[str, str]:
    """What fills the template, by the names in it."""
    record, train, reached = facts.record, facts.metrics.train, facts.reached
    fate, saved = dict(token_fate(facts)), newest_saved(record.directory.checkpoints_path)
    tokenizer = load_tokenizer(record.directory.tokenizer_path)
    prompt = next(iter(facts.samples()), "")
    field = partial(_field, facts)
    tokens = _tokens(prompt or _FALLBACK_TEXT, tokenizer, begins=field("data.rows") == "packed")
    layers, source = counted(record.fields.get("model.n_layer"), "layer"), field("data.source")
    mfu, speed = _finite(number(record.summary.get("mfu_percent"))), _ratio(reached.tokens, reached.seconds)
    flops, curve = _ratio(reached.flops, reached.tokens), bpb_curve(facts, ascii=ascii)
    return {
        "command": "" if facts.typed is None else fenced(plain(facts.typed)),
        "name": code(facts.name),
        "machine": _machine(record.provenance),
        "sentence": prose(facts.sentence()),
        "time": _time(facts.time()),
        "source": {"stdlib": "the sources of Python's standard library"}.get(source, source),
        "training_text": fate.get("training text", "the most of it"),
        "validation_text": fate.get("validation text", "the rest"),
        "split": _split(facts),
        "tokenizer": _TOKENIZERS.get(tokenizer.kind, ""),
        "bytes_per_token": _bytes_per_token(record.provenance.get("corpus")),
        "text": "a text of this run" if prompt else "an example sentence",
        "tokens": fenced(table([(str(one), text) for one, text in tokens], "><")),
        "rows": _ROWS.get(field("data.rows"), "").format(field("model.seq_len")),
        "row": _row([text for _, text in tokens[: _ROW_TOKENS + 1]]),
        "epoch": _epoch(fate),
        "micro_batches": _micro_batches(facts),
        "layers": layers,
        **_of_checkpoint(facts, saved),
        "sizing": _sizing(facts, layers),
        "compilation": _compilation(facts),
        "first_step": f"{train['step'][0]:,.0f}",
        "first_loss": f"{train['loss'][0]:.4f}",
        "guess_loss": f"{math.log(max(1.0, _number(facts, 'model.vocab_size'))):.4f}",
        "optimizer": _optimizer(facts),
        "schedule": _schedule(facts),
        "steps": _steps(train),
        "steps_made": counted(int(_finite(reached.steps)), "step"),
        "training_time": duration(math.nan if reached.seconds is None else reached.seconds),
        "tokens_per_second": f"{speed:,.0f}" if speed else "an unknown number of",
        "flops_per_token": short_number(flops) if flops else "a fixed number of",
        "mfu": f"That is {mfu:.1f}% of what the machine could compute at most (MFU)." if mfu else "",
        "horizon": _horizon(facts),
        "evaluation": _evaluation(facts),
        "curve": fenced(curve) if curve else "",
        **_of_sample(facts),
        "commands": _commands(facts, saved is not None),
    }


def _field(facts: RunFacts, name: str) -> str:
    """A field of the configuration, as it is read in a sentence."""
    value = facts.record.fields.get(name)
    return f"{value:,}" if type(value) is int else prose(plain(value))


def _number(facts: RunFacts, name: str) -> float:
    """A field that is a number; 0 where it is none."""
    return _finite(number(facts.record.fields.get(name)))


def _machine(record: Mapping[str, Any]) -> str:
    peak = _finite(number(record.get("peak_flops_per_second")))
    speed = f", {peak / 1e9:,.0f} GFLOP/s at most ({plain(record.get('peak_source'))})" if peak else ""
    return prose(f"{plain(record.get('device_name'))}, {counted(record.get('threads'), 'thread')}, in "
                 f"{plain(record.get('dtype'))}{speed}")  # fmt: skip


def _time(parts: Sequence[tuple[str, float]]) -> str:
    total = sum(seconds for _, seconds in parts)
    rows = [(part, duration(seconds), "#" * round(_BAR * seconds / total)) for part, seconds in parts]
    return fenced(table(rows, "<><")) if rows else "How long everything took is known once a run has finished."


def _split(facts: RunFacts) -> str:
    if facts.record.fields.get("data.val_source"):
        return f"All of {_field(facts, 'data.val_source')} is held out."
    return _SPLITS.get(_field(facts, "data.split"), "")


def _bytes_per_token(corpus: Any) -> str:
    text = corpus.get("train") if isinstance(corpus, dict) else None
    known = [_finite(number(text.get(name))) for name in ("bytes", "tokens")] if isinstance(text, dict) else [0, 0]
    return f"On average a token stands for {known[0] / known[1]:.2f} bytes." if all(known) else ""


def _tokens(text: str, tokenizer: Tokenizer, *, begins: bool) -> list[tuple[int, str]]:
    """(id, its bytes as text) of the beginning of `text`, after BOS where it `begins` a row."""
    ids = [int(one) for one in tokenizer.encode(text)[:_SHOWN_TOKENS]]
    found = [(one, _visible(tokenizer.decode_bytes([one]))) for one in ids]
    return [(tokenizer.bos_id, "BOS"), *found] if begins and tokenizer.bos_id is not None else found


def _row(texts: Sequence[str]) -> str:
    rows = [("input", *texts[:-1], "..."), ("target", *texts[1:], "...")]
    return fenced(table(rows, "<" * (len(texts) + 1)))


def _epoch(fate: Mapping[str, str]) -> str:
    if not fate:
        return ""
    rows, epochs = fate["one epoch"].partition(":")[0], re.match(r"[\d.]+", fate["epochs"])
    return f"One epoch is {rows}, and this run trained for {epochs[0] if epochs else 'some'} epochs."


def _micro_batches(facts: RunFacts) -> str:
    row_tokens = _number(facts, "batch.micro_sequences") * _number(facts, "model.seq_len")
    count = round(_number(facts, "batch.total_tokens") / row_tokens) if row_tokens else 0
    return f"{count:,} micro-batches" if count > 1 else "one micro-batch"


def _of_checkpoint(facts: RunFacts, saved: SavedModel | None) -> dict[str, str]:
    """What is said of the newest checkpoint."""
    if saved is None:
        none = "This run has no checkpoint: its configuration, or its end, left none."
        return {"weights": "", "shapes": "", "checkpoints": none, "files": ""}
    beside = "beside the shape of what flows through them (rows, tokens, numbers)"
    sizes = ("batch.micro_sequences", "model.seq_len", "model.n_embd", "model.vocab_size")
    files = sorted(file for file in saved.path.iterdir() if file.is_file())
    return {
        "weights": f"These are its weights, {saved.parameters:,} numbers in all, {beside}:",
        "shapes": fenced(saved.shapes(*(_field(facts, name) for name in sizes))),
        "checkpoints": (
            f"`--resume` continues a run from its newest checkpoint, bit for bit. {code(saved.path.name)} holds "
            "weights, moments of the optimizer, random generators, and the place in the data."
        ),
        "files": fenced(table([(f"{file.stat().st_size:,}", plain(file.name)) for file in files], "><")),
    }


def _sizing(facts: RunFacts, layers: str) -> str:
    rate = _finite(number(facts.record.provenance.get("training_flops_per_second")))
    unit, amount = facts.record.fields.get("horizon.unit"), _number(facts, "horizon.amount")
    if not rate or unit != "seconds":
        return (
            "Layers and width are what was asked for, or what the recipe gives. The recipe `quickstart` times "
            "steps on the machine instead, and chooses the size that its minutes can train."
        )
    return (
        f"How large may a model be that {duration(amount)} can train? Steps were timed on this machine before: "
        f"{rate / 1e9:,.0f} GFLOP/s, so {duration(amount)} make {amount * rate:.2g} operations. A larger model "
        "learns more from each token, but sees fewer. By measured trade-offs, which the recipe names, that is "
        f"{layers} of width {_field(facts, 'model.n_embd')}, and steps of "
        f"{_field(facts, 'batch.total_tokens')} tokens."
    )


def _compilation(facts: RunFacts) -> str:
    recorded = facts.record.provenance.get("implementations")
    found = recorded if isinstance(recorded, dict) else {}
    how = plain(found.get("compile", "off"))
    seconds = _finite(number(facts.record.summary.get("compile_seconds")))
    took = f" in {duration(seconds)} (most of it is cached after the first time)" if seconds else ""
    if how.startswith("inductor"):
        return prose(
            f"torch.compile turned the model into code for this machine ({how}){took}. A first step on made-up "
            "tokens made it do so; it was undone to the last bit, and the clock of the training counts none of it."
        )
    if found.get("kernels", "none") != "none":
        by_library = "PyTorch multiplies its matrices; what is between them (norms, activations) is computed"
        by_kernels = "its matrix products, and what is between them (norms, activations, the loss), are computed"
        return prose(
            f"The model was not compiled: {by_kernels if found.get('products') == 'kernels' else by_library} "
            "by gptlab's own C++ kernels. They are built once, for all models."
        )
    return "The model runs as PyTorch executes it, operation by operation: it was not compiled."


def _optimizer(facts: RunFacts) -> str:
    if facts.record.provenance.get("own_parts"):
        return "the caller's own optimizer changes the weights."
    return _OPTIMIZERS.get(_field(facts, "optim.matrix_optimizer"), "")


def _schedule(facts: RunFacts) -> str:
    shape, warmup = _SCHEDULES.get(_field(facts, "schedule.kind")), _number(facts, "schedule.warmup_fraction")
    if shape is None:
        return ""
    rises = f"rises in the first {100 * warmup:.3g}% of the run, then " if warmup > 0 else ""
    return f"The learning rate (`lr_scale` is its share of the full one) {rises}{shape}"


def _steps(train: Columns) -> str:
    """Steps 1, 2, 5, 10, 20, ... and the last."""
    wanted = [factor * 10**power for power in range(12) for factor in (1, 2, 5)]
    places = np.unique(np.searchsorted(train["step"], [one for one in wanted if one <= train["step"][-1]]))
    rows = [
        (f"{train['step'][at]:,.0f}", f"{train['loss'][at]:.4f}", f"{train['lr_scale'][at]:.2f}",
         f"{train['grad_norm'][at]:.3f}", duration(train["train_seconds"][at]))
        for at in dict.fromkeys([*places.tolist(), len(train["step"]) - 1])
    ]  # fmt: skip
    return fenced(table([("step", "loss", "lr_scale", "gradient norm", "on the clock"), *rows], ">>>>>"))


def _ratio(over: float | None, under: float | None) -> float:
    """0 where it is unknown."""
    above, below = _finite(over), _finite(under)
    return above / below if below else 0.0


def _horizon(facts: RunFacts) -> str:
    loss = facts.target_loss
    until = "" if loss is None else f"at the first validation with a loss of {loss:.10g} or less, at the latest "
    if facts.record.fields.get("horizon.unit") != "seconds":
        return f"The run ends {until}after {prose(facts.length)}."
    last = "the first step that ends past the budget"
    return f"The run ends {until}after {last}." if until else f"{last.capitalize()} is the last."


def _evaluation(facts: RunFacts) -> str:
    last = facts.validations[-1] if facts.validations else None
    if last is None:
        return "This run was not validated."
    if not all(map(math.isfinite, (last.loss, last.bpb))) or not last.bpb > 0:
        return (
            f"After step {last.step:,}: {last.loss:.4f} nats a token, {last.bpb:.4f} bits per byte. What is not finite "
            "was computed with broken weights."
        )
    bits = last.loss / math.log(2)
    return (
        f"After step {last.step:,}: {last.loss:.4f} nats a token, which are {bits:.3f} bits (divided by ln 2), and "
        f"{last.bpb:.4f} bits per byte."
    )


def _of_sample(facts: RunFacts) -> dict[str, str]:
    """What is said of the last sample."""
    last = max((samples[-1] for samples in facts.samples().values()), key=lambda one: one.step, default=None)
    if last is None:
        return {"sample_at": "This run drew no samples.", "sample": ""}
    return {
        "sample_at": f"At step {last.step:,}, after the prompt {code(last.prompt)}:",
        "sample": fenced((last.prompt + last.text)[:_SAMPLE_CHARACTERS]),
    }


def _commands(facts: RunFacts, has_checkpoint: bool) -> str:
    run = facts.folder
    lines = [
        (facts.training("from", seed="7"), "is another seed as good?"),
        (f"gptlab report {run}", "all curves, as a page"),
    ]
    if has_checkpoint and facts.status != "running":
        lines.insert(0, (facts.train_on, "train it on"))
    if has_checkpoint and "change_model" not in facts.own_parts:
        lines.insert(0, (f"gptlab sample {run} --interactive", "talk to it"))
    return fenced(table([(command, f"# {what}") for command, what in lines], "<<"))


def _visible(content: bytes) -> str:
    """The bytes of a token, with blanks that can be seen."""
    text = content.decode("utf-8", "backslashreplace").replace(" ", "\N{MIDDLE DOT}")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _finite(value: Any) -> float:
    """0 for what is unknown or not finite."""
    return value if isinstance(value, float) and math.isfinite(value) else 0.0
