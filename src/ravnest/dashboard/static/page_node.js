// Node: one PC: what it computes, its memory, processor and traffic over the run, its contribution and events.

import { Chart, windowed } from "./chart.js";
import { card, h, keyed, nodeLink, setText, table } from "./dom.js";
import { bytes, clock, count, number, percent, seconds, whole } from "./format.js";
import { eventLine } from "./page_run.js";

export function nodePage(store, { announce, load }, name) {
  const memory = new Chart("Memory", { height: 180, onAnnounce: announce });
  const busy = new Chart("Busy share", { height: 180, onAnnounce: announce });
  const traffic = new Chart("Traffic", { height: 180, onAnnounce: announce });
  const state = h("p", { class: "lead" });
  const facts = h("dl", { class: "facts" });
  const work = h("dl", { class: "facts" });
  const links = h("div", {});
  const events = h("ol", { class: "events" });
  const empty = h("p", { class: "empty" }, "No events of this node");
  const problem = h("p", { class: "empty" });
  let points = [];
  const element = h(
    "div",
    { class: "page" },
    h("h1", {}, h("bdi", {}, name)),
    state,
    card("This PC", facts),
    card("Contribution", work),
    card("Busy share", busy.element),
    card("Memory", memory.element, problem),
    card("Traffic", traffic.element),
    card("Links and replicas", links),
    h("section", { class: "card wide", "aria-label": "Events" }, h("h2", {}, "Events"), empty, events),
  );
  load(`v1/nodes/${encodeURIComponent(name)}`)
    .then((history) => {
      points = history.points.concat(points);
      draw();
    })
    .catch((error) => setText(problem, error.message));

  function draw() {
    const time = (k) => points.map((p) => [p[0], p[k]]);
    const shares = [];
    const sent = [];
    const received = [];
    const ends = windowed(points, 0);
    for (let i = 1; i < ends.length; i += 1) {
      const [a, b] = [ends[i - 1], ends[i]];
      const total = b[2] - a[2] + b[3] - a[3];
      if (b[2] < a[2] || b[0] <= a[0]) continue; // the node began another stage
      if (total > 0) shares.push([b[0], (b[2] - a[2]) / total]);
      sent.push([b[0], (b[5] - a[5]) / (b[0] - a[0])]);
      received.push([b[0], (b[6] - a[6]) / (b[0] - a[0])]);
    }
    const options = { xName: "time", formatX: seconds, isTime: true, fromZero: true };
    memory.set([{ name: "used", kind: "line", color: "one", points: time(4) }], { ...options, formatY: bytes });
    busy.set([{ name: "computing", kind: "line", color: "one", points: shares }], { ...options, formatY: (y) => percent(y) });
    traffic.set(
      [{ name: "sent", kind: "line", color: "one", points: sent }, { name: "received", kind: "line", color: "two", points: received }],
      { ...options, formatY: (y) => `${bytes(y)}/s` },
    );
  }

  function update(changed, isAll) {
    const node = store.get("node", name);
    const given = store.get("given", name);
    const place = placeOf(store, name);
    setText(state, node ? sentence(store, node, place) : "This run has no node of this name.");
    if (place) {
      const key = `stage/${place.cluster.id}/${place.stage}`;
      if (changed.includes(key) && store.steps.length && !isAll) {
        const m = store.get("stage", key.slice(6));
        points.push([store.steps.at(-1)[1], m.microbatches, m.busy_s, m.idle_s, m.memory_bytes, m.sent_bytes, m.received_bytes]);
        if (points.length > 2000) points = points.filter((_, i) => i % 2);
        draw();
      }
    }
    facts.replaceChildren(...list(node ? machine(node, place) : []));
    work.replaceChildren(...list(given ? contribution(store, given) : [["Contribution", "nothing yet"]]));
    if (isAll || changed.includes(`node/${name}`)) links.replaceChildren(linkTable(node));
    const rows = store.events().filter((row) => row.nodes.includes(name) && row.kind !== "LinkEstablished").slice(0, 40);
    empty.hidden = rows.length > 0;
    keyed(events, rows, (row) => row.number, () => "", eventLine);
  }

  draw();
  return { element, update, title: name };
}

function placeOf(store, name) {
  for (const cluster of store.all("cluster").values()) {
    const stage = cluster.members.indexOf(name);
    if (stage >= 0) return { cluster, stage, plan: store.get("plan", cluster.id)?.content.stages?.[stage] };
  }
  return null;
}

function sentence(store, node, place) {
  const silent = node.silent_since_s ? ` Silent since ${clock(node.silent_since_s)}.` : "";
  if (!place) return `${node.state}: ${node.activity || node.reason || "no assignment"}.${silent}`;
  const { cluster, stage, plan } = place;
  const ops = plan ? ` It computes operations ${plan.first_op} to ${plan.first_op + plan.num_ops - 1}, with ${bytes(plan.parameter_bytes)} of parameters.` : "";
  return `${cluster.phase === "training" ? "Trains" : `${cluster.phase}:`} stage ${stage} of ${cluster.members.length} of cluster ${cluster.id}.${ops}${silent}`;
}

function machine(node, place) {
  const p = node.profile;
  const isLocal = p && p.up_bytes_per_s >= 1e10;
  if (!p) return [["State", node.state], ["Reason", node.reason]];
  return [
    ["Memory lent", p.memory_bytes < 2 ** 45 ? bytes(p.memory_bytes) : "no limit"],
    ["Processor", [isLocal ? null : `${number(p.gflops, 3)} GFLOP/s`, p.device_name ? `${p.device} (${p.device_name})` : p.device ?? "cpu", count(p.threads ?? 1, "thread")].filter(Boolean).join(", ")],
    ["Speed at this job", `${number(node.speed_factor, 3)} × measured`],
    ["Line", isLocal ? "on the requester's machine" : `${bytes(p.up_bytes_per_s)}/s up, ${bytes(p.down_bytes_per_s)}/s down, ${seconds(p.latency_s)}`],
    ["Lost so far", count(node.num_losses, "time")],
    ...(place?.plan ? [["Planned memory", bytes(place.plan.memory_bytes)], ["Planned time", `${number(place.plan.seconds * 1000, 3)} ms a microbatch`]] : []),
  ];
}

function contribution(store, given) {
  const total = store.one("given-total")?.samples ?? 0;
  return [
    ["Work", `${number(given.work, 5)} samples of the whole model`],
    ["Share of the run", total ? percent(given.work / total, 1) : "–"],
    ["Trained", `${count(given.batches, "batch", "batches")}, ${whole(given.samples)} samples`],
    ["Time in clusters", seconds(given.seconds)],
    ["Computing", seconds(given.busy_s)],
    ["Sent, received", `${bytes(given.sent_bytes)}, ${bytes(given.received_bytes)}`],
  ];
}

function list(pairs) {
  return pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("bdi", {}, value))));
}

function linkTable(node) {
  const rows = (node?.links ?? []).map((link) => [nodeLink(link.peer), link.kind, [link.reason, link.hint].filter(Boolean).join("; ")]);
  const replicas = (node?.replicas ?? []).map(([cluster, stage, updates]) => `stage ${stage} of ${cluster} after ${whole(updates)} updates`);
  return h(
    "div",
    {},
    rows.length ? table("Links", [{ name: "Peer", text: true }, { name: "Link", text: true }, { name: "Why", text: true }], rows) : h("p", { class: "empty" }, "No links"),
    replicas.length ? h("p", { class: "note" }, `Holds replicas: ${replicas.join(", ")}.`) : null,
  );
}
