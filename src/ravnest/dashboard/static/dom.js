// Elements from data. Text is always a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Brings the children of a container in line with items, each made again only when its text of `state` differs.
export function keyed(container, items, key, state, make) {
  const known = container.known ?? (container.known = new Map());
  const seen = new Set();
  let place = container.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const now = state(item);
    seen.add(name);
    let entry = known.get(name);
    if (!entry || entry.now !== now) {
      const element = make(item, entry !== undefined);
      if (entry) {
        if (entry.element === place) place = element;
        entry.element.replaceWith(element);
      }
      entry = { element, now };
      known.set(name, entry);
    }
    if (entry.element === place) place = place.nextElementSibling;
    else container.insertBefore(entry.element, place);
  }
  for (const [name, entry] of known) {
    if (!seen.has(name)) {
      entry.element.remove();
      known.delete(name);
    }
  }
}

export function card(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...children);
}

export function table(caption, columns, rows, footer = null) {
  const cell = (value, column, tag) =>
    h(tag, { class: column.text ? "text" : "number", scope: tag === "th" ? "row" : null }, value ?? "");
  const line = (row) => h("tr", {}, columns.map((column, i) => cell(row[i], column, i ? "td" : "th")));
  return h(
    "div",
    { class: "table", tabindex: 0, role: "region", "aria-label": `${caption}, table` },
    h(
      "table",
      {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.text ? "text" : "number", scope: "col" }, c.name)))),
      h("tbody", {}, rows.map(line)),
      footer ? h("tfoot", {}, line(footer)) : null,
    ),
  );
}

export function meter(share, label, kind = "") {
  const width = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0)) * 100;
  return h(
    "div",
    { class: `meter ${kind}`, role: "img", "aria-label": label },
    s("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "track", width: 100, height: 6 }), s("rect", { class: "fill", width, height: 6 })),
  );
}

export function nodeLink(name) {
  return h("a", { href: `#/node/${encodeURIComponent(name)}` }, h("bdi", {}, name));
}
