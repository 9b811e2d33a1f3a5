// Lanes of the timeline: which rows there are, and what is drawn in each.

import {count, duration, fit, hue, letters} from "./dom.js";
import {store} from "./net.js";
import {stepRows, stepsByTask} from "./steps.js";

export const LABEL = 92;
export const AXIS = 20;
const GAP = 8, STEP_ROW = 15, MIN_LETTERS = 24, CROSS_PX = 9, TICK_PX = 3, NUMBERED_FROM = 11;

export const isFailed = (bar) => Boolean(bar.reason) && bar.reason !== "cancelled";

// Of each pool a row a unit where units have numbers (devices by node), else as many as run side by side at most.
function poolLanes(pools) {
  const found = [];
  for (const [name, pool] of Object.entries(pools)) {
    if (pool.regions) {
      const regions = Object.entries(pool.regions);
      for (const [node, [, devices, kind]] of regions) found.push({name: `${name}:${node}`, title: regions.length > 1 ? `${name} ${node}` : name, about: kind === "cpu" ? `${count(devices)} × CPU` : deviceCount(devices), pool, rows: devices, numbered: true});
    } else if (pool.timed) found.push({name, title: name, about: `${count(pool.total)} in ${duration(pool.period)}`, pool, rows: 2, timed: true});
    else {
      const numbered = Boolean(pool.cells) && pool.kind === "cpu";
      found.push({name, title: numbered && pool.node ? pool.node : name, about: `${count(pool.total)} ${numbered ? cores(pool.total) : pool.kind}`, pool, rows: Math.max(1, numbered ? pool.total : Math.min(8, pool.total)), numbered});
    }
  }
  return found;
}

export const deviceCount = (many, kind) => `${count(many)} ${kind === "cpu" ? "CPU " : ""}device${many === 1 ? "" : "s"}`;
export const cores = (many) => many === 1 ? "core" : "cores";

// All lanes from the top, steps of tasks first, side by side where they overlap; and how tall they are together.
// `heightOf` says how tall a row is where there are so many.
export function lanesOf(pools, steps, heightOf) {
  const lanes = poolLanes(pools), rowHeight = heightOf(lanes.reduce((sum, lane) => sum + lane.rows, 0)), tall = Math.max(rowHeight, STEP_ROW);
  const bands = [...stepsByTask(steps)].map(([name, told]) => ({name, title: name, steps: told, rows: stepRows(told), rowHeight: Math.min(tall, 18)}));
  let top = AXIS;
  for (const lane of [...bands, ...lanes]) {
    lane.rowHeight ??= rowHeight;
    Object.assign(lane, {top, height: lane.timed ? Math.max(26, 2 * rowHeight) : lane.rows * lane.rowHeight});
    top += lane.height + (lane.steps ? GAP / 2 : GAP);
  }
  return [[...bands, ...lanes], top];
}

// What is narrower than a pixel, as the share of each column that it took: its height, in the colour of what took most.
class Density {
  constructor(width) { this.width = width; this.rows = new Map(); }

  add(row, left, right, name, dimmed) {
    let found = this.rows.get(row);
    if (!found) this.rows.set(row, found = {share: new Float32Array(this.width), most: new Float32Array(this.width), tone: new Array(this.width).fill("")});
    const end = Math.max(right, left + 0.02);
    for (let column = Math.max(0, Math.floor(left)); column < end && column < this.width; column += 1) {
      const part = Math.min(column + 1, end) - Math.max(column, left);
      found.share[column] += part;
      if (part > found.most[column]) { found.most[column] = part; found.tone[column] = dimmed ? `${name}-` : name; }
    }
  }

  // Rectangles by tone: neighbours as tall as each other and of one tone are one.
  draw(lane, into) {
    for (const [row, {share, tone}] of this.rows) {
      const foot = lane.top + (row + 1) * lane.rowHeight - 0.5, tall = lane.rowHeight - 1;
      let begun = -1, was = 0, of = "";
      for (let column = 0; column <= this.width; column += 1) {
        const height = column < this.width && share[column] > 0 ? Math.max(1, Math.round(tall * Math.min(1, share[column]))) : 0;
        if (height === was && tone[column] === of) continue;
        if (was) into(of, [begun, foot - was, column - begun, was]);
        begun = column; was = height; of = tone[column];
      }
    }
  }
}

