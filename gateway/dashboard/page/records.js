// Invocations: the list with its filter line.

import {age, count, duration, fill, h, link, problem, stateSign, swatch} from "./dom.js";
import {get, store} from "./net.js";

const PAGE_ROWS = 200;
const FIELDS = {fn: "function", function: "function", task: "task", traj: "trajectory", trajectory: "trajectory", state: "state",
  reason: "reason", since: "since", until: "until", dead: "dead", parent: "parent", order: "order"};

function queryOf(text) {
  const query = new URLSearchParams(), odd = [];
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const [name, value] = word.split(/:(.*)/);
    if (FIELDS[name] && value) query.set(FIELDS[name], value);
    else odd.push(word);
  }
  return [query, odd];
}

const split = (record) => {
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
    query.set("limit", String(PAGE_ROWS));
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
  input.addEventListener("keydown", (event) => { // tab completes the word as far as there is one way
    const known = event.key === "Tab" && !event.shiftKey ? suggestions(input.value) : [], text = common(known);
    if (text.length > input.value.length) { event.preventDefault(); input.value = text; input.dispatchEvent(new Event("input")); }
  });
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

function common(texts) {
  let found = texts[0] || "";
  for (const each of texts) while (!each.startsWith(found)) found = found.slice(0, -1);
  return found;
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

