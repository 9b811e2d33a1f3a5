// The timeline on a canvas: a row a unit, a bar an action, its height its width, a cross where it failed.

import {describe} from "./bars.js";
import {clock, colours, h} from "./dom.js";
import {AXIS, drawBars, drawNames, drawQuota, LABEL, lanesOf} from "./lanes.js";
import {store} from "./net.js";
import {expectedSpan, stepBand, stepText} from "./steps.js";

// Room to the right of now, as a share of the span to its left: a margin, or more from when an expected end is near
// until none is.
const MARGIN = 0.1, NEAR = 0.25, ROOM = 1 / 3;
// A picture is made anew once it would be so far off, and each second for what it says in words.
const MOVED_PX = 0.25, WORDS_MS = 1000;
const SPAN_MIN_MS = 2e3, SPAN_MAX_MS = 1800e3, SPAN_MS = 120e3;

export class Timeline {
  constructor(options) {
    this.options = {heightOf: () => 14, hover: true, steps: true, ...options};
    this.canvas = h("canvas", {class: "tl", tabIndex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": "Timeline of actions: arrows go from bar to bar, enter opens one"});
    this.span_ms = 1000 * (options.span || 120);
    this.end_ms = options.end || null; // null: follows now
    this.ahead = options.ahead || 0; // what of the span is shown again after its end, while it is held
    this.near = false; // an expected end is within reach
    this.filter = null;
    this.hovered = null; // the bar under the pointer
    this.chosen = null; // the bar that arrows came to, or that is pinned
    this.lanes = []; this.hits = []; this.bands = []; this.drawn = {};
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

  // Draws if the picture is another one than that which is seen.
  drawIfMoved() {
    const {drawn, canvas} = this, since = performance.now() - drawn.at;
    const same = drawn.changes === store.changes && drawn.colours === colours() && drawn.span_ms === this.span_ms && drawn.filter === this.filter
      && drawn.hovered === this.hovered && drawn.chosen === this.chosen && drawn.width === canvas.clientWidth && drawn.tall === innerHeight && since < WORDS_MS;
    if (!same || Math.abs(this.now - drawn.now) * this.per_ms > MOVED_PX) this.draw();
  }

  draw() {
    const began = performance.now();
    const {canvas} = this, scale = devicePixelRatio || 1, tone = colours();
    const width = canvas.clientWidth || canvas.parentElement?.clientWidth || 600;
    const [lanes, height] = lanesOf(store.d.pools || {}, this.options.steps ? store.d.steps : {}, this.options.heightOf);
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    }
    const c = canvas.getContext("2d");
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
    const now = store.now(), start = this.now - this.span_ms, end = this.now + this.room_ms, per_ms = (width - LABEL) / (end - start);
    const x = (at) => LABEL + (at - start) * per_ms;
    Object.assign(this, {lanes, x0: start, per_ms, nowX: x(now)});
    const seen = Math.max(LABEL, Math.min(width, this.nowX)); // what is not yet is not idle, and neither is what is not known
    drawNames(c, tone, lanes, {from: Math.max(LABEL, Math.min(seen, x(store.since_ms ?? start))), to: seen});
    this.grid(c, tone, start, end, x, width, height);
    const byLane = this.byLane(lanes, start, end, now);
    const trajectory = this.hovered?.trajectory;
    const view = {x, width, per_ms, filtered: Boolean(this.filter), isDimmed: (bar) => (this.filter && !this.filter(bar)) || Boolean(trajectory && bar.trajectory !== trajectory)};
    this.hits = []; this.bands = [];
    c.save(); c.beginPath(); c.rect(LABEL, 0, width - LABEL, height); c.clip();
    for (const {lane, bars} of byLane.values()) for (const hit of (lane.timed ? drawQuota : drawBars)(c, tone, lane, bars, view)) this.hits.push(hit);
    this.marks(c, tone, x);
    c.fillStyle = tone.text; c.fillRect(Math.round(this.nowX) - 1, AXIS - 3, 2, height);
    for (const lane of lanes) {
      if (lane.steps) this.bands.push(...[...lane.steps].reverse().map((step) => stepBand(c, tone, lane, step, x, LABEL, width)).filter(Boolean));
    }
    if (store.restarted_ms && store.restarted_ms > start) {
      c.strokeStyle = tone.fail; c.setLineDash([4, 3]); c.beginPath();
      c.moveTo(x(store.restarted_ms), AXIS); c.lineTo(x(store.restarted_ms), height); c.stroke(); c.setLineDash([]);
    }
    c.restore();
    this.frames += 1;
    const took = performance.now() - began;
    this.drawn = {at: began + took, now: this.now, changes: store.changes, colours: tone, span_ms: this.span_ms, filter: this.filter, hovered: this.hovered, chosen: this.chosen, width: canvas.clientWidth, tall: innerHeight};
    this.spent_ms += took; this.slowest.push(took); if (this.slowest.length > 600) this.slowest.shift();
  }

  // Bars by their lane, as [bar, first unit, units, end]. Those of a quota count a period beyond their end.
  byLane(lanes, start, end, now) {
    const found = new Map(lanes.filter((lane) => !lane.steps).map((lane) => [lane.name, {lane, bars: []}]));
    const longest = Math.max(0, ...lanes.map((lane) => lane.pool?.period || 0));
    for (const bar of store.bars.values()) {
      const until = bar.end ?? now;
      if (until + longest < start || bar.start > end) continue;
      for (const [pool, first, units] of bar.places) {
        const into = found.get(pool);
        if (into && (until >= start || into.lane.timed)) into.bars.push([bar, first, units, until]);
      }
    }
    return found;
  }

  // How long the bar under the pointer has waited, and where the chosen one is.
  marks(c, tone, x) {
    if (!this.hovered && !this.chosen) return;
    for (const [px, y, , tall, bar] of this.hits) {
      if (bar !== this.hovered || bar.queue * this.per_ms < 1) continue;
      const from = x(bar.start - bar.queue);
      c.fillStyle = tone.wait; c.fillRect(from, y + tall / 2 - 1, px - from, 2); c.fillRect(from, y + tall / 2 - 4, 1.5, 8);
    }
    c.strokeStyle = tone.text; c.lineWidth = 2;
    for (const [px, y, wide, tall, bar] of this.hits) if (bar === this.chosen) c.strokeRect(px - 1, y, Math.max(4, wide + 2), tall);
    c.lineWidth = 1;
  }

  grid(c, tone, start, end, x, width, height) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600].map((s) => s * 1000);
    const step = steps.find((each) => (end - start) / each <= (width - LABEL) / 80) || steps.at(-1);
    c.strokeStyle = tone.line; c.fillStyle = tone.dim; c.lineWidth = 1;
    const live = this.end_ms === null, origin = live ? this.now : 0, nowWide = c.measureText("now").width;
    for (let at = origin + Math.ceil((start - origin) / step) * step; at < end; at += step) {
      const px = Math.round(x(at)) + 0.5;
      c.beginPath(); c.moveTo(px, AXIS); c.lineTo(px, height); c.stroke();
      const text = live ? apart(at - origin) : clock(at);
      const wide = c.measureText(text).width, left = px - wide / 2;
      if (left < LABEL || left + wide > width) continue;
      if (left > this.nowX + nowWide || left + wide < this.nowX - nowWide) c.fillText(text, left, 9);
    }
    if (this.nowX < LABEL || this.nowX > width) return;
    c.fillStyle = tone.text; c.font = "600 11px system-ui, sans-serif";
    c.fillText("now", Math.min(this.nowX - nowWide / 2, width - nowWide - 2), 9);
    c.font = "11px system-ui, sans-serif";
  }

