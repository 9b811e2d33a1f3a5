// A log, live: all lines are kept (within a bound), only those in sight are in the page.

import {pieces} from "./ansi.js";
import {bytes, clock, count, h} from "./dom.js";
import {lines, store} from "./net.js";

const LINE_PX = 18, LINES_MAX = 200000, BYTES_MAX = 64 * 2 ** 20, LINE_CHARS = 4000;
const RETRY_S = [1, 2, 4, 8, 15];

export class LogView {
  constructor(id) {
    this.id = id;
    this.page = `/ui/invocations/${id}`;
    this.base = `/v1/invocations/${encodeURIComponent(id)}/logs`;
    this.path = `${this.base}?follow=true`;
    this.rows = []; // [text, stream, style at its begin, time]
    this.size = 0; this.cut = 0; this.next = 0; this.following = true; this.open = {}; this.style = {};
    this.sizer = h("div", {class: "sizer"});
    this.lines = h("div", {class: "lines"});
    this.box = h("div", {class: "log mono", tabIndex: 0, role: "log", "aria-label": "Log"}, this.sizer, this.lines);
    this.status = h("span", {class: "dim", role: "status"}, "opening");
    this.find = h("input", {class: "filter", placeholder: "search what is loaded", "aria-label": "Search the log", onkeydown: (event) => event.key === "Enter" && this.search()});
    this.times = h("button", {"aria-pressed": "false", title: "When each line was said", onclick: () => {
      this.timed = !this.timed; this.times.setAttribute("aria-pressed", String(this.timed)); this.draw();
    }}, "times");
    this.button = h("button", {hidden: true, onclick: () => this.follow()}, "↓ follow");
    this.keep = h("button", {title: "The log so far, as it was written, as a file", onclick: () => this.save()}, "Save");
    this.panel = h("section", {class: "panel logpanel"}, h("div", {class: "h"}, h("h2", null, "Log"), h("span", {class: "bar1"}, this.status, this.button, this.times, this.keep, this.find)), this.box);
    this.box.addEventListener("scroll", () => {
      const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 2 * LINE_PX;
      if (!this.drawing && atEnd !== this.following) { this.following = atEnd; this.button.hidden = atEnd; }
      this.draw();
    });
    this.resized = new ResizeObserver(() => this.draw());
  }

  start() { this.controller = new AbortController(); this.resized.observe(this.box); this.run(); }
  stop() { this.controller?.abort(); clearTimeout(this.timer); this.resized.disconnect(); }
  // Goes to a line by its number as soon as it is there.
  reach(number) { this.wanted = number; this.later(); }

  follow() { this.following = true; this.button.hidden = true; this.later(); }

  async run(tries = 0) {
    this.status.textContent = this.rows.length ? "live" : "waiting for the first line";
    let ended = false;
    try {
      for await (const line of lines(`${this.path}&offset=${this.next}`, this.controller.signal)) {
        if (!line) continue;
        tries = 0;
        ended = this.take(JSON.parse(line));
      }
    } catch (error) {
      if (this.controller.signal.aborted) return;
      if (error.status === 404) { this.status.textContent = "there is no log"; return; }
    }
    if (ended || this.controller.signal.aborted) return;
    const wait_s = RETRY_S[Math.min(tries, RETRY_S.length - 1)];
    this.status.textContent = `cut; again in ${wait_s} s, from record ${this.next}`;
    this.timer = setTimeout(() => this.run(tries + 1), 1000 * wait_s);
  }

  take(record) {
    if (record.stream === "heartbeat") return false;
    if (record.stream === "eof") {
      for (const stream of Object.keys(this.open)) this.flush(stream);
      this.status.textContent = this.rows.length ? `ended, ${this.told()}` : "it said nothing";
      this.next = record.offset ?? this.next;
      this.later();
      return true;
    }
    if (record.next_offset !== undefined) { this.add(`… ${record.data}`, "mark", record.time); this.next = record.next_offset; return false; }
    if (record.offset !== undefined) this.next = record.offset + 1;
    if (["truncated", "dropped", "expired"].includes(record.stream)) { this.add(`… ${record.data || record.stream}`, "mark", record.time); return false; }
    const parts = ((this.open[record.stream] || "") + record.data).split(/\r?\n/);
    this.open[record.stream] = parts.pop();
    if (record.stream === "system" || record.stream === "log") { parts.push(this.open[record.stream]); delete this.open[record.stream]; }
    for (const text of parts) this.add(text, record.stream, record.time);
    this.later();
    return false;
  }

