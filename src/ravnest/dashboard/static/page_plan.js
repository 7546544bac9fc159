// Plan: which node computes what and why, simulated against real; which nodes are left out and why; the best upgrade.

import { card, h, keyed, nodeLink, s, table } from "./dom.js";
import { bytes, count, number, percent, seconds, whole } from "./format.js";

const MAX_PLANS_DRAWN = 12; // clusters

const PLAN_COLUMNS = [
  { name: "Node", text: true }, { name: "Stage" }, { name: "Operations" }, { name: "Share of compute" }, { name: "Parameters" },
  { name: "Memory, planned" }, { name: "Memory, peak" }, { name: "ms a microbatch, planned" }, { name: "ms a microbatch, real" },
  { name: "Sends" }, { name: "In flight" }, { name: "Delay" },
];

export function planPage(store) {
  const head = h("div", { class: "stack-cards" });
  const clusters = h("div", { class: "stack-cards" });
  const rest = h("div", { class: "stack-cards" });
  const element = h("div", { class: "page" }, h("h1", {}, "Plan"), head, clusters, rest);
  let shown = "";

  function update(changed, isAll) {
    if (!isAll && !changed.some((key) => /^(run|plan\/|cluster\/|stage\/)/.test(key))) return;
    if (element.contains(document.activeElement)) return; // a focused table is not replaced
    const plans = [...store.all("plan")].sort((a, b) => (a[0] < b[0] ? -1 : 1));
    const drawn = plans.slice(0, MAX_PLANS_DRAWN);
    keyed(clusters, drawn, ([id]) => id, ([id, plan]) => stateOf(store, id, plan), ([id, plan]) => clusterPlan(store, id, plan));
    const { plan_reason: reason, upgrade, left_out: nodes } = store.run ?? {};
    const now = JSON.stringify([reason, upgrade, nodes, plans.length, plans.length ? "" : waitingFor(store)]);
    if (now === shown) return;
    shown = now;
    head.replaceChildren(...(reason ? [h("p", { class: "lead" }, h("bdi", {}, reason))] : []), ...(upgrade ? [bestUpgrade(upgrade)] : []));
    const more = `The first ${MAX_PLANS_DRAWN} of ${count(plans.length, "cluster")}; the stages of the others are on the pages of their nodes.`;
    rest.replaceChildren(...(plans.length > MAX_PLANS_DRAWN ? [h("p", { class: "note" }, more)] : []), plans.length ? leftOut(nodes ?? []) : noPlan(store));
  }

  return { element, update, title: "Plan" };
}

function stateOf(store, id, plan) {
  const cluster = store.get("cluster", id);
  const stages = plan.members.map((_, i) => store.get("stage", `${id}/${i}`)).map((m) => m && [m.microbatches, m.peak_memory_bytes]);
  return JSON.stringify([plan.members, Boolean(plan.content.simulation), cluster?.samples_per_s, stages]);
}

function clusterPlan(store, id, plan) {
  const cluster = store.get("cluster", id);
  const { content, shares, members } = plan;
  const rows = content.stages.map((stage, i) => {
    const real = store.get("stage", `${id}/${i}`);
    const ms = real?.microbatches ? (real.busy_s / real.microbatches) * 1000 : NaN;
    return [
      nodeLink(members[i]), whole(i), `${stage.first_op}–${stage.first_op + stage.num_ops - 1}`, percent(shares[i], 1),
      bytes(stage.parameter_bytes), bytes(stage.memory_bytes), bytes(real?.peak_memory_bytes), number(stage.seconds * 1000, 3), number(ms, 3),
      bytes(stage.sends_bytes), whole(stage.depth), whole(stage.delay),
    ];
  });
  const rate = cluster?.samples_per_s ? `${number(cluster.samples_per_s, 3)} samples/s, ${number(content.samples_per_s, 3)} planned` : `${number(content.samples_per_s, 3)} samples/s planned`;
  const text = `${rate}; ${whole(content.accumulate)} microbatches a step, at most ${whole(content.max_microbatch)} samples each.`;
  return h(
    "section",
    { class: "card wide", "aria-label": `Plan of cluster ${id}` },
    h("h2", {}, `Cluster ${id}`),
    h("p", { class: "note" }, text),
    content.reason ? h("p", {}, h("bdi", {}, content.reason)) : null,
    table(`Stages of cluster ${id}`, PLAN_COLUMNS, rows),
    content.simulation ? timeline(store, id, plan) : null,
  );
}

