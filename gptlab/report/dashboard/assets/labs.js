// The labs beside the runs: every experiment of each, and the best so far.

import { bpb, byId, count, duration, el, number, svg } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [720, 230, 56, 26, 10];
const VERDICTS = ["keep", "discard", "inconclusive", "no-op", "invalid", "crashed", "timed-out"];

export function showLabs(labs) {
  const section = byId("labs");
  section.hidden = labs.length === 0;
  section.replaceChildren(el("h2", {}, labs.length === 1 ? "Lab" : "Labs"), ...labs.map(card));
}

function card(lab) {
  const head = el("h3", {}, lab.name);
  if (lab.problem !== null) return el("article", { class: "card" }, head, el("p", { class: "problem" }, lab.problem));
  const gain = number(lab.best_bpb) - number(lab.first_bpb);
  const verdicts = Object.entries(lab.verdicts).map(([name, many]) => `${many} ${name}`).join(", ");
  const said = `${bpb(lab.best_bpb)} bits per byte, ${signed(gain)} since experiment 0`;
  const spent = `${count(lab.runs)} runs, ${duration(lab.run_seconds)}`;
  return el("article", { class: "card" }, head,
    el("p", {}, el("b", {}, said), el("br"), el("span", { class: "muted" }, `${lab.recipe}, ${lab.length} of training each. ${verdicts ? `Tried: ${verdicts}. ` : ""}${spent}.`)),
    ...frontier(lab.frontier), kept(lab.frontier));
}

/** The picture and what it means; nothing where nothing was measured. */
function frontier(rows) {
  const measured = rows.filter((row) => row.bpb !== null && Number.isFinite(number(row.bpb)));
  if (measured.length === 0) return [];
  const best = rows.map((row) => number(row.best_bpb)).filter(Number.isFinite);
  // What is far worse than the baseline is drawn at the upper edge: it would flatten everything else.
  const [low, first] = [Math.min(...best), Math.max(...best)];
  const worst = Math.max(...measured.map((row) => number(row.bpb)));
  const margin = Math.max(1.5 * (first - low), 0.004);
  const [bottom, top] = [low - 0.1 * margin, Math.min(worst + 0.1 * margin, first + margin)];
  const [from, to] = [rows[0].experiment, Math.max(rows[rows.length - 1].experiment, rows[0].experiment + 1)];
  const x = (at) => LEFT + ((at - from) / (to - from)) * (WIDTH - LEFT - 14);
  const y = (value) => TOP + ((top - Math.min(top, value)) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", { class: "frontier", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "bits per byte of each experiment" });
  const digits = Math.max(3, Math.ceil(-Math.log10(0.25 * (top - bottom)))); // which tell one label from the next
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const value = bottom + share * (top - bottom), at = y(value);
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: at, y2: at }));
    picture.append(svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, value.toFixed(digits)));
  }
  picture.append(svg("text", { x: WIDTH - 14, y: HEIGHT - 6, "text-anchor": "end" }, `experiment ${to}`));
  picture.append(svg("text", { x: LEFT, y: HEIGHT - 6 }, String(from)));
  let path = "";
  for (const row of rows) {
    const value = number(row.best_bpb);
    if (Number.isFinite(value)) path += path ? ` H${x(row.experiment).toFixed(1)} V${y(value).toFixed(1)}` : `M${x(row.experiment).toFixed(1)} ${y(value).toFixed(1)}`;
  }
  picture.append(svg("path", { class: "best", d: `${path} H${WIDTH - 14}` }));
  for (const row of measured) {
    const kind = VERDICTS.includes(row.verdict) ? row.verdict : "none";
    const [at, height, name] = [x(row.experiment), y(number(row.bpb)), `experiment ${kind}`];
    const mark = number(row.bpb) > top
      ? svg("path", { class: name, d: `M${at} ${height - 5} l5 9 h-10 z` })
      : svg("circle", { class: name, cx: at, cy: height, r: kind === "keep" ? 5 : 3.5 });
    mark.append(svg("title", {}, `${row.experiment}: ${row.verdict ?? "baseline"}, ${bpb(row.bpb)}\n${row.change}`));
    picture.append(mark);
  }
  const above = measured.some((row) => number(row.bpb) > top) ? ` A triangle is one that is worse than ${top.toFixed(3)}.` : "";
  const meaning = `Each dot is an experiment; those that were kept are green, and the line is the best so far.${above}`;
  return [el("div", { class: "wide" }, picture), el("p", { class: "legend-text" }, meaning)];
}

function kept(rows) {
  const best = rows.filter((row) => row.verdict === "keep");
  if (best.length === 0) return null;
  return el("div", { class: "wide" }, el("table", {}, el("tbody", {}, ...best.slice(-12).map((row) =>
    el("tr", {}, el("td", { class: "n" }, String(row.experiment)), el("td", { class: "n" }, bpb(row.bpb)),
      el("td", { class: "n" }, signed(number(row.difference))), el("td", { class: "words" }, row.change))))));
}

const signed = (value) => (Number.isFinite(value) ? `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(4)}` : "");
