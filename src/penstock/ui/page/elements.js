// Small parts of the page. Whatever comes from a checkpoint goes into it as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function button(text, onClick, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", onClick);
  return made;
}

export const number = (content, attributes = {}) => element("td", { class: "number", ...attributes }, content);

// A table in a box that scrolls, which the keyboard reaches. `numbers` are the headings of columns of numbers.
export function table(label, headings, numbers, rows) {
  const kind = (name) => (numbers.includes(name) ? { class: "number", scope: "col" } : { scope: "col" });
  const head = element("tr", {}, ...headings.map((name) => element("th", kind(name), name)));
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, made);
}

export const counted = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

const digits = (n) => Number(n.toPrecision(4)).toString();

function inUnits(units, base) {
  // One unit for all numbers of an axis: that of the largest.
  return (n, largest = n) => {
    if (n === null || n === undefined) return "–";
    let at = 0;
    for (let left = Math.abs(largest); left >= base && at < units.length - 1; left /= base) at += 1;
    return `${digits(n / base ** at)} ${units[at]}`;
  };
}

export const bytes = inUnits(["B", "kB", "MB", "GB", "TB", "PB"], 1000);

export function seconds(s, largest = s) {
  if (s === null || s === undefined) return "–";
  if (Math.abs(largest) >= 120) return `${digits(s / 60)} min`;
  if (Math.abs(largest) >= 1) return `${digits(s)} s`;
  if (Math.abs(largest) >= 0.001 || largest === 0) return `${digits(s * 1000)} ms`;
  return `${digits(s * 1e6)} µs`;
}

export function plain(n) {
  if (n === null || n === undefined) return "–";
  const size = Math.abs(n);
  return size !== 0 && (size < 1e-4 || size >= 1e7) ? n.toExponential(3).replace(/\.?0+e/, "e") : digits(n);
}

export async function ask(path, parameters = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { credentials: "same-origin" });
  if (answer.status === 403) throw new Error("this page may ask no more: penstock ui was started anew, or has ended");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `${answer.status}`);
  return found;
}
