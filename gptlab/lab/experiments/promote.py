"""Confirm an experiment against the baseline with which the lab began: with seeds that were never used, on the part of
the validation text that nothing else reads, and, if wanted, with a second model size.

A night keeps what was best of many on one text. The promotion asks once, so that its level holds for the whole way from
experiment 0 to the one that is confirmed. With two sizes both must be confirmed, which needs no correction of the level
(an intersection-union test, Berger 1982, Technometrics 24).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gptlab.config.errors import UserError
from gptlab.lab.experiments.equal_time import ProcessFailedError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import SECOND_SIZE, Experiment, all_fields, baseline_of
from gptlab.lab.experiments.proposal import code_of
from gptlab.lab.experiments.runs import forget_promotion
from gptlab.lab.experiments.trial import measure, time_baseline, time_candidate
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.racing import PROMOTION, PROMOTION_LEVEL, decide
from gptlab.lab.statistics import paired_difference

Say = Callable[[str], None]

FRESH = 10_001
"""The first seed of promotions, beyond those of any night."""


def promote(lab: Lab, number: int | None, *, seeds: int, depth: int | None, say: Say) -> list[dict[str, Any]]:
    """The answer for the lab's size, and, where that is confirmed and `depth` given, for that depth: `promotion` lines
    of the ledger. What is trained already is not trained again.

    Args:
        number: The experiment. None: the baseline as it is now.
        seeds: Pairs of runs, at most; fewer where they prove it.

    UserError where the experiment cannot be trained again, and for a depth that it has anyway.
    """
    number = _number(lab, number)
    if depth is not None:
        _require_other_size(lab, number, depth)
    answers = [_promote(lab, number, (0, number), None, seeds, say)]
    if depth is not None and answers[0]["confirmed"]:
        sizes = (_at_depth(lab, 0, depth), _at_depth(lab, number, depth))
        try:
            _time(lab, *sizes, say)
        except (ProcessFailedError, RuleError) as error:
            raise UserError(f"steps at depth {depth} cannot be timed: {error}") from None
        answers.append(_promote(lab, number, sizes, depth, seeds, say))
    return answers


def sentence(answers: Sequence[dict[str, Any]]) -> str:
    """The answer in words."""
    said = "confirmed" if all(answer["confirmed"] for answer in answers) else "not confirmed"
    parts = []
    for answer in answers:
        size = "" if answer["depth"] is None else f"at depth {answer['depth']} "
        half = "" if answer["half_width"] is None else f" ± {answer['half_width']:.4f}"
        pairs = f"{answer['pairs']} fresh seed{'s' * (answer['pairs'] > 1)}"
        evidence = f"evidence {answer['evidence']:.3g} to 1"
        parts.append(f"{size}{answer['difference']:+z.4f}{half} bpb over {pairs}, {evidence}")
    number, needed = answers[0]["experiment"], f"{1 / PROMOTION_LEVEL:g} to 1"
    return f"experiment {number} is {said} against experiment 0: {'; '.join(parts)} ({needed} confirms)"


def _number(lab: Lab, number: int | None) -> int:
    experiments = lab.ledger.experiments()
    if number is None:
        number = baseline_of(experiments).number
        if number == 0:
            raise UserError("nothing was kept yet: the baseline is still experiment 0")
    one = experiments.get(number)
    if number == 0 or one is None or one.by == SECOND_SIZE:
        raise UserError(f"there is no experiment {number} to confirm in {lab.path}")
    if one.steps is None or not (code_of(lab, one, experiments) / "gptlab").is_dir():
        raise UserError(f"experiment {number} cannot be trained again: {one.says or 'in flight'}, its code is gone")
    return number


def _require_other_size(lab: Lab, number: int, depth: int) -> None:
    """UserError where the experiment would be trained at the lab's depth once more."""
    experiments = lab.ledger.experiments()
    changed = all_fields(experiments[number], experiments).keys()
    if depth == lab.baseline_config()["model.n_layer"] and changed.isdisjoint(("depth", "model.n_layer")):
        raise UserError(f"depth {depth} is the lab's own, where it is confirmed anyway: name another, or none")


def _promote(
    lab: Lab, number: int, pair: tuple[int, int], depth: int | None, seeds: int, say: Say
) -> dict[str, Any]:  # fmt: skip
    """Train pairs of (baseline, candidate) until one is confirmed or `seeds` are used; the line that is recorded."""
    rules, base, new = replace(PROMOTION, most_pairs=seeds), list[float](), list[float]()
    used = [seed for one in lab.ledger.experiments().values() for where, seed in one.bpb if where == "validation"]
    while True:
        seed = max(FRESH, 1 + max(used, default=0)) + len(base)
        for values, one in zip((base, new), pair, strict=True):
            try:
                values.append(measure(lab, one, seed, "promotion", say))
            except (ProcessFailedError, RuleError) as error:
                raise UserError(f"experiment {one} cannot be confirmed: with seed {seed}, {error}") from None
        say(f"{pair[1]:04}: fresh seed {seed}, {new[-1]:.6f} bpb, experiment {pair[0]} {base[-1]:.6f}")
        found = decide([a - b for a, b in zip(base, new, strict=True)], (), PROMOTION_LEVEL, rules)
        if found.verdict != "another pair":
            break
    difference = paired_difference(base, new)
    answer = {
        "experiment": number, "depth": depth, "confirmed": found.verdict == "keep", "pairs": len(base),
        "difference": difference.mean, "evidence": found.evidence,
        "half_width": difference.half_width if math.isfinite(difference.half_width) else None,
    }  # fmt: skip
    if answer not in lab.ledger.experiments()[number].promotions:
        lab.ledger.append("promotion", **answer)
    for one in pair:
        forget_promotion(lab, one)
    return answer


def _at_depth(lab: Lab, number: int, depth: int) -> int:
    """The number under which an experiment is trained with another depth."""
    with lab.ledger.locked():
        experiments = lab.ledger.experiments()
        for one in experiments.values():
            if (one.by, one.against, dict(one.fields)) == (SECOND_SIZE, number, {"depth": depth}):
                return one.number
        lab.ledger.append(
            "proposed", experiment=max(experiments) + 1, fields={"depth": depth}, files=[], expect=None,
            why=f"experiment {number} at depth {depth}", by=SECOND_SIZE, against=number,
        )  # fmt: skip
    return max(experiments) + 1


def _time(lab: Lab, baseline: int, candidate: int, say: Say) -> None:
    """How many steps both train, at the lab's length and equal time for this size, unless that is known."""

    def known(number: int) -> Experiment:
        return lab.ledger.experiments()[number]

    if known(baseline).steps is None:
        time_baseline(lab, baseline, say)
    if known(candidate).steps is None and time_candidate(lab, candidate, say, against=baseline) is not None:
        raise UserError("at this depth the experiment and experiment 0 are the same program: it changed the depth only")
