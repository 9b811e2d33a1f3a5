// Functions: health first; one: what to send, a form that sends it, what was learned.

import {curves} from "./curves.js";
import {age, count, duration, fill, fillIfNew, h, link, panel, problem, share, swatch} from "./dom.js";
import {LogView} from "./log.js";
import {ask, get, store} from "./net.js";
import {json} from "./record.js";
import {recordRows, recordTable, rowKeys} from "./records.js";

const AGAIN_MS = 2000, RUNS_MAX = 200;
const HEALTH = {ready: "✓ ready", preparing: "◌ preparing", unavailable: "✕ unavailable"};

export function functionsView(view, go) {
  const body = h("tbody"), told = h("div");
  view.append(h("section", {class: "panel"}, h("div", {class: "scroll"}, h("table", {class: "list"}, h("thead", null, h("tr", null, ...["Function", "Health", "#Calls/min", "#p50", "#p99", "#Failed", "Runtime", "Cost", "#Bound", "From", "About"].map((each) => h("th", {class: each.startsWith("#") ? "num" : each === "From" || each === "About" ? "hide-s" : ""}, each.replace("#", ""))))), body)), told));
  const load = async () => {
    try {
      const [{functions: found}, {functions: fared}] = await Promise.all([get("/v1/functions"), get("/v1/activity")]);
      fillIfNew(body, [found, fared], () => found.map((each) => h("tr", {"data-href": `/ui/functions/${each.name}`}, h("td", null, swatch(each.name), link(`/ui/functions/${each.name}`, each.name)),
        h("td", {class: each.status === "unavailable" ? "bad" : "", title: each.problem || ""}, HEALTH[each.status] || each.status || "–", each.problem ? h("div", {class: "dim wrap"}, each.problem) : null),
        ...faredCells(fared[each.name]),
        h("td", null, each.runtime), h("td", null, cost(each)), h("td", {class: "num"}, duration(1000 * each.timeout_s)), h("td", {class: "dim hide-s"}, each.source || ""), h("td", {class: "dim wrap hide-s"}, each.description))));
      fill(told, found.length ? null : h("p", {class: "dim"}, "No function is registered. Write one as YAML, and: tangram apply functions/"));
    } catch (error) { fill(told, problem(error, load)); }
  };
  load();
  let seen = JSON.stringify(store.d.fns), looked = Date.now();
  return {tick: () => { const now = JSON.stringify(store.d.fns); if (now !== seen || Date.now() - looked > AGAIN_MS) { seen = now; looked = Date.now(); load(); } }, keys: rowKeys(body, go)};
}

// Of its last ends: how many a minute, how long, and how many of them failed.
function faredCells(fared) {
  const num = (text, kind = "num") => h("td", {class: kind}, text);
  if (!fared) return [num("–"), num("–"), num("–"), num("–")];
  return [num(count(fared.ended)), num(actOf(fared.p50_s)), num(actOf(fared.p99_s)), num(fared.failed ? share(fared.failed / fared.of) : "0", fared.failed ? "num bad" : "num")];
}

const actOf = (seconds) => seconds === null ? "–" : duration(1000 * seconds);

const cost = (each) => Object.entries(each.cost).map(([kind, units]) => `${units && typeof units === "object" ? units.choices ? units.choices.join("/") : `${units.min}–${units.max}` : units} ${kind}`).join(", ") || "nothing";

