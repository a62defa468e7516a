"""What a report says of one run: sentences, figures and tables as plain texts, for HTML and for Markdown alike.

Everything comes from the run's folder, which may be anybody's: whatever is not of the kind that gptlab writes is left
out, and whoever shows a text escapes it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from gptlab.config.load import flatten
from gptlab.lab.run_list import changes_from_recipe, recipe_fields
from gptlab.lab.run_record import Reached, RunRecord, number, reached, read_run
from gptlab.report.curves import Metrics, evenly_chosen, read_metrics_file
from gptlab.runtime.records.console import short_number
from gptlab.runtime.records.run_directory import list_in
from gptlab.training.checkpoint.names import list_checkpoints

VALIDATION_COLUMNS = ("step", "tokens", "training", "validation loss", "bits per byte")
MAX_SAMPLE_STEPS = 6
"""Steps whose samples are shown: the first, the last, and those between them that lie evenly."""
MAX_PROMPTS = 4
MAX_TEXT_CHARACTERS = 4000
MAX_EVENTS = 100

_TIME = {
    "training_seconds": "training", "startup_seconds": "start-up", "compile_seconds": "compilation",
    "evaluation_seconds": "evaluation", "checkpoint_seconds": "waiting for checkpoints",
}  # fmt: skip
_PROVENANCE = (
    "status", "start", "end", "device_name", "device", "cpu", "world_size", "threads", "dtype", "peak_flops_per_second",
    "peak_source", "platform", "python_version", "torch_version", "cuda_version", "gptlab_version", "git_commit",
    "git_dirty", "code_fingerprint", "data_fingerprint", "tokenizer_fingerprint", "run_id", "from", "implementations",
)  # fmt: skip


class Validation(NamedTuple):
    step: int
    tokens: float
    seconds: float
    loss: float
    bpb: float


class Sample(NamedTuple):
    step: int
    prompt: str
    text: str
    """What follows the prompt."""


class Task(NamedTuple):
    name: str
    accuracy: float
    centered: float
    """Corrected for guessing: 0 is guessing, 1 is perfect."""


@dataclass(frozen=True)
class RunFacts:
    record: RunRecord
    metrics: Metrics

    @property
    def name(self) -> str:
        return self.record.path.resolve().name

    @cached_property
    def status(self) -> str:
        """As run.json has it, but `killed` where it says `running` and no process holds the run."""
        status = self.record.status
        return "killed" if status == "running" and not self.record.directory.in_use() else status

    @cached_property
    def validations(self) -> list[Validation]:
        columns = self.metrics.validations
        rows = (columns[name].tolist() for name in ("step", "tokens", "train_seconds", "val_loss", "val_bpb"))
        return [Validation(int(step), *rest) for step, *rest in zip(*rows, strict=True)]

    def validation_rows(self) -> list[tuple[str, ...]]:
        """Each validation, by VALIDATION_COLUMNS."""
        return [
            (f"{one.step:,}", short_number(one.tokens), duration(one.seconds) if math.isfinite(one.seconds) else "",
             f"{one.loss:.4f}", f"{one.bpb:.4f}")
            for one in self.validations
        ]  # fmt: skip

    @cached_property
    def reached(self) -> Reached:
        """Bits per byte of the final weights; of a run that has not finished, those of its last validation."""
        columns = self.metrics.validations
        last = {name: column[-1] for name, column in columns.items()} if len(columns["step"]) else {}
        return reached(self.record.summary, self.metrics.last_step, last)

    def sentence(self) -> str:
        """What the run is, and what became of it."""
        field = self.record.fields
        millions = number(self.record.summary.get("num_params_M"))
        model = f"A GPT of {counted(field.get('model.n_layer'), 'layer')} and width {plain(field.get('model.n_embd'))}"
        size = "" if millions is None else f" ({millions:.2f}M parameters)"
        trained = "was imported" if self.is_imported else self._trained()
        return f"{model}{size} {trained}; it {self._end()}."

    def _trained(self) -> str:
        field = self.record.fields
        source = field.get("data.source")
        text = ", ".join(map(plain, source)) if isinstance(source, list) else plain(source)
        recipe = f"with the recipe {plain(field.get('recipe'))} on {text}"
        if field.get("eval.only") is True:
            was = {"finished": "was validated", "running": "is to be validated"}.get(self.status, "was to be validated")
            return f"{was} without training, {recipe}"
        was = {"finished": "trained", "running": "is to train"}.get(self.status, "was to train")
        until = "" if self.target_loss is None else f"to a validation loss of {self.target_loss:.10g}, "
        return f"{was} {recipe} {until}{'at most' if until else 'for'} {self.length}"

    @property
    def target_loss(self) -> float | None:
        """The validation loss that ends the run."""
        return number(self.record.fields.get("horizon.until_val_loss"))

    @property
    def length(self) -> str:
        """How long the run is to train at most: 3 min, 1 step, 8 tokens per param."""
        fields = self.record.fields
        amount, unit = number(fields.get("horizon.amount")), plain(fields.get("horizon.unit")).replace("_", " ")
        if amount is None or unit == "seconds":
            return "an unknown length" if amount is None else duration(amount)
        return f"{amount:,.10g} {unit.removesuffix('s') if amount == 1 and unit in ('steps', 'tokens') else unit}"

    def _end(self) -> str:
        bpb = self.reached.bpb
        reached = "" if bpb is None else f"{bpb:.4f} bits per byte"
        if self.status == "finished":
            return f"reached {reached}" if reached else "has finished without a validation"
        step = plain(self.reached.steps or 0)
        states = {
            "running": "is training", "failed": self._failed(), "preempted": f"was stopped after step {step}",
            "killed": f"was killed after step {step} or a later one",
        }  # fmt: skip
        state = states.get(self.status, "has an unknown status")
        return f"{state}; at its last validation it had {reached}" if reached else state

    def _failed(self) -> str:
        failure = self.record.provenance.get("failure")
        if not isinstance(failure, Mapping):
            return "failed"
        return f"failed at step {plain(failure.get('step'))}: {plain(failure.get('reason'))}"

    def figures(self) -> list[tuple[str, str]]:
        """(label, value) of the final numbers, bits per byte first; unknown ones are skipped, but not `nan` as the bits
        per byte of broken weights."""
        summary, found = self.record.summary, list[tuple[str, str]]()
        best = min((one.bpb for one in self.validations if math.isfinite(one.bpb)), default=None)
        bpb, steps, tokens, flops, seconds = self.reached
        speed = tokens / seconds if tokens and seconds else None
        mfu, memory = number(summary.get("mfu_percent")), number(summary.get("peak_vram_mb"))
        core, total = number(summary.get("core_metric")), number(summary.get("total_seconds"))
        for label, value, text in (
            ("bits per byte", bpb, lambda value: f"{value:.4f}"),
            ("lowest", best if best != bpb else None, lambda value: f"{value:.4f}"),
            ("CORE", core, lambda value: f"{value:.4f}"),
            ("validation loss", number(summary.get("val_loss")), lambda value: f"{value:.4f}"),
            ("training", seconds, duration),
            ("in all", total, duration),
            ("steps", steps, lambda value: f"{value:,.0f}"),
            ("tokens", tokens, short_number),
            ("FLOPs", flops, lambda value: f"{value:.3g}"),
            ("tokens a second", speed, short_number),
            ("MFU", mfu, lambda value: f"{value:.1f}%"),
            ("peak memory", memory, lambda value: f"{value / 1024:.2f} GiB"),
        ):
            if value is not None and (math.isfinite(value) or label == "bits per byte"):
                found.append((label, text(value)))
        return found

    def time(self) -> list[tuple[str, float]]:
        """(part, seconds) of the whole run; what is left is sampling, CORE's loading and writing. Empty where the run
        has not finished."""
        known = {text: number(self.record.summary.get(name)) for name, text in _TIME.items()}
        total = number(self.record.summary.get("total_seconds"))
        if total is None or not math.isfinite(total) or total <= 0:
            return []
        parts = [(text, seconds) for text, seconds in known.items() if seconds is not None and 1e-3 <= seconds <= total]
        return [*parts, ("sampling and the rest", max(0.0, total - sum(seconds for _, seconds in parts)))]

    def samples(self) -> dict[str, list[Sample]]:
        """{prompt: what the model made of it, step by step}, of the first prompts and a few steps."""
        found: dict[str, dict[int, Sample]] = {}
        for line in self.metrics.samples:
            step, prompt, text = (line.get(key) for key in ("step", "prompt", "text"))
            if isinstance(step, int) and isinstance(prompt, str) and isinstance(text, str):
                rest = text.removeprefix(prompt)[:MAX_TEXT_CHARACTERS]
                found.setdefault(prompt[:MAX_TEXT_CHARACTERS], {})[step] = Sample(step, prompt, rest)
        chosen = {}
        for prompt, by_step in [*found.items()][:MAX_PROMPTS]:
            chosen[prompt] = [by_step[step] for step in evenly_chosen(sorted(by_step), MAX_SAMPLE_STEPS)]
        return chosen

    def core(self) -> list[Task]:
        """The tasks of the last measurement of CORE; empty where there is none."""
        last = self.metrics.core[-1] if self.metrics.core else {}
        accuracy, centered = last.get("tasks"), last.get("centered")
        if not isinstance(accuracy, dict) or not isinstance(centered, dict):
            return []
        rows = [(plain(name), number(accuracy[name]), number(centered.get(name))) for name in accuracy]
        return [Task(name, a, c) for name, a, c in rows if a is not None and c is not None]

    def events(self) -> list[tuple[str, str]]:
        """(when, what) of everything that did not go as planned, in the order of its steps; at most MAX_EVENTS."""
        return [*self._events()][:MAX_EVENTS]

    def _events(self) -> Iterator[tuple[str, str]]:
        causes = {"loss": "its loss was not finite", "gradient": "its gradient was not finite", "spike": "a loss spike"}
        for resume in list_in(self.record.provenance, "resumes"):
            if isinstance(resume, dict):
                yield plain(resume.get("start")), f"resumed on {plain(resume.get('device_name'))}"
        for change in list_in(self.record.provenance, "config_changes"):
            if isinstance(change, dict) and isinstance(change.get("fields"), dict):
                yield f"step {plain(change.get('step'))}", f"configuration changed: {', '.join(change['fields'])}"
        for event in self.metrics.events:
            when, reason = f"step {plain(event.get('step'))}", plain(event.get("reason"))
            cause = causes.get(reason, reason)
            match event.get("what"):
                case "skipped":
                    yield when, f"update skipped: {cause} ({plain(event.get('value'))})"
                case "rewound":
                    to = f"rewound to step {plain(event.get('to_step'))}"
                    yield when, f"{to}: {cause} ({plain(event.get('value'))})"
                case "failed":
                    yield when, f"failed: {reason}"

    def changes(self) -> list[tuple[str, str, str]] | None:
        """(field, its value, that of the recipe) where these differ; None where the recipe is unknown."""
        changed = changes_from_recipe(self.record.fields, self.record.provenance)
        if changed is None:
            return None
        of_recipe = recipe_fields(self.record.fields, self.record.provenance) or {}
        return [(name, plain(value), plain(of_recipe.get(name))) for name, value in changed.items()]

    def configuration(self) -> dict[str, str]:
        return {name: plain(value) for name, value in self.record.fields.items()}

    def provenance(self) -> dict[str, str]:
        """Where the numbers come from, by the keys of run.json; with the run's `status`, which may be `killed`."""
        recorded = {key: self.record.provenance[key] for key in _PROVENANCE if key in self.record.provenance}
        if "status" in recorded:
            recorded["status"] = self.status
        facts = flatten(recorded)
        return {key: plain(value) for key, value in facts.items() if value is not None}

    @property
    def folder(self) -> str:
        """The run's folder, as a shell takes it."""
        return shlex.quote(str(self.record.path))

    @property
    def typed(self) -> str | None:
        """The command that started the run, or the script."""
        argv = self.record.provenance.get("argv")
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            return None
        return f"{'python' if argv[0].endswith('.py') else 'gptlab'} {shlex.join(argv)}"

    @property
    def is_imported(self) -> bool:
        return "imported" in self.record.provenance

    @property
    def train_on(self) -> str:
        """The command that trains the run on from its last checkpoint: to its end, or a finished one to twice its
        length, in the unit in which that was given."""
        fields = self.record.fields
        amount, unit = number(fields.get("horizon.amount")), plain(fields.get("horizon.unit"))
        if self.status != "finished" or amount is None:
            return self.training("resume")
        name, factor = ("minutes", 60) if unit == "seconds" else (unit, 1)
        longer = {name: f"{2 * amount / factor:.12g}"}
        if self.target_loss is not None:  # a run that has reached it would be over before its first step
            longer["until_val_loss"] = "None" if self.own_parts else "none"
        return self.training("resume", **longer)

    @property
    def own_parts(self) -> list[str]:
        """The arguments of `gptlab.train` by which a Python caller replaced parts, and which no command can give."""
        parts = self.record.provenance.get("own_parts")
        return sorted(plain(name) for name in parts) if isinstance(parts, dict) else []

    def training(self, how: str, **fields: str) -> str:
        """The command that resumes this run or trains from it (`how`: resume, from), or the call in Python. An imported
        run has only weights to train from."""
        if self.is_imported:
            return f"gptlab train nanogpt/finetune --init-from {self.folder}"
        if not self.own_parts:
            words = "".join(f" --{shlex.quote(name.replace('_', '-'))} {value}" for name, value in fields.items())
            return f"gptlab train --{how} {self.folder}{words}"
        run = "resume" if how == "resume" else "from_run"
        given = [f"{run}={str(self.record.path)!r}", *(f"{name}=..." for name in self.own_parts)]
        return f"gptlab.train({', '.join([*given, *(f'{name}={value}' for name, value in fields.items())])})"

    def commands(self) -> list[tuple[str, str]]:
        """(what it does, command): the run again, its code, its environment, its model."""
        commit, folder = self.record.provenance.get("git_commit"), self.folder
        saved, found = list_checkpoints(self.record.directory.checkpoints_path), []
        if self.typed is not None:
            found.append(("what was typed", self.typed))
        if self.status in ("preempted", "killed", "failed"):
            again = "continue it from its last checkpoint" if saved else "start it again, since it has no checkpoint"
            found.append((again, self.training("resume")))
        if self.is_imported:
            found.append(("train from its weights", self.training("from")))
        else:
            found.append(("the same again, in a new folder", self.training("from")))
            found.append(("the same with another seed", self.training("from", seed=str(self.record.seed + 1))))
        if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,64}", commit):
            patch = (self.record.directory.code_path / "changes.patch").is_file()
            apply = f" && git apply {folder}/code/changes.patch" if patch else ""
            found.append(("the code that ran", f"git checkout {commit}{apply}"))
        if self.record.directory.environment_path.is_file():
            found.append(("the libraries that it ran with", f"pip install -r {folder}/environment.txt"))
        if saved and "change_model" not in self.own_parts:
            found.append(("sample from it", f"gptlab sample {folder}"))
        return found


def read_facts(path: str | Path) -> RunFacts:
    """UserError, one line, where the folder is no run, or damaged."""
    record = read_run(path)
    return RunFacts(record, read_metrics_file(record.directory.metrics_path))


def plain(value: Any) -> str:
    """A value of a run's files as text of bounded length."""
    if isinstance(value, list):
        text = ", ".join(map(plain, value[:100])) or "()"
    elif isinstance(value, float):
        text = f"{value:.10g}"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]} ..."


def counted(value: Any, noun: str) -> str:
    """1 step, 2,000 steps; what is no number as it is."""
    amount = f"{value:,}" if type(value) is int else plain(value)
    return f"{amount} {noun}{'' if value == 1 else 's'}"


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    parts = [(hours, "h"), (left, "min")] if hours else [(minutes, "min"), (rest, "s")]
    return " ".join(f"{amount} {unit}" for amount, unit in parts if amount) or "0 s"
