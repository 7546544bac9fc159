// Fleet: clusters as rows of stages, links, rings between clusters, and the nodes outside of clusters.

import { h, keyed, meter, nodeLink, s } from "./dom.js";
import { waitingFor } from "./page_plan.js";
import { bytes, count, number, percent, seconds } from "./format.js";

const MAX_DRAWN = 120; // segments of rings
const MANY = 20; // clusters
const MOVING_MS = 1500; // a round is often shorter than the time between two updates
const UNLIMITED = 2 ** 45; // memory of a local node without a limit

export function fleetPage(store) {
  const clusters = h("div", { class: "clusters" });
  const overlay = s("svg", { class: "rings", "aria-hidden": "true" });
  const picture = h("div", { class: "picture" }, clusters, overlay);
  const rings = h("p", { class: "note" });
  const others = h("ul", { class: "others" });
  const rest = h("section", { class: "card wide", "aria-label": "Nodes outside of clusters" }, h("h2", {}, "Nodes outside of clusters"), others);
  const head = h("p", { class: "note" });
  const element = h("div", { class: "page fleet" }, h("h1", {}, "Fleet"), head, picture, rings, rest);
  let lastRounds = null;
  let movedUntil = 0;
  new ResizeObserver(() => drawRings(store, picture, overlay)).observe(picture);

  function update(changed, isAll) {
    const live = [...store.all("cluster").values()].sort((a, b) => (a.id < b.id ? -1 : 1));
    const nodes = [...store.all("node").values()];
    const inside = new Set(live.flatMap((cluster) => cluster.members));
    head.textContent = `${count(nodes.length, "node")}, ${count(live.length, "cluster")}. Each row is one copy of the model; data flows from stage to stage.`;
    if (!live.length) head.textContent = `${count(nodes.length, "node")}, no cluster: ${waitingFor(store)}.`;
    keyed(clusters, live, (c) => c.id, (c) => JSON.stringify([c, c.members.map((name, i) => memberState(store, c, name, i))]), (c, known) => clusterRow(store, c, known || isAll));
    const outside = nodes.filter((node) => !inside.has(node.name)).sort((a, b) => rank(a) - rank(b) || (a.name < b.name ? -1 : 1));
    rest.hidden = !outside.length;
    keyed(others, outside, (n) => n.name, (n) => JSON.stringify([n.state, n.reason, n.activity]), (n) => otherNode(n, isAll));
    clusters.classList.toggle("many", live.length > MANY);
    const ring = store.one("rings");
    rings.textContent = ring && ring.clusters.every((id) => store.get("cluster", id))
      ? `${count(ring.rings.length, "ring")} average the clusters ${ring.clusters.join(", ")}: ` +
        (ring.round === null ? `${count(store.run?.rounds ?? 0, "round")} done.` : `round ${ring.round} is running.`)
      : "";
    const rounds = store.run?.rounds ?? 0;
    if (ring?.round != null || (rounds !== lastRounds && lastRounds !== null)) movedUntil = Date.now() + MOVING_MS;
    lastRounds = rounds;
    overlay.classList.toggle("running", Date.now() < movedUntil);
    requestAnimationFrame(() => drawRings(store, picture, overlay));
  }

  return { element, update, title: "Fleet" };
}

function rank(node) {
  return { gone: 2, kicked: 3, enrolled: 1 }[node.state] ?? 0;
}

function memberState(store, cluster, name, stage) {
  const node = store.get("node", name);
  const metrics = store.get("stage", `${cluster.id}/${stage}`);
  const busy = store.busyShare(`${cluster.id}/${stage}`);
  return [node?.state, node?.links, metrics?.memory_bytes, Number.isFinite(busy) ? Math.round(busy * 50) : null];
}

function clusterRow(store, cluster, known) {
  const stages = cluster.members.map((name, i) => stageCard(store, cluster, name, i));
  const rate = cluster.samples_per_s && cluster.phase === "training" ? [`${number(cluster.samples_per_s, 3)} samples/s`, `${number(cluster.planned, 3)} planned`] : [`${number(cluster.planned, 3)} samples/s planned`];
  return h(
    "section",
    { class: `cluster ${cluster.phase}${known ? "" : " new"}`, "aria-label": `Cluster ${cluster.id}` },
    h(
      "div",
      { class: "about" },
      h("h2", {}, `Cluster ${cluster.id}`),
      h("p", {}, h("span", { class: `state ${cluster.phase}` }, cluster.phase)),
      rate.map((text) => h("p", {}, text)),
      cluster.loss === null ? null : h("p", {}, `loss ${number(cluster.loss, 4)}`),
      cluster.averaging ? h("p", {}, `round ${cluster.averaging.round}: ${seconds(cluster.averaging.seconds)}, ${bytes(cluster.averaging.sent_bytes)}`) : null,
      cluster.phase === "forming" ? h("p", { class: "note" }, `${cluster.ready.filter(Boolean).length} of ${cluster.members.length} ready`) : null,
    ),
    h("ol", { class: "stages" }, stages),
  );
}