export function functionView(view, go, params, name) {
  const head = h("div", {class: "head"}), send = h("div"), learned = h("div"), facts = h("div"), recent = h("tbody"), told = h("div"), changed = h("div");
  view.append(told, head, h("div", {class: "grid"}, h("div", {class: "col"}, panel("Send", "an invocation in mode async", send), panel("Latest", link(`/ui/invocations?q=fn:${name}`, "all"), recordTable(recent, true))),
    h("div", {class: "col"}, panel("What was learned", "duration by units, log axes", learned), panel("Changes", "since the gateway began", changed), panel("Definition", "", facts))));
  let log = null, gone = false;
  const load = async () => {
    try {
      const found = await get(`/v1/functions/${encodeURIComponent(name)}`);
      if (gone) return;
      document.title = `${name} · Tangram`;
      fill(head, h("h1", null, swatch(name), name, found.revision ? h("span", {class: "dim"}, `@${found.revision.slice(0, 8)}`) : null), h("p", {class: found.status === "unavailable" ? "problem" : "dim"}, HEALTH[found.status] || "", found.problem ? `: ${found.problem}` : "", found.description ? ` · ${found.description}` : ""));
      fill(send, form(found));
      const runs = await get(`/v1/invocations?function=${encodeURIComponent(name)}&state=succeeded&limit=${RUNS_MAX}`);
      if (!gone) fill(learned, ...curves(found, runs.invocations, go));
      fill(changed, ...changes(found.changes || []));
      fill(facts, json({...found, changes: undefined, learned: undefined, input_schema: undefined, result_schema: undefined}), found.result_schema ? [h("h2", null, "Returns"), json(found.result_schema)] : null);
    } catch (error) { fill(told, problem(error, error.status === 404 ? null : load)); }
  };
  const latest = async () => {
    try { const page = await get(`/v1/invocations?function=${encodeURIComponent(name)}&limit=10`); fillIfNew(recent, page.invocations.map((each) => [each.id, each.state]), () => recordRows(page.invocations, (each) => h("button", {title: "Puts its input into the form", onclick: () => useInput(each)}, "use"))); } catch { /* told above */ }
  };
  const useInput = async (each) => {
    try { const {input} = await get(`/v1/invocations/${each.id}`); const text = document.getElementById("f--json"); text.value = JSON.stringify(input, null, 2); text.dispatchEvent(new Event("input")); text.focus(); } catch (error) { fill(told, problem(error)); }
  };
  const form = (found) => {
    const schema = found.input_schema || {}, properties = Object.entries(schema.properties || {}), required = new Set(schema.required || []);
    const text = h("textarea", {class: "mono", rows: 8, spellcheck: false, "aria-label": "Input as JSON"});
    const start = {};
    for (const [field, about] of properties) if (required.has(field)) start[field] = about.default ?? about.examples?.[0] ?? blank(about);
    if (!Object.keys(start).length && found.runtime === "exec") start.command = "echo hello";
    text.value = JSON.stringify(start, null, 2);
    properties.sort(([one], [other]) => (other in start) - (one in start)); // what it begins with comes first
    const fields = new Map();
    const read = () => { try { const value = JSON.parse(text.value || "{}"); text.classList.remove("odd"); return value; } catch { text.classList.add("odd"); return null; } };
    const write = (field, value) => { const all = read() || {}; if (value === undefined) delete all[field]; else all[field] = value; text.value = JSON.stringify(all, null, 2); };
    text.addEventListener("input", () => { const all = read(); if (all) for (const [field, [control, kind]] of fields) set(control, kind, all[field]); });
    const rows = properties.slice(0, 24).map(([field, about]) => {
      const [control, kind] = control_of(about, (value) => write(field, value));
      control.id = `f-${field}`;
      set(control, kind, start[field]);
      fields.set(field, [control, kind]);
      return h("div", {class: "field"}, h("label", {htmlFor: control.id}, field, required.has(field) ? h("b", {title: "required"}, " *") : ""), control, about.description ? h("small", {class: "dim"}, about.description) : null);
    });
    const task = h("input", {id: "f--task", placeholder: "default", "aria-label": "Task"}), trajectory = h("input", {id: "f--traj", placeholder: "none", "aria-label": "Trajectory"});
    const out = h("div");
    const go_ = async () => {
      const input = read();
      if (!input) { fill(out, h("p", {class: "problem"}, "This is not JSON.")); return; }
      try {
        const headers = {...(task.value ? {"X-Task": task.value} : {}), ...(trajectory.value ? {"X-Trajectory-Id": trajectory.value} : {})};
        const made = await ask("POST", `/v1/functions/${encodeURIComponent(name)}/invocations?mode=async`, input, headers);
        log?.stop();
        log = new LogView(made.id);
        fill(out, h("p", null, "Accepted: ", link(`/ui/invocations/${made.id}`, made.id, {class: "mono link"})), log.panel);
        log.start();
        setTimeout(latest, 300);
      } catch (error) { fill(out, problem(error)); }
    };
    return [...rows, h("div", {class: "field"}, h("label", {htmlFor: "f--json"}, "Input"), Object.assign(text, {id: "f--json"})),
      h("div", {class: "field two"}, h("span", null, h("label", {htmlFor: "f--task"}, "Task"), task), h("span", null, h("label", {htmlFor: "f--traj"}, "Trajectory"), trajectory)), h("p", null, h("button", {class: "pri", onclick: go_}, "Send")), out];
  };
  load();
  latest();
  let looked = 0;
  return {tick: () => { if (Date.now() - looked > 2000) { looked = Date.now(); latest(); } }, end: () => { gone = true; log?.stop(); }};
}