// Bars of one lane. Returns where each is: [left, top, width, height, bar].
export function drawBars(c, tone, lane, bars, {x, width, per_ms, isDimmed}) {
  const free = new Array(lane.rows).fill(-1), density = new Density(Math.ceil(width));
  const groups = new Map(), pale = [], failed = [], named = [], hits = [], columns = new Map();
  const into = (key, rect) => { if (!groups.has(key)) groups.set(key, []); groups.get(key).push(rect); };
  for (const [bar, first, units, until] of bars) {
    const left = x(bar.start), right = x(until);
    let row = first, tall = units;
    if (!lane.numbered || first < 0) { // side by side, where units have no numbers
      row = free.findIndex((each) => each <= left + 0.01);
      if (row < 0) row = lane.rows - 1;
      free[row] = right; tall = 1;
    }
    if (row >= lane.rows) continue;
    const px = Math.max(LABEL, left), y = lane.top + row * lane.rowHeight + 0.5, tallPx = tall * lane.rowHeight - 1, bad = isFailed(bar);
    const dimmed = isDimmed(bar), name = hue(bar.fn);
    if (right - left < 1) {
      for (let at = row; at < Math.min(lane.rows, row + tall); at += 1) density.add(at, px, right, name, dimmed);
      const column = Math.floor(px / 3); // a mark for each few of what failed, and something to point at
      if (bad && columns.get(`x${row}`) !== column) { columns.set(`x${row}`, column); failed.push([px - 1, y, 3, tallPx, dimmed]); }
      if (columns.get(row) === column && !bad) continue;
      columns.set(row, column);
      hits.push([px, y, 1, tallPx, bar]);
      continue;
    }
    const wide = Math.max(right - px - (right - px > 3 ? 1 : 0), 1);
    into(dimmed ? `${name}-` : name, [px, y, wide, tallPx]);
    if (bar.prep * per_ms > 2) pale.push([px, y + tallPx / 2, Math.min(wide, bar.prep * per_ms), tallPx / 2]);
    if (bad) failed.push([px, y, wide, tallPx, dimmed]);
    if (wide > MIN_LETTERS && tallPx >= 9) named.push([px, y, wide, tallPx, bar, tall, name]);
    hits.push([px, y, wide, tallPx, bar]);
  }
  density.draw(lane, into);
  fillGroups(c, tone, groups, pale);
  for (const [px, y, wide, tall, bar, units, name] of named) {
    c.fillStyle = onColour(name, tone);
    const short = `${letters(bar.fn)}${units > 1 ? `×${units}` : ""}`, long = `${bar.fn}${units > 1 ? ` ×${units}` : ""}${wide > 190 && bar.trajectory ? `  ${bar.trajectory}` : ""}`;
    const text = wide > 90 ? fit(c, long, wide - 6) : short;
    if (wide > 90 || c.measureText(text).width <= wide - 6) c.fillText(text, px + 4, y + tall / 2);
  }
  for (const each of failed) cross(c, tone, ...each);
  c.globalAlpha = 1; c.lineWidth = 1;
  return hits;
}

function fillGroups(c, tone, groups, pale) {
  for (const [key, list] of groups) {
    c.globalAlpha = key.endsWith("-") ? 0.22 : 1;
    c.fillStyle = tone[key.replace("-", "")];
    for (const [px, y, wide, tall] of list) c.fillRect(px, y, wide, tall);
  }
  c.fillStyle = tone.panel; c.globalAlpha = 0.45;
  for (const [px, y, wide, tall] of pale) c.fillRect(px, y, wide, tall);
  c.globalAlpha = 1;
}

const onColour = (name, tone) => name === "amber" || name === "sky" || name === "slate" || tone.bg < "#8" ? "#0E1116" : "#FFFFFF";

function cross(c, tone, px, y, wide, tall, dimmed) {
  c.globalAlpha = dimmed ? 0.22 : 1;
  c.fillStyle = c.strokeStyle = tone.fail;
  if (wide < 6) { c.fillRect(px, y, Math.max(wide, 2), Math.min(4, tall)); return; }
  c.lineWidth = 1.5; c.strokeRect(px + 0.5, y + 0.5, wide - 1, tall - 1);
  const size = Math.min(8, tall - 2), right = px + wide;
  c.fillRect(right - size - 2, y, size + 2, size + 2);
  saltire(c, tone.panel, right - size, y + 2, size - 2);
}

function saltire(c, colour, left, top, size) {
  c.strokeStyle = colour; c.lineWidth = 1.3; c.beginPath();
  c.moveTo(left, top); c.lineTo(left + size, top + size); c.moveTo(left + size, top); c.lineTo(left, top + size); c.stroke();
}

