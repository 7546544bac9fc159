// Contributions: the work of every node, from the leases; it adds up to the samples of the run.

import { h, meter, nodeLink, table } from "./dom.js";
import { bytes, number, percent, seconds, whole } from "./format.js";

const GIVEN_COLUMNS = [
  { name: "Node", text: true }, { name: "Share" }, { name: "Work (samples)" }, { name: "Batches" }, { name: "Time in clusters" },
  { name: "Computing" }, { name: "Sent" }, { name: "Received" },
];

export function contributionsPage(store) {
  const body = h("div", {});
  const element = h(
    "div",
    { class: "page" },
    h("h1", {}, "Contributions"),
    h("p", { class: "lead" }, "A batch is trained by all stages of a cluster. The work of a node is the samples it trained times its stage's share of the model's compute, so that the work of all nodes is the samples of the run."),
    h("section", { class: "card wide", "aria-label": "Contributions by node" }, body),
  );
  let shown = "";

  function update() {
    const rows = [...store.all("given")].sort((a, b) => b[1].work - a[1].work || (a[0] < b[0] ? -1 : 1));
    const now = JSON.stringify([rows, store.one("given-total")]);
    if (now === shown || body.contains(document.activeElement)) return;
    shown = now;
    body.replaceChildren(rows.length ? contributions(store, rows) : h("p", { class: "empty" }, "No batch is settled yet."));
  }

  return { element, update, title: "Contributions" };
}

function contributions(store, rows) {
  const run = store.one("given-total") ?? {};
  const sum = (name) => rows.reduce((total, [, given]) => total + given[name], 0);
  const work = sum("work");
  const lines = rows.map(([name, g]) => [
    nodeLink(name), h("span", { class: "share" }, meter(work ? g.work / work : 0, "share of the work"), percent(work ? g.work / work : NaN, 1)), number(g.work, g.work < 100 ? 4 : 9),
    whole(g.batches), seconds(g.seconds), seconds(g.busy_s), bytes(g.sent_bytes), bytes(g.received_bytes),
  ]);
  const total = ["Sum", percent(1), number(work, 9), "", seconds(sum("seconds")), seconds(sum("busy_s")), bytes(sum("sent_bytes")), bytes(sum("received_bytes"))];
  const settled = run.settled ?? 0;
  const missing = Math.max(settled - (run.batches ?? 0), 0);
  const text = `The leases count ${whole(settled)} settled batches; ${whole(run.batches)} of them, with ${whole(run.samples)} samples, are in this table` +
    (missing ? `. ${whole(missing)} were settled while the dashboard did not record.` : ".") +
    (run.repeated ? ` ${whole(run.repeated)} were trained twice and count once.` : "");
  return h("div", {}, table("Contributions by node", GIVEN_COLUMNS, lines, total), h("p", { class: "note" }, text));
}