function changes(list) {
  if (!list.length) return [h("p", {class: "dim"}, "None.")];
  return list.map((each) => h("details", {open: each === list[0]}, h("summary", null, h("span", {class: "mono"}, each.was === each.now ? each.now.slice(0, 8) : `${each.was.slice(0, 8)} → ${each.now.slice(0, 8)}`), h("span", {class: "dim"}, `  ${age(Date.parse(each.at), store.now())}`)),
    Object.keys(each.values).length ? h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null, ...["Key", "Was", "Became"].map((name) => h("th", null, name)))), h("tbody", null, ...Object.entries(each.values).map(([key, value]) =>
      h("tr", null, h("td", {class: "mono"}, key), h("td", {class: "mono dim"}, value.was || "–"), h("td", {class: "mono"}, value.now || "–")))))) : h("p", {class: "dim"}, "The handler's source.")));
}

const blank = (about) => ({string: "", integer: 0, number: 0, boolean: false, array: [], object: {}})[Array.isArray(about.type) ? about.type[0] : about.type] ?? null;

function control_of(about, write) {
  const kind = about.enum ? "enum" : Array.isArray(about.type) ? about.type[0] : about.type || "json";
  if (kind === "enum") return [h("select", {onchange: (event) => write(event.target.value === "" ? undefined : JSON.parse(event.target.value))}, h("option", {value: ""}, ""), ...about.enum.map((each) => h("option", {value: JSON.stringify(each)}, String(each)))), kind];
  if (kind === "boolean") return [h("input", {type: "checkbox", onchange: (event) => write(event.target.checked)}), kind];
  if (kind === "integer" || kind === "number") return [h("input", {type: "number", step: kind === "integer" ? "1" : "any", oninput: (event) => write(event.target.value === "" ? undefined : Number(event.target.value))}), kind];
  if (kind === "string") return [h("textarea", {rows: 1, spellcheck: false, oninput: (event) => write(event.target.value === "" ? undefined : event.target.value)}), kind];
  return [h("textarea", {rows: 1, class: "mono", placeholder: "JSON", spellcheck: false, oninput: (event) => { try { write(event.target.value ? JSON.parse(event.target.value) : undefined); event.target.classList.remove("odd"); } catch { event.target.classList.add("odd"); } }}), "json"];
}

function set(control, kind, value) {
  if (document.activeElement === control) return;
  if (kind === "boolean") control.checked = Boolean(value);
  else if (kind === "string" || kind === "integer" || kind === "number") control.value = value ?? "";
  else control.value = value === undefined ? "" : JSON.stringify(value);
}
