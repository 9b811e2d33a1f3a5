// The timeline on a canvas: a row a unit, a bar an action, its height its width, a cross where it failed.

import {clock, colours, count, duration, fit, h, hue, letters, link, panel} from "./dom.js";
import {store} from "./net.js";
import {expectedSpan, stepRows, stepsByTask, stepBand, stepText} from "./steps.js";

const LABEL = 92, AXIS = 20, GAP = 8;
const MIN_LETTERS = 24, STEP_ROW = 15;
// Room to the right of now, as a share of the span to its left: a margin, or more from when an expected end is near
// until none is.
const MARGIN = 0.1, NEAR = 0.25, ROOM = 1 / 3;

// The steps of each task, side by side where they overlap. Then of each pool a row a unit where units have numbers, else
// as many as run side by side at most.
function lanes(pools, steps, rowHeight) {
  const found = [], tall = Math.max(rowHeight, STEP_ROW);
  let top = AXIS;
  for (const [name, told] of stepsByTask(steps)) {
    const rows = stepRows(told);
    found.push({name, steps: told, top, rows, height: rows * tall, rowHeight: tall});
    top += rows * tall + GAP;
  }
  for (const [name, pool] of Object.entries(pools)) {
    const numbered = !pool.timed && Boolean(pool.cells) && (pool.kind === "cpu" || pool.devices);
    const rows = pool.timed ? 2 : numbered ? Math.max(1, pool.total) : Math.min(8, Math.max(1, pool.total));
    const height = rows * rowHeight;
    found.push({name, pool, top, rows, height, rowHeight, numbered, timed: Boolean(pool.timed)});
    top += height + GAP;
  }
  return [found, top];
}

export class Timeline {
  constructor(options) {
    this.options = {rowHeight: 14, hover: true, ...options};
    this.canvas = h("canvas", {class: "tl", tabIndex: 0, role: "img", "aria-label": "Timeline of actions"});
    this.span_ms = 1000 * (options.span || 120);
    this.end_ms = options.end || null; // null: follows now
    this.ahead = options.ahead || 0; // what of the span is shown again after its end, while it is held
    this.near = false; // an expected end is within reach
    this.filter = null;
    this.picked = null;
    this.hits = [];
    this.frames = 0; this.spent_ms = 0; this.slowest = [];
    this.onview = () => {};
    if (this.options.hover) this.listen();
  }

  get now() { return this.end_ms ?? store.now(); }

  // Milliseconds shown after `now`. They change only when an expected end comes near and when none is any more: nothing
  // else moves the picture.
  get room_ms() {
    if (this.end_ms !== null) return this.ahead * this.span_ms;
    const wanted = expectedSpan(store.d.steps, store.now());
    this.near = wanted !== null && wanted <= this.span_ms * (this.near ? ROOM : NEAR);
    return this.span_ms * (this.near ? ROOM : MARGIN);
  }

  follow() { this.end_ms = null; this.onview(); }

  hold(at) {
    if (this.end_ms === null) this.ahead = this.room_ms / this.span_ms; // not a pixel moves
    this.end_ms = at;
    this.onview();
  }

  holdOrFollow(at) { at >= store.now() ? this.follow() : this.hold(at); }

