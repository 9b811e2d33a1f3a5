"""The callers: every kind of call, each repeated only where that is safe, and everything that they were told."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from bench.kills.history import KilledCall, KillHistory, Line, Record
from bench.kills.judge import FRAIL, OVER
from tangram.client.aio_stream import AsyncCallStream
from tangram.client.requests import Bearer, trust_of
from tangram.errors import ConnectionFailed
from tangram.stream import StreamCall, StreamWait
from tangram.types import CallHeaders, CallOptions

#: Nothing may take longer, whatever is killed meanwhile.
HUNG_S = 120.0
RETRY_S, PAUSE_S = 0.1, 0.15
TRAJECTORIES, METERED, BATCH, AT_ONCE = 3, 4, 5, 16
SUITE = "def test_passes(): pass\ndef test_fails(): assert False\n"
#: Each notes that it begins and that it ends.
COMMAND = (
    "mkdir -p suite; printf '{suite}' > suite/test_it.py; echo {name} >> ran; "
    "for i in 1 2 3; do echo {name} $i; sleep 0.1; done; echo {name}" + OVER + " >> ran"
)
#: One that is cut before its end.
LONG = "echo {name} >> ran; sleep 100; echo {name}" + OVER + " >> ran"
DEADLINE, CUT, CANCELLED_AFTER_S = "1s", 0.4, 1.5


class SometimesStreamed(httpx.AsyncHTTPTransport):
    """Sends every other call, and wait, over a stream of calls, and all else over HTTP."""

    def __init__(self, url: str, random_: random.Random) -> None:
        super().__init__()
        self._random = random_
        self._stream = AsyncCallStream(url, Bearer(None), trust_of(False, None, None), None)
        for _ in range(2):  # always more than one call in flight
            self._stream.enter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        message = self._message(request) if self._random.random() < 0.5 else None
        try:
            answer = None if message is None else await self._stream.carry(message)
        except ConnectionFailed as error:
            raise httpx.ReadError(str(error)) from error
        if answer is None:
            return await super().handle_async_request(request)
        again_s = json.loads(answer.body).get("retry_after_s")
        return httpx.Response(
            answer.status, headers={} if again_s is None else {"retry-after": str(again_s)}, content=answer.body
        )

    @staticmethod
    def _message(request: httpx.Request) -> StreamCall | StreamWait | None:
        query, path = dict(request.url.params), request.url.path.split("/")
        if path[-1] == "invocations" and request.method == "POST" and query.get("mode") != "stream":
            names = zip(CallHeaders.__struct_fields__, CallHeaders.__struct_encode_fields__, strict=True)
            options = {name: request.headers[header] for name, header in names if header in request.headers}
            return StreamCall(0, path[3], request.content, CallOptions(**options, **query))
        return StreamWait(0, path[-1], query["wait"]) if "wait" in query and path[-2] == "invocations" else None

    async def aclose(self) -> None:
        await self._stream.close()
        await super().aclose()


class Callers:
    """All who call a gateway while it is killed, until they are told to stop."""

    def __init__(
        self, url: str, told: str, history: KillHistory, random_: random.Random, nodes: Sequence[str] = ()
    ) -> None:
        """``told`` is where callbacks go; on each of ``nodes`` is a trajectory."""
        self._nodes = nodes
        self._history, self._random, self._told = history, random_, told
        transport = SometimesStreamed(url, random_)
        self._http = httpx.AsyncClient(base_url=url, auth=Bearer(None), timeout=HUNG_S, transport=transport)
        self._stopped = asyncio.Event()
        #: Requests that were sent again.
        self.repeated = 0

    async def run(self) -> None:
        """Call until stopped, and return when the last call has its answer."""
        everybody: list[Callable[[], Awaitable[None]]] = [
            self._with_callback,
            self._repeatable,
            self._sync,
            self._sync_keyed,
            self._stream,
            self._batch,
            self._nested,
            *[self._metered] * METERED,
        ]
        async with asyncio.TaskGroup() as group:
            for act in everybody:
                group.create_task(self._again_and_again(act))
            placed = {f"kills-{number}": "shell" for number in range(TRAJECTORIES)} | {FRAIL: "shell"}
            placed |= {f"kills-{node}": f"shell_{node}" for node in self._nodes}
            for name, function in placed.items():
                group.create_task(self._again_and_again(partial(self._trajectory, name, function)))

    def stop(self) -> None:
        self._stopped.set()

    async def close(self) -> None:
        await self._http.aclose()

    async def collect(self) -> None:
        """Read what is left to read: the last records, each log twice, the trajectories' files."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def read(call: KilledCall) -> None:
            async with gate:
                for each in sorted(call.ids)[:1]:
                    answer = await self._http.get(f"/v1/invocations/{each}", params={"wait": "60s"})
                    call.last = answer.json() if answer.status_code == 200 else None
                    if call.last is not None and call.function not in ("once", "again", "metered"):
                        call.logs += [await self._log(each), await self._log(each)]

        await asyncio.gather(*map(read, self._history.calls))
        for name in sorted({each.trajectory for each in self._history.calls if each.trajectory}):
            answer = await self._http.get(f"/v1/trajectories/{name}/files", params={"path": "ran"})
            self._history.files[name] = answer.text.split() if answer.status_code == 200 else None
            self._history.done.update(self._history.files[name] or [])
            await self._http.delete(f"/v1/trajectories/{name}")

    async def _again_and_again(self, act: Callable[[], Awaitable[None]]) -> None:
        while not self._stopped.is_set():
            await act()
            await asyncio.sleep(PAUSE_S * self._random.uniform(0.5, 1.5))

    # The kinds of calls

    async def _with_callback(self) -> None:
        await self._submit(self._new("once", calls_back=True))

    async def _repeatable(self) -> None:
        await self._submit(self._new("again", idempotent=True, calls_back=self._random.random() < 0.5))

    async def _metered(self) -> None:
        call = self._new("metered")
        await self._submit(call)
        await self._wait(call)

    async def _sync(self) -> None:
        call = self._new("once", keyed=False)
        await self._send(call, {"mode": "sync"})

    async def _sync_keyed(self) -> None:
        await self._send(self._new("once"), {"mode": "sync"})

    async def _nested(self) -> None:
        """A handler at work, and a call that says that it is its child."""
        parent = self._new("echo")
        await self._submit(parent, {"name": parent.name, "hold_s": 0.3})
        await self._send(self._new("once"), {"mode": "sync"}, headers={"X-Parent-Id": next(iter(parent.ids), "")})
        await self._wait(parent)

    async def _stream(self) -> None:
        """Not repeated: who asked for a stream has it or not."""
        call = self._new("echo", keyed=False)
        lines: list[Line] = []
        try:
            path = f"/v1/functions/{call.function}/invocations"
            body = {"name": call.name, "hold_s": 0.1}
            async with self._http.stream("POST", path, params={"mode": "stream"}, json=body) as answer:
                async for text in answer.aiter_lines():
                    self._read(call, lines, json.loads(text))
        except (httpx.TransportError, ValueError):  # a line that was cut is no line
            pass
        call.logs.append(lines)

    async def _batch(self) -> None:
        calls = [
            self._new("again", idempotent=True) if number % 2 else self._new("once", calls_back=False)
            for number in range(BATCH)
        ]
        for call in calls:
            call.durable = True
        body = {"calls": [{"function": c.function, "input": {"name": c.name}, "key": c.name} for c in calls]}
        left = time.monotonic() + HUNG_S
        while time.monotonic() < left:
            answer = await self._insist("POST", "/v1/invocations:batch", json=body)
            verdicts = [] if answer is None else self._json(answer).get("results", [])
            if answer is None or len(verdicts) != len(calls):
                self._history.refused.append(f"batch: {'no answer' if answer is None else answer.text[:300]}")
                return
            for call, verdict in zip(calls, verdicts, strict=True):
                if "invocation" in verdict:
                    self._accepted(call, verdict["invocation"])
            if all(verdict["status"] not in (429, 503) for verdict in verdicts):
                return
            await asyncio.sleep(RETRY_S)

    async def _trajectory(self, name: str, function: str) -> None:
        """Commands in a row, the first one's log followed; now and then one in between is cut, and then a reward."""
        cuts = ["", self._random.choice(("cancelled", "timed_out")), ""] if self._random.random() < CUT else ["", ""]
        row = [self._new(function, trajectory=name, cut=cut) for cut in cuts]
        for call in row:
            command = (LONG if call.cut else COMMAND).format(name=call.name, suite=SUITE.replace("\n", "\\n"))
            deadline = {"X-Timeout": DEADLINE} if call.cut == "timed_out" else {}
            await self._submit(call, {"command": command}, deadline)
        await self._follow(row[0])
        for call in row:
            if call.cut == "cancelled":
                await asyncio.sleep(self._random.uniform(0, CANCELLED_AFTER_S))
                await self._cancel(call)
        ends = [await self._wait(call) for call in row]
        whole = all(
            end is not None and end["state"] == (call.cut or "succeeded") for call, end in zip(row, ends, strict=True)
        )
        if function == "shell" and whole and self._random.random() < 0.4:
            suite = self._new("suite", trajectory=None, calls_back=True)
            await self._submit(suite, {"cwd": "suite"}, headers={"X-Trajectory-Id": name})
            await self._wait(suite)

    async def _cancel(self, call: KilledCall) -> None:
        """Ask for its end until it has ended: a request that was answered with 202 dies with its gateway."""
        left = time.monotonic() + HUNG_S
        while time.monotonic() < left:
            for each in call.ids:
                answer = await self._insist("POST", f"/v1/invocations/{each}/cancel")
                if answer is None or answer.status_code in (200, 409):
                    return
                if answer.status_code != 202:
                    self._history.refused.append(f"{call.name}, cancelled: {answer.status_code} {answer.text[:300]!r}")
                    return
            await asyncio.sleep(RETRY_S)

    # How they ask

    def _new(self, function: str, *, keyed: bool = True, **about: Any) -> KilledCall:
        call = KilledCall(name=f"{function}-{secrets.token_hex(6)}", function=function, keyed=keyed, **about)
        call.durable = keyed
        self._history.calls.append(call)
        return call

    async def _submit(
        self, call: KilledCall, input: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._send(call, {"mode": "async"}, input, headers)

    async def _send(
        self,
        call: KilledCall,
        query: Mapping[str, str],
        input: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """One call, repeated until there is an answer if it has a key."""
        about = dict(headers or {})
        if call.keyed:
            about["Idempotency-Key"] = call.name
        if call.trajectory is not None:
            about["X-Trajectory-Id"] = call.trajectory
        if call.calls_back:
            about["X-Callback-Url"] = self._told
        path = f"/v1/functions/{call.function}/invocations"
        body = {"name": call.name} if input is None else input
        answer = await self._insist("POST", path, again=call.keyed, params=query, json=body, headers=about)
        if answer is None:
            if call.keyed:
                self._history.refused.append(f"{call.name}: no answer within {HUNG_S:g} s")
            return
        told = self._json(answer)
        record = told if answer.status_code in (200, 202) else told.get("invocation")
        if not record and told.get("errors") == {"path": "parent"}:
            return  # which was lost with the gateway, or has ended meanwhile
        if not record:
            self._history.refused.append(
                f"{call.name}: {answer.status_code} {answer.text[:300]!r} {dict(answer.headers)}"
            )
        else:
            self._accepted(call, record)

    @staticmethod
    def _json(answer: httpx.Response) -> dict[str, Any]:
        """The body; empty where it is none of ours."""
        try:
            found = answer.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _accepted(self, call: KilledCall, record: Record) -> None:
        call.ids.add(record["id"])
        if record["ended_at"] is not None:
            call.told.append(record)

    async def _wait(self, call: KilledCall) -> Record | None:
        """Its end, as a waiting caller is told it."""
        for each in call.ids:
            answer = await self._insist("GET", f"/v1/invocations/{each}", params={"wait": "30s"})
            if answer is not None and answer.status_code == 200 and self._json(answer).get("ended_at") is not None:
                call.told.append(self._json(answer))
                return call.told[-1]
        return None

    async def _insist(self, method: str, path: str, *, again: bool = True, **request: Any) -> httpx.Response | None:
        """Ask until there is an answer that is no refusal; a broken connection is only repaired where ``again``."""
        left = time.monotonic() + HUNG_S
        while time.monotonic() < left:
            try:
                answer = await self._http.request(method, path, **request)
            except httpx.TransportError:
                if not again:
                    return None
                self.repeated += 1
                await asyncio.sleep(RETRY_S)
                continue
            if answer.status_code not in (429, 503):
                return answer
            self.repeated += 1
            if "retry-after" not in answer.headers:
                self._history.unhelpful.append(f"{path}: {answer.status_code} {answer.text[:200]}")
            await asyncio.sleep(min(float(answer.headers.get("retry-after", RETRY_S)), 1.0))
        return None

    # What they read

    async def _follow(self, call: KilledCall) -> None:
        """A live reading of its log, as far as the connection lasts."""
        lines: list[Line] = []
        for each in call.ids:
            try:
                path = f"/v1/invocations/{each}/logs"
                async with self._http.stream("GET", path, params={"follow": "true"}) as answer:
                    async for text in answer.aiter_lines():
                        self._read(call, lines, json.loads(text))
            except (httpx.TransportError, ValueError, KeyError):
                pass
        call.logs.append(lines)

    async def _log(self, id: str) -> Sequence[Line]:
        answer = await self._http.get(f"/v1/invocations/{id}/logs")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        return [(line["offset"], line["stream"], line["data"]) for line in lines if "data" in line]

    def _read(self, call: KilledCall, lines: list[Line], line: Record) -> None:
        if "invocation" in line:
            self._accepted(call, line["invocation"])
        elif "data" in line and "offset" in line:
            lines.append((line["offset"], line["stream"], line["data"]))
