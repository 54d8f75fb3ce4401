"use strict";
// Whatever comes from a checkpoint goes into the page as text, never as HTML.

const COLOURS = ["#8fb3d9", "#f5b77a", "#9bcf94", "#cfa8cb", "#a9d5d2", "#f4dd8a", "#ef9a9c", "#c0a99c"];
const SVG = "http://www.w3.org/2000/svg";
const POLL_MS = 2000;
const state = { run: null, chosen: null, compared: [], report: null };

const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map(String));
  return made;
}

function drawn(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (n < 1000 || unit === "TB") return `${unit === "B" ? n : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
}

const short = (n) => (n === null ? "–" : Number(n.toPrecision(5)).toString());

async function ask(path, parameters = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { credentials: "same-origin" });
  if (answer.status === 403) throw new Error("this page may ask no more: penstock ui was started anew");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `${answer.status}`);
  return found;
}

function figure(title, picture) {
  const made = element("figure");
  made.append(element("figcaption", {}, title), picture);
  return made;
}

function curve(points) {
  const [width, height, pad] = [300, 110, 14];
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = (p) => [
    pad + ((p.x - x0) / (x1 - x0 || 1)) * (width - 2 * pad),
    height - 20 - ((p.y - y0) / (y1 - y0 || 1)) * (height - 40),
  ];
  picture.append(drawn("polyline", { class: "curve", points: points.map((p) => at(p).join(",")).join(" ") }));
  for (const point of points) {
    const [cx, cy] = at(point);
    const dot = drawn("circle", { class: "dot", cx, cy, r: 3 });
    dot.append(drawn("title", {}, `step ${point.x}: ${point.y}`));
    picture.append(dot);
  }
  picture.append(drawn("text", { x: pad, y: 12 }, `${short(y1)} … ${short(y0)}`));
  picture.append(drawn("text", { x: pad, y: height - 4 }, `${x0}`));
  picture.append(drawn("text", { x: width - pad, y: height - 4, "text-anchor": "end" }, `${x1}`));
  return picture;
}

function bars(steps) {
  const [width, height] = [300, 110];
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const most = Math.max(1, ...steps.map((step) => step.nbytes));
  const each = Math.min(40, width / Math.max(1, steps.length));
  steps.forEach((step, at) => {
    const full = (step.nbytes / most) * 80;
    const own = (step.own_bytes / most) * 80;
    const place = { x: at * each + 1, width: Math.max(1, each - 2) };
    const shared = drawn("rect", { class: "bar shared", ...place, y: 92 - full, height: full });
    shared.append(drawn("title", {}, `${step.label}: ${bytes(step.nbytes)}, ${bytes(step.own_bytes)} its own`));
    picture.append(shared, drawn("rect", { class: "bar own", ...place, y: 92 - own, height: own, "pointer-events": "none" }));
  });
  picture.append(drawn("text", { x: 2, y: 106 }, `up to ${bytes(most)}; dark: not shared with another step`));
  return picture;
}

function showCurves(steps) {
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.metrics)))].sort();
  const figures = names.map((name) => {
    const points = steps
      .filter((step) => typeof step.metrics[name] === "number")
      .map((step, at) => ({ x: step.step ?? at, y: step.metrics[name] }));
    return points.length ? figure(name, curve(points)) : null;
  });
  byId("curves").replaceChildren(...figures.filter(Boolean), figure("size of each checkpoint", bars(steps)));
}

function showSaves(steps) {
  const saves = steps.filter((step) => step.started_at && step.committed_at > step.started_at).slice(-12);
  byId("saves-section").hidden = saves.length === 0;
  if (saves.length === 0) return;
  const [width, line] = [420, 22];
  const longest = Math.max(...saves.map((step) => step.committed_at - step.started_at));
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${saves.length * line}`, role: "img" });
  saves.forEach((step, at) => {
    const seconds = step.committed_at - step.started_at;
    const long = Math.max(2, (seconds / longest) * 200);
    picture.append(drawn("text", { x: 0, y: at * line + 14 }, step.label.slice(0, 12)));
    picture.append(drawn("rect", { class: "bar", x: 80, y: at * line + 4, width: long, height: line - 8 }));
    const rate = `${seconds.toFixed(2)} s, ${bytes(step.own_bytes / seconds)}/s`;
    picture.append(drawn("text", { x: 86 + long, y: at * line + 14 }, rate));
  });
  byId("saves").replaceChildren(picture);
  const slowest = saves.reduce((a, b) => (b.committed_at - b.started_at > a.committed_at - a.started_at ? b : a));
  byId("slowest").textContent =
    `From the beginning of each save until it was durable. The slowest was ${slowest.label}.`;
}

