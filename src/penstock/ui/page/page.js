// The page: asks for what is new every two seconds, and shows it.

import { ask, button, byId, bytes, counted, drawn, element, number, plain, seconds, table } from "/elements.js";
import { byImportance, Checkpoints } from "/checkpoints.js";
import { Strips } from "/strips.js";

const POLL_MS = 2000;
const [MOST_BESIDE, MOST_EVENTS, MOST_BANDS] = [7, 300, 7];
const LONG = 150; // from so many points on there is a choice of fewer
const LETTERS = "ABCDEF";

const runs = []; // { index, letter, path, kind, version, steps: Map of names, tiers, reports, events }
const checkpoints = new Checkpoints(runs, (run, step) => { strips.point(place(run, step)); readNorms(run); });
const strips = new Strips(byId("strips"), choose);
const moreStrips = new Strips(byId("more-strips"), choose);
let [axis, isStale, shownAt] = ["step", false, 0];
let [most, from] = [Infinity, -Infinity]; // so many steps are drawn, from this one on

// ---- where things are across the page

const since = (run) => run.began ?? 0;
const place = (run, thing) => (axis === "step" ? thing?.step ?? null : (thing?.committed_at ?? thing?.ended_at ?? thing?.at ?? since(run)) - since(run));

function duration(s) {
  if (s < 120) return `${plain(s)} s`;
  if (s < 7200) return `${plain(s / 60)} min`;
  return s < 172800 ? `${plain(s / 3600)} h` : `${plain(s / 86400)} d`;
}

