"""Servers in sandboxes, through the listener of ports: what passes, what does not, and when they run."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from gateway.ports import GRANTS
from tangram import AsyncClient, NotFoundError
from tangram.cli.ports import carry
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until

pytestmark = pytest.mark.xdist_group("ports")

#: Answers HTTP on 8000 with what it was asked, WebSockets on 8001 by echo, raw bytes on 8002 by echo, and on 8100 and
#: above with the bytes of a file of that name, whatever it is asked.
SERVERS = """
import http.server, json, os, signal, socket, socketserver, sys, threading, time
sys.path.insert(0, "packages")
from websockets.sync.server import serve

class Asked(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for number in range(3):
                self.wfile.write(b"data: %d\\n\\n" % number)
                self.wfile.flush()
            return
        if self.path == "/works":
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
        if self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\\r\\nhello\\r\\n0\\r\\n\\r\\n")
            return
        self.answer(b"")
    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while (size := int(self.rfile.readline(), 16)):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/echo":
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.answer(body)
    def answer(self, body):
        told = {"line": self.requestline, "headers": list(self.headers.items()), "body": body.decode()}
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *given):
        pass

class Raw(socketserver.BaseRequestHandler):
    def handle(self):
        if self.server.server_address[1] == 8002:
            while (data := self.request.recv(65536)):
                self.request.sendall(data)
            return
        self.request.recv(65536)
        with open(str(self.server.server_address[1]), "rb") as file:
            self.request.sendall(file.read())

class Threads(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

def echo(socket):
    for message in socket:
        if message == "twice":
            socket.send("one")
            time.sleep(0)
        socket.send(message)

servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Asked)]
servers += [Threads(("127.0.0.1", int(port)), Raw) for port in (8002, *sys.argv[1:])]
for server in servers:
    threading.Thread(target=server.serve_forever).start()
