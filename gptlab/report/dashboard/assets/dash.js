// The dashboard's page: what the server sends goes into the list, the charts, the prompt box and the labs.

import { byId, el, post } from "./dom.js";
import { showDetails } from "./details.js";
import { sharedName } from "./filter.js";
import { showLabs } from "./labs.js";
import { runList } from "./list.js";
import { promptBox } from "./talk.js";

const COLORS = 8; // of charts.js
const MAX_DRAWN = 50; // runs: MAX_CHOSEN of server.py
const HOVER_SECONDS = 5; // for which a chart waits that the reader points at

const state = { rows: new Map(), chosen: new Set(), defaults: {}, colors: new Map(), last: null };
const list = runList(state, (id) => { state.last = id ?? state.last; choseOthers(id); });
const talk = promptBox(state);
let charts = null;
let waiting = null;
let asked = 0;
let touched = 0;

gptlabCharts.themeSwitch(byId("theme"));
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the address names the chosen runs
    document.querySelector(link.hash).scrollIntoView({ behavior: "smooth" });
  });
}
byId("charts").addEventListener("change", colorRows); // seeds as bands: their runs share a color

const token = document.querySelector('meta[name="token"]').content;
const events = new EventSource(`/events?token=${token}`);
events.addEventListener("open", () => { state.fresh = true; });
events.addEventListener("error", () => live("The server has stopped. Start gptlab dash again, and reload.", false));
events.addEventListener("message", (event) => receive(JSON.parse(event.data)));

function receive(news) {
  if ("defaults" in news) {
    state.defaults = news.defaults;
    byId("folder").textContent = news.folder;
    document.title = `${news.folder} · gptlab`;
    if (state.fresh) state.rows.clear(); // the server began again, and sends all
    state.fresh = false;
    return;
  }
  for (const id of news.gone) {
    state.rows.delete(id);
    state.chosen.delete(id);
  }
  for (const row of news.rows) state.rows.set(row.id, row);
  if (news.loaded && state.rows.size) choseFirst();
  if ("labs" in news) showLabs(news.labs);
  live(news.loaded ? (state.rows.size ? "live" : "No runs here yet: gptlab train makes one.") : "loading", true);
  list.draw();
  talk.offer(null);
  for (const link of document.querySelectorAll("nav a")) link.hidden = document.querySelector(link.hash).hidden;
  if (news.gone.length || news.rows.some((row) => state.chosen.has(row.id))) drawSoon();
}

function live(text, connected) {
  byId("live").textContent = text;
  byId("live").classList.toggle("problem", !connected);
}

/** The runs named in the address, else those that are training, else the newest. */
let first = true;
function choseFirst() {
  if (!first) return;
  first = false;
  const named = new URLSearchParams(location.hash.slice(1)).get("runs");
  const rows = [...state.rows.values()].sort((a, b) => ((a.start ?? "") < (b.start ?? "") ? 1 : -1));
  const training = rows.filter((row) => row.status === "running").slice(0, COLORS);
  const healthy = rows.filter((row) => row.problem === null);
  const wanted = named !== null ? named.split(",") : (training.length ? training : healthy.slice(0, 1)).map((row) => row.id);
  for (const id of wanted) if (state.rows.has(id)) state.chosen.add(id);
  state.last = [...state.chosen][0] ?? null;
  choseOthers(state.last);
}

/** `id`: the run that was chosen; null where one was taken away. */
function choseOthers(id) {
  history.replaceState(null, "", `#runs=${[...state.chosen].join(",")}`);
  talk.offer(id);
  drawSoon(0);
}

/** Draws within a second, and not more often than that. */
function drawSoon(milliseconds = 1000) {
  if (waiting !== null && milliseconds > 0) return;
  clearTimeout(waiting);
  waiting = setTimeout(() => { waiting = null; drawCharts(milliseconds === 0); }, milliseconds);
}

async function drawCharts(chosenNow) {
  const pointing = byId("charts").querySelector(".u-over:hover");
  if (!chosenNow && pointing && performance.now() - touched < 1000 * HOVER_SECONDS) return drawSoon();
  touched = performance.now();
  const number = ++asked;
  const ids = [...state.chosen].slice(0, MAX_DRAWN);
  byId("nothing").hidden = ids.length > 0;
  byId("charts").hidden = ids.length === 0;
  let data = { runs: [], problems: {} };
  if (ids.length) {
    try {
      data = await (await post("/curves", { runs: ids })).json();
    } catch {
      return; // the server has stopped, which the page says already
    }
    if (number !== asked) return; // others were chosen meanwhile
  }
  const problems = "error" in data ? [data.error] : Object.values(data.problems);
  if (state.chosen.size > ids.length) problems.unshift(`${ids.length} of ${state.chosen.size} runs are drawn.`);
  byId("problems").replaceChildren(...problems.map((problem) => el("li", {}, problem)));
  if (!("error" in data)) {
    nameGroups(data.runs);
    state.drawn = data.runs;
    if (charts) charts.update(data);
    else charts = gptlabCharts.draw(byId("charts"), data);
    byId("charts").dataset.points = String(data.runs.reduce((sum, run) => sum + run.val.step.length, 0));
    colorRows();
  }
  showDetails(state.rows.get(state.chosen.has(state.last) ? state.last : [...state.chosen].pop()));
}

/** Groups by what the names of their runs have in common; by their letter where another group has that name. */
function nameGroups(runs) {
  const names = new Map();
  for (const letter of new Set(runs.map((run) => run.group))) {
    if (letter === null) continue;
    const name = sharedName(runs.filter((run) => run.group === letter));
    names.set(letter, [...names.values()].includes(name) ? letter : name);
  }
  for (const run of runs) run.group = names.get(run.group) ?? null;
}

/** The colors of charts.js: one for each run, or for the runs of a group that are drawn as a band. */
function colorRows() {
  const banded = byId("charts").querySelector('[data-option="banded"] input')?.checked;
  const keys = new Map();
  state.colors.clear();
  for (const run of state.drawn ?? []) {
    const key = banded && run.group !== null ? run.group : run.id;
    if (!keys.has(key)) keys.set(key, `--c${keys.size % COLORS}`);
    state.colors.set(run.id, keys.get(key));
  }
  list.draw();
}
