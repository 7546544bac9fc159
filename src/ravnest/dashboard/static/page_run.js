// Run: curves, speed, where the time goes, staleness, progress, events.

import { Chart, smoothed, windowed } from "./chart.js";
import { card, h, keyed, meter, nodeLink, s } from "./dom.js";
import { bytes, clock, count, number, percent, seconds, whole } from "./format.js";

const AXES = { step: ["step", 0, whole], samples: ["samples", 2, whole], time: ["time", 1, seconds] };
const NUM_EVENTS = 12;
const NUM_STAGES = 40;
const NOMINAL_LINE = 5e9; // bytes/s: nodes of one machine have no line between them
const MINOR = ["LinkEstablished", "NodeReady", "NodeEnrolled"]; // on the pages of their nodes

export function runPage(store, { announce }) {
  const view = { axis: "step", log: false, weight: 0.8, label: 0 };
  const loss = new Chart("Loss", { height: 290, onAnnounce: announce });
  const rate = new Chart("Samples per second", { height: 200, onAnnounce: announce });
  const tiles = h("dl", { class: "tiles" });
  const time = h("div", {});
  const late = h("div", {});
  const events = h("ol", { class: "events" });
  const redraw = () => drawLoss(store, loss, view);
  const labels = h("select", { "aria-label": "Value", onchange: (e) => { view.label = Number(e.target.value); redraw(); } });
  const element = h(
    "div",
    { class: "page" },
    h("h1", {}, "Run"),
    tiles,
    h("section", { class: "card wide", "aria-label": "Loss" }, controls(view, labels, redraw), loss.element),
    h("section", { class: "card wide", "aria-label": "Speed" }, h("h2", {}, "Speed"), rate.element),
    card("Where the time goes", h("p", { class: "note" }, "Share of each stage's time since it began to train; at the right, the busy share."), time),
    card("Staleness", h("p", { class: "note" }, "Updates between the weights a gradient was computed with and those it is applied to; at the right, the mean."), late),
    h("section", { class: "card wide", "aria-label": "Events" }, h("h2", {}, "Events"), events),
  );

  function update(changed, isAll) {
    const has = (...kinds) => isAll || changed.some((key) => kinds.some((kind) => key === kind || key.startsWith(`${kind}/`)));
    if (has("run", "cluster", "node", "steps", "evaluations")) tiles.replaceChildren(...summary(store));
    if (has("run")) nameLabels(store, labels, view);
    if (has("steps", "evaluations", "run")) redraw();
    if (has("steps", "cluster")) drawRate(store, rate);
    if (has("stage", "cluster")) {
      drawTime(store, time);
      drawStaleness(store, late);
    }
    if (has("event")) keyed(events, mainEvents(store), (row) => row.number, () => "", eventLine);
  }

  return { element, update, title: "Run" };
}

export function eventLine(row) {
  return h("li", { class: row.kind }, h("time", { datetime: new Date(row.at_s * 1000).toISOString() }, clock(row.at_s)), h("span", {}, h("bdi", {}, row.text)));
}

// Of the rounds, only the latest is news.
function mainEvents(store) {
  const rows = store.events().filter((row) => !MINOR.includes(row.kind));
  const round = rows.find((row) => row.kind === "RoundCommitted");
  return rows.filter((row) => row.kind !== "RoundCommitted" || row === round).slice(0, NUM_EVENTS);
}