sockets = serve(echo, "127.0.0.1", 8001, ping_interval=0.3, ping_timeout=1.5, max_size=None, subprotocols=["two"])
threading.Thread(target=sockets.serve_forever).start()
open("ready", "w").close()
"""


def packages() -> bytes:
    """The library of WebSockets as an archive: what is pure Python of it."""
    place, buffer = Path(websockets.__file__).parent, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in place.rglob("*.py"):
            archive.add(path, Path("packages/websockets") / path.relative_to(place))
    return buffer.getvalue()


@dataclass
class PortWorld:
    """A gateway with a listener for ports, and a trajectory ``t1`` with the servers above."""

    running: RunningGateway
    http: httpx.AsyncClient

    async def exec(self, command: str, trajectory: str = "t1") -> dict[str, object]:
        headers = {"X-Trajectory-Id": trajectory}
        answer = await self.running.invoke({"command": command}, function="shell", headers=headers)
        assert answer.status_code == 200, answer.text
        result = answer.json()["result"]
        assert result["exit_code"] == 0, result
        return dict(result)

    async def put(self, path: str, data: bytes) -> None:
        written = await self.running.http.put("/v1/trajectories/t1/files", params={"path": path}, content=data)
        assert written.status_code == 201, written.text

    async def open(self, port: int, **more: object) -> dict[str, str]:
        answer = await self.running.http.post("/v1/trajectories/t1/ports", json={"port": port, **more})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def url(self, port: int) -> str:
        return (await self.open(port))["url"]

    async def asleep(self) -> None:
        """Return once nothing runs in the trajectory, and it holds no core."""
        app = self.running.app
        await until(lambda: (app.engine.trajectory("t1") or {})["state"] == "idle")
        sandbox = app.runtimes.environments.get("t1")
        assert sandbox is not None
        assert sandbox._frozen


@asynccontextmanager
async def world(directory: Path, wall: Callable[[], float] | None = None, **ports: object) -> AsyncIterator[PortWorld]:
    bench = GatewayBench(directory, server={"auth": "token", "ports": {"port": 0, **ports}})
    async with serving(bench, wall=wall) as running, httpx.AsyncClient(timeout=DEADLINE_S) as http:
        yield PortWorld(running, http)


@asynccontextmanager
async def with_servers(directory: Path, *ports: int, **settings: object) -> AsyncIterator[PortWorld]:
    async with world(directory, None, **settings) as there:
        opened = await there.running.http.put("/v1/trajectories/t1", json={"function": "shell"})
        assert opened.status_code == 200, opened.text
        sent = await there.running.http.put("/v1/trajectories/t1/archive", params={"path": "."}, content=packages())
        assert sent.status_code == 201, sent.text
        await there.exec(f"cat > servers.py <<'END'\n{SERVERS}\nEND")
        numbers = " ".join(map(str, ports))
        await there.exec(
            f"setsid python3 servers.py {numbers} </dev/null >log 2>&1 & "
            "for _ in $(seq 1000); do [ -e ready ] && exit 0; sleep 0.05; done; cat log; exit 1"
        )
        yield there


async def actions(there: PortWorld) -> int:
    page = (await there.running.http.get("/v1/invocations", params={"trajectory": "t1", "limit": 1000})).json()
    return len(page["invocations"])


async def answer_to(there: PortWorld, port: int, answer: bytes) -> httpx.Response:
    """What a caller gets when the server answers this."""
    await there.put(str(port), answer)
    return await there.http.get(await there.url(port) + "/")


@pytest.mark.promise("A server in a sandbox holds cores only while it answers.")
async def test_a_server_runs_while_it_answers(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        url = await there.url(8000)
        before = await actions(there)
        told = (await there.http.get(url + "/some/path?a=1&b=%20", headers={"x-one": "1"})).json()
        assert told["line"] == "GET /some/path?a=1&b=%20 HTTP/1.1"
        assert ["x-one", "1"] in told["headers"]
        await there.asleep()
        assert await actions(there) == before + 1
        many = await asyncio.gather(*[there.http.get(f"{url}/{number}") for number in range(40)])
        assert {each.json()["line"] for each in many} == {f"GET /{number} HTTP/1.1" for number in range(40)}
        await there.asleep()
        assert await actions(there) < before + 20, "requests that come together share turns"
        data = bytes(range(256)) * 2**14
        assert (await there.http.post(url + "/echo", content=data)).content == data

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 2**18):
                yield data[start : start + 2**18]

        assert (await there.http.post(url + "/echo", content=pieces())).content == data
        assert (await there.http.get(url + "/chunked")).text == "hello"
        assert (await there.http.get(url + "/events")).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert (await there.http.head(url + "/")).status_code == 501, "its server knows no HEAD"
        assert (await there.http.get(url + "/works")).status_code == 200
        await there.asleep()
        assert (await there.exec("echo still"))["stdout"] == "still\n"
        record = (await there.running.http.get("/v1/invocations", params={"trajectory": "t1"})).json()["invocations"][1]
        assert (record["state"], record["function"], record["units"]) == ("succeeded", "shell", {"cpu": 1})


async def test_a_capability_is_of_one_port_and_ends(tmp_path: Path) -> None:
    now = [1_000_000.0]
    async with world(tmp_path, lambda: now[0]) as there:
        refused = await there.running.http.post("/v1/trajectories/t1/ports", json={"port": 8000})
        assert refused.status_code == 410, "it does not live"
        for body, status in (({"port": 0}, 422), ({"port": 8000, "function": "echo"}, 422), ({"port": 8000}, 201)):
            await there.running.http.put("/v1/trajectories/t1", json={"function": "shell"})
            answer = await there.running.http.post("/v1/trajectories/t1/ports", json=body)
            assert answer.status_code == status, answer.text
        first, timed = await there.open(9), await there.open(9, ttl_s=60)
        listed = (await there.running.http.get("/v1/trajectories/t1/ports")).json()["ports"]
        assert [each["id"] for each in listed][1:] == [first["id"], timed["id"]]
        assert all("url" not in each for each in listed)
        base, _, capability = first["url"].rpartition("/")
        assert (await there.http.get(first["url"])).status_code == 502, "nothing listens"
        for path in (capability[:-1] + "0" * 1, capability[:-1], "", "../" + capability, capability.upper() + "/"):
            got = await there.http.get(f"{base}/{path}")
            assert got.status_code == 404 or path == capability, path
        now[0] += 61
        assert (await there.http.get(timed["url"])).status_code == 404
        gone = await there.running.http.delete(f"/v1/trajectories/t1/ports/{first['id']}")
        assert gone.status_code == 200 or gone.status_code == 204
        assert (await there.http.get(first["url"])).status_code == 404
        last = await there.open(9)
        saved = await there.running.app.store.document(GRANTS)
        assert saved is not None
        assert last["url"].rpartition("/")[2] not in saved, "only its hash is kept"
        assert (await there.running.http.delete("/v1/trajectories/t1")).is_success
        assert (await there.http.get(last["url"])).status_code == 404
        assert (await there.running.http.get("/v1/trajectories/t1/ports")).json() == {"ports": []}


async def test_no_listener_no_port(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as running:
        await running.http.put("/v1/trajectories/t1", json={"function": "shell"})
        answer = await running.http.post("/v1/trajectories/t1/ports", json={"port": 8000})
        assert (answer.status_code, answer.json()["component"]) == (409, "ports")


@pytest.mark.promise("A server in a sandbox is told nothing of the gateway's tokens and cookies.")
async def test_what_a_server_is_not_told(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        url, tokens = await there.url(8000), there.running.app.tokens
        assert tokens is not None
        capability = url.rpartition("/")[2]
        headers = {
            "Authorization": f"Bearer {tokens.invoke}",
            "Cookie": "tangram-8080=key; theirs=1; tangram-1=x",
            "Referer": url,
            "X-Forwarded-Host": "h",
            "Connection": "keep-alive, x-hop",
            "X-Hop": "1",
            "Proxy-Authorization": "Basic x",
            "TE": "trailers",
            "Upgrade": "tangram",
            "Origin": url.partition("/p/")[0],
        }
        told = dict((await there.http.get(url + "/", headers=headers)).json()["headers"])
        assert told["Cookie" if "Cookie" in told else "cookie"] == "theirs=1"
        names = {name.lower() for name in told}
        assert not names & {
            "authorization", "referer", "x-forwarded-host", "x-hop", "proxy-authorization", "te", "upgrade"
        }  # fmt: skip
        lower = {name.lower(): value for name, value in told.items()}
        assert (lower["host"], lower["origin"], lower["connection"]) == (
            "localhost:8000",
            "http://localhost:8000",
            "close",
        )
        assert capability not in str(told)
        own = await there.http.get(url + "/", headers={"Authorization": "Bearer theirs"})
        assert ["authorization", "Bearer theirs"] in own.json()["headers"], "what is the server's own passes"


@pytest.mark.promise("What a server in a sandbox answers does nothing to the page, the API or another sandbox.")
async def test_hostile_answers(tmp_path: Path) -> None:
    async with with_servers(tmp_path, 8100) as there:
        head = b"HTTP/1.1 302 Found\r\nContent-Length: 2\r\n"
        wanted = (
            b"Set-Cookie: tangram-8080=stolen; Path=/\r\nSet-Cookie: TANGRAM-1=x\r\n"
            b"Set-Cookie: own=1; Domain=example.org; path=/; HttpOnly\r\n"
            b'Location: /elsewhere\r\nAlt-Svc: h2="evil:1"\r\nStrict-Transport-Security: max-age=1\r\n'
            b'Clear-Site-Data: "*"\r\nService-Worker-Allowed: /\r\nKeep-Alive: timeout=9\r\n'
            b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\nok"
        )
        got = await answer_to(there, 8100, head + wanted)
        base = got.request.url.path.rstrip("/")
        assert (got.status_code, got.text) == (302, "ok")
        assert got.headers.get_list("set-cookie") == [f"own=1; HttpOnly; Path={base}/"]
        assert len(got.headers.get_list("date")) == 1
        assert got.headers["location"] == f"{base}/elsewhere"
        assert got.headers["referrer-policy"] == "no-referrer"
        names = {"alt-svc", "strict-transport-security", "clear-site-data", "service-worker-allowed", "x-hop"}
        assert not names & set(got.headers)
        smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        first = await answer_to(there, 8100, smuggled)
        second = await there.http.get(await there.url(8000) + "/mine")
        assert (first.text, second.json()["line"]) == ("ok", "GET /mine HTTP/1.1"), "no answer is another's"
        for answer in (
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\x00\x01\x02" * 99,
            b"",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: evil\r\nConnection: upgrade\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20 + b"\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: evil\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nX: a\r\n b\x00\r\n\r\n",
        ):
            got = await answer_to(there, 8100, answer)
            assert (got.status_code, got.json()["code"]) == (502, "port_failed"), (answer[:40], got.text)
        cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
        with pytest.raises(httpx.RemoteProtocolError):
            await answer_to(there, 8100, cut)
        assert (await there.http.get(await there.url(8000) + "/")).status_code == 200, "the others go on"


async def raw_request(there: PortWorld, data: bytes) -> bytes:
    """What the listener answers to bytes, until it closes or has said enough."""
    address = httpx.URL(await there.url(8000))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data.replace(b"PATH", address.path.encode()).replace(b"HOST", address.netloc))
        return await asyncio.wait_for(reader.read(2**16), DEADLINE_S)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_hostile_requests(tmp_path: Path) -> None:
    async with with_servers(tmp_path, body_limit="1Mi") as there:
        end = b"\r\nHost: HOST\r\nConnection: close\r\n"
        for request, status in (
            (b"CONNECT 127.0.0.1:8080 HTTP/1.1" + end + b"\r\n", (400, 404, 405)),
            (b"TRACE PATH/ HTTP/1.1" + end + b"\r\n", (405,)),
            (b"GET http://HOST/PATH/ HTTP/1.1" + end + b"\r\n", (404,)),
            (b"GET /v1/resources HTTP/1.1" + end + b"\r\n", (404,)),
            (b"GET / HTTP/1.1" + end + b"\r\n", (404,)),
            (b"GET PATH/a b HTTP/1.1" + end + b"\r\n", (400,)),
            (b"POST PATH/ HTTP/1.1" + end + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", (400,)),
            (b"POST PATH/ HTTP/1.1" + end + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", (400, 501)),
        ):
            said = await raw_request(there, request)
            assert int(said.split(b" ", 2)[1]) in status, (request, said)
        both = b"POST PATH/echo HTTP/1.1" + end + b"Content-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n"
        said = await raw_request(there, both + b"2\r\nok\r\n0\r\n\r\nGET /v1 HTTP/1.1\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400") or said.endswith(b"\r\n\r\nok"), said
        expecting = b"POST PATH/echo HTTP/1.1" + end + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\nok"
        said = await raw_request(there, expecting)
        assert said.startswith(b"HTTP/1.1 100 ") or b"200 OK" in said, said
        large = await there.http.post(await there.url(8000) + "/echo", content=b"x" * (2**20 + 1))
        assert large.status_code == 413
        by_name = httpx.URL(await there.url(8000))
        host = f"{by_name.path.rpartition('/')[2]}.localhost:{by_name.port}"
        got = await there.http.get(f"http://127.0.0.1:{by_name.port}/x", headers={"Host": host})
        assert got.json()["line"] == "GET /x HTTP/1.1"


def socket_at(url: str) -> connect:
    return connect(url, proxy=None, max_size=None, subprotocols=[Subprotocol("one"), Subprotocol("two")])


@asynccontextmanager
async def socket_to(there: PortWorld, port: int) -> AsyncIterator[ClientConnection]:
    async with socket_at((await there.url(port)).replace("http", "ws", 1)) as socket:
        yield socket


@pytest.mark.promise("A WebSocket to a frozen server lives on, whoever pings.")
async def test_a_websocket_outlives_the_sleep_of_its_server(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        async with socket_to(there, 8001) as socket:
            assert socket.subprotocol == "two"
            for message in ("hello", b"\0bytes", "x" * 2**22):
                await socket.send(message)
                assert await socket.recv() == message
            await socket.send("twice")
            assert [await socket.recv(), await socket.recv()] == ["one", "twice"]
            for _ in range(2):
                await there.asleep()
                await asyncio.wait_for(await socket.ping(), DEADLINE_S)
                passed = asyncio.Event()  # longer than the server waits for an answer to its pings
                asyncio.get_running_loop().call_later(2.0, passed.set)
                await passed.wait()
                await socket.send("again")
                assert await socket.recv() == "again"
            before = await actions(there)
            for number in range(50):
                await socket.send(str(number))
                assert await socket.recv() == str(number)
            await there.asleep()
            assert await actions(there) <= before + 10, "messages that follow each other share turns"
        with pytest.raises(InvalidStatus) as refused:
            async with socket_to(there, 8000):
                pass
        assert refused.value.response.status_code in (200, 502), "no WebSocket is spoken there"
        with pytest.raises(InvalidStatus) as nobody:
            async with socket_to(there, 9):
                pass
        assert nobody.value.response.status_code == 502


async def test_raw_bytes(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        url = (await there.url(8002)).replace("http", "ws", 1).replace("/p/", "/t/")
        data = bytes(range(256)) * 2**13
        async with connect(url, proxy=None, max_size=None) as socket:
            await socket.send(data)
            await socket.send(b"")
            got = b""
            async for piece in socket:
                assert isinstance(piece, bytes)
                if not piece:
                    break
                got += piece
            assert got == data
        await there.asleep()


async def test_the_client_and_a_forwarded_port(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        tokens = there.running.app.tokens
        assert tokens is not None
        async with AsyncClient(str(there.running.http.base_url), token=tokens.admin) as client:
            trajectory = client.trajectory("t1", function="shell")
            async with await trajectory.port(8000, ttl_s=3600) as port:
                await port.wait_ready("/health")
                assert (await there.http.get(port.url + "/x")).json()["line"] == "GET /x HTTP/1.1"
            with pytest.raises(NotFoundError):
                await port.wait_ready()
            port = await trajectory.port(8002)

            async def forwarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await carry(port.tcp_url, None, reader, writer)
                writer.close()

            async with await asyncio.start_server(forwarded, "127.0.0.1", 0) as server:
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                data = bytes(range(256)) * 2**12
                writer.write(data)
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(-1), DEADLINE_S) == data
                writer.close()
                await writer.wait_closed()


@pytest.mark.promise("A caller who does not read holds no core, and loses nothing.")
async def test_a_slow_reader_holds_no_core(tmp_path: Path) -> None:
    async with with_servers(tmp_path, 8100) as there:
        data = bytes(range(256)) * 2**15
        await there.put("8100", data)
        url = (await there.url(8100)).replace("http", "ws", 1).replace("/p/", "/t/")
        async with connect(url, proxy=None, max_size=None, max_queue=2) as socket:
            await socket.send(b"all of it")
            first = await socket.recv()
            assert isinstance(first, bytes)
            await there.asleep()
            page = (await there.running.http.get("/v1/invocations", params={"trajectory": "t1", "limit": 2})).json()
            ends = [
                (await there.running.http.get(f"/v1/invocations/{each['id']}")).json() for each in page["invocations"]
            ]
            assert [each["result"]["unread"] for each in ends] == [True, True], "it was looked at again, once"
            got = first
            async for piece in socket:
                assert isinstance(piece, bytes)
                if not piece:
                    break
                got += piece
        assert got == data


@pytest.mark.promise("A request to a server waits where there is no room for a turn, and breaks no other connection.")
async def test_a_turn_waits_for_room(tmp_path: Path) -> None:
    async with with_servers(tmp_path) as there:
        app = there.running.app
        async with socket_to(there, 8001) as socket:
            await there.asleep()
            app.runtimes.environments.sessions.settings = replace(
                app.runtimes.environments.sessions.settings, living_max=0
            )
            await socket.send("waits")
            waiting = asyncio.create_task(there.http.get(await there.url(8000) + "/"))
            await until(lambda: any(len(link.connections) == 2 for link in app.ports._links.values()))
            assert not waiting.done()
            app.runtimes.environments.sessions.settings = replace(
                app.runtimes.environments.sessions.settings, living_max=256
            )
            assert await socket.recv() == "waits"
            assert (await waiting).status_code == 200


async def test_connections_end_with_their_trajectory_and_their_grant(tmp_path: Path) -> None:
    async with with_servers(tmp_path, connections_max=2) as there:
        opened = await there.open(8001)
        url = opened["url"].replace("http", "ws", 1)
        async with socket_at(url) as first, socket_at(url):
            with pytest.raises(InvalidStatus) as full:
                async with socket_at(url):
                    pass
            assert full.value.response.status_code == 503
            await there.running.http.delete(f"/v1/trajectories/t1/ports/{opened['id']}")
            with pytest.raises(ConnectionClosed):
                await first.recv()
        timed = await there.open(8001, ttl_s=1)
        async with socket_at(timed["url"].replace("http", "ws", 1)) as socket, asyncio.timeout(DEADLINE_S):
            with pytest.raises(ConnectionClosed):
                await socket.recv()
        async with socket_to(there, 8001) as socket:
            await there.running.http.delete("/v1/trajectories/t1")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
        await until(lambda: not there.running.app.ports._links)