  at(px, py) {
    for (let n = this.hits.length - 1; n >= 0; n -= 1) {
      const [left, top, wide, tall, bar] = this.hits[n];
      if (px >= left - 1 && px <= left + wide + 1 && py >= top && py <= top + tall) return bar;
    }
    return null;
  }

  // Goes to the next bar of the row, or to the nearest in time of the next row that has any. What the filter dims is
  // passed over.
  step(across, down) {
    const open = this.hits.filter(([, , , , bar]) => !this.filter || this.filter(bar));
    if (!open.length) return null;
    const here = open.find(([, , , , bar]) => bar === this.chosen);
    let best = here ? null : open.reduce((one, other) => other[0] > one[0] ? other : one);
    if (here && across) {
      for (const each of open) if (each[1] === here[1] && each[4] !== here[4] && across * (each[0] - here[0]) > 0 && (!best || across * (best[0] - each[0]) > 0)) best = each;
    } else if (here) {
      for (const each of open) {
        const far = down * (each[1] - here[1]);
        if (far <= 0) continue;
        const nearer = best && (far - down * (best[1] - here[1]) || Math.abs(each[0] - here[0]) - Math.abs(best[0] - here[0]));
        if (!best || nearer < 0) best = each;
      }
    }
    if (best) this.choose(best[4]);
    return this.chosen;
  }

