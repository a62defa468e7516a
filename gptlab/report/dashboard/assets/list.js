// The list of runs. Rows are made once and kept until their run changes; only as many as fit a page are made at once.

import { ago, bpb, byId, count, duration, el, number, sparkline } from "./dom.js";
import { field, finishedBpb, grouped, mean, readFilter, sharedName, sorted, sortedGroups } from "./filter.js";

const PAGE = 200;
const HEADINGS = [
  ["", null], ["run", "run"], ["status", "status"], ["bpb", "val_bpb"], ["", null], ["tokens", "tokens"],
  ["time", "seconds"], ["started", "start"],
];
const MAX_CHANGES = 8;
const NOT_SHOWN = ["runtime.", "checkpoint.", "sample.", "eval.", "faults.", "log.", "data.cache_dir"];

/** Shows `state.rows` (id -> row) and marks `state.chosen` (ids). `onChoose` is called when the reader chose others. */
export function runList(state, onChoose) {
  const view = { sort: "start", descending: true, limit: PAGE, open: new Set() };
  let made = new WeakMap(); // row -> its element: a run that changes has another row
  let known = null; // how many rows say in what they differ from their recipe
  let frequency = new Map(); // change -> how many runs have it: the rarest say most
  let queued = false;

  byId("columns").append(...HEADINGS.map(([title, column]) => {
    if (column === null) return el("td");
    const button = el("button", { type: "button", class: "quiet", onclick: () => sortBy(column) }, title);
    return el("th", { "data-column": column, scope: "col" }, button);
  }));
  for (const id of ["filter", "grouped"]) byId(id).addEventListener("input", () => { view.limit = PAGE; draw(); });
  byId("more").addEventListener("click", () => { view.limit = Infinity; draw(); });

  function sortBy(column) {
    const again = view.sort === column;
    view.descending = again ? !view.descending : ["start", "tokens", "seconds"].includes(column);
    view.sort = column;
    draw();
  }

  function draw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; drawNow(); });
  }

  function drawNow() {
    countChanges();
    const filter = readFilter(byId("filter").value, state.defaults);
    const all = [...state.rows.values()];
    const rows = sorted(all.filter(filter.test), view.sort, view.descending);
    const groups = byId("grouped").checked
      ? sortedGroups(grouped(rows), view.sort, view.descending) : rows.map((row) => ({ key: row.id, rows: [row] }));
    const lines = [];
    for (const group of groups) {
      if (lines.length >= view.limit) break;
      const several = group.rows.length > 1;
      if (several) lines.push(groupLine(group));
      if (!several || view.open.has(group.key)) lines.push(...group.rows.map((row) => runLine(row, several)));
    }
    const body = byId("rows");
    const same = lines.length === body.children.length && lines.every((line, at) => line === body.children[at]);
    if (!same) replaceLines(body, lines);
    byId("hint").textContent = filter.problem ?? "";
    byId("hint").hidden = filter.problem === null;
    const training = all.filter((row) => row.status === "running").length;
    const shown = rows.length === all.length ? `${all.length}` : `${rows.length} of ${all.length}`;
    byId("count").textContent = `${shown} run${all.length === 1 ? "" : "s"}${training ? `, ${training} training` : ""}`;
    const left = groups.length - view.limit;
    byId("more").hidden = !(left > 0);
    byId("more").textContent = `Show ${left} more`;
    for (const head of byId("columns").children) {
      const sort = head.dataset.column === view.sort ? (view.descending ? "descending" : "ascending") : "none";
      if (head.dataset.column) head.setAttribute("aria-sort", sort);
    }
  }

  /** Keeps the keyboard's focus, on the line of the same run or group. */
  function replaceLines(body, lines) {
    const focused = body.contains(document.activeElement) ? document.activeElement : null;
    const key = focused?.closest("tr").dataset.key;
    body.replaceChildren(...lines);
    const line = focused && lines.find((one) => one.dataset.key === key);
    line?.querySelector(focused.tagName)?.focus({ preventScroll: true });
  }

  function countChanges() {
    const rows = [...state.rows.values()].filter((row) => row.changes);
    if (rows.length === known) return;
    [known, frequency, made] = [rows.length, new Map(), new WeakMap()];
    for (const change of rows.flatMap((row) => row.changes.map(String))) frequency.set(change, (frequency.get(change) ?? 0) + 1);
  }

  function runLine(row, indented) {
    if (!made.has(row)) made.set(row, makeRun(row));
    const line = made.get(row);
    line.classList.toggle("member", indented);
    mark(line, [row]);
    return line;
  }

  function mark(line, rows) {
    const chosen = rows.filter((row) => state.chosen.has(row.id));
    const box = line.querySelector("input");
    box.checked = chosen.length === rows.length;
    box.indeterminate = chosen.length > 0 && chosen.length < rows.length;
    line.classList.toggle("chosen", chosen.length > 0);
    const color = chosen.length ? state.colors.get(chosen[0].id) : undefined;
    line.style.setProperty("--own", color === undefined ? "transparent" : `var(${color})`);
  }

  function choose(rows, wanted) {
    for (const row of rows) {
      if (wanted) state.chosen.add(row.id);
      else state.chosen.delete(row.id);
    }
    onChoose(wanted ? rows[0].id : null);
    draw();
  }

  function line(key, rows, name, cells, title) {
    const box = el("input", { type: "checkbox", "aria-label": `show ${name}`, onchange: () => choose(rows, box.checked) });
    const tr = el("tr", { title, "data-key": key }, el("td", { class: "pick" }, box), ...cells);
    // A click anywhere in the row chooses it, unless text is being selected.
    tr.addEventListener("click", (event) => {
      if (event.target.closest("input, button, a") || String(getSelection())) return;
      choose(rows, !box.checked);
    });
    return tr;
  }

  function makeRun(row) {
    const all = (row.changes ?? []).map(([name, value]) => `${name} = ${text(value)}`).join("\n");
    const about = row.problem !== null
      ? el("span", { class: "problem" }, row.problem)
      : el("span", { class: "about" }, aboutText(row), " ", ...chips(row.changes));
    const status = [el("span", { class: `badge ${badge(row.status)}` }, row.status)];
    if (row.status === "running" && row.share !== null) {
      status.push(el("progress", { max: 1, value: row.share, "aria-label": "share of the run that is done" }));
    }
    return line(row.id, [row], row.name, [
      el("td", { class: "name" }, el("b", {}, row.name), about),
      el("td", { class: "status" }, ...status),
      el("td", { class: "bpb n" }, bpb(row.val_bpb)),
      el("td", { class: "curve" }, sparkline(row.spark ?? [])),
      el("td", { class: "tokens n" }, count(row.tokens)),
      el("td", { class: "time n" }, duration(row.seconds)),
      el("td", { class: "start" }, el("time", { title: row.start ?? "" }, ago(row.start))),
    ], all || null);
  }

  function groupLine(group) {
    const first = group.rows[0];
    const values = finishedBpb(group.rows), middle = mean(values);
    const part = values.length < group.rows.length ? ` ${values.length} of ${group.rows.length}` : "";
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
    const seeds = [...new Set(group.rows.map((row) => row.seed))];
    const many = `${seeds.length} seed${seeds.length === 1 ? "" : "s"}`;
    const members = seeds.length === group.rows.length ? many : `${group.rows.length} runs, ${many}`;
    const open = view.open.has(group.key);
    const toggle = el("button", {
      type: "button", class: "quiet", "aria-expanded": String(open),
      onclick: () => { if (!view.open.delete(group.key)) view.open.add(group.key); draw(); },
    }, `${open ? "▾" : "▸"} ${sharedName(group.rows)} (${members})`);
    const statuses = [...new Set(group.rows.map((row) => row.status))];
    const made = line(group.key, group.rows, `${members} of ${first.name}`, [
      el("td", { class: "name" }, el("b", {}, toggle), el("span", { class: "about" }, aboutText(first, false), " ", ...chips(first.changes))),
      el("td", { class: "status" }, ...statuses.map((status) => el("span", { class: `badge ${badge(status)}` }, status))),
      el("td", { class: "bpb n" }, values.length ? middle.toFixed(4) : "",
        values.length > 1 ? el("small", { title: "standard deviation over the seeds" }, ` ± ${spread.toFixed(4)}`) : null,
        part ? el("small", { title: "finished runs, whose mean this is" }, part) : null),
      el("td", { class: "curve" }, sparkline(first.spark ?? [])),
      el("td", { class: "tokens n" }, count(first.tokens)),
      el("td", { class: "time n" }, duration(first.seconds)),
      el("td", { class: "start" }, el("time", { title: first.start ?? "" }, ago(first.start))),
    ], `seeds ${seeds.join(", ")}`);
    made.classList.add("group");
    mark(made, group.rows);
    return made;
  }

  function aboutText(row, withSeed = true) {
    const depth = field(row, "model.n_layer", state.defaults);
    const [amount, unit] = row.horizon ?? [null, ""];
    const length = amount === null ? "" : unit === "seconds" ? duration(amount) : `${amount < 1e5 ? amount.toLocaleString("en") : count(amount)} ${unit.replaceAll("_", " ")}`;
    const seed = withSeed && typeof row.seed === "number" ? `seed ${row.seed}` : "";
    return [row.recipe, `depth ${depth}`, length, seed].filter(Boolean).join(" · ");
  }

  function chips(changes) {
    if (changes === undefined) return []; // not compared with the recipe yet
    if (changes === null) return [el("i", { class: "change" }, "an unknown recipe")];
    const named = changes.filter(([name]) => !NOT_SHOWN.some((prefix) => name.startsWith(prefix)) && name !== "seed");
    named.sort((a, b) => frequency.get(String(a)) - frequency.get(String(b)));
    return named.slice(0, MAX_CHANGES).map(([name, value]) => el("i", { class: "change" }, `${name}=${text(value)}`));
  }

  return { draw };
}

const STATUSES = ["running", "finished", "preempted", "failed", "killed", "damaged"];

/** Statuses come from run.json: only known ones become the name of a class. */
const badge = (status) => (STATUSES.includes(status) ? `is-${status}` : "");

const text = (value) => (value === null ? "none" : String(value));
