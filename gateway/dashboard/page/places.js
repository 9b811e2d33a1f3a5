// Trajectories and their files, tasks, nodes and pools, dead letters, configuration.

import {bytes, confirmed, count, duration, fill, fillIfNew, h, link, panel, problem} from "./dom.js";
import {ask, get, store} from "./net.js";
import {endsOf, taskRows} from "./now.js";
import {poolRows} from "./pools.js";
import {stepsTick} from "./steps.js";
import {json, stripOf} from "./record.js";
import {listView, rowKeys} from "./records.js";

const table = (names, body) => h("div", {class: "scroll"}, h("table", {class: "list"}, h("thead", null, h("tr", null, ...names.map((each) => h("th", {class: each.startsWith("#") ? "num" : ""}, each.replace("#", ""))))), body));

function every(seconds, work) {
  let at = 0, busy = false;
  return async () => { if (busy || Date.now() - at < 1000 * seconds) return; at = Date.now(); busy = true; try { await work(); } finally { busy = false; } };
}

export function trajectoriesView(view, go) {
  const body = h("tbody"), told = h("div"), sums = h("p", {class: "dim"});
  view.append(sums, h("section", {class: "panel"}, table(["Trajectory", "State", "Task", "Node", "#Memory", "#Idle", "#Behind", ""], body), told));
  const end = async (name, busy) => {
    if (!await confirmed(`End trajectory ${name} with everything in its sandbox?${busy ? " Work of it runs or waits: it is cancelled." : ""}`, "End it")) return;
    try { await ask("DELETE", `/v1/trajectories/${encodeURIComponent(name)}`); await load(); } catch (error) { fill(told, problem(error)); }
  };
  const load = async () => {
    try {
      const page = await get("/v1/trajectories?limit=500");
      const rows = page.trajectories.sort((a, b) => b.idle_s - a.idle_s);
      fillIfNew(body, rows.map((each) => ({...each, idle_s: Math.round(each.idle_s)})), () => rows.map((each) => h("tr", {"data-href": `/ui/trajectories/${each.trajectory}`}, h("td", null, link(`/ui/trajectories/${each.trajectory}`, each.trajectory)),
        h("td", null, each.state), h("td", {class: "dim"}, each.task), h("td", {class: "dim"}, each.node || "–"), h("td", {class: "num"}, bytes(each.memory_bytes)), h("td", {class: "num", title: `ends after ${duration(1000 * each.ttl_s)}`}, each.state === "idle" ? duration(1000 * each.idle_s) : "–"),
        h("td", {class: "num"}, count(each.queued)), h("td", null, h("button", {onclick: () => end(each.trajectory, each.state !== "idle")}, "End")))));
      fill(told, rows.length ? (page.next_cursor ? h("p", {class: "dim"}, "These are the first 500 by name.") : null) : h("p", {class: "dim"}, "No trajectory lives. The first action with X-Trajectory-Id begins one."));
    } catch (error) { fill(told, problem(error, load)); }
  };
  load();
  const again = every(2, load);
  return {tick: () => { const t = store.d.traj || {}; sums.textContent = `${count(t.living || 0)} living: ${t.running || 0} running, ${t.queued || 0} waiting, ${t.memory || 0} for memory, ${t.idle || 0} idle (the model thinks)`; again(); }, keys: rowKeys(body, go)};
}

