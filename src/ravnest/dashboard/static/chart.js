// A line chart in SVG: axes, grid, lines, marks, and a cursor for pointer and keyboard.

import { h, s, setText } from "./dom.js";
import { axisSeconds, number } from "./format.js";

const PAD = { left: 60, right: 12, top: 10, bottom: 34 };
const TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400]; // seconds

// `series` are {name, kind: "raw" | "line" | "marks" | "limit", color, points: [[x, y], ...]}, in the order of drawing.
export class Chart {
  constructor(title, { height = 240, onAnnounce = () => {} } = {}) {
    this.height = height;
    this.onAnnounce = onAnnounce;
    this.title = title;
    this.series = [];
    this.cursor = null;
    this.svg = s("svg", { class: "chart", role: "img", tabindex: 0, height, "aria-label": title });
    this.legend = h("ul", { class: "legend", "aria-label": `${title}: lines` });
    this.reading = h("p", { class: "reading" });
    this.element = h("figure", {}, this.svg, h("figcaption", {}, this.legend, this.reading));
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.svg.addEventListener("pointerleave", () => this.place(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.place(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(series, { xName, log = false, formatX = number, formatY = number, fromZero = false, isTime = false, isWhole = false }) {
    this.series = series;
    this.options = { xName, log, formatX, formatY, fromZero, isTime, isWhole };
    this.draw();
  }

  draw() {
    const width = Math.max(this.element.clientWidth, 240);
    if (!this.options) return;
    const { log, formatX, formatY, xName, fromZero, isTime, isWhole } = this.options;
    const shown = this.series
      .map((one) => ({ ...one, points: one.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && !(log && y <= 0)) }))
      .filter((one) => one.points.length);
    const ranged = shown.flatMap((one) => one.points);
    const parts = [];
    if (ranged.length) {
      const [x0, x1] = spread(extent(ranged, 0));
      const [low, high] = extent(ranged, 1);
      const [y0, y1] = log ? spread([Math.log10(low), Math.log10(high)]) : spread([fromZero ? Math.min(0, low) : low, high]);
      const toX = (x) => PAD.left + ((x - x0) / (x1 - x0)) * (width - PAD.left - PAD.right);
      const toY = (y) =>
        this.height - PAD.bottom - (((log ? Math.log10(y) : y) - y0) / (y1 - y0)) * (this.height - PAD.top - PAD.bottom);
      this.scale = { x0, x1, width, toX, toY };
      for (const tick of log ? logTicks(y0, y1) : ticks(y0, y1, this.height / 55)) {
        const y = toY(tick);
        parts.push(s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }));
        parts.push(s("text", { class: "tick", x: PAD.left - 8, y: y + 4, "text-anchor": "end" }, formatY(tick)));
      }
      for (const tick of ticks(x0, x1, width / 80, isTime ? TIMES : null, isWhole ? 1 : 0)) {
        const isLast = toX(tick) > width - PAD.right - 28;
        const place = { x: isLast ? width - PAD.right : toX(tick), "text-anchor": isLast ? "end" : "middle" };
        parts.push(s("text", { class: "tick", y: this.height - PAD.bottom + 16, ...place }, (isTime ? axisSeconds : formatX)(tick)));
      }
      for (const one of shown) parts.push(...drawn(one, toX, toY, width));
    } else {
      this.scale = null;
      parts.push(s("text", { class: "empty", x: width / 2, y: this.height / 2, "text-anchor": "middle" }, "No values yet"));
    }
    parts.push(s("text", { class: "axis", x: width - PAD.right, y: this.height - 2, "text-anchor": "end" }, xName));
    parts.push((this.mark = s("g", {})));
    this.shown = shown;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${this.title}. ${this.summary()} Arrow keys read the values.`);
    this.names();
    this.place(this.cursor);
  }

  names() {
    const wanted = this.shown.map((one) => `${one.color} ${one.name}`).join("\n");
    if (this.named === wanted) return;
    this.named = wanted;
    this.legend.replaceChildren(
      ...this.shown.map((one) => h("li", {}, h("span", { class: `swatch ${one.kind} ${one.color}`, "aria-hidden": "true" }), one.name)),
    );
  }

  summary() {
    const { formatY } = this.options;
    return this.shown.map((one) => `${one.name}: ${formatY(one.points.at(-1)[1])} at the end.`).join(" ");
  }

  point(clientX) {
    if (!this.scale) return;
    const box = this.svg.getBoundingClientRect();
    const { x0, x1, width } = this.scale;
    const x = ((clientX - box.left) * width) / box.width;
    this.place(x0 + ((x - PAD.left) / (width - PAD.left - PAD.right)) * (x1 - x0));
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (!this.scale || !(event.key in steps || event.key === "Home" || event.key === "End" || event.key === "Escape")) return;
    event.preventDefault();
    const { x0, x1 } = this.scale;
    if (event.key === "Escape") return this.place(null);
    const now = this.cursor ?? x1;
    const next = event.key === "Home" ? x0 : event.key === "End" ? x1 : now + (steps[event.key] * (x1 - x0)) / 50;
    this.place(Math.max(x0, Math.min(x1, next)));
    this.onAnnounce(this.reading.textContent);
  }

  place(x) {
    this.cursor = x;
    if (!this.mark) return;
    if (x === null || !this.scale || !this.shown.length) {
      this.mark.replaceChildren();
      setText(this.reading, "");
      return;
    }
    const { formatX, formatY, xName } = this.options;
    const { toX, toY } = this.scale;
    const marks = [];
    const found = [];
    for (const one of this.shown) {
      const near = nearest(one.points, x);
      found.push(`${one.name} ${formatY(near[1])}`);
      if (one.kind !== "limit") marks.push(s("circle", { class: `dot ${one.color}`, cx: toX(near[0]), cy: toY(near[1]), r: 3.5 }));
      x = one === this.shown[0] ? near[0] : x;
    }
    marks.unshift(s("line", { class: "cursor", x1: toX(x), x2: toX(x), y1: PAD.top, y2: this.height - PAD.bottom }));
    this.mark.replaceChildren(...marks);
    setText(this.reading, `${xName} ${formatX(x)}: ${found.join(", ")}`);
  }
}

function drawn(one, toX, toY, width) {
  if (one.kind === "marks") {
    return one.points.map(([x, y]) => s("circle", { class: `mark ${one.color}`, cx: toX(x), cy: toY(y), r: 4 }));
  }
  const points = thinned(one.points, width);
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
  const lonely = points.length === 1 ? [s("circle", { class: `mark ${one.color}`, cx: toX(points[0][0]), cy: toY(points[0][1]), r: 3 })] : [];
  return [s("path", { class: `${one.kind} ${one.color}`, d: path }), ...lonely];
}

// At most about two points a pixel: the least and the greatest of each column.
function thinned(points, width) {
  const size = Math.ceil(points.length / width);
  if (size < 3) return points;
  const kept = [];
  for (let i = 0; i < points.length; i += size) {
    const column = points.slice(i, i + size);
    const low = column.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = column.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function extent(points, k) {
  let low = Infinity;
  let high = -Infinity;
  for (const point of points) {
    low = Math.min(low, point[k]);
    high = Math.max(high, point[k]);
  }
  return [low, high];
}

function spread([low, high]) {
  return low === high ? [low - Math.max(Math.abs(low) * 0.1, 0.5), high + Math.max(Math.abs(high) * 0.1, 0.5)] : [low, high];
}

export function ticks(low, high, wanted, steps = null, least = 0) {
  const rough = Math.max((high - low) / Math.max(1, wanted), least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = steps?.find((size) => size >= rough) ?? [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : Number(tick.toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const factor of high - low < 1.5 ? [1, 2, 3, 5, 7] : [1]) {
      const tick = Math.log10(factor) + power;
      if (tick >= low - 1e-9 && tick <= high + 1e-9) found.push(10 ** tick);
    }
  }
  return found;
}

// The points at the ends of at most about 60 windows of equal time, so that a rate is not that of two neighbours.
export function windowed(points, column) {
  if (points.length < 2) return [];
  const span = points.at(-1)[column] - points[0][column];
  const size = Math.max(span / 60, Math.min(span / 4, 0.5));
  const kept = [points[0]];
  for (const point of points) if (point[column] > kept.at(-1)[column] && point[column] >= kept.at(-1)[column] + size) kept.push(point);
  return kept;
}

// An exponential moving mean, corrected for its start.
export function smoothed(points, weight) {
  let mean = 0;
  let scale = 0;
  return points.map(([x, y]) => {
    if (!Number.isFinite(y)) return [x, NaN];
    mean = weight * mean + (1 - weight) * y;
    scale = weight * scale + (1 - weight);
    return [x, mean / scale];
  });
}
