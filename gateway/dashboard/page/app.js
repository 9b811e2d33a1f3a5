// The frame: views by address, the light of the connection, keys, theme, and the door.

import {clock, duration, fill, forgetColours, h, setFunctions} from "./dom.js";
import {functionsView, functionView} from "./functions.js";
import {ask, retryNow, setToken, start, stop, store, token, wantBars} from "./net.js";
import {nowView} from "./now.js";
import {configView, deadView, nodesView, tasksView, trajectoriesView, trajectoryView} from "./places.js";
import {listView, oneView} from "./records.js";
import {timelineView} from "./timeline.js";

const VIEWS = [["now", "Now", "n", nowView], ["timeline", "Timeline", "t", timelineView], ["invocations", "Invocations", "i", listView, oneView], ["functions", "Functions", "u", functionsView, functionView],
  ["trajectories", "Trajectories", "r", trajectoriesView, trajectoryView], ["tasks", "Tasks", "s", tasksView], ["nodes", "Nodes", "o", nodesView], ["dead", "Dead letters", "d", deadView], ["config", "Configuration", "", configView]];
const view = document.getElementById("view"), banner = document.getElementById("banner"), livetext = document.getElementById("livetext"), live = document.getElementById("live");
const nav = document.getElementById("nav"), find = document.getElementById("find");
let current = null, told = "";
const HIDDEN_MS = 60000, STALE_MS = 7000;

nav.append(...VIEWS.map(([name, title, key]) => h("a", {href: `/ui/${name}`, "data-v": name, title: key ? `${title} (${key})` : title}, title)));

function go(href) { history.pushState(null, "", href); route(); }

function route() {
  const [, , name = "now", ...rest] = location.pathname.split("/");
  const params = new URLSearchParams(location.search), id = rest.map(decodeURIComponent).join("/");
  const found = VIEWS.find(([each]) => each === name) || VIEWS[0];
  current?.end?.();
  current = null;
  fill(view);
  document.title = `${found[1]} · Tangram`;
  for (const each of nav.children) { const on = each.dataset.v === found[0]; each.classList.toggle("on", on); on ? each.setAttribute("aria-current", "page") : each.removeAttribute("aria-current"); if (on) each.scrollIntoView({block: "nearest", inline: "nearest"}); }
  wantBars(found[0] === "now" || found[0] === "timeline");
  view.dataset.view = id && found[4] ? `${found[0]}-one` : found[0];
  if (store.status === "unauthorised") return showDoor();
  if (!store.d.verdict && (!patient || found[0] === "now" || found[0] === "timeline")) { // the first state is on its way, with the colours
    pending = true;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      fill(view, h("div", {class: "ghost"}), h("div", {class: "ghost tall"}), h("div", {class: "ghost tall"}));
      waiting = setTimeout(() => { if (pending) { patient = true; pending = false; route(); } }, 1500); // most views do without it
    }, 150);
    return;
  }
  current = (id && found[4] ? found[4] : found[3])(view, go, params, id) || {};
  current.tick?.();
  scrollTo(0, 0);
}
let pending = false, waiting = 0, patient = false;

function showDoor() {
  clearTimeout(waiting); pending = false;
  current?.end?.(); current = null;
  const input = h("input", {type: "password", id: "token", autocomplete: "off", placeholder: "token", "aria-label": "Token"});
  const enter = () => { setToken(input.value.trim()); store.status = "connecting"; retryNow(); };
  fill(view, h("form", {class: "panel card", onsubmit: (event) => { event.preventDefault(); enter(); }}, h("h2", {class: "big"}, "This gateway wants a token"),
    token() ? h("p", {class: "problem"}, store.reason || "The token is not that of this gateway.") : null,
    h("p", {class: "dim"}, "tangram token --admin", " prints it on the gateway's machine; the address that tangram serve printed needs none. It is kept in this tab only, and never in an address."),
    h("p", {class: "bar1"}, input, h("button", {class: "pri", type: "submit"}, "Come in"))));
  input.focus();
}

store.listeners.add((kind) => {
  if (kind === "status") {
    if (store.status === "unauthorised") showDoor();
    else if (store.status === "live" && view.querySelector("#token")) route();
  }
  if (kind === "state" || kind === "tick") {
    if (store.d.fns) setFunctions(store.names, Object.keys(store.d.fns));
    if (pending) { pending = false; clearTimeout(waiting); route(); }
    if (!document.hidden) current?.tick?.();
  }
  showLight();
});

