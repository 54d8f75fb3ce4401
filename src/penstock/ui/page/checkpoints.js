// The table of checkpoints, and next to it the comparison of two and the save of one; below it the tree of one.

import { ask, button, byId, bytes, counted, drawn, element, number, plain, seconds, table } from "/elements.js";

const COLOURS = ["#8fb3d9", "#f5b77a", "#9bcf94", "#cfa8cb", "#a9d5d2", "#f4dd8a", "#ef9a9c", "#c0a99c"];
const [A_PAGE, MOST_METRICS, SHOWN_LEAVES] = [100, 3, 100];
const SMALL_BYTES = 64e6; // of both together: their values are compared without being asked

// Names of metrics: a loss comes first.
export function byImportance(names) {
  const rank = (name) => (/loss/i.test(name) ? 0 : 1);
  return [...names].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

export class Checkpoints {
  // `runs` are all runs; `chosen` is called with the step that is chosen.
  constructor(runs, chosen) {
    this.runs = runs;
    this.onChosen = chosen;
    this.chosen = null;
    this.ticked = [];
    this.first = 0; // of the page that is shown
    this.asked = 0;
  }

  get steps() {
    // The newest first, those of several runs next to each other.
    const all = this.runs.flatMap((run) => [...run.steps.values()].map((step) => ({ run, step })));
    return all.sort((a, b) => (b.step.step ?? Infinity) - (a.step.step ?? Infinity) || (b.step.committed_at ?? 0) - (a.step.committed_at ?? 0) || a.run.index - b.run.index);
  }

  show() {
    const steps = this.steps;
    this.first = Math.max(0, Math.min(this.first, Math.floor((steps.length - 1) / A_PAGE) * A_PAGE));
    const metrics = byImportance(new Set(steps.flatMap(({ step }) => Object.keys(step.metrics)))).slice(0, MOST_METRICS);
    const several = this.runs.length > 1;
    const tiered = this.runs.some((run) => run.tiers.length > 0);
    const focused = document.activeElement?.dataset?.key;
    const head = ["", ...(several ? ["run"] : []), "step", ...(tiered ? ["where"] : []), ...metrics, "size", "own", "committed (UTC)", ""];
    const numbers = new Set(["size", "own", ...metrics]);
    const headings = head.map((name) => element("th", { scope: "col", class: numbers.has(name) ? "number" : "" }, ...(name ? [name] : [element("span", { class: "unseen" }, "compare")])));
    headings[0].className = "tick-column";
    headings.at(-1).replaceChildren(element("span", { class: "unseen" }, "state"));
    const rows = steps.slice(this.first, this.first + A_PAGE).map(({ run, step }) => this.row(run, step, metrics, several, tiered));
    const body = element("tbody", {}, ...rows);
    const made = element("table", {}, element("thead", {}, element("tr", {}, ...headings)), body);
    byId("steps").replaceChildren(made);
    if (focused) made.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    this.showPages(steps.length);
  }

  row(run, step, metrics, several, tiered) {
    const whole = step.state === "finished";
    const name = several ? `${run.letter} ${step.label}` : step.label;
    const key = `${run.index}/${step.name}`;
    const tick = element("input", { type: "checkbox", "aria-label": `compare ${name}`, "data-key": `tick ${key}` });
    tick.checked = this.ticked.some((one) => one.run === run && one.name === step.name);
    tick.disabled = !whole;
    tick.addEventListener("change", () => this.tick(run, step.name, tick.checked));
    const open = button(step.label, () => this.choose(run, step.name), { "data-key": `open ${key}` });
    open.disabled = !whole;
    const is = this.chosen?.run === run && this.chosen.name === step.name;
    if (is) open.setAttribute("aria-current", "true");
    const state = whole ? "" : step.problem ? `${step.state}: ${step.problem}` : step.state;
    return element("tr", is ? { class: "chosen" } : {},
      element("td", { class: "tick-column" }, tick),
      ...(several ? [element("td", {}, run.letter)] : []),
      element("td", {}, open),
      ...(tiered ? [element("td", {}, step.where.join(" "))] : []),
      ...metrics.map((metric) => number(metric in step.metrics ? plain(step.metrics[metric]) : "")),
      number(bytes(step.nbytes)), number(bytes(step.own_bytes)),
      element("td", { title: step.time }, step.time.slice(5)), element("td", { class: step.state }, state));
  }

  showPages(n) {
    const last = Math.min(n, this.first + A_PAGE);
    const turn = (by) => () => { this.first += by; this.show(); byId("steps").scrollTop = 0; };
    const newer = button("newer", turn(-A_PAGE));
    const older = button("older", turn(A_PAGE));
    newer.disabled = this.first === 0;
    older.disabled = last === n;
    const find = element("input", { type: "text", inputmode: "numeric", size: 8, id: "find", "aria-label": "go to step" });
    find.value = this.sought ?? "";
    const focused = document.activeElement?.id === "find";
    find.addEventListener("input", () => { this.sought = find.value; });
    find.addEventListener("keydown", (event) => event.key === "Enter" && this.goTo(Number(find.value)));
    const go = element("label", {}, "go to step ", find);
    const says = n === 0 ? "no checkpoint" : n <= A_PAGE ? counted(n, "checkpoint") : `${this.first + 1}–${last} of ${counted(n, "checkpoint")} `;
    byId("pages").replaceChildren(says, ...(n > A_PAGE ? [newer, " ", older, " ", go] : []));
    if (focused) byId("find")?.focus();
  }

  goTo(step) {
    const steps = this.steps;
    const distance = (one) => Math.abs((one.step.step ?? Infinity) - step);
    const found = steps.reduce((best, one, at) => (distance(one) < distance(steps[best]) ? at : best), 0);
    if (!steps.length) return;
    this.first = Math.floor(found / A_PAGE) * A_PAGE;
    this.show();
    const { run, step: facts } = steps[found];
    const open = byId("steps").querySelector(`[data-key="${CSS.escape(`open ${run.index}/${facts.name}`)}"]`);
    open?.scrollIntoView({ block: "nearest" });
    open?.focus();
  }

  // Two at most are ticked: a third takes the place of the first.
  tick(run, name, on) {
    this.ticked = this.ticked.filter((one) => one.run !== run || one.name !== name);
    if (on) this.ticked = [...this.ticked, { run, name }].slice(-2);
    this.show();
    this.compare();
  }

  titled({ run, name }) {
    const label = run.steps.get(name)?.label ?? name;
    return this.runs.length > 1 ? `${run.letter} ${label}` : label;
  }

  async compare(values = false) {
    const [says, found] = [byId("comparison-says"), byId("comparison-found")];
    found.replaceChildren();
    if (this.ticked.length < 2) {
      byId("comparison-title").textContent = "Comparison";
      says.textContent = this.ticked.length ? `Tick one more to compare it with ${this.titled(this.ticked[0])}.` : "Tick two checkpoints.";
      return;
    }
    const order = (one) => one.run.steps.get(one.name)?.step ?? 0;
    const [first, second] = this.ticked.toSorted((a, b) => a.run.index - b.run.index || order(a) - order(b));
    const size = [first, second].reduce((sum, one) => sum + (one.run.steps.get(one.name)?.nbytes ?? 0), 0);
    const whole = values || size <= SMALL_BYTES;
    byId("comparison-title").textContent = `${this.titled(first)} and ${this.titled(second)}`;
    says.textContent = whole ? "reading both …" : "comparing the trees …";
    const asked = (this.asked += 1);
    byId("aside").scrollTop = 0;
    if (matchMedia("(max-width: 1099px)").matches) byId("comparison").scrollIntoView({ block: "nearest" });
    try {
      const parameters = { first: first.name, first_run: first.run.index, second: second.name, second_run: second.run.index, values: whole ? 1 : 0 };
      const answer = await ask("/api/diff", parameters);
      if (asked !== this.asked) return; // another pair was ticked meanwhile
      this.showDifferences(answer, size, [this.titled(first), this.titled(second)]);
    } catch (error) {
      if (asked === this.asked) says.replaceChildren(element("span", { class: "error" }, error.message));
    }
  }

  showDifferences(answer, size, [one, other]) {
    const [says, place] = [byId("comparison-says"), byId("comparison-found")];
    const parts = [];
    const said = [];
    if (answer.n_structure) said.push(`${counted(answer.n_structure, "difference")} in structure`);
    if (answer.values !== null) said.push(`${counted(answer.n_values, "leaf differs", "leaves differ")}, ${answer.n_alike.toLocaleString("en")} are the same`);
    else said.push(`${counted(answer.n_alike, "leaf has", "leaves have")} one shape and dtype in both`);
    says.textContent = `${said.join("; ")}.`;
    if (answer.values === null) parts.push(button(`compare their values, too (reads ${bytes(size)})`, () => this.compare(true), { class: "plain" }));
    const more = (shown, n) => (n > shown ? [element("p", { class: "hint" }, `the first ${shown}; penstock diff lists all`)] : []);
    if (answer.structure.length) {
      const rows = answer.structure.map((row) => element("tr", {}, element("td", {}, { first: `only in ${one}`, second: `only in ${other}` }[row.what] ?? row.what), element("td", { class: "key" }, row.key_path), element("td", {}, row.first), element("td", {}, row.second)));
      parts.push(element("h3", {}, "Structure"), table("Differences in structure", ["", "leaf", `in ${one}`, `in ${other}`], [], rows), ...more(rows.length, answer.n_structure));
    }
    if (answer.values?.length) {
      const rows = answer.values.map((row) => element("tr", {}, element("td", { class: "key" }, row.key_path), number(row.largest), number(row.different), element("td", {}, row.at), number(row.first), number(row.second)));
      const numbers = ["largest difference", "differing", `in ${one}`, `in ${other}`];
      const names = ["leaf", ...numbers.slice(0, 2), "at", ...numbers.slice(2)];
      parts.push(element("h3", {}, "Values, the largest differences first"), table("Differences of values", names, numbers, rows), ...more(rows.length, answer.n_values));
    }
    place.replaceChildren(...parts);
  }

  async choose(run, name) {
    this.chosen = { run, name };
    this.show();
    this.onChosen(run, run.steps.get(name));
    await Promise.all([this.showReport(), this.showTree()]);
  }

  async showReport() {
    const { run, name } = this.chosen;
    const step = run.steps.get(name);
    const label = step?.label ?? name;
    const about = run.reports.findLast((report) => report.label === label && report.kind === "save");
    byId("report").hidden = about === undefined;
    if (about === undefined) return;
    byId("report-title").textContent = `The save of ${this.titled(this.chosen)}`;
    const rate = about.seconds > 0 ? `, ${bytes(about.nbytes / about.seconds)}/s` : "";
    const kept = about.nbytes_kept ? `, ${bytes(about.nbytes_kept)} more are linked from an earlier step` : "";
    const facts = `${counted(about.n_leaves, "leaf", "leaves")}, ${bytes(about.nbytes)}${kept}: staged after ${seconds(about.staged_s)}, durable after ${seconds(about.seconds)}${rate}.`;
    byId("explanation").textContent = facts;
    byId("timeline").replaceChildren();
    byId("stages").replaceChildren();
    if (!about.is_detailed) {
      byId("explanation").textContent = `${facts} The bottleneck was ${about.bottleneck || "none"}. Timelines are kept of the latest saves alone.`;
      return;
    }
    try {
      const report = await ask("/api/report", { run: run.index, name: label, kind: "save" });
      if (this.chosen.run !== run || this.chosen.name !== name) return;
      byId("explanation").textContent = `${facts} ${report.explanation}`;
      this.showTimeline(report);
    } catch (error) {
      byId("timeline").replaceChildren(element("p", { class: "error" }, error.message));
    }
  }

  showTimeline(report) {
    this.report = report;
    const width = Math.round(Math.max(280, byId("timeline").clientWidth || 500));
    const legend = element("p", { class: "hint" }, "One line for each worker: blue where it is busy, orange where it waits for memory.");
    byId("timeline").replaceChildren(timeline(report.rows, width), legend);
    const columns = ["busy", "starved", "blocked", "memory wait", "size"];
    const rows = report.stages.map((stage) => element("tr", {}, element("td", {}, stage.workers === 1 ? stage.name : `${stage.name} ×${stage.workers}`),
      ...["busy_s", "starved_s", "blocked_s", "memory_wait_s"].map((key) => number(seconds(stage[key]))), number(stage.nbytes ? bytes(stage.nbytes) : "")));
    byId("stages").replaceChildren(table("Stages", ["stage", ...columns], columns, rows));
  }

  redraw() {
    if (this.report && !byId("report").hidden && byId("timeline").children.length) this.showTimeline(this.report);
  }

  async showTree() {
    const { run, name } = this.chosen;
    const place = byId("tree");
    byId("tree-section").hidden = false;
    byId("tree-title").textContent = `The tree of ${this.titled(this.chosen)}`;
    const width = Math.round(Math.min(1400, Math.max(300, place.clientWidth)));
    const height = Math.round(Math.max(240, Math.min(420, width * 0.45)));
    try {
      const found = await ask("/api/tree", { run: run.index, name, width, height });
      if (this.chosen.run !== run || this.chosen.name !== name) return;
      const total = found.items.reduce((sum, item) => sum + item.stored_nbytes, 0);
      place.replaceChildren(...found.items.flatMap((item) => treeOf(item, width, height, total)));
    } catch (error) {
      place.replaceChildren(element("p", { class: "error" }, error.message));
    }
  }
}

function treeOf(item, width, height, total) {
  const about = `${counted(item.n_leaves, "leaf", "leaves")}, ${bytes(item.stored_nbytes)}`;
  const parts = [element("h3", {}, item.name ? `${item.name}: ${about}` : about)];
  if (item.rectangles.length && item.stored_nbytes >= total / 100) parts.push(map(item, width, height));
  const columns = ["leaf", "kind", "shape", "dtype", "sharding", "bytes", "stored", "codec"];
  const rows = item.leaves.map((leaf) => element("tr", {}, element("td", { class: "key" }, leaf.key_path), ...["kind", "shape", "dtype", "sharding"].map((key) => element("td", {}, leaf[key])),
    number(leaf.nbytes.toLocaleString("en")), number(leaf.stored_nbytes.toLocaleString("en")), element("td", {}, leaf.codec)));
  const shown = table(`Leaves of ${item.name || "the checkpoint"}`, columns, ["bytes", "stored"], rows.slice(0, SHOWN_LEAVES));
  parts.push(shown);
  if (rows.length > SHOWN_LEAVES) {
    const rest = button(`show ${counted(rows.length - SHOWN_LEAVES, "more leaf", "more leaves")}`, () => {
      shown.querySelector("tbody").append(...rows.slice(SHOWN_LEAVES));
      rest.remove();
    }, { class: "plain" });
    parts.push(rest);
  }
  if (rows.length < item.n_leaves) parts.push(element("p", { class: "hint" }, `the first ${rows.length.toLocaleString("en")}; penstock show lists all`));
  return parts;
}

function map(item, width, height) {
  const label = `Sizes as areas: ${item.rectangles.filter((shape) => shape.depth === 1).slice(0, 8).map((shape) => shape.title).join("; ")}`;
  const picture = drawn("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const shape of item.rectangles) {
    const { x, y, width: wide, height: high } = shape;
    const group = drawn("g", { "aria-hidden": "true" });
    const colour = { fill: COLOURS[shape.colour % COLOURS.length], "fill-opacity": Math.max(0.35, 1.1 - 0.25 * shape.depth) };
    group.append(drawn("title", {}, shape.title), drawn("rect", { x, y, width: wide, height: high, ...colour }));
    const room = Math.floor(wide / 7);
    if (room >= 3 && high >= 15) {
      const text = shape.label.length > room ? `${shape.label.slice(0, room - 1)}…` : shape.label;
      group.append(drawn("text", { x: x + 4, y: y + 12 }, text));
    }
    picture.append(group);
  }
  return picture;
}

function timeline(rows, width) {
  const [left, line] = [118, 18];
  const whole = Math.max(1e-9, ...rows.flatMap((row) => row.bars.map(([start, long]) => start + long)));
  const scale = (width - left - 10) / whole;
  const high = line * rows.length + 24;
  const label = `When each worker worked, in ${seconds(whole)}: ${counted(rows.length, "worker")}; the table below has the figures`;
  const picture = drawn("svg", { class: "timeline", viewBox: `0 0 ${width} ${high}`, role: "img", "aria-label": label });
  rows.forEach((row, at) => {
    const place = { y: 4 + line * at, height: line - 6 };
    picture.append(drawn("text", { x: 0, y: place.y + 10 }, row.label.slice(0, 18)));
    for (const [start, long, waits] of row.bars) {
      const [x, waited] = [left + start * scale, waits * scale];
      if (waited >= 0.5) picture.append(drawn("rect", { class: "waited", x, width: waited, ...place }));
      const work = drawn("rect", { class: "bar run-0", x: x + waited, width: Math.max(0.5, long * scale - waited), ...place });
      work.append(drawn("title", {}, `${row.label}: ${seconds(long)}`));
      picture.append(work);
    }
  });
  picture.append(drawn("text", { x: left, y: high - 6 }, "0 s"));
  picture.append(drawn("text", { x: width - 10, y: high - 6, "text-anchor": "end" }, seconds(whole)));
  return picture;
}