function timeline(rows, width) {
  const [left, line] = [110, 18];
  const whole = Math.max(1e-9, ...rows.flatMap((row) => row.bars.map((bar) => bar.start_s + bar.seconds)));
  const scale = (width - left - 10) / whole;
  const high = line * rows.length + 24;
  const picture = drawn("svg", { class: "timeline", viewBox: `0 0 ${width} ${high}`, role: "img" });
  rows.forEach((row, at) => {
    const place = { y: 4 + line * at, height: line - 6 };
    picture.append(drawn("text", { x: 4, y: place.y + 10 }, row.label.slice(0, 20)));
    for (const bar of row.bars) {
      const [x, waited] = [left + bar.start_s * scale, bar.memory_wait_s * scale];
      if (waited >= 0.5) picture.append(drawn("rect", { class: "waited", x, width: waited, ...place }));
      const work = drawn("rect", { class: "bar", x: x + waited, width: Math.max(0.5, bar.seconds * scale - waited), ...place });
      work.append(drawn("title", {}, `${row.label}: ${(1000 * bar.seconds).toFixed(1)} ms`));
      picture.append(work);
    }
  });
  picture.append(drawn("text", { x: left, y: high - 6 }, "0 s"));
  picture.append(drawn("text", { x: width - 10, y: high - 6, "text-anchor": "end" }, `${whole.toFixed(3)} s`));
  return picture;
}

function showReport() {
  const reports = state.run.reports;
  const report = reports.findLast((other) => other.label === state.report) ?? reports.at(-1);
  if (report === undefined) return;
  const leaves = `${report.n_leaves.toLocaleString("en")} ${report.n_leaves === 1 ? "leaf" : "leaves"}`;
  const rate = report.durable_s > 0 ? ` (${bytes(report.nbytes / report.durable_s)}/s)` : "";
  byId("explanation").textContent =
    `${leaves}, ${bytes(report.nbytes)}: staged after ${report.staged_s.toFixed(3)} s, durable after ` +
    `${report.durable_s.toFixed(3)} s${rate}. ${report.explanation}`;
  const legend = element("p", { class: "more" }, "One line for each worker: busy, and in orange memory_wait.");
  byId("timeline").replaceChildren(timeline(report.rows, Math.round(Math.min(900, Math.max(280, byId("timeline").clientWidth)))), legend);
  const numbers = ["busy", "starved", "blocked", "memory_wait", "size"];
  const seconds = (n) => cell(n.toFixed(3), "number");
  const rows = report.stages.map((stage) => row([
    cell(stage.workers === 1 ? stage.name : `${stage.name} ×${stage.workers}`),
    ...["busy_s", "starved_s", "blocked_s", "memory_wait_s"].map((key) => seconds(stage[key])), cell(stage.nbytes ? bytes(stage.nbytes) : "", "number"),
  ]));
  byId("stages").replaceChildren(table(["stage", ...numbers], numbers, rows));
}

function showReports(reports) {
  byId("report").hidden = reports.length === 0;
  byId("no-reports").hidden = reports.length !== 0;
  const latest = element("option", { value: "" }, "the latest");
  const others = reports.toReversed().map((report) => element("option", { value: report.label }, `${report.label}, ${report.time}`));
  const choice = byId("report-chosen");
  choice.replaceChildren(latest, ...others);
  choice.value = reports.some((report) => report.label === state.report) ? state.report : "";
  showReport();
}

function cell(text, kind = "") {
  return element("td", kind ? { class: kind } : {}, text);
}

function row(cells) {
  const made = element("tr");
  made.append(...cells);
  return made;
}

function headings(names, numbers) {
  return row(names.map((name) => element("th", numbers.has(name) ? { class: "number", scope: "col" } : { scope: "col" }, name)));
}

function showSteps(steps) {
  const metrics = [...new Set(steps.flatMap((step) => Object.keys(step.metrics)))].sort();
  const numbers = new Set(["size", "own", ...metrics]);
  const table = byId("steps");
  table.tHead.replaceChildren(headings(["", "step", "state", "size", "own", "committed (UTC)", ...metrics, ""], numbers));
  const rows = steps.map((step) => {
    const tick = element("input", { type: "checkbox", "aria-label": `compare ${step.label}` });
    tick.checked = state.compared.includes(step.name);
    tick.disabled = step.state !== "finished";
    tick.addEventListener("change", () => compare(step.name, tick.checked));
    const open = element("button", { type: "button" }, step.label);
    open.disabled = step.state !== "finished";
    open.addEventListener("click", () => choose(step.name));
    const [first, second] = [element("td"), element("td")];
    first.append(tick);
    second.append(open);
    const made = row([
      first, second, cell(step.state, step.state), cell(bytes(step.nbytes), "number"), cell(bytes(step.own_bytes), "number"),
      cell(step.time), ...metrics.map((name) => cell(name in step.metrics ? short(step.metrics[name]) : "", "number")),
      cell(step.problem, "error"),
    ]);
    if (step.name === state.chosen) made.className = "chosen";
    return made;
  });
  table.tBodies[0].replaceChildren(...rows);
}

function map(item, width, height) {
  const picture = drawn("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const shape of item.rectangles) {
    const { x, y, width, height } = shape;
    const group = drawn("g");
    const colour = { fill: COLOURS[shape.colour % COLOURS.length], "fill-opacity": Math.max(0.35, 1.1 - 0.25 * shape.depth) };
    group.append(drawn("title", {}, shape.title), drawn("rect", { x, y, width, height, ...colour }));
    const room = Math.floor(width / 7);
    if (room >= 3 && height >= 15) {
      const text = shape.label.length > room ? `${shape.label.slice(0, room - 1)}…` : shape.label;
      group.append(drawn("text", { x: x + 4, y: y + 12 }, text));
    }
    picture.append(group);
  }
  return picture;
}

