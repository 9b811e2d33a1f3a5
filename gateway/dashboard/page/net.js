// What is asked of the gateway, and what its stream of small changes tells.

import {follows, parsed, Stream} from "./stream.js";

export class Refused extends Error {
  constructor(status, body) {
    super(body.detail || `the gateway answered ${status}`);
    this.status = status;
    this.code = body.code;
    this.title = body.title;
  }
}

const KEY = "tangram-token";
export const token = () => sessionStorage.getItem(KEY) || "";
export function setToken(value) { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); }

function headers(more) {
  const bearer = token();
  return {...(bearer ? {Authorization: `Bearer ${bearer}`} : {}), ...more};
}

export async function ask(method, path, body, more) {
  const sent = body === undefined ? {} : {body: typeof body === "string" ? body : JSON.stringify(body)};
  const kind = body === undefined ? {} : {"Content-Type": "application/json"};
  const response = await fetch(path, {method, headers: headers({...kind, ...more}), ...sent, cache: "no-store"});
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const found = isJson ? await response.json() : await response.text();
  if (!response.ok) {
    if (response.status === 401) store.unauthorised(found);
    throw new Refused(response.status, isJson ? found : {detail: String(found).slice(0, 200)});
  }
  return found;
}
export const get = (path) => ask("GET", path);

export async function* lines(path, signal) {
  const response = await fetch(path, {headers: headers(), signal, cache: "no-store"});
  if (!response.ok) throw new Refused(response.status, await response.json().catch(() => ({})));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const each of parts) yield each;
  }
}

const BARS_MAX = 20000, SPARK_MAX = 240;

// Everything that the stream has told, and how it stands with it.
export const store = {
  d: {}, names: ["other"], bars: new Map(), changes: 0, since_ms: null, frozen_ms: null, version: "", admin: true, epoch: null, restarted_ms: null, spark: {run: [], wait: [], end: [], bad: []},
  status: "connecting", drift_ms: 0, last_ms: 0, retry_at: 0, reason: "", skipped: 0, gaps: 0,
  listeners: new Set(),
  tell(kind) { this.changes += 1; for (const each of this.listeners) each(kind); },
  now() { return this.frozen_ms ?? Date.now() + this.drift_ms; },
  unauthorised(body) { this.status = "unauthorised"; this.reason = body.detail || ""; stop(); this.tell("status"); },
};

// The stream of this tab's own tells the beginning. Then the worker's, which all tabs of the browser with this token
// share, takes over once it leaves nothing out; where there is no worker, or it falls silent, the tab's own goes on.
const WORKER = "/ui/worker.js", PING_MS = 15000, SILENT_MS = 3 * PING_MS, BARS_KEPT_MS = 300000, WORKERS_MAX = 3, HISTORY_S = 1800;
let own = null, port = null, joined = false, heard_ms = 0, workers = 0, last = null, wanted = false, bars_wanted = false, barsTimer = 0, history_epoch = null, asking = false;

export function start() { if (!wanted) { wanted = true; startOwn(last); } }
export function stop() {
  wanted = joined = false;
  own?.stop(); own = null;
  port?.postMessage({kind: "leave"});
}
export function retryNow() {
  if (!wanted) start();
  else if (own) own.retryNow();
  else port?.postMessage({kind: "retry"});
}

// Bars are told while a timeline is looked at, and some minutes more: who looks elsewhere and comes back misses none.
export function wantBars(on) {
  clearTimeout(barsTimer);
  if (!on) { if (bars_wanted) barsTimer = setTimeout(() => setBars(false), BARS_KEPT_MS); return; }
  if (!bars_wanted) setBars(true);
}
function setBars(on) {
  bars_wanted = on;
  if (joined) port.postMessage({kind: "bars", bars: on});
  if (!wanted) return;
  if (on) startOwn(null); // with the bars of the last minutes
  else own?.want(false);
}

// Who looks further back than what was told asks once for as much as there is.
export function wantHistory(seconds) {
  if (!wanted || store.status !== "live" || history_epoch === store.epoch || store.since_ms === null || store.now() - 1000 * seconds >= store.since_ms || store.since_ms <= store.began) return;
  history_epoch = store.epoch;
  startOwn(null, HISTORY_S);
}

function startOwn(since, history_s) {
  if (asking) [since, history_s] = [null, HISTORY_S]; // the history that was asked for is still to come
  asking = Boolean(history_s);
  own?.stop();
  const mine = own = new Stream(token(), (told) => { if (own === mine) heard(told); });
  own.start(since, bars_wanted, history_s);
}

function heard({event, status, reason, retry_at}) {
  if (event) take(event);
  else if (status === "unauthorised") store.unauthorised({detail: reason});
  else if (status) { Object.assign(store, {status, retry_at, reason: reason || store.reason}); store.tell("status"); }
  if (own && event && last && !joined) join();
}

function join() {
  if (!port && (typeof SharedWorker === "undefined" || workers >= WORKERS_MAX)) return;
  if (!port) {
    try {
      const worker = new SharedWorker(WORKER, {name: String(PING_MS)});
      workers += 1;
      worker.onerror = withoutWorker;
      port = worker.port;
      port.onmessage = ({data}) => fromWorker(data);
    } catch { workers = WORKERS_MAX; return; }
  }
  joined = true; heard_ms = Date.now();
  port.postMessage({kind: "join", token: token(), since: last, bars: bars_wanted});
}

