"""The dashboard and the report as a person sees them, in headless Chromium: one browser for all tests."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tiny_runs import command, train, write_corpus
from written_runs import write_run

from gptlab.lab.experiments.ledger import Ledger
from gptlab.report.dashboard import index as index_module
from gptlab.report.dashboard.server import Dashboard
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CURVE = (3.5, 2.0, 1.5, 1.25)
HOSTILE = "<img src=x onerror=alert(1)>"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
TIMEOUT = 20_000.0
"""Milliseconds, for machines that run other tests meanwhile; every wait ends as soon as there is what it waits for."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on the path")  # a failure in CI: tests/conftest.py
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def watched(browser: Browser) -> tuple[Page, list[str]]:
    """One page for all tests, since a new one takes a second of computing, and what its contents print to the console,
    raise or show as a dialog."""
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT)
    problems: list[str] = []
    context.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    return context.new_page(), problems


@pytest.fixture
def tab(watched: tuple[Page, list[str]]) -> Iterator[Page]:
    """The page of all tests. Whatever it reports during a test fails the test."""
    page, problems = watched
    problems.clear()
    page.set_viewport_size({"width": 1200, "height": 900})
    page.emulate_media(color_scheme="light")
    yield page
    page.evaluate("0")  # reports come in while an answer is awaited
    assert problems == []


def write_lab(folder: Path) -> None:
    """A baseline of 1.5 bits per byte and its noise, an experiment better by 0.02, and one that is far worse."""
    folder.mkdir(parents=True)
    settings = {"name": "night", "recipe": "quickstart", "seconds": None, "steps": 100, "validation_bytes": {}}
    (folder / "lab.json").write_text(json.dumps(settings))
    ledger = Ledger(folder / "ledger.jsonl")
    about = {"files": [], "why": "", "expect": None, "by": "", "against": 0}
    ledger.append("proposed", experiment=0, fields={}, **about)
    ledger.append("measured", experiment=0, seed=1, slice="validation", bpb=1.5, wall_seconds=30.0)
    ledger.append("proposed", experiment=1, fields={}, **about)
    ledger.append("measured", experiment=1, seed=1, slice="validation", bpb=1.501, wall_seconds=30.0)
    ledger.append("proposed", experiment=2, fields={"optim.muon.lr": 0.03, "model.norm": HOSTILE}, **about)
    ledger.append("verdict", experiment=2, verdict="keep", reason="", difference=-0.02, half_width=None)
    ledger.append("proposed", experiment=3, fields={"optim.muon.lr": 0.9}, **about)
    ledger.append("measured", experiment=3, seed=1, slice="validation", bpb=9.5, wall_seconds=30.0)
    ledger.append("verdict", experiment=3, verdict="discard", reason="", difference=8.02, half_width=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """A dashboard of a real run of half a second, three seeds, a run that trains, and hostile ones."""
    folder = tmp_path_factory.mktemp("pages")
    runs = folder / "runs"
    write_corpus(folder / "corpus")
    train(folder, "runs/real", sample__prompts=("the ",))
    for seed in (1, 2):
        write_run(runs / f"gelu-seed-{seed}", [value + 0.01 * seed for value in CURVE], seed=seed)
    (runs / "gelu-seed-1/checkpoints/step-00000030").mkdir(parents=True)
    write_run(runs / "training", CURVE, status="running")
    write_lab(folder / "labs" / "night")
    hostile = write_run(runs / HOSTILE, CURVE, recipe=HOSTILE)
    with MetricsLog(hostile / "metrics.jsonl") as metrics:
        metrics.write("sample", step=30, prompt="<script>alert(2)</script>", text="</pre><script>alert(3)</script>")
        metrics.write("event", step=30, what=HOSTILE, value=None)
    (runs / "damaged").mkdir()
    (runs / "damaged/config.json").write_text("{")
    (runs / "damaged/run.json").write_text("{")
    with served(runs) as server, RunDirectory(runs / "training").lock():
        yield server


@contextmanager
def served(runs: Path) -> Iterator[Dashboard]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "POLL_SECONDS", 0.05)
        with Dashboard(runs, 0) as server:
            serving = threading.Thread(target=server.serve_forever, args=(0.02,))
            serving.start()
            try:
                yield server
            finally:
                server.shutdown()
                serving.join()


@pytest.fixture
def page(world: Dashboard, tab: Page) -> Page:
    """The dashboard, with the runs that are chosen by themselves drawn."""
    tab.goto(world.url)
    tab.wait_for_selector("#charts[data-drawn]")
    return tab


