// One invocation: record, times, log, what can be done with it, and its trajectory.

import {age, clock, confirmed, copied, count, duration, fill, fillIfNew, h, hue, letters, link, panel, problem, stateSign, swatch} from "./dom.js";
import {LogView} from "./log.js";
import {ask, get, store} from "./net.js";

export const ENDED = new Set(["succeeded", "failed", "timed_out", "cancelled", "lost"]);
const PARTS = ["queue", "overhead", "execution"];

export function oneView(view, go, params, id) {
  const head = h("div", {class: "head"}), times = h("div"), facts = h("div"), input = h("div"), result = h("div"), strip = h("div"), told = h("div");
  const log = new LogView(id);
  view.append(told, head, h("div", {class: "grid"}, h("div", {class: "col"}, panel("Times", "they sum to the action completion time", times), panel("Record", "", facts),
    panel("Input", "", input), panel("Result", "", result)), h("div", {class: "col"}, log.panel)), strip);
  let record = null, stopped = false, timer = 0;
  const load = async () => {
    clearTimeout(timer);
    try {
      record = await get(`/v1/invocations/${encodeURIComponent(id)}`);
      if (stopped) return;
      fill(told);
      show();
    } catch (error) {
      if (stopped) return;
      if (error.status === 404 || error.status === 422) { fill(view, problem(error), h("p", null, link("/ui/invocations", "All invocations"))); stopped = true; log.stop(); return; }
      if (!record) fill(told, problem(error, load));
    }
    if (!stopped && (!record || !ENDED.has(record.state))) timer = setTimeout(load, 1000);
  };
  const act = async (question, verb, work) => {
    if (question && !await confirmed(question, verb)) return;
    try { await work(); } catch (error) { fill(told, problem(error)); }
  };
  const cancel = () => record && !ENDED.has(record.state) && act(`Cancel ${record.function} ${id}? It has run for ${duration((record.execution_ms || 0) + (record.overhead_ms || 0))}.`, "Cancel it",
    async () => { await ask("POST", `/v1/invocations/${id}/cancel`); await load(); });
  const again = () => act(`Run ${record.function} again with the same input${record.trajectory ? `, in trajectory ${record.trajectory}` : ""}?`, "Run it", async () => {
    const headers = {"X-Task": record.task, ...(record.trajectory ? {"X-Trajectory-Id": record.trajectory} : {})};
    const made = await ask("POST", `/v1/functions/${encodeURIComponent(record.function)}/invocations?mode=async`, record.input, headers);
    go(`/ui/invocations/${made.id}`);
  });
  const redrive = () => act("Send this dead letter again?", "Redrive", async () => { const made = await ask("POST", `/v1/dead-letters/${id}/redrive`); go(`/ui/invocations/${made.id}`); });
  const show = () => {
    const ended = ENDED.has(record.state);
    document.title = `${record.function} ${record.state} · Tangram`;
    fillIfNew(head, [record.state, record.dead], () => [
      h("h1", null, stateSign(record.state), " ", h("span", null, record.state.replace("_", " ")), " ", swatch(record.function), link(`/ui/functions/${record.function}`, record.function), record.revision ? h("span", {class: "dim"}, `@${record.revision.slice(0, 8)}`) : null),
      h("div", {class: "bar1"}, h("span", {class: "mono"}, id), h("button", {onclick: (event) => copied(id, event.target)}, "copy id"), h("button", {onclick: (event) => copied(location.href.split("#")[0], event.target)}, "copy link"),
        ended ? null : h("button", {class: "danger", onclick: cancel}, "Cancel"), h("button", {onclick: again}, "Run again"), record.dead ? h("button", {class: "pri", onclick: redrive}, "Redrive") : null),
      record.reason ? h("p", {class: "problem"}, h("b", null, record.reason), " ", record.message, h("span", {class: "dim"}, ` (${record.component})`)) : null]);
    fillIfNew(times, [record.queue_ms, record.overhead_ms, record.execution_ms], () => timesOf(record));
    fillIfNew(facts, {...record, queue_ms: 0, overhead_ms: 0, execution_ms: 0}, () => factsOf(record));
    fillIfNew(input, record.input, () => json(record.input));
    fillIfNew(result, [record.result, ended], () => record.result === null ? h("p", {class: "dim"}, ended ? "It returned nothing." : "There is none yet.") : json(record.result));
    if (record.trajectory) stripOf(strip, record.trajectory, id, go);
  };
  load();
  log.start();
  const [, line] = /^#log:(\d{1,9})$/.exec(location.hash) || [];
  if (line) log.reach(Number(line));
  return {end: () => { stopped = true; clearTimeout(timer); log.stop(); }, keys: {c: cancel, l: () => log.box.focus(),
    "[": () => go(strip.dataset.before || location.pathname), "]": () => go(strip.dataset.after || location.pathname), f: () => log.follow()}};
}

