"""A fuzzer of the resident runner: a real one, spoken to over real sockets with small buffers by a reader that pauses.

One seed is one schedule: what is asked, how large it is, and where spawns, readers and gateways are late. A model says
how each exchange must end. Nothing is simulated, so how the schedule's parts fall together is the machine's.

``python -m bench.runner [--seeds 5] [--seconds 60] [--json]``
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.report import BenchReport, parser, play
from manager.errors import ActionFailed, InvalidInput, NotFound, Reason
from runtimes.sandbox.command import Command, CommandResult, FileContent
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import MARKER, ByteStream, SocketStream, StreamClient
from runtimes.sandbox.session import InteractiveSession, SessionSettings, TerminalSize

DEADLINE_S = 60.0
BUFFER_BYTES = 4096
#: Exchanges of one round at most; each round ends with every account settled.
ROUND_MAX = 14
#: Variables by which the processes of a world, and those of one exchange, are found.
WORLD, EXCHANGE = "FUZZ_WORLD", "FUZZ_EXCHANGE"
#: The runner, with small buffers and late spawns.
PROGRAM = f"""
import importlib.util, random, socket, sys, time
seed, change, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.argv = sys.argv[3:]
spec = importlib.util.spec_from_file_location("runner", path)
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)
chance = random.Random(seed)
def late(spawn):
    def spawned(*given, **more):
        pid = spawn(*given, **more)
        time.sleep(chance.choice((0, 0, 0.002, 0.03)))
        return pid
    return spawned
runner._spawn, runner._fork = late(runner._spawn), late(runner._fork)
begin = runner.GatewayConnection.__init__
def small(self, source, sink, sock=None):
    begin(self, source, sink, sock)
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {BUFFER_BYTES})
runner.GatewayConnection.__init__ = small
exec(change)
runner.main()
"""

#: Commands are under way before they are watched, and what is not watched is changed all the same.
ANNOUNCED_FIRST = """
run = runner.Jobs.run
def announce(self, number, request):
    late = []
    self.poller.watch = lambda *given: late.append(given)
    try:
        run(self, number, request)
    finally:
        del self.poller.watch
        for given in late:
            try:
                self.poller.watch(*given)
            except OSError:
                pass
