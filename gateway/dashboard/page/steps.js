// Steps of tasks, as their trainers told of them.

import {count, duration, h} from "./dom.js";
import {store} from "./net.js";

// The steps of each task, that opened last first.
export function stepsByTask(steps) {
  const found = new Map();
  for (const [name, [expected, living, ended, opened, end, expectedEnd]] of Object.entries(steps || {})) {
    const at = name.lastIndexOf("/"), task = name.slice(0, at);
    if (!found.has(task)) found.set(task, []);
    found.get(task).push({task, number: name.slice(at + 1), expected, living, ended, opened, end, expectedEnd});
  }
  for (const each of found.values()) each.sort((one, other) => other.opened - one.opened);
  return found;
}

export function stepText(step) {
  const done = step.expected === null ? `${count(step.ended)} ended` : `${count(step.ended)} of ${count(step.expected)}`;
  if (step.end !== null) return `step ${step.number}: ${done}, took ${duration(step.end - step.opened)}`;
  const ends = step.expectedEnd === null ? "" : `, ends in ~${duration(Math.max(1000, step.expectedEnd - store.now()))}`;
  return `step ${step.number}: ${done}, ${count(step.living)} living${ends}`;
}

export function stepRow(step) {
  const share = step.expected === null ? 0 : Math.min(1, step.ended / step.expected);
  return h("div", {class: "step", "data-step": step.number}, h("span", {class: "p"}, h("i", {class: "c-plum", style: {width: `${100 * share}%`}})), h("span", null, stepText(step)));
}

// Changes every two seconds while a step has an expected end, which comes nearer though nothing is told anew.
export const stepsTick = () => Object.values(store.d.steps || {}).some((each) => each[4] === null && each[5] !== null) && Math.floor(store.now() / 2000);
