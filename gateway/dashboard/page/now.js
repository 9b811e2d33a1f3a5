// Now: why work waits, in one sentence; then pools, causes, tasks, failures, and what has run longest.

import {spoken} from "./bars.js";
import {age, causeText, colours, copied, count, duration, fill, fillIfNew, h, hue, link, panel, problem, share, swatch} from "./dom.js";
import {cores, deviceCount} from "./lanes.js";
import {ask, store} from "./net.js";
import {poolRows} from "./pools.js";
import {stepRow, stepsByTask, stepsTick} from "./steps.js";
import {Timeline} from "./timeline.js";

const BADGES = {stopped: "STOPPED", draining: "DRAINING", lost: "NODE LOST", unavailable: "UNAVAILABLE", quota: "QUOTA BOUND", memory: "MEMORY BOUND",
  devices: "DEVICE BOUND", units: "CPU BOUND", waiting: "IN SEQUENCE", ok: "RUNNING", idle: "IDLE"};
const PARTS = ["queue", "overhead", "execution"];
// Rows of the longest running and of causes; the small timeline: how tall all its units are together, and a row at most.
const LONGEST_MAX = 4, CAUSES_MAX = 5, MINI_PX = 150, MINI_ROW_MAX = 9, MINI_ROW_MIN = 4;

