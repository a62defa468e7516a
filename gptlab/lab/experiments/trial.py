"""One experiment from its proposal to its verdict: rules, equal time, pairs of runs, the judge, the ledger.

Every part that takes time ends with a line in the ledger, and a part that has its line is not done again: an experiment
that was killed continues where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError, one_line
from gptlab.lab.experiments import runs
from gptlab.lab.experiments.again import earlier_races, propose_again
from gptlab.lab.experiments.equal_time import (
    LAST_WORDS,
    ProcessFailedError,
    compare_speed,
    require_positive_steps,
    same_work,
    time_alone,
)
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import NOTHING, SLICES, Experiment, Slice, Verdict, all_fields, baseline_of
from gptlab.lab.experiments.overview import proposals, write_results
from gptlab.lab.experiments.runs import Trained, run_folder, variant_of
from gptlab.lab.experiments.same_program import same_program
from gptlab.lab.judge.audits import check_time, unchanged
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.supervise import why_not_isolated
from gptlab.lab.judge.tree_rules import check_change, check_fields, check_values, read_change
from gptlab.lab.racing import RaceRules, decide, level_of_next, seed_order
from gptlab.lab.statistics import paired_difference
from gptlab.runtime.files.plain_file import write_json_atomic, write_text_atomic

Say = Callable[[str], None]

FIRST = 2
"""The number of the first experiment that is proposed: 0 is the baseline, 1 measures the noise."""
RULES = RaceRules()
NUDGE = 1 + 2**-20
"""What the edit that measures the noise multiplies a learning rate with: other bits from the first step on, and no
other quality."""
TIMING_SHARE = 0.1
"""The part of a run's seconds that timing may take."""
MIN_TIMING_SECONDS, MAX_TIMING_SECONDS = 10.0, 60.0
"""What it usually takes of a short run at most, and what it may take on a busy machine. On an idle one it ends sooner
(`equal_time.ENOUGH`)."""
BASELINE_SECONDS = 20.0
"""For the baseline's own steps, which are timed once."""


class BusyError(UserError):
    """Another process judges the experiment."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict before it is written."""

    verdict: Verdict
    reason: str
    rule: str | None = None
    evidence: float | None = None
    """The e-value of the improvement, where pairs were raced."""


def measure_baseline(lab: Lab, say: Say) -> None:
    """Time and train the baseline, and measure the noise: between seeds, and between the baseline and an edit that
    changes bits and nothing else. What is done already is not done again.

    UserError where the baseline cannot be trained.
    """
    ledger, settings = lab.ledger, lab.settings
    nudged = {"optim.embedding.lr": lab.baseline_config()["optim.embedding.lr"] * NUDGE}
    for number, fields, why in ((0, {}, "baseline"), (1, nudged, NOTHING)):
        if number not in ledger.experiments():
            ledger.append(
                "proposed", experiment=number, fields=fields, files=[], why=why, expect=None, by="lab", against=0
            )
    try:
        with _locked(lab, 0):
            if ledger.experiments()[0].steps is None:
                time_baseline(lab, 0, say)
            baseline = ledger.experiments()[0]
            if ledger.experiments()[1].steps is None:
                ledger.append(
                    "timed", experiment=1, speed=1.0, step_seconds=baseline.step_seconds, steps=baseline.steps
                )
            for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
                for number in (0, 1):
                    measure(lab, number, seed, "validation", say)
            runs.forget(lab, 1)
    except (ProcessFailedError, RuleError) as error:
        raise UserError(f"the baseline cannot be trained: {error}") from None
    write_results(lab)


def time_baseline(lab: Lab, number: int, say: Say) -> None:
    """Find out how many steps experiment 0, or the same at another depth, trains in the lab's length."""
    say(f"{number:04}: timing the baseline's steps")
    experiments, settings = lab.ledger.experiments(), lab.settings
    variant = variant_of(lab, experiments[number], experiments)
    began = time.monotonic()
    with runs.steps_of(lab, variant, steps=settings.steps or 1_000) as process:
        process.ready()
        start = time.monotonic() - began
        seconds = time_alone(process, max_seconds=BASELINE_SECONDS)
    steps = settings.steps or require_positive_steps((settings.seconds or 0.0) / seconds)
    lab.ledger.append("timed", experiment=number, speed=1.0, step_seconds=seconds, steps=steps, start_seconds=start)
    say(f"the baseline trains {steps:,} steps of {seconds * 1000:,.1f} ms")


