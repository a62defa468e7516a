// What the filter's words mean, and in which order runs are listed. No element is touched here.

import { number } from "./dom.js";

/** {column: what it holds}; fields of the configuration can be asked for too. */
export const COLUMNS = {
  run: (row) => row.name,
  status: (row) => row.status,
  recipe: (row) => row.recipe ?? "",
  seed: (row) => row.seed,
  val_bpb: (row) => row.val_bpb,
  tokens: (row) => row.tokens,
  seconds: (row) => row.seconds,
  start: (row) => row.start,
};

const CONDITION = /^([\w.-]+)(!=|<=|>=|=|<|>)(.*)$/;
const COMPARE = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};
const own = (object, name) => Object.prototype.hasOwnProperty.call(object, name);

/** {test: row -> whether it is listed, problem: what is wrong with the words, or null}. All words must hold. */
export function readFilter(text, defaults) {
  const tests = [];
  let problem = null;
  for (const word of text.split(/\s+/).filter(Boolean)) {
    const found = CONDITION.exec(word);
    if (!found) {
      const wanted = word.toLowerCase();
      tests.push((row) => haystack(row).includes(wanted));
      continue;
    }
    const [, dashed, sign, value] = found;
    const name = dashed.replaceAll("-", "_");
    if (!own(COLUMNS, name) && !own(defaults, name)) problem = `There is no column or field ${name}.`;
    const of = own(COLUMNS, name) ? COLUMNS[name] : (row) => field(row, name, defaults);
    const numeric = own(COMPARE, sign) && name !== "start";
    if (numeric && Number.isNaN(Number(value))) problem = `${value} in ${word} is no number.`;
    tests.push(condition(name, of, sign, value));
  }
  return { test: (row) => tests.every((test) => test(row)), problem };
}

/** A field of a run's configuration; rows have only those that differ from the defaults. */
export function field(row, name, defaults) {
  if (row.fields && own(row.fields, name)) return row.fields[name];
  return row.fields ? defaults[name] : undefined;
}

function condition(name, of, sign, value) {
  if (own(COMPARE, sign)) {
    const [key, limit] = name === "start" ? [String, value] : [number, Number(value)]; // a start is 2026-11-27T08:00:00
    return (row) => (of(row) ?? null) !== null && COMPARE[sign](key(of(row)), limit);
  }
  const pattern = wildcard(value);
  const equal = (found) => {
    if (found === undefined) return false;
    if (Array.isArray(found)) return found.some(equal);
    if (typeof found === "number") {
      const shown = name === "val_bpb" ? Number(found.toFixed(4)) : found;
      return value !== "" && [found, shown].includes(Number(value));
    }
    return pattern.test(found === null ? "none" : String(found));
  };
  return sign === "=" ? (row) => equal(of(row)) : (row) => !equal(of(row));
}

/** * and ? as in a shell. */
function wildcard(text) {
  const escaped = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  return new RegExp(`^${escaped}$`, "s");
}

const haystacks = new WeakMap();

function haystack(row) {
  if (!haystacks.has(row)) {
    const changes = (row.changes ?? []).map(([name, value]) => `${name}=${value}`);
    haystacks.set(row, [row.name, row.status, row.recipe, row.problem, ...changes].join(" ").toLowerCase());
  }
  return haystacks.get(row);
}

/** Rows by a column; those without a value last, whichever the direction. */
export function sorted(rows, column, descending) {
  const of = COLUMNS[column];
  const numeric = ["seed", "val_bpb", "tokens", "seconds"].includes(column);
  const value = (row) => (numeric ? number(of(row)) : of(row));
  const known = (found) => found !== null && found !== undefined && found === found;
  const sign = descending ? -1 : 1;
  return rows.slice().sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (known(x) !== known(y)) return known(x) ? -1 : 1;
    if (!known(x) || x === y) return a.name < b.name ? -1 : 1;
    return x < y ? -sign : sign;
  });
}

/** What the names of several runs begin with: `sweep/gelu` for sweep/gelu-seed-1 and sweep/gelu-seed-2. */
export function sharedName(rows) {
  const [first, ...others] = rows.map((row) => row.name);
  let length = 0;
  while (length < first.length && others.every((name) => name[length] === first[length])) length++;
  const cut = rows.some(({ name }) => /\d/.test(name[length] ?? "")); // within a number
  return first.slice(0, length).replace(cut ? /\d+$/ : "", "").replace(/[-_./ ]*(seed)?[-_./= ]*$/, "") || first;
}

/** Rows as [{key, rows}], in the order of their first; runs that differ by seed alone are together. */
export function grouped(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = row.group ?? row.id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups].map(([key, members]) => ({ key, rows: members }));
}

/** Bits per byte of finished runs: one that failed or still trains is not as good as its last validation says. */
export function finishedBpb(rows) {
  return rows.filter((row) => row.status === "finished").map((row) => number(row.val_bpb)).filter(Number.isFinite);
}

/** NaN of none. */
export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Groups by what their lines show: of several runs the mean of bits per byte, and else what their first has. */
export function sortedGroups(groups, column, descending) {
  const lines = groups.map((group) => {
    const [first, ...others] = group.rows;
    return { ...first, val_bpb: others.length ? mean(finishedBpb(group.rows)) : first.val_bpb, shown: group };
  });
  return sorted(lines, column, descending).map((line) => line.shown);
}
