"""E2B's SDK on every part of its surface: ``MODE TEMPLATE``; where the gateway is, is in the environment.

One JSON object: what came back, which public methods there are, and how each that was used ended.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import signal
import subprocess
import sys
import time

import e2b
from e2b import AsyncCommandHandle, AsyncSandbox, CommandExitException, CommandHandle, PtySize, Sandbox
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem

MODE, TEMPLATE = sys.argv[1:3]
SDK = AsyncSandbox if MODE == "async" else Sandbox
told: dict[str, object] = {}
surface: dict[str, str] = {}


async def use(name: str, value: object) -> object:
    """Return what a method returned or how it failed, and note that."""
    try:
        if callable(value):
            value = value()
        value = await value if inspect.isawaitable(value) else value
        surface[name] = "works"
        return value
    except CommandExitException as error:
        surface[name] = "works"
        return {"exit": error.exit_code, "out": error.stdout, "err": error.stderr}
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr)
        surface[name] = "refused" if "not done by this facade" in str(error) else surface.get(name, "failed")
        return type(error).__name__


async def stream(where: object, pid: int, *chunks: object) -> None:
    """Stream input, as each of the two clients does."""
    if MODE == "sync":
        where.stream_input(pid, chunks)
        return
    pipe = where.stream_input(pid)
    for chunk in chunks:
        await pipe.send(chunk)
    await pipe.close()


async def commands(sandbox: object) -> None:
    run = sandbox.commands.run
    heard: list[str] = []
    told["run"] = vars(await use("commands.run", lambda: run("echo $A $B; echo err >&2", envs={"B": "2"})))
    told["exit"] = await use("commands.run", lambda: run("echo out; exit 3"))
    told["cwd"] = (await use("commands.run", lambda: run("pwd", cwd="/tmp", on_stdout=heard.append))).stdout
    told["heard"] = heard
    told["no cwd"] = await use("commands.run", lambda: run("pwd", cwd="/no/such"))
    began = time.monotonic()
    told["late"] = await use("commands.run", lambda: run("sleep 60", timeout=1))
    told["late in time"] = time.monotonic() - began < 30
    server = await use("commands.run", lambda: run("while sleep 0.1; do echo tick; done", background=True, timeout=0))
    told["beside"] = (await use("commands.run", lambda: run("echo beside"))).stdout
    told["listed"] = [each.pid == server.pid for each in await use("commands.list", sandbox.commands.list)]
    again = await use("commands.connect", lambda: sandbox.commands.connect(server.pid))
    await use("handle.disconnect", again.disconnect)
    told["killed"] = [await use("commands.kill", lambda: sandbox.commands.kill(server.pid)) for _ in range(2)]
    waited = await use("handle.wait", server.wait)
    told["waited"] = waited["exit"]
    cat = await use("commands.run", lambda: run("cat", background=True, stdin=True))
    await use("commands.send_stdin", lambda: sandbox.commands.send_stdin(cat.pid, "a"))
    await use("handle.send_stdin", lambda: cat.send_stdin(b"b\xff"))
    await use("commands.stream_input", lambda: stream(sandbox.commands, cat.pid, "c", "d"))
    await use("handle.close_stdin", cat.close_stdin)
    told["cat"] = (await use("handle.wait", cat.wait)).stdout
    cat = await use("commands.run", lambda: run("cat; sleep 60", background=True, stdin=True))
    await use("commands.close_stdin", lambda: sandbox.commands.close_stdin(cat.pid))
    told["handle kill"] = await use("handle.kill", cat.kill)
    many = [
        asyncio.to_thread(run, f"sleep 0.2; echo {n}") if MODE == "sync" else run(f"sleep 0.2; echo {n}")
        for n in range(8)
    ]
    told["many"] = [each.stdout for each in await asyncio.gather(*many)]
    large = await use("commands.run", lambda: run("head -c 3000000 /dev/zero | tr '\\0' x"))
    told["large"] = len(large.stdout)


async def files(sandbox: object) -> None:
    here = sandbox.files
    data = bytes(range(256)) * 2000
    await use("files.write", lambda: here.write("d/bytes", data))
    told["bytes"] = bytes(await use("files.read", lambda: here.read("d/bytes", format="bytes"))) == data
    written = await use(
        "files.write_files", lambda: here.write_files([{"path": "ü 1", "data": "a"}, {"path": "e/2", "data": b"b"}])
    )
    told["written"] = [each.path for each in written]
    await use("files.write", lambda: here.write("streamed", io.BytesIO(data)))
    told["streamed"] = (await use("files.get_info", lambda: here.get_info("streamed"))).size == len(data)
    told["text"] = await use("files.read", lambda: here.read("ü 1"))
    told["entries"] = sorted(
        (each.name, each.type.value) for each in await use("files.list", lambda: here.list(".", depth=2))
    )
    told["exists"] = [await use("files.exists", lambda: here.exists(name)) for name in ("d", "none")]
    told["made"] = [await use("files.make_dir", lambda: here.make_dir("m/n")) for _ in range(2)]
    told["moved"] = (await use("files.rename", lambda: here.rename("d/bytes", "m/moved"))).path
    await use("files.remove", lambda: here.remove("m"))
    told["removed"] = await use("files.exists", lambda: here.exists("m"))
    told["missing"] = [
        await use("files.read", lambda: here.read("none")),
        await use("files.list", lambda: here.list("none")),
    ]
    await use(
        "files.watch_dir",
        (lambda: here.watch_dir(".", on_event=print)) if MODE == "async" else (lambda: here.watch_dir(".")),
    )


async def terminals(sandbox: object) -> None:
    said: list[bytes] = []
    size = PtySize(rows=11, cols=44)
    if MODE == "async":
        pty = await use("pty.create", lambda: sandbox.pty.create(size, on_data=said.append))
    else:
        pty = await use("pty.create", lambda: sandbox.pty.create(size))
    await use("pty.resize", lambda: sandbox.pty.resize(pty.pid, PtySize(rows=12, cols=55)))
    other = await use(
        "pty.connect",
        (lambda: sandbox.pty.connect(pty.pid, on_data=said.append))
        if MODE == "async"
        else (lambda: sandbox.pty.connect(pty.pid)),
    )
    await use("handle.disconnect", other.disconnect)
    await use("pty.stream_input", lambda: stream(sandbox.pty, pty.pid, b"stty ", b"size\n"))
    await use("pty.send_stdin", lambda: sandbox.pty.send_stdin(pty.pid, b"exit 5\n"))
    ended = await use("handle.wait", pty.wait if MODE == "async" else lambda: pty.wait(on_pty=said.append))
    told["pty"] = [ended["exit"], b"12 55" in b"".join(said)]
    pty = await use(
        "pty.create",
        (lambda: sandbox.pty.create(size, on_data=said.append))
        if MODE == "async"
        else (lambda: sandbox.pty.create(size)),
    )
    told["pty killed"] = await use("pty.kill", lambda: sandbox.pty.kill(pty.pid))


async def lives(sandbox: object) -> None:
    info = await use("Sandbox.get_info", sandbox.get_info)
    told["info"] = [info.metadata, info.state.value, info.template_id == TEMPLATE, info.cpu_count]
    page = await use(
        "Sandbox.list", lambda: SDK.list(query=e2b.SandboxQuery(metadata={"who": "me & you"})).next_items()
    )
    told["found"] = [each.sandbox_id == sandbox.sandbox_id for each in page]
    await use("Sandbox.set_timeout", lambda: sandbox.set_timeout(200))
    await use("files.write", lambda: sandbox.files.write("kept", "kept"))
    told["paused"] = [await use("Sandbox.pause", sandbox.pause), await use("Sandbox.is_running", sandbox.is_running)]
    again = await use("Sandbox.connect", lambda: SDK.connect(sandbox.sandbox_id))
    told["resumed"] = await use("files.read", lambda: again.files.read("kept"))
    template = (await use("Sandbox.create_snapshot", again.create_snapshot)).snapshot_id
    copy = await use("Sandbox.create", lambda: SDK.create(template=template))
    forks = await use("Sandbox.fork", lambda: again.fork(count=2))
    told["copies"] = [await use("files.read", lambda: each.files.read("kept")) for each in (copy, *forks)]
    for each in (copy, *forks):
        await use("Sandbox.kill", each.kill)
    told["forgotten"] = [await use("Sandbox.delete_snapshot", lambda: SDK.delete_snapshot(template)) for _ in range(2)]
    await use("Sandbox.get_metrics", sandbox.get_metrics)
    await use("Sandbox.update_network", lambda: sandbox.update_network({"allow_out": []}))
    await use("Sandbox.list_snapshots", lambda: SDK.list_snapshots().next_items())
    await use("Sandbox.beta_pause", again.beta_pause)


async def swarm() -> None:
    """Two dozen at once; a few of them are killed while they work."""

    async def one(number: int) -> object:
        sandbox = await AsyncSandbox.create(TEMPLATE, timeout=120)
        try:
            await sandbox.files.write("n", str(number))
            if number % 4 == 0:
                working = asyncio.create_task(sandbox.commands.run("sleep 60"))
                await asyncio.sleep(0.2)
                await sandbox.kill()
                try:
                    return await working
                except Exception as error:
                    return type(error).__name__
            return (await sandbox.commands.run("cat n")).stdout
        finally:
            await sandbox.kill()

    told["swarm"] = await asyncio.gather(*(one(number) for number in range(24)))


def cut() -> None:
    """A client that is killed over its command, and what becomes of that."""
    sandbox = Sandbox.create(TEMPLATE, timeout=120)
    script = f"from e2b import Sandbox; s = Sandbox.connect({sandbox.sandbox_id!r}); "
    script += "s.commands.run('echo $$ > pid; exec sleep 1000', timeout=3)"
    client = subprocess.Popen([sys.executable, "-c", script])
    while not sandbox.files.exists("pid"):
        time.sleep(0.05)
    client.send_signal(signal.SIGKILL)
    client.wait()
    told["after the cut"] = len(sandbox.commands.list())
    deadline = time.monotonic() + 60
    while sandbox.commands.list() and time.monotonic() < deadline:
        time.sleep(0.05)
    told["in its time"] = sandbox.commands.run("! kill -0 $(cat pid)").exit_code
    sandbox.kill()


async def main() -> None:
    sandbox = await use(
        "Sandbox.create", lambda: SDK.create(TEMPLATE, timeout=300, metadata={"who": "me & you"}, envs={"A": "1"})
    )
    try:
        for part in (commands, files, terminals, lives):
            await part(sandbox)
    finally:
        told["ended"] = [await use("Sandbox.kill", sandbox.kill), await use("Sandbox.kill", sandbox.kill)]
    told["gone"] = await use("gone", lambda: sandbox.commands.run("true"))
    del surface["gone"]
    told["strangers"] = await use("stranger", lambda: SDK.create(TEMPLATE, api_key="e2b_" + "0" * 40))
    del surface["stranger"]
    kinds = {"Sandbox": Sandbox, "commands": Commands, "handle": CommandHandle, "files": Filesystem, "pty": Pty}
    public = [
        f"{name}.{each}"
        for name, kind in kinds.items()
        for each in dir(kind)
        if each[0] != "_" and callable(getattr(kind, each))
    ]
    told["surface"] = {name: surface.get(name, "-") for name in public}
    assert AsyncCommandHandle is not None
    if MODE == "async":
        await swarm()
    else:
        cut()


asyncio.run(main())
print(json.dumps(told))
