// Elements made of text. Nothing here or elsewhere on this page turns text into markup: names, values and samples come
// from folders that may be anybody's.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element; properties that begin with "on" are listeners, all others are attributes. Children may be texts. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

/** A number of a run's files: those that are not finite are texts there. NaN for null. */
export const number = (value) => (value === null || value === undefined ? NaN : Number(value));

export function count(value) {
  const known = number(value);
  if (!Number.isFinite(known)) return "";
  const rounded = Number(known.toPrecision(3)); // which may have the next unit
  const [size, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([size]) => rounded >= size) ?? [1, ""];
  return unit ? `${(rounded / size).toPrecision(3)}${unit}` : String(Math.round(known));
}

export function duration(value) {
  const seconds = number(value);
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  if (!Number.isFinite(seconds)) return "";
  return seconds < 60 ? "just now" : `${duration(seconds).replace(/ \d+ (s|min)$/, "")} ago`;
}

export function bpb(value) {
  if (value === null || value === undefined) return "";
  const known = number(value);
  return Number.isFinite(known) ? known.toFixed(4) : String(value);
}

/** A line through the values, as wide as high allows; nothing where there are fewer than two. */
export function sparkline(values, width = 96, height = 24) {
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (values.length > 1) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const points = values.map((value, at) => {
      const x = 2 + (at / (values.length - 1)) * (width - 4);
      const y = 2 + (1 - (value - low) / (high - low || 1)) * (height - 4);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    const [x, y] = points[points.length - 1].split(",");
    picture.append(svg("polyline", { points: points.join(" ") }), svg("circle", { cx: x, cy: y, r: 1.8 }));
  }
  return picture;
}

/** POST to the server; the answer's body is JSON, or {error}. */
export async function post(path, value, signal) {
  const token = document.querySelector('meta[name="token"]').content;
  const headers = { "Content-Type": "application/json", "X-Gptlab-Token": token };
  return fetch(path, { method: "POST", headers, body: JSON.stringify(value), signal });
}