function table(names, numbers, rows) {
  const made = element("table");
  made.createTHead().append(headings(names, new Set(numbers)));
  made.createTBody().append(...rows);
  const around = element("div", { class: "scroll" });
  around.append(made);
  return around;
}

async function choose(name) {
  state.chosen = name;
  showSteps(state.run.steps);
  const section = byId("tree-section");
  section.hidden = false;
  byId("tree-title").textContent = "…";
  const width = Math.round(Math.min(1400, Math.max(300, byId("tree").clientWidth)));
  const height = Math.round(Math.max(240, Math.min(480, width * 0.5)));
  try {
    const found = await ask("/api/tree", { name, width, height });
    byId("tree-title").textContent = `The tree of ${found.name}`;
    const total = found.items.reduce((sum, item) => sum + item.stored_nbytes, 0);
    byId("tree").replaceChildren(...found.items.flatMap((item) => {
      const leaves = item.leaves.map((leaf) => row([
        cell(leaf.key_path, "key"), cell(leaf.kind), cell(leaf.shape), cell(leaf.dtype), cell(leaf.sharding),
        cell(leaf.nbytes.toLocaleString("en"), "number"), cell(leaf.stored_nbytes.toLocaleString("en"), "number"), cell(leaf.codec),
      ]));
      const columns = ["leaf", "kind", "shape", "dtype", "sharding", "bytes", "stored", "codec"];
      const about = `${item.n_leaves.toLocaleString("en")} ${item.n_leaves === 1 ? "leaf" : "leaves"}, ${bytes(item.stored_nbytes)}`;
      const shown = [element("h3", {}, item.name ? `${item.name}: ${about}` : about)];
      if (item.rectangles.length && item.stored_nbytes >= total / 100) shown.push(map(item, width, height));
      shown.push(table(columns, ["bytes", "stored"], leaves));
      if (item.leaves.length < item.n_leaves) shown.push(element("p", { class: "more" }, `the first ${item.leaves.length}; penstock show lists all`));
      return shown;
    }));
  } catch (error) {
    byId("tree-title").textContent = "";
    byId("tree").replaceChildren(element("p", { class: "error" }, error.message));
  }
}

function compare(name, ticked) {
  state.compared = state.compared.filter((other) => other !== name);
  if (ticked) state.compared = [...state.compared, name].slice(-2);
  showSteps(state.run.steps);
  byId("diff-section").hidden = state.compared.length !== 2;
  if (state.compared.length === 2) showDifferences(false);
}

async function showDifferences(values) {
  const [first, second] = state.compared;
  byId("diff-title").textContent = `A: ${first} and B: ${second}`;
  byId("diff").replaceChildren(element("p", { class: "more" }, "reading …"));
  byId("diff-values").hidden = values;
  try {
    const found = await ask("/api/diff", { first, second, values: values ? 1 : 0 });
    const structure = found.structure.map((r) => row([cell(r.what), cell(r.key_path, "key"), cell(r.first), cell(r.second)]));
    const differing = (found.values ?? []).map((r) => row([
      cell(r.key_path, "key"), cell(r.at), cell(r.first), cell(r.second), cell(r.largest, "number"), cell(r.different, "number"),
    ]));
    const parts = [];
    if (structure.length) parts.push(element("h3", {}, "Structure"), table(["", "leaf", "in A", "in B"], [], structure));
    if (differing.length) parts.push(element("h3", {}, "Values"), table(["leaf", "at", "in A", "in B", "largest", "different"], ["largest", "different"], differing));
    const alike = found.values === null ? "leaves have one shape and dtype in both" : "leaves are the same";
    parts.push(element("p", { class: "more", id: "alike" }, `${found.n_alike.toLocaleString("en")} ${alike}`));
    byId("diff").replaceChildren(...parts);
  } catch (error) {
    byId("diff").replaceChildren(element("p", { class: "error" }, error.message));
  }
}

async function refresh() {
  try {
    const run = await ask("/api/run");
    const changed = JSON.stringify(run) !== JSON.stringify(state.run);
    state.run = run;
    byId("path").textContent = run.path;
    byId("live").textContent = "live";
    if (changed) {
      showCurves(run.steps);
      showSaves(run.steps);
      showReports(run.reports);
      showSteps(run.steps);
      if (state.chosen === null) {
        const latest = run.steps.filter((step) => step.state === "finished").at(-1);
        if (latest) await choose(latest.name);
      }
    }
  } catch (error) {
    byId("live").textContent = `not live: ${error.message}`;
  }
  setTimeout(refresh, POLL_MS);
}

byId("report-chosen").addEventListener("change", (event) => { state.report = event.target.value || null; showReport(); });
addEventListener("resize", () => state.run && showReport());
byId("diff-values").addEventListener("click", () => showDifferences(true));
refresh();
