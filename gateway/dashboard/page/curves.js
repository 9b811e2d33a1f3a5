// What was learned of a function: duration by units, as a curve on log axes with the runs that it goes by.

import {count, duration, h} from "./dom.js";

const WIDE = 460, TALL = 210, LEFT = 52, FOOT = 24, TOP = 10, RIGHT = 14, NS = "http://www.w3.org/2000/svg";

function svg(tag, props, text) {
  const el = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, String(value));
  if (text !== undefined) el.textContent = text;
  return el;
}

function titled(el, text) { el.append(svg("title", {}, text)); return el; }

function learnedTable(learned) {
  return h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null, ...["Key", "With one unit", "By size", "Serial", "Error", "Runs"].map((each) => h("th", null, each)))), h("tbody", null, ...learned.map(([key, each]) => h("tr", null,
    h("td", {class: "mono"}, key || "(all)"), h("td", null, duration(1000 * each.t_ori_s)), h("td", null, each.size ? `${duration(1000 * each.size.fixed_s)} + ${duration(1e6 * each.size.per_unit_s)} per 1000` : "–"), h("td", null, each.serial_fraction === null ? "–" : `${Math.round(100 * each.serial_fraction)} %`), h("td", null, `${Math.round(100 * each.error)} %`), h("td", null, count(each.observations)))))));
}

// `runs` are records that went well, the newest first.
export function curves(found, runs, go) {
  const learned = Object.entries(found.learned || {}).slice(0, 12);
  if (!learned.length) return [h("p", {class: "dim"}, "Nothing yet: the first ends teach it.")];
  const {key} = found, cost = key ? found.cost[key] : null; // without a key it always has the same
  const most = cost && typeof cost === "object" ? Math.max(cost.max || 0, ...(cost.choices || [])) : cost || 1;
  const dots = runs.filter((each) => each.execution_ms > 0).map((each) => [key && each.units?.[key] || 1, each.execution_ms / 1000, each]);
  const about = `${key ? `units of ${key}` : "with what it always has"}; dots: the last ${count(dots.length)} that went well, each its record${most > 1 ? !found.elasticity && learned.every(([, each]) => each.serial_fraction === null) ? "; how it bends is not known yet" : `; the bend is ${found.elasticity ? "declared, or " : ""}learned from ${count(learned.reduce((sum, [, each]) => sum + each.observations, 0))} runs` : ""}`;
  return [picture(learned, dots, most, found.elasticity?.serial_fraction ?? null, key, go), h("p", {class: "dim"}, about), learnedTable(learned)];
}

// T(m) = T_ori (s + (1 - s) / m); with one unit only, where s is not known.
const serialOf = (each, declared) => each.serial_fraction ?? declared;
const expectedOf = (each, units, serial) => each.t_ori_s * (serial + (1 - serial) / units);

function picture(learned, dots, most, declared, key, go) {
  const seconds = [...dots.map(([, s]) => s), ...learned.flatMap(([, each]) => [each.t_ori_s, expectedOf(each, most, serialOf(each, declared) ?? 1)])].filter((s) => s > 0);
  const low = Math.log10(Math.min(...seconds)) - 0.1, high = Math.max(Math.log10(Math.max(...seconds)) + 0.1, low + 0.5);
  const x = (units) => most > 1 ? LEFT + 16 + (WIDE - LEFT - RIGHT - 32) * Math.log2(units) / Math.log2(most) : (LEFT + WIDE - RIGHT) / 2;
  const y = (s) => TOP + (TALL - FOOT - TOP) * (1 - (Math.log10(s) - low) / (high - low));
  const found = svg("svg", {viewBox: `0 0 ${WIDE} ${TALL}`, class: "curve", role: "img", "aria-label": `Duration by units of ${key}`});
  for (let power = Math.ceil(low); power <= high; power += 1) {
    for (const each of high - low < 1.5 ? [1, 2, 5] : [1]) {
      const s = each * 10 ** power;
      if (Math.log10(s) > high) continue;
      found.append(svg("line", {x1: LEFT, x2: WIDE - RIGHT, y1: y(s), y2: y(s), class: "rule"}), svg("text", {x: LEFT - 6, y: y(s) + 4, "text-anchor": "end"}, duration(1000 * s)));
    }
  }
  for (let units = 1; key && units <= most; units *= 2) found.append(svg("text", {x: x(units), y: TALL - 6, "text-anchor": "middle"}, `×${units}`));
  for (const [number, [units, s, record]] of dots.entries()) {
    const apart = most > 1 ? 5 : 60; // those of as many units beside each other
    const dot = titled(svg("circle", {cx: x(units) + apart * ((number * 0.618) % 1 - 0.5) * 2, cy: y(s), r: 2.6, class: "dot"}), `${record.id}: ${duration(1000 * s)} with ${units}`);
    dot.addEventListener("click", () => go(`/ui/invocations/${record.id}`));
    found.append(dot);
  }
  for (const [name, each] of learned) {
    const points = [];
    const serial = serialOf(each, declared);
    if (most === 1 || serial === null) for (const px of [-14, 14]) points.push(`${x(1) + px},${y(each.t_ori_s)}`);
    else for (let units = 1; units <= most; units += 1) points.push(`${x(units)},${y(expectedOf(each, units, serial))}`);
    found.append(titled(svg("polyline", {points: points.join(" "), class: "curveline"}), name || "(all)"));
  }
  return found;
}
