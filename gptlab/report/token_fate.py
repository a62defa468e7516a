"""What became of the tokens of a run's corpus: how many were trained on, how often, and how many its rows dropped."""

from __future__ import annotations

import math
from typing import Any

from gptlab.lab.run_record import number
from gptlab.report.run_facts import RunFacts, counted


def token_fate(facts: RunFacts) -> list[tuple[str, str]]:
    """(what, how many), for a table; empty where run.json does not count the tokens of the corpus, or the run has not
    trained yet."""
    field, corpus = facts.record.fields, facts.record.provenance.get("corpus")
    corpus = corpus if isinstance(corpus, dict) else {}
    text, validation = (_counts(corpus.get(side)) for side in ("train", "val"))
    rows, seq_len = _count(corpus.get("rows_per_epoch")), _count(field.get("model.seq_len"))
    steps, step_tokens = _count(facts.reached.steps), _count(field.get("batch.total_tokens"))
    if not (text and rows and seq_len and steps and step_tokens):
        return []
    skipped_at = [_count(event.get("step")) for event in facts.metrics.events if event.get("what") == "skipped"]
    so_far = sum(step <= steps for step in skipped_at)  # only a finished run has a summary
    epoch_tokens, skipped = rows * seq_len, _count(facts.record.summary.get("skipped_updates", so_far))
    epochs, kind = steps * step_tokens / epoch_tokens, str(field.get("data.rows"))
    if kind == "packed" and field.get("data.long_documents") == "crop":
        kind = "cropped"
    found = [
        ("training text", _text(text)),
        ("validation text", _text(validation)),
        ("one epoch", f"{rows:,} rows of {seq_len:,} tokens: {epoch_tokens:,}"),
        ("dropped in an epoch", _dropped(kind, text["tokens"], rows, seq_len)),
        ("trained on", f"{(steps - skipped) * step_tokens:,}: {counted(steps - skipped, 'step')} of {step_tokens:,}"),
        ("skipped", f"{skipped * step_tokens:,}: {counted(skipped, 'step')} without an update" if skipped else ""),
        ("epochs", _passes(epochs, rows, kind)),
    ]
    return [(what, amount) for what, amount in found if amount]


def _dropped(kind: str, tokens: int, rows: int, seq_len: int) -> str:
    """Tokens that are in no row of an epoch, by how rows are made (data/rows.py)."""
    if kind == "packed":
        return "none: long documents are cut, and continue in another row"
    if kind == "cropped":  # How many depends on which documents an epoch takes, which only the packing knows.
        return "what no row has room for: `gptlab data inspect --long-documents crop` counts it"
    if kind == "sequential":
        return f"{max(0, tokens - 1 - rows * seq_len):,}: the last ones, which fill no row"
    return ""


def _passes(epochs: float, rows: int, kind: str) -> str:
    if kind == "random":
        # So many independent windows leave out a token with the probability of a Poisson variable that is zero.
        return f"{epochs:.2f}; windows are drawn with replacement: about {math.exp(-epochs):.1%} of tokens were in none"
    if epochs < 1:
        return f"{epochs:.2f}: {rows - round(rows * epochs):,} rows ({1 - epochs:.0%}) were not reached"
    if kind == "cropped":
        return f"{epochs:.2f}: the stream of documents goes on, so that all epochs have rows of their own"
    fewest, whole = math.floor(epochs), epochs == math.floor(epochs)
    return f"{epochs:.2f}: each row was read {fewest}{'' if whole else f' or {fewest + 1}'} times"


def _text(counts: dict[str, int]) -> str:
    parts = (counted(counts[name], name[:-1]) for name in ("tokens", "bytes", "documents") if counts.get(name))
    return ", ".join(parts)


def _counts(value: Any) -> dict[str, int]:
    """Empty unless there are tokens to count."""
    known = {name: _count(count) for name, count in value.items()} if isinstance(value, dict) else {}
    return known if known.get("tokens") else {}


def _count(value: Any) -> int:
    """0 for what is no natural number."""
    known = number(value)
    return int(known) if known is not None and math.isfinite(known) and known > 0 else 0
