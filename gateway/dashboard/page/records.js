// Invocations: the list with its filter line, and one: record, times, log, what can be done with it.

import {age, clock, confirmed, count, duration, fill, fillIfNew, h, hue, letters, link, panel, problem, stateSign, swatch} from "./dom.js";
import {LogView} from "./log.js";
import {ask, get, store} from "./net.js";

const FIELDS = {fn: "function", function: "function", task: "task", traj: "trajectory", trajectory: "trajectory", state: "state",
  reason: "reason", since: "since", until: "until", dead: "dead", parent: "parent", order: "order"};
const ENDED = new Set(["succeeded", "failed", "timed_out", "cancelled", "lost"]);

export function queryOf(text) {
  const query = new URLSearchParams(), odd = [];
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const [name, value] = word.split(/:(.*)/);
    if (FIELDS[name] && value) query.set(FIELDS[name], value);
    else odd.push(word);
  }
  return [query, odd];
}

export const split = (record) => {
  const parts = [record.queue_ms || 0, record.overhead_ms || 0, record.execution_ms || 0], total = parts[0] + parts[1] + parts[2];
  return h("span", {class: "split small", title: `queue ${duration(parts[0])}, overhead ${duration(parts[1])}, execution ${duration(parts[2])}`},
    ...["queue", "overhead", "execution"].map((name, at) => h("i", {class: `p-${name}`, style: {flex: `${total ? parts[at] / total : 0} 1 0`}})));
};

export function recordRows(records, extra) {
  return records.map((each) => h("tr", {"data-href": `/ui/invocations/${each.id}`},
    h("td", null, stateSign(each.state)), h("td", null, swatch(each.function), link(`/ui/invocations/${each.id}`, each.function)),
    h("td", {class: "dim hide-s"}, each.task), h("td", {class: "dim hide-s"}, each.trajectory || "–"),
    h("td", {class: "dim", title: each.accepted_at}, age(Date.parse(each.accepted_at), store.now())),
    h("td", {class: "num"}, duration((each.queue_ms || 0) + (each.overhead_ms || 0) + (each.execution_ms || 0))),
    h("td", {class: "wide hide-s"}, split(each)), h("td", {class: "dim hide-s"}, Object.entries(each.units || {}).map(([kind, many]) => `${many} ${kind}`).join(" ")),
    h("td", {class: each.reason ? "bad" : "dim"}, each.reason || (each.attempt > 1 ? `try ${each.attempt}` : "")), extra ? h("td", null, extra(each)) : null));
}

export function recordTable(body, extra) {
  return h("div", {class: "scroll"}, h("table", {class: "list"}, h("thead", null, h("tr", null, ...[["", ""], ["Function", ""], ["Task", "hide-s"], ["Trajectory", "hide-s"], ["Age", ""], ["ACT", "num"],
    ["queue | overhead | execution", "hide-s"], ["Units", "hide-s"], ["Why", ""]].map(([text, kind]) => h("th", {class: kind}, text)), extra ? h("th") : null)), body));
}

export function listView(view, go, params) {
  const fixed = params.fixed || "";
  const input = h("input", {class: "filter wide", value: params.get("q") || "", placeholder: "state:failed reason:timeout fn:pytest task:swe traj:swe-1041 since:15m", "aria-label": "Filter", spellcheck: false, autocomplete: "off", list: "words"});
  const words = h("datalist", {id: "words"});
  const body = h("tbody"), told = h("div"), newer = h("button", {hidden: true, onclick: () => load()}), more = h("button", {hidden: true, onclick: () => load(cursor)}, "Older");
  let cursor = null, newest = null, shown = 0, dead = false;
  const load = async (from) => {
    const [query, odd] = queryOf(`${fixed} ${input.value}`);
    query.set("limit", "100");
    if (from) query.set("cursor", from);
    if (odd.length) { fill(told, h("p", {class: "problem"}, `not a filter: ${odd.join(" ")}; known here are ${Object.keys(FIELDS).join(", ")}, as in state:failed`)); return; }
    try {
      const page = await get(`/v1/invocations?${query}`);
      if (dead) return;
      const rows = recordRows(page.invocations, params.extra);
      if (from) body.append(...rows); else { fill(body, ...rows); newest = page.invocations[0]?.id || ""; shown = 0; newer.hidden = true; }
      shown += page.invocations.length;
      cursor = page.next_cursor;
      more.hidden = cursor === null;
      more.textContent = page.invocations.length ? "Older" : "Look further back";
      fill(told, shown ? null : h("p", {class: "dim"}, cursor ? "None among the newest that were looked at." : params.none || "No invocation passes this filter."));
    } catch (error) { fill(told, problem(error, () => load(from))); }
  };
  input.addEventListener("change", () => { history.replaceState(null, "", `${location.pathname}${input.value ? `?q=${encodeURIComponent(input.value)}` : ""}`); load(); });
  input.addEventListener("input", () => fill(words, ...suggestions(input.value).map((value) => h("option", {value}))));
  view.append(h("div", {class: "bar1"}, input, words, newer, params.head || null), h("section", {class: "panel"}, recordTable(body, params.extra), told, more));
  load();
  let looked = 0;
  return {
    refresh: () => load(),
    tick: async () => { // new rows never push what is read: they collect behind a button
      if (store.now() - looked < 2000 || newest === null || params.get("q")?.includes("order:oldest")) return;
      looked = store.now();
      const [query] = queryOf(`${fixed} ${input.value}`);
      query.set("limit", "50");
      try {
        const page = await get(`/v1/invocations?${query}`);
        const at = page.invocations.findIndex((each) => each.id === newest);
        const many = at < 0 ? page.invocations.length : at;
        if (many && !body.children.length) return load();
        newer.hidden = !many; newer.textContent = `${at < 0 && many === 50 ? "more than 50" : count(many)} newer`;
      } catch { /* the banner tells that the gateway is away */ }
    },
    end: () => { dead = true; }, keys: rowKeys(body, go), focus: () => input.focus(),
  };
}

