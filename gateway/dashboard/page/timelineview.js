// The timeline's view: ranges, filter, the bar that is pinned beside it, the same as a table, and as a file.

import {barFilter, heightOf, legendOf, spoken, tableOf} from "./bars.js";
import {count, duration, fill, h, problem} from "./dom.js";
import {pinned} from "./drawer.js";
import {store, wantHistory} from "./net.js";
import {saveSpan} from "./saved.js";
import {Timeline} from "./timeline.js";

const RANGES = [[60, "1 min"], [120, "2 min"], [300, "5 min"], [1800, "30 min"]];
const ABOUT = "fn:shell task:swe wider:1 longer:2s failed";

export function timelineView(view, go, params) {
  const end = params.get("end") ? Date.parse(params.get("end")) : null;
  const span = Number(params.get("span")) || (innerWidth <= 620 ? 60 : 120), ahead = Math.min(1, Math.max(0, Number(params.get("ahead")) / span || 0));
  const said = h("div", {class: "unseen", role: "status", "aria-live": "polite"}), drawer = h("aside", {class: "drawer", "aria-label": "The chosen action", hidden: true}), legend = h("div");
  const open = (bar) => go(`/ui/invocations/${bar.id}`);
  let pin = null;
  const unpin = () => { if (!pin) return false; pin.end(); pin = null; drawer.hidden = true; timeline.chosen = null; timeline.canvas.focus(); return true; };
  const onpin = (bar) => { pin?.end(); drawer.hidden = false; pin = pinned(drawer, bar, go, unpin); };
  const timeline = new Timeline({heightOf, span, end: Number.isNaN(end) ? null : end, ahead, onopen: open, onpin,
    onchoose: (bar) => { said.textContent = spoken(bar); if (pin && pin.bar !== bar) onpin(bar); }});
  let words = params.get("q") || "";
  const input = h("input", {class: "filter", placeholder: `Dim all but… ${ABOUT}`, value: words, "aria-label": "Filter of the timeline", spellcheck: false, autocomplete: "off"});
  const follow = h("button", {title: "space", onclick: () => hold()}, "● following");
  const hold = () => timeline.end_ms === null ? timeline.hold(store.now()) : timeline.follow();
  const ranges = h("span", {class: "seg", role: "group", "aria-label": "Range"}, ...RANGES.map(([seconds, text]) =>
    h("button", {"data-s": seconds, onclick: () => { timeline.span_ms = seconds * 1000; timeline.onview(); }}, text)));
  const failedOnly = h("button", {"aria-pressed": "false", onclick: () => { const rest = input.value.split(/\s+/).filter((word) => word && word !== "failed"); set((rest.length === input.value.split(/\s+/).filter(Boolean).length ? [...rest, "failed"] : rest).join(" ")); }}, h("span", {class: "x"}, "✕"), "failed only");
  const table = h("div"), asTable = h("button", {"aria-pressed": "false", onclick: () => {
    asTable.setAttribute("aria-pressed", String(asTable.getAttribute("aria-pressed") !== "true"));
    list();
  }}, "as table");
  const list = () => asTable.getAttribute("aria-pressed") === "true" ? fill(table, ...tableOf(timeline, true)) : table.replaceChildren();
  const told = h("div"), save = h("button", {title: "What is seen, as one file that needs no gateway", onclick: async () => {
    try { await saveSpan(timeline); fill(told); } catch (error) { fill(told, problem(error)); }
  }}, "Save as HTML");
  const setFilter = () => { timeline.filter = barFilter(input.value); failedOnly.setAttribute("aria-pressed", String(/(^|\s)failed(\s|$)/.test(input.value))); list(); };
  const set = (text) => { if (input.value !== text) input.value = text; words = text; setFilter(); remember(); };
  input.addEventListener("input", () => set(input.value));
  const remember = () => {
    const found = new URLSearchParams({span: String(Math.round(timeline.span_ms / 1000))});
    if (timeline.end_ms !== null) {
      found.set("end", new Date(timeline.end_ms).toISOString());
      if (timeline.ahead) found.set("ahead", String(Number((timeline.room_ms / 1000).toFixed(1))));
    }
    if (words) found.set("q", words);
    history.replaceState(null, "", `/ui/timeline?${found}`);
    tellBehind();
    for (const each of ranges.children) each.classList.toggle("on", Number(each.dataset.s) * 1000 === timeline.span_ms);
    moreHistory();
  };
  const moreHistory = () => wantHistory((store.now() - timeline.now + timeline.span_ms) / 1000);
  const tellBehind = () => {
    const text = timeline.end_ms === null ? "● following" : `${duration(store.now() - timeline.end_ms)} behind, follow`;
    if (follow.textContent !== text) follow.textContent = text;
  };
  timeline.onview = remember;
  setFilter();
  const empty = h("p", {class: "dim"});
  view.append(h("div", {class: "bar1"}, ranges, follow, input, failedOnly, asTable, save), told,
    h("div", {class: "beside"}, h("section", {class: "panel"}, timeline.canvas, empty), drawer), legend, table, said);
  remember();
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let handle = 0, shown = "";
  const loop = () => {
    handle = reduced ? setTimeout(loop, 500) : requestAnimationFrame(loop);
    if (!document.hidden) timeline.drawIfMoved();
  };
  loop();
  window.tangramTimeline = timeline;
  const legendNow = () => {
    const made = legendOf();
    if (made.textContent !== shown) { shown = made.textContent; fill(legend, made); }
    const text = store.bars.size ? (store.skipped ? `${count(store.skipped)} starts were more than are told one by one` : "") : "No action has run in the last two minutes.";
    if (empty.textContent !== text) empty.textContent = text;
  };
  return {
    tick: () => { legendNow(); tellBehind(); moreHistory(); if (!table.matches(":focus-within, :hover")) list(); },
    end: () => { pin?.end(); reduced ? clearTimeout(handle) : cancelAnimationFrame(handle); document.getElementById("tip").style.display = "none"; },
    escape: unpin,
    keys: {
      "+": () => timeline.zoom(1 / 1.4), "-": () => timeline.zoom(1.4), 0: () => timeline.fit(), f: () => timeline.follow(), " ": hold,
      Enter: () => timeline.chosen && open(timeline.chosen),
      ArrowLeft: () => timeline.hold(timeline.now - timeline.span_ms / 4),
      ArrowRight: () => timeline.holdOrFollow(timeline.now + timeline.span_ms / 4),
    },
  };
}
