"""report.html: one file that holds everything it shows, and that asks nothing of any network.

Texts from runs are untrusted: all are escaped, the JSON of the charts cannot end its script element, and a policy in
the page allows only the page's own scripts and styles, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from gptlab.report.curves import MAX_BUCKETS, buckets_for, chart_data, chart_run
from gptlab.report.overlay import Overlay
from gptlab.report.run_facts import VALIDATION_COLUMNS, RunFacts, Sample, duration, read_facts
from gptlab.report.text_curves import svg_curve
from gptlab.report.token_fate import token_fate

BPB = "Bits per byte of the validation text: lower is better, and 8 is no knowledge at all."

_BOOT = """
gptlabCharts.themeSwitch(document.getElementById("theme"));
gptlabCharts.draw(document.getElementById("charts"), JSON.parse(document.getElementById("data").textContent));
"""


def run_page(facts: RunFacts) -> str:
    """The page of one run."""
    run = chart_run(facts.name, facts.metrics, seed=facts.record.seed, status=facts.status, buckets=MAX_BUCKETS)
    body = [
        _header(facts.name, facts.sentence(), facts.status),
        _figures(facts),
        "<h2>Curves</h2>" + _charts(),
        _validations(facts),
        _section("Where the time went", _time(facts)),
        _section("Samples", _samples(facts)),
        _section("CORE by task", _core(facts)),
        _section("Tokens", _table(("", ""), token_fate(facts))),
        _section("Events", _table(("when", "what"), facts.events())),
        _section("Configuration", _configuration(facts)),
        _section("Provenance", _table(("", ""), facts.provenance().items())),
        _section("How to repeat it", _commands(facts.commands())),
    ]
    return _page(facts.name, body, chart_data([run]))


def overlay_page(overlay: Overlay) -> str:
    """The page of several runs."""
    runs = [
        chart_run(
            name, facts.metrics, group=group, seed=facts.record.seed, status=facts.status,
            buckets=buckets_for(len(overlay.runs)),
        )
        for name, group, facts in overlay.labeled()
    ]  # fmt: skip
    samples = [
        f"<h3>{escape(name)}</h3>{_sample(prompt, sample)}" for name, prompt, sample in overlay.samples_of_one_prompt()
    ]
    body = [
        _header(overlay.title, overlay.sentence(), ""),
        f'<p class="muted">{BPB}</p>',
        "<h2>Curves</h2>" + _charts(),
        _section("Configurations", _table(overlay.GROUP_COLUMNS, overlay.group_rows(), numbers=(1, 2, 3, 4))),
        _section("Runs", _table(overlay.RUN_COLUMNS, overlay.run_rows(), numbers=(3, 4, 5, 6, 7))),
        _section("The same prompt, at the end", _details(f"{len(samples)} samples", "".join(samples))),
    ]
    return _page(overlay.title, body, chart_data(runs))


def notebook_html(run: Path) -> str:
    """A run's final numbers and its curve, as an element without scripts and styles. UserError for a damaged run."""
    facts = read_facts(run)
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in facts.figures())
    steps, bpb = (facts.metrics.validations[name].tolist() for name in ("step", "val_bpb"))
    curve = svg_curve(steps, bpb, title="steps, validation bits per byte")
    return f"<div><p>{escape(facts.sentence())}</p>{curve}<table>{rows}</table><p>{escape(str(run))}</p></div>"