def noise(experiments: Mapping[int, Experiment]) -> list[float]:
    """The paired differences, in bits per byte, of the edit that changes bits and nothing else."""
    base, nudged = experiments[0].bpb, experiments[1].bpb
    return [base[key] - value for key, value in nudged.items() if key in base]


def in_flight(lab: Lab) -> list[int]:
    """Numbers of the experiments that `finish` has to do with, in their order."""
    return [one.number for one in proposals(lab.ledger.experiments()) if not _is_over(lab, one)]


def _is_over(lab: Lab, one: Experiment) -> bool:
    """Whether it has a verdict, and all that follows from one (`_conclude`)."""
    return one.verdict is not None and _verdict_path(lab, one.number).exists()


def _verdict_path(lab: Lab, number: int) -> Path:
    return lab.experiment(number) / "verdict.json"


def finish(lab: Lab, number: int, say: Say) -> Experiment:
    """Judge the experiment, record its verdict, and what follows from it; what is done already is not done again.
    BusyError where another process judges it, UserError where the lab itself cannot work (a full disk, a damaged
    ledger)."""
    with _locked(lab, number):
        if lab.ledger.experiments()[number].verdict is None:
            _record(lab, number, _judge(lab, number, say))
        if not _is_over(lab, lab.ledger.experiments()[number]):
            _conclude(lab, number)
    return lab.ledger.experiments()[number]


def _record(lab: Lab, number: int, ruling: Ruling) -> None:
    """Write the verdict. One is kept only if it was compared with the baseline as it is now."""
    with lab.ledger.locked():
        experiments = lab.ledger.experiments()
        against, now = experiments[number].against, baseline_of(experiments).number
        if ruling.verdict == "keep" and against != now:
            reason = f"better than {against}, but the baseline is {now} since: {propose_again(lab, number)}"
            ruling = replace(ruling, verdict="inconclusive", reason=reason)
        reason = one_line(ValueError(ruling.reason))[:LAST_WORDS]  # Untrusted code may have written it.
        values = _measured(experiments[number], experiments) | {
            "verdict": ruling.verdict, "reason": reason, "rule": ruling.rule, "evidence": ruling.evidence,
        }  # fmt: skip
        lab.ledger.append("verdict", experiment=number, **values)


def _conclude(lab: Lab, number: int) -> None:
    """Do what follows from the verdict. verdict.json comes last: where a killed lab left none, this is done again."""
    one = lab.ledger.experiments()[number]
    if not one.is_kept:
        runs.forget(lab, number)
    write_results(lab)
    verdict = {name: value for name, value in (one.verdict or {}).items() if name not in ("kind", "time", "experiment")}
    write_json_atomic(_verdict_path(lab, number), verdict)


def _judge(lab: Lab, number: int, say: Say) -> Ruling:
    """The verdict of an experiment. Whatever the candidate does ends in one."""
    try:
        if (nothing := _require_lawful(lab, number)) is not None:
            return nothing
        if lab.ledger.experiments()[number].steps is None and (nothing := time_candidate(lab, number, say)) is not None:
            return nothing
        return _race(lab, number, say)
    except RuleError as error:
        return Ruling("invalid", error.what, error.rule)
    except ProcessFailedError as error:
        return Ruling("timed-out" if error.timed_out else "crashed", str(error))


def _require_lawful(lab: Lab, number: int) -> Ruling | None:
    """RuleError for fields or code that may not change; a Ruling where nothing that is computed does."""
    experiments = lab.ledger.experiments()
    one = experiments[number]
    check_fields(one.fields)
    if variant_of(lab, one, experiments).code == lab.path / "code":  # changed code may take other values
        check_values(all_fields(one, experiments), lab.run_config(lab.settings.first_seed, None))
    if not one.files:
        return None
    base = variant_of(lab, experiments[one.against], experiments).code
    tree = lab.experiment(number) / "tree"
    change = read_change(base, tree)
    (lab.experiment(number) / "changes.patch").write_text(change.patch, encoding="utf-8")  # all that stays if invalid
    check_change(change)
    if not one.fields and same_program(base, tree, one.files):
        return Ruling("no-op", "only comments, docstrings or layout changed")
    return None


