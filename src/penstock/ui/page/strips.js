// Charts over the steps of one run or several, with one cursor: a mouse or the arrow keys move it in all of them.

import { counted, drawn, element, plain } from "/elements.js";

const [HEIGHT, TOP, BOTTOM, RIGHT] = [132, 8, 20, 10];
const MOST_DOTS = 150;

// Round numbers from the lowest to the highest, some four of them, for an axis.
export function ticks(low, high, most = 4) {
  const rough = (high - low) / most || Math.abs(high) / most || 1;
  const power = 10 ** (Math.floor(Math.log10(rough)) - 1);
  const fits = (n) => Math.floor(high / n + 1e-9) - Math.ceil(low / n - 1e-9) + 1 <= most + 1;
  const step = [5, 10, 20, 50, 100, 200].map((n) => n * power).find(fits);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let n = first; n * step <= high + step * 1e-9 && found.length < 12; n += 1) found.push(Number((n * step).toPrecision(12)));
  return found;
}

// The least and the greatest of the points in each column of pixels: no peak is lost, and no page is too large.
export function thinned(points, columns) {
  if (points.length <= 2 * columns) return points;
  const [first, last] = [points[0].x, points.at(-1).x];
  const kept = [];
  let at = 0;
  for (let column = 0; column < columns && at < points.length; column += 1) {
    const end = first + ((column + 1) / columns) * (last - first);
    let [low, high] = [null, null];
    for (; at < points.length && (points[at].x <= end || column === columns - 1); at += 1) {
      if (low === null || points[at].y < low.y) low = points[at];
      if (high === null || points[at].y > high.y) high = points[at];
    }
    if (low !== null) kept.push(...(low === high ? [low] : low.x < high.x ? [low, high] : [high, low]));
  }
  return kept;
}

export function nearest(points, x) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1].x < points[low].x - x ? low - 1 : low;
}

// All strips of the page. `chosen` is called with a point on Enter or a click, `axis` says what x is.
export class Strips {
  constructor(place, chosen) {
    this.place = place;
    this.chosen = chosen;
    this.cursor = null;
    this.made = new Map();
    this.axis = { text: String, name: "step" };
  }

  // Draw charts: { key, title, says, unit, lines: [{ name, style, points: [{ x, y, label, note }] }], kind, zero, bands }
  show(charts, axis) {
    this.axis = axis;
    const all = charts.flatMap((chart) => chart.lines.flatMap((line) => line.points.map((point) => point.x)));
    const span = all.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    for (const key of this.made.keys()) {
      if (!charts.some((chart) => chart.key === key)) {
        this.made.get(key).figure.remove();
        this.made.delete(key);
      }
    }
    charts.forEach((chart, at) => {
      const strip = this.made.get(chart.key) ?? new Strip(this, chart.key);
      this.made.set(chart.key, strip);
      if (this.place.children[at] !== strip.figure) this.place.insertBefore(strip.figure, this.place.children[at] ?? null);
      strip.show(chart, span);
    });
    this.point(this.cursor);
  }

  redraw() {
    for (const strip of this.made.values()) strip.draw();
    this.point(this.cursor);
  }

  point(x) {
    this.cursor = x;
    for (const strip of this.made.values()) strip.point(x);
  }
}

class Strip {
  constructor(all, key) {
    this.all = all;
    this.title = element("span", { class: "title" });
    this.readout = element("span", { class: "readout" });
    this.legend = element("div", { class: "legend" });
    this.box = element("div", { class: "strip", tabindex: 0, role: "slider" });
    this.says = element("p", { class: "says" });
    this.figure = element("figure", { "data-key": key });
    this.figure.append(element("figcaption", {}, this.title, this.readout), this.legend, this.box, this.says);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("pointermove", (event) => this.all.point(this.under(event)));
    this.box.addEventListener("click", (event) => this.choose(this.under(event)));
    this.box.addEventListener("focus", () => this.all.cursor === null && this.move(Infinity));
  }

  show(chart, span) {
    this.chart = chart;
    this.span = span;
    this.title.textContent = chart.title;
    this.figure.setAttribute("aria-label", chart.title);
    this.figure.classList.toggle("wide", Boolean(chart.wide));
    const lines = chart.bands ? [] : chart.lines.length > 1 ? chart.lines : [];
    this.legend.replaceChildren(
      ...lines.map((line) => element("span", { class: "entry" }, swatch(line.style), line.name)),
      ...(chart.bands ?? []).map((band) => element("span", { class: "entry" }, swatch(`band band-${band.at}`, true), band.name)),
    );
    this.legend.hidden = this.legend.children.length === 0;
    this.says.textContent = chart.says ?? "";
    this.says.hidden = !chart.says;
    // The points that the cursor visits: all places where one of the lines has one.
    const seen = new Map();
    for (const line of chart.lines) for (const point of line.points) if (!seen.has(point.x)) seen.set(point.x, point);
    this.stops = [...seen.values()].sort((a, b) => a.x - b.x);
    this.draw();
  }