// The parts of its time, as a bar and in numbers.
export function timesOf(record) {
  const parts = PARTS.map((name) => [name, record[`${name}_ms`] || 0]), total = parts.reduce((sum, [, ms]) => sum + ms, 0);
  return [h("div", {class: "split tall"}, ...parts.map(([name, ms]) => h("i", {class: `p-${name}`, style: {flex: `${total ? ms / total : 0} 1 0`}}))),
    h("div", {class: "leg"}, ...parts.map(([name, ms]) => h("span", null, h("i", {class: `sw p-${name}`}), `${name} `, h("b", null, duration(ms)))), h("span", null, ENDED.has(record.state) ? "ACT " : "so far ", h("b", null, duration(total))))];
}

export function factsOf(record) {
  const ended = ENDED.has(record.state);
  const rows = [["Task", link(`/ui/invocations?q=${encodeURIComponent(`task:${record.task}`)}`, record.task)], ["Trajectory", record.trajectory ? link(`/ui/trajectories/${record.trajectory}`, record.trajectory) : "–"],
    ["Accepted", stamp(record.accepted_at, ended)], ["Started", stamp(record.started_at, ended)], ["Ended", stamp(record.ended_at, ended)], ["Where", record.node || "–"], ["Units", Object.entries(record.units).map(([kind, many]) => `${many} ${kind}`).join(", ") || "–"],
    ["Try", String(record.attempt)], ["Mode", record.mode], ...Object.entries(record.usage).map(([name, value]) => [name, String(Math.round(value * 1000) / 1000)]),
    ...(record.parent ? [["Parent", link(`/ui/invocations/${record.parent}`, record.parent)]] : []), ...(record.callback ? [["Callback", record.callback]] : [])];
  const tries = record.attempts.map((each) => h("p", {class: "dim"}, `try ${each.attempt}: ${each.state} ${each.reason || ""} ${each.message} after ${duration((each.overhead_ms || 0) + (each.execution_ms || 0))}`));
  return [h("dl", null, ...rows.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)])), ...tries,
    Object.keys(record.detail || {}).length ? json(record.detail) : null];
}

// What lives says how long it takes beside it: an age would stand still there.
const stamp = (text, ended) => text ? h("span", {title: text}, ended ? `${clock(Date.parse(text))}, ${age(Date.parse(text), store.now())}` : clock(Date.parse(text))) : "–";

export function json(value) {
  const text = JSON.stringify(value, null, 2) ?? "null";
  const cut = text.length > 65536;
  const save = () => { const url = URL.createObjectURL(new Blob([text], {type: "application/json"})); h("a", {href: url, download: "value.json"}).click(); setTimeout(() => URL.revokeObjectURL(url), 1000); };
  return [h("pre", {class: "mono json", tabIndex: 0}, cut ? `${text.slice(0, 65536)}\n…` : text), cut ? h("button", {onclick: save}, `Save all ${count(text.length)} characters`) : null];
}

// A trajectory as blocks of actions and gaps of thinking.
export async function stripOf(box, name, here, go) {
  if (box.dataset.name === name && Date.now() - Number(box.dataset.at) < 3000) return;
  box.dataset.name = name; box.dataset.at = String(Date.now());
  let page;
  try { page = await get(`/v1/invocations?trajectory=${encodeURIComponent(name)}&limit=60`); } catch { return; }
  const list = page.invocations.reverse();
  const at = list.findIndex((each) => each.id === here);
  box.dataset.before = at > 0 ? `/ui/invocations/${list[at - 1].id}` : "";
  box.dataset.after = at >= 0 && at + 1 < list.length ? `/ui/invocations/${list[at + 1].id}` : "";
  const blocks = [];
  let last = null;
  for (const each of list) {
    const start = Date.parse(each.accepted_at), spent = (each.queue_ms || 0) + (each.overhead_ms || 0) + (each.execution_ms || 0);
    if (last !== null && start > last) blocks.push(h("span", {class: "gap", title: "between two actions"}, duration(start - last)));
    blocks.push(h("a", {class: `block c-${hue(each.function)}${each.id === here ? " on" : ""}`, href: `/ui/invocations/${each.id}`, title: `${each.function}, ${each.state}, ${duration(spent)}`}, letters(each.function), each.reason ? " ✕" : "", h("span", {class: "a"}, duration(each.execution_ms || 0))));
    last = start + spent;
  }
  fill(box, panel(`Trajectory ${name}`, `${list.length}${page.next_cursor ? " newest" : ""} actions, thinking as gaps`, h("div", {class: "strip"}, ...blocks)));
}