  draw() {
    const began = performance.now();
    const {canvas} = this, scale = devicePixelRatio || 1;
    const width = canvas.clientWidth || canvas.parentElement?.clientWidth || 600;
    const [rows, height] = lanes(store.d.pools || {}, store.d.steps, this.options.rowHeight);
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    }
    const c = canvas.getContext("2d"), tone = colours();
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
    const now = store.now(), start = this.now - this.span_ms, end = this.now + this.room_ms, per_ms = (width - LABEL) / (end - start);
    const x = (at) => LABEL + (at - start) * per_ms;
    this.x0 = start; this.per_ms = per_ms; this.nowX = x(now);
    this.grid(c, tone, rows, start, end, x, width, height);
    const byLane = new Map(rows.filter((lane) => !lane.steps).map((lane) => [lane.name, {lane, bars: []}]));
    for (const bar of store.bars.values()) {
      const until = bar.end ?? now;
      if (until < start || bar.start > end) continue;
      for (const [pool, first, units] of bar.places) byLane.get(pool)?.bars.push([bar, first, units, until]);
    }
    this.hits = [];
    c.save(); c.beginPath(); c.rect(LABEL, 0, width - LABEL, height); c.clip();
    this.bands = [];
    for (const {lane, bars} of byLane.values()) this.lane(c, tone, lane, bars, x, width);
    c.fillStyle = tone.text; c.fillRect(Math.round(this.nowX) - 1, AXIS - 3, 2, height);
    for (const lane of rows) {
      if (lane.steps) this.bands.push(...[...lane.steps].reverse().map((step) => stepBand(c, tone, lane, step, x, LABEL, width)).filter(Boolean));
    }
    if (store.restarted_ms && store.restarted_ms > start) {
      c.strokeStyle = tone.fail; c.setLineDash([4, 3]); c.beginPath();
      c.moveTo(x(store.restarted_ms), AXIS); c.lineTo(x(store.restarted_ms), height); c.stroke(); c.setLineDash([]);
    }
    c.restore();
    this.frames += 1;
    const took = performance.now() - began;
    this.spent_ms += took; this.slowest.push(took); if (this.slowest.length > 600) this.slowest.shift();
  }

  grid(c, tone, rows, start, end, x, width, height) {
    const seen = Math.max(0, Math.min(width, this.nowX) - LABEL); // what is not yet is not idle
    for (const lane of rows) {
      c.fillStyle = tone.sunk; c.fillRect(LABEL, lane.top, seen, lane.height);
      c.fillStyle = tone.text; c.fillText(fit(c, lane.name, LABEL - 10), 0, lane.top + Math.min(lane.height / 2, 8));
      if (lane.rows > 3 && lane.pool) { c.fillStyle = tone.dim; c.fillText(`${lane.rows} ${lane.pool.kind}`, 0, lane.top + 22); }
    }
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600].map((s) => s * 1000);
    const step = steps.find((each) => (end - start) / each <= (width - LABEL) / 80) || steps.at(-1);
    c.strokeStyle = tone.line; c.fillStyle = tone.dim; c.lineWidth = 1;
    const live = this.end_ms === null, origin = live ? this.now : 0, nowWide = c.measureText("now").width;
    for (let at = origin + Math.ceil((start - origin) / step) * step; at < end; at += step) {
      const px = Math.round(x(at)) + 0.5;
      c.beginPath(); c.moveTo(px, AXIS); c.lineTo(px, height); c.stroke();
      const text = live ? `${at < origin ? "-" : "+"}${duration(Math.abs(at - origin))}` : clock(at);
      const wide = c.measureText(text).width, left = Math.max(LABEL, Math.min(px - wide / 2, width - wide));
      if (left > this.nowX + nowWide || left + wide < this.nowX - nowWide) c.fillText(text, left, 9);
    }
    if (this.nowX < LABEL || this.nowX > width) return;
    c.fillStyle = tone.text; c.font = "600 11px system-ui, sans-serif";
    c.fillText("now", Math.min(this.nowX - nowWide / 2, width - nowWide - 2), 9);
    c.font = "11px system-ui, sans-serif";
  }

  lane(c, tone, lane, bars, x, width) {
    if (lane.timed) return this.calls(c, tone, lane, bars, x);
    const free = new Array(lane.rows).fill(-1);
    const groups = new Map(), failed = [], named = [];
    const columns = new Map(); // never two bars in the same pixel column of a row
    for (const [bar, first, units, until] of bars) {
      const left = x(bar.start), right = x(until);
      let row = first, tall = units;
      if (!lane.numbered || first < 0) { // side by side, where units have no numbers
        row = free.findIndex((each) => each <= left + 0.01);
        if (row < 0) row = lane.rows - 1;
        free[row] = right; tall = 1;
      }
      if (row >= lane.rows) continue;
      const px = Math.max(LABEL, left), wide = Math.max(right - px - (right - px > 3 ? 1 : 0), 1);
      const bad = bar.reason && bar.reason !== "cancelled";
      if (wide <= 1 && !bad) {
        const column = Math.floor(px);
        if (columns.get(row) === column) continue;
        columns.set(row, column);
      }
      const y = lane.top + row * lane.rowHeight + 0.5, tallPx = tall * lane.rowHeight - 1;
      const dimmed = (this.filter && !this.filter(bar)) || (this.picked && bar.trajectory !== this.picked);
      const key = `${hue(bar.fn)}${dimmed ? "-" : ""}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push([px, y, wide, tallPx]);
      if (bar.prep > 0 && bar.prep * this.per_ms > 2) groups.get(key).pale = [...(groups.get(key).pale || []), [px, y + tallPx / 2, Math.min(wide, bar.prep * this.per_ms), tallPx / 2]];
      if (bad) failed.push([px, y, wide, tallPx]);
      if (wide > MIN_LETTERS && tallPx >= 12) named.push([px, y, wide, tallPx, bar, units, hue(bar.fn)]);
      this.hits.push([px, y, wide, tallPx, bar]);
    }
    for (const [key, list] of groups) {
      c.globalAlpha = key.endsWith("-") ? 0.22 : 1;
      c.fillStyle = tone[key.replace("-", "")];
      for (const [px, y, wide, tall] of list) c.fillRect(px, y, wide, tall);
      if (list.pale) { c.fillStyle = tone.panel; c.globalAlpha *= 0.45; for (const [px, y, wide, tall] of list.pale) c.fillRect(px, y, wide, tall); }
    }
    c.globalAlpha = 1;
    for (const [px, y, wide, tall, bar, units, name] of named) {
      c.fillStyle = name === "amber" || name === "sky" || name === "slate" || tone.bg < "#8" ? "#0E1116" : "#FFFFFF";
      const text = `${wide > 90 ? bar.fn : letters(bar.fn)}${units > 1 ? ` ×${units}` : ""}`;
      c.fillText(fit(c, text, wide - 6), px + 4, y + tall / 2);
    }
    for (const [px, y, wide, tall] of failed) {
      c.strokeStyle = tone.fail; c.lineWidth = 1.5; c.strokeRect(px + 0.5, y + 0.5, Math.max(wide - 1, 1), tall - 1);
      const size = Math.min(8, tall - 2), right = px + wide;
      c.fillStyle = tone.fail; c.fillRect(right - size - 2, y, size + 2, size + 2);
      c.strokeStyle = tone.panel; c.lineWidth = 1.2; c.beginPath();
      c.moveTo(right - size, y + 2); c.lineTo(right - 2, y + size); c.moveTo(right - 2, y + 2); c.lineTo(right - size, y + size); c.stroke();
    }
    c.lineWidth = 1;
  }

  // A quota: a tick for each call, refused or failed ones as crosses above it.
  calls(c, tone, lane, bars, x) {
    for (const [bar, , units] of bars) {
      const px = x(bar.start);
      c.globalAlpha = this.filter && !this.filter(bar) ? 0.22 : 1;
      c.fillStyle = failedBar(bar) ? tone.fail : tone[hue(bar.fn)];
      const tall = Math.min(lane.height, 6 + 3 * units);
      c.fillRect(px, lane.top + lane.height - tall, 2.5, tall);
      if (failedBar(bar)) { c.fillText("×", px - 2, lane.top + 4); }
      this.hits.push([px - 2, lane.top, 6, lane.height, bar]);
    }
    c.globalAlpha = 1;
  }

  at(px, py) {
    for (let n = this.hits.length - 1; n >= 0; n -= 1) {
      const [left, top, wide, tall, bar] = this.hits[n];
      if (px >= left - 1 && px <= left + wide + 1 && py >= top && py <= top + tall) return bar;
    }
    return null;
  }

  listen() {
    const {canvas} = this, tip = document.getElementById("tip");
    let drag = null;
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        return this.holdOrFollow(drag.end - (event.offsetX - drag.x) / this.per_ms);
      }
      const bar = this.at(event.offsetX, event.offsetY);
      canvas.style.cursor = bar ? "pointer" : "crosshair";
      this.picked = bar?.trajectory || null;
      const band = bar ? null : this.bands.find(({left, top, right, bottom}) => event.offsetX >= left && event.offsetX <= right && event.offsetY >= top && event.offsetY <= bottom);
      if (!bar && !band) { tip.style.display = "none"; return; }
      tip.replaceChildren(...(bar ? describe(bar) : [h("b", null, band.step.task), h("div", null, stepText(band.step)), h("div", null, `opened ${clock(band.step.opened)}`)]));
      tip.style.display = "block";
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 330)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - 150)}px`;
    });
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; this.picked = null; });
    canvas.addEventListener("pointerdown", (event) => { drag = {x: event.offsetX, end: this.now, moved: false}; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", (event) => {
      const moved = drag && Math.abs(event.offsetX - drag.x) > 3;
      drag = null;
      const bar = moved ? null : this.at(event.offsetX, event.offsetY);
      if (bar) { tip.style.display = "none"; this.options.onopen?.(bar); }
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, event.offsetX);
    }, {passive: false});
    canvas.addEventListener("dblclick", () => { this.span_ms = 120e3; this.follow(); });
  }

  zoom(factor, px) {
    const span = Math.min(1800e3, Math.max(2e3, this.span_ms * factor));
    if (this.end_ms !== null && px !== undefined) {
      const at = this.x0 + (px - LABEL) / this.per_ms; // stays under the pointer
      this.end_ms = at + (this.end_ms - at) * span / this.span_ms;
    }
    this.span_ms = span;
    this.onview();
  }
}

