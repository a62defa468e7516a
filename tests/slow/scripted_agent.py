"""An agent that knows what it proposes: 40 changes to a weak baseline, of which it is known what they are worth.

    gptlab lab new night quickstart --depth 2 --steps 100 --model.seq-len 128 --tokenizer.kind byte --compile off \\
        --batch.total-tokens 1024 --batch.micro-sequences 2 --optim.head.lr 0.0004 --model.logit-softcap 1.5 \\
        --schedule.warmup-fraction 0.5 --schedule.warmdown-fraction 0 --optim.embedding.lr 0.52 \\
        --eval.tokens 65536 --seeds 4
    gptlab lab run night --agent 'python tests/slow/scripted_agent.py' --experiments 40
    python tests/slow/scripted_agent.py labs/night

The first five improve what the baseline was weakened in, two of them by their speed alone; five do harm, two of them by
their speed. Alone, with one seed, they were worth -0.75, -0.59, -0.14 and -0.30 bits per byte (the last with the steps
that its speed allows), the harms +2.09, +1.09 and +0.28; a layer more or less changes the time of a step, which decides
in so short a run (docs/LOG.md, 2026-11-22). Ten change last bits only (a hundred-thousandth of learning rates), and
twenty are small changes of which nothing is known. They come in an order drawn once. With the folder of a lab, it
prints how the lab judged each kind.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMPROVEMENTS: tuple[Mapping[str, Any], ...] = (
    {"optim.head.lr": 0.004}, {"model.logit_softcap": 15.0}, {"schedule.warmup_fraction": 0.0},
    {"batch.micro_sequences": 8}, {"model.n_layer": 1},
)  # fmt: skip
HARMS: tuple[Mapping[str, Any], ...] = (
    {"optim.head.lr": 0.0}, {"model.logit_softcap": 0.5}, {"schedule.warmup_fraction": 1.0},
    {"batch.micro_sequences": 1}, {"model.n_layer": 8},
)  # fmt: skip
NEUTRAL: tuple[Mapping[str, Any], ...] = tuple(
    {"optim.embedding.lr": 0.52 * (1 + n * 1e-5), "optim.x0_lambda.lr": 0.25 * (1 + n * 1e-5)} for n in range(1, 11)
)
UNKNOWN: tuple[Mapping[str, Any], ...] = (
    {"optim.muon.momentum": 0.9}, {"optim.muon.momentum": 0.97}, {"optim.muon.momentum_ramp_steps": 50},
    {"optim.muon.weight_decay": 0.0}, {"optim.muon.weight_decay": 0.4}, {"optim.muon.nesterov": False},
    {"optim.muon.normuon_beta2": None}, {"optim.embedding.beta2": 0.99}, {"optim.head.beta1": 0.9},
    {"optim.value_embedding.lr": 0.1}, {"optim.value_embedding.lr": 0.6}, {"model.activation": "gelu"},
    {"optim.grad_clip": 1.0}, {"optim.x0_lambda.lr": 0.5}, {"schedule.final_lr_scale": 0.1},
    {"model.window_pattern": "SL"}, {"optim.muon.iterations": 3}, {"optim.head.weight_decay": 0.01},
    {"optim.muon.orthogonalizer": "newton_schulz"}, {"optim.embedding.beta1": 0.7},
)  # fmt: skip


def plan() -> list[tuple[str, Mapping[str, Any]]]:
    """(kind, fields) in the order of the night."""
    kinds = {"improvement": IMPROVEMENTS, "harm": HARMS, "neutral": NEUTRAL, "unknown": UNKNOWN}
    proposals = [(kind, fields) for kind, several in kinds.items() for fields in several]
    random.Random(2026).shuffle(proposals)
    return proposals


def propose() -> None:
    """Write proposal.json: the next one."""
    done = len(json.loads(Path("state.json").read_text())["experiments"])
    _, fields = plan()[done]
    why = f"number {done + 1} of the script"  # the kind stays hidden
    Path("proposal.json").write_text(json.dumps({"fields": fields, "why": why}))


def summary(lab: Path) -> str:
    """How many of each kind got which verdict."""
    lines = [json.loads(line) for line in (lab / "ledger.jsonl").read_text().splitlines()]
    verdicts = {line["experiment"]: line for line in lines if line["kind"] == "verdict"}
    order = [line["experiment"] for line in lines if line["kind"] == "proposed" and line["experiment"] > 1]
    counts: dict[str, Counter[str]] = {}
    rows = []
    for number, (kind, fields) in zip(order, plan(), strict=False):
        verdict = verdicts.get(number, {"verdict": "in flight"})
        counts.setdefault(kind, Counter())[verdict["verdict"]] += 1
        difference = verdict.get("difference")
        shown = "" if difference is None else f"{float(difference):+.4f}"
        rows.append(f"{number:4} {kind:12} {verdict['verdict']:13} {shown:9} {verdict.get('pairs', '')!s:3} {fields}")
    return "\n".join([*rows, "", *(f"{kind:12} {dict(found)}" for kind, found in counts.items())])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(summary(Path(sys.argv[1])))
    else:
        propose()
