// What a chosen run wrote and went through: its samples by step, its events, and where it ran.

import { byId, el, post } from "./dom.js";

let shown = null; // the row whose details are shown or asked for: a run that changes has another row
let step = null; // the step whose samples the reader chose; null: the last one
let content = ""; // what is drawn: what says the same stays, since a list of steps that is rebuilt closes
let open = false; // whether the reader opened the fields that are not as in the recipe

export async function showDetails(row) {
  const section = byId("details");
  if (row === null || row === undefined) {
    section.hidden = true;
    shown = null;
    return;
  }
  if (shown === row) return;
  if (shown?.id !== row.id) [step, open] = [null, false];
  shown = row;
  let found;
  try {
    found = await (await post("/run", { run: row.id })).json();
  } catch {
    return;
  }
  if (shown !== row) return;
  section.hidden = false;
  if (content === (content = JSON.stringify([row.id, row.changes, found]))) return;
  const focused = section.contains(document.activeElement) ? document.activeElement.tagName : null;
  if ("error" in found) section.replaceChildren(el("h2", {}, row.name), el("p", { class: "problem" }, found.error));
  else section.replaceChildren(...parts(row, found));
  if (focused) section.querySelector(focused)?.focus({ preventScroll: true });
}

function parts(row, found) {
  const { start, device_name, dtype, world_size, gptlab_version, git_commit } = found.facts;
  const facts = [
    start && `started ${String(start).slice(0, 16).replace("T", " ")} UTC`, device_name, dtype,
    world_size > 1 && `${world_size} processes`, gptlab_version && `gptlab ${gptlab_version}`,
    git_commit && `commit ${String(git_commit).slice(0, 12)}`,
  ].filter(Boolean);
  return [
    el("h2", {}, row.name),
    el("p", { class: "muted" }, facts.join(" · ")),
    found.failure === null ? null : el("p", { class: "failure" }, String(found.failure)),
    ...changes(row), ...samples(found.samples), ...events(found.events),
  ].filter(Boolean);
}

function changes(row) {
  if (!row.changes?.length) return [];
  const rows = row.changes.map(([name, value]) => el("tr", {}, el("td", {}, el("code", {}, name)), el("td", { class: "words" }, value === null ? "none" : String(value))));
  const toggled = (event) => { open = event.target.open; };
  return [el("details", { open, ontoggle: toggled }, el("summary", {}, `${rows.length} field${rows.length === 1 ? "" : "s"} not as in the recipe`), el("table", {}, el("tbody", {}, ...rows)))];
}

function samples(all) {
  if (!all.length) return [];
  const steps = [...new Set(all.map((one) => one.step))];
  const place = el("div");
  const select = el("select", { "aria-label": "step of the samples" }, ...steps.map((one) => el("option", { value: one }, `step ${one}`)));
  const draw = () => {
    const chosen = steps[select.selectedIndex];
    place.replaceChildren(...all.filter((one) => one.step === chosen).map((one) =>
      el("pre", { class: "sampled" }, ...withPrompt(one))));
  };
  select.selectedIndex = steps.includes(step) ? steps.indexOf(step) : steps.length - 1;
  select.addEventListener("change", () => {
    step = select.selectedIndex === steps.length - 1 ? null : steps[select.selectedIndex];
    draw();
  });
  draw();
  return [el("h3", {}, "Samples ", select), place];
}

/** A sample's text begins with its prompt. */
const withPrompt = ({ prompt, text }) =>
  text.startsWith(prompt) ? [el("span", { class: "prompt" }, prompt), text.slice(prompt.length)] : [text];

function events(all) {
  if (!all.length) return [];
  const rows = all.map((one) => el("tr", {}, ...["step", "what", "reason", "value"].map((name) => el("td", {}, one[name] === null ? "" : String(one[name])))));
  return [el("h3", {}, "Events"), el("div", { class: "wide" }, el("table", {}, el("tbody", {}, ...rows)))];
}