def row(page: Page, name: str) -> Any:
    return page.locator("#rows tr").filter(has=page.get_by_text(name, exact=True))


def choose_only(page: Page, *names: str) -> None:
    for box in page.locator("#rows input:checked").all():
        box.uncheck()
    for name in names:
        row(page, name).locator("input").check()
    page.wait_for_function("count => document.querySelector('#charts').dataset.drawn === count", arg=str(len(names)))


def test_curves_move_while_a_run_trains(world: Dashboard, page: Page) -> None:
    """The run that trains is chosen by itself; a thread appends to it; nothing is reloaded."""
    page.evaluate("window.kept = true")
    assert row(page, "training").locator("input").is_checked()
    assert row(page, "training").locator(".bpb").inner_text() == "1.2500"
    assert page.locator("#charts").get_attribute("data-points") == "4"
    metrics = world.index.folder / "training/metrics.jsonl"
    size = metrics.stat().st_size

    def append() -> None:
        with MetricsLog(metrics) as log:
            for step in (40, 50, 60):
                log.write("train", step=step, tokens=step * 1000, loss=1.0, train_seconds=1.0 * step)
                log.write("eval", step=step, val_loss=1.0, val_bpb=1.1, train_seconds=1.0 * step, tokens=step * 1000)
                time.sleep(0.02)

    appending = threading.Thread(target=append)
    appending.start()
    page.wait_for_selector("#charts[data-points='7']")
    appending.join()
    assert row(page, "training").locator(".bpb").inner_text() == "1.1000"
    assert row(page, "training").locator(".tokens").inner_text() == "60.0k"
    os.truncate(metrics, size)
    page.wait_for_selector("#charts[data-points='4']")
    assert page.evaluate("window.kept") is True


def test_chosen_runs_overlay_and_seeds_are_a_band(page: Page) -> None:
    choose_only(page, "gelu-seed-1", "gelu-seed-2", "real")
    chips = page.locator(".legend .chip").all_inner_texts()
    assert [chip.strip() for chip in chips] == ["gelu (2 runs)", "real"]
    page.get_by_label("seeds as bands").uncheck()
    assert len(page.locator(".legend .chip").all()) == 3
    assert page.locator(".chart-bpb canvas").is_visible()
    page.reload()
    page.wait_for_selector("#charts[data-drawn='3']")


def test_the_list_is_filtered_sorted_and_grouped(page: Page) -> None:
    def names() -> list[str]:
        return page.locator("#rows td.name b").all_inner_texts()

    def listed(text: str, count: int) -> list[str]:
        """`count`: another than before, or the former list would do."""
        page.fill("#filter", text)
        page.wait_for_function("count => document.querySelectorAll('#rows tr').length === count", arg=count)
        return names()

    assert listed("status=running", 1) == ["training"]
    assert listed("gelu-* seed", 0) == []
    assert sorted(listed("run=gelu-*", 2)) == ["gelu-seed-1", "gelu-seed-2"]
    assert listed("model.seq-len=32", 1) == ["real"]
    assert listed("status!=finished", 2) in (["training", "damaged"], ["damaged", "training"])
    assert listed("val_bpb<1.2605 run=gelu-*", 1) == ["gelu-seed-1"]
    listed("model.n_leyer=3", 0)
    assert page.locator("#hint").inner_text() == "There is no column or field model.n_leyer."
    listed("run=gelu-*", 2)
    page.locator("th[data-column=val_bpb] button").click()
    page.wait_for_function("() => document.querySelector('th[data-column=val_bpb]').ariaSort === 'ascending'")
    assert names() == ["gelu-seed-1", "gelu-seed-2"]
    page.locator("th[data-column=val_bpb] button").click()
    page.wait_for_function("() => document.querySelector('th[data-column=val_bpb]').ariaSort === 'descending'")
    assert names() == ["gelu-seed-2", "gelu-seed-1"]
    page.get_by_label("group seeds").check()
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 1")
    assert page.locator("#rows .bpb").inner_text() == "1.2650 ± 0.0071"
    page.locator("#rows button").click()
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 3")