  get text() {
    return this.chart.unit ?? plain;
  }

  draw() {
    const { chart } = this;
    const width = Math.max(240, Math.round(this.box.clientWidth || 560));
    const height = chart.height ?? HEIGHT;
    const values = chart.lines.flatMap((line) => line.points.flatMap((point) => [point.y, ...(point.low === undefined ? [] : [point.low])]));
    let [low, high] = values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
    if (!values.length) [low, high] = [0, 1];
    if (chart.zero) low = Math.min(0, low);
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    else if (!chart.zero) [low, high] = [low - (high - low) * 0.05, high + (high - low) * 0.05];
    else high += (high - low) * 0.05;
    const marks = chart.rows ? [] : ticks(low, high);
    const labels = chart.rows ?? marks.map((mark) => this.text(mark, high));
    // One margin for all, so that what is above each other is at the same step.
    const left = Math.min(150, Math.max(74, 12 + 6.4 * Math.max(...labels.map((label) => label.length))));
    const [x0, x1] = this.span;
    this.left = left;
    this.inner = width - left - RIGHT;
    this.scale = (x) => left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * this.inner;
    this.back = (px) => x0 + ((px - left) / this.inner) * (x1 - x0);
    const floor = height - BOTTOM;
    const up = (y) => floor - ((y - low) / (high - low)) * (floor - TOP);
    const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    if (chart.rows) this.ribbon(picture, floor);
    else {
      marks.forEach((mark, at) => {
        picture.append(drawn("line", { class: "grid", x1: left, x2: width - RIGHT, y1: up(mark), y2: up(mark) }));
        picture.append(drawn("text", { class: "tick", x: left - 6, y: up(mark) + 4, "text-anchor": "end" }, labels[at]));
      });
      for (const line of chart.lines) this.line(picture, line, up, floor);
    }
    picture.append(drawn("line", { class: "axis", x1: left, x2: width - RIGHT, y1: floor, y2: floor }));
    const places = this.all.axis.ticks ? this.all.axis.ticks(x0, x1) : ticks(x0, x1, 6);
    for (const place of x1 > x0 ? places : [x0]) {
      if (!Number.isFinite(place)) continue;
      const x = this.scale(place);
      const anchor = x > width - 40 ? "end" : x < left + 20 ? "start" : "middle";
      picture.append(drawn("line", { class: "axis", x1: x, x2: x, y1: floor, y2: floor + 4 }));
      picture.append(drawn("text", { class: "tick", x, y: height - 4, "text-anchor": anchor }, this.all.axis.text(place)));
    }
    this.rule = drawn("line", { class: "cursor", y1: TOP - 4, y2: floor, x1: -9, x2: -9 });
    this.spots = drawn("g");
    this.up = chart.rows ? null : up;
    picture.append(this.rule, this.spots);
    this.box.replaceChildren(picture);
    this.describe(values);
  }

