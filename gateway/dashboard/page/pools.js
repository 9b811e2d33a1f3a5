// Pools: who holds each core and device, what is resident, what is used of a quota.

import {bytes, count, duration, h, hue, letters} from "./dom.js";
import {cores, deviceCount} from "./lanes.js";
import {store} from "./net.js";

// Cells of a pool above which they are small and bear no letters, and nodes above which each is one bar.
const LETTERS_MAX = 16, NODES_MAX = 8;

export function poolRows(d) {
  const rows = [], cpus = Object.values(d.pools).filter((pool) => pool.kind === "cpu").length;
  let before = null;
  for (const [name, pool] of Object.entries(d.pools)) {
    if (before && before !== pool.kind) rows.push(h("div", {class: "sep"}));
    before = pool.kind;
    if (pool.regions) rows.push(...deviceRows(name, pool));
    else if (pool.timed) rows.push(row(name, quota(pool), [h("b", null, count(pool.free)), ` of ${count(pool.total)} left`, h("span", {class: "dim"}, quotaEnd(pool))]));
    else {
      const what = pool.kind === "cpu" ? ` ${cores(pool.total)}` : "";
      rows.push(row(pool.kind === "cpu" && pool.node ? pool.node : name, pool.cells && cpus <= NODES_MAX ? cells(pool.cells, 0, pool.total, pool.free, "core") : shares(pool), [h("b", null, count(pool.total - pool.free)), ` of ${count(pool.total)}${what}`]));
    }
  }
  for (const [name, [, memory, held, holders]] of Object.entries(d.nodes).slice(0, NODES_MAX)) {
    rows.push(row(`mem ${name}`, h("div", {class: "quota", role: "img", "aria-label": `${bytes(held)} of ${bytes(memory)} held by ${holders}`}, h("i", {class: "mem", style: {width: `${memory ? 100 * held / memory : 0}%`}})),
      [h("b", null, bytes(held)), ` of ${bytes(memory)}`], "n dim"));
  }
  return rows;
}

const row = (name, what, use, kind = "n") => h("div", {class: "row"}, h("div", {class: kind, title: name}, name), h("div", {class: "vis"}, what), h("div", {class: "u"}, ...use));

const quotaEnd = (pool) => pool.next === null || pool.next === undefined || pool.free === pool.total ? "" : ` · ${duration(Math.max(1000, pool.next - store.now()))}`;

// A row of units from `start` on: who holds which, and what is free between.
function cells(held, start, total, free, unit) {
  const found = h("div", {class: total > LETTERS_MAX ? "cells many" : "cells"});
  const placed = held.filter(([first]) => first >= start && first < start + total).sort((a, b) => a[0] - b[0]), loose = held.filter(([first]) => first < 0);
  let at = start;
  const blank = (many) => { for (let n = 0; n < many; n += 1) found.append(h("div", {class: "cell"})); };
  for (const [first, units, id, fn] of [...placed, ...loose]) {
    if (first > at) { blank(first - at); at = first; }
    found.append(h("a", {class: `cell b c-${hue(fn)}`, href: `/ui/invocations/${id.split(".")[0]}`, style: {flex: `${units} 1 0`}, title: `${fn}, ${units} ${unit}${units === 1 ? "" : "s"}`},
      letters(fn), units > 1 ? h("span", {class: "a"}, `×${units}`) : null));
    at += units;
  }
  blank(loose.length ? free : start + total - at);
  return found;
}

function shares(pool) {
  const found = h("div", {class: "split big"}), held = pool.by_function || Object.entries((pool.cells || []).reduce((sums, [, units, , fn]) => ({...sums, [fn]: (sums[fn] || 0) + units}), {}));
  for (const [fn, units] of held) found.append(h("i", {class: `c-${hue(fn)}`, style: {flex: `${units} 1 0`}, title: `${fn}: ${units}`}));
  found.append(h("i", {class: "free", style: {flex: `${pool.free} 1 0`}, title: `${pool.free} free`}));
  return h("a", {href: "/ui/nodes"}, found);
}

function quota(pool) {
  const left = pool.total ? pool.free / pool.total : 0;
  return h("div", {class: left < 0.15 ? "quota low" : "quota", role: "img", "aria-label": `${pool.free} of ${pool.total} left`}, h("i", {style: {width: `${100 * (1 - left)}%`}}));
}

// The devices of each node: who holds which chunk, and under them the models that lie there, by their bytes.
function deviceRows(name, pool) {
  const regions = Object.entries(pool.regions), rows = [];
  for (const [node, [start, many, kind]] of regions) {
    const used = (pool.cells || []).filter(([first]) => first >= start && first < start + many).reduce((sum, [, units]) => sum + units, 0);
    rows.push(row(regions.length > 1 ? `${name} ${node}` : name, pool.cells ? cells(pool.cells, start, many, many - used, "device") : shares(pool), [h("b", null, count(pool.cells ? used : pool.total - pool.free)), ` of ${deviceCount(many, kind)}`]));
    const warm = pool.warm === null || pool.warm === undefined ? [] : ["warm ", h("b", null, `${pool.warm} %`)];
    // Devices are told in the order of the regions.
    const before = regions.slice(0, regions.findIndex(([each]) => each === node)).reduce((sum, [, [, devices]]) => sum + devices, 0);
    rows.push(row("resident", residents(pool.devices.slice(before, before + many)), warm, "n dim"));
  }
  return rows;
}

function residents(devices) {
  return h("div", {class: "dev", style: {"grid-template-columns": `repeat(${Math.max(1, devices.length)}, minmax(0, 1fr))`}}, ...devices.map(([memory, used, services], index) =>
    h("div", {title: services.length ? services.map(([service, size]) => `${service} ${bytes(size)}`).join(", ") + `; ${bytes(used)} of ${bytes(memory)}` : `nothing of ${bytes(memory)}`},
      h("div", {class: "mem"}, ...services.map(([service, size]) => h("i", {class: `c-${hue(service.split(/[@:]/)[0])}`, style: {width: `${memory ? 100 * size / memory : 0}%`}}))), devices.length > LETTERS_MAX ? null : h("div", {class: "id"}, String(index)))));
}