function stageCard(store, cluster, name, stage) {
  const node = store.get("node", name);
  const metrics = store.get("stage", `${cluster.id}/${stage}`);
  const busy = store.busyShare(`${cluster.id}/${stage}`);
  const lent = node?.profile?.memory_bytes;
  const used = metrics?.memory_bytes;
  const isLimited = lent && lent < UNLIMITED;
  const next = cluster.members[stage + 1];
  const link = next === undefined ? null : (node?.links ?? []).find((one) => one.peer === next);
  const back = next === undefined ? null : (store.get("node", next)?.links ?? []).find((one) => one.peer === name);
  const kind = (link ?? back)?.kind ?? "";
  const state = cluster.phase === "forming" && cluster.ready[stage] ? "ready" : (node?.state ?? "unknown");
  return h(
    "li",
    {},
    h(
      "article",
      { class: `stage ${state}`, "data-node": name },
      h("p", { class: "name" }, nodeLink(name), h("small", {}, `stage ${stage}`)),
      h("p", { class: "label" }, "busy", h("span", {}, Number.isFinite(busy) ? percent(busy) : "–")),
      meter(busy, `busy ${percent(busy)}`),
      h("p", { class: "label" }, "memory", h("span", {}, used === undefined ? "–" : isLimited ? `${bytes(used)} / ${bytes(lent)}` : bytes(used))),
      isLimited ? meter(used / lent, `memory ${percent(used / lent)} used`, used > lent ? "over" : "") : null,
    ),
    next === undefined ? null : h("span", { class: `link ${kind.split(" ")[0]}`, title: (link ?? back)?.reason || null }, h("span", { class: "kind" }, kind), lineOf(node, store.get("node", next), kind), h("span", { "aria-hidden": "true", class: "arrow" })),
  );
}

// Bandwidth and latency of a link over the lines of two PCs, as measured when they joined.
function lineOf(from, to, kind) {
  if (!kind || kind === "unix" || kind === "memory" || !from?.profile || !to?.profile) return null;
  const rate = Math.min(from.profile.up_bytes_per_s, to.profile.down_bytes_per_s);
  const latency = from.profile.latency_s + to.profile.latency_s;
  return h("span", { class: "kind" }, `${bytes(rate)}/s`, latency ? h("br") : null, latency ? seconds(latency) : null);
}

function otherNode(node, isFirst) {
  return h(
    "li",
    { class: `${node.state}${isFirst ? "" : " changed"}` },
    h("span", { class: "name" }, nodeLink(node.name)),
    h("span", { class: `state ${node.state}` }, node.state),
    h("span", { class: "note" }, h("bdi", {}, node.activity || node.reason)),
  );
}

// Curves between the members of each ring, in the gaps between the rows.
function drawRings(store, picture, overlay) {
  const ring = store.one("rings");
  const box = picture.getBoundingClientRect();
  const places = new Map([...picture.querySelectorAll("[data-node]")].map((card) => [card.dataset.node, card.getBoundingClientRect()]));
  const paths = [];
  const isCurrent = ring?.clusters.every((id) => store.get("cluster", id));
  for (const members of isCurrent ? ring.rings : []) {
    const size = members.length;
    for (let i = 0; i < (size === 2 ? 1 : size) && paths.length < MAX_DRAWN; i += 1) {
      const pair = [places.get(members[i]), places.get(members[(i + 1) % size])];
      if (!pair[0] || !pair[1] || size < 2) continue;
      const [a, b] = pair[0].top <= pair[1].top ? pair : [pair[1], pair[0]];
      const [x0, x1] = [a.left + a.width / 2 - box.left, b.left + b.width / 2 - box.left];
      const [y0, y1] = [a.bottom - box.top, b.top - box.top];
      if (y1 <= y0) continue;
      const middle = (y0 + y1) / 2;
      paths.push(s("path", { d: `M${x0} ${y0}C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}` }));
    }
  }
  overlay.replaceChildren(...paths);
}