export function nowView(view, go) {
  const verdict = h("div", {class: "verdict", role: "status"});
  const kpis = h("section", {class: "kpis", "aria-label": "Rates"});
  const parts = {};
  for (const [name, title, href] of [["run", "Running", "/ui/invocations?q=state:running"], ["wait", "Waiting", "/ui/invocations?q=state:queued"],
    ["end", "Ended / min", "/ui/invocations?q=since:1m"], ["bad", "Failed, 15 min", "/ui/invocations?q=state:failed since:15m"]]) {
    const value = h("span"), small = h("small"), spark = h("canvas", {"aria-hidden": "true"});
    parts[name] = {value, small, spark};
    kpis.append(h("a", {class: "kpi", href}, h("div", {class: "l"}, title), h("div", {class: "v"}, value, small), spark));
  }
  const act = h("div", {class: "kpi"});
  kpis.append(act);
  const pools = h("div"), waits = h("div"), tasks = h("div"), failures = h("div"), longest = h("div"), empty = h("div");
  const narrow = innerWidth <= 620, open = (bar) => go(`/ui/invocations/${bar.id}`), said = h("div", {class: "unseen", role: "status"});
  const rowOf = (rows) => Math.max(MINI_ROW_MIN, Math.min(MINI_ROW_MAX, Math.floor(MINI_PX / Math.max(1, rows))));
  const timeline = new Timeline({heightOf: rowOf, steps: false, span: narrow ? 45 : 120, onopen: open, onpin: open, onchoose: (bar) => { said.textContent = spoken(bar); }});
  const tlPanel = panel(narrow ? "Last 45 seconds" : "Last 2 minutes", link("/ui/timeline", "open timeline"), timeline.canvas, said), legend = h("span", {class: "leg hide-s"});
  view.append(verdict, empty, kpis, h("div", {class: "grid"},
    h("div", {class: "col"}, panel("Pools", legend, pools), tlPanel, panel("Running longest", "against what was learned", longest)),
    h("div", {class: "col"}, panel("Waiting, for what", "most first; since when", waits), panel("Tasks", link("/ui/tasks", "all"), tasks), panel("Failures, last 15 min", "by reason", failures))));

  const tick = () => {
    const d = store.d;
    if (!d.verdict) return;
    const [code, text] = d.verdict;
    fillIfNew(verdict, [code, text], () => [h("span", {class: `badge v-${code}`}, BADGES[code] || code), h("span", null, ...emphasised(text))]);
    parts.run.value.textContent = count(d.run);
    parts.run.small.textContent = machineText(d);
    parts.wait.value.textContent = count(d.wait);
    const oldest = Math.min(...d.causes.map((each) => each[5]));
    parts.wait.small.textContent = d.wait && Number.isFinite(oldest) ? `oldest ${duration(store.now() - oldest)}` : "nothing waits";
    parts.end.value.textContent = count(d.rate[1]);
    parts.end.small.textContent = `${count(d.rate[0])} accepted${d.rate[3] ? `, ${count(d.rate[3])} cancelled` : ""}`;
    parts.bad.value.textContent = count(d.failed_15min);
    const meant = d.ended_15min - (d.cancelled_15min || 0); // what was cancelled neither failed nor went well
    parts.bad.small.textContent = meant ? `${share(d.failed_15min / meant)} of ${count(meant)}${d.cancelled_15min ? " not cancelled" : ""}` : d.ended_15min ? `${count(d.ended_15min)} cancelled` : "nothing has ended";
    if (drawing) for (const name of ["run", "wait", "end", "bad"]) spark(parts[name].spark, store.spark[name], name === "bad" ? "fail" : name === "wait" ? "wait" : "blue");
    fillIfNew(act, d.act, () => actSplit(d.act));
    fillIfNew(pools, [d.pools, d.nodes, Object.values(d.pools).some((pool) => pool.timed && pool.free < pool.total) && Math.floor(store.now() / 1000)], () => poolRows(d));
    const ran = store.names.filter((name) => d.fns[name]).slice(0, 7);
    fillIfNew(legend, ran, () => ran.map((name) => h("span", null, swatch(name), name)));
    fillIfNew(waits, [d.causes, d.wait, Math.floor(store.now() / 1000)], () => waitRows(d));
    fillIfNew(tasks, [d.tasks, d.steps, stepsTick()], () => taskRows(d.tasks, d.steps, true));
    fillIfNew(failures, [d.failed, Math.floor(store.now() / 5000)], () => failureRows(d.failed));
    fillIfNew(longest, [d.long, Math.floor(store.now() / 500)], () => longestRows(d.long));
    const nothing = !d.run && !d.wait && !store.bars.size && !d.rate[0];
    fillIfNew(empty, nothing ? Object.keys(d.fns) : 0, () => nothing ? [emptyState(d, go)] : []);
  };
  let handle = 0, drawing = false;
  tick();
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const loop = () => { handle = setTimeout(() => { if (!document.hidden) timeline.drawIfMoved(); loop(); }, reduced ? 500 : 100); };
  // The words are on the screen before the first canvas is made: a canvas costs more than all of them.
  const begin = () => { drawing = true; tick(); timeline.draw(); loop(); };
  const first = requestAnimationFrame(() => { handle = setTimeout(begin, 0); });
  window.tangramTimeline = timeline;
  return {tick, end: () => { cancelAnimationFrame(first); clearTimeout(handle); }};
}

function actSplit([queue, overhead, execution, p50, p99, completed]) {
  const total = queue + overhead + execution;
  return [
    h("div", {class: "l"}, h("span", {title: "action completion time of what was started, and neither cancelled nor lost"}, "ACT, last minute"), h("span", null, "mean ", h("b", null, p50 === null ? "–" : duration(total)), " · p50 ", h("b", null, duration(p50)), " · p99 ", h("b", null, duration(p99)))),
    h("div", {class: "split", role: "img", "aria-label": `queue ${duration(queue)}, overhead ${duration(overhead)}, execution ${duration(execution)}`},
      ...(total ? [queue, overhead, execution].map((ms, at) => h("i", {class: `p-${PARTS[at]}`, style: {flex: `${ms / total} 1 0`}})) : [h("i", {class: "free", style: {flex: "1 1 0"}})])),
    h("div", {class: "leg"}, ...[queue, overhead, execution].map((ms, at) => h("span", null, h("i", {class: `sw p-${PARTS[at]}`}), `${PARTS[at]} `, h("b", null, p50 === null ? "–" : duration(ms)))), h("span", null, `of ${count(completed)} completed`)),
  ];
}