function suggestions(text) {
  const head = text.slice(0, text.lastIndexOf(" ") + 1), word = text.slice(head.length), [name, value = ""] = word.split(/:(.*)/);
  const values = {fn: Object.keys(store.d.fns || {}), task: Object.keys(store.d.tasks || {}), state: ["queued", "running", "succeeded", "failed", "timed_out", "cancelled", "lost"],
    reason: ["timeout", "queue_timeout", "out_of_memory", "handler_error", "model_error", "upstream", "quota", "environment_lost", "node_lost", "gateway_restart", "output_limit", "invalid_input", "internal"], since: ["15m", "1h", "1d"], order: ["oldest"], dead: ["true"]};
  if (word.includes(":")) return (values[name] || []).filter((each) => each.startsWith(value)).map((each) => `${head}${name}:${each}`);
  return Object.keys(values).filter((each) => each.startsWith(word)).map((each) => `${head}${each}:`);
}

export function rowKeys(body, go) {
  let at = -1;
  const move = (by) => {
    const rows = [...body.querySelectorAll("tr")];
    if (!rows.length) return;
    at = Math.max(0, Math.min(rows.length - 1, at + by));
    rows.forEach((row, index) => row.classList.toggle("on", index === at));
    rows[at].scrollIntoView({block: "nearest"});
  };
  return {j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
    Enter: () => { const row = body.querySelectorAll("tr")[at]; if (row?.dataset.href) go(row.dataset.href); }};
}

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
  const copy = (text, button) => navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; });
  const show = () => {
    const ended = ENDED.has(record.state);
    document.title = `${record.function} ${record.state} · Tangram`;
    fillIfNew(head, [record.state, record.dead], () => [
      h("h1", null, stateSign(record.state), " ", h("span", null, record.state.replace("_", " ")), " ", swatch(record.function), link(`/ui/functions/${record.function}`, record.function), record.revision ? h("span", {class: "dim"}, `@${record.revision.slice(0, 8)}`) : null),
      h("div", {class: "bar1"}, h("span", {class: "mono"}, id), h("button", {onclick: (event) => copy(id, event.target)}, "copy id"), h("button", {onclick: (event) => copy(location.href.split("#")[0], event.target)}, "copy link"),
        ended ? null : h("button", {class: "danger", onclick: cancel}, "Cancel"), h("button", {onclick: again}, "Run again"), record.dead ? h("button", {class: "pri", onclick: redrive}, "Redrive") : null),
      record.reason ? h("p", {class: "problem"}, h("b", null, record.reason), " ", record.message, h("span", {class: "dim"}, ` (${record.component})`)) : null]);
    fillIfNew(times, [record.queue_ms, record.overhead_ms, record.execution_ms], () => {
      const parts = ["queue", "overhead", "execution"].map((name) => [name, record[`${name}_ms`] || 0]), total = parts.reduce((sum, [, ms]) => sum + ms, 0);
      return [h("div", {class: "split tall"}, ...parts.map(([name, ms]) => h("i", {class: `p-${name}`, style: {flex: `${total ? ms / total : 0} 1 0`}}))),
        h("div", {class: "leg"}, ...parts.map(([name, ms]) => h("span", null, h("i", {class: `sw p-${name}`}), `${name} `, h("b", null, duration(ms)))), h("span", null, ended ? "ACT " : "so far ", h("b", null, duration(total))))];
    });
    fillIfNew(facts, {...record, queue_ms: 0, overhead_ms: 0, execution_ms: 0}, () => {
      const rows = [["Task", link(`/ui/invocations?q=${encodeURIComponent(`task:${record.task}`)}`, record.task)], ["Trajectory", record.trajectory ? link(`/ui/trajectories/${record.trajectory}`, record.trajectory) : "–"],
        ["Accepted", stamp(record.accepted_at, ended)], ["Started", stamp(record.started_at, ended)], ["Ended", stamp(record.ended_at, ended)], ["Where", record.node || "–"], ["Units", Object.entries(record.units).map(([kind, many]) => `${many} ${kind}`).join(", ") || "–"],
        ["Try", String(record.attempt)], ["Mode", record.mode], ...Object.entries(record.usage).map(([name, value]) => [name, String(Math.round(value * 1000) / 1000)]),
        ...(record.parent ? [["Parent", link(`/ui/invocations/${record.parent}`, record.parent)]] : []), ...(record.callback ? [["Callback", record.callback]] : [])];
      const tries = record.attempts.map((each) => h("p", {class: "dim"}, `try ${each.attempt}: ${each.state} ${each.reason || ""} ${each.message} after ${duration((each.overhead_ms || 0) + (each.execution_ms || 0))}`));
      return [h("dl", null, ...rows.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)])), ...tries,
        Object.keys(record.detail || {}).length ? json(record.detail) : null];
    });
    fillIfNew(input, record.input, () => json(record.input));
    fillIfNew(result, [record.result, ended], () => record.result === null ? h("p", {class: "dim"}, ended ? "It returned nothing." : "There is none yet.") : json(record.result));
    if (record.trajectory) stripOf(strip, record.trajectory, id, go);
  };
  load();
  log.start();
  return {end: () => { stopped = true; clearTimeout(timer); log.stop(); }, keys: {c: cancel, y: () => navigator.clipboard?.writeText(location.href), l: () => log.box.focus(),
    "[": () => go(strip.dataset.before || location.pathname), "]": () => go(strip.dataset.after || location.pathname), f: () => log.follow()}};
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