function controls(view, labels, redraw) {
  const axis = (name, text) =>
    h("label", {}, h("input", { type: "radio", name: "axis", value: name, checked: view.axis === name, onchange: () => { view.axis = name; redraw(); } }), h("span", {}, text));
  return h(
    "div",
    { class: "controls" },
    h("h2", {}, "Loss"),
    labels,
    h("fieldset", { class: "switch" }, h("legend", { class: "hidden" }, "Horizontal axis"), axis("step", "Steps"), axis("samples", "Samples"), axis("time", "Time")),
    h("label", {}, h("input", { type: "checkbox", onchange: (e) => { view.log = e.target.checked; redraw(); } }), "Log scale"),
    h("label", {}, "Smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.weight, oninput: (e) => { view.weight = Number(e.target.value); redraw(); } })),
  );
}

function nameLabels(store, labels, view) {
  const names = store.run?.labels ?? [];
  labels.hidden = names.length < 2;
  if (labels.options.length !== names.length) {
    labels.replaceChildren(...names.map((name, i) => h("option", { value: i, selected: i === view.label }, name)));
  }
}

function drawLoss(store, chart, view) {
  const [xName, column, formatX] = AXES[view.axis];
  const name = store.run?.labels?.[view.label] ?? "loss";
  const points = store.steps.map((point) => [point[column], point[3 + view.label] ?? NaN]);
  const held = store.evaluations.map((point) => [point[column], point[3 + view.label] ?? NaN]);
  chart.set(
    [
      { name: `training ${name}`, kind: "raw", color: "one", points },
      { name: "smoothed", kind: "line", color: "one", points: view.weight ? smoothed(points, view.weight) : [] },
      { name: "held-out", kind: "marks", color: "two", points: held },
    ],
    { xName, log: view.log, formatX, isTime: view.axis === "time", isWhole: view.axis !== "time", formatY: (y) => number(y, 4) },
  );
}

// Samples per second over windows of the run.
export function rateOf(steps) {
  const points = windowed(steps.filter((point) => point[2] > 0), 1);
  return points.slice(1).map((after, i) => [after[1], (after[2] - points[i][2]) / (after[1] - points[i][1])]);
}

function recentRate(steps) {
  const [first, last] = [steps.at(-60) ?? steps[0], steps.at(-1)];
  return last && last[1] > first[1] && last[2] > first[2] ? (last[2] - first[2]) / (last[1] - first[1]) : undefined;
}

function drawRate(store, chart) {
  const rates = rateOf(store.steps);
  const { planned } = store.rates();
  const limit = planned && rates.length ? [[rates[0][0], planned], [rates.at(-1)[0], planned]] : [];
  chart.set(
    [
      { name: "measured", kind: "line", color: "one", points: rates },
      { name: "planned", kind: "limit", color: "two", points: limit },
    ],
    { xName: "time", formatX: seconds, isTime: true, formatY: (y) => number(y, 3), fromZero: true },
  );
}

function summary(store) {
  const run = store.run;
  if (!run) return [tile("Run", "waiting for the first values")];
  const last = store.steps.at(-1);
  const held = store.evaluations.at(-1);
  const { real, planned } = store.rates();
  const all = [...store.all("node").values()];
  const nodes = run.end_reason ? all : all.filter((node) => !["gone", "kicked", "enrolled"].includes(node.state));
  const training = nodes.filter((node) => node.state === "training").length;
  const recent = recentRate(store.steps);
  const stopped = run.end_reason || !planned;
  const whole_run = last?.[1] > 0 ? last[2] / last[1] : NaN;
  return [
    tile("Loss", last ? number(last[3], 4) : "–", held ? `held-out ${number(held[3], 4)}` : "no evaluation yet"),
    tile("Steps", run.steps ? `${whole(run.steps_done)} of ${whole(run.steps)}` : whole(run.steps_done), timeLeft(store), run.steps ? meter(run.steps_done / run.steps, `${percent(run.steps_done / run.steps)} of the steps`) : null),
    tile("Samples per second", run.end_reason ? number(whole_run, 3) : stopped ? "–" : number(recent ?? real, 3), run.end_reason ? "mean of the run" : planned ? `${number(planned, 3)} planned` : "no cluster trains", stopped ? null : meter((recent ?? real) / planned, `${percent((recent ?? real) / planned)} of the plan`)),
    run.end_reason ? tile("Nodes", whole(nodes.length), "took part") : tile("Nodes", `${whole(training)} of ${whole(nodes.length)}`, `train in ${count([...store.all("cluster").values()].filter((c) => c.phase === "training").length, "cluster")}`),
  ];
}

function timeLeft(store) {
  const run = store.run;
  if (run.end_reason) return "ended";
  if (!store.rates().planned) return run.waiting || "waiting for a cluster";
  const points = store.steps.slice(-200);
  if (!run.steps || points.length < 2) return run.steps ? "measuring" : "no limit";
  const [first, last] = [points[0], points.at(-1)];
  const perStep = (last[1] - first[1]) / Math.max(last[0] - first[0], 1);
  return `${seconds(Math.max(run.steps - run.steps_done, 0) * perStep)} left`;
}

function tile(name, value, note = "", extra = null) {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("span", { class: "value" }, value), h("span", { class: "note" }, note), extra));
}