function timeTicks(low, high) {
  const rough = (high - low) / 6 || 1;
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = steps.find((one) => one >= rough) ?? Math.ceil(rough / 86400) * 86400;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const AXES = {
  step: { name: "step", text: (x) => (Number.isInteger(x) ? x.toLocaleString("en") : "") },
  time: { name: "time", text: duration, ticks: timeTicks },
};

// ---- the charts

function points(run, things, value, more = () => ({})) {
  return things
    .filter((thing) => (thing.step ?? Infinity) >= from)
    .map((thing) => ({ x: place(run, thing), y: value(thing), run, label: thing.label, ...more(thing) }))
    .filter((point) => point.x !== null && typeof point.y === "number" && Number.isFinite(point.y))
    .sort((a, b) => a.x - b.x);
}

// One line for each run, and for each of `parts` of it.
function lines(parts) {
  const several = runs.length > 1;
  return runs.flatMap((run) => parts.map(({ name = "", style = "", things, value, more, ...rest }) => ({
    name: [several ? run.letter : "", name].filter(Boolean).join(" "),
    style: `run-${run.index} ${style}`.trim(),
    points: points(run, things(run), value, more),
    ...rest,
  }))).filter((line) => line.points.length);
}

const finished = (run) => [...run.steps.values()].filter((step) => step.state === "finished");
// Metrics of steps that were deleted since are in the reports of their saves.
const measured = (run) => [...finished(run), ...saves(run).filter((report) => !run.steps.has(report.label))];
const saves = (run) => run.reports.filter((report) => report.kind === "save" && !report.label.includes("/"));

function charts() {
  const metrics = byImportance(new Set(runs.flatMap((run) => measured(run).flatMap((thing) => Object.keys(thing.metrics)))));
  const metric = (name) => ({ key: `metric ${name}`, title: name, lines: lines([{ things: measured, value: (thing) => thing.metrics[name] }]) });
  const found = metrics.slice(0, 1).map(metric);
  found.push({
    key: "stall", title: "Stall of training", unit: seconds, zero: true,
    lines: lines([{ things: saves, value: (report) => report.staged_s }]), says: "From the call of a save until the state might change.",
  });
  found.push(ribbon());
  const taken = (run) => finished(run).filter((step) => step.started_at && step.committed_at > step.started_at && !run.reported.has(step.label));
  found.push({
    key: "save", title: "A save, until it was staged and durable", unit: seconds, zero: true,
    lines: lines([
      { name: "durable", style: "durable", kind: "marks", mark: "durable", things: saves, value: (report) => report.seconds, more: (report) => ({ low: report.staged_s ?? undefined }) },
      { name: "staged", style: "staged", kind: "marks", mark: "staged", things: saves, value: (report) => report.staged_s },
      { name: "durable (by its documents)", style: "durable", kind: "marks", mark: "durable", things: taken, value: (step) => step.committed_at - step.started_at },
    ]),
  });
  const both = (run) => run.reports;
  const limits = runs.flatMap((run) => run.reports.map((report) => report.limit_bytes));
  found.push({
    key: "memory", title: "Memory", unit: bytes, zero: true,
    lines: lines([
      { name: "of the process", style: "process", things: both, value: (report) => report.process_bytes || null },
      { name: "leased at most", things: both, value: (report) => report.peak_bytes },
      { name: "caches", style: "caches", things: both, value: (report) => report.cached_bytes },
    ]),
    says: limits.length ? `The budget of leases and caches is ${bytes(limits.at(-1))}.` : "",
  });
  found.push({
    key: "size", title: "Size of each checkpoint", unit: bytes, zero: true,
    lines: lines([{ kind: "bars", things: finished, value: (step) => step.nbytes, more: (step) => ({ low: step.own_bytes, note: `${bytes(step.nbytes)}, its own ${bytes(step.own_bytes)}` }) }]),
    says: "Dark: not shared with another step.",
  });
  const rate = lines([{ things: saves, value: (report) => (report.seconds > 0 ? report.nbytes / report.seconds : null) }]);
  found.push({ key: "rate", title: "Bytes written a second", unit: (n, most) => `${bytes(n, most)}/s`, zero: true, lines: rate });
  found.push(...metrics.slice(1, MOST_BESIDE).map(metric));
  const shown = (chart) => chart.wide || chart.lines.length;
  return [found.filter((chart) => chart && shown(chart)), metrics.slice(MOST_BESIDE).map(metric).filter(shown)];
}

function ribbon() {
  const all = runs.flatMap(saves);
  if (!all.length && !runs.some((run) => run.events.length)) return null;
  const kind = (report) => (report.limited_by === "memory_wait" ? "memory" : report.bottleneck || "none");
  const counts = new Map();
  for (const report of all) counts.set(kind(report), (counts.get(kind(report)) ?? 0) + 1);
  const kinds = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  const at = (name) => Math.min(kinds.indexOf(name), MOST_BANDS);
  const several = runs.length > 1;
  const rows = [];
  const made = [];
  for (const run of runs) {
    const row = rows.push(several ? `bottleneck ${run.letter}` : "bottleneck") - 1;
    made.push({ name: several ? run.letter : "", row, points: points(run, saves(run), () => 1, (report) => ({ band: at(kind(report)), note: `${kind(report)} in ${seconds(report.seconds)}` })) });
  }
  const told = runs.map((run) => ({ run, signs: run.events.filter((event) => !/^(deleted|closed)$/.test(event.what)) }));
  const restores = (run) => run.reports.filter((report) => report.kind === "restore").map((report) => ({ ...report, what: "restored", at: report.ended_at }));
  const sign = (event) => (/failed|cancelled/.test(event.what) ? "bad" : event.what === "opened" ? "start" : "note");
  if (told.some(({ run, signs }) => signs.length || restores(run).length)) {
    const row = rows.push("events") - 1;
    for (const { run, signs } of told) {
      const events = [...signs, ...restores(run)].map((event) => ({ ...event, step: event.step ?? stepAt(run, event.at) }));
      made.push({ name: several ? run.letter : "", kind: "signs", row, points: points(run, events, () => 1, (event) => ({ sign: sign(event), note: `${event.what} ${event.label}`.trim() })) });
    }
  }
  const others = kinds.length > MOST_BANDS ? [{ at: MOST_BANDS, name: "others" }] : [];
  const bands = [...kinds.slice(0, MOST_BANDS).map((name, band) => ({ at: band, name: `${name} (${counts.get(name)})` })), ...others];
  return {
    key: "ribbon", title: "What held each save up, and events", wide: true, height: 28 * rows.length + 30, rows, lines: made, bands,
    says: "▲ a manager was opened, ● a restore, ✕ a failure or a cancellation. Memory is a wait for the budget; the other names are stages.",
  };
}

// What has no step of its own is where the next save was.
function stepAt(run, at) {
  const next = run.reports.find((report) => report.step !== null && report.ended_at >= at) ?? run.reports.findLast((report) => report.step !== null);
  return next?.step ?? [...run.steps.values()].at(-1)?.step ?? null;
}

function choose(point) {
  const run = point.run;
  const step = [...run.steps.values()].find((one) => one.label === point.label && one.state === "finished");
  if (step) checkpoints.choose(run, step.name);
}

// ---- what is beside the charts

function showEvents() {
  const all = runs.flatMap((run) => [
    ...run.events.map((event) => ({ ...event, run })),
    ...run.reports.filter((report) => report.kind === "restore").map((report) => ({ run, at: report.ended_at, time: report.time, what: "restored", label: report.label, text: `${bytes(report.nbytes)} in ${seconds(report.seconds)}` })),
  ]).sort((a, b) => b.at - a.at);
  const folded = [];
  for (const event of all) {
    const last = folded.at(-1);
    if (last && event.what === "deleted" && last.what === "deleted" && last.run === event.run) last.more.push(event);
    else folded.push({ ...event, more: [] });
  }
  byId("events-section").hidden = folded.length === 0;
  byId("events").replaceChildren(...folded.slice(0, MOST_EVENTS).map((event) => {
    const names = event.more.length ? `${event.more.at(-1).label} to ${event.label} (${counted(event.more.length + 1, "step")})` : event.label;
    const kind = /failed|cancelled/.test(event.what) ? "damaged" : "";
    return element("li", { class: kind }, element("time", {}, event.time), ` ${runs.length > 1 ? `${event.run.letter} ` : ""}${event.what} ${names} `, element("span", { class: "hint" }, event.text));
  }));
}

// ---- norms

const norms = { run: null, asked: false, timer: null };

async function readNorms(run, more = false) {
  clearTimeout(norms.timer);
  if (norms.run !== run) {
    norms.run = run;
    byId("norms").replaceChildren();
    byId("norms-says").textContent = "";
  }
  if (!run || norms.asked || document.hidden) {
    norms.timer = setTimeout(() => readNorms(norms.run), POLL_MS);
    return;
  }
  norms.asked = true;
  try {
    const found = await ask("/api/norms", { run: run.index, more: more ? 1 : 0, remote_too: run.mayRead ? 1 : 0 });
    if (norms.run === run) showNorms(run, found);
    norms.timer = setTimeout(() => readNorms(norms.run), found.n_unread && !found.is_spent && !found.is_waiting ? 50 : 2 * POLL_MS);
  } catch (error) {
    byId("norms-says").textContent = error.message;
    norms.timer = setTimeout(() => readNorms(norms.run), 5 * POLL_MS);
  } finally {
    norms.asked = false;
  }
}

function showNorms(run, found) {
  const names = Object.keys(found.norms);
  const problems = Object.entries(found.problems);
  byId("norms-section").hidden = names.length === 0 && problems.length === 0 && !found.is_waiting && !found.is_spent;
  const says = byId("norms-says");
  const of = runs.length > 1 ? ` of run ${run.letter}` : "";
  const read = `At ${counted(names.length, "step")} of ${found.n_steps.toLocaleString("en")}${of}; ${bytes(found.read_bytes)} read of at most ${bytes(found.allowed_bytes)}.`;
  const text = found.is_waiting ? "The values are in a bucket, where reading is paid for." : `${read}${problems.length ? ` ${problems[0][0]}: ${problems[0][1]}` : ""}`;
  const key = `${text} ${names.join()}`;
  if (norms.shown === key) return;
  norms.shown = key;
  says.replaceChildren(text);
  if (found.is_waiting) says.append(" ", button("read them", () => { run.mayRead = true; readNorms(run); }, { class: "plain" }));
  else if (found.is_spent) says.append(` One step is ${bytes(found.step_bytes)}. `, button("read more", () => readNorms(run, true), { class: "plain" }));
  const label = (name) => run.steps.get(name)?.label ?? name;
  const layers = [...new Set(names.flatMap((name) => Object.keys(found.norms[name])))];
  const change = (first, last) => (first && last !== null ? `${last >= first ? "+" : "−"}${Number(Math.abs(100 * (last / first - 1)).toPrecision(3))} %` : "–");
  const rows = layers.map((layer) => {
    const values = names.map((name) => found.norms[name][layer] ?? null);
    const known = values.filter((value) => value !== null);
    const [first, last] = [known[0] ?? null, known.at(-1) ?? null];
    const head = element("th", { scope: "row", class: "key" }, layer);
    if (names.length === 1) return element("tr", {}, head, number(plain(first)));
    return element("tr", {}, head, element("td", {}, spark(names.map((name) => run.steps.get(name)), values)), number(plain(first)), number(plain(last)),
      number(known.length ? `${plain(Math.min(...known))} … ${plain(Math.max(...known))}` : "–"), number(change(first, last)));
  });
  const [from, to] = [names[0], names.at(-1)].map((name) => (name === undefined ? "" : label(name)));
  const heads = names.length > 1 ? ["layer", `from ${from} to ${to}`, `at ${from}`, `at ${to}`, "range", "change"] : ["layer", `at ${from}`];
  byId("norms").replaceChildren(...(rows.length ? [table("Norms by layer", heads, heads.slice(names.length > 1 ? 2 : 1), rows)] : []));
}

function spark(steps, values) {
  const [width, height] = [180, 26];
  const found = values.map((value, at) => [steps[at]?.step ?? at, value]).filter(([, value]) => value !== null);
  const [xs, ys] = [found.map(([x]) => x), found.map(([, y]) => y)];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = ([x, y]) => `${(4 + ((x - x0) / (x1 - x0 || 1)) * (width - 8)).toFixed(1)},${(height - 4 - ((y - y0) / (y1 - y0 || 1)) * (height - 8)).toFixed(1)}`;
  const picture = drawn("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  if (found.length) picture.append(drawn("polyline", { class: "curve run-0", points: found.map(at).join(" ") }));
  return picture;
}

// ---- tiers

function showTiers() {
  const with_ = runs.filter((run) => run.tiers.length);
  byId("tiers-section").hidden = with_.length === 0;
  byId("tiers").replaceChildren(...with_.map((run) => {
    const rows = run.tiers.map((tier) => element("tr", { class: tier.problem ? "damaged" : "" },
      element("th", { scope: "row" }, tier.label), element("td", { class: "key" }, tier.path),
      number(tier.problem ? "–" : tier.n_steps), number(tier.newest ?? "–"),
      element("td", {}, tier.problem || (tier.behind_s === null ? "no step yet" : tier.behind_s > 0 ? `${seconds(tier.behind_s)} behind` : "newest"))));
    return table(runs.length > 1 ? `Tiers of run ${run.letter}` : "Tiers", ["tier", "path", "steps", "newest", ""], ["steps", "newest"], rows);
  }));
}

// ---- the whole

function show() {
  const there = runs.filter((run) => run.kind !== "waiting");
  byId("waiting").hidden = there.length > 0 || runs.some((run) => run.kind === undefined);
  byId("waiting-for").textContent = runs.filter((run) => run.kind === "waiting").map((run) => run.path).join(", ");
  byId("pair").hidden = there.length === 0;
  // One checkpoint alone has no course, and nothing to be compared with.
  const isOne = runs.length === 1 && runs[0].kind !== "root" && runs[0].nSteps < 2;
  byId("recorder").hidden = byId("axis").hidden = there.length === 0 || isOne;
  byId("comparison").hidden = isOne;
  byId("runs").replaceChildren(...runs.map((run) => element("p", { class: "path" },
    ...(runs.length > 1 ? [drawn("svg", { class: "swatch", viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" }, drawn("line", { class: `curve run-${run.index}`, x1: 0, x2: 18, y1: 5, y2: 5 })), ` ${run.letter} `] : []), run.path)));
  if (there.length === 0) return;
  for (const run of runs) {
    const times = [...run.reports.map((report) => report.ended_at - report.seconds), ...[...run.steps.values()].map((step) => step.started_at ?? step.committed_at)].filter((at) => at !== null);
    run.began = times.reduce((a, b) => Math.min(a, b), Infinity);
    if (!Number.isFinite(run.began)) run.began = 0;
    run.reported = new Set(saves(run).map((report) => report.label));
  }
  byId("no-reports").hidden = runs.some((run) => run.reports.length || run.events.length) || runs.every((run) => run.kind !== "root");
  const last = runs.flatMap((run) => [...run.steps.values(), ...run.reports].map((thing) => thing.step)).reduce((a, b) => Math.max(a, b ?? 0), 0);
  const n = runs.reduce((sum, run) => sum + Math.max(run.steps.size, run.reports.length), 0);
  byId("window-label").hidden = n <= LONG && most === Infinity;
  from = last - most + 1;
  const [first, more] = charts();
  strips.show(first, AXES[axis]);
  byId("more-metrics").hidden = more.length === 0;
  byId("more-metrics").querySelector("summary").textContent = counted(more.length, "more metric");
  if (byId("more-metrics").open) moreStrips.show(more, AXES[axis]);
  checkpoints.show();
  showTiers();
  showEvents();
}

async function look(run) {
  const found = await ask("/api/run", { run: run.index, seen: run.version });
  const changed = found.steps.length > 0 || found.gone.length > 0 || found.reports !== null || run.kind !== found.kind || JSON.stringify(run.tiers) !== JSON.stringify(found.tiers);
  Object.assign(run, { path: found.path, tiers: found.tiers, kind: found.kind, version: found.version, nUnread: found.n_unread, nSteps: found.n_steps });
  if (found.is_whole) run.steps.clear();
  for (const name of found.gone) run.steps.delete(name);
  for (const step of found.steps) run.steps.set(step.name, step);
  if (found.steps.length) run.steps = new Map([...run.steps].sort(([, a], [, b]) => (a.step ?? Infinity) - (b.step ?? Infinity)));
  if (found.reports !== null) [run.reports, run.events] = [found.reports, found.events];
  return changed;
}

async function refresh() {
  let wait = POLL_MS;
  if (!document.hidden) {
    try {
      if (!runs.length) {
        const found = await ask("/api/runs");
        for (const index of Array(found.n_runs).keys()) runs.push({ index, letter: LETTERS[index], path: "", version: 0, steps: new Map(), tiers: [], reports: [], events: [] });
      }
      isStale = (await Promise.all(runs.map(look))).some(Boolean) || isStale;
      const unread = runs.reduce((sum, run) => sum + run.nUnread, 0);
      if (unread) wait = 30;
      byId("live").textContent = unread ? `reading, ${counted(unread, "step")} to go` : "live";
      // While a long run is read, most of the time is for reading it.
      if (isStale && (!unread || Date.now() - shownAt > POLL_MS)) {
        show();
        [isStale, shownAt] = [false, Date.now()];
      }
      if (checkpoints.chosen === null || !checkpoints.chosen.run.steps.has(checkpoints.chosen.name)) {
        const run = runs.find((one) => finished(one).length);
        if (run) await checkpoints.choose(run, finished(run).at(-1).name);
      }
    } catch (error) {
      byId("live").textContent = `not live: ${error.message}`;
    }
  }
  setTimeout(refresh, wait);
}

byId("axis").addEventListener("change", () => {
  axis = document.querySelector("[name=axis]:checked").value;
  most = Number(byId("window").value) || Infinity;
  strips.cursor = null;
  show();
});
byId("more-metrics").addEventListener("toggle", () => show());
document.addEventListener("visibilitychange", () => { if (!document.hidden && runs.length) show(); });
let resizing = null;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { strips.redraw(); moreStrips.redraw(); checkpoints.redraw(); }, 100);
});
refresh();
