// Bars in words: one, those that are seen as a table, the legend, and the filter.

import {clock, duration, h, hue, letters, link} from "./dom.js";
import {isFailed} from "./lanes.js";
import {store} from "./net.js";
import {stepsByTask, stepText} from "./steps.js";

const ROW_MIN = 8, ROW_MAX = 24, AROUND_PX = 330; // a row, and all of the view that is no row

export function describe(bar) {
  const rows = [[stateText(bar), duration((bar.end ?? store.now()) - bar.start)], ["queue", duration(bar.queue)],
    ...(bar.end === null ? [] : [["overhead", duration(bar.prep)], ["execution", duration(bar.end - bar.start - bar.prep)]])];
  return [h("b", null, bar.fn), h("div", null, `${bar.task}${bar.trajectory ? ` · ${bar.trajectory}` : ""}`),
    ...rows.map(([name, value]) => h("div", null, `${name} `, h("b", null, value))),
    h("div", {class: "mono"}, bar.id), h("div", {class: "mono"}, placesText(bar))];
}

const stateText = (bar) => isFailed(bar) ? `✕ ${bar.reason}` : bar.end === null ? "running" : bar.reason || "ended";
const placesText = (bar) => bar.places.map(([pool, first, units]) => first < 0 ? `${pool} ×${units}` : `${pool} ${first}${units > 1 ? `–${first + units - 1}` : ""}`).join("  ");

// A bar in words, for who hears it.
export function spoken(bar) {
  const took = duration((bar.end ?? store.now()) - bar.start);
  return `${bar.fn}, ${stateText(bar).replace("✕", "failed:")}, ${took}, after ${duration(bar.queue)} of waiting; task ${bar.task}${bar.trajectory ? `, trajectory ${bar.trajectory}` : ""}; ${placesText(bar)}; began ${clock(bar.start)}`;
}

export const heightOf = (rows) => Math.max(ROW_MIN, Math.min(ROW_MAX, Math.floor((innerHeight - AROUND_PX) / Math.max(1, rows))));

function barTable(bars, linked) {
  return h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null,
    ...["Function", "Task", "Trajectory", "Start", "Queue", "Overhead", "Execution", "End"].map((each) => h("th", null, each)))),
  h("tbody", null, ...bars.map((bar) => h("tr", null,
    h("td", null, linked ? link(`/ui/invocations/${bar.id}`, bar.fn) : bar.fn), h("td", null, bar.task), h("td", null, bar.trajectory || "–"),
    h("td", null, clock(bar.start)), h("td", null, duration(bar.queue)), h("td", null, bar.end === null ? "–" : duration(bar.prep)),
    h("td", null, bar.end === null ? "–" : duration(bar.end - bar.start - bar.prep)), h("td", null, bar.end === null ? "runs" : bar.reason ? `✕ ${bar.reason}` : "✓"))))));
}

// The bars of the picture that the filter lets through, newest first, with the steps; `linked` to their records.
export function tableOf(timeline, linked) {
  const seen = (bar) => bar.start < timeline.now && (bar.end ?? Infinity) > timeline.now - timeline.span_ms;
  const bars = [...store.bars.values()].filter((bar) => seen(bar) && (!timeline.filter || timeline.filter(bar))).slice(-200).reverse();
  const steps = [...stepsByTask(store.d.steps)].flatMap(([task, each]) => each.map((step) => `${task}, ${stepText(step)}`));
  return [h("ul", null, ...steps.map((step) => h("li", null, step))), barTable(bars, linked)];
}

export function legendOf() {
  const names = [...new Set([...store.bars.values()].slice(-2000).map((bar) => bar.fn))].slice(0, 8);
  return h("div", {class: "leg"}, ...names.map((name) => h("span", null, h("i", {class: `sw c-${hue(name)}`}), `${letters(name)} ${name}`)),
    h("span", null, "lower half pale: overhead"), h("span", null, "outlined ✕: failed"), h("span", null, "low columns: many short ones, by the time that they took"));
}

const unitsOf = (bar) => Math.max(0, ...bar.places.map(([, , units]) => units), ...Object.values(bar.places.reduce((sums, [pool, , units]) => ({...sums, [pool]: (sums[pool] || 0) + units}), {})));

function milliseconds(text) {
  const [, number, unit] = /^([\d.]+)(ms|s|m|h)?$/.exec(text) || [];
  return number === undefined ? NaN : Number(number) * ({ms: 1, m: 60e3, h: 3600e3}[unit] || 1000);
}

function testOf(word) {
  const [name, value] = word.split(/:(.*)/), least = milliseconds(value || "");
  if (word === "failed") return isFailed;
  if (name === "fn" && value) return (bar) => bar.fn.includes(value);
  if (name === "task" && value) return (bar) => bar.task.includes(value);
  if (name === "traj" && value) return (bar) => (bar.trajectory || "").includes(value);
  if (name === "reason" && value) return (bar) => (bar.reason || "").includes(value);
  if (name === "wider" && Number(value) >= 0) return (bar) => unitsOf(bar) > Number(value);
  if (name === "longer" && least >= 0) return (bar) => (bar.end ?? store.now()) - bar.start > least;
  return (bar) => bar.fn.includes(word) || bar.task.includes(word) || (bar.trajectory || "").includes(word);
}

// What a line of words lets through; null where it is empty.
export function barFilter(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map(testOf);
  return tests.length ? (bar) => tests.every((test) => test(bar)) : null;
}