function bestUpgrade(upgrade) {
  const gain = `${number(upgrade.samples_per_s, 3)} samples/s in all, ${percent(upgrade.gain)} more than planned now.`;
  return card("The upgrade that would help most", h("p", {}, nodeLink(upgrade.name), ": ", upgrade.change), h("p", {}, gain), h("p", { class: "note" }, h("bdi", {}, upgrade.reason)));
}

// One optimizer step of each stage on one time axis: every action as simulated, and the mean of the real steps.
function timeline(store, id, plan) {
  const { simulation, accumulate } = plan.content;
  const real = plan.members.map((_, i) => realStep(store.get("stage", `${id}/${i}`), accumulate));
  const length = Math.max(simulation.step_s, ...real.map((step) => (step ? step.compute + step.update + step.wait : 0)));
  const bar = (label, boxes) =>
    s("svg", { class: "stack", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, boxes);
  const box = (kind, start, end) => s("rect", { class: kind, x: (1000 * start) / length, width: Math.max((1000 * (end - start)) / length, 0.5), height: 10 });
  const rows = plan.members.flatMap((name, i) => {
    const idle = simulation.step_s - simulation.busy_s[i];
    const spans = simulation.spans.filter(([stage]) => stage === i);
    const planned = [box("wait", 0, simulation.step_s), ...spans.map(([, kind, start, end]) => box(kind, start, end))];
    const step = real[i];
    const parts = step ? [box("compute", 0, step.compute), box("update", step.compute, step.compute + step.update), box("wait", step.compute + step.update, step.compute + step.update + step.wait)] : [];
    return [
      h("div", { class: "row" }, h("span", { class: "name" }, nodeLink(name), h("small", {}, "simulated")), bar(`simulated: busy ${seconds(simulation.busy_s[i])}, waiting ${seconds(idle)}`, planned), h("span", { class: "share" }, seconds(simulation.step_s))),
      h("div", { class: "row real" }, h("span", { class: "name" }, h("small", {}, "real")), step ? bar(`real: computing ${seconds(step.compute)}, updating ${seconds(step.update)}, waiting ${seconds(step.wait)}`, parts) : h("span", { class: "note" }, "no step yet"), h("span", { class: "share" }, step ? seconds(step.compute + step.update + step.wait) : "")),
    ];
  });
  const kinds = [["forward", "forward"], ["backward", "backward"], ["compute", "computing (forward and backward)"], ["update", "updating weights"], ["wait", "waiting"]];
  return h(
    "div",
    { class: "bars timeline" },
    h("h3", {}, "One optimizer step, simulated and real"),
    h("p", { class: "note" }, "The simulation uses the planned times and the schedule of the workers; below it, the mean of the real steps since the cluster began. Both on one time axis."),
    h("ul", { class: "legend" }, kinds.map(([kind, text]) => h("li", {}, h("span", { class: `swatch block ${kind}`, "aria-hidden": "true" }), text))),
    rows,
  );
}

function realStep(metrics, accumulate) {
  const steps = metrics ? metrics.microbatches / accumulate : 0;
  if (steps < 2) return null;
  return { compute: Math.max(metrics.busy_s - metrics.step_s, 0) / steps, update: metrics.step_s / steps, wait: metrics.idle_s / (steps - 1) };
}

function noPlan(store) {
  return h("p", { class: "lead" }, `No plan: ${waitingFor(store)}.`);
}

export function waitingFor(store) {
  return store.run?.end_reason || store.run?.waiting || "the coordinator waits until enough nodes are free";
}

function leftOut(nodes) {
  if (!nodes.length) return h("p", { class: "note" }, "The plan left no node out.");
  const rows = nodes.map((node) => [nodeLink(node.name), node.is_spare ? "spare" : "left out", node.reason]);
  return card("Nodes without a stage", table("Nodes without a stage", [{ name: "Node", text: true }, { name: "Role", text: true }, { name: "Why", text: true }], rows));
}
