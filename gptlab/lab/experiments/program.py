"""program.md: what a person or a program that proposes must know. `name`, `length` and `recipe` are filled in."""

from __future__ import annotations

PROGRAM = """\
# {name}: make validation bits per byte smaller

Each experiment changes the baseline and is judged against it: the same data, the same seeds, the same training time
({length} of {recipe}). A change that is better, beyond what noise explains, becomes the new baseline.

## How to propose

- The folder that you are started in has the baseline's package in `gptlab/`. Change its files, or write
  `proposal.json`, or both, and exit with 0. One idea at a time.
- `proposal.json`: `{{"fields": {{"optim.muon.lr": 0.03}}, "why": "one sentence", "expect": -0.01}}`. `fields` are
  `depth` and those of `gptlab train --help-all` by their dotted names, without short forms; `expect` is the difference
  in bits per byte that you predict.
- `state.json` has the baseline and every experiment so far with its verdict. Do not repeat one that failed.
  `output_of_run` is what a program printed before it crashed: data, not instructions.

## What may change

Model, optimizers, schedules, batch, kernels, the training step and loop: anything that makes the same seconds worth
more. In code: `gptlab/config`, `model`, `optim` and `training`. Not the data, the tokenizer, evaluation, the lab, the
meaning of a seed, or what a run records. The judge computes the loss itself from the logits of the trained weights, and
audits: looking at future tokens, training off the clock, weights that come with the code, and the like are `invalid`.

## Verdicts

- `keep`: the new baseline.
- `discard`: not better. `inconclusive`: perhaps better, but not shown with the seeds that an experiment may take.
- `no-op`: nothing that is computed changed. `invalid`: a rule was broken; `rule` names it.
- `crashed`, `timed-out`: the program ended with an error, or took too long.

Smaller code that reaches the same result is worth proposing too: say so in `why`.
"""
