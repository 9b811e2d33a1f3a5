"""Write a small real state directory with the gateway of a checkout, kill that gateway, and keep what it left.

    python -m scripts.keep_state [--checkout DIRECTORY] [--into tests/data/states]

The result is ``schema-N.tar.gz``, N being the schema version of the checkout's record, with ``state/`` as ``kill -9``
left it, the configuration that it was served from, and ``expected.json``: what that gateway said of its records, and
what has to become of the rest. tests/e2e/test_states.py opens each with the gateway of today. Run it on the last commit
of a schema version, before the next one is made.
Only public things of the checkout are used (YAML and HTTP), so that it may be of any age.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tangram.client.credentials import Bearer

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 60.0
#: Where nobody listens, so that callbacks stay pending: whoever opens the directory puts an address of its own here.
NOBODY = "127.0.0.1:9"
#: What was running at the kill ends by itself so long after; run again later it ends at once.
RUNS_ON_S = 45
FOR_EVER = "100000d"
HANDLER = '''"""A handler that does what its input says."""

import time


def work(event, context):
    print("working on", event["n"])
    time.sleep(event.get("seconds", 0.0))
    if event.get("fails"):
        raise ValueError("as the input says: zwölf")
    return {"n": event["n"], "double": 2 * event["n"]}
'''


def document() -> dict[str, Any]:
    """The configuration: no core is needed, so that it means the same on every machine."""
    seat = {"cost": {"seats": 1}, "timeout": "5m", "queue_timeout": FOR_EVER}
    shell, handler = seat | {"runtime": "exec"}, seat | {"runtime": "handler", "handler": "handler:work"}
    return {
        "version": 1,
        "server": {
            "port": 0,
            "grpc_port": 0,
            "state_dir": "state",
            "max_age": FOR_EVER,
            "idempotency_ttl": FOR_EVER,
            "retention": {"records_age": FOR_EVER, "logs_age": FOR_EVER},
            "callbacks": {"allow": ["127.0.0.1/32"], "max_attempts": 1000},
        },
        "sandbox": {"provider": "process", "memory": "64Mi"},
        "resources": {"seats": {"kind": "concurrency", "limit": 8}, "single": {"kind": "concurrency", "limit": 1}},
        "functions": {
            "shell": shell,
            "brief": shell | {"timeout": "200ms"},
            "repeatable": shell | {"idempotent": True},
            "behind": shell | {"cost": {"single": 1}},
            "work": handler | {"duration": {"profile": "learned", "key": "suite"}},
            "retried": handler | {"retry": {"max_attempts": 3, "backoff": "10ms", "on": ["handler_error"]}},
        },
    }


class Gateway:
    """`tangram serve` of a checkout on a directory."""

    def __init__(self, checkout: Path, directory: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        argv = [sys.executable, "-m", "gateway", "serve", str(directory / "tangram.yaml")]
        self._process = subprocess.Popen(
            argv, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        serving: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(serving,), daemon=True).start()
        self.http = httpx.Client(
            base_url=f"http://{serving.get(timeout=DEADLINE_S)}", auth=Bearer(None), timeout=DEADLINE_S
        )

    def _read(self, serving: queue.Queue[str]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with suppress(ValueError):
                said = json.loads(line)
                if said.get("event") == "serving":
                    serving.put(said["http"])

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(timeout=DEADLINE_S)
        self.http.close()

    def call(self, function: str, given: Mapping[str, Any], mode: str = "async", **headers: str) -> dict[str, Any]:
        """The record that a call is answered with."""
        path = f"/v1/functions/{function}/invocations?mode={mode}"
        answer = self.http.post(
            path, json=given, headers={key.replace("_", "-"): text for key, text in headers.items()}
        )
        said: dict[str, Any] = answer.json()
        record: dict[str, Any] = said.get("invocation", said)
        assert "state" in record, said
        return record

    def record(self, invocation_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        said: dict[str, Any] = self.http.get(f"/v1/invocations/{invocation_id}?wait={wait_s}s").json()
        return said

    def log(self, invocation_id: str) -> list[list[str]]:
        """What it said so far: the whole text of each stream."""
        lines = self.http.get(f"/v1/invocations/{invocation_id}/logs").text.splitlines()
        records = [found for line in lines if "data" in (found := json.loads(line))]
        streams = sorted({str(found["stream"]) for found in records})
        return [[each, "".join(found["data"] for found in records if found["stream"] == each)] for each in streams]


@contextmanager
def serving(checkout: Path, directory: Path, end: signal.Signals) -> Iterator[Gateway]:
    """A gateway that is ended by this signal when all went well, and killed when not."""
    gateway = Gateway(checkout, directory)
    try:
        yield gateway
    except BaseException:
        gateway.end(signal.SIGKILL)
        raise
    gateway.end(end)


def until(condition: Callable[[], bool], what: str) -> None:
    gate = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        if condition():
            return
        gate.wait(0.05)
    raise TimeoutError(f"not within {DEADLINE_S} s: {what}")


def first_life(gateway: Gateway) -> list[str]:
    """What ends before the gateway is told to stop, in every way that there is."""
    ended = [gateway.call("work", {"n": n, "suite": f"s{n % 2}"}, X_Task="rl") for n in range(6)]
    ended.append(gateway.call("work", {"n": 6, "suite": "s0"}, mode="sync", Idempotency_Key="six"))
    tale = "echo zwölf; echo fehl >&2; exit 3"
    ended.append(gateway.call("shell", {"command": tale}, X_Trajectory_Id="told", X_Task="rl"))
    ended.append(gateway.call("work", {"n": 7, "fails": True}))
    ended.append(gateway.call("retried", {"n": 8, "fails": True}))
    ended.append(gateway.call("brief", {"command": "echo begun; sleep 60"}))
    cancelled = gateway.call("shell", {"command": "sleep 60"})
    gateway.http.post(f"/v1/invocations/{cancelled['id']}/cancel")
    parent = gateway.call("work", {"n": 9, "seconds": 1.0})
    child = gateway.call("work", {"n": 10}, X_Parent_Id=parent["id"])
    return [str(each["id"]) for each in (*ended, cancelled, parent, child)]


def second_life(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """What waits, runs or has to be told of when the gateway is killed: id -> what has to become of it."""
    runs_on = f"echo begun; until [ $(date +%s) -gt {int(time.time()) + RUNS_ON_S} ]; do sleep 0.2; done; echo ended"
    told = gateway.call("work", {"n": 11}, X_Callback_Url=f"http://{NOBODY}/told")
    lost = gateway.call("shell", {"command": runs_on}, X_Trajectory_Id="lost")
    again = gateway.call("repeatable", {"command": runs_on})
    twice = gateway.call("repeatable", {"command": runs_on}, X_Trajectory_Id="twice")
    blocking = gateway.call("behind", {"command": runs_on})
    running = [str(each["id"]) for each in (lost, again, twice, blocking)]
    until(lambda: all(gateway.log(each) for each in running), "what shall run has said something")
    queued = [
        gateway.call("behind", {"command": f"echo number {n}"}, X_Callback_Url=f"http://{NOBODY}/queued")
        for n in range(3)
    ]
    gateway.record(str(told["id"]), wait_s=DEADLINE_S)
    gone = {"state": "lost", "reason": "gateway_restart", "dead": True, "stdout": "begun\n"}
    fates: dict[str, dict[str, Any]] = {str(lost["id"]): gone, str(blocking["id"]): gone}
    repeated = {"state": "succeeded", "stdout": "begun\nbegun\nended\n"}
    fates[str(again["id"])] = repeated | {"attempt": 2}
    # Its second try is told that the trajectory's sandbox is lost, and it runs in no new, empty one.
    bereft = {"state": "failed", "reason": "environment_lost", "attempt": 2, "dead": True, "stdout": "begun\n"}
    fates[str(twice["id"])] = bereft
    for n, each in enumerate(queued):
        fates[str(each["id"])] = {"state": "succeeded", "attempt": 1, "stdout": f"number {n}\n", "callback": True}
    fates[str(told["id"])] = {"state": "succeeded", "callback": True}
    return fates


def keep(checkout: Path, directory: Path) -> dict[str, Any]:
    """Live twice in the directory, and say what is expected of whoever opens it next."""
    (directory / "tangram.yaml").write_text(yaml.safe_dump(document(), sort_keys=False))
    (directory / "handler.py").write_text(HANDLER)
    with serving(checkout, directory, signal.SIGTERM) as gateway:
        ended = first_life(gateway)
        for each in ended:
            gateway.record(each, wait_s=DEADLINE_S)
        logs = {each: gateway.log(each) for each in ended}
    with serving(checkout, directory, signal.SIGKILL) as gateway:
        learned = {name: gateway.http.get(f"/v1/functions/{name}").json()["learned"] for name in ("work", "shell")}
        records = {each: gateway.record(each) for each in ended}
        fates = second_life(gateway)
    return {
        "written_by": _git(checkout, "rev-parse", "--short", "HEAD"),
        "records": records,
        "logs": logs,
        "fates": fates,
        "learned": learned,
        "keys": [{"key": "six", "function": "work", "body": {"n": 6, "suite": "s0"}, "id": ended[6]}],
        "callbacks_to": NOBODY,
    }


def pack(directory: Path, into: Path) -> Path:
    """The directory as a small archive; sockets and the copies of the runner are left out."""
    with closing(sqlite3.connect(f"file:{directory / 'state' / 'tangram.sqlite'}?immutable=1", uri=True)) as file:
        version = int(file.execute("PRAGMA user_version").fetchone()[0])
    into.mkdir(parents=True, exist_ok=True)
    archive = into / f"schema-{version}.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(directory.rglob("*")):
            if path.is_dir() or (path.is_file() and path.name != "runner.py"):
                packed.add(path, path.relative_to(directory).as_posix(), recursive=False, filter=_anonymous)
    return archive


def end_runners(directory: Path) -> None:
    """End what the killed gateway left running."""
    for record in directory.glob("state/sandboxes/sandboxes/*/record.json"):
        pid = int(json.loads(record.read_text()).get("pid", 0))
        if pid > 1:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _git(checkout: Path, *argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Write one archive and say where it lies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--into", type=Path, default=ROOT / "tests" / "data" / "states")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tangram-state-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        place.chmod(0o755)  # the sandbox's user reads the handler
        try:
            expected = keep(given.checkout.resolve(), place)
        finally:
            end_runners(place)
        (place / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False))
        archive = pack(place, given.into)
    print(f"{archive}: {archive.stat().st_size} bytes")


if __name__ == "__main__":
    main()