  line(picture, line, up, floor) {
    const points = thinned(line.points, this.inner);
    const style = line.style ?? "run-0";
    if (line.kind === "bars") {
      const gaps = points.slice(1).map((point, at) => this.scale(point.x) - this.scale(points[at].x));
      const thick = Math.max(1, Math.min(24, gaps.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), 24) * 0.75));
      // Those of several runs stand next to each other.
      const [n, at] = [this.chart.lines.length, this.chart.lines.indexOf(line)];
      for (const point of points) {
        const place = { x: this.scale(point.x) - thick / 2 + (thick * at) / n, width: Math.max(0.7, thick / n) };
        picture.append(drawn("rect", { class: `bar shared ${style}`, ...place, y: up(point.y), height: Math.max(0, floor - up(point.y)) }));
        if (point.low !== undefined) picture.append(drawn("rect", { class: `bar ${style}`, ...place, y: up(point.low), height: Math.max(0, floor - up(point.low)) }));
      }
      return;
    }
    if (line.kind === "marks") {
      for (const point of points) {
        const [x, shape] = [this.scale(point.x), { class: `mark ${style} ${line.mark}` }];
        if (line.mark === "staged") picture.append(drawn("circle", { ...shape, cx: x, cy: up(point.y), r: 3 }));
        else {
          if (point.low !== undefined) picture.append(drawn("line", { class: `stem ${style}`, x1: x, x2: x, y1: up(point.low), y2: up(point.y) }));
          picture.append(drawn("path", { ...shape, d: `M${x - 3.5} ${up(point.y)}L${x} ${up(point.y) - 3.5}L${x + 3.5} ${up(point.y)}L${x} ${up(point.y) + 3.5}Z` }));
        }
      }
      return;
    }
    const path = points.map((point) => `${this.scale(point.x).toFixed(1)},${up(point.y).toFixed(1)}`).join(" ");
    picture.append(drawn("polyline", { class: `curve ${style}`, points: path }));
    if (line.points.length <= MOST_DOTS && line.kind !== "level") {
      for (const point of points) picture.append(drawn("circle", { class: `dot ${style}`, cx: this.scale(point.x), cy: up(point.y), r: 2.2 }));
    }
  }

  ribbon(picture, floor) {
    const each = (floor - TOP) / this.chart.rows.length;
    this.chart.lines.forEach((line) => {
      const y = TOP + each * line.row;
      picture.append(drawn("text", { class: "tick", x: this.left - 6, y: y + each / 2 + 4, "text-anchor": "end" }, this.chart.rows[line.row]));
      const points = line.points;
      if (line.kind === "signs") {
        for (const point of points) picture.append(drawn("text", { class: `sign ${point.sign}`, x: this.scale(point.x), y: y + each / 2 + 5, "text-anchor": "middle" }, { bad: "✕", start: "▲", note: "●" }[point.sign]));
        return;
      }
      const edges = points.map((point, at) => (at ? (this.scale(points[at - 1].x) + this.scale(point.x)) / 2 : this.scale(point.x) - 4));
      let [from, n] = [0, points.length];
      for (let at = 1; at <= n; at += 1) {
        if (at < n && points[at].band === points[from].band) continue;
        const end = at < n ? edges[at] : this.scale(points[n - 1].x) + 4;
        const x = Math.max(this.left, edges[from]);
        picture.append(drawn("rect", { class: `band band-${points[from].band}`, x, y: y + 2, width: Math.max(0.7, end - x), height: each - 4 }));
        from = at;
      }
    });
  }

  describe(values) {
    const { chart, stops } = this;
    const set = (name, value) => this.box.setAttribute(name, value);
    set("aria-label", `${chart.title}, by ${this.all.axis.name}`);
    set("aria-valuemin", 0);
    set("aria-valuemax", Math.max(0, stops.length - 1));
    const largest = Math.max(...values);
    const range = values.length && !chart.rows ? `from ${this.text(Math.min(...values), largest)} to ${this.text(largest)}` : "";
    this.range = chart.rows ? "" : range.replace("from ", "").replace(" to ", " … ");
    this.whole = `${counted(stops.length, "point")}${range ? `, ${range}` : ""}`;
    set("aria-valuenow", Math.max(0, stops.length - 1));
    set("aria-valuetext", this.whole);
  }

  under(event) {
    const box = this.box.getBoundingClientRect();
    return this.stops.length ? this.stops[nearest(this.stops, this.back(event.clientX - box.left))].x : null;
  }

  choose(x) {
    const found = this.stops.find((point) => point.x === x);
    if (found) this.all.chosen(found);
  }

  move(by) {
    if (!this.stops.length) return;
    const last = this.stops.length - 1;
    const at = this.all.cursor === null ? last : nearest(this.stops, this.all.cursor);
    this.all.point(this.stops[Math.max(0, Math.min(last, at + by))].x);
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) this.move(by);
    else if (event.key === "Escape") this.all.point(null);
    else if (event.key === "Enter") this.choose(this.all.cursor);
    else return;
    event.preventDefault();
  }

  point(x) {
    this.spots.replaceChildren();
    if (x === null || !this.stops.length) {
      this.rule.setAttribute("x1", -9);
      this.rule.setAttribute("x2", -9);
      this.readout.textContent = this.range;
      this.box.setAttribute("aria-valuetext", this.whole);
      return;
    }
    for (const name of ["x1", "x2"]) this.rule.setAttribute(name, this.scale(x));
    const said = [];
    for (const line of this.chart.lines) {
      if (!line.points.length) continue;
      const point = line.points[nearest(line.points, x)];
      if (point.x !== x && line.kind === "signs") continue;
      const far = Math.abs(this.scale(point.x) - this.scale(x)) > 12;
      if (far) continue;
      if (this.up) this.spots.append(drawn("circle", { class: `spot ${line.style ?? "run-0"}`, cx: this.scale(point.x), cy: this.up(point.y), r: 4.5 }));
      const value = point.note ?? this.text(point.y);
      said.push(this.chart.lines.length > 1 && line.name ? `${line.name} ${value}` : value);
    }
    const place = `${this.all.axis.name} ${this.all.axis.text(x)}`;
    this.readout.textContent = said.length ? `${place}: ${said.join(" · ")}` : place;
    this.box.setAttribute("aria-valuenow", nearest(this.stops, x));
    this.box.setAttribute("aria-valuetext", said.length ? `${place}: ${said.join(", ")}` : `${place}: nothing here`);
  }
}

function swatch(style, isBand = false) {
  const picture = drawn("svg", { class: "swatch", viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" });
  if (isBand) picture.append(drawn("rect", { class: style, width: 18, height: 10 }));
  else if (/staged/.test(style)) picture.append(drawn("circle", { class: `mark ${style}`, cx: 9, cy: 5, r: 3 }));
  else if (/durable/.test(style)) picture.append(drawn("path", { class: `mark ${style}`, d: "M5 5L9 1L13 5L9 9Z" }));
  else picture.append(drawn("line", { class: `curve ${style}`, x1: 0, x2: 18, y1: 5, y2: 5 }));
  return picture;
}