export function describe(bar) {
  const ended = bar.end !== null;
  const rows = [
    [bar.reason ? `✕ ${bar.reason}` : ended ? "ended" : "running", `${duration((bar.end ?? store.now()) - bar.start)}`],
    ["queue", duration(bar.queue)],
    ...(ended ? [["overhead", duration(bar.prep)], ["execution", duration(bar.end - bar.start - bar.prep)]] : []),
  ];
  return [h("b", null, bar.fn), h("div", null, `${bar.task}${bar.trajectory ? ` · ${bar.trajectory}` : ""}`),
    ...rows.map(([name, value]) => h("div", null, `${name} `, h("b", null, value))),
    h("div", {class: "mono"}, bar.id),
    h("div", {class: "mono"}, bar.places.map(([pool, first, units]) => first < 0 ? `${pool} ×${units}` : `${pool} ${first}${units > 1 ? `–${first + units - 1}` : ""}`).join("  "))];
}

const failedBar = (bar) => Boolean(bar.reason) && bar.reason !== "cancelled";

export function barTable(bars) {
  return h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null,
    ...["Function", "Task", "Trajectory", "Start", "Queue", "Overhead", "Execution", "End"].map((each) => h("th", null, each)))),
  h("tbody", null, ...bars.map((bar) => h("tr", null,
    h("td", null, link(`/ui/invocations/${bar.id}`, bar.fn)), h("td", null, bar.task), h("td", null, bar.trajectory || "–"),
    h("td", null, clock(bar.start)), h("td", null, duration(bar.queue)), h("td", null, bar.end === null ? "–" : duration(bar.prep)),
    h("td", null, bar.end === null ? "–" : duration(bar.end - bar.start - bar.prep)), h("td", null, bar.end === null ? "runs" : bar.reason ? `✕ ${bar.reason}` : "✓"))))));
}

