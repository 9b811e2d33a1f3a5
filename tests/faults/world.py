"""The world outside a gateway that is killed: a server that counts what was really done, and clients that retry."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from runtimes.sandbox.environments import TRAJECTORY
from runtimes.sandbox.spec import SandboxRecord
from tangram.client.requests import Bearer
from tests.e2e.gateway import START_S, GatewayProcess, document
from tests.listening import Answering, ThreadedServer

#: Nothing in these tests takes so long unless it is broken.
DEADLINE_S = 60.0
#: The same of what is waited for with several machines.
UNTIL_S = 180.0
#: What the counting server takes for an answer, so that there is work to kill.
WORK_S = 0.03
RETRY_S = 0.05
#: Of one call: as many as there are while a gateway starts.
ATTEMPTS = int(START_S / RETRY_S)
#: One for all: making a client costs more than a call.
HTTP = httpx.Client(auth=Bearer(None), trust_env=False, timeout=DEADLINE_S)


class Deeds(ThreadedServer):
    """Counts by name what was done, and keeps those doing it waiting for a moment, or until it is let go."""

    def __init__(self) -> None:
        super().__init__(_Deed)
        self.done: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.held = threading.Event()
        self.held.set()

    def __exit__(self, *exc: object) -> None:
        self.held.set()
        super().__exit__(*exc)

    def handle_error(self, request: object, client_address: object) -> None:
        """The gateway that asked was killed: that is the test."""


class _Deed(Answering):
    server: Deeds

    def asked(self) -> None:
        name = self.path.rpartition("=")[2]
        with self.server.lock:
            self.server.done[name] += 1
        threading.Event().wait(WORK_S)
        self.server.held.wait(DEADLINE_S)
        self.answer(200, b"{}")


def faulty(
    directory: Path,
    deeds: Deeds,
    server: Mapping[str, object] | None = None,
    scheduler: Mapping[str, object] | None = None,
    **functions: dict[str, Any],
) -> GatewayProcess:
    """A gateway over local processes with a deed that may be done once and one that may be repeated.

    ``functions`` are deeds of their own: what they change of the first.
    """
    request = {"method": "GET", "url": deeds.url + "/do?name={name}"}
    named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    deed: dict[str, Any] = {"runtime": "api", "request": request, "input": named, "cost": {"cpu": 1}, "timeout": "20s"}
    others = {name: deed | changes for name, changes in functions.items()}
    described = document("process", directory / "state", once=deed, again=deed | {"idempotent": True}, **others)
    described["server"] = {**described["server"], **(server or {})}
    described["scheduler"] = dict(scheduler or {})
    return GatewayProcess(directory, described)


class Submitter:
    """Submits one call after the other under a key each, and repeats each until it is accepted."""

    def __init__(self, url: Callable[[], str], function: str) -> None:
        self._url = url
        self._function = function
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        #: Name of each accepted call, and the id that it was accepted under.
        self.accepted: dict[str, str] = {}
        #: Answers 503 that said when to come again.
        self.refused = 0
        #: Whatever went against the promise.
        self.complaints: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """No new calls; returns when the last is accepted."""
        self._stop.set()
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "a call was never accepted"

    def _run(self) -> None:
        while not self._stop.is_set():
            name = f"{self._function}-{uuid.uuid4().hex[:12]}"
            self.accepted[name] = self._submit(name)
            self._stop.wait(0.005)

    def _submit(self, name: str) -> str:
        for _ in range(ATTEMPTS):
            try:
                answer = HTTP.post(
                    f"{self._url()}/v1/functions/{self._function}/invocations",
                    params={"mode": "async"},
                    json={"name": name},
                    headers={"Idempotency-Key": name},
                    timeout=5.0,
                )
            except httpx.TransportError:
                self._pause()
                continue
            if answer.status_code in (200, 202):
                return str(answer.json()["id"])
            if answer.status_code not in (429, 503):
                self.complaints.append(f"{name}: {answer.status_code} {answer.text}")
                return ""
            if "retry-after" not in answer.headers:
                self.complaints.append(f"{name}: {answer.status_code} without Retry-After")
            self.refused += 1
            self._pause()
        self.complaints.append(f"{name}: never accepted")
        return ""

    @staticmethod
    def _pause() -> None:
        threading.Event().wait(RETRY_S)


def record(gateway: GatewayProcess, invocation_id: str, wait_s: float = DEADLINE_S) -> dict[str, Any]:
    """The invocation's record, after its end or after ``wait_s``."""
    answer = HTTP.get(
        f"{gateway.url}/v1/invocations/{invocation_id}", params={"wait": f"{wait_s}s"}, timeout=wait_s + 5
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    if found["ended_at"] is not None:
        accepted, ended = (datetime.fromisoformat(found[name]) for name in ("accepted_at", "ended_at"))
        parts_ms = found["queue_ms"] + found["overhead_ms"] + found["execution_ms"]
        assert abs(parts_ms - (ended - accepted) / timedelta(milliseconds=1)) < 0.01, found
    return found


def series(gateway: GatewayProcess) -> dict[str, float]:
    """The metrics that count invocations and units, summed by name (and state, for units)."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in HTTP.get(f"{gateway.url}/metrics", timeout=5.0).text.splitlines():
        head, _, value = line.rpartition(" ")
        name, _, labels = head.partition("{")
        if name == "tangram_units":
            name += ":free" if 'state="free"' in labels else ":total"
        if name.startswith("tangram_") and "_created" not in name:
            found[name] += float(value)
    return dict(found)


def balanced(sample: Mapping[str, float]) -> bool:
    """accepted = queued + running + terminal."""
    accepted = sample.get("tangram_invocations_accepted_total", 0)
    living = sample.get("tangram_invocations_queued", 0) + sample.get("tangram_invocations_running", 0)
    return accepted == living + sample.get("tangram_invocations_ended_total", 0)


def until(condition: Callable[[], bool], what: str = "it came about") -> None:
    """Ask again and again until it holds; fails at the deadline."""
    gate, ends_s = threading.Event(), time.monotonic() + UNTIL_S
    while not condition():
        assert time.monotonic() < ends_s, f"not within {UNTIL_S} s: {what}"
        gate.wait(0.02)


def prepared(gateway: GatewayProcess) -> bool:
    """Every function that can be served is."""
    return not HTTP.get(f"{gateway.url}/readyz").json()["preparing"]


def at_rest(gateway: GatewayProcess) -> bool:
    """Nothing lives, and every unit is free."""
    sample = series(gateway)
    living = ("tangram_invocations_queued", "tangram_invocations_running", "tangram_living")
    free = sample["tangram_units:free"] == sample["tangram_units:total"]
    return balanced(sample) and free and not any(sample.get(name, 0) for name in living)


def sandboxes(gateway: GatewayProcess) -> list[SandboxRecord]:
    """The trajectories' sandboxes, as the gateway wrote them down."""
    files = (gateway.directory / "state" / "sandboxes").glob("*/*/record.json")
    records = [SandboxRecord.read(file.parent) for file in files]
    return [found for found in records if found is not None and TRAJECTORY in found.labels]


def runner_pids(gateway: GatewayProcess) -> list[int]:
    """The runners of the trajectories' process sandboxes."""
    return [found.pid for found in sandboxes(gateway)]