  choose(bar) { this.chosen = bar; this.options.onchoose?.(bar); }

  listen() {
    const {canvas} = this, tip = document.getElementById("tip");
    let drag = null;
    const hide = () => { tip.style.display = "none"; };
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        return this.holdOrFollow(drag.end - (event.offsetX - drag.x) / this.per_ms);
      }
      const bar = this.at(event.offsetX, event.offsetY);
      canvas.style.cursor = bar ? "pointer" : "crosshair";
      this.hovered = bar;
      const band = bar ? null : this.bands.find(({left, top, right, bottom}) => event.offsetX >= left && event.offsetX <= right && event.offsetY >= top && event.offsetY <= bottom);
      if (!bar && !band) return hide();
      tip.replaceChildren(...(bar ? describe(bar) : [h("b", null, band.step.task), h("div", null, stepText(band.step)), h("div", null, `opened ${clock(band.step.opened)}`)]));
      tip.style.display = "block";
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    canvas.addEventListener("pointerleave", () => { hide(); this.hovered = null; });
    canvas.addEventListener("pointerdown", (event) => { drag = {x: event.offsetX, end: this.now}; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", (event) => {
      const moved = drag && Math.abs(event.offsetX - drag.x) > 3;
      drag = null;
      const bar = moved ? null : this.at(event.offsetX, event.offsetY);
      if (bar) { hide(); this.choose(bar); this.options.onpin?.(bar); }
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, event.offsetX);
    }, {passive: false});
    canvas.addEventListener("dblclick", () => this.fit());
    const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
      if (arrows[event.key]) this.step(...arrows[event.key]);
      else if (event.key === "Enter" && this.chosen) this.options.onopen?.(this.chosen);
      else return;
      event.preventDefault(); event.stopPropagation();
    });
  }

  fit() { this.span_ms = SPAN_MS; this.follow(); }

  zoom(factor, px) {
    const span = Math.min(SPAN_MAX_MS, Math.max(SPAN_MIN_MS, this.span_ms * factor));
    if (this.end_ms !== null && px !== undefined) {
      const at = this.x0 + (px - LABEL) / this.per_ms; // stays under the pointer
      this.end_ms = at + (this.end_ms - at) * span / this.span_ms;
    }
    this.span_ms = span;
    this.onview();
  }
}

// How far from now, as on an axis: -45 s, -1:45, +10 s.
function apart(ms) {
  const s = Math.round(Math.abs(ms) / 1000), sign = ms < 0 ? "−" : "+";
  return s < 60 ? `${sign}${s} s` : `${sign}${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
}