function waitRows(d) {
  if (!d.wait) return [h("p", {class: "dim"}, "Nothing waits.")];
  const most = Math.max(...d.causes.map((each) => each[3 + 1]), 1);
  const rows = d.causes.slice(0, CAUSES_MAX).map((each) => {
    const [kind, pool, , task, many, since] = each;
    return h("a", {class: "wf", href: `/ui/invocations?q=${encodeURIComponent(`state:queued task:${task}`)}`, title: pool || kind},
      h("span", {class: "t"}, causeText(each), h("span", {class: "dim"}, `  ${task}`)), h("span", {class: "c"}, count(many)), h("span", {class: "g"}, duration(store.now() - since)),
      h("span", {class: "bar"}, h("i", {class: "p-queue", style: {width: `${100 * many / most}%`}})));
  });
  const rest = d.causes.slice(CAUSES_MAX).reduce((sum, each) => sum + each[4], 0) + d.causes_left_out;
  return rest ? [...rows, h("p", {class: "dim"}, `and ${count(rest)} for other causes`)] : rows;
}

// How many ended, and how many of them failed (timed out and lost ones included) or were cancelled.
export function endsOf(settled) {
  const ended = Object.values(settled).reduce((sum, many) => sum + many, 0), cancelled = settled.cancelled || 0;
  return {ended, cancelled, failed: ended - cancelled - (settled.succeeded || 0)};
}

// `active` leaves out tasks of which nothing was ever seen.
export function taskRows(tasks, steps, active) {
  const told = stepsByTask(steps);
  const seen = ([name, [queued, running, settled]]) => !active || queued || running || Object.keys(settled).length || told.has(name);
  const rows = Object.entries(tasks).filter(seen).map(([name, [queued, running, settled, weight]]) => {
    const {ended, failed, cancelled} = endsOf(settled), all = ended + queued + running || 1;
    return h("a", {class: "task", href: `/ui/invocations?q=${encodeURIComponent(`task:${name}`)}`},
      h("div", {class: "t"}, h("b", null, name), h("span", {class: "dim"}, `weight ${weight}`)),
      h("div", {class: "p"}, h("i", {class: "c-teal", style: {flex: `${(ended - failed - cancelled) / all} 1 0`}}), h("i", {class: "p-fail", style: {flex: `${failed / all} 1 0`}}), h("i", {class: "free", style: {flex: `${cancelled / all} 1 0`}}), h("i", {class: "c-blue", style: {flex: `${running / all} 1 0`}}), h("i", {class: "p-queue", style: {flex: `${queued / all} 1 0`}})),
      h("div", {class: "m"}, h("span", null, "running ", h("b", null, count(running))), h("span", null, "waiting ", h("b", null, count(queued))), h("span", null, "ended ", h("b", null, count(ended))), h("span", {title: "of these; timed out and lost ones included"}, "failed ", h("b", null, count(failed))), cancelled ? h("span", {title: "of these"}, "cancelled ", h("b", null, count(cancelled))) : null),
      ...(told.get(name) || []).filter((step) => step.end === null).slice(0, 2).map(stepRow));
  });
  return rows.length ? rows : [h("p", {class: "dim"}, "No task was seen yet.")];
}

function failureRows(failed) {
  if (!failed.length) return [h("p", {class: "dim"}, "None.")];
  return [h("div", {class: "scroll"}, h("table", null, h("tbody", null, ...failed.slice(0, 8).map(([fn, reason, task, many, last]) => h("tr", null,
    h("td", null, h("span", {class: "x"}, "✕"), link(`/ui/invocations?q=${encodeURIComponent(`reason:${reason} fn:${fn} since:15m`)}`, reason)),
    h("td", {class: "dim"}, fn), h("td", {class: "dim hide-s"}, task), h("td", {class: "num"}, h("b", null, count(many))), h("td", {class: "num dim", title: new Date(last).toISOString()}, age(last, store.now())))))))];
}

