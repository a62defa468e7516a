"""The rules of the lab, and what is raised where a candidate broke one."""

from __future__ import annotations

from typing import Literal

from gptlab.config.errors import one_line

Rule = Literal[
    "tree", "protected", "shipped-data", "field",
    "wall-clock", "cpu-time", "memory", "output-size", "processes", "left-behind", "private-files",
    "protocol", "shape", "not-finite", "causality", "memoryless", "report", "checkpoint", "seed",
]  # fmt: skip
RULES: dict[Rule, str] = {
    "tree": "a changed tree changes Python files below gptlab/, has no links and stays small",
    "protected": "what judges, counts or records is the baseline's, byte for byte",
    "shipped-data": "no weights or text come with the code: no binary, large or dense file or literal",
    "field": "the judge's fields are the lab's: data, tokenizer, evaluation, seed, folders, processes",
    "wall-clock": "training and answers end within their time, and take what their steps take",
    "cpu-time": "the CPU seconds of all processes are those of the steps and of a start like the baseline's",
    "memory": "all processes together stay below the memory limit",
    "output-size": "what is written stays below the limit",
    "processes": "the number of processes stays below the limit",
    "left-behind": "no process is left when the candidate's has ended",
    "private-files": "the judge's files, the ledger and the validation text are neither opened nor changed",
    "protocol": "one answer for each question, after it, and nothing else",
    "shape": "an answer has the logits of every position over the whole vocabulary",
    "not-finite": "every logit is a finite number",
    "causality": "no logit depends on a later token",
    "memoryless": "an answer depends on its row alone: not on other rows, their order, or the process",
    "report": "the run's own numbers agree with the judge's",
    "checkpoint": "the answers are those of the checkpoint's weights, which are intact and all that is given",
    "seed": "a seed draws the initial weights: those of shared names are the baseline's, or made from them",
}
"""What each rule says, in words."""


class Broken(Exception):  # noqa: N818 - what it says of a rule
    """A candidate broke a rule: its verdict is `invalid`."""

    def __init__(self, rule: Rule, what: str) -> None:
        self.rule, self.what = rule, one_line(ValueError(what))
        super().__init__(f"{rule}: {self.what}")
