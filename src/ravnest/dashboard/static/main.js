// The page: navigation, connection, announcements.

import { h, setText } from "./dom.js";
import { accessPage } from "./page_access.js";
import { contributionsPage } from "./page_contributions.js";
import { fleetPage } from "./page_fleet.js";
import { nodePage } from "./page_node.js";
import { planPage } from "./page_plan.js";
import { runPage } from "./page_run.js";
import { Store, follow, load } from "./store.js";

const PAGES = { run: ["Run", runPage], fleet: ["Fleet", fleetPage], plan: ["Plan", planPage], contributions: ["Contributions", contributionsPage], access: ["Access", accessPage] };
const SPOKEN = ["NodeLost", "NodeConnected", "ClusterEnded", "PlanCreated", "NodeQuarantined", "RunEnded"];
const TOKEN = "ravnest-token";

const store = new Store();
const inline = document.getElementById("data");
const report = inline ? JSON.parse(inline.textContent) : null;
const main = document.getElementById("main");
const live = document.getElementById("live");
const connection = document.getElementById("connection");
let page = null;
let shownPath = null;
let waiting = null;

function takeToken() {
  const match = location.hash.match(/^#token=([\w-]+)(\/.+)?$/);
  if (match) {
    sessionStorage.setItem(TOKEN, match[1]);
    history.replaceState(null, "", `#${match[2] ?? "/run"}`);
  }
  return sessionStorage.getItem(TOKEN) ?? "";
}

function announce(text) {
  setText(live, text);
}

function loadData(path) {
  if (!report) return load(path, takeToken());
  const name = decodeURIComponent(path.replace("v1/nodes/", ""));
  return Promise.resolve(report.nodes[name] ?? { points: [] });
}

function show() {
  const path = location.hash.replace(/^#\/?/, "") || "run";
  if (path === "main") return;
  if (path === shownPath) return;
  const [name, ...rest] = path.split("/");
  const make = PAGES[name]?.[1] ?? runPage;
  const tools = { announce, load: loadData };
  page = name === "node" ? nodePage(store, tools, decodeURIComponent(rest.join("/"))) : make(store, tools);
  main.replaceChildren(page.element);
  page.update([], true);
  if (shownPath !== null) main.focus({ preventScroll: true });
  shownPath = path;
  window.scrollTo(0, 0);
  nameRun();
  for (const link of document.querySelectorAll("#pages a")) {
    const isHere = link.getAttribute("href") === `#/${PAGES[name] ? name : name === "node" ? "fleet" : "run"}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function nameRun() {
  const name = store.run?.name ?? "";
  setText(document.getElementById("run-name"), name);
  document.title = [page?.title, name, "Ravnest"].filter(Boolean).join(" · ");
}

// Draws at most once per frame, and not at all while the page is hidden.
function onChange(changed, isAll) {
  if (!isAll) speak(changed);
  if (waiting) {
    waiting.isAll ||= isAll || waiting.keys.length > 10000; // a hidden page draws no frames
    waiting.keys = waiting.isAll ? [] : waiting.keys.concat(changed);
    return;
  }
  waiting = { keys: [...changed], isAll };
  requestAnimationFrame(() => {
    const { keys, isAll: all } = waiting;
    waiting = null;
    nameRun();
    page.update(keys, all);
  });
}

function speak(changed) {
  const rows = changed.filter((key) => key.startsWith("event/")).map((key) => store.get("event", key.slice(6)));
  const spoken = rows.filter((row) => row && SPOKEN.includes(row.kind)).slice(-3);
  if (spoken.length) announce(spoken.map((row) => row.text).join(". "));
}

function onState(state, text) {
  const before = connection.dataset.state;
  if (state === "live" && store.run?.end_reason) [state, text] = ["ended", "ended"];
  connection.dataset.state = state;
  if (state === "live" && before === "lost") announce("connected again");
  setText(connection, text);
  if (state === "lost" || state === "denied") announce(text);
  if (state === "denied") main.replaceChildren(h("div", { class: "page" }, h("h1", {}, "No access"), h("p", { class: "lead" }, text)));
}

function start() {
  const names = Object.keys(PAGES).filter((name) => !(report && name === "access"));
  document.getElementById("pages").append(...names.map((name) => h("li", {}, h("a", { href: `#/${name}` }, PAGES[name][0]))));
  const token = report ? "" : takeToken();
  addEventListener("hashchange", () => {
    if (location.hash.startsWith("#token=")) location.reload();
    else show();
  });
  if (report) {
    store.apply(report.document);
    connection.dataset.state = "ended";
    setText(connection, report.state);
  }
  show();
  if (!report) follow(store, token, onChange, onState);
}

start();