def time_candidate(lab: Lab, number: int, say: Say, *, against: int | None = None) -> Ruling | None:
    """Find out how many steps the candidate trains. A Ruling where it computes what the baseline does. `against`: the
    baseline, where it is not that of the proposal. ProcessFailedError where it cannot be timed or makes no step."""
    experiments = lab.ledger.experiments()
    candidate = variant_of(lab, experiments[number], experiments)
    base_number = experiments[number].against if against is None else against
    baseline = variant_of(lab, experiments[base_number], experiments)
    assert baseline.steps is not None
    assert baseline.step_seconds is not None
    fields = [lab.baseline_config() | dict(variant.fields) for variant in (baseline, candidate)]
    if candidate.code == baseline.code and fields[0] != fields[1] and same_work(*fields):
        lab.ledger.append(
            "timed", experiment=number, speed=1.0, step_seconds=baseline.step_seconds, steps=baseline.steps
        )
        return None
    run_seconds = baseline.steps * baseline.step_seconds
    usual = min(max(TIMING_SHARE * run_seconds, MIN_TIMING_SECONDS), MAX_TIMING_SECONDS)
    with (
        runs.steps_of(lab, baseline, baseline.steps, run_seconds, place=lab.experiment(number)) as base,
        runs.steps_of(lab, candidate, baseline.steps, run_seconds) as new,
    ):
        is_now, was = new.ready(), base.ready()
        if is_now["config"] == was["config"] and candidate.code == baseline.code:
            return Ruling("no-op", "the baseline has these values already")
        speed = compare_speed(base, new, usual_seconds=usual, max_seconds=MAX_TIMING_SECONDS)
    ratio = {
        "time": speed.settled, "steps": 1.0,
        "tokens": was["tokens_per_step"] / is_now["tokens_per_step"],
        "flops": was["flops_per_step"] / is_now["flops_per_step"],
    }[lab.settings.at]  # fmt: skip
    if baseline.steps * ratio < 1:
        what = f"one of its steps takes more {lab.settings.at} than the baseline's whole run"
        raise ProcessFailedError(what, timed_out=True)
    steps = round(baseline.steps * ratio)
    lab.ledger.append(
        "timed", experiment=number, speed=speed.ratio, low=speed.low, high=speed.high,
        step_seconds=speed.baseline_seconds / speed.ratio, steps=steps,
    )  # fmt: skip
    say(
        f"{number:04}: {speed.ratio:.3f} of the baseline's speed ({speed.low:.3f} to {speed.high:.3f}), {steps:,} steps"
    )
    return None


def _race(lab: Lab, number: int, say: Say) -> Ruling:
    """Train pairs of baseline and candidate until they decide."""
    experiments = lab.ledger.experiments()
    one, differences = experiments[number], list[float]()
    pair = (one.against, number)
    # A proposal that is raced again was good with its seeds: with the same ones it would be good by selection.
    first_seed = lab.settings.first_seed + RULES.most_pairs * earlier_races(experiments, one)
    for seed in (first_seed + place for place in seed_order(number - FIRST, RULES)):
        try:
            base = measure(lab, one.against, seed, "validation", say)
        except (ProcessFailedError, RuleError) as error:  # not the candidate's fault
            return Ruling("inconclusive", f"the baseline failed with seed {seed}: {error}")
        new = measure(lab, number, seed, "validation", say)
        if not differences and base == new and runs.same_weights(*(run_folder(lab, n, seed) for n in pair)):
            return Ruling("no-op", "the trained weights are the baseline's, bit for bit")
        differences.append(base - new)
        say(f"{number:04}: seed {seed}, {new:.6f} bpb, the baseline {base:.6f}")
        found = decide(differences, noise(experiments), level_of_next(number - FIRST, RULES), RULES)
        if found.verdict != "another pair":
            evidence = f"{found.evidence:.3g} to 1, and keeping takes {found.threshold:,.0f} to 1"
            reason = {
                "keep": f"an improvement is {evidence}",
                "discard": "an improvement that is worth finding is unlikely",
                "inconclusive": f"after {RULES.most_pairs} pairs an improvement is {evidence}",
            }[found.verdict]
            return Ruling(found.verdict, reason, evidence=found.evidence)
    raise AssertionError("a race ends with its last seed")


def measure(lab: Lab, number: int, seed: int, where: Slice, say: Say) -> float:
    """Bits per byte of one run, trained and judged unless the ledger has them. Where another worker trains it (a
    baseline with this seed), this waits for its result."""
    with _locked(lab, number, seed, wait=lambda: say(f"{number:04}: waiting for seed {seed} of another worker")):
        known = lab.ledger.experiments()[number].bpb.get((where, seed))
        return _measure(lab, number, seed, where, say) if known is None else known


