// The frame: views by address, the light of the connection, keys, theme, and who may come in.

import {clock, copied, count, duration, fill, forgetColours, h, setFunctions} from "./dom.js";
import {functionsView, functionView} from "./functions.js";
import {get, retryNow, setToken, start, stop, store, token, wantBars} from "./net.js";
import {nowView} from "./now.js";
import {configView, deadView, nodesView, tasksView, trajectoriesView, trajectoryView} from "./places.js";
import {oneView} from "./record.js";
import {listView} from "./records.js";
import {timelineView} from "./timelineview.js";

const VIEWS = [["now", "Now", "n", nowView], ["timeline", "Timeline", "t", timelineView], ["invocations", "Invocations", "i", listView, oneView], ["functions", "Functions", "u", functionsView, functionView],
  ["trajectories", "Trajectories", "r", trajectoriesView, trajectoryView], ["tasks", "Tasks", "s", tasksView], ["nodes", "Nodes", "o", nodesView], ["dead", "Dead letters", "d", deadView], ["config", "Configuration", "", configView]];
const HELP = [[VIEWS.map(([, , key]) => key).join(" "), "the views"], ["/", "find"], ["j k ↑ ↓ enter", "move in a list, open"], ["esc", "back"], ["[ ]", "previous and next of the trajectory"], ["c", "cancel (asks)"], ["y", "copy the link"],
  ["space + - 0 f ← →", "timeline: hold, zoom, fit, follow, move"], ["tab, then ← → ↑ ↓ enter", "timeline: from bar to bar, open"], ["l f", "log: go there, follow"], ["?", "this"]];
const HIDDEN_MS = 60000, STALE_MS = 7000, DEAD_EVERY_MS = 10000, DEAD_FIRST_MS = 1500, DEAD_SHOWN = 100, RESTART_TOLD_MS = 60000;
const at = (id) => document.getElementById(id);
const shown = {current: null, banner: "", pending: false, waiting: 0, patient: false, away: 0};

function go(href) { history.pushState(null, "", href); route(); }

function route() {
  const [, , name = "now", ...rest] = location.pathname.split("/"), view = at("view");
  const params = new URLSearchParams(location.search), id = rest.map(decodeURIComponent).join("/");
  const found = VIEWS.find(([each]) => each === name) || VIEWS[0];
  shown.current?.end?.();
  shown.current = null;
  at("menu").open = false;
  fill(view);
  document.title = `${found[1]} · Tangram`;
  for (const each of at("nav").children) { const on = each.dataset.v === found[0]; each.classList.toggle("on", on); on ? each.setAttribute("aria-current", "page") : each.removeAttribute("aria-current"); if (on) each.scrollIntoView({block: "nearest", inline: "nearest"}); }
  wantBars(found[0] === "now" || found[0] === "timeline");
  view.dataset.view = id && found[4] ? `${found[0]}-one` : found[0];
  if (store.status === "unauthorised") return showDoor();
  if (!store.d.verdict && (!shown.patient || found[0] === "now" || found[0] === "timeline")) { // the first state is on its way, with the colours
    shown.pending = true;
    clearTimeout(shown.waiting);
    shown.waiting = setTimeout(() => {
      fill(view, h("div", {class: "ghost"}), h("div", {class: "ghost tall"}), h("div", {class: "ghost tall"}));
      shown.waiting = setTimeout(() => { if (shown.pending) { shown.patient = true; shown.pending = false; route(); } }, 1500); // most views do without it
    }, 150);
    return;
  }
  shown.current = (id && found[4] ? found[4] : found[3])(view, go, params, id) || {};
  shown.current.tick?.();
  scrollTo(0, 0);
}

function showDoor() {
  clearTimeout(shown.waiting); shown.pending = false;
  shown.current?.end?.(); shown.current = null;
  const input = h("input", {type: "password", id: "token", autocomplete: "off", placeholder: "token", "aria-label": "Token"});
  const enter = () => { setToken(input.value.trim()); store.status = "connecting"; retryNow(); };
  fill(at("view"), h("form", {class: "panel card", onsubmit: (event) => { event.preventDefault(); enter(); }}, h("h2", {class: "big"}, "This gateway wants a token"),
    token() ? h("p", {class: "problem"}, store.reason || "The token is not that of this gateway.") : null,
    h("p", {class: "dim"}, "tangram token --admin", " prints it on the gateway's machine; the address that tangram serve printed needs none. It is kept in this tab only, and never in an address."),
    h("p", {class: "bar1"}, input, h("button", {class: "pri", type: "submit"}, "Come in"))));
  input.focus();
}

function heardOf(kind) {
  if (kind === "status") {
    if (store.status === "unauthorised") showDoor();
    else if (store.status === "live" && at("token")) route();
  }
  if (kind === "state" || kind === "tick") {
    if (store.d.fns) setFunctions(store.names, Object.keys(store.d.fns));
    if (shown.pending) { shown.pending = false; clearTimeout(shown.waiting); route(); }
    if (!document.hidden) shown.current?.tick?.();
  }
  showLight();
}