runner.Jobs.run = announce
runner.Poller.change = lambda self, fd, events: self.epoll.modify(fd, events)
"""

#: What outlives its command belongs to whoever is under way when it is adopted.
OWNED_BY_LATER = "runner.ProcessTree.owns = lambda self, job, pid: (self.job_of(pid) or job) is job"

#: Faults that were found and mended, each with what is found if it is put back.
KNOWN_FAULTS = {
    "announced_before_it_is_watched": (ANNOUNCED_FIRST, "FileNotFoundError"),
    "owned_by_a_later_command": (OWNED_BY_LATER, "killed with another command"),
}


@dataclass(slots=True)
class Findings:
    """What came out: sentences for what was wrong, and counts."""

    exchanges: int = 0
    cuts: int = 0
    wrong: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    descriptors_left: int = 0
    processes_left: int = 0

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.deaths or self.descriptors_left or self.processes_left)

    def add(self, other: Findings) -> None:
        self.exchanges += other.exchanges
        self.cuts += other.cuts
        self.wrong += other.wrong
        self.deaths += other.deaths
        self.descriptors_left += other.descriptors_left
        self.processes_left += other.processes_left


class SmallSocket(SocketStream):
    """A connection to the runner's socket that holds few bytes on their way in."""

    async def _reach(self, deadline_s: float) -> socket.socket:
        sock = await super()._reach(deadline_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        return sock


class AttachedStream:
    """The runner's standard streams, which are one socket and to which one gateway after the other attaches."""

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours
        self._mark = os.urandom(wire.MARK_BYTES)

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        loop, own, answer = asyncio.get_running_loop(), self._ours.dup(), os.urandom(wire.ANSWER_BYTES)
        own.setblocking(False)
        heard = b""
        async with asyncio.timeout(deadline_s - time.monotonic()):
            sending = asyncio.ensure_future(loop.sock_sendall(own, self._mark + answer))
            while answer not in heard:  # what the gateway before did not take comes first
                heard = heard[-wire.ANSWER_BYTES :] + await loop.sock_recv(own, BUFFER_BYTES)
            await sending
        await loop.create_unix_connection(lambda: end, sock=own)
        return 0


def processes_with(name: str, value: str) -> set[int]:
    """Return the living processes that bear a variable."""
    wanted = f"{name}={value}".encode()
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                if wanted in (place / "environ").read_bytes().split(b"\0"):
                    found.add(int(place.name))
    return found


async def holds(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> bool:
    """Return whether it comes to hold in time."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= give_up_s:
            return False
        await asyncio.sleep(0.005)
    return True


class RunnerTrial:
    """A runner, the gateway of now, and the model of what was asked."""

    def __init__(self, chance: random.Random, directory: Path, findings: Findings, change: str) -> None:
        self.chance = chance
        self.change = change
        self.directory = directory
        self.findings = findings
        self.work = directory / "work"
        self.name = os.urandom(6).hex()
        self.attached = chance.random() < 0.3
        self.user = chance.choice(("0", "65534")) if os.geteuid() == 0 else str(os.geteuid())
        self.count = 0
        self.cut = False  # whether this round's gateway goes away before its exchanges are over
        self.files: dict[str, bytes] = {}
        self.servers: list[int] = []
        self.beginning: list[Path] = []  # where servers say that they have begun, which a freeze may keep them from
        self.ending: list[int] = []  # exchanges that end with their gateway
        self.at_rest = 0  # the runner's descriptors while nothing is under way
        self.unclaimed: dict[str, tuple[Command, bytes]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the runner."""
        self.directory.chmod(0o755)
        self.work.mkdir()
        self.work.chmod(0o777)
        for number, size in enumerate((0, 3000, 100_000, 700_000)):
            self.files[f"file{number}"] = data = self.chance.randbytes(size)
            (self.work / f"file{number}").write_bytes(data)
        place = "--attached" if self.attached else str(self.directory)
        seed = str(self.chance.getrandbits(32))
        argv = [sys.executable, "-I", "-S", "-c", PROGRAM, seed, self.change, wire.__file__, place]
        ours, theirs = socket.socketpair()
        with ours, theirs, (self.directory / "complaints").open("wb") as complaints:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self.runner = subprocess.Popen(
                [*argv, "--shed"],
                stdin=theirs.fileno() if self.attached else subprocess.DEVNULL,
                stdout=theirs.fileno() if self.attached else subprocess.DEVNULL,
                stderr=complaints,
                env={**os.environ, WORLD: self.name},
            )
            theirs.close()
            self.stream: ByteStream = AttachedStream(ours) if self.attached else SmallSocket(self.directory)
            try:
                yield
            finally:
                self.runner.kill()
                self.runner.wait()
                for pid in processes_with(WORLD, self.name):
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[StreamClient]:
        """Be a gateway that reads with pauses."""
        hello = {
            "token": "secret",
            "user": self.user,
            "workdir": str(self.work),
            "base": "",
            "env": {},
            "orphan_s": DEADLINE_S,
            "unattended_s": DEADLINE_S,
            "sequence": 1,
        }
        client = await StreamClient.open(self.stream, hello, within_s=DEADLINE_S, first=self.count * 1000)
        pausing = asyncio.create_task(self.pause(client, random.Random(self.chance.getrandbits(32))))
        try:
            yield client
        finally:
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)
            client.close()

    async def pause(self, client: StreamClient, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.choice((0.001, 0.01, 0.03)))
            client.pause_reading()
            await asyncio.sleep(chance.choice((0, 0.001, 0.01, 0.05)))
            client.resume_reading()

    @property
    def dead(self) -> bool:
        return self.runner.poll() is not None

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.runner.pid}/fd"))  # noqa: PTH208

    async def live(self, until_s: float) -> None:
        """Do one round after the other."""
        async with self.connected() as client:
            await client.list_files("")
            await holds(lambda: not processes_with(WORLD, self.name) - {self.runner.pid})
            self.at_rest = self.descriptors()
        while time.monotonic() < until_s and self.findings.clean and not self.dead:
            await self.round()
        if not self.dead:
            await self.leave()

    async def round(self) -> None:
        """Ask for some things at once, and see how each ends."""
        chance = self.chance
        self.cut = chance.random() < 0.3
        picked = [chance.choice(EXCHANGES) for _ in range(chance.randint(3, ROUND_MAX))]
        if chance.random() < 0.4:
            picked = [short] * ROUND_MAX
        late_s = [chance.choice((0, 0, 0.005, 0.05)) for _ in picked]
        cut_s = chance.choice((0.005, 0.05, 0.2))
        async with self.connected() as client:
            await self.settle(client)
            tasks = [
                asyncio.create_task(self.exchange(client, work, wait_s, random.Random(chance.getrandbits(32))))
                for work, wait_s in zip(picked, late_s, strict=True)
            ]
            if self.cut:
                await asyncio.wait(tasks, timeout=cut_s)
                self.findings.cuts += 1
                client.close()
            await asyncio.wait(tasks, timeout=DEADLINE_S)
            for work, task in zip(picked, tasks, strict=True):
                if not task.done():
                    self.findings.wrong.append(f"{work.__name__} does not end")
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if client.lost.is_set() and not self.cut:
                if await holds(lambda: self.dead, 1.0):
                    said = (self.directory / "complaints").read_text("utf-8", "replace")
                    self.findings.deaths.append(f"the runner died ({self.runner.returncode}): {said[-2000:]}")
                else:
                    self.findings.wrong.append("the runner hung up")

    async def exchange(self, client: StreamClient, work: Exchange, wait_s: float, chance: random.Random) -> None:
        """Do one exchange; an error that the model does not expect is a wrong answer."""
        await asyncio.sleep(wait_s)
        if client.lost.is_set():
            return
        self.count += 1
        number = self.count
        self.findings.exchanges += 1
        try:
            told = await work(self, client, number, chance)
        except ActionFailed as error:
            self.ending.append(number)
            told = "" if self.cut and error.reason is Reason.ENVIRONMENT_LOST else f"{error.reason}: {error}"
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            told = f"{type(error).__name__}: {error}"
        if told and not self.dead:
            self.findings.wrong.append(f"{work.__name__}: {told}")

    def command(self, number: int, shell: str, **given: object) -> Command:
        settled = {"timeout_s": DEADLINE_S, "kill_grace_s": 0.1, "output_limit_bytes": 2**21} | given
        return Command(shell=shell, env={EXCHANGE: f"{self.name}.{number}"}, **settled)  # type: ignore[arg-type]

    async def gone(self, number: int) -> str:
        """Say if a process of an exchange lives on. If its gateway was cut off, the next one looks."""
        if self.cut:
            self.ending.append(number)
            return ""
        if left := processes_with(EXCHANGE, f"{self.name}.{number}"):
            return f"{len(left)} of its processes live on"
        return ""

    async def begins(self, place: Path) -> str:
        """Wait for a server that was left behind; say if it does not begin."""
        if not await holds(lambda: noted(place) > 0):
            return "it was killed with another command before it began"
        self.servers.append(noted(place))
        return ""

    async def settle(self, client: StreamClient) -> None:
        """Claim what the gateway before has left, with all that it said, and see that nothing else is there.

        What it froze, and did not let go on any more, goes on.
        """
        await client.rest(resting=False)
        for place in self.beginning:
            if told := await self.begins(place):
                self.findings.wrong.append(f"server: {told}")
        self.beginning.clear()
        for number in self.ending:
            if not await holds(lambda number=number: not processes_with(EXCHANGE, f"{self.name}.{number}"), 10.0):  # type: ignore[misc]
                self.findings.wrong.append("the processes of one whose gateway was cut off live on")
        self.ending.clear()
        await self.claim_all(client)
        if not await holds(lambda: self.descriptors() <= self.at_rest, 10.0):
            self.findings.descriptors_left += self.descriptors() - self.at_rest

    async def claim_all(self, client: StreamClient) -> None:
        for claim, (command, wanted) in list(self.unclaimed.items()):
            del self.unclaimed[claim]
            if claim not in client.resumable and claim in (client.started or ()):
                self.findings.wrong.append("detached: it was started and cannot be claimed")
                continue
            told = ended(await client.run(command), code=5, stdout=wanted)
            if told:
                self.findings.wrong.append(f"detached, claimed: {told}")
            client.keep(claim, detached=False)

    async def leave(self) -> None:
        """Settle the last accounts: nothing is left but what the commands left on purpose."""
        self.cut = False
        async with self.connected() as client:
            await self.settle(client)
            living = processes_with(WORLD, self.name)
            for pid in self.servers:
                if pid not in living:
                    self.findings.wrong.append("server: it was killed with another command")
            await client.sweep()
            if not await holds(lambda: not processes_with(WORLD, self.name) - {self.runner.pid}, 10.0):
                self.findings.processes_left += len(processes_with(WORLD, self.name)) - 1
            parts = [path.name for path in self.work.iterdir() if path.name.startswith(".tangram")]
            if parts:
                self.findings.wrong.append(f"parts of files are left: {parts}")
        if complaints := (self.directory / "complaints").read_text("utf-8", "replace"):
            self.findings.wrong.append(f"the runner complained: {complaints[-2000:]}")


