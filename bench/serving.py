"""Servers in processes of their own, and the thinnest client of them: what benches of a gateway share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGE = os.environ.get("TANGRAM_BASE_IMAGE", "tangram-base:bookworm")
TOKEN = "bench-bench-bench"
START_S, STOP_S = 120.0, 60.0

#: A gateway on the loop that `tangram serve` runs on; it announces itself by a line of JSON.
GATEWAY = """
import asyncio, json, os, sys
from pathlib import Path
import uvloop
from gateway.app import gateway
from gateway.config.load import load
from gateway.invocations.logs import configure
configure("warning")
async def main():
    async with gateway(load([Path(sys.argv[1])], os.environ)) as app:
        described = {"http": app.http_port, "grpc": app.grpc_port, "sandboxes": app.runtimes.provider.info.engine}
        print(json.dumps(described), flush=True)
        await app.serve()
uvloop.run(main())
"""
#: The floor: the same server with a handler that sends back what it was sent.
ECHO = """
import asyncio, json
import uvloop
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from gateway.http.server import listen, serve
async def echo(request):
    return JSONResponse(await request.json())
async def main():
    listener = listen("127.0.0.1", 0)
    print(json.dumps({"http": listener.getsockname()[1]}), flush=True)
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    await serve(app, listener, asyncio.Event().wait, 1.0)
uvloop.run(main())
"""


#: A module that serves the same handler by LitServe, whose workers import it: as many as the gateway's function keeps,
#: and its own defaults.
LITSERVE = """
import json, threading, time, urllib.request
import litserve
class Noop(litserve.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request
    def predict(self, value): return value
    def encode_response(self, output): return output
def announce(port):
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
        except OSError:
            time.sleep(0.05)
        else:
            break
    print(json.dumps({"http": port}), flush=True)
def main(port):
    threading.Thread(target=announce, args=(port,), daemon=True).start()
    server = litserve.LitServer(Noop(), accelerator="cpu", workers_per_device=2)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")
"""


def peer_python(package: str) -> Path:
    """Return the interpreter of an environment that has a peer, made at its first use; CalledProcessError if not."""
    place = ROOT / ".cache" / "peers" / package
    python = place / "bin" / "python"
    if not (place / "done").exists():
        venv.create(place, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", package]
        subprocess.run(install, check=True, capture_output=True)
        (place / "done").touch()
    return python


class ServerProcess:
    """A server that is started, killed and started again by the same words.

    Its first line on standard output that is a JSON object announces it: what was not JSON before is passed over.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        """``environment`` is added to this process's; ``log`` takes standard error, which is else this process's."""
        self._words = [str(python), "-c", code, *arguments]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self.announced: dict[str, object] = {}

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        """Where it serves HTTP."""
        return int(str(self.announced["http"]))

    async def start(self) -> None:
        """Start and wait until it serves; raises RuntimeError with the end of its log."""
        with contextlib.ExitStack() as stack:
            errors = None if self._log is None else stack.enter_context(self._log.open("ab"))
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdout=asyncio.subprocess.PIPE, stderr=errors, env=self._environment
            )
        assert self._process.stdout is not None
        line = b""
        async with asyncio.timeout(START_S):
            while not line.startswith(b"{"):
                line = await self._process.stdout.readline()
                if not line:
                    raise RuntimeError("the server does not serve:\n" + self.log(4000))
        self.announced = dict(json.loads(line))

    def log(self, chars: int) -> str:
        """The end of its standard error, where that is kept."""
        return "" if self._log is None else self._log.read_text(encoding="utf-8", errors="replace")[-chars:]

    async def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it, and return the exit status; raises RuntimeError if it had to be killed."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        try:
            return await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise RuntimeError(f"the server did not end within {STOP_S:g} s of {number.name}") from None


@contextlib.asynccontextmanager
async def process(
    code: str,
    *arguments: str,
    ending: signal.Signals = signal.SIGTERM,
    python: Path | str = sys.executable,
    **environment: str,
) -> AsyncIterator[ServerProcess]:
    """A server in a process of its own, for as long as the block."""
    server = ServerProcess(code, *arguments, environment=environment, python=python)
    try:
        await server.start()
        yield server
    finally:
        with contextlib.suppress(RuntimeError):
            await server.end(ending)


@contextlib.asynccontextmanager
async def child(*words: str, given: bytes = b"") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of this tree's Python, with a line on its standard input; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("BENCH_SPEAK") else subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(given)
        await process.stdin.drain()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class BenchConnection:
    """One keep-alive HTTP connection, as thin as a client can be; it is made at the first request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: bytes = b"", *headers: str) -> tuple[int, bytes]:
        """Status and body; raises OSError or EOFError if nobody answers."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        about = f"Host: bench\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}"
        try:
            writer.write("\r\n".join([f"{method} {path} HTTP/1.1", about, *headers, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)  # 204 has none
            return int(head.split(b" ", 2)[1]), await reader.readexactly(length)
        except (OSError, EOFError):
            self.close()
            raise

    async def post(self, path: str, body: bytes, *headers: str) -> bytes:
        """The body of a 200; anything else fails the bench."""
        status, data = await self.send("POST", path, body, *headers)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {data.decode()}")
        return data

    async def submit(self, function: str, body: Mapping[str, object], *headers: str) -> str:
        """The id under which an asynchronous call was accepted."""
        path = f"/v1/functions/{function}/invocations?mode=async"
        status, answer = await self.send("POST", path, json.dumps(body).encode(), *headers)
        if status != 202:
            raise RuntimeError(f"{status}: {answer.decode()}")
        return str(json.loads(answer)["id"])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def process_cpu_s(pid: int) -> float:
    """Processor seconds of one process and its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
