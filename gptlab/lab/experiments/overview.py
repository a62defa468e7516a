"""What a lab has found, from its ledger: the state of things, the log, one experiment, earlier ones like it, and
results.tsv."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptlab.config.errors import UserError, one_line, shortened
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import SECOND_SIZE, VERDICTS, Experiment, all_fields, baseline_of
from gptlab.lab.experiments.proposal import code_of
from gptlab.lab.sweep import words_of
from gptlab.runtime.files.plain_file import write_text_atomic

Experiments = Mapping[int, Experiment]

MAX_SHOWN = 2_000
"""Characters of a text that somebody proposed, where it is shown alone."""
TSV_HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription"
"""The columns of autoresearch's results.tsv."""


def is_proposal(one: Experiment) -> bool:
    """Whether somebody proposed it: not the baseline, the edit that measures the noise, or a second size."""
    return one.number > 1 and one.by != SECOND_SIZE


def proposals(experiments: Experiments) -> list[Experiment]:
    """Those that somebody proposed."""
    return [*filter(is_proposal, experiments.values())]


def mean_bpb(experiment: Experiment, like: Experiment | None = None) -> float | None:
    """Mean validation bits per byte over its seeds, or over those that `like` has too; None where there is none."""
    keys = [key for key in experiment.bpb if key[0] == "validation" and (like is None or key in like.bpb)]
    values = [experiment.bpb[key] for key in keys]
    return sum(values) / len(values) if values else None


def comparable_bpb(one: Experiment, experiments: Experiments) -> float | None:
    """Validation bits per byte as if measured with the first seeds, those with which the noise was measured: the mean
    of experiment 0, and the paired differences from there on, so that experiments with other seeds and other baselines
    can be compared. None where nothing was measured."""
    if one.number == 0:
        return mean_bpb(one, experiments.get(1))
    verdict = one.verdict or {}
    difference = 0.0 if one.says == "no-op" else verdict.get("difference")
    before = comparable_bpb(experiments[one.against], experiments)
    return None if difference is None or before is None else before + float(difference)


def verdict_counts(tried: Sequence[Experiment]) -> dict[str, int]:
    """How many have each verdict that any has; those without one are in flight."""
    counts = Counter(one.says or "in flight" for one in tried)
    return {name: counts[name] for name in (*VERDICTS, "in flight") if counts[name]}


def promotion_text(answer: Mapping[str, Any]) -> str:
    """`confirmed at depth 8: -0.0120 bpb, 5 pairs`."""
    size = "" if answer["depth"] is None else f" at depth {answer['depth']}"
    said = "confirmed" if answer["confirmed"] else "not confirmed"
    return f"{said}{size}: {answer['difference']:+z.4f} bpb, {answer['pairs']} pair{'s' * (answer['pairs'] != 1)}"


def edit_text(experiment: Experiment) -> str:
    """What it changes: `model.activation=gelu`, or the names of the changed files."""
    parts = [f"{name}={value}" for name, value in experiment.fields.items()]
    return " ".join([*parts, *experiment.files]) or "no change"


def difference_text(experiment: Experiment) -> str:
    """`-0.0120 +- 0.0040`: candidate less baseline, in bits per byte, with half its interval. Empty if not measured."""
    verdict = experiment.verdict or {}
    if (difference := verdict.get("difference")) is None:
        return ""
    half = verdict.get("half_width")
    return f"{float(difference):+z.4f}" + ("" if half is None else f" ± {float(half):.4f}")


def log_rows(experiments: Sequence[Experiment]) -> Iterator[tuple[str, ...]]:
    """A row an experiment: number, verdict, difference, pairs, what it changes, and why."""
    yield ("", "verdict", "difference", "pairs", "change", "why")
    for one in experiments:
        pairs = str((one.verdict or {}).get("pairs", ""))
        change, why = shown(edit_text(one)), shown(one.why)
        yield (str(one.number), one.says or "in flight", difference_text(one), pairs, change, why)


def shown(text: str, most: int = 60) -> str:
    """A text that somebody proposed, on one line, printable, and of at most so many characters."""
    return shortened(one_line(UserError(text)), most)


def state(lab: Lab) -> dict[str, Any]:
    """What a program that proposes needs to know, as JSON: the baseline, its noise, and every experiment so far."""
    experiments = lab.ledger.experiments()
    if 0 not in experiments:
        return {"lab": lab.settings.name, "experiments": []}
    baseline = baseline_of(experiments)
    return {
        "lab": lab.settings.name,
        "recipe": lab.settings.recipe,
        "length": lab.settings.length,
        "baseline": {
            "experiment": baseline.number, "bpb": comparable_bpb(baseline, experiments), "steps": baseline.steps,
            "fields": all_fields(baseline, experiments), "files": list(baseline.files),
        },
        "experiments": [as_json(one, experiments) for one in proposals(experiments)],
    }  # fmt: skip


def as_json(one: Experiment, experiments: Experiments) -> dict[str, Any]:
    """One experiment: its proposal, verdict, and what was measured, on one scale (`comparable_bpb`). What a program
    printed is `output_of_run`."""
    verdict = one.verdict or {}
    kept = ("difference", "half_width", "pairs", "rule")
    reason = verdict.get("reason")
    texts = {"reason": None, "output_of_run": reason} if one.says == "crashed" else {"reason": reason}
    return {
        "experiment": one.number, "fields": dict(one.fields), "files": list(one.files), "why": one.why,
        "expect": one.expect, "by": one.by, "against": one.against, "verdict": one.says or None,
        **{name: verdict.get(name) for name in kept}, **texts,
        "bpb": comparable_bpb(one, experiments), "speed": one.speed, "steps": one.steps,
    }  # fmt: skip