export function trajectoryView(view, go, params, name) {
  const facts = h("div"), strip = h("div"), files = h("div"), file = h("div"), told = h("div");
  view.append(h("h1", null, `Trajectory ${name}`), told, facts, strip, panel("Files", "of its sandbox", files, file));
  const base = `/v1/trajectories/${encodeURIComponent(name)}`;
  const list = async (path) => {
    try {
      const found = (await get(`${base}/files?path=${encodeURIComponent(path)}&list=true`)).files;
      const up = path.replace(/\/?[^/]*\/?$/, "");
      fill(files, h("p", {class: "mono"}, path === "." ? "working directory " : path, path === "." ? h("button", {onclick: () => list("/")}, "/") : h("button", {onclick: () => list(up || (path.startsWith("/") ? "/" : "."))}, "up")),
        table(["Name", "#Size", "Mode"], h("tbody", null, ...found.slice(0, 500).map((each) => h("tr", null, h("td", null, h("button", {class: "as-link mono", onclick: () => each.directory ? list(each.path) : show(each.path)}, each.path.split("/").pop() + (each.directory ? "/" : ""))),
          h("td", {class: "num"}, each.directory ? "–" : bytes(each.size_bytes)), h("td", {class: "mono dim"}, each.mode ?? ""))))), found.length ? null : h("p", {class: "dim"}, "It is empty."));
    } catch (error) { fill(files, error.status === 404 ? h("p", {class: "dim"}, "It has no sandbox now, so there are no files.") : problem(error)); }
  };
  const show = async (path) => {
    try {
      const text = String(await ask("GET", `${base}/files?path=${encodeURIComponent(path)}`));
      fill(file, h("p", {class: "mono"}, path), h("pre", {class: "mono json"}, text.slice(0, 2 ** 20)), text.length > 2 ** 20 ? h("p", {class: "dim"}, "the first MiB of it") : null);
    } catch (error) { fill(file, problem(error)); }
  };
  const load = async () => {
    try {
      const found = await get(base);
      fillIfNew(facts, {...found, idle_s: Math.round(found.idle_s)}, () => h("p", null, h("b", null, found.state), ` · task ${found.task} · ${bytes(found.memory_bytes)} on ${found.node || "no node yet"} · ends after ${duration(1000 * found.ttl_s)} without an action`, found.state === "idle" ? `, idle for ${duration(1000 * found.idle_s)}` : ""));
    } catch (error) { if (error.status === 404) fillIfNew(facts, 404, () => h("p", {class: "dim"}, "It does not live any more; what it did is still on record.")); else fill(told, problem(error)); }
    stripOf(strip, name, null, go);
  };
  load();
  list(".");
  return {tick: every(2, load)};
}

export function tasksView(view) {
  const rows = h("div"), body = h("tbody"), told = h("div");
  view.append(panel("Now", "queued, running, ended", rows), h("section", {class: "panel"}, h("div", {class: "h"}, h("h2", null, "Since the start"), h("span", null, "use against weight; ACT of what was completed: started, and neither cancelled nor lost")), table(["Task", "#Weight", "#Core-s", "#GPU-s", "#Quota units", "#Ended", "#Completed", "#ACT mean", "queue | overhead | execution"], body), told));
  const load = async () => {
    try {
      const found = (await get("/v1/tasks")).tasks, most = Math.max(...found.map((each) => each.act_s || 0), 1e-9);
      fillIfNew(body, found, () => found.map((each) => {
        const {ended} = endsOf(each.settled || {}), completed = each.completed || 0, parts = [each.queue_s || 0, each.overhead_s || 0, each.execution_s || 0];
        return h("tr", null, h("td", null, link(`/ui/invocations?q=${encodeURIComponent(`task:${each.task}`)}`, each.task)), h("td", {class: "num"}, String(each.weight)), h("td", {class: "num"}, count(each.core_s)), h("td", {class: "num"}, count(each.gpu_s)),
          h("td", {class: "num"}, Object.values(each.quota_units).length ? count(Object.values(each.quota_units).reduce((sum, many) => sum + many, 0)) : "–"), h("td", {class: "num"}, count(ended)), h("td", {class: "num"}, count(completed)), h("td", {class: "num"}, completed ? duration(1000 * (each.act_s || 0) / completed) : "–"),
          h("td", {class: "wide"}, h("span", {class: "split small", style: {width: `${100 * (each.act_s || 0) / most}%`}}, ...["queue", "overhead", "execution"].map((name, at) => h("i", {class: `p-${name}`, style: {flex: `${parts[at]} 1 0`}})))));
      }));
      fill(told, found.length ? null : h("p", {class: "dim"}, "No task is configured or was seen."));
    } catch (error) { fill(told, problem(error, load)); }
  };
  load();
  const again = every(2, load);
  return {tick: () => { fillIfNew(rows, [store.d.tasks, store.d.steps, stepsTick()], () => taskRows(store.d.tasks || {}, store.d.steps)); again(); }};
}

