// The drawer beside the timeline: the record of a bar, its times, and its log.

import {describe} from "./bars.js";
import {fill, h, link, problem, stateSign, swatch} from "./dom.js";
import {LogView} from "./log.js";
import {get} from "./net.js";
import {ENDED, factsOf, timesOf} from "./record.js";

const AGAIN_MS = 1000;

// Shows a bar in `box` until `end`; `close` is what its cross does.
export function pinned(box, bar, go, close) {
  const head = h("div", {class: "h"}), about = h("div"), log = new LogView(bar.id);
  let stopped = false, timer = 0;
  const headed = (sign) => fill(head, h("h2", null, sign, swatch(bar.fn), link(`/ui/invocations/${bar.id}`, bar.fn)),
    h("span", {class: "bar1"}, h("button", {title: "enter", onclick: () => go(`/ui/invocations/${bar.id}`)}, "Open"), h("button", {"aria-label": "Close", title: "esc", onclick: close}, "✕")));
  const load = async () => {
    try {
      const record = await get(`/v1/invocations/${encodeURIComponent(bar.id)}`);
      if (stopped) return;
      headed(stateSign(record.state));
      fill(about, record.reason ? h("p", {class: "problem"}, h("b", null, record.reason), " ", record.message) : null, timesOf(record), factsOf(record));
      if (!ENDED.has(record.state)) timer = setTimeout(load, AGAIN_MS);
    } catch (error) { if (!stopped) fill(about, problem(error, load), describe(bar)); }
  };
  headed(null);
  fill(about, describe(bar));
  fill(box, head, about, log.panel);
  load();
  log.start();
  return {bar, end: () => { stopped = true; clearTimeout(timer); log.stop(); fill(box); }};
}