def _measure(lab: Lab, number: int, seed: int, where: Slice, say: Say) -> float:
    experiments = lab.ledger.experiments()
    one = experiments[number]
    variant = variant_of(lab, one, experiments)
    say(f"{number:04}: training with seed {seed}")
    with _undisturbed(lab, number):
        trained = runs.train(lab, variant, seed)
        if number != one.against:
            _check_time(lab, experiments, number, seed, trained)
        judged = runs.judge(lab, variant, trained.run, where, seed, one.against)
        if judged.step != variant.steps:
            raise RuleError("checkpoint", f"it is of step {judged.step:,}, and the run was to train {variant.steps:,}")
    cost = trained.finished
    lab.ledger.append(
        "measured", experiment=number, seed=seed, slice=where, bpb=judged.loss.val_bpb, steps=variant.steps,
        parameters=judged.parameters, wall_seconds=cost.wall_seconds, cpu_seconds=cost.cpu_seconds,
        peak_mb=cost.peak_bytes / 2**20, resumed=trained.resumed,
    )  # fmt: skip
    runs.drop_moments(trained.run)
    return judged.loss.val_bpb


def _check_time(lab: Lab, experiments: Mapping[int, Experiment], number: int, seed: int, trained: Trained) -> None:
    """RuleError where training took more than the baseline's with this seed: it trained off the clock.

    Where it seems so, the baseline trains once more, now: the machine may be busier than when it trained first. Where
    only the wall clock still says so, the candidate does too, for the machine may have stalled: it passes if it is in
    time then, and ends with the same weights.
    """
    one, base = experiments[number], experiments[experiments[number].against]
    share = max(1.0, _step_time(one) / _step_time(base))
    whole = (cost for cost in base.costs if not cost["resumed"])
    costs = sorted(whole, key=lambda cost: cost["seed"] != seed)
    try:
        if costs:
            cpu_seconds, wall_seconds = (share * costs[0][name] for name in ("cpu_seconds", "wall_seconds"))
            check_time(trained.finished, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds)
            return
    except RuleError:
        pass
    again = runs.train_again(lab, variant_of(lab, base, experiments), seed, candidate=number)
    due = {"cpu_seconds": share * again.cpu_seconds, "wall_seconds": share * again.wall_seconds}
    try:
        check_time(trained.finished, **due)
    except RuleError as error:
        if error.rule != "wall-clock":
            raise
        again = runs.train_again(lab, variant_of(lab, one, experiments), seed, candidate=number, same_as=trained.run)
        check_time(again, **due)


@contextmanager
def _undisturbed(lab: Lab, number: int) -> Iterator[None]:
    """Within the context, candidate code runs. RuleError (private-files) where it changed the lab's files; a changed
    ledger is put back. In namespaces it cannot, so that nothing is looked at."""
    if why_not_isolated() is None:
        yield
        return
    before, one = lab.ledger.path.read_bytes(), lab.ledger.experiments()[number]
    is_new = number >= FIRST and one.verdict is None
    own = (lab.path / name for name in ("data", "baseline", "code"))
    with unchanged([*(lab.private / name for name in SLICES), *own]):
        yield
    after = lab.ledger.path.read_bytes()
    new = after[len(before) :]  # Other workers write of other experiments, and of a baseline's other seeds.
    if not after.startswith(before) or (is_new and f'"experiment": {number},'.encode() in new):
        write_text_atomic(lab.ledger.path, before.decode())
        raise RuleError("private-files", "the ledger was changed while the candidate ran")


def _step_time(one: Experiment) -> float:
    assert one.steps is not None
    assert one.step_seconds is not None
    return one.steps * one.step_seconds


def _measured(one: Experiment, experiments: Mapping[int, Experiment]) -> dict[str, Any]:
    """The mean difference to the baseline over the seeds that both have, with its interval: negative is better."""
    base = experiments[one.against].bpb
    pairs = [(base[key], bpb) for key, bpb in one.bpb.items() if key in base]
    if not pairs:
        return {"pairs": 0, "difference": None, "half_width": None}
    found = paired_difference(*zip(*pairs, strict=True))
    half = found.half_width if math.isfinite(found.half_width) else None
    return {"pairs": len(pairs), "difference": found.mean, "half_width": half}


@contextmanager
def _locked(
    lab: Lab, number: int, seed: int | None = None, *, wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Within the context, no other process works on this experiment, or on its run with `seed`. Where one does:
    BusyError, or with `wait`, which is called first, this waits. The system frees the lock of a killed process."""
    folder = lab.experiment(number)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / (".lock" if seed is None else f".seed-{seed}.lock"), thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if wait is None:
            raise BusyError(f"experiment {number} is being judged by another process") from None
        wait()
        lock.acquire()
    try:
        if seed is None:
            runs.forget_timings(lab, number)
        yield
    finally:
        lock.release()