def test_what_the_reader_opened_and_chose_stays_while_a_run_trains(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", CURVE, status="running", recipe="quickstart")
    write_run(tmp_path / "other", CURVE)
    focused = "(selector) => document.activeElement.matches(selector)"

    def trained(step: int) -> None:
        with MetricsLog(run / "metrics.jsonl") as metrics:
            metrics.write("sample", step=step, prompt="", text=f"text {step}")
            metrics.write("train", step=step, tokens=1000 * step, loss=1.0, train_seconds=1.0 * step)

    trained(31)
    trained(32)
    with served(tmp_path) as server, RunDirectory(run).lock():
        tab.goto(server.url)
        tab.locator("#details summary").click()
        tab.select_option("#details select", label="step 31")
        tab.locator("#details select").focus()
        trained(33)
        tab.wait_for_selector("#details option:nth-child(3)", state="attached")
        assert tab.locator("#details details").get_attribute("open") is not None
        assert tab.locator("#details .sampled").inner_text() == "text 31"
        assert tab.evaluate(focused, "#details select")
        tab.evaluate("window.kept = document.querySelector('#details select')")
        row(tab, "live").locator("input").focus()
        with tab.expect_response("**/run"), MetricsLog(run / "metrics.jsonl") as metrics:
            metrics.write("train", step=34, tokens=34_000, loss=1.0, train_seconds=34.0)
        row(tab, "live").locator(".tokens", has_text="34.0k").wait_for()
        assert tab.evaluate("kept.isConnected")
        assert tab.evaluate(focused, "[aria-label='show live']")
        for checked, shown in ((True, "other"), (False, "live")):
            row(tab, "other").locator("input").set_checked(checked)
            tab.locator("#details h2", has_text=shown).wait_for()
        tab.goto("about:blank")


def test_a_group_of_more_runs_than_a_page_draws(tab: Page, tmp_path: Path) -> None:
    """Two runs have one seed, and one of them failed."""
    for number in range(50):
        write_run(tmp_path / f"gelu-{number:02}", CURVE, seed=number)
    write_run(tmp_path / "gelu-50", (3.5, 9.0), seed=49, status="failed")
    with served(tmp_path) as server:
        tab.goto(server.url)
        tab.get_by_label("group seeds").check()
        group = tab.locator("#rows tr.group")
        group.get_by_text("gelu (51 runs, 50 seeds)").wait_for()
        assert group.locator(".bpb").inner_text() == "1.2500 ± 0.0000 50 of 51"
        group.locator("input").check()
        tab.wait_for_selector("#charts[data-drawn='50']")
        assert tab.locator("#problems").inner_text() == "50 of 51 runs are drawn."
        tab.goto("about:blank")


def test_a_prompt_is_answered(page: Page) -> None:
    """By a real run, in a process of its own."""
    page.select_option("#model", label="real")
    page.fill("#prompt", "the quick")
    page.fill("#max-tokens", "5")
    page.fill("#top-k", "3")
    page.fill("#top-p", "0.9")
    page.fill("#seed", "1")
    page.click("#go")
    page.wait_for_function("() => document.querySelector('#go').textContent === 'Continue'", timeout=60_000)
    assert page.locator("#answering").inner_text().startswith("Step 12 of real, ")
    assert page.locator("#text .prompt").inner_text() == "the quick"
    tokens = page.locator("#text .t")
    assert 1 <= tokens.count() <= 5
    first = page.locator("#text").inner_text()
    tokens.first.hover()
    explained = page.locator("#token").inner_text()
    assert "had a probability of" in explained
    shares = [float(cell.rstrip("%")) for cell in page.locator("#token td.n").all_inner_texts()]
    assert len(shares) >= 8
    assert shares[:8] == sorted(shares[:8], reverse=True)
    assert 0 < sum(shares[:8]) <= 100.5
    page.click("#go")
    page.wait_for_function("() => document.querySelector('#go').textContent === 'Continue'", timeout=60_000)
    assert page.locator("#text").inner_text() == first


def test_an_answer_that_comes_at_once_has_no_rate(page: Page) -> None:
    token = {"text": "a", "name": "a", "probability": 0.5, "alternatives": []}
    lines = "".join(f"{json.dumps(line)}\n" for line in ({"step": 12}, token, token))
    page.route("**/prompt", lambda route: route.fulfill(body=lines))
    page.select_option("#model", label="real")
    page.fill("#seed", "1")
    page.click("#go")
    page.locator("#answering", has_text="2 tokens").wait_for()
    page.unroute("**/prompt")
    assert page.locator("#answering").inner_text() == "Step 12 of real, 2 tokens, seed 1."


def test_the_run_of_the_prompt_stays_while_others_train(world: Dashboard, page: Page) -> None:
    """A click in the list still selects the run that it chose."""
    selected = "() => document.querySelector('#model').selectedOptions[0].text"
    row(page, "gelu-seed-1").locator("input").check()
    assert page.evaluate(selected) == "gelu-seed-1"
    page.select_option("#model", label="real")
    metrics = world.index.folder / "training/metrics.jsonl"
    size = metrics.stat().st_size
    with MetricsLog(metrics) as log:
        log.write("train", step=31, tokens=31_000, loss=1.0, train_seconds=31.0)
    row(page, "training").locator(".tokens", has_text="31.0k").wait_for()
    assert page.evaluate(selected) == "real"
    os.truncate(metrics, size)


def test_hostile_names_and_samples_stay_text(page: Page) -> None:
    """A dialog or a message on the console would fail this test (`tab`)."""
    choose_only(page, HOSTILE)
    assert row(page, "damaged").locator(".problem").inner_text().count("config.json is damaged: it is not JSON")
    page.wait_for_function("() => document.querySelector('#details h2')?.textContent.startsWith('<img')")
    shown = page.locator("#details").inner_text()
    assert "</pre><script>alert(3)</script>" in shown
    assert HOSTILE in shown
    assert page.locator("#rows img, #details img, #details script, #model img, .legend img").count() == 0


def background(page: Page) -> str:
    """light | dark, by the sum of its red, green and blue."""
    color = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return "light" if sum(color[:3]) > 600 else "dark"


def test_a_report_draws_its_charts_and_switches_colors(world: Dashboard, tab: Page, tmp_path: Path) -> None:
    """Of a real run, and of a hostile one beside others, from the disk and without a server."""
    runs = world.index.folder
    one, several = tmp_path / "one.html", tmp_path / "several.html"
    assert command(["report", runs / "real", "--out", one])[0] == 0
    assert command(["report", *(runs / name for name in ("real", "gelu-seed-1", HOSTILE)), "--out", several])[0] == 0
    for path in (one, several):
        tab.goto(path.as_uri())
        tab.wait_for_selector("#charts[data-drawn]")
        assert tab.locator("canvas").count() >= 2
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert background(tab) == scheme
        for theme in ("light", "dark", "system"):
            button = tab.locator("#theme")
            button.click()
            assert button.inner_text() == f"colors: {theme}"
            assert background(tab) == ("dark" if theme == "system" else theme)
        tab.get_by_role("button", name="tokens", exact=True).click()
        assert tab.locator('button[data-axis="tokens"]').get_attribute("aria-pressed") == "true"
        assert tab.locator("img").count() == 0


def test_a_chart_explains_its_points_fits_its_end_and_is_saved(world: Dashboard, tab: Page, tmp_path: Path) -> None:
    """On a page of validations 3.51, 2.01, 1.51 and 1.26 at steps 0, 10, 20 and 30."""
    path = tmp_path / "report.html"
    assert command(["report", world.index.folder / "gelu-seed-1", "--out", path])[0] == 0
    tab.goto(path.as_uri())
    tab.wait_for_selector("#charts[data-drawn]")
    area, dot = tab.locator(".chart-bpb .u-over"), tab.locator(".chart-bpb .u-cursor-pt").first
    size = area.bounding_box()
    assert size is not None

    def height_at_step_10() -> float:
        """Of the second point, as a share of the chart: 0 is its top."""
        tab.mouse.move(0, 0)
        area.hover(position={"x": size["width"] / 3, "y": 5})
        box = dot.bounding_box()
        assert box is not None
        return (box["y"] + box["height"] / 2 - area.bounding_box()["y"]) / size["height"]  # type: ignore[index]

    assert height_at_step_10() > 0.5, "all of the curve is seen: 2.01 is in its lower half"
    explained = tab.locator(".chart-bpb .tip").inner_text().split()
    assert explained[:2] == ["10", "steps"]
    assert "2.01" in explained
    tab.get_by_label("fit the end").check()
    assert height_at_step_10() < 0.2, "2.01 is the highest value after the start"
    with tab.expect_download() as download:
        tab.locator(".chart-bpb").get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "bpb.csv"
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "run,part,step,tokens,seconds,flops,bpb"
    assert lines[2] == '"gelu-seed-1",val,10,10000,10,60000000,2.01'
    assert len(lines) == 1 + len(CURVE)


RECORD = """
window.texts = []; window.dots = 0;
const [canvas, { arc }] = [CanvasRenderingContext2D.prototype, Path2D.prototype], { fillText } = canvas;
canvas.fillText = function (...words) { texts.push(words[0]); fillText.apply(this, words); };
Path2D.prototype.arc = function (...words) { dots += 1; arc.apply(this, words); };
true;
"""


def report_page(tab: Page, *runs: Path) -> Page:
    """Whose canvases note in `texts` and `dots` what is drawn on them from now on."""
    path = runs[0].parent / "report.html"
    assert command(["report", *runs, "--out", path])[0] == 0
    tab.goto(path.as_uri())
    tab.wait_for_selector("#charts[data-drawn]")
    tab.evaluate(RECORD)
    return tab


def drawn(tab: Page, role: Literal["button", "checkbox"], name: str) -> list[str]:
    """The texts of all charts after a click: those of the axes, and those beside marks."""
    tab.evaluate("texts.length = dots = 0")
    tab.get_by_role(role, name=name, exact=True).click()
    tab.wait_for_function("() => texts.filter((text) => text === 'steps').length >= 2")
    return tab.evaluate("texts")


KEEP_PLOTS = """
window.plots = [];
window.uPlot = class extends uPlot { constructor(...words) { super(...words); plots.push(this); } };
true;
"""


def first_plot(tab: Page, name: str, of: str) -> Any:
    """`of` the first chart (JavaScript, of `plot`) after a click on the button `name`."""
    tab.evaluate(KEEP_PLOTS)
    tab.get_by_role("button", name=name, exact=True).click()
    return tab.evaluate(f"(({{ 0: plot }}) => {of})(plots)")


def test_seeds_that_go_on_past_a_broken_one_are_drawn_to_their_ends(tab: Page, tmp_path: Path) -> None:
    """The band of all three ends at step 10."""
    runs = [write_run(tmp_path / str(seed), (3.5, 2.0, 1.5, 1.25 + seed), seed=seed) for seed in (0, 1)]
    broken = write_run(tmp_path / "2", (3.5, 2.0, math.nan, math.nan), seed=2)
    ends = "plot.data.slice(1).map((ys) => ys[3]).filter((y) => y !== null && y !== undefined)"
    assert first_plot(report_page(tab, *runs, broken), "steps", ends) == [1.25, 2.25]


def test_the_end_of_a_short_run_fits_too(tab: Page, tmp_path: Path) -> None:
    """It has a fifteenth of the other's steps."""
    runs = write_run(tmp_path / "short", (9.0, 7.0), every_steps=2), write_run(tmp_path / "long", CURVE)
    low, high = first_plot(report_page(tab, *runs), "steps", "[plot.scales.y.min, plot.scales.y.max]")
    assert low < 1.25
    assert 7 < high < 8


def test_the_failure_of_a_run_is_marked_and_named(tab: Page, tmp_path: Path) -> None:
    """It is after the last validation, at step 20, and the axis reaches it."""
    runs = [write_run(tmp_path / str(number), (3.5, 2.0, 1.5), status="failed", seed=number) for number in (1, 2)]
    with MetricsLog(runs[0] / "metrics.jsonl") as metrics:
        metrics.write("event", step=40, what="failed", value=None, reason="")
    for chosen in (runs[:1], runs):
        texts = drawn(report_page(tab, *chosen), "button", "steps")
        assert texts.count("failed") == 2, "in both charts"
        assert texts.count("40") == 2


def test_labels_of_an_axis_differ(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", (4.46498, 4.46492, 4.4649))
    texts = drawn(report_page(tab, run), "button", "steps")
    labels = [text for text in texts if text.startswith("4.46")]
    assert len(labels) >= 6
    assert len(set(labels)) == len(labels) / 2, "the loss has the same values"


def test_the_only_value_of_a_series_is_a_point(tab: Page, tmp_path: Path) -> None:
    """Two charts of two validations, and the loss of one step."""
    page = report_page(tab, write_run(tmp_path / "run", (4.0, 3.0), every_steps=1))
    drawn(page, "button", "steps")
    assert page.evaluate("dots") == 5


def test_a_logarithmic_loss_fills_its_chart(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", (6.3, 4.0, 2.9), every_steps=100)
    texts = drawn(report_page(tab, run), "checkbox", "log loss")
    assert [text for text in texts if text in ("2", "3", "4", "5", "6", "7", "10")] == ["3", "4", "5", "6"] * 2


FILTER = "async (words) => { const filter = await import('/filter.js'); return (%s)(...words); }"


ASKED: list[tuple[str, bool, str | None]] = [
    ("val_bpb=2.5714", True, None), ("val_bpb=2.571", False, None), ("data.source=/b", True, None),
    ("data.source=*c", False, None), ("start>2026-11-22", True, None), ("start>2026-11-23", False, None),
    ("tokens>80k", False, "80k in tokens>80k is no number."), ("tokens>8e4", True, None),
]  # fmt: skip


def test_a_filter_finds_what_is_shown(page: Page) -> None:
    shown = {"val_bpb": 2.57139, "tokens": 90_000, "start": "2026-11-22T08:00:00+00:00"}
    row = {"name": "a", "fields": {"data.source": ["/a", "/b"]}, **shown}
    answer = "(words, row) => (({ test, problem }) => [test(row), problem])(filter.readFilter(words, row.fields))"
    for words, found, problem in ASKED:
        assert page.evaluate(FILTER % answer, [words, row]) == [found, problem], words


def test_groups_are_in_the_order_of_their_means(page: Page) -> None:
    """`a` has the best seed and the worse mean; seeds that failed count for nothing."""
    bpb = {"a": [("finished", 1.0), ("finished", 2.0)], "b": [("finished", 1.4), ("failed", 9.0)]}
    bpb["c"] = [("failed", 0.1), ("failed", 0.2)]
    rows = [
        {"id": f"{group}{seed}", "name": group, "group": group, "status": status, "val_bpb": value}
        for group, seeds in bpb.items()
        for seed, (status, value) in enumerate(seeds)
    ]
    order = "(rows, down) => filter.sortedGroups(filter.grouped(rows), 'val_bpb', down).map(({ key }) => key)"
    assert page.evaluate(FILTER % order, [rows, False]) == ["b", "a", "c"]
    assert page.evaluate(FILTER % order, [rows, True]) == ["a", "b", "c"]


def test_the_name_of_a_group_is_not_cut_within_a_number(page: Page) -> None:
    for names, shared in (
        (["gelu-seed-1337", "gelu-seed-1338"], "gelu"), (["x-seed-1", "x-seed-10"], "x"), (["d12-a", "d12-b"], "d12"),
        (["12", "13"], "12"),
    ):  # fmt: skip
        rows = [{"name": name} for name in names]
        assert page.evaluate(FILTER % "(...rows) => filter.sharedName(rows)", rows) == shared


def test_a_short_number_has_the_unit_of_what_it_is_rounded_to(page: Page) -> None:
    counts = "async numbers => numbers.map((await import('/dom.js')).count)"
    assert page.evaluate(counts, [950, 999.7, 999_817_216, 3.28e12]) == ["950", "1.00k", "1.00B", "3.28T"]


def test_a_lab_beside_the_runs_shows_its_frontier(page: Page) -> None:
    shown = page.locator("#labs").inner_text()
    assert "1.4800 bits per byte" in shown
    assert "1 keep" in shown
    assert f"model.norm={HOSTILE}" in shown
    assert page.locator("#labs svg.frontier circle").count() == 2
    assert page.locator("#labs svg.frontier path.experiment").count() == 1
    assert "A triangle is one that is worse than 1.530." in shown
    page.set_viewport_size({"width": 400, "height": 800})
    text = page.locator(".frontier text").first.bounding_box()
    assert text is not None
    assert text["height"] > 10, "pixels"


def test_labels_of_a_lab_with_a_baseline_alone_differ(page: Page) -> None:
    first = {"experiment": 0, "bpb": 2.87, "best_bpb": 2.87, "verdict": None, "change": ""}
    lab = {"name": "a", "problem": None, "verdicts": {}, "frontier": [first], "best_bpb": 2.87, "first_bpb": 2.87}
    page.evaluate("async (lab) => (await import('/labs.js')).showLabs([lab])", lab)
    labels = page.locator("#labs .frontier text[text-anchor=end]").all_text_contents()
    assert len({*labels}) == len(labels) == 6


def test_a_status_is_one_word_in_a_narrow_window(tab: Page, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{number}-{'long' * 20}", CURVE, seed=number) for number in (1, 2)]
    page = report_page(tab, *runs)
    page.set_viewport_size({"width": 400, "height": 800})
    lines = page.evaluate("""() => {
      const range = document.createRange();
      range.selectNodeContents([...document.querySelectorAll("td")].find((cell) => cell.textContent === "finished"));
      return range.getClientRects().length;
    }""")
    assert lines == 1


def test_the_page_fits_its_window(page: Page) -> None:
    for scheme, width in (("light", 1200), ("dark", 400)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        assert background(page) == scheme