function showLight() {
  const silent_ms = Date.now() - store.last_ms, stale = store.status === "live" && silent_ms > STALE_MS, live = at("live"), livetext = at("livetext");
  const text = store.status === "live" ? (stale ? `${duration(silent_ms)} old` : "live") : store.status === "lost" ? "lost" : store.status === "unauthorised" ? "no token" : "connecting";
  if (livetext.textContent !== text) livetext.textContent = text;
  live.dataset.s = stale ? "lost" : store.status;
  document.body.classList.toggle("stale", store.status === "lost" || stale);
  let told = "";
  if (store.status === "lost" && store.last_ms) {
    const again_s = Math.max(0, Math.ceil((store.retry_at - Date.now()) / 1000));
    told = `Connection lost ${duration(silent_ms)} ago${store.reason ? ` (${store.reason})` : ""}. What you see is of ${clock(store.last_ms)}. Trying again in ${again_s} s`;
  } else if (store.status === "lost") told = `The gateway does not answer${store.reason ? ` (${store.reason})` : ""}. Trying again`;
  else if (store.restarted_ms && store.now() - store.restarted_ms < RESTART_TOLD_MS) told = `The gateway restarted at ${clock(store.restarted_ms)}; what it took over goes on`;
  if (told === shown.banner) return;
  shown.banner = told;
  const banner = at("banner");
  banner.hidden = !told;
  banner.className = store.status === "lost" ? "banner" : "banner quiet";
  // One button for as long as it is asked for: a click on one that is drawn anew meanwhile is lost.
  const [text_at, button] = banner.childNodes.length ? banner.childNodes : [h("span"), h("button", {onclick: retryNow}, "Try now")];
  if (!banner.childNodes.length) fill(banner, text_at, button);
  text_at.textContent = told;
  button.hidden = store.status !== "lost";
}

// How many dead letters there are, asked for where failures have come since.
async function countDead() {
  const link = at("nav").querySelector("[data-v=dead]");
  if (document.hidden || store.status !== "live" || link.dataset.of === String(store.d.failed_15min)) return;
  link.dataset.of = String(store.d.failed_15min);
  try {
    const {invocations, next_cursor} = await get(`/v1/invocations?dead=true&limit=${DEAD_SHOWN}`);
    fill(link, "Dead letters", invocations.length ? h("b", null, next_cursor ? `${DEAD_SHOWN}+` : count(invocations.length)) : null);
  } catch { delete link.dataset.of; }
}

function showKeys() {
  const box = at("ask");
  fill(box, h("h2", {class: "big"}, "Keys"), h("dl", null, ...HELP.flatMap(([key, about]) => [h("dt", {class: "mono"}, key), h("dd", null, about)])), h("button", {onclick: () => box.close()}, "Close"));
  box.showModal();
}

function showMenu() {
  if (!at("menu").open) return;
  fill(at("menuitems"), store.admin ? h("a", {href: "/ui/config"}, "Configuration") : null, h("button", {onclick: () => { at("menu").open = false; showKeys(); }}, "Keys"),
    h("span", {class: "dim"}, `Tangram ${store.version || "–"}`, store.began ? h("div", null, `up ${duration(store.now() - store.began)}`) : null));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "Escape" && typing && event.target.blur) { event.target.blur(); return; }
  if (typing) return;
  const {current} = shown;
  if (event.key === "/") { event.preventDefault(); (current?.focus || (() => at("find").focus()))(); return; }
  if (event.key === "?") return showKeys();
  if (event.key === "Escape") { if (at("menu").open) at("menu").open = false; else if (!current?.escape?.()) history.back(); return; }
  const own = current?.keys?.[event.key];
  if (own) { event.preventDefault(); own(); return; }
  if (event.key === "y") { copied(location.href, at("livetext")); return; }
  const named = VIEWS.find(([, , key]) => key === event.key);
  if (named) go(`/ui/${named[0]}`);
}

function onClick(event) {
  if (!event.target.closest?.("#menu")) at("menu").open = false;
  const anchor = event.target.closest?.("a[href^='/ui/']");
  if (anchor && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) { event.preventDefault(); go(anchor.getAttribute("href")); return; }
  const row = event.target.closest?.("tr[data-href]");
  if (row && !event.target.closest("button, input, a") && !String(getSelection())) go(row.dataset.href);
}

function onFind(event) {
  const find = at("find"), text = find.value.trim();
  if (event.key !== "Enter" || !text) return;
  find.value = ""; find.blur();
  if (/^[0-9a-f]{11}-[0-9a-f]{12}$/.test(text)) return go(`/ui/invocations/${text}`);
  if (store.d.fns?.[text]) return go(`/ui/functions/${text}`);
  if (store.d.tasks?.[text]) return go(`/ui/invocations?q=${encodeURIComponent(`task:${text}`)}`);
  go(`/ui/invocations?q=${encodeURIComponent(text.includes(":") ? text : `traj:${text}`)}`);
}

function dress() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = (name) => { root.dataset.theme = name === "auto" ? (dark.matches ? "dark" : "light") : name; root.dataset.chosen = name; forgetColours(); };
  const chosen = () => theme(localStorage.getItem("tangram-theme") || "auto");
  chosen();
  dark.addEventListener("change", chosen);
  at("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("tangram-theme", next); theme(next);
  });
}

export function begin() {
  at("nav").append(...VIEWS.filter(([name]) => name !== "config").map(([name, title, key]) => h("a", {href: `/ui/${name}`, "data-v": name, title: key ? `${title} (${key})` : title}, title)));
  dress();
  store.listeners.add(heardOf);
  setInterval(showLight, 500);
  setInterval(countDead, DEAD_EVERY_MS);
  setTimeout(countDead, DEAD_FIRST_MS);
  at("menu").addEventListener("toggle", showMenu);
  at("find").addEventListener("keydown", onFind);
  document.addEventListener("click", onClick);
  addEventListener("popstate", route);
  addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(shown.away);
    if (document.hidden) shown.away = setTimeout(stop, HIDDEN_MS);
    else if (store.status !== "unauthorised") { start(); shown.current?.tick?.(); }
  });
  route();
  start();
}