def _page(title: str, body: Iterable[str], data: object) -> str:
    assets = resources.files("gptlab.report") / "assets"
    style = "".join((assets / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css"))
    scripts = [(assets / name).read_text(encoding="utf-8") for name in ("uPlot.iife.min.js", "charts.js")] + [_BOOT]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · gptlab</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n<footer>Written by gptlab. Charts: uPlot 1.6.32, MIT license.</footer>\n</main>\n"
        f'<script type="application/json" id="data">{text}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )
    # Names of folders and texts of files may hold lone surrogates, which UTF-8 has not.
    return page.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(title: str, sentence: str, status: str) -> str:
    shown = f' <small class="status status-{escape(status)}">{escape(status)}</small>' if status else ""
    return (
        f'<header><h1>{escape(title)}{shown}</h1><button type="button" id="theme">colors: system</button></header>\n'
        f'<p class="lead">{escape(sentence)}</p>'
    )


def _charts() -> str:
    return '<div id="charts"></div>\n<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Empty without rows. `numbers`: the columns to align on the right."""
    kinds = ['class="n"' if place in numbers else 'class="words"' for place in range(len(columns))]

    def line(cell: str, texts: Sequence[str]) -> str:
        cells = zip(kinds, texts, strict=True)
        return f"<tr>{''.join(f'<{cell} {kind}>{escape(text)}</{cell}>' for kind, text in cells)}</tr>"

    body = [line("td", row) for row in rows]
    head = line("th", columns) if any(columns) else ""
    return f'<div class="wide"><table>{head}\n{chr(10).join(body)}\n</table></div>' if body else ""


def _figures(facts: RunFacts) -> str:
    figures = [f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts.figures()]
    shown = "\n".join(figures).replace("<div>", '<div class="first">', 1)
    return f'<dl class="figures">\n{shown}\n</dl>\n<p class="muted">{BPB}</p>' if figures else ""


def _validations(facts: RunFacts) -> str:
    rows = facts.validation_rows()
    return _details(f"{len(rows)} validations as a table", _table(VALIDATION_COLUMNS, rows, numbers=range(5)))


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>" if content else ""


def _time(facts: RunFacts) -> str:
    parts = facts.time()
    total = sum(seconds for _, seconds in parts)
    if not total > 0:
        return ""
    bar, rows, start = "", "", 0.0
    for number, (part, seconds) in enumerate(parts):
        share = 100 * seconds / total
        bar += f'<rect class="f{number}" x="{start:.3f}%" width="{share:.3f}%" height="14"/>'
        start += share
        key = f'<svg class="key" viewBox="0 0 10 10"><rect class="f{number}" width="10" height="10" rx="3"/></svg>'
        rows += f'<tr><td>{key}{part}</td><td class="n">{duration(seconds)}</td><td class="n">{share:.1f}%</td></tr>\n'
    label = ", ".join(f"{part} {100 * seconds / total:.0f}%" for part, seconds in parts)
    return f'<svg class="bars" role="img" aria-label="{label}">{bar}</svg>\n<table>{rows}</table>'


def _samples(facts: RunFacts) -> str:
    found = []
    for prompt, samples in facts.samples().items():
        *earlier, last = [_sample(prompt, sample) for sample in samples]
        found.append(last + _details(f"the same prompt earlier, at {len(earlier)} steps", "".join(earlier)))
    return "\n".join(found)


def _sample(prompt: str, sample: Sample) -> str:
    return (
        f'<div class="sample"><div class="sample-step">step {sample.step:,}</div>'
        f'<pre><span class="prompt">{escape(prompt)}</span>{escape(sample.text)}</pre></div>'
    )


def _core(facts: RunFacts) -> str:
    rows = ""
    for task in facts.core():
        # A task below guessing has no bar.
        width = 100 * min(1.0, max(0.0, task.centered)) if math.isfinite(task.centered) else 0.0
        size = 'height="12" rx="3"'
        bar = f'<rect class="track" width="100%" {size}/><rect class="f0" width="{width:.2f}%" {size}/>'
        rows += (
            f'<tr><td class="words">{escape(task.name)}</td><td class="n">{task.accuracy:.3f}</td>'
            f'<td class="n">{task.centered:.3f}</td><td><svg class="bar1" aria-hidden="true">{bar}</svg></td></tr>\n'
        )
    head = '<tr><th>task</th><th class="n">accuracy</th><th class="n">corrected for guessing</th><th></th></tr>'
    return f'<div class="wide"><table>{head}\n{rows}</table></div>' if rows else ""


def _configuration(facts: RunFacts) -> str:
    changes = facts.changes()
    recipe = escape(str(facts.record.fields.get("recipe")))
    if changes is None:
        first = f"<p>The recipe {recipe} is not one of this gptlab.</p>"
    elif changes:
        differs = f"<p>What differs from the recipe {recipe} for this depth and length:</p>"
        first = differs + _table(("field", "here", "in the recipe"), changes)
    else:
        first = f"<p>That of the recipe {recipe}, for this depth and length.</p>"
    rows = facts.configuration().items()
    return first + _details(f"all {len(rows)} fields", _table(("field", "value"), rows))


def _commands(commands: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<h3>{escape(what)}</h3><pre>{escape(command)}</pre>" for what, command in commands)