const NODE_SIGNS = {ready: "✓", joining: "◌", unfit: "!", suspect: "?", draining: "–", drained: "○", lost: "✕"};

export function nodesView(view) {
  const nodes = h("div"), pools = h("div"), sandboxes = h("div"), told = h("div"), storm = h("div");
  view.append(told, panel("Nodes and pools", "who holds what", pools), panel("Nodes", "the machines that actions run on", storm, nodes), panel("Sandboxes", "what they are, in plain words", sandboxes));
  const drain = async (name) => {
    if (!await confirmed(`Drain ${name}? Nothing new starts there; it leaves when what runs there has ended.`, "Drain it")) return;
    try { await ask("POST", `/v1/nodes/${encodeURIComponent(name)}/drain`, {why: "asked for on the page"}); await load(); } catch (error) { fill(told, problem(error)); }
  };
  const row = (each, held) => {
    const unable = Object.entries(each.unable || {}), labels = Object.entries(each.labels || {});
    const load_ = each.cores ? Math.min(1, each.running / each.cores) : 0;
    return h("tr", null,
      h("td", null, h("b", null, each.node), each.local ? h("span", {class: "dim"}, " this machine") : null),
      h("td", null, h("span", {class: each.state === "ready" ? "" : each.state === "lost" ? "problem" : "dim"}, `${NODE_SIGNS[each.state] || "?"} ${each.state}`), each.since_s ? h("span", {class: "dim"}, ` ${duration(1000 * each.since_s)}`) : null, each.why ? h("div", {class: "dim"}, each.why) : null),
      h("td", {class: "wide"}, h("span", {class: "quota", role: "img", "aria-label": `${each.running} actions on ${each.cores} cores`}, h("i", {style: {width: `${100 * load_}%`}})), h("span", {class: "dim"}, `${count(each.running)} run`)),
      h("td", {class: "num"}, count(each.cores)), h("td", {class: "num"}, each.devices && each.device_kind === "cpu" ? `${count(each.devices)} CPU` : count(each.devices)),
      h("td", {class: "num"}, `${bytes(held)} of ${bytes(each.memory_bytes)}`), h("td", {class: "num"}, count(each.trajectories)),
      h("td", {class: "mono"}, labels.map(([name, value]) => `${name}=${value}`).join(" ") || "–"),
      h("td", null, each.peer || (each.local ? "inline" : "–"), each.version ? h("span", {class: "dim"}, ` ${each.version}`) : null, each.losses ? h("div", {class: "dim"}, `lost ${count(each.losses)} times of late`) : null,
        unable.length ? h("div", {class: "dim", title: unable.map(([name, why]) => `${name}: ${why}`).join("\n")}, `cannot run ${unable.map(([name]) => name).join(", ")}`) : null),
      h("td", null, each.local || ["draining", "drained", "lost"].includes(each.state) ? null : h("button", {onclick: () => drain(each.node)}, "Drain")));
  };
  const load = async () => {
    try {
      const [found, joined] = await Promise.all([get("/v1/resources"), get("/v1/nodes")]);
      const held = Object.fromEntries(found.nodes.map((each) => [each.node, each.held_bytes]));
      fillIfNew(nodes, [joined.nodes, held], () => table(["Node", "State", "Load", "#Cores", "#Devices", "#Memory held", "#Trajectories", "Labels", "Link", ""], h("tbody", null, ...joined.nodes.map((each) => row(each, held[each.node] || 0)))));
      fillIfNew(storm, joined.storm_s > 0, () => joined.storm_s > 0 ? [h("p", {class: "problem"}, "Many machines were silent within a short time: none is counted lost until that is over.")] : []);
      const box = found.sandboxes;
      fillIfNew(sandboxes, [box, found.models.swaps], () => [h("p", null, h("b", null, box.kind), ` (${box.engine}): ${box.isolation}`), ...box.weakenings.map((each) => h("p", {class: "problem"}, each)),
        h("p", {class: "dim"}, Object.entries(box.limits).map(([name, held]) => `${held ? "✓" : "✕"} ${name}`).join("   ")), found.models.devices.length ? h("p", {class: "dim"}, `models: ${count(found.models.executions)} executions, ${count(found.models.swaps)} swaps, ${Math.round(100 * found.models.hit_rate)} % found in place`) : null]);
      fill(told);
    } catch (error) { fill(told, problem(error, load)); }
  };
  load();
  const again = every(2, load);
  return {tick: () => { fillIfNew(pools, [store.d.pools, store.d.nodes], () => store.d.pools ? poolRows(store.d) : []); again(); }};
}

