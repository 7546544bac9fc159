// Plan: which node computes what and why, planned against real; which nodes are left out and why.

import { card, h, nodeLink, table } from "./dom.js";
import { bytes, number, percent, whole } from "./format.js";

const PLAN_COLUMNS = [
  { name: "Node", text: true }, { name: "Stage" }, { name: "Operations" }, { name: "Share of compute" }, { name: "Parameters" },
  { name: "Memory, planned" }, { name: "Memory, peak" }, { name: "ms a microbatch, planned" }, { name: "ms a microbatch, real" },
  { name: "Sends" }, { name: "In flight" }, { name: "Delay" },
];

export function planPage(store) {
  const body = h("div", { class: "stack-cards" });
  const element = h("div", { class: "page" }, h("h1", {}, "Plan"), body);
  let shown = "";

  function update(changed, isAll) {
    if (!isAll && !changed.some((key) => /^(run|plan\/|cluster\/|stage\/)/.test(key))) return;
    const now = JSON.stringify([[...store.all("plan")], [...store.all("cluster")], [...store.all("stage")], store.run?.left_out]);
    if (now === shown || body.contains(document.activeElement)) return; // a focused table is not replaced
    shown = now;
    const reason = store.run?.plan_reason;
    body.replaceChildren(
      ...(reason ? [h("p", { class: "lead" }, reason)] : []),
      ...[...store.all("plan")].sort().map(([id, plan]) => clusterPlan(store, id, plan)),
      leftOut(store.run?.left_out ?? []),
    );
  }

  return { element, update, title: "Plan" };
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
  );
}

function leftOut(nodes) {
  if (!nodes.length) return h("p", { class: "note" }, "The plan left no node out.");
  const rows = nodes.map((node) => [nodeLink(node.name), node.is_spare ? "spare" : "left out", node.reason]);
  return card("Nodes without a stage", table("Nodes without a stage", [{ name: "Node", text: true }, { name: "Role", text: true }, { name: "Why", text: true }], rows));
}
