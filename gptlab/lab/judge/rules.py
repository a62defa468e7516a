"""The names of the lab's rules, and what is raised where a candidate broke one."""

from __future__ import annotations

from typing import Literal

from gptlab.config.errors import one_line

Rule = Literal[
    "tree", "protected", "shipped-data", "field",
    "wall-clock", "cpu-time", "memory", "output-size", "processes", "left-behind", "private-files",
    "protocol", "shape", "not-finite", "causality", "memoryless", "report", "checkpoint", "seed",
]  # fmt: skip
"""Each in words: docs/judge.md."""


class RuleError(Exception):
    """A candidate broke a rule: its verdict is `invalid`."""

    def __init__(self, rule: Rule, what: str) -> None:
        self.rule, self.what = rule, one_line(ValueError(what))
        super().__init__(f"{rule}: {self.what}")
