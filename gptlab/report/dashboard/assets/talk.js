// The prompt box: a run continues a text, and shows how likely it thought each token, and what else it considered.

import { byId, el, post } from "./dom.js";

/** Offers the runs of `state.rows` that have a checkpoint. */
export function promptBox(state) {
  let answering = null; // the AbortController of the answer that is being written
  let pinned = null;

  byId("temperature").addEventListener("input", showTemperature);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (answering) answering.abort();
    else ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!answering) ask();
    }
  });
  byId("text").addEventListener("pointerover", (event) => { if (!pinned) explain(event.target); });
  byId("text").addEventListener("pointerleave", () => { if (!pinned) explain(null); });
  byId("text").addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    pinned = token && token !== pinned ? token : null;
    explain(pinned);
  });
  showTemperature();

  function showTemperature() {
    byId("temperature-value").textContent = Number(byId("temperature").value).toFixed(2);
  }

  /** Keeps the list of runs current; `preferred` is the id of a run that was just chosen, or null: what is selected stays. */
  function offer(preferred) {
    const runs = [...state.rows.values()].filter((row) => row.has_checkpoint);
    runs.sort((a, b) => (a.start < b.start ? 1 : -1));
    const select = byId("model");
    byId("talk").hidden = runs.length === 0;
    const wanted = runs.some((row) => row.id === preferred) ? preferred : select.value;
    const before = [...select.options].map((option) => `${option.value} ${option.text}`).join("\n");
    if (before !== runs.map((row) => `${row.id} ${row.name}`).join("\n")) {
      select.replaceChildren(...runs.map((row) => el("option", { value: row.id }, row.name)));
    }
    if (runs.some((row) => row.id === wanted)) select.value = wanted;
  }

  async function ask() {
    const seed = byId("seed").value;
    const asked = {
      run: byId("model").value, prompt: byId("prompt").value, temperature: Number(byId("temperature").value),
      top_k: Number(byId("top-k").value), top_p: Number(byId("top-p").value), min_p: Number(byId("min-p").value), max_tokens: Number(byId("max-tokens").value),
      seed: seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(seed),
    };
    const name = byId("model").selectedOptions[0]?.text ?? "";
    answering = new AbortController();
    pinned = null;
    explain(null);
    byId("go").textContent = "Stop";
    byId("text").hidden = false;
    byId("text").replaceChildren(el("span", { class: "prompt" }, asked.prompt));
    say("Loading the model.");
    try {
      const response = await post("/prompt", asked, answering.signal);
      if (!response.ok) throw new Error((await response.json()).error);
      await show(response.body, asked, name);
    } catch (error) {
      say(error.name === "AbortError" ? `Stopped. Seed ${asked.seed}.` : String(error.message), error.name !== "AbortError");
    }
    answering = null;
    byId("go").textContent = "Continue";
  }

  async function show(body, asked, name) {
    let count = 0, began = 0, step = 0;
    for await (const answer of lines(body)) {
      if ("error" in answer) throw new Error(answer.error);
      if ("step" in answer) {
        step = answer.step;
        began = performance.now();
      } else if ("text" in answer) {
        byId("text").append(tokenSpan(answer));
        count += 1;
      }
      const seconds = (performance.now() - began) / 1000; // in less than 0.2, all may have come at once
      const rate = count > 1 && seconds > 0.2 ? `, ${(count / seconds).toFixed(0)} tokens/s` : "";
      say(`Step ${step.toLocaleString("en")} of ${name}, ${count} tokens${rate}, seed ${asked.seed}.`);
    }
  }

  function tokenSpan(token) {
    const surprise = Math.min(1, -Math.log2(Math.max(token.probability, 1e-9)) / 10);
    const parts = token.text.split("\n").flatMap((part, at) => (at ? [el("i", { class: "line" }), `\n${part}`] : [part]));
    const span = el("span", { class: "t" }, ...parts);
    span.style.setProperty("--surprise", `${Math.round(55 * surprise)}%`);
    span.token = token;
    return span;
  }

  /** Shows the probabilities of a token; null: of none. */
  function explain(target) {
    const span = target && target.closest(".t"), box = byId("token");
    for (const old of byId("text").querySelectorAll(".t.on")) old.classList.remove("on");
    box.hidden = !span;
    if (!span) return;
    span.classList.add("on");
    const { token } = span;
    const rows = token.alternatives.map(([name, probability]) => {
      const meter = el("meter", { min: 0, max: 1, value: probability });
      const own = name === token.name ? "own" : "";
      return el("tr", { class: own }, el("td", {}, el("code", {}, visible(name))), el("td", {}, meter), el("td", { class: "n" }, percent(probability)));
    });
    if (!token.alternatives.some(([name]) => name === token.name)) {
      rows.push(el("tr", { class: "own" }, el("td", {}, el("code", {}, visible(token.name))), el("td", {}, "drawn"), el("td", { class: "n" }, percent(token.probability))));
    }
    box.replaceChildren(
      el("p", {}, el("code", {}, visible(token.name)), ` had a probability of ${percent(token.probability)}.`),
      el("table", {}, el("tbody", {}, ...rows)),
    );
  }

  function say(text, problem = false) {
    byId("answering").textContent = text;
    byId("answering").classList.toggle("problem", problem);
  }

  return { offer };
}

/** The JSON values of a stream, one a line. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
  if (rest) yield JSON.parse(rest);
}

/** White space as signs that can be seen. */
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

const percent = (share) => `${(100 * share).toPrecision(share < 0.0995 ? 2 : 3)}%`;
