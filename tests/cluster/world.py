"""A gateway that takes nodes, daemons that join it, and a relay between them, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from tangram import Client, Retries
from tangram.types import NodeStatus
from tests import warm
from tests.e2e.gateway import GatewayProcess
from tests.faults.world import HTTP, until
from tests.runtimes.node.session import kept_in

#: Nothing takes so long unless it is broken, on however busy a machine.
DEADLINE_S = STOP_S = 180.0
#: Says a line every 20 ms, a hundred times: long enough to be met in the middle.
TALE = 'i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo "line $i"; sleep 0.02; done; echo run >> runs; cat runs'
TOLD = "".join(f"line {number}\n" for number in range(1, 101)) + "run\n"


def document(state: Path, provider: str, **cluster: object) -> dict[str, Any]:
    """A gateway whose own machine has one core, and which takes nodes."""
    shell = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "5m", "queue_timeout": "5m", "log_limit": "4Mi"}
    shell["input"] = {"type": "object", "anyOf": [{"required": ["command"]}, {"required": ["argv"]}]}
    return {
        "version": 1,
        "server": {"port": 0, "grpc_port": 0, "ports": {"port": 0}, "state_dir": str(state), "drain_grace": "200ms"},
        "node": {"cpu": {"cores": "0"}, "memory": "1Gi"},
        "cluster": {"listen": "127.0.0.1:0", "beat": "300ms", "silent": "3s", "lost_after": "5m", **cluster},
        "sandbox": {"provider": provider, "image": "tangram-base:bookworm", "memory": "128Mi"},
        "functions": {
            "once": shell,
            "again": shell | {"idempotent": True},
            "there": shell | {"nodes": {"pool": "there"}},
            "elsewhere": shell | {"nodes": {"pool": "elsewhere"}},
            "there_again": shell | {"nodes": {"pool": "there"}, "idempotent": True},
            "suite_there": {"runtime": "pytest", "cost": {"cpu": 1}, "timeout": "5m", "nodes": {"pool": "there"}},
        },
    }


class ClusterGateway(GatewayProcess):
    """A gateway that nodes join."""

    def client(self, retries: Retries | None = None) -> Client:
        return Client(self.url, retries=retries)

    @property
    def door(self) -> tuple[str, str]:
        """Where nodes join, and the fingerprint of the certificate there."""
        for line in reversed(self.log):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if said.get("event") == "nodes may join":
                return said["listen"], said["fingerprint"]
        raise AssertionError("it takes no nodes")

    def listen_at(self, listen: str) -> None:
        """Have the next start listen where the last one did: its nodes look for it there."""
        written = yaml.safe_load((self.directory / "tangram.yaml").read_text())
        written["cluster"]["listen"] = listen
        self.write(written)

    def kill_and_start(self) -> None:
        """Kill it, and start the next one where its nodes look for it."""
        listen = self.door[0]
        self.kill()
        self.listen_at(listen)
        self.start()

    def ticket(self, name: str) -> str:
        answer = HTTP.post(f"{self.url}/v1/node-tickets", json={"name": name})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["ticket"])

    def node(self, name: str) -> NodeStatus | None:
        with self.client() as client:
            return next((each for each in client.nodes() if each.node == name), None)

    def has(self, name: str) -> NodeStatus:
        """The node as it is now; one that has not joined is an error."""
        found = self.node(name)
        assert found is not None, f"node {name} has not joined"
        return found

    def nodes(self) -> list[NodeStatus]:
        with self.client() as client:
            return list(client.nodes())

    def ready(self) -> dict[str, Any]:
        """What /readyz answers."""
        answer: dict[str, Any] = HTTP.get(f"{self.url}/readyz").json()
        return answer

    def metrics(self) -> str:
        answer = HTTP.get(f"{self.url}/metrics")
        assert answer.status_code == 200, answer.text
        return answer.text

    def until_state(self, name: str, *states: str) -> None:
        def reached() -> bool:
            found = self.node(name)
            return found is not None and found.state in states

        until(reached, f"node {name} is {' or '.join(states)}")

    def record(self, invocation_id: str) -> dict[str, Any]:
        """The record as it is now."""
        answer = HTTP.get(f"{self.url}/v1/invocations/{invocation_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, invocation_id: str) -> dict[str, Any]:
        """The record after its end."""
        until(lambda: self.record(invocation_id)["ended_at"] is not None, f"{invocation_id} has ended")
        return self.record(invocation_id)

    def submit(self, function: str, command: str, trajectory: str | None = None) -> str:
        with self.client() as client:
            return client.submit(function, {"command": command}, trajectory=trajectory).id

    def said(self, invocation_id: str) -> str:
        with self.client() as client:
            return "".join(line.text for line in client.logs(invocation_id) if line.stream == "stdout")


class DaemonProcess:
    """`tangram node join` with a state directory of its own; it may be killed, frozen and started again."""

    def __init__(self, directory: Path, gateway: ClusterGateway, name: str, provider: str, core: int = 1) -> None:
        self.name = name
        self._gateway = gateway
        self._directory = directory
        self._core = core
        self._process: warm.WarmProcess | None = None
        #: What its environment has besides.
        self.environment: dict[str, str] = {}
        #: Kept, as a gateway that is started again listens on the same port only if it is told to.
        directory.mkdir(parents=True)
        self._configured: dict[str, object] = {
            "sandbox": {"provider": provider, "image": "tangram-base:bookworm", "memory": "128Mi"},
            "node": {"memory": "1Gi"},
        }
        self.configure()

    def configure(self, **sections: object) -> None:
        """Have further sections in its configuration from its next start on."""
        self._configured |= sections
        (self._directory / "node.yaml").write_text(yaml.safe_dump(self._configured))

    def start(
        self,
        *,
        ticket: str | None = None,
        labels: Mapping[str, str] | None = None,
        devices: str = "none",
        through: str = "",
    ) -> None:
        """Join; the first time by a ticket, later by the key that it has. ``through``: the address of a relay."""
        listen, fingerprint = self._gateway.door
        listen = through or listen
        known = (self._directory / "state" / "key").exists()
        if ticket is None and not known:
            ticket = self._gateway.ticket(self.name)
        command = ["node", "join", "--gateway", listen]
        command += ["--fingerprint", fingerprint, "--name", self.name, "--cores", str(self._core % _cores())]
        command += ["--state-dir", str(self._directory / "state"), "--config", str(self._directory / "node.yaml")]
        command += ["--devices", devices, *(["--ticket", ticket] if ticket else [])]
        command += ["--labels", ",".join(f"{key}={value}" for key, value in (labels or {"pool": "there"}).items())]
        with (self._directory / "log").open("ab") as log:
            self._process = warm.start(command, log, log, os.environ | self.environment)

    def join(self, **given: Any) -> DaemonProcess:
        """Start as ``start`` does, and return once the gateway has it ready."""
        self.start(**given)
        self._gateway.until_state(self.name, "ready")
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def has_begun(self, invocation_id: str) -> bool:
        """Whether an attempt of it may begin here, which the daemon writes down before."""
        return any(invocation_id in claim for claim in self.attempts())

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(STOP_S)

    def wait(self) -> int:
        """Return its exit status, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()

    def attempts(self) -> list[str]:
        """Return the claims of the attempts that have begun, and that it has not been told to forget."""
        return kept_in(self._directory / "state", "attempts")

    def handlers(self) -> list[tuple[str, int]]:
        """Return the digests of the handlers' files that it keeps, and when each was made."""
        kept = sorted((self._directory / "state" / "handlers").iterdir())
        return [(each.name, (each / "size").stat().st_mtime_ns) for each in kept]

    def stop(self) -> None:
        """End it with all that it has; what a killed one left is removed as an operator would."""
        if self._process is None:
            return
        if self._process.poll() is not None:
            state = self._directory / "state"
            warm.run(["clean", "--yes", str(state)], timeout_s=STOP_S, env=os.environ | self.environment)
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def begun(gateway: ClusterGateway, invocation_id: str) -> None:
    until(lambda: bool(gateway.said(invocation_id)), "the command has said something")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def stopped(*nodes: DaemonProcess) -> None:
    """Stop them all at once."""
    threads = [threading.Thread(target=node.stop) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


Direction = Literal["to the gateway", "to the node"]
#: Pieces of one direction that are under way at most, and bytes of one.
PIECES, PIECE_BYTES = 1024, 64 * 2**10
#: Seconds until a lost packet is sent again.
AGAIN_S = 0.2
START_S = 30.0
_T = TypeVar("_T")


class NodeRelay:
    """Forwards connections to a gateway's door. `cut`, `block` and `slow` spoil that until `mend`."""

    def __init__(self, gateway: str) -> None:
        host, _, port = gateway.rpartition(":")
        self._gateway = (host, int(port))
        self._cut = False
        self._delay_s = self._lost_share = 0.0
        self._chance = random.Random(0)
        #: Pieces that had to be sent again.
        self.lost = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._open: dict[Direction, asyncio.Event] = {}
        self.address = self._do(self._listen())

    def cut(self) -> None:
        """Close every connection, and take none."""
        self._do(self._cut_all())

    def block(self, direction: Direction) -> None:
        """Deliver nothing in one direction; it is delivered once that is mended."""
        self._loop.call_soon_threadsafe(self._open[direction].clear)

    def slow(self, delay_s: float, lost_share: float = 0.0) -> None:
        """Deliver each piece so much later, and of some what a stream sees of a lost packet: it waits to be sent again.

        What comes behind such a piece waits for it.
        """
        self._delay_s, self._lost_share = delay_s, lost_share

    def mend(self) -> None:
        """Deliver everything at once again."""
        self._cut, self._delay_s, self._lost_share = False, 0.0, 0.0
        for passage in self._open.values():
            self._loop.call_soon_threadsafe(passage.set)

    def close(self) -> None:
        """Close everything for good."""
        self._do(self._cut_all())
        self._do(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    def _do(self, work: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _listen(self) -> str:
        self._open = {"to the gateway": asyncio.Event(), "to the node": asyncio.Event()}
        for passage in self._open.values():
            passage.set()
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _stop_listening(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _cut_all(self) -> None:
        self._cut = True
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._gateway)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer, "to the gateway"))
                group.create_task(self._forward(far_reader, writer, "to the node"))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # cut, or one side has hung up
        finally:
            for each in writers:
                each.transport.abort()
            self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)
        delivering = asyncio.ensure_future(self._deliver(pieces, writer, direction))
        try:
            while data := await reader.read(PIECE_BYTES):
                lost = self._chance.random() < self._lost_share
                self.lost += lost
                await pieces.put((self._loop.time() + self._delay_s + lost * AGAIN_S, data))
            raise ConnectionResetError("one side has hung up")
        finally:
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await self._open[direction].wait()
            writer.write(data)
            await writer.drain()
