"""Optuna proposes: points of a space of fields, chosen by what the ledger says of those that were tried.

The study is built from the ledger for every proposal and forgotten afterwards. So there is no second record that could
disagree with the ledger: a search that was killed continues, any number of workers share it, and what a person or a
program tried within the space counts too. Building it takes milliseconds, an experiment takes minutes.

The sampler is TPE (Bergstra, Bardenet, Bengio and Kegl 2011, NeurIPS 24), multivariate, with a constant liar for the
experiments that other workers have in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import ConfigError, UserError, one_line
from gptlab.config.fields import bare, limits_of, require
from gptlab.config.load import apply_overrides, checked_value, config_from_json, leaf_fields, unknown_field
from gptlab.config.run import RunConfig
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, all_fields
from gptlab.lab.experiments.overview import Experiments, comparable_bpb, proposals
from gptlab.lab.experiments.proposal import Proposal
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.tree_rules import check_fields
from gptlab.runtime.files.plain_file import load_toml, read_json_object

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Space = Mapping[str, "BaseDistribution"]

NAME = "search trial"
"""Who proposes, with the number of the trial after it."""
SEED = 1
DIGITS = 4
"""Significant digits of a proposed number: rates closer to each other cannot be told apart, and people read them."""
MAX_DRAWS = 2_000
"""Points that were tried, or are impossible, in a row, after which the space counts as searched: a fraction of a
second. Where one of 300 is left, one search in 500 misses it."""
TPE_DRAWS = 100
"""The first of them. The others are random: TPE repeats itself where a space has few points."""
RANGE = ("low", "high", "log", "step")
FAILED = ("invalid", "crashed", "timed-out")


def require_optuna() -> None:
    """UserError unless it can be imported."""
    try:
        import optuna
    except ImportError:
        raise UserError("--search needs Optuna: pip install 'gptlab[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def read_space(path: Path) -> Space:
    """{dotted field: its distribution} of a TOML file. A field has a range, {low, high} with `log` or `step`, or a list
    of choices. UserError for a field that is unknown or cannot be proposed, and for values that it cannot have."""
    require_optuna()
    fields = {"depth": int, **leaf_fields(RunConfig)}
    entries: dict[str, Any] = {}
    for name, value in load_toml(path).items():
        field, _, key = name.rpartition(".")
        if key in RANGE and name not in fields:
            entries.setdefault(field, {})[key] = value
        else:
            entries[name] = value
    try:
        require(bool(entries), "space", {}, "names no field")
        for name, entry in entries.items():
            if name not in fields:
                raise unknown_field(name, entry, also=["depth"])
        check_fields(entries)
        return {name: _distribution(name, fields, entry) for name, entry in entries.items()}
    except (ConfigError, RuleError) as error:
        raise UserError(f"{path}: {error}") from None


def _distribution(name: str, fields: Mapping[str, Any], entry: Any) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(entry, list) and entry:
        return CategoricalDistribution([_checked(name, fields, value) for value in entry])
    kind, _ = bare(fields[name])
    is_range = isinstance(entry, dict) and {"low", "high"} <= entry.keys() and kind in (int, float)
    require(is_range, name, entry, "must be a list of choices, or for a number {low = A, high = B}")
    ends = {end: _checked(name, fields, entry[end]) for end in ("low", "high")}
    require(ends["low"] < ends["high"], name, entry, "low must be less than high")
    shape = {"log": False, "step": 1 if kind is int else None} | {key: entry[key] for key in RANGE[2:] if key in entry}
    try:
        return (IntDistribution if kind is int else FloatDistribution)(**ends, **shape)
    except (TypeError, ValueError, ArithmeticError) as error:  # also a step of 0.5 for whole numbers
        raise ConfigError(name, entry, one_line(error)) from None


def _checked(name: str, fields: Mapping[str, Any], value: Any) -> Any:
    value = checked_value(fields[name], value, name)
    require(not isinstance(value, tuple), name, value, "lists cannot be searched")
    for limit in limits_of(fields[name]):
        require(value is None or limit.holds(value), name, value, limit.reason, limit.nearest)
    return value


def search(space: Space, say: Callable[[str], None]) -> Callable[[Lab], Proposal | None]:
    """What the search proposes next; None when every point that it finds was tried. `say` receives a
    line where no point of the space is possible."""

    def propose(lab: Lab) -> Proposal | None:
        experiments = lab.require_baseline()
        values = _next_point(space, lab, experiments, say)
        number = 1 + sum(one.by.startswith(NAME) for one in proposals(experiments))
        return None if values is None else Proposal(values, by=f"{NAME} {number}")

    return propose


def _next_point(space: Space, lab: Lab, experiments: Experiments, say: Callable[[str], None]) -> dict[str, Any] | None:
    import optuna

    trials = [*_trials(space, lab, experiments)]
    tried, possible = [trial.params for trial in trials], 0
    config = config_from_json(read_json_object(lab.path / "baseline" / "config.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate and constant_liar are experimental in some versions
        # A seed of its own for each proposal: the same ledger gives the same proposal.
        sampler = optuna.samplers.TPESampler(seed=SEED + len(trials), multivariate=True, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        study.add_trials(trials)
        for draw in range(MAX_DRAWS):
            if draw == TPE_DRAWS:
                study.sampler = optuna.samplers.RandomSampler(seed=SEED + len(trials))
            trial = study.ask(dict(space))
            values = {name: _rounded(value, space[name]) for name, value in trial.params.items()}
            if _is_possible(config, values):
                possible += 1
                if values not in tried:
                    return values
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    if not possible:
        say(f"the values of none of {MAX_DRAWS:,} points of the space fit together: narrow its ranges")
    return None


def _trials(space: Space, lab: Lab, experiments: Experiments) -> Iterator[FrozenTrial]:
    """The baseline and the experiments that are points of the space: all that change fields of the space alone."""
    from optuna.trial import TrialState, create_trial

    config = lab.baseline_config()
    config.setdefault("depth", config["model.n_layer"])
    for one in (experiments[0], *proposals(experiments)):
        if one.files or not one.fields.keys() <= space.keys():
            continue
        values = config | all_fields(one, experiments)
        state, value = _result(one, experiments)
        try:
            yield create_trial(
                state=TrialState[state], value=value, params={name: values[name] for name in space},
                distributions=dict(space),
            )  # fmt: skip
        except ValueError:
            continue  # outside of the space


def _result(one: Experiment, experiments: Experiments) -> tuple[str, float | None]:
    """(the trial's state, its value). The value is in bits per byte of the lab's first seeds: means over whichever
    seeds an experiment was raced with would differ by the luck of the seeds."""
    if one.says in FAILED:
        return "FAIL", None
    value = comparable_bpb(one, experiments)
    return ("RUNNING", None) if value is None else ("COMPLETE", value)


def _rounded(value: Any, distribution: BaseDistribution) -> Any:
    """A float with fewer digits, inside its range."""
    if not isinstance(value, float) or getattr(distribution, "step", None) is not None:
        return value
    low, high = getattr(distribution, "low", value), getattr(distribution, "high", value)
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)


def _is_possible(config: RunConfig, values: Mapping[str, Any]) -> bool:
    """Whether the fields fit together in the lab's configuration. With another depth the recipe decides, when the run
    begins."""
    if "depth" in values:
        return True
    try:
        apply_overrides(config, values)
    except ConfigError:
        return False
    return True
