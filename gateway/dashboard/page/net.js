// What is asked of the gateway, and its stream: one connection, told small changes, resumed after a cut.

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

const RETRY_S = [1, 2, 4, 8, 15];
const BARS_MAX = 20000, SPARK_MAX = 240;

// Everything that the stream has told, and how it stands with it.
export const store = {
  d: {}, names: ["other"], bars: new Map(), version: "", epoch: null, restarted_ms: null, spark: {run: [], wait: [], end: [], bad: []},
  status: "connecting", drift_ms: 0, last_ms: 0, retry_at: 0, reason: "", skipped: 0, gaps: 0,
  listeners: new Set(),
  tell(kind) { for (const each of this.listeners) each(kind); },
  now() { return Date.now() + this.drift_ms; },
  unauthorised(body) { this.status = "unauthorised"; this.reason = body.detail || ""; stop(); this.tell("status"); },
};

let controller = null, timer = 0, tries = 0, last = null, wanted = false;

export function start() { wanted = true; tries = 0; connect(); }
export function stop() { wanted = false; clearTimeout(timer); controller?.abort(); controller = null; }
export function retryNow() { tries = 0; clearTimeout(timer); controller?.abort(); controller = null; wanted = true; connect(); }

async function connect() {
  if (controller) return;
  const mine = controller = new AbortController();
  try {
    const since = last ? `&since=${last}` : "";
    const response = await fetch(`/v1/watch?bars=true${since}`, {headers: headers(), signal: mine.signal, cache: "no-store"});
    if (response.status === 401 || response.status === 403) return store.unauthorised(await response.json().catch(() => ({})));
    if (!response.ok) throw new Refused(response.status, await response.json().catch(() => ({})));
    await read(response.body.pipeThrough(new TextDecoderStream()).getReader());
  } catch (error) {
    if (mine.signal.aborted) return;
    store.reason = store.reason || error.message;
  }
  if (controller === mine) controller = null;
  if (wanted) lost();
}

function lost() {
  const wait_s = RETRY_S[Math.min(tries, RETRY_S.length - 1)];
  tries += 1;
  store.status = "lost";
  store.retry_at = Date.now() + 1000 * wait_s;
  store.tell("status");
  clearTimeout(timer);
  timer = setTimeout(connect, 1000 * wait_s);
}

async function read(reader) {
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const each of parts) take(each);
  }
}

function take(text) {
  let id = null, kind = "", data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("id: ")) id = line.slice(4);
    else if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data = line.slice(6);
  }
  if (id) last = id;
  handle(kind, JSON.parse(data));
}

export function handle(kind, told) {
  if (told.now) {
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
    store.epoch = told.epoch; store.version = told.version; store.began = told.began;
  } else if (kind === "gap") {
    store.gaps += 1;
  } else if (kind === "bye") {
    store.reason = told.reason;
  } else if (kind === "state") {
    store.d = told.d;
    if (told.spark) { store.spark.end = spread(told.spark); }
    bars(told.bars);
  } else if (kind === "tick") {
    if (told.d) merge(store.d, told.d);
    bars(told.bars);
  }
  if (kind === "state" || kind === "tick") {
    tries = 0;
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

function bars(told) {
  if (!told) return;
  if (told.names) { const [first, names] = told.names; names.forEach((name, at) => { store.names[first + at] = name; }); }
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
  for (const key of store.bars.keys()) { if (store.bars.size <= BARS_MAX) break; store.bars.delete(key); }
}

addEventListener("online", () => store.status === "lost" && retryNow());
addEventListener("focus", () => store.status === "lost" && retryNow());
window.tangramHandle = handle; // a recorded stream is played to the page by it
