// The worker that the tabs of a browser share: one connection to the gateway for all that have the same token.

import {Stream} from "./stream.js";

// A tab that closes may not say so: one that leaves this many pings unanswered is gone. Answers are counted, not seconds,
// so that a machine that slept loses none.
const PING_MS = Number(self.name), UNANSWERED_MAX = 3; // tabs name the worker by the milliseconds between two pings
const groups = new Map(); // by token: the stream, and its members with what they want

function leave(port) {
  for (const [token, {stream, members}] of groups) {
    if (!members.delete(port)) continue;
    if (members.size) wanted({stream, members});
    else { stream.stop(); groups.delete(token); }
  }
}

const anyBars = (members) => [...members.values()].some((each) => each.bars);
function wanted({stream, members}) { stream.want(anyBars(members)); }

function join(port, {token, since, bars}) {
  leave(port);
  let group = groups.get(token);
  if (!group) {
    const members = new Map();
    group = {members, stream: new Stream(token, (told) => {
      for (const each of members.keys()) each.postMessage(told);
      if (told.status === "unauthorised") groups.delete(token);
    })};
    groups.set(token, group);
  }
  group.members.set(port, {bars, unanswered: 0});
  if (group.stream.wanted) wanted(group);
  else group.stream.start(since, bars);
}

const member = (port) => [...groups.values()].find(({members}) => members.has(port));

addEventListener("connect", ({ports: [port]}) => {
  port.onmessage = ({data}) => {
    const group = member(port);
    if (data.kind === "join") join(port, data);
    else if (data.kind === "leave") leave(port);
    else if (!group) return;
    else if (data.kind === "pong") group.members.get(port).unanswered = 0;
    else if (data.kind === "bars") { group.members.get(port).bars = data.bars; wanted(group); }
    else if (data.kind === "retry" && !group.stream.controller) group.stream.retryNow();
  };
});

setInterval(() => {
  for (const {members} of [...groups.values()]) {
    for (const [port, each] of [...members]) {
      if (each.unanswered >= UNANSWERED_MAX) { leave(port); continue; }
      each.unanswered += 1;
      port.postMessage({ping: true});
    }
  }
}, PING_MS);
