// Steps of tasks, as their trainers told of them.

import {count, duration, fit, h} from "./dom.js";
import {store} from "./net.js";

const STEP_ROWS = 3;

// The steps of each task, that opened last first.
export function stepsByTask(steps) {
  const found = new Map();
  for (const [name, [expected, living, ended, opened, end, expectedEnd, waiting]] of Object.entries(steps || {})) {
    const at = name.lastIndexOf("/"), task = name.slice(0, at);
    if (!found.has(task)) found.set(task, []);
    found.get(task).push({task, number: name.slice(at + 1), expected, living, ended, opened, end, expectedEnd, waiting});
  }
  for (const each of found.values()) each.sort((one, other) => other.opened - one.opened);
  return found;
}

export function stepText(step) {
  const ends = endText(step);
  return `${stateText(step)}${ends ? `, ${ends}` : ""}`;
}

function stateText(step) {
  const done = step.expected === null ? `${count(step.ended)} ended` : `${count(step.ended)} of ${count(step.expected)}`;
  return `step ${step.number}: ${done}, ${step.end === null ? `${count(step.living)} living${step.waiting ? `, ${count(step.waiting)} waiting` : ""}` : `took ${duration(step.end - step.opened)}`}`;
}

const endText = (step) => step.end !== null || step.expectedEnd === null ? "" : `ends in ~${duration(Math.max(1000, step.expectedEnd - store.now()))}`;

// Milliseconds until the first expected end of a step that goes on; null where nothing is expected.
export function expectedSpan(steps, now) {
  let found = null;
  for (const [, , , , end, expectedEnd] of Object.values(steps || {})) {
    if (end === null && expectedEnd !== null) found = Math.min(found ?? Infinity, Math.max(0, expectedEnd - now));
  }
  return found;
}

// Gives each step the first row in which nothing else goes on, and returns how many there are, three at most.
export function stepRows(steps) {
  const ends = [];
  for (const step of [...steps].reverse()) {
    const free = ends.findIndex((end) => end <= step.opened);
    step.row = free >= 0 ? free : Math.min(ends.length, STEP_ROWS - 1);
    ends[step.row] = step.end ?? Infinity;
  }
  return Math.max(1, ends.length);
}

// The band of a step, from its opening to its end or now, with its share that has ended along its foot; from now on to
// the end that is expected it is hatched in a dashed outline. Returns where it is and what it says; null if out of sight.
export function stepBand(c, tone, lane, step, x, left, width) {
  const goesOn = step.end === null, top = lane.top + step.row * lane.rowHeight, tall = lane.rowHeight - 1, middle = top + tall / 2 - 1;
  const right = x(step.end ?? store.now()), begin = Math.max(left, x(step.opened)), end = Math.min(width, right);
  const expected = goesOn && step.expectedEnd !== null ? Math.max(right, x(step.expectedEnd)) : right;
  if (expected < left || begin > width) return null;
  const wide = Math.max(2, end - begin), share = step.expected === null ? 1 : Math.min(1, step.ended / step.expected);
  c.globalAlpha = 0.3; c.fillStyle = tone.plum; c.fillRect(begin, top, wide, tall);
  c.globalAlpha = 0.75; c.fillRect(begin, top + tall - 3, wide * share, 3);
  c.globalAlpha = 1; c.strokeStyle = tone.plum; c.lineWidth = 1; c.strokeRect(begin + 0.5, top + 0.5, wide - 1, tall - 1);
  const ends = right <= width ? endText(step) : "", endsWide = ends ? c.measureText(ends).width : 0;
  let text = right <= width ? stateText(step) : stepText(step), told = "";
  const from = Math.max(left, right), to = Math.min(width, expected);
  if (ends) {
    if (to - from > 1) stepAhead(c, tone, from, top, to, tall, expected <= width);
    // Beside its end, where it is in sight and there is room, else in what is hatched, else after what the band says.
    const beside = to + 6 + endsWide < width ? to + 6 : to - from > endsWide + 10 ? from + 5 : null;
    if (beside === null) text = stepText(step);
    else {
      told = ends;
      label(c, tone, ends, beside, middle, endsWide, beside < to);
    }
  }
  // What goes on is told whole, over what ended before it if its band is too short yet.
  if (!goesOn) text = fit(c, text, wide - 8);
  const long = c.measureText(text).width, at = Math.max(left + 4, Math.min(begin + 4, (told ? end : width) - long - 4));
  label(c, tone, text, at, middle, long, at < begin || at + long > end);
  return {step, text: told ? `${text}, ${told}` : text, left: begin, top, right: to, bottom: top + tall, expected};
}

function label(c, tone, text, at, middle, wide, backed) {
  if (backed) { c.globalAlpha = 0.85; c.fillStyle = tone.panel; c.fillRect(at - 3, middle - 6, wide + 6, 13); c.globalAlpha = 1; }
  c.fillStyle = tone.text; c.fillText(text, at, middle);
}

function stepAhead(c, tone, from, top, to, tall, inSight) {
  c.save();
  c.beginPath(); c.rect(from, top, to - from, tall); c.clip();
  c.strokeStyle = tone.plum; c.globalAlpha = 0.7; c.lineWidth = 1; c.beginPath();
  for (let px = from - tall; px < to; px += 6) { c.moveTo(px, top + tall); c.lineTo(px + tall, top); }
  c.stroke();
  c.restore();
  c.strokeStyle = tone.text; c.setLineDash([4, 3]); c.beginPath();
  c.moveTo(from, top + 0.5); c.lineTo(to, top + 0.5); c.moveTo(from, top + tall - 0.5); c.lineTo(to, top + tall - 0.5); c.stroke(); c.setLineDash([]);
  if (inSight) { c.fillStyle = tone.text; c.fillRect(to - 1, top - 1, 2, tall + 2); }
}

export function stepRow(step) {
  const share = step.expected === null ? 0 : Math.min(1, step.ended / step.expected);
  return h("div", {class: "step", "data-step": step.number}, h("span", {class: "p"}, h("i", {class: "c-plum", style: {width: `${100 * share}%`}})), h("span", null, stepText(step)));
}

// Changes every two seconds while a step has an expected end, which comes nearer though nothing is told anew.
export const stepsTick = () => Object.values(store.d.steps || {}).some((each) => each[4] === null && each[5] !== null) && Math.floor(store.now() / 2000);