function longestRows(long) {
  if (!long.length) return [h("p", {class: "dim"}, "Nothing runs.")];
  return long.slice(0, LONGEST_MAX).map(([id, fn, task, trajectory, units, node, start, expected]) => {
    const ran = store.now() - start, part = expected ? Math.min(1, ran / expected) : 0, over = expected && ran > 1.2 * expected;
    return h("a", {class: "lg", href: `/ui/invocations/${id.split(".")[0]}`}, swatch(fn), h("span", {class: "t"}, fn), h("span", {class: "mono dim"}, trajectory || task),
      h("span", {class: "dim", title: node}, Object.values(units).map((each) => `×${each}`).join(" ")),
      h("span", {class: "p"}, h("i", {class: over ? "p-fail" : `c-${hue(fn)}`, style: {width: `${100 * part}%`}})),
      h("span", {class: "num"}, h("b", null, duration(ran)), expected ? h("span", {class: "dim"}, ` of ~${duration(expected)}${over ? " !" : ""}`) : null));
  });
}

// Numbers stand out of a sentence.
const emphasised = (text) => text.split(/(^\d+ of \d+|about \d+ \w+$)/).map((part, at) => at % 2 ? h("b", null, part) : part);

function machineText(d) {
  const nodes = Object.values(d.nodes), many = nodes.reduce((sum, node) => sum + node[0], 0);
  const devices = Object.values(d.pools).flatMap((pool) => Object.values(pool.regions || {})), kind = devices.every(([, , each]) => each === "cpu") ? "cpu" : "";
  const told = devices.reduce((sum, [, each]) => sum + each, 0);
  return `${count(many)} ${cores(many)}${told ? `, ${deviceCount(told, kind)}` : ""}${nodes.length > 1 ? `, ${nodes.length} nodes` : ""}`;
}

// What there is, and one command that does something.
function emptyState(d, go) {
  const name = d.fns.shell ? "shell" : Object.keys(d.fns)[0], input = name === "shell" ? {command: "echo hello"} : {}, told = h("div"), many = Object.keys(d.fns).length;
  const command = `tangram invoke ${name} '${JSON.stringify(input)}'`;
  const run = async () => {
    try { const made = await ask("POST", `/v1/functions/${encodeURIComponent(name)}/invocations?mode=async`, input); go(`/ui/invocations/${made.id}`); } catch (error) { fill(told, problem(error)); }
  };
  return h("section", {class: "panel card"}, h("h2", {class: "big"}, "Ready. Nothing has run yet."),
    h("p", {class: "dim"}, name ? `${machineText(d)}, ${many} function${many === 1 ? "" : "s"}. Send a first action, and watch it here:` : "No function is registered: tangram apply adds some."),
    name ? [h("pre", {class: "mono"}, command), h("p", {class: "bar1"}, h("button", {class: "pri", onclick: run}, "Run it now"), h("button", {onclick: (event) => copied(command, event.target)}, "Copy"), link(`/ui/functions/${name}`, "What to send, and a form that sends it")), told] : null);
}

function spark(canvas, values, tone) {
  const scale = devicePixelRatio || 1, wide = canvas.clientWidth || 76, tall = canvas.clientHeight || 24;
  if (canvas.width !== wide * scale) { canvas.width = wide * scale; canvas.height = tall * scale; }
  const c = canvas.getContext("2d"), most = Math.max(1, ...values);
  c.setTransform(scale, 0, 0, scale, 0, 0);
  c.clearRect(0, 0, wide, tall);
  if (values.length < 2) return;
  c.strokeStyle = colours()[tone]; c.lineWidth = 1.5; c.beginPath();
  const last = values.slice(-120);
  last.forEach((value, at) => { const x = at * wide / (last.length - 1), y = tall - 2 - (tall - 4) * value / most; at ? c.lineTo(x, y) : c.moveTo(x, y); });
  c.stroke();
  c.lineTo(wide, tall); c.lineTo(0, tall); c.globalAlpha = 0.1; c.fillStyle = colours()[tone]; c.fill(); c.globalAlpha = 1;
}