// A quota: what is used of the window as an area, a tick at its foot for each call, a cross above it where one failed.
export function drawQuota(c, tone, lane, bars, {x, width, isDimmed, filtered}) {
  const hits = [], foot = lane.top + lane.height - TICK_PX - 1, tall = lane.height - TICK_PX - CROSS_PX - 2;
  const limit = lane.pool.total, names = new Map();
  c.strokeStyle = tone.line; c.beginPath(); c.moveTo(LABEL, foot - tall + 0.5); c.lineTo(Math.min(width, x(store.now())), foot - tall + 0.5); c.stroke();
  c.beginPath(); c.moveTo(LABEL, foot);
  let used = 0, px = LABEL, most = 0;
  const until = Math.min(width, x(store.now())), y = (units) => foot - tall * Math.min(1, Math.max(0, units) / limit);
  for (const [at, change] of windowOf(lane, bars)) {
    const to = x(at), next = Math.max(LABEL, Math.min(until, to));
    if (to <= LABEL) { used += change; most = used; continue; } // before what is shown
    if (next - px >= 0.5) { // no more than that many points a pixel: the most that was used in it, then what was in the end
      c.lineTo(px, y(most)); c.lineTo(px + 0.5, y(most)); c.lineTo(px + 0.5, y(used)); c.lineTo(next, y(used));
      px = next; most = used;
    }
    used += change; most = Math.max(most, used);
    if (next >= until) break;
  }
  c.lineTo(px, y(used)); c.lineTo(until, y(used)); c.lineTo(until, foot);
  for (const [bar] of bars) names.set(bar.fn, (names.get(bar.fn) || 0) + 1);
  const name = [...names].sort((one, other) => other[1] - one[1])[0]?.[0];
  c.fillStyle = tone[name ? hue(name) : "slate"]; c.globalAlpha = filtered ? 0.3 : 0.75; c.fill(); c.globalAlpha = 1;
  let last = -1, lastCross = -9;
  for (const [bar] of bars) {
    const at = x(bar.start), bad = isFailed(bar);
    if (at < LABEL - 2 || at > width) continue;
    if (bad && at - lastCross >= 5) { c.globalAlpha = isDimmed(bar) ? 0.22 : 1; saltire(c, tone.fail, at - 3, lane.top + 1, 6); lastCross = at; }
    if (Math.floor(at) === last && !bad) continue;
    last = Math.floor(at);
    c.globalAlpha = isDimmed(bar) ? 0.22 : 1; c.fillStyle = bad ? tone.fail : tone[hue(bar.fn)]; c.fillRect(at, foot + 1, 2, TICK_PX);
    hits.push([at - 2, lane.top, 5, lane.height, bar]);
  }
  c.globalAlpha = 1; c.lineWidth = 1;
  return hits;
}

// When units of a quota were taken, and when they came back: a period after the end of their call. Made again only
// when there are other bars.
const windows = new Map();
function windowOf(lane, bars) {
  const known = windows.get(lane.name);
  if (known?.changes === store.changes && known.many === bars.length) return known.events;
  const events = [];
  for (const [bar, , units] of bars) {
    events.push([bar.start, units]);
    if (bar.end !== null) events.push([bar.end + lane.pool.period, -units]);
  }
  events.sort((one, other) => one[0] - other[0]);
  windows.set(lane.name, {changes: store.changes, many: bars.length, events});
  return events;
}

// The names of lanes, and numbers of their rows where there is room.
export function drawNames(c, tone, lanes, {from, to}) {
  for (const lane of lanes) {
    c.fillStyle = tone.sunk; c.fillRect(from, lane.top, Math.max(0, to - from), lane.height);
    const middle = lane.top + Math.min(lane.height / 2, 8), numbers = lane.numbered && lane.rowHeight >= NUMBERED_FROM;
    c.font = "600 11px system-ui, sans-serif"; c.fillStyle = tone.text;
    c.fillText(fit(c, lane.title, LABEL - (numbers ? 26 : 10)), 0, middle);
    c.font = "11px system-ui, sans-serif"; c.fillStyle = tone.dim;
    if (lane.about && lane.height >= 24) c.fillText(fit(c, lane.about, LABEL - (numbers ? 26 : 10)), 0, middle + 13);
    if (!numbers) continue;
    c.textAlign = "right";
    for (let row = 0; row < lane.rows; row += 1) c.fillText(String(row), LABEL - 7, lane.top + (row + 0.5) * lane.rowHeight);
    c.textAlign = "left";
  }
}
