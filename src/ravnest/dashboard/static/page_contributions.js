// Contributions: the work of every node, from the leases; it adds up to the samples of the run.

import { h, meter, nodeLink, table } from "./dom.js";
import { bytes, count, number, percent, seconds, whole } from "./format.js";

const MAX_ROWS = 200; // the others are one row
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
  const sum = (name, of = rows) => of.reduce((total, [, given]) => total + given[name], 0);
  const work = sum("work");
  const share = (part) => h("span", { class: "share" }, meter(work ? part / work : 0, "share of the work"), percent(work ? part / work : NaN, 1));
  const lines = rows.slice(0, MAX_ROWS).map(([name, g]) => [
    nodeLink(name), share(g.work), number(g.work, g.work < 100 ? 4 : 9),
    whole(g.batches), seconds(g.seconds), seconds(g.busy_s), bytes(g.sent_bytes), bytes(g.received_bytes),
  ]);
  const sums = (of) => [seconds(sum("seconds", of)), seconds(sum("busy_s", of)), bytes(sum("sent_bytes", of)), bytes(sum("received_bytes", of))];
  const others = rows.slice(MAX_ROWS);
  if (others.length) lines.push([count(others.length, "other node"), share(sum("work", others)), number(sum("work", others), 9), "", ...sums(others)]);
  const total = ["Sum", percent(1), number(work, 9), "", ...sums(rows)];
  const settled = run.settled ?? 0;
  const missing = Math.max(settled - (run.batches ?? 0), 0);
  const text = `The leases count ${whole(settled)} settled batches; ${whole(run.batches)} of them, with ${whole(run.samples)} samples, are in this table` +
    (missing ? `. ${whole(missing)} were settled while the dashboard did not record.` : ".") +
    (run.repeated ? ` ${whole(run.repeated)} were trained twice and count once.` : "");
  return h("div", {}, table("Contributions by node", GIVEN_COLUMNS, lines, total), h("p", { class: "note" }, text));
}