  flush(stream) { if (this.open[stream]) this.add(this.open[stream], stream, null); delete this.open[stream]; }

  add(text, stream, time) {
    const kept = text.length > LINE_CHARS ? `${text.slice(0, LINE_CHARS)} … ${bytes(text.length - LINE_CHARS)} more` : text;
    const begun = this.style[stream];
    this.style[stream] = kept.includes("\x1b[") ? pieces(kept, begun)[1] : begun;
    this.rows.push([kept, stream, begun, time]);
    this.size += kept.length;
    if (this.rows.length > LINES_MAX || this.size > BYTES_MAX) {
      const gone = this.rows.splice(0, Math.max(1000, this.rows.length - LINES_MAX));
      this.cut += gone.length;
      for (const row of gone) this.size -= row[0].length;
    }
  }

  told() { const many = this.rows.length + this.cut; return `${count(many)} line${many === 1 ? "" : "s"}`; }

  later() { if (!this.pending) { this.pending = true; requestAnimationFrame(() => { this.pending = false; this.draw(); }); } }

  draw() {
    this.drawing = true;
    const held = Object.entries(this.open).filter(([, text]) => text).map(([stream, text]) => [text, stream, this.style[stream], null]);
    const total = this.rows.length + held.length, tall = total * LINE_PX;
    if (this.sizer.dataset.tall !== String(tall)) { this.sizer.dataset.tall = String(tall); this.sizer.style.height = `${tall}px`; }
    if (this.following) this.box.scrollTop = tall;
    if (this.wanted > this.cut && this.wanted <= this.cut + this.rows.length) {
      this.found = this.wanted - 1 - this.cut; this.following = false; this.button.hidden = false;
      this.box.scrollTop = Math.max(0, this.found * LINE_PX - this.box.clientHeight / 2);
      this.wanted = 0;
    }
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE_PX) - 10), last = Math.min(total, first + Math.ceil(this.box.clientHeight / LINE_PX) + 20);
    const shown = [];
    for (let at = first; at < last; at += 1) {
      const [text, stream, style, time] = at < this.rows.length ? this.rows[at] : held[at - this.rows.length];
      shown.push(h("div", {class: `line s-${stream}${at === this.found ? " found" : ""}`, title: time ? `${stream}, ${time}` : stream}, h("a", {class: "no", href: `${this.page}#log:${at + 1 + this.cut}`, title: "A link to this line"}, String(at + 1 + this.cut)),
        this.timed ? h("span", {class: "when"}, time ? clock(Date.parse(time)) : "") : null,
        h("span", {class: "tx"}, ...pieces(text, style)[0].map(([piece, names]) => names ? h("span", {class: names}, piece) : piece))));
    }
    this.lines.style.transform = `translateY(${first * LINE_PX}px)`;
    this.lines.replaceChildren(...shown);
    if (this.rows.length && !this.status.textContent.startsWith("ended") && store.status === "live") this.status.textContent = this.told();
    requestAnimationFrame(() => { this.drawing = false; });
  }

  // The whole log so far, also what was cut here, as it was written.
  async save() {
    const parts = [];
    this.keep.disabled = true;
    try {
      for await (const line of lines(this.base)) {
        const record = line ? JSON.parse(line) : {};
        if (record.stream === "heartbeat" || record.stream === "eof" || !record.data) continue;
        parts.push(record.stream === "stdout" || record.stream === "stderr" ? record.data : `[${record.stream}] ${record.data}\n`);
      }
      const address = URL.createObjectURL(new Blob(parts, {type: "text/plain"}));
      h("a", {href: address, download: `${this.id}.log`}).click();
      setTimeout(() => URL.revokeObjectURL(address), 60000);
    } catch (error) { this.status.textContent = `it could not be saved: ${error.message}`; }
    this.keep.disabled = false;
  }

  search() {
    const wanted = this.find.value.toLowerCase();
    if (!wanted) return;
    const from = (this.found ?? -1) + 1;
    for (let step = 0; step < this.rows.length; step += 1) {
      const at = (from + step) % this.rows.length;
      if (this.rows[at][0].toLowerCase().includes(wanted)) {
        this.found = at; this.following = false; this.button.hidden = false;
        this.box.scrollTop = Math.max(0, at * LINE_PX - this.box.clientHeight / 2);
        return this.draw();
      }
    }
    this.status.textContent = `"${this.find.value.slice(0, 30)}" is not in what is loaded`;
  }
}