export function deadView(view, go, params) {
  const told = h("div");
  let shown = null;
  const one = (record) => h("button", {onclick: async () => { try { const made = await ask("POST", `/v1/dead-letters/${record.id}/redrive`); go(`/ui/invocations/${made.id}`); } catch (error) { fill(told, problem(error)); } }}, "Redrive");
  const all = h("button", {onclick: async () => {
    try {
      const page = await get("/v1/invocations?dead=true&limit=200");
      if (!page.invocations.length || !await confirmed(`Send ${page.invocations.length} dead letters again?`, `Redrive ${page.invocations.length}`)) return;
      let sent = 0;
      for (const each of page.invocations) { await ask("POST", `/v1/dead-letters/${each.id}/redrive`); sent += 1; fill(told, h("p", {class: "dim"}, `${sent} of ${page.invocations.length} sent again`)); }
      shown.refresh();
    } catch (error) { fill(told, problem(error)); }
  }}, "Redrive all (200 at most)");
  const counted = async () => { try { const page = await get("/v1/invocations?dead=true&limit=200"), many = page.invocations.length; all.textContent = page.next_cursor ? "Redrive the newest 200" : `Redrive all ${count(many)}`; all.hidden = !many; } catch { /* the list tells it */ } };
  counted();
  view.append(told);
  const given = Object.assign(new URLSearchParams(params), {fixed: "dead:true", extra: one, head: all, none: "No dead letters. Asynchronous calls that end badly for good are listed here."});
  shown = listView(view, go, given);
  return shown;
}

export function configView(view) {
  const text = h("textarea", {class: "mono", rows: 18, spellcheck: false, "aria-label": "Configuration as YAML", placeholder: "version: 1\nfunctions:\n  hello:\n    runtime: exec\n    ..."});
  const told = h("div"), prune = h("input", {type: "checkbox", id: "prune"}), apply = h("button", {class: "danger", hidden: true}, "Apply");
  const send = async (dry) => {
    try {
      const found = await ask("PUT", `/v1/config?dry_run=${dry}${prune.checked ? "&prune=true" : ""}`, text.value, {"Content-Type": "application/yaml"});
      const none = !Object.keys(found.added).length && !Object.keys(found.changed).length && !found.removed.length;
      fill(told, h("p", null, h("b", null, dry ? (none ? "No function would change." : "This would change:") : "Applied.")), json(found));
      apply.hidden = !dry;
    } catch (error) { fill(told, problem(error)); apply.hidden = true; }
  };
  apply.addEventListener("click", async () => { if (await confirmed("Apply this configuration? New invocations see it at once; nothing in flight is dropped.", "Apply it")) { await send(false); apply.hidden = true; } });
  text.addEventListener("input", () => { apply.hidden = true; });
  view.append(panel("Configuration", "needs the admin token; the difference is shown before anything is applied", text, h("p", {class: "bar1"}, h("button", {class: "pri", onclick: () => send(true)}, "Show the difference"), h("label", {class: "check"}, prune, " remove what it does not name"), apply), told));
  return {};
}
