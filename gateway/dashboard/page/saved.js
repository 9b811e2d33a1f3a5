// The visible span of a timeline as one file: the page's own style and scripts with the data inside, which run there
// without a gateway and without a network.

import {barFilter, describe, heightOf, legendOf, tableOf} from "./bars.js";
import {clock, duration, fill, h, setFunctions, swatch} from "./dom.js";
import {store} from "./net.js";
import {Timeline} from "./timeline.js";

const DATA = "saved", BARS_MAX = 20000;

const inView = (timeline, bar, longest) => bar.start <= timeline.now + timeline.room_ms && (bar.end ?? Infinity) + longest >= timeline.now - timeline.span_ms;

// Everything that the picture is made of, as JSON can hold it.
function spanOf(timeline) {
  const {pools, steps, fns} = store.d, longest = Math.max(0, ...Object.values(pools || {}).map((pool) => pool.period || 0));
  return {
    form: 1, gateway: location.host, version: store.version, now: store.now(), end: timeline.now, span: timeline.span_ms, room: timeline.room_ms, since: store.since_ms, restarted: store.restarted_ms,
    theme: document.documentElement.dataset.theme, names: store.names, fns: Object.keys(fns || {}), pools, steps, bars: [...store.bars.values()].filter((bar) => inView(timeline, bar, longest)).slice(-BARS_MAX),
  };
}

// The same policy as this page's, which names the scripts and the style that may run by their digests; less the network.
async function policy() {
  const told = (await fetch("/ui/timeline", {cache: "no-store"})).headers.get("content-security-policy") || "";
  const [script] = told.match(/script-src [^;]+/) || [], [style] = told.match(/style-src [^;]+/) || [];
  if (!script || !style) throw new Error("the gateway did not name what may run in its page");
  return `default-src 'none'; ${script}; ${style}`;
}

export async function saveSpan(timeline) {
  const data = spanOf(timeline), script = document.querySelector("script[type=module]").textContent, style = document.querySelector("style").textContent;
  const json = JSON.stringify(data).replace(/[<\u2028\u2029]/g, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`); // nothing in it ends its element
  const tag = (name, given, inner) => `<${name}${given}>${inner}</${name}>\n`;
  const head = `<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">\n<meta http-equiv="Content-Security-Policy" content="${await policy()}">\n`;
  const body = `<main id="view"></main>\n<div id="tip" role="tooltip"></div>\n${tag("script", ` type="application/json" id="${DATA}"`, json)}${tag("script", ' type="module"', script)}`;
  const text = ["<!doctype html>\n", tag("html", ' lang="en"', tag("head", "", head + tag("title", "", "Timeline") + tag("style", "", style)) + tag("body", "", body))];
  const address = URL.createObjectURL(new Blob(text, {type: "text/html"}));
  h("a", {href: address, download: `timeline-${new Date(data.end).toISOString().slice(0, 19).replace(/[:T]/g, "-")}.html`}).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

// Whether this document is such a file; then it is shown.
export function showSaved() {
  const found = document.getElementById(DATA);
  if (!found) return false;
  const data = JSON.parse(found.textContent);
  document.documentElement.dataset.theme = data.theme;
  Object.assign(store, {d: {pools: data.pools, steps: data.steps}, names: data.names, since_ms: data.since, restarted_ms: data.restarted, frozen_ms: data.now, bars: new Map(data.bars.map((bar) => [bar.key, bar]))});
  setFunctions(data.names, data.fns);
  const view = document.getElementById("view"), drawer = h("aside", {class: "drawer", hidden: true}), table = h("div");
  const onpin = (bar) => { drawer.hidden = false; fill(drawer, h("div", {class: "h"}, h("h2", null, swatch(bar.fn), bar.fn), h("button", {"aria-label": "Close", onclick: () => { drawer.hidden = true; }}, "✕")), describe(bar)); };
  const timeline = new Timeline({heightOf, span: data.span / 1000, end: data.end, ahead: data.room / data.span, onpin, onopen: onpin});
  const input = h("input", {class: "filter", placeholder: "Dim all but… fn:shell failed", "aria-label": "Filter", oninput: () => { timeline.filter = barFilter(input.value); list(); }});
  const list = () => { if (table.childElementCount) fill(table, ...tableOf(timeline, false)); };
  const back = () => { timeline.end_ms = data.end; timeline.span_ms = data.span; timeline.ahead = data.room / data.span; };
  timeline.follow = back; // there is no now to follow
  document.title = `Timeline of ${data.gateway} until ${new Date(data.end).toISOString()}`;
  fill(view, h("h1", null, `Timeline of ${data.gateway}`), h("p", {class: "dim"}, `${new Date(data.end - data.span).toISOString()} to ${clock(data.end)}, ${duration(data.span)}; saved at ${clock(data.now)} from Tangram ${data.version}. Wheel zooms, drag pans, double click goes back.`),
    h("div", {class: "bar1"}, input, h("button", {onclick: () => table.childElementCount ? fill(table) : fill(table, ...tableOf(timeline, false))}, "as table")),
    h("div", {class: "beside"}, h("section", {class: "panel"}, timeline.canvas), drawer), legendOf(), table);
  const loop = () => { requestAnimationFrame(loop); timeline.drawIfMoved(); };
  loop();
  window.tangramTimeline = timeline;
  return true;
}