// The view.
export function timelineView(view, go, params) {
  const end = params.get("end") ? Date.parse(params.get("end")) : null;
  const span = Number(params.get("span")) || 120, ahead = Math.min(1, Math.max(0, Number(params.get("ahead")) / span || 0));
  const timeline = new Timeline({rowHeight: 18, span, end: Number.isNaN(end) ? null : end, ahead,
    onopen: (bar) => go(`/ui/invocations/${bar.id}`)});
  let words = params.get("q") || "";
  const input = h("input", {class: "filter", placeholder: "Dim all but… fn:shell task:swe failed", value: words, "aria-label": "Filter of the timeline"});
  const follow = h("button", {onclick: () => timeline.follow()}, "● following");
  const ranges = h("span", {class: "seg", role: "group", "aria-label": "Range"}, ...[[60, "1 min"], [120, "2 min"], [300, "5 min"], [1800, "30 min"]].map(([seconds, text]) =>
    h("button", {"data-s": seconds, onclick: () => { timeline.span_ms = seconds * 1000; timeline.onview(); }}, text)));
  const table = h("div");
  const asTable = h("button", {"aria-pressed": "false", onclick: () => {
    const on = asTable.getAttribute("aria-pressed") !== "true";
    asTable.setAttribute("aria-pressed", String(on));
    list();
  }}, "as table");
  // The bars of the picture that the filter lets through, newest first, as it goes on; still while the pointer is on it.
  const list = () => {
    if (asTable.getAttribute("aria-pressed") !== "true") return table.replaceChildren();
    const seen = (bar) => bar.start < timeline.now && (bar.end ?? Infinity) > timeline.now - timeline.span_ms;
    const bars = [...store.bars.values()].filter((bar) => seen(bar) && (!timeline.filter || timeline.filter(bar))).slice(-200).reverse();
    const steps = [...stepsByTask(store.d.steps)].flatMap(([task, each]) => each.map((step) => `${task}, ${stepText(step)}`));
    table.replaceChildren(h("ul", null, ...steps.map((step) => h("li", null, step))), barTable(bars));
  };
  const legend = h("span", {class: "leg"});
  const setFilter = () => {
    const test = barFilter(input.value);
    timeline.filter = test;
    list();
  };
  input.addEventListener("input", () => { words = input.value; setFilter(); remember(); });
  const remember = () => {
    const found = new URLSearchParams({span: String(Math.round(timeline.span_ms / 1000))});
    if (timeline.end_ms !== null) {
      found.set("end", new Date(timeline.end_ms).toISOString());
      if (timeline.ahead) found.set("ahead", String(Number((timeline.room_ms / 1000).toFixed(1))));
    }
    if (words) found.set("q", words);
    history.replaceState(null, "", `/ui/timeline?${found}`);
    const behind = timeline.end_ms === null ? 0 : store.now() - timeline.end_ms;
    follow.textContent = timeline.end_ms === null ? "● following" : `${duration(behind)} behind, follow`;
    for (const each of ranges.children) each.classList.toggle("on", Number(each.dataset.s) * 1000 === timeline.span_ms);
  };
  timeline.onview = remember;
  setFilter();
  const empty = h("p", {class: "dim"});
  view.append(h("div", {class: "bar1"}, ranges, input, follow, asTable, legend),
    h("section", {class: "panel"}, timeline.canvas, empty), table);
  remember();
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let handle = 0;
  const loop = () => {
    handle = reduced ? setTimeout(loop, 500) : requestAnimationFrame(loop);
    if (!document.hidden) timeline.draw();
  };
  loop();
  window.tangramTimeline = timeline;
  const legendNow = () => {
    const names = [...new Set([...store.bars.values()].slice(-2000).map((bar) => bar.fn))].slice(0, 8);
    if (legend.dataset.names !== names.join()) {
      legend.dataset.names = names.join();
      legend.replaceChildren(...names.map((name) => h("span", null, h("i", {class: `sw c-${hue(name)}`}), `${letters(name)} ${name}`)));
    }
    empty.textContent = store.bars.size ? (store.skipped ? `${count(store.skipped)} starts were more than are told one by one` : "") : "No action has run in the last two minutes.";
  };
  return {
    tick: () => { legendNow(); if (!table.matches(":focus-within, :hover")) list(); },
    end: () => { reduced ? clearTimeout(handle) : cancelAnimationFrame(handle); document.getElementById("tip").style.display = "none"; },
    keys: {
      "+": () => timeline.zoom(1 / 1.4), "-": () => timeline.zoom(1.4), 0: () => { timeline.span_ms = 120e3; timeline.follow(); },
      f: () => timeline.follow(), " ": () => timeline.end_ms === null ? timeline.hold(store.now()) : timeline.follow(),
      ArrowLeft: () => timeline.hold(timeline.now - timeline.span_ms / 4),
      ArrowRight: () => timeline.holdOrFollow(timeline.now + timeline.span_ms / 4),
    },
  };
}

function barFilter(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [name, value] = word.split(/:(.*)/);
    if (word === "failed") return failedBar;
    if (name === "fn" && value) return (bar) => bar.fn.includes(value);
    if (name === "task" && value) return (bar) => bar.task.includes(value);
    if (name === "traj" && value) return (bar) => (bar.trajectory || "").includes(value);
    return (bar) => bar.fn.includes(word) || bar.task.includes(word) || (bar.trajectory || "").includes(word);
  });
  return tests.length ? (bar) => tests.every((test) => test(bar)) : null;
}

export const miniPanel = (timeline, about) => panel("Last 2 minutes", about, timeline.canvas);
