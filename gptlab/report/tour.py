"""A page that walks through one run, from text to sample, with the run's own numbers: `assets/tour.md`, filled in.

Everything comes from the run's folder. docs/tour.md is this page of a committed example.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.base import Tokenizer
from gptlab.data.tokenizer.tokenizer import load_tokenizer
from gptlab.lab.run_record import number
from gptlab.report.markdown import bpb_curve, code, fenced, prose
from gptlab.report.run_facts import RunFacts, Sample, counted, duration, plain, short
from gptlab.report.saved_model import SavedModel, newest_saved
from gptlab.report.token_fate import token_fate
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
    "trapezoid": "The learning rate (`lr_scale` is its share of the full one) is constant, then falls linearly.",
    "cosine": "The learning rate (`lr_scale` is its share of the full one) falls along half a cosine.",
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
    return filled(template(), Tour(facts, ascii))


def template() -> str:
    return (resources.files("gptlab.report") / "assets" / "tour.md").read_text(encoding="utf-8")


def filled(text: str, values: Tour) -> str:
    """With `{{name}}` replaced by the attribute of `values`, `{{group.name}}` by that field, and paragraphs wrapped."""

    def value(found: re.Match[str]) -> str:
        return values.field(found[1]) if "." in found[1] else str(getattr(values, found[1]))

    parts = (PLACE.sub(value, part) for part in text.split("\n\n"))
    return "\n\n".join(filter(None, map(_wrapped, parts))).rstrip() + "\n"


def _wrapped(part: str) -> str:
    if part.startswith(("#", "`" * 3)):
        return part
    words = " ".join(part.split())
    return textwrap.fill(words, COLUMNS, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Tour:
    """What fills the template, by the names in it."""

    facts: RunFacts
    ascii: bool = False

    def field(self, name: str) -> str:
        """A field of the configuration, as it is read in a sentence."""
        value = self.facts.record.fields.get(name)
        return f"{value:,}" if type(value) is int else prose(plain(value))

    def _number(self, name: str) -> float:
        """A field that is a number; 0 where it is none."""
        return _finite(number(self.facts.record.fields.get(name)))

    @property
    def command(self) -> str:
        return "" if self.facts.typed is None else fenced(plain(self.facts.typed))

    @property
    def name(self) -> str:
        return code(self.facts.name)

    @property
    def machine(self) -> str:
        record = self.facts.record.provenance
        peak = _finite(number(record.get("peak_flops_per_second")))
        speed = f", {peak / 1e9:,.0f} GFLOP/s at most ({plain(record.get('peak_source'))})" if peak else ""
        return prose(f"{plain(record.get('device_name'))}, {counted(record.get('threads'), 'thread')}, in "
                     f"{plain(record.get('dtype'))}{speed}")  # fmt: skip

    @property
    def sentence(self) -> str:
        return prose(self.facts.sentence())

    @property
    def time(self) -> str:
        parts = self.facts.time()
        total = sum(seconds for _, seconds in parts)
        rows = [(part, duration(seconds), "#" * round(_BAR * seconds / total)) for part, seconds in parts]
        return fenced(table(rows, "<><")) if rows else "How long everything took is known once a run has finished."

    @property
    def source(self) -> str:
        known = {"stdlib": "the sources of Python's standard library"}
        return known.get(self.field("data.source"), self.field("data.source"))

    @cached_property
    def _fate(self) -> Mapping[str, str]:
        return dict(token_fate(self.facts))

    @property
    def training_text(self) -> str:
        return self._fate.get("training text", "the most of it")

    @property
    def validation_text(self) -> str:
        return self._fate.get("validation text", "the rest")

    @property
    def split(self) -> str:
        if self.facts.record.fields.get("data.val_source"):
            return f"All of {self.field('data.val_source')} is held out."
        return _SPLITS.get(self.field("data.split"), "")

    @property
    def tokenizer(self) -> str:
        return _TOKENIZERS.get(self._tokenizer.kind, "")

    @property
    def bytes_per_token(self) -> str:
        counts = self.facts.record.provenance.get("corpus")
        text = counts.get("train") if isinstance(counts, dict) else None
        known = [_finite(number(text.get(name))) for name in ("bytes", "tokens")] if isinstance(text, dict) else [0, 0]
        return f"On average a token stands for {known[0] / known[1]:.2f} bytes." if all(known) else ""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.facts.record.directory.tokenizer_path)

    @cached_property
    def _tokens(self) -> list[tuple[int, str]]:
        """(id, its bytes as text) of the beginning of a prompt, with BOS where rows begin with it."""
        text = next(iter(self.facts.samples()), "") or _FALLBACK_TEXT
        ids = [int(one) for one in self._tokenizer.encode(text)[:_SHOWN_TOKENS]]
        found = [(one, _visible(self._tokenizer.decode_bytes([one]))) for one in ids]
        bos = self._tokenizer.bos_id
        return found if bos is None else [(bos, "BOS"), *found]

    @property
    def tokens(self) -> str:
        return fenced(table([(str(one), text) for one, text in self._tokens], "><"))

    @property
    def rows(self) -> str:
        return _ROWS.get(self.field("data.rows"), "").format(self.field("model.seq_len"))

    @property
    def row(self) -> str:
        texts = [text for _, text in self._tokens[: _ROW_TOKENS + 1]]
        rows = [("input", *texts[:-1], "..."), ("target", *texts[1:], "...")]
        return fenced(table(rows, "<" * (len(texts) + 1)))

    @property
    def epoch(self) -> str:
        if not self._fate:
            return ""
        rows, epochs = self._fate["one epoch"].partition(":")[0], re.match(r"[\d.]+", self._fate["epochs"])
        return f"One epoch is {rows}, and this run trained for {epochs[0] if epochs else 'some'} epochs."

    @property
    def micro_batches(self) -> str:
        row_tokens = self._number("batch.micro_sequences") * self._number("model.seq_len")
        count = round(self._number("batch.total_tokens") / row_tokens) if row_tokens else 0
        return f"{count:,} micro-batches" if count > 1 else "one micro-batch"

    @cached_property
    def _saved(self) -> SavedModel | None:
        return newest_saved(self.facts.record.directory.checkpoints_path)

    @property
    def layers(self) -> str:
        return counted(self.facts.record.fields.get("model.n_layer"), "layer")

    @property
    def weights(self) -> str:
        beside = "beside the shape of what flows through them (rows, tokens, numbers)"
        return f"These are its weights, {self._saved.parameters:,} numbers in all, {beside}:" if self._saved else ""

    @property
    def shapes(self) -> str:
        sizes = [self.field(f"{name}") for name in (
            "batch.micro_sequences", "model.seq_len", "model.n_embd", "model.vocab_size")]  # fmt: skip
        return fenced(self._saved.shapes(*sizes)) if self._saved else ""

    @property
    def checkpoints(self) -> str:
        if self._saved is None:
            return "This run has no checkpoint: its configuration, or its end, left none."
        return (
            f"`--resume` continues a run from its newest checkpoint, bit for bit. {code(self._saved.path.name)} holds "
            "weights, moments of the optimizer, random generators, and the place in the data."
        )

    @property
    def files(self) -> str:
        if self._saved is None:
            return ""
        files = sorted(file for file in self._saved.path.iterdir() if file.is_file())
        return fenced(table([(f"{file.stat().st_size:,}", plain(file.name)) for file in files], "><"))

    @property
    def sizing(self) -> str:
        rate = _finite(number(self.facts.record.provenance.get("training_flops_per_second")))
        unit, amount = self.facts.record.fields.get("horizon.unit"), self._number("horizon.amount")
        if not rate or unit != "seconds":
            return (
                "Layers and width are what was asked for, or what the recipe gives. The recipe `quickstart` times "
                "steps on the machine instead, and chooses the size that its minutes can train."
            )
        return (
            f"How large may a model be that {duration(amount)} can train? Steps were timed on this machine before: "
            f"{rate / 1e9:,.0f} GFLOP/s, so {duration(amount)} make {amount * rate:.2g} operations. A larger model "
            "learns more from each token, but sees fewer. By measured trade-offs, which the recipe names, that is "
            f"{self.layers} of width {self.field('model.n_embd')}, and steps of "
            f"{self.field('batch.total_tokens')} tokens."
        )

    @property
    def compilation(self) -> str:
        recorded = self.facts.record.provenance.get("implementations")
        found = recorded if isinstance(recorded, dict) else {}
        how = plain(found.get("compile", "off"))
        seconds = _finite(number(self.facts.record.summary.get("compile_seconds")))
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

    @property
    def first_loss(self) -> str:
        return f"{self.facts.metrics.train['loss'][0]:.4f}"

    @property
    def guess_loss(self) -> str:
        return f"{math.log(max(1.0, self._number('model.vocab_size'))):.4f}"

    @property
    def optimizer(self) -> str:
        if self.facts.record.provenance.get("own_parts"):
            return "the caller's own optimizer changes the weights."
        return _OPTIMIZERS.get(self.field("optim.matrix_optimizer"), "")

    @property
    def schedule(self) -> str:
        return _SCHEDULES.get(self.field("schedule.kind"), "")

    @property
    def steps(self) -> str:
        """Steps 1, 2, 5, 10, 20, ... and the last."""
        train = self.facts.metrics.train
        wanted = [factor * 10**power for power in range(12) for factor in (1, 2, 5)]
        places = np.unique(np.searchsorted(train["step"], [one for one in wanted if one <= train["step"][-1]]))
        rows = [
            (f"{train['step'][at]:,.0f}", f"{train['loss'][at]:.4f}", f"{train['lr_scale'][at]:.2f}",
             f"{train['grad_norm'][at]:.3f}", duration(train["train_seconds"][at]))
            for at in dict.fromkeys([*places.tolist(), len(train["step"]) - 1])
        ]  # fmt: skip
        return fenced(table([("step", "loss", "lr_scale", "gradient norm", "on the clock"), *rows], ">>>>>"))

    @property
    def steps_made(self) -> str:
        return counted(int(self.facts.metrics.train["step"][-1]), "step")

    @property
    def training_time(self) -> str:
        return duration(self.facts.metrics.train["train_seconds"][-1])

    @property
    def tokens_per_second(self) -> str:
        last = self.facts.metrics.last_step
        tokens, seconds = (_finite(number(last.get(name))) for name in ("tokens", "train_seconds"))
        return f"{tokens / seconds:,.0f}" if seconds else "an unknown number of"

    @property
    def flops_per_token(self) -> str:
        last = self.facts.metrics.last_step
        flops, tokens = (_finite(number(last.get(name))) for name in ("total_flops", "tokens"))
        return f"{short(flops / tokens)}" if tokens else "a fixed number of"

    @property
    def mfu(self) -> str:
        mfu = _finite(number(self.facts.record.summary.get("mfu_percent")))
        return f"That is {mfu:.1f}% of what the machine could compute at most (MFU)." if mfu else ""

    @property
    def horizon(self) -> str:
        if self.facts.record.fields.get("horizon.unit") == "seconds":
            return "The first step that ends past the budget is the last."
        return f"The run ends after {prose(self.facts.length)}."

    @property
    def evaluation(self) -> str:
        last = self.facts.validations[-1] if self.facts.validations else None
        if last is None or not all(map(math.isfinite, (last.loss, last.bpb))) or not last.bpb > 0:
            return "This run was not validated."
        bits = last.loss / math.log(2)
        return (
            f"After step {last.step:,}: {last.loss:.4f} nats a token, divided by ln 2, are {bits:.3f} bits; a token "
            f"stands for {bits / last.bpb:.3f} bytes, which makes {last.bpb:.4f} bits per byte."
        )

    @property
    def curve(self) -> str:
        return fenced(curve) if (curve := bpb_curve(self.facts, ascii=self.ascii)) else ""

    @cached_property
    def _sample(self) -> Sample | None:
        return max((samples[-1] for samples in self.facts.samples().values()), key=lambda one: one.step, default=None)

    @property
    def sample_at(self) -> str:
        if self._sample is None:
            return "This run drew no samples."
        return f"At step {self._sample.step:,}, after the prompt {code(self._sample.prompt)}:"

    @property
    def sample(self) -> str:
        if self._sample is None:
            return ""
        return fenced((self._sample.prompt + self._sample.text)[:_SAMPLE_CHARACTERS])

    @property
    def commands(self) -> str:
        run = self.facts.folder
        lines = [
            (self.facts.training("from", seed="7"), "is another seed as good?"),
            (f"gptlab report {run}", "all curves, as a page"),
        ]
        if self._saved is not None and self.facts.status != "running":
            lines.insert(0, (self.facts.train_on, "train it on"))
        if self._saved is not None and "change_model" not in self.facts.own_parts:
            lines.insert(0, (f"gptlab sample {run} --interactive", "talk to it"))
        return fenced(table([(command, f"# {what}") for command, what in lines], "<<"))


def _visible(content: bytes) -> str:
    """The bytes of a token, with blanks that can be seen."""
    text = content.decode("utf-8", "backslashreplace").replace(" ", "\N{MIDDLE DOT}")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _finite(value: Any) -> float:
    """0 for what is unknown or not finite."""
    return value if isinstance(value, float) and math.isfinite(value) else 0.0
