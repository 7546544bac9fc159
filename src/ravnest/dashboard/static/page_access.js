// Access, for the requester: the link to share with viewers, addresses of nodes, rejected connections.

import { card, h, nodeLink, table } from "./dom.js";
import { clock, whole } from "./format.js";

export function accessPage(store, { load, announce }) {
  const body = h("div", { class: "stack-cards" });
  const element = h("div", { class: "page" }, h("h1", {}, "Access"), body);
  load("v1/access")
    .then((access) => body.replaceChildren(...cards(access, announce)))
    .catch((error) => body.replaceChildren(h("p", { class: "lead", role: "alert" }, error.message)));
  return { element, update() {}, title: "Access" };
}

function cards(access, announce) {
  const field = h("input", { type: "text", readonly: true, value: access.viewer_link, "aria-label": "Link for viewers", onfocus: (e) => e.target.select() });
  const copy = h("button", { type: "button", onclick: () => { field.select(); navigator.clipboard?.writeText(field.value).then(() => announce("copied"), () => announce("press Ctrl-C to copy")); } }, "Copy");
  const addresses = Object.entries(access.addresses).map(([name, address]) => [nodeLink(name), address]);
  const rejections = access.rejections.slice().reverse().map((one) => [clock(one.at_s), one.address, one.reason, whole(one.count)]);
  return [
    !access.viewer_link ? h("p", { class: "lead" }, "Only programs of this machine can open this page.") : card("Link for viewers", h("p", { class: "note" }, "Opens all pages but this one, on this machine or through a tunnel to it."), h("div", { class: "copy" }, field, copy)),
    addresses.length ? card("Addresses of nodes", table("Addresses of nodes", [{ name: "Node", text: true }, { name: "Address", text: true }], addresses)) : null,
    card("Rejected connections", rejections.length ? table("Rejected connections", [{ name: "Time", text: true }, { name: "Address", text: true }, { name: "Reason", text: true }, { name: "Times" }], rejections) : h("p", { class: "empty" }, "None")),
  ].filter(Boolean);
}