function showLight() {
  const silent_ms = Date.now() - store.last_ms, stale = store.status === "live" && silent_ms > STALE_MS;
  const text = store.status === "live" ? (stale ? `silent ${duration(silent_ms)}` : "live") : store.status === "lost" ? "lost" : store.status === "unauthorised" ? "no token" : "connecting";
  if (livetext.textContent !== text) livetext.textContent = text;
  live.dataset.s = stale ? "lost" : store.status;
  document.body.classList.toggle("stale", store.status === "lost" || stale);
  let shown = "";
  if (store.status === "lost" && store.last_ms) {
    const again_s = Math.max(0, Math.ceil((store.retry_at - Date.now()) / 1000));
    shown = `Connection lost ${duration(silent_ms)} ago${store.reason ? ` (${store.reason})` : ""}. What you see is of ${clock(store.last_ms)}. Trying again in ${again_s} s`;
  } else if (store.status === "lost") shown = `The gateway does not answer${store.reason ? ` (${store.reason})` : ""}. Trying again`;
  else if (store.restarted_ms && store.now() - store.restarted_ms < 60000) shown = `The gateway restarted at ${clock(store.restarted_ms)}; what it took over goes on`;
  if (shown === told) return;
  told = shown;
  banner.hidden = !shown;
  banner.className = store.status === "lost" ? "banner" : "banner quiet";
  fill(banner, h("span", null, shown), store.status === "lost" ? h("button", {onclick: retryNow}, "Try now") : null);
}
setInterval(showLight, 500);

document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href^='/ui/']");
  if (anchor && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) { event.preventDefault(); go(anchor.getAttribute("href")); return; }
  const row = event.target.closest?.("tr[data-href]");
  if (row && !event.target.closest("button, input, a") && !String(getSelection())) go(row.dataset.href);
});
addEventListener("popstate", route);

const HELP = [[VIEWS.map(([, , key]) => key).join(" "), "the views"], ["/", "find"], ["j k ↑ ↓ enter", "move in a list, open"], ["esc", "back"], ["[ ]", "previous and next of the trajectory"], ["c", "cancel (asks)"], ["y", "copy the link"],
  ["space + - 0 f ← →", "timeline: hold, zoom, fit, follow, move"], ["l f", "log: go there, follow"], ["?", "this"]];
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "Escape" && typing && event.target.blur) { event.target.blur(); return; }
  if (typing) return;
  if (event.key === "/") { event.preventDefault(); (current?.focus || (() => find.focus()))(); return; }
  if (event.key === "?") { const box = document.getElementById("ask"); fill(box, h("h2", {class: "big"}, "Keys"), h("dl", null, ...HELP.flatMap(([key, about]) => [h("dt", {class: "mono"}, key), h("dd", null, about)])), h("button", {onclick: () => box.close()}, "Close")); box.showModal(); return; }
  if (event.key === "Escape") { history.back(); return; }
  const own = current?.keys?.[event.key];
  if (own) { event.preventDefault(); own(); return; }
  const named = VIEWS.find(([, , key]) => key === event.key);
  if (named) go(`/ui/${named[0]}`);
});

find.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !find.value.trim()) return;
  const text = find.value.trim();
  find.value = ""; find.blur();
  if (/^[0-9a-f]{11}-[0-9a-f]{12}$/.test(text)) return go(`/ui/invocations/${text}`);
  if (store.d.fns?.[text]) return go(`/ui/functions/${text}`);
  if (store.d.tasks?.[text]) return go(`/ui/invocations?q=${encodeURIComponent(`task:${text}`)}`);
  go(`/ui/invocations?q=${encodeURIComponent(text.includes(":") ? text : `traj:${text}`)}`);
});

const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
function theme(name) { root.dataset.theme = name === "auto" ? (dark.matches ? "dark" : "light") : name; root.dataset.chosen = name; forgetColours(); }
theme(localStorage.getItem("tangram-theme") || "auto");
dark.addEventListener("change", () => theme(localStorage.getItem("tangram-theme") || "auto"));
document.getElementById("theme").addEventListener("click", () => {
  const next = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("tangram-theme", next); theme(next);
});

let away = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(away);
  if (document.hidden) away = setTimeout(stop, HIDDEN_MS);
  else if (store.status !== "unauthorised") { start(); current?.tick?.(); }
});

route();
start();
