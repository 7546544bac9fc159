// The document of the run in this page, kept up to date by server-sent events over fetch, which can send the token.

const SILENT_MS = 25000;
const RECENT_S = 10;

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.kinds = new Map();
    this.steps = [];
    this.evaluations = [];
    this.recent = new Map(); // samples of busy and idle seconds by stage
    this.hasData = false;
  }

  // Applies a message; returns the keys that changed.
  apply(message, now_s = Date.now() / 1000) {
    if (message.reset) this.clear();
    this.hasData = true;
    const changed = [];
    for (const [key, value] of Object.entries(message.set ?? {})) {
      const [kind, name] = split(key);
      if (!this.kinds.has(kind)) this.kinds.set(kind, new Map());
      this.kinds.get(kind).set(name, value);
      if (kind === "stage") this.sample(name, value, now_s);
      changed.push(key);
    }
    for (const key of message.drop ?? []) {
      const [kind, name] = split(key);
      this.kinds.get(kind)?.delete(name);
      if (kind === "stage") this.recent.delete(name);
      changed.push(key);
    }
    for (const name of ["steps", "evaluations"]) {
      if (message[name]) {
        this[name].length = Math.min(this[name].length, message[name].from);
        for (const point of message[name].points) this[name].push(point);
        changed.push(name);
      }
    }
    return changed;
  }

  get run() {
    return this.one("run");
  }

  one(kind) {
    return this.kinds.get(kind)?.get("") ?? null;
  }

  all(kind) {
    return this.kinds.get(kind) ?? new Map();
  }

  get(kind, name) {
    return this.kinds.get(kind)?.get(name) ?? null;
  }

  events() {
    return [...this.all("event").values()].sort((a, b) => b.number - a.number);
  }

  sample(name, metrics, now_s) {
    const list = this.recent.get(name) ?? [];
    list.push([now_s, metrics.steady_busy_s, metrics.idle_s]);
    while (list.length > 2 && list[1][0] < now_s - RECENT_S) list.shift();
    this.recent.set(name, list);
  }

  // The share of its time that a stage has computed: lately, or over the whole run.
  busyShare(name) {
    const list = this.recent.get(name);
    const metrics = this.get("stage", name);
    if (!metrics) return NaN;
    if (list && list.length > 1) {
      const busy = list.at(-1)[1] - list[0][1];
      const idle = list.at(-1)[2] - list[0][2];
      if (busy + idle > 0) return busy / (busy + idle);
    }
    const all = metrics.steady_busy_s + metrics.idle_s;
    return all > 0 ? metrics.steady_busy_s / all : NaN;
  }

  // Samples per second of all clusters that train, as measured and as planned.
  rates() {
    let real = 0;
    let planned = 0;
    for (const cluster of this.all("cluster").values()) {
      if (cluster.phase === "training") {
        real += cluster.samples_per_s ?? 0;
        planned += cluster.planned;
      }
    }
    return { real, planned };
  }
}

function split(key) {
  const at = key.indexOf("/");
  return at < 0 ? [key, ""] : [key.slice(0, at), key.slice(at + 1)];
}

// Reads the stream for ever. `onState` gets live, lost, ended or denied, and a sentence.
export async function follow(store, token, onChange, onState) {
  let wait_ms = 500;
  for (;;) {
    try {
      const outcome = await read(store, token, onChange, () => {
        wait_ms = 500;
        onState("live", "live");
      });
      if (outcome === 401 || outcome === 403) {
        onState("denied", "This link is not valid (any more). Run `ravnest dashboard` for a new one.");
        return;
      }
    } catch {
      // the connection failed: try again below
    }
    const isOver = Boolean(store.run?.end_reason); // it may be resumed
    if (isOver) onState("ended", "the run has ended");
    else onState("lost", "no connection, trying again");
    await new Promise((resume) => setTimeout(resume, wait_ms));
    wait_ms = Math.min(wait_ms * 1.6, isOver ? 30000 : 5000);
  }
}

async function read(store, token, onChange, onOpen) {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENT_MS);
  try {
    const headers = { Authorization: `Bearer ${token}` };
    const response = await fetch("v1/stream", { headers, signal: stop.signal, cache: "no-store" });
    if (!response.ok) return response.status;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return 200;
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENT_MS);
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const message = JSON.parse(part.slice(6));
        const changed = store.apply(message);
        if (message.reset) onOpen();
        onChange(changed, Boolean(message.reset));
      }
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

export async function load(path, token) {
  const response = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `HTTP ${response.status}`);
  return body;
}
