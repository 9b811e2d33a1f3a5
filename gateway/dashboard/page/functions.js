// Functions: health first; one: what to send, a form that sends it, what was learned.

import {age, bytes, count, duration, fill, fillIfNew, h, link, panel, problem, swatch} from "./dom.js";
import {LogView} from "./log.js";
import {ask, get, store} from "./net.js";
import {json, recordRows, recordTable, rowKeys} from "./records.js";

const HEALTH = {ready: "✓ ready", preparing: "◌ preparing", unavailable: "✕ unavailable"};

export function functionsView(view, go) {
  const body = h("tbody"), told = h("div");
  view.append(h("section", {class: "panel"}, h("div", {class: "scroll"}, h("table", {class: "list"}, h("thead", null, h("tr", null, ...["Function", "Health", "Runtime", "Cost", "Bound", "From", ""].map((each) => h("th", null, each)))), body)), told));
  const load = async () => {
    try {
      const found = (await get("/v1/functions")).functions;
      fill(body, ...found.map((each) => h("tr", {"data-href": `/ui/functions/${each.name}`}, h("td", null, swatch(each.name), link(`/ui/functions/${each.name}`, each.name)),
        h("td", {class: each.status === "unavailable" ? "bad" : "", title: each.problem || ""}, HEALTH[each.status] || each.status || "–", each.problem ? h("div", {class: "dim wrap"}, each.problem) : null),
        h("td", null, each.runtime), h("td", null, cost(each)), h("td", null, duration(1000 * each.timeout_s)), h("td", {class: "dim"}, each.source || ""), h("td", {class: "dim wrap"}, each.description))));
      fill(told, found.length ? null : h("p", {class: "dim"}, "No function is registered. Write one as YAML, and: tangram apply functions/"));
    } catch (error) { fill(told, problem(error, load)); }
  };
  load();
  let seen = JSON.stringify(store.d.fns);
  return {tick: () => { const now = JSON.stringify(store.d.fns); if (now !== seen) { seen = now; load(); } }, keys: rowKeys(body, go)};
}

const cost = (each) => Object.entries(each.cost).map(([kind, units]) => `${units && typeof units === "object" ? units.choices ? units.choices.join("/") : `${units.min}–${units.max}` : units} ${kind}`).join(", ") || "nothing";

export function functionView(view, go, params, name) {
  const head = h("div", {class: "head"}), send = h("div"), learned = h("div"), facts = h("div"), recent = h("tbody"), told = h("div"), changed = h("div");
  view.append(told, head, h("div", {class: "grid"}, h("div", {class: "col"}, panel("Send", "an invocation in mode async", send), panel("Latest", link(`/ui/invocations?q=fn:${name}`, "all"), recordTable(recent))),
    h("div", {class: "col"}, panel("What was learned", "duration by units", learned), panel("Changes", "since the gateway began", changed), panel("Definition", "", facts))));
  let log = null, gone = false;
  const load = async () => {
    try {
      const found = await get(`/v1/functions/${encodeURIComponent(name)}`);
      if (gone) return;
      document.title = `${name} · Tangram`;
      fill(head, h("h1", null, swatch(name), name, found.revision ? h("span", {class: "dim"}, `@${found.revision.slice(0, 8)}`) : null), h("p", {class: found.status === "unavailable" ? "problem" : "dim"}, HEALTH[found.status] || "", found.problem ? `: ${found.problem}` : "", found.description ? ` · ${found.description}` : ""));
      fill(send, form(found));
      fill(learned, ...curves(found));
      fill(changed, ...changes(found.changes || []));
      fill(facts, json({...found, changes: undefined, learned: undefined, input_schema: undefined, result_schema: undefined}), found.result_schema ? [h("h2", null, "Returns"), json(found.result_schema)] : null);
    } catch (error) { fill(told, problem(error, error.status === 404 ? null : load)); }
  };
  const latest = async () => {
    try { const page = await get(`/v1/invocations?function=${encodeURIComponent(name)}&limit=10`); fillIfNew(recent, page.invocations.map((each) => [each.id, each.state]), () => recordRows(page.invocations)); } catch { /* told above */ }
  };
  const form = (found) => {
    const schema = found.input_schema || {}, properties = Object.entries(schema.properties || {}), required = new Set(schema.required || []);
    const text = h("textarea", {class: "mono", rows: 8, spellcheck: false, "aria-label": "Input as JSON"});
    const start = {};
    for (const [field, about] of properties) if (required.has(field)) start[field] = about.default ?? about.examples?.[0] ?? blank(about);
    if (!properties.length && found.runtime === "exec") start.command = "echo hello";
    text.value = JSON.stringify(start, null, 2);
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

// Duration by units: T(m) = T_ori (s + (1 - s) / m), from what was learned.
function curves(found) {
  const learned = Object.entries(found.learned || {}).slice(0, 12);
  if (!learned.length) return [h("p", {class: "dim"}, "Nothing yet: the first ends teach it.")];
  const units = found.key ? found.cost[found.key] : null;
  const most = units && typeof units === "object" ? Math.max(units.max || 0, ...(units.choices || [])) : units || 1;
  const rows = h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null, ...["Key", "With one unit", "By size", "Serial", "Error", "Runs"].map((each) => h("th", null, each)))), h("tbody", null, ...learned.map(([key, each]) => h("tr", null,
    h("td", {class: "mono"}, key || "(all)"), h("td", null, duration(1000 * each.t_ori_s)), h("td", null, each.size ? `${duration(1000 * each.size.fixed_s)} + ${duration(1e6 * each.size.per_unit_s)} per 1000` : "–"), h("td", null, each.serial_fraction === null ? "–" : `${Math.round(100 * each.serial_fraction)} %`), h("td", null, `${Math.round(100 * each.error)} %`), h("td", null, count(each.observations)))))));
  if (most < 2) return [rows];
  const wide = 420, tall = 150, NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`); svg.setAttribute("class", "curve"); svg.setAttribute("role", "img"); svg.setAttribute("aria-label", `Duration by units of ${found.key}`);
  const top = Math.max(...learned.map(([, each]) => each.t_ori_s), 1e-6);
  for (const [, each] of learned) {
    const serial = each.serial_fraction ?? found.elasticity?.serial_fraction ?? 0, points = [];
    for (let m = 1; m <= most; m += 1) points.push(`${40 + (wide - 60) * Math.log2(m) / Math.log2(most)},${tall - 24 - (tall - 40) * (serial + (1 - serial) / m) * each.t_ori_s / top}`);
    const line = document.createElementNS(NS, "polyline");
    line.setAttribute("points", points.join(" ")); line.setAttribute("class", "curveline");
    svg.append(line);
  }
  for (let m = 1; m <= most; m *= 2) { const text = document.createElementNS(NS, "text"); text.setAttribute("x", 40 + (wide - 60) * Math.log2(m) / Math.log2(most) - 4); text.setAttribute("y", tall - 6); text.textContent = String(m); svg.append(text); }
  const high = document.createElementNS(NS, "text"); high.setAttribute("x", 0); high.setAttribute("y", 20); high.textContent = duration(1000 * top); svg.append(high);
  return [svg, h("p", {class: "dim"}, `units of ${found.key}; the bend is ${found.elasticity ? "declared, or " : ""}learned from ${count(learned.reduce((sum, [, each]) => sum + each.observations, 0))} runs`), rows];
}