function stages(store) {
  const rows = [];
  for (const cluster of store.all("cluster").values()) {
    cluster.members.forEach((name, i) => {
      const metrics = store.get("stage", `${cluster.id}/${i}`);
      if (metrics) rows.push({ cluster, stage: i, name, metrics });
    });
  }
  return rows;
}

function drawTime(store, place) {
  const rows = stages(store).map((row) => {
    const { busy_s, step_s, idle_s } = row.metrics;
    const parts = [["compute", Math.max(busy_s - step_s, 0)], ["update", step_s], ["wait", idle_s]];
    return { ...row, parts, value: percent(busy_s / (busy_s + idle_s || 1)), note: lineUse(store, row) };
  });
  place.replaceChildren(bars(store, rows, [["compute", "computing"], ["update", "updating weights"], ["wait", "waiting"]]), averagingTime(store));
}

// What a stage sends and receives, beside its work; of the line of its PC, where that was measured.
function lineUse(store, { name, metrics }) {
  const time = metrics.busy_s + metrics.idle_s;
  if (!time) return "";
  const profile = store.get("node", name)?.profile;
  const share = (rate, limit) => (limit && limit < NOMINAL_LINE ? ` (${percent(rate / limit)} of its line)` : "");
  const [up, down] = [metrics.sent_bytes / time, metrics.received_bytes / time];
  return `sends ${bytes(up)}/s${share(up, profile?.up_bytes_per_s)}, receives ${bytes(down)}/s${share(down, profile?.down_bytes_per_s)}`;
}

function averagingTime(store) {
  const { rounds, round_s } = store.run ?? {};
  const trained = store.steps.at(-1)?.[1];
  if (!rounds || !round_s) return h("p", { class: "note after" }, "No averaging yet.");
  return h("p", { class: "note after" }, `Averaging, beside training: ${count(rounds, "round")} of ${seconds(round_s / rounds)} each, ${percent(round_s / trained)} of the time.`);
}

function drawStaleness(store, place) {
  const rows = stages(store).map((row) => {
    const parts = Object.entries(row.metrics.staleness).map(([steps, times]) => [`late-${Math.min(Number(steps), 4)}`, times]);
    const total = parts.reduce((sum, [, times]) => sum + times, 0);
    const late = Object.entries(row.metrics.staleness).reduce((sum, [steps, times]) => sum + steps * times, 0);
    return { ...row, parts, value: total ? number(late / total, 2) : "–" };
  });
  const worst = Math.max(0, ...stages(store).flatMap((row) => Object.keys(row.metrics.staleness).map(Number)));
  const names = Array.from({ length: Math.min(worst, 4) + 1 }, (_, i) => [`late-${i}`, i === 4 ? "4 or more" : String(i)]);
  place.replaceChildren(bars(store, rows, names));
}

// A stacked bar per stage, with a legend; the text of each row says the shares.
function bars(store, rows, kinds) {
  if (!rows.length) return h("p", { class: "empty" }, "No steps yet");
  const several = store.all("cluster").size > 1;
  const names = new Map(kinds);
  return h(
    "div",
    { class: "bars" },
    h("ul", { class: "legend" }, kinds.map(([kind, text]) => h("li", {}, h("span", { class: `swatch block ${kind}`, "aria-hidden": "true" }), text))),
    rows.slice(0, NUM_STAGES).map(({ cluster, stage, name, parts, value, note }) => {
      const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
      let x = 0;
      const boxes = parts.map(([kind, value]) => {
        const width = (100 * value) / total;
        x += width;
        return s("rect", { class: kind, x: x - width, width, height: 10 });
      });
      const text = parts.map(([kind, value]) => `${names.get(kind) ?? kind} ${percent(value / total)}`).join(", ");
      return h(
        "div",
        { class: "row" },
        h("span", { class: "name" }, nodeLink(name), h("small", {}, several ? `${cluster.id} · ${stage}` : `stage ${stage}`)),
        s("svg", { class: "stack", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": text }, boxes),
        h("span", { class: "share" }, value),
        note ? h("small", { class: "beside" }, note) : null,
      );
    }),
    rows.length > NUM_STAGES ? h("p", { class: "note" }, `The first ${NUM_STAGES} of ${count(rows.length, "stage")}; the others are on the pages of their nodes.`) : null,
  );
}