def status_lines(lab: Lab) -> Iterator[str]:
    """The lab in a few lines."""
    experiments, settings = lab.ledger.experiments(), lab.settings
    yield f"lab        {settings.name}: {settings.recipe}, {settings.length} of training, equal {settings.at}"
    if not lab.has_baseline(experiments):
        yield "baseline   not trained yet: if `gptlab lab new` was stopped, the same command continues"
        return
    baseline, tried = baseline_of(experiments), proposals(experiments)
    first, now = (comparable_bpb(one, experiments) for one in (experiments[0], baseline))
    if first is not None and now is not None:
        since = "" if baseline.number == 0 else f" (began with {first:.4f})"
        yield f"baseline   experiment {baseline.number}: {now:.4f} bits per byte, {baseline.steps} steps{since}"
    named = ", ".join(f"{count} {name}" for name, count in verdict_counts(tried).items())
    yield f"tried      {len(tried)}" + (f": {named}" if named else "")


def details(lab: Lab, one: Experiment) -> Iterator[str]:
    """One experiment, a fact a line."""
    verdict = one.verdict or {}
    yield f"experiment  {one.number}, against {one.against}, by {shown(one.by) or 'unknown'}, {one.time}"
    yield f"change      {shown(edit_text(one), MAX_SHOWN)}"
    yield f"why         {shown(one.why, MAX_SHOWN) or 'no reason given'}"
    if one.expect is not None:
        yield f"expected    {one.expect:+z.4f} bpb"
    if one.steps is not None:
        timed = "" if one.speed_interval is None else " ({:.3f} to {:.3f})".format(*one.speed_interval)
        yield f"training    {one.steps:,} steps, {one.speed:.3f} of the baseline's speed{timed}"
    for (where, seed), bpb in one.bpb.items():
        yield f"  seed {seed:<5} {bpb:.6f} bpb ({where})"
    rule = f" [{verdict['rule']}]" if verdict.get("rule") else ""
    if is_proposal(one):  # nothing else is judged
        yield f"verdict     {one.says or 'in flight'}{rule} {difference_text(one)}".rstrip()
    if verdict.get("reason"):
        yield f"reason      {verdict['reason']}"
    for answer in one.promotions:
        yield f"promotion   {promotion_text(answer)} against experiment 0"
    yield f"folder      {lab.experiment(one.number)}"


def best(lab: Lab) -> dict[str, Any]:
    """The baseline as it is now, and the command that trains it."""
    experiments = lab.require_baseline()
    now = baseline_of(experiments)
    code = code_of(lab, now, experiments)
    words = ["gptlab", "train", "--from", str(lab.path / "baseline"), "--steps", str(now.steps)]
    words.append("--eval.at-end")  # which the judge does for the lab's runs
    words += words_of({**lab.settings.corpus, **all_fields(now, experiments)})
    # -P: a folder that has a gptlab/ of its own, such as a checkout, would be imported before PYTHONPATH.
    python = f"PYTHONPATH={shlex.quote(str(code))} {shlex.quote(sys.executable)} -P -m "
    prefix = "" if code == lab.path / "code" else python
    return {"experiment": now.number, "bpb": comparable_bpb(now, experiments), "command": prefix + shlex.join(words)}


def mentioning(experiments: Experiments, words: Sequence[str]) -> list[Experiment]:
    """Experiments that mention all of `words`, in change, reason or verdict; those with the most mentions first."""
    found = []
    for one in proposals(experiments):
        text = f"{edit_text(one)} {one.why} {one.says} {(one.verdict or {}).get('reason', '')}".lower()
        mentions = [len(re.findall(re.escape(word.lower()), text)) for word in words]
        if all(mentions):
            found.append((-sum(mentions), one.number, one))
    return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])]


def write_results(lab: Lab) -> None:
    """results.tsv, whole: experiments in autoresearch's columns. `commit` is the experiment's number; what has no
    result has 0.0, as there."""
    with lab.ledger.locked():  # so that no worker replaces it with an older one
        experiments = lab.ledger.experiments()
        lines = [TSV_HEADER]
        judged = [one for one in proposals(experiments) if one.verdict is not None]
        for one in (experiments[0], *judged) if experiments else ():
            status = "keep" if one.number == 0 else _tsv_status(one)
            bpb = comparable_bpb(one, experiments)
            memory = max((float(cost.get("peak_mb") or 0.0) for cost in one.costs), default=0.0)
            known = 0.0 if bpb is None or not math.isfinite(bpb) else bpb
            text = "baseline" if one.number == 0 else shown(f"{one.why} ({edit_text(one)})", MAX_SHOWN)
            lines.append(f"{one.number:04}\t{known:.6f}\t{memory / 1024:.1f}\t{status}\t{text}")
        write_text_atomic(lab.path / "results.tsv", "\n".join(lines) + "\n")


def _tsv_status(one: Experiment) -> str:
    """keep | discard | crash: autoresearch has no others."""
    if one.is_kept:
        return "keep"
    return "crash" if one.says in ("crashed", "timed-out", "invalid") else "discard"
