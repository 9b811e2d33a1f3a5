// Elements, numbers and colours. All text goes through textContent: nothing of the gateway is ever read as HTML.

export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") el.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) el.style.setProperty(key, each);
    else if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name in el && name !== "list" && name !== "role") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  add(el, children);
  return el;
}

function add(el, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(el, child);
    else if (child !== undefined && child !== null && child !== false) el.append(child);
  }
}

export const fill = (el, ...children) => { el.replaceChildren(); add(el, children); return el; };
export const panel = (title, about, ...children) =>
  h("section", {class: "panel"}, h("div", {class: "h"}, h("h2", null, title), h("span", null, about)), ...children);
export const link = (href, text, props) => h("a", {href, class: "link", ...props}, text);

// Replaces what is shown only when it differs: nothing jumps under the pointer, and an idle page costs nothing.
const drawn = new WeakMap();
export function fillIfNew(el, key, make) {
  const text = JSON.stringify(key);
  if (drawn.get(el) === text) return;
  drawn.set(el, text);
  fill(el, ...[make()].flat());
}

// Numbers, with their units each time.

export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms <= 0) return "0";
  if (ms < 1) return "<1 ms";
  if (ms < 995) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")}`;
  const minutes = Math.floor(whole / 60);
  if (whole < 86400) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")}`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24}`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count, unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (value >= 1000 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100000) return `${Math.round(value / 1000)} k`;
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

export function share(part) {
  const percent = 100 * part;
  return percent > 0 && percent < 0.1 ? "<0.1 %" : `${percent < 10 ? Number(percent.toFixed(1)) : Math.round(percent)} %`;
}

export function age(at_ms, now_ms) {
  const ms = now_ms - at_ms;
  if (ms > 86400e3) return new Date(at_ms).toLocaleDateString();
  return ms < 1500 ? "now" : `${duration(ms)} ago`;
}

export const clock = (at_ms) => new Date(at_ms).toLocaleTimeString([], {hour12: false});

// A cause of waiting in the fewest words.
export function causeText(cause) {
  const [kind, , text] = cause;
  const known = {trajectory: "an earlier action", turn: "its turn"};
  return known[kind] || text.replace(/(\d+) bytes/g, (_, number) => bytes(Number(number)))
    .replace(/(\d+) of cpu\b/g, (_, many) => `${many} core${many === "1" ? "" : "s"}`).replace(/(\d+) of gpu\b/g, (_, many) => many === "1" ? "1 device" : `${many} devices in one chunk`);
}

// Functions keep their colours: the first six that ran have hues, all others share one; two letters say it without.

const HUES = ["blue", "amber", "teal", "plum", "sky", "ink"];
let order = [];
export function setFunctions(seen, names) { // as the gateway saw them first; what never ran comes after, by name
  const known = new Set(names), first = seen.filter((name) => known.has(name));
  order = [...new Set([...first, ...[...names].sort()])];
}
export function hue(name) {
  const index = order.indexOf(name);
  return index >= 0 && index < HUES.length ? HUES[index] : "slate";
}
export const letters = (name) => {
  const parts = name.split(/[_\-.:@]/).filter(Boolean);
  return (parts.length > 1 ? parts[0][0] + parts[1][0] : name.slice(0, 2)).toLowerCase();
};
export const swatch = (name) => h("i", {class: `sw c-${hue(name)}`});

// Hues as the canvas needs them; read again when the theme changes.
let palette = null;
export function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement);
  palette = Object.fromEntries(["bg", "panel", "sunk", "line", "text", "dim", "fail", "wait", ...HUES, "slate"]
    .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return palette;
}
export function forgetColours() { palette = null; }

// A text of a canvas, cut to what there is room for.
export function fit(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let cut = text;
  while (cut && c.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return cut ? `${cut}…` : "";
}

export const STATES = {queued: "◌", running: "▶", succeeded: "✓", failed: "✕", timed_out: "✕", cancelled: "–", lost: "✕"};
export const stateSign = (state) =>
  h("span", {class: `st st-${state}`, title: state, "aria-label": state}, STATES[state] || "?");

// Copies, and says so where the button was.
export const copied = (text, button) => navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; });

export function confirmed(question, verb) {
  const ask = document.getElementById("ask");
  return new Promise((resolve) => {
    const done = (answer) => { ask.close(); resolve(answer); };
    fill(ask, h("p", null, question), h("p", {class: "bar1"},
      h("button", {class: "pri", onclick: () => done(true)}, verb), h("button", {onclick: () => done(false)}, "Leave it")));
    ask.oncancel = () => resolve(false);
    ask.showModal();
  });
}

export function problem(error, again) {
  return h("div", {class: "problem", role: "alert"}, h("b", null, error.title || "It could not be read"), " ",
    h("span", null, error.message), error.status ? h("span", {class: "dim"}, ` (${error.status} ${error.code || ""})`) : null,
    again ? h("button", {onclick: again}, "Try again") : null);
}