function fromWorker(told) {
  heard_ms = Date.now();
  if (told.ping) return port?.postMessage({kind: "pong"});
  if (!joined) return; // said before it heard that this tab left
  if (own && !asking && told.event && follows(told.at, last) && (told.bars || !bars_wanted)) { own.stop(); own = null; workers = 0; }
  if (!own) heard(told);
}

function withoutWorker() {
  port?.postMessage({kind: "leave"});
  port?.close();
  port = null; joined = false;
  if (wanted && !own) startOwn(last);
}
setInterval(() => joined && Date.now() - heard_ms > SILENT_MS && withoutWorker(), 5000);
addEventListener("pagehide", stop);
addEventListener("pageshow", (event) => event.persisted && start());

function take(text) {
  const {id, kind, data} = parsed(text);
  if (kind === "tick" && id && last && follows(id, last) && Number(id.split(".")[1]) <= Number(last.split(".")[1])) return; // told already
  if (id) last = id;
  if (kind === "state") asking = false;
  handle(kind, JSON.parse(data));
}

export function handle(kind, told) {
  const before_ms = store.told_ms;
  if (told.now) {
    store.told_ms = told.now;
    const drift = told.now - Date.now();
    store.drift_ms = Math.abs(drift - store.drift_ms) > 2000 ? drift : store.drift_ms + 0.1 * (drift - store.drift_ms);
    store.last_ms = Date.now();
  }
  if (kind === "hello") {
    if (store.epoch && store.epoch !== told.epoch) {
      store.restarted_ms = told.began;
      for (const bar of store.bars.values()) if (bar.end === null) { bar.end = told.began; bar.reason = "gateway_restart"; }
      for (const bar of [...store.bars.values()]) { store.bars.delete(bar.key); bar.key = `${store.epoch}.${bar.number}`; store.bars.set(bar.key, bar); }
    }
    store.epoch = told.epoch; store.version = told.version; store.began = told.began; store.admin = told.admin !== false;
  } else if (kind === "gap") {
    store.gaps += 1;
  } else if (kind === "bye") {
    store.reason = told.reason;
  } else if (kind === "state") {
    store.d = told.d;
    if (told.spark) { store.spark.end = spread(told.spark); }
    bars(told.bars);
    if (told.bars?.since) { // what was told before goes on where nothing was left out between
      store.since_ms = store.since_ms !== null && before_ms >= told.bars.since ? Math.min(store.since_ms, told.bars.since) : told.bars.since;
      store.bars = new Map([...store.bars].sort(([, one], [, other]) => one.start - other.start));
    }
  } else if (kind === "tick") {
    if (told.d) merge(store.d, told.d);
    bars(told.bars);
  }
  if (told.names) named(told.names);
  if (kind === "state" || kind === "tick") {
    if (store.status !== "live") { store.status = "live"; store.reason = ""; store.tell("status"); }
    note("run", store.d.run); note("wait", store.d.wait); note("bad", store.d.failed_15min);
    if (kind === "tick" || !told.spark) note("end", store.d.rate?.[1]);
    store.tell(kind);
  }
}

const spread = (seconds) => { // ended in the last minute, as of each second of the last
  const found = []; let sum = 0;
  seconds.forEach((each, at) => { sum += each - (at >= 60 ? seconds[at - 60] : 0); if (at >= 60) found.push(sum); });
  return found;
};
function note(name, value) {
  const list = store.spark[name];
  list.push(value || 0);
  if (list.length > SPARK_MAX) list.shift();
}

const KEYED = new Set(["pools", "nodes", "tasks", "steps", "fns", "traj"]);
function merge(state, changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (!KEYED.has(name) || !state[name]) { state[name] = value; continue; }
    for (const [key, each] of Object.entries(value)) each === null ? delete state[name][key] : state[name][key] = each;
  }
}

function named([first, names]) { names.forEach((name, at) => { store.names[first + at] = name; }); }

function bars(told) {
  if (!told) return;
  if (told.names) named(told.names);
  store.skipped += told.left_out || 0;
  const name = (number) => store.names[number] ?? "other";
  for (const [number, id, fn, task, trajectory, start, queue, places] of told.s || []) {
    const key = `${store.epoch}.${number}`;
    if (store.bars.has(key)) continue;
    store.bars.set(key, {key, number, id, fn: name(fn), task: name(task), trajectory: trajectory || null, start, queue,
      places: places.map(([pool, first, units]) => [name(pool), first, units]), prep: 0, end: null, reason: null});
  }
  for (const [number, prep, execution, reason] of told.e || []) {
    const bar = store.bars.get(`${store.epoch}.${number}`);
    if (bar) { bar.prep = prep; bar.end = bar.start + prep + execution; bar.reason = reason || ""; }
  }
  for (const [key, bar] of store.bars) {
    if (store.bars.size <= BARS_MAX) break;
    store.bars.delete(key);
    store.since_ms = Math.max(store.since_ms ?? 0, bar.end ?? bar.start);
  }
}

addEventListener("online", () => store.status === "lost" && retryNow());
addEventListener("focus", () => store.status === "lost" && retryNow());
window.tangramHandle = handle; // a recorded stream is played to the page by it
