// Draws runs: gptlabCharts.draw(element, data) puts a switch, a legend and charts into `element`.
// `data` is the JSON value that gptlab/report/curves.py documents. The handle that it returns has
// `update(data)`, which keeps what the reader chose and zoomed, and `destroy()`.
// Colors come from report.css. All text is set as text, never as HTML: names of runs may hold anything.
"use strict";

const gptlabCharts = (() => {
  const AXES = { step: "steps", tokens: "tokens", seconds: "seconds", flops: "FLOPs" };
  const CHARTS = [
    { id: "bpb", title: "Validation bits per byte", part: "val", y: "bpb", points: true, logY: true },
    { id: "loss", title: "Loss, nats per token (dashed: validation)", part: "train", y: "loss_mean", faint: "loss", also: "loss", logY: true },
    { id: "lr", title: "Learning rate, share of its peak", part: "train", y: "lr_scale", fromZero: true },
    { id: "norm", title: "Gradient norm, before clipping", part: "train", y: "grad_norm" },
    { id: "speed", title: "Tokens per second", part: "train", y: "tokens_per_second", fromZero: true },
    { id: "mfu", title: "MFU, percent of the peak", part: "train", y: "mfu", fromZero: true, percent: true },
  ];
  const UNITS = [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
  const COLORS = 8; // --c0 ... --c7 in report.css
  const GRID_POINTS = 200; // of a band
  const MAX_POINTS = 60; // dots of more validations would hide their line
  const START_SHARE = 0.1; // of a run's length: "fit the end" chooses the vertical range by what comes after it
  let drawings = 0;

  const tag = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const finite = (value) => typeof value === "number" && Number.isFinite(value);

  function short(value) {
    if (!finite(value)) return "–";
    const size = Math.abs(value), [unit, one] = unitOf(size);
    if (unit) return `${+(value / one).toPrecision(4)}${unit}`;
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : `${+value.toPrecision(5)}`;
  }

  const unitOf = (size) => UNITS.find(([, one]) => size >= one) ?? ["", 1];

  // A value of an axis, with the digits that tell it from the next one, `step` away.
  function tick(value, step) {
    if (value === null || !(step > 0)) return value === null ? "" : short(value);
    const size = Math.abs(value), [unit, one] = unitOf(size);
    if (size < 1e-6 * step) return "0";
    const digits = Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)) + 2;
    return `${+(value / one).toPrecision(Math.min(15, Math.max(1, digits)))}${unit}`;
  }

  // Of a logarithmic axis: round numbers, which are 1, 2 and 5 where it spans much.
  function logSplits(u, axis, min, max) {
    const found = [], rough = (max - min) / 5;
    if (max / min < 6) {
      const power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 2.5, 5, 10].find((one) => one * power >= rough);
      for (let i = Math.ceil(min / step); i * step <= max; i++) found.push(i * step);
    } else {
      for (let power = 10 ** Math.floor(Math.log10(min)); power <= max; power *= 10)
        found.push(...[power, 2 * power, 5 * power].filter((one) => one >= min && one <= max));
    }
    return found;
  }

  // The points of one part of a run, [[x], [y]]: x grows, and unknown values have no point.
  function points(run, part, y, axis, logX) {
    const rows = run[part], step = rows.step, values = rows[y] || [];
    const scale = axis === "tokens" ? run.tokens_per_step : axis === "flops" ? run.flops_per_step : 1;
    const xs = [], ys = [];
    let last = logX ? 0 : -Infinity;
    for (let i = 0; i < step.length; i++) {
      const from = axis === "seconds" ? rows.seconds[i] : step[i];
      const x = finite(from) && finite(scale) ? from * scale : NaN;
      if (!(x > last)) continue;
      last = x;
      xs.push(x);
      ys.push(finite(values[i]) ? values[i] : null);
    }
    return [xs, ys];
  }

  function interpolate([xs, ys], at) {
    const known = xs.map((_, i) => i).filter((i) => ys[i] !== null);
    let k = 0;
    return at.map((x) => {
      if (!known.length || x < xs[known[0]] || x > xs[known[known.length - 1]]) return null;
      while (k + 1 < known.length && xs[known[k + 1]] < x) k++;
      const a = known[k], b = known[Math.min(k + 1, known.length - 1)];
      return a === b || x <= xs[a] ? ys[a] : ys[a] + ((ys[b] - ys[a]) * (x - xs[a])) / (xs[b] - xs[a]);
    });
  }

  // Lowest, highest and mean of several curves where all of them are known: [[x], [low], [high], [mean]].
  function band(curves) {
    const all = [...new Set(curves.flatMap(([xs]) => xs))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(all.length / GRID_POINTS));
    const grid = all.filter((_, i) => i % every === 0 || i === all.length - 1);
    const values = curves.map((curve) => interpolate(curve, grid));
    const rows = grid.map((x, i) => [x, values.map((one) => one[i])]).filter(([, row]) => !row.includes(null));
    const mean = (row) => row.reduce((sum, value) => sum + value, 0) / row.length;
    return [
      rows.map(([x]) => x), rows.map(([, row]) => Math.min(...row)), rows.map(([, row]) => Math.max(...row)),
      rows.map(([, row]) => mean(row)),
    ];
  }

  // What is left of each curve past the end of a band of them: a mean of those that go on would jump there.
  function tails(curves, end) {
    const found = curves.map((curve) => {
      const at = [...(end === undefined ? [] : [end]), ...curve[0].filter((x) => !(x <= end))];
      return [at, interpolate(curve, at)];
    });
    return found.filter(([at, ys]) => ys.some((y, i) => finite(y) && at[i] !== end));
  }

  // What has a color and a place in the legend: a run, or the runs of one group.
  function entries(runs, banded) {
    const found = new Map();
    runs.forEach((run, index) => {
      const key = banded && run.group !== null ? `group ${run.group}` : `run ${index} ${run.name}`;
      if (!found.has(key)) found.set(key, { key, runs: [] });
      found.get(key).runs.push(run);
    });
    return [...found.values()].map((entry, index) => {
      const several = entry.runs.length > 1;
      const label = several ? `${entry.runs[0].group} (${entry.runs.length} runs)` : entry.runs[0].name;
      return { ...entry, label, color: `--c${index % COLORS}`, dash: index < COLORS ? [] : [6, 3] };
    });
  }

  // The tables and series of one chart, as uPlot takes them.
  function layers(chart, shown, view) {
    const tables = [], series = [], bands = [];
    const dotted = (ys, many) => (many && ys.length <= MAX_POINTS) || ys.filter(finite).length === 1; // which has no line
    const add = (table, ...ones) => { tables.push(table); series.push(...ones); };
    for (const entry of shown) {
      const stroke = css(entry.color), label = entry.label;
      const line = { label, stroke, width: 2, dash: entry.dash, points: { show: false } };
      const hidden = { silent: true, stroke: "transparent", width: 0, points: { show: false } };
      const curves = entry.runs.map((run) => points(run, chart.part, chart.y, view.axis, view.logX));
      if (curves.length > 1) {
        const [xs, low, high, mean] = band(curves);
        const first = series.length + 1;
        add([xs, high, low, mean], hidden, hidden, { ...line, label: `${label} (mean)`, points: { show: dotted(mean, false), size: 6, fill: stroke } });
        bands.push({ series: [first, first + 1], fill: `${stroke}33` });
        for (const [at, ys] of tails(curves, xs[xs.length - 1]))
          add([at, ys], { ...line, silent: true, width: 1, points: { show: dotted(ys, false), size: 4, fill: stroke } });
        continue;
      }
      const run = entry.runs[0];
      if (chart.faint && shown.length <= 3) {
        const raw = points(run, chart.part, chart.faint, view.axis, view.logX);
        add(raw, { ...hidden, label: "a step", silent: shown.length > 1, stroke: `${stroke}55`, width: 1 });
      }
      const own = chart.also && shown.length === 1 ? `training, mean of ${run.mean_steps} steps` : label;
      const dots = { show: dotted(curves[0][1], chart.points), size: 6, fill: stroke };
      add(curves[0], { ...line, label: own, points: dots });
      if (chart.also && shown.length <= 3) {
        const validated = points(run, "val", chart.also, view.axis, view.logX);
        const color = shown.length === 1 ? css("--c1") : stroke;
        const name = shown.length === 1 ? "validation" : `${label}, validation`;
        add(validated, { ...line, label: name, stroke: color, dash: [4, 4], points: { show: dotted(validated[1], true), size: 6, fill: color } });
      }
    }
    const factor = chart.percent ? 100 : 1;
    const scaled = tables.map(([xs, ...rest]) => [xs, ...rest.map((ys) => ys.map((y) => (y === null ? y : y * factor)))]);
    return { tables: scaled, series, bands };
  }

  // The nearest place where the series has a value: runs seldom share their steps.
  function nearest(u, number, index) {
    const ys = u.data[number], xs = u.data[0];
    if (finite(ys[index])) return index;
    let low = index, high = index;
    while (low >= 0 && !finite(ys[low])) low--;
    while (high < ys.length && !finite(ys[high])) high++;
    if (low < 0 && high >= ys.length) return null;
    if (low < 0 || high >= ys.length) return low < 0 ? high : low;
    return xs[index] - xs[low] <= xs[high] - xs[index] ? low : high;
  }

  // The vertical range of what is drawn after the start, where every run falls alike and far.
  function endRange(u, min, max) {
    const xs = u.data[0], from = xs[0], to = xs[xs.length - 1], { min: left, max: right } = u.scales.x;
    if (finite(left) && finite(right) && (left > from || right < to)) return uPlot.rangeNum(min, max, 0.1, true); // zoomed: all that is seen
    let low = Infinity, high = -Infinity;
    for (const ys of u.data.slice(1)) {
      const first = ys.findIndex(finite), last = ys.findLastIndex(finite), start = xs[first] + START_SHARE * (xs[last] - xs[first]);
      for (let i = first; 0 <= i && i <= last; i++)
        if (finite(ys[i]) && xs[i] >= start) {
          low = Math.min(low, ys[i]);
          high = Math.max(high, ys[i]);
        }
    }
    return low < high ? [low - 0.05 * (high - low), high + 0.05 * (high - low)] : uPlot.rangeNum(min, max, 0.1, true);
  }

  function tooltip(unit) {
    const box = tag("div", "tip");
    box.hidden = true;
    return {
      hooks: {
        init: (u) => u.over.appendChild(box),
        setCursor: (u) => {
          const { left, top, idx, idxs } = u.cursor;
          box.hidden = !u.over.matches(":hover") || left < 0 || !finite(idx);
          if (box.hidden) return;
          box.replaceChildren(tag("div", "tip-x", `${short(u.data[0][idx])} ${unit}`));
          u.series.forEach((one, number) => {
            const at = idxs && idxs[number];
            if (number === 0 || one.silent || !finite(at)) return;
            const row = tag("div", "tip-row"), mark = tag("i");
            mark.style.background = typeof one.stroke === "function" ? one.stroke(u, number) : one.stroke;
            row.append(mark, tag("b", "", short(u.data[number][at])), tag("span", "", one.label));
            box.append(row);
          });
          const right = left > u.over.clientWidth / 2;
          box.style.left = right ? "auto" : `${left + 14}px`;
          box.style.right = right ? `${u.over.clientWidth - left + 14}px` : "auto";
          box.style.top = `${Math.max(0, Math.min(top, u.over.clientHeight - box.offsetHeight))}px`;
        },
      },
    };
  }

  // Where an update was skipped, a run was rewound or failed, in the order of x; of several runs in their colors.
  function marksOf(shown, view) {
    const several = shown.flatMap((entry) => entry.runs).length > 1;
    const found = shown.flatMap((entry) => entry.runs.flatMap((run) => run.marks.flatMap((mark) => {
      const val = { step: [mark.step], seconds: [secondsAt(run, mark.step)] };
      const [xs] = points({ ...run, val }, "val", "step", view.axis, view.logX);
      return xs.map((x) => ({ x, text: mark.text, color: several ? entry.color : "--bad" }));
    })));
    return found.sort((a, b) => a.x - b.x);
  }

  // Each as a dashed vertical line, with its text beside it where there is room.
  function drawMarks(marks) {
    return (u) => {
      const { ctx, bbox } = u, ends = [], right = bbox.left + bbox.width, gap = 4 * devicePixelRatio;
      ctx.save();
      Object.assign(ctx, { lineWidth: devicePixelRatio, font: `${12 * devicePixelRatio}px system-ui, sans-serif`, textAlign: "left", textBaseline: "top" });
      ctx.setLineDash([3, 4]);
      for (const { x: value, text, color } of marks) {
        const x = u.valToPos(value, "x", true);
        if (!(x >= bbox.left && x <= right + 1)) continue;
        ctx.strokeStyle = ctx.fillStyle = css(color);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        const width = ctx.measureText(text).width, left = x + gap + width > right ? x - gap - width : x + gap;
        const row = [0, 1, 2].find((one) => (ends[one] ?? bbox.left) <= left);
        if (row === undefined) continue;
        ctx.fillText(text, left, bbox.top + gap + 3.5 * gap * row);
        ends[row] = left + width + gap;
      }
      ctx.restore();
    };
  }

  // On the clock of the training; a step that was not logged, such as one that failed, is at its end.
  function secondsAt(run, step) {
    const { step: steps, seconds } = run.train, last = steps.length - 1;
    return step > steps[last] ? seconds[last] : interpolate([steps, seconds], [step])[0];
  }

  // One row a point, with every axis, so that another program can draw it by any of them.
  function csv(chart, shown) {
    const quoted = (text) => `"${String(text).replace(/^[=+\-@\t\r]/, "'$&").replace(/"/g, '""')}"`;
    const parts = [[chart.part, chart.faint || chart.y], ...(chart.also ? [["val", chart.also]] : [])];
    const rows = [["run", "part", "step", "tokens", "seconds", "flops", chart.faint || chart.y].join(",")];
    for (const run of shown.flatMap((entry) => entry.runs))
      for (const [part, y] of parts)
        run[part].step.forEach((step, i) => {
          const plain = (value) => (finite(value) ? value : ""), of = (one) => plain(one && step * one);
          const known = [step, of(run.tokens_per_step), plain(run[part].seconds[i]), of(run.flops_per_step), plain(run[part][y][i])];
          rows.push([quoted(run.name), part, ...known].join(","));
        });
    return `${rows.join("\n")}\n`;
  }

  function save(name, text) {
    const link = tag("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function draw(root, data) {
    const sync = `gptlab-${drawings++}`;
    const several = data.runs.length > 1;
    const view = { axis: "step", logX: false, logY: false, fitEnd: several, banded: true, off: new Set() };
    const plots = new Map(); // chart id -> { cell, plot, place }
    let runs = data.runs, shown = [];

    const bar = tag("div", "bar"), legend = tag("div", "legend"), grid = tag("div", "charts");
    const axes = tag("div", "switch");
    root.replaceChildren(bar, legend, grid);
    axes.setAttribute("role", "group");
    axes.setAttribute("aria-label", "horizontal axis");
    for (const [axis, label] of Object.entries(AXES)) {
      const button = tag("button", "", label);
      button.type = "button";
      button.dataset.axis = axis;
      button.addEventListener("click", () => { view.axis = axis; build(); });
      axes.append(button);
    }
    bar.append(tag("span", "bar-label", "against"), axes);
    const boxes = { logX: "log x", logY: "log loss", fitEnd: "fit the end", banded: "seeds as bands" };
    for (const [name, label] of Object.entries(boxes)) {
      const box = tag("label", "check"), input = tag("input");
      input.type = "checkbox";
      input.checked = view[name];
      input.addEventListener("change", () => { view[name] = input.checked; build(); });
      box.dataset.option = name;
      if (name === "banded") box.title = "The range and mean of a configuration's runs as far as all of them go; past that, each run is a thin line.";
      box.append(input, document.createTextNode(` ${label}`));
      bar.append(box);
    }

    function buildLegend(all) {
      const grouped = runs.some((run, i) => run.group !== null && runs.some((other, j) => j !== i && other.group === run.group));
      bar.querySelector('[data-option="banded"]').hidden = !grouped;
      legend.hidden = all.length < 2;
      legend.replaceChildren(...all.map((entry) => {
        const chip = tag("button", "chip"), mark = tag("i");
        chip.type = "button";
        chip.setAttribute("aria-pressed", String(!view.off.has(entry.key)));
        mark.style.background = `var(${entry.color})`;
        chip.append(mark, tag("span", "", entry.label));
        chip.title = entry.runs.map((run) => run.name).join("\n");
        chip.addEventListener("click", (event) => {
          const others = all.filter((one) => one !== entry).map((one) => one.key);
          if (event.detail > 1) view.off = new Set(others); // a double click shows this one alone
          else if (!view.off.delete(entry.key)) view.off.add(entry.key);
          build();
        });
        return chip;
      }));
    }

    function cellOf(chart) {
      const cell = tag("figure", `chart chart-${chart.id}`), head = tag("figcaption");
      const button = tag("button", "quiet", "CSV"), place = tag("div", "plot");
      button.title = `Save the data of “${chart.title}” as CSV`;
      button.addEventListener("click", () => save(`${chart.id}.csv`, csv(chart, shown)));
      head.append(tag("span", "", chart.title), button);
      cell.append(head, place), grid.append(cell);
      return { cell, place, plot: null };
    }

    function options(chart, width, found, unit, marks) {
      const log = view.logY && chart.logY;
      const range = chart.fromZero ? (u, min, max) => [Math.min(0, min), max > 0 ? max * 1.08 : 1]
        : log ? (u, min, max) => (min > 0 ? [0.97 * min, 1.03 * max] : [1, 10])
        : chart.logY && view.fitEnd ? endRange : undefined;
      const axis = { stroke: css("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false } };
      const values = (u, splits, axis, space, step) => splits.map((value) => tick(value, step));
      const places = (u, splits) => splits.map((value) => (value === null ? "" : short(value)));
      const logged = { splits: logSplits, filter: (u, splits) => splits, values: (u, splits) => splits.map((value) => tick(value, splits[1] - splits[0])) };
      const size = (u, texts) => Math.max(52, ...(texts ?? []).map((text) => 10 + 7 * text.length));
      return {
        width, height: Math.round(Math.max(190, Math.min(300, width * 0.52))), series: [{ label: null }, ...found.series], bands: found.bands,
        legend: { show: false },
        padding: [8, 14, 0, 0],
        scales: {
          x: { time: false, distr: view.logX ? 3 : 1 },
          y: { distr: log ? 3 : 1, ...(range ? { range } : {}) },
        },
        axes: [
          { ...axis, values: view.logX ? places : values, label: unit, labelSize: 20, labelFont: axis.font, size: 30, space: 64 },
          { ...axis, values, size, space: 34, ...(log ? logged : {}) },
        ],
        cursor: {
          sync: { key: sync, scales: ["x", null] }, y: false, dataIdx: nearest, drag: { x: true, y: false },
          points: { size: 7 }, focus: { prox: -1 },
        },
        plugins: [tooltip(unit)],
        hooks: { draw: [drawMarks(marks)] },
      };
    }

    function build() {
      const all = entries(runs, view.banded);
      shown = all.filter((entry) => !view.off.has(entry.key));
      buildLegend(all);
      for (const button of axes.children) button.setAttribute("aria-pressed", String(button.dataset.axis === view.axis));
      const unit = AXES[view.axis], marks = marksOf(shown, view);
      for (const chart of CHARTS) {
        const found = layers(chart, shown, view);
        const known = found.tables.some(([, ...rest]) => rest.some((ys) => ys.some(finite)));
        if (!known && !plots.has(chart.id)) continue;
        if (!plots.has(chart.id)) plots.set(chart.id, cellOf(chart));
        const own = plots.get(chart.id);
        if (own.plot) own.plot.destroy();
        own.plot = null;
        own.cell.hidden = !known;
        if (!known) continue;
        const ends = marks.slice(-1).map(({ x }) => [[x]]); // The axis reaches the last mark.
        const joined = found.tables.length + ends.length > 1 ? uPlot.join([...found.tables, ...ends]) : found.tables[0];
        own.plot = new uPlot(options(chart, own.place.clientWidth || 500, found, unit, marks), joined, own.place);
      }
      root.dataset.drawn = String(runs.length);
    }

    // New lines of a run that trains: the same charts, unless there is something else to draw.
    function update(next) {
      runs = next.runs;
      const zoomed = new Map();
      for (const [id, { plot }] of plots) {
        if (!plot) continue;
        const { min, max } = plot.scales.x, xs = plot.data[0];
        if (xs.length && (min > xs[0] || max < xs[xs.length - 1])) zoomed.set(id, { min, max });
      }
      build();
      for (const [id, range] of zoomed) if (plots.get(id).plot) plots.get(id).plot.setScale("x", range);
    }

    let width = 0;
    const resized = new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      for (const { plot, place } of plots.values())
        if (plot && place.clientWidth) plot.setSize({ width: place.clientWidth, height: plot.height });
    });
    resized.observe(root);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const themed = new MutationObserver(build);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    dark.addEventListener("change", build);
    build();

    function destroy() {
      for (const observer of [resized, themed]) observer.disconnect();
      dark.removeEventListener("change", build);
      for (const { plot } of plots.values()) if (plot) plot.destroy();
      root.replaceChildren();
    }
    return { update, destroy };
  }

  // A button: the colors of the system, light, dark; the choice is kept where the browser allows it.
  function themeSwitch(button) {
    const themes = ["system", "light", "dark"];
    const show = (theme) => {
      if (theme === "system") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      button.textContent = `colors: ${theme}`;
    };
    let theme = null;
    try { theme = localStorage.getItem("gptlab-theme"); } catch (error) { /* a file without storage */ }
    show((theme = themes.includes(theme) ? theme : "system"));
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      show(theme);
      try { localStorage.setItem("gptlab-theme", theme); } catch (error) { /* as above */ }
    });
  }

  return { draw, themeSwitch };
})();