def noted(place: Path) -> int:
    """Return the process that a file names; 0 if it does not yet."""
    text = place.read_text() if place.exists() else ""
    return int(text) if text.endswith("\n") else 0


def ended(
    result: CommandResult, *, code: int | None = 0, stdout: bytes = b"", stderr: bytes = b"", timed_out: bool = False
) -> str:
    """Say what is wrong with a result; empty if nothing is."""
    wrong = []
    if (result.exit_code, result.timed_out) != (code, timed_out):
        found = f"exit {result.exit_code}, signal {result.signal}, timed out {result.timed_out}"
        wrong.append(f"{found} and not exit {code}, timed out {timed_out}")
    for name, said, wanted in (("output", result.stdout, stdout), ("errors", result.stderr, stderr)):
        if said != wanted:
            wrong.append(f"{len(said)} bytes of {name} and not {len(wanted)}, or others")
    return "; ".join(wrong)


# --- the exchanges: each returns what was wrong

Exchange = Callable[[RunnerTrial, StreamClient, int, random.Random], Awaitable[str]]


async def short(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    size, code = chance.choice((0, 10, 4000, 30_000, 60_000, 200_000)), chance.choice((0, 1, 7))
    to, out, err = chance.choice((("", size, 0), (" >&2", 0, size)))
    result = await client.run(world.command(number, f"head -c {size} /dev/zero{to}; exit {code}"))
    return ended(result, code=code, stdout=bytes(out), stderr=bytes(err))


async def bounded(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    size = chance.choice((10_001, 300_000))
    result = await client.run(world.command(number, f"head -c {size} /dev/zero", output_limit_bytes=10_000))
    return ended(result, stdout=bytes(5000) + MARKER % (size - 10_000) + bytes(5000))


async def unstartable(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    if chance.random() < 0.5:
        result = await client.run(Command(argv=("/nowhere",)))
        return ended(result, code=127, stderr=b"/nowhere: No such file or directory\n")
    with suppress(InvalidInput):
        await client.run(world.command(number, "true", cwd="nowhere"))
        return "it ran in no directory"
    return ""


async def echo(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    data = chance.randbytes(chance.choice((1, 5000, 90_000, 400_000)))
    return ended(await client.run(world.command(number, "cat", stdin=data)), stdout=data)


async def deaf(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    data = bytes(chance.choice((1, 90_000, 400_000)))
    return ended(await client.run(world.command(number, "exec <&-; exit 4", stdin=data)), code=4)


async def process(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    data = chance.randbytes(chance.choice((1, 5000, 200_000)))
    spawned = await client.spawn(world.command(number, "cat"))

    async def write() -> None:
        for at in range(0, len(data), 20_000):
            await spawned.write_stdin(data[at : at + 20_000])
        await spawned.end_input()

    writing = asyncio.create_task(write())
    try:
        said = b"".join([piece async for _, piece in spawned.chunks()])
        return ended(await spawned.wait()) or ("" if said == data else f"{len(said)} bytes came back of {len(data)}")
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def download(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    name, data = chance.choice(sorted(world.files.items()))
    file, found = await client.open_file(name, limit_bytes=2**20), b""
    try:
        async with aclosing(file.chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                found += chunk
                await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))
                if chance.random() < 0.02:
                    return ""
    finally:
        file.close()
    return "" if found == data else f"{len(found)} bytes of {len(data)}, or others"


async def absent(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    with suppress(NotFound):
        await client.read_file("nowhere", limit_bytes=1)
        return "there is no such file"
    return ""


async def upload(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    data = chance.randbytes(chance.choice((0, 10, 4000, 300_000)))
    await client.write_file(f"up{number}", FileContent(data), mode=None)
    place = world.work / f"up{number}"
    return "" if place.read_bytes() == data else f"{place.stat().st_size} bytes arrived of {len(data)}, or others"


async def listing(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    found = {entry.path: entry.size_bytes for entry in await client.list_files("")}
    return "" if all(found.get(name) == len(data) for name, data in world.files.items()) else f"listed {found}"


async def session(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    terminal = chance.choice((None, TerminalSize()))
    own = InteractiveSession(SessionSettings(), terminal)
    shell = "read x; echo got $x; exec 0<&- 1>&- 2>&-; exit 3"
    running = asyncio.create_task(client.run(world.command(number, shell, session=own)))
    try:
        await own.write(b"hello\n")
        result = await running
    finally:
        own.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    said = b""
    async with aclosing(own.read(own.start, DEADLINE_S)) as pages:
        async for page in pages:
            said += b"".join(piece.data for piece in page)
    return ended(result, code=3) or ("" if b"got hello" in said else f"it said {said!r}")


async def killed(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    running = asyncio.create_task(client.run(world.command(number, "sleep 1000 & (setsid sleep 1000 &); sleep 1000")))
    await asyncio.sleep(chance.choice((0, 0.01, 0.1)))
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return await world.gone(number)


async def timed_out(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    timeout_s = chance.choice((0.02, 0.1, 0.3))
    try:
        result = await client.run(world.command(number, "sleep 1000 & sleep 1000", timeout_s=timeout_s))
    except ActionFailed:
        if not world.cut:
            raise
        return await world.gone(number)
    return ended(result, code=None, timed_out=True) or await world.gone(number)


async def server(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    """Leave a process behind, by way of another that ends while others run."""
    place = world.work / f"server{number}"
    shell = f"(sleep 0.0{chance.randint(1, 9)}; sleep 1000 & echo $! > {place}) <&- >/dev/null 2>&1 &"
    try:
        told = ended(await client.run(world.command(number, shell)))
    except ActionFailed:
        if not world.cut:
            raise
        return ""  # nobody knows whether it had ended
    if told or not world.cut:
        return told or await world.begins(place)
    world.beginning.append(place)
    return ""


async def freeze(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    await client.rest(resting=True)
    await asyncio.sleep(chance.choice((0, 0.01, 0.1)))
    await client.rest(resting=False)
    return ""


async def detached(world: RunnerTrial, client: StreamClient, number: int, chance: random.Random) -> str:
    """Run one that outlives its gateway; the next one claims it."""
    size, claim, wait = chance.choice((10, 60_000, 200_000)), f"{world.name}.{number}/1", chance.choice(("", "0.1"))
    shell = f"head -c {size} /dev/zero; sleep 0{wait}; echo end; exit 5"
    command = world.command(number, shell, claim=claim, detached=True)
    try:
        result = await client.run(command)
    except ActionFailed:
        if not world.cut:
            raise
        world.unclaimed[claim] = (command, bytes(size) + b"end\n")
        return ""
    client.keep(claim, detached=False)
    return ended(result, code=5, stdout=bytes(size) + b"end\n")


EXCHANGES: tuple[Exchange, ...] = (
    short,
    bounded,
    unstartable,
    echo,
    deaf,
    process,
    download,
    download,
    absent,
    upload,
    listing,
    session,
    killed,
    timed_out,
    server,
    freeze,
    detached,
)


async def fuzz(seed: int, seconds: float, *, change: str = "") -> Findings:
    """Follow a seed's schedule for so long or until something is found, in one world after the other.

    ``change`` is Python that replaces something in the module ``runner``.
    """
    findings, chance = Findings(), random.Random(seed)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and findings.clean:
        with TemporaryDirectory(prefix="tangram-fuzz-") as place:
            world = RunnerTrial(random.Random(chance.getrandbits(64)), Path(place), findings, change)
            with world.running():
                await world.live(min(until_s, time.monotonic() + 5.0))
    return findings


def known_fault(name: str, seeds: int = 5, seconds: float = 60.0) -> int | None:
    """Return the first seed whose schedule finds a known fault that is put back."""
    change, says = KNOWN_FAULTS[name]
    for seed in range(1, seeds + 1):
        if any(says in told for told in asyncio.run(fuzz(seed, seconds, change=change)).wrong):
            return seed
    return None


def follow(report: BenchReport, seeds: int, seconds: float) -> None:
    """Follow each seed for so long, and report what all of them found."""
    findings = Findings()
    for seed in range(1, seeds + 1):
        found = asyncio.run(fuzz(seed, seconds))
        findings.add(found)
        report.progress(f"seed {seed}: {found.exchanges} exchanges")
        for line in [*found.wrong, *found.deaths][:5]:
            report.note(f"seed {seed}: {line}")
    report.figure("exchanges", findings.exchanges)
    report.figure("gateways_cut_off", findings.cuts)
    for name, count in {
        "wrong_answers": len(findings.wrong),
        "runner_deaths": len(findings.deaths),
        "descriptors_left": findings.descriptors_left,
        "processes_left": findings.processes_left,
    }.items():
        report.check(name, count, limit=0, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("runner", parts=True)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=60.0, help="for which each is followed")
    chosen = options.parse_args(argv)
    report = BenchReport("runner")
    seeds, seconds = (1, min(10.0, chosen.seconds)) if chosen.quick else (chosen.seeds, chosen.seconds)
    return play(report, chosen, {"fuzz": partial(follow, report, seeds, seconds)})


if __name__ == "__main__":
    sys.exit(main())
