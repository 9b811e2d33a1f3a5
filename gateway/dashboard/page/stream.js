// One connection to the gateway's stream: kept up, resumed after a cut, told on event by event. Runs in a tab and in the
// worker that tabs share.

const RETRY_S = [1, 2, 4, 8, 15];

export class Stream {
  // `told` is given each {event, at, bars}: its text, the last event's id, and whether the stream tells bars; and each
  // {status, reason, retry_at}: lost or unauthorised.
  constructor(token, told) {
    Object.assign(this, {token, told, at: null, bars: false, wanted: false, tries: 0, timer: 0, controller: null, reason: ""});
  }

  start(since, bars, history_s) { Object.assign(this, {wanted: true, at: since, bars, history_s}); this.connect(); }

  stop() { this.wanted = false; this.cut(); }

  cut() { clearTimeout(this.timer); this.controller?.abort(); this.controller = null; }

  retryNow() { this.tries = 0; this.cut(); this.connect(); }

  // With bars or without, from where it is on.
  want(bars) { if (bars !== this.bars) { this.bars = bars; this.cut(); if (this.wanted) this.connect(); } }

  async connect() {
    if (this.controller) return;
    clearTimeout(this.timer);
    const mine = this.controller = new AbortController(), {bars} = this;
    try {
      const response = await fetch(`/v1/watch?bars=${bars}${this.at ? `&since=${this.at}` : ""}${this.history_s ? `&history=${this.history_s}` : ""}`,
        {headers: this.token ? {Authorization: `Bearer ${this.token}`} : {}, signal: mine.signal, cache: "no-store"});
      if (!response.ok) {
        const reason = (await response.json().catch(() => ({}))).detail || `the gateway answered ${response.status}`;
        if (response.status === 401 || response.status === 403) { this.stop(); return this.told({status: "unauthorised", reason}); }
        throw new Error(reason);
      }
      await this.read(response.body.pipeThrough(new TextDecoderStream()).getReader(), mine, bars);
    } catch (error) {
      if (mine.signal.aborted) return;
      this.reason = this.reason || error.message;
    }
    if (this.controller !== mine) return;
    this.controller = null;
    if (this.wanted) this.lost();
  }

  lost() {
    const wait_ms = 1000 * RETRY_S[Math.min(this.tries, RETRY_S.length - 1)];
    this.tries += 1;
    this.timer = setTimeout(() => this.connect(), wait_ms);
    this.told({status: "lost", reason: this.reason, retry_at: Date.now() + wait_ms});
  }

  async read(reader, mine, bars) {
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done || mine.signal.aborted) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const text of parts) {
        const event = parsed(text);
        if (event.id) { this.at = event.id; this.tries = 0; this.reason = ""; }
        if (event.kind === "bye") this.reason = JSON.parse(event.data).reason;
        this.told({event: text, at: this.at, bars});
        if (mine.signal.aborted) return;
      }
    }
  }
}

export function parsed(text) {
  const event = {id: null, kind: "", data: ""};
  for (const line of text.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("event: ")) event.kind = line.slice(7);
    else if (line.startsWith("data: ")) event.data = line.slice(6);
  }
  return event;
}

// Whether who has seen the event `last` misses nothing if told what follows the event `at`.
export function follows(at, last) {
  const [epoch, number] = (at || "").split("."), [seen, lastNumber] = (last || "").split(".");
  return Boolean(epoch) && epoch === seen && Number(number) <= Number(lastNumber) + 1;
}
