"""A real runner whose gateway goes away: what goes on, what is kept for the next one, and for how long."""

from __future__ import annotations

import asyncio
import math
import os
import pwd
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from manager.errors import InvalidInput
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import MARKER, encode_json
from runtimes.sandbox.session import InteractiveSession, SessionSettings
from tests.runtimes.sandbox.box import Box

DEADLINE_S = 60.0
#: Says that it began, waits for the test, and says that it ended.
GATED = "echo one; echo two >&2; echo run >> runs; until [ -e go ]; do sleep 0.01; done; echo three; exit 7"
SLEEP = "echo begun; exec sleep 1000"


def command(shell: str = GATED, claim: str = "a.1/1", **given: object) -> Command:
    return Command(shell=shell, claim=claim, **({"detached": True, "kill_grace_s": 0.2} | given))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)


async def abandoned(box: Box, given: Command, *, unattended_s: float = 60.0) -> None:
    """A gateway begins with the command and goes away once it has said something."""
    said = asyncio.Event()
    client = await box.connect(unattended_s)
    running = asyncio.create_task(client.run(given, lambda *_: said.set()))
    async with asyncio.timeout(DEADLINE_S):
        await said.wait()
    client.close()
    await asyncio.gather(running, return_exceptions=True)


async def claimed(box: Box, given: Command) -> CommandResult:
    """What the next gateway gets."""
    client = await box.connect()
    try:
        assert given.claim in client.resumable
        async with asyncio.timeout(DEADLINE_S):
            return await client.run(given)
    finally:
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's id to give")
async def test_a_name_that_is_roots_in_the_image_is_root(box: Box) -> None:
    client = await box.connect(user="65534", root=False)
    toor = next(each.pw_name for each in pwd.getpwall() if each.pw_uid == 0)
    with pytest.raises(InvalidInput, match="cannot run commands as root"):
        await client.run(command("id -u", user=toor))
    client.close()


async def holds(box: Box, claim: str = "a.1/1", *, running: bool | None = None) -> bool:
    client = await box.connect()
    held = client.resumable.get(claim)
    client.close()
    return held is not None and running in (None, held.running)


async def test_a_running_command_is_claimed_with_all_that_it_said(box: Box) -> None:
    await abandoned(box, command())
    client = await box.connect()
    assert client.resumable["a.1/1"].running
    seen: list[tuple[str, bytes]] = []
    running = asyncio.create_task(client.run(command(), lambda *said: seen.append(said)))
    await until(lambda: len(seen) == 2)
    box.open_gate()
    result = await running
    assert seen == [("stdout", b"one\n"), ("stderr", b"two\n"), ("stdout", b"three\n")]
    assert (result.exit_code, result.stdout, result.stderr, box.runs) == (7, b"one\nthree\n", b"two\n", 1)
    client.close()


async def test_one_that_ended_meanwhile_is_claimed_with_its_end(box: Box) -> None:
    await abandoned(box, command())
    box.open_gate()
    await until(lambda: holds(box, running=False))
    result = await claimed(box, command())
    assert (result.exit_code, result.stdout, result.stderr, box.runs) == (7, b"one\nthree\n", b"two\n", 1)
    assert result.duration_s > 0
    assert result.peak_memory_bytes > 0


async def test_it_can_be_claimed_again_until_its_end_is_acknowledged(box: Box) -> None:
    box.open_gate()
    client = await box.connect()
    assert (await client.run(command())).exit_code == 7
    client.close()
    assert (await claimed(box, command())).exit_code == 7
    client = await box.connect()
    client.keep("a.1/", detached=False)
    await client.sweep()
    client.close()
    assert not await holds(box)


async def test_what_was_started_is_told_until_it_is_acknowledged_whatever_became_of_it(box: Box) -> None:
    client = await box.connect()
    assert client.started == frozenset()
    box.open_gate()
    await client.run(command(claim="ended.1/1"))
    await client.run(command(claim="attended.1/1", detached=False))
    killed = asyncio.create_task(client.run(command(SLEEP, "killed.1/1")))
    await asyncio.sleep(0)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    client.close()
    client = await box.connect(unattended_s=0.0)
    assert client.started == frozenset({"ended.1/1", "killed.1/1"})
    assert set(client.resumable) == {"ended.1/1"}
    client.close()

    async def dropped() -> bool:  # by the runner, once it has seen that the gateway left
        client = await box.connect(unattended_s=0.0)
        client.close()
        return not client.resumable

    await until(dropped)
    client = await box.connect()
    assert client.started == frozenset({"ended.1/1", "killed.1/1"}), "what is not kept any more was begun all the same"
    for claims in ("ended.1/", "killed.1/"):
        client.keep(claims, detached=False)
    await client.sweep()
    client.close()
    client = await box.connect()
    assert client.started == frozenset()
    client.close()


async def test_of_more_claims_than_it_can_remember_nothing_is_certain(box: Box) -> None:
    client = await box.connect()
    for number in range(wire.STARTED_MAX + 1):
        await client.run(command("true", f"{number}.1/1"))
    client.close()
    client = await box.connect()
    assert client.started is None
    client.close()


async def test_what_is_not_detached_ends_with_its_gateway(box: Box) -> None:
    await abandoned(box, command("echo $$; exec sleep 1000", detached=False))
    assert not await holds(box)
    await until(lambda: not children(box))


async def test_it_may_become_detached_while_it_runs(box: Box) -> None:
    client = await box.connect()
    said = asyncio.Event()
    running = asyncio.create_task(client.run(command(detached=False), lambda *_: said.set()))
    await said.wait()
    client.keep("a.1/", detached=True)
    await client.list_files("")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    box.open_gate()
    assert (await claimed(box, command())).stdout == b"one\nthree\n"


async def test_without_a_gateway_for_too_long_it_is_ended_and_nothing_is_kept(box: Box) -> None:
    await abandoned(box, command("echo a; exit 0", "early.1/1"))
    await abandoned(box, command("trap '' TERM; echo b; while :; do sleep 0.05; done"), unattended_s=0.2)
    await until(lambda: not children(box))
    assert not await holds(box)
    assert not await holds(box, "early.1/1")


async def test_its_timeout_is_kept_without_a_gateway(box: Box) -> None:
    given = command("echo begun; exec sleep 1000", timeout_s=2.0)
    await abandoned(box, given)
    await until(lambda: not children(box))
    result = await claimed(box, given)
    assert (result.timed_out, result.stdout) == (True, b"begun\n")


async def test_no_more_is_kept_than_its_bound(box: Box) -> None:
    given = command("echo begun; yes | head -c 1000000; exit 3", output_limit_bytes=10_000)
    await abandoned(box, given)
    await until(lambda: holds(box, running=False))
    result = await claimed(box, given)
    head, tail = result.stdout.split(MARKER % (1_000_006 - 10_000))
    assert (head[:6], len(head), len(tail)) == (b"begun\n", 5000, 5000)
    assert (result.stdout_truncated, result.exit_code) == (True, 3)


async def test_the_oldest_ends_make_room(box: Box) -> None:
    client = await box.connect()
    for number in range(wire.ENDED_MAX + 2):
        await client.run(command("echo a", f"{number}.1/1"))
    large = command("head -c 3000000 /dev/zero", "x", output_limit_bytes=2**22)
    client.close()
    client = await box.connect()
    assert list(client.resumable) == [f"{number}.1/1" for number in range(2, wire.ENDED_MAX + 2)]
    for claim in ("large.1/1", "larger.1/1"):
        await client.run(command(large.shell, claim, output_limit_bytes=2**22))
    client.close()
    client = await box.connect()
    assert list(client.resumable) == ["larger.1/1"]
    client.close()


async def test_one_that_has_not_got_all_its_input_is_ended(box: Box) -> None:
    given = command("echo begun; exec sleep 1000", stdin=b"x" * (2 * wire.WINDOW_BYTES))
    await abandoned(box, given)
    assert not await holds(box)
    await until(lambda: not children(box))


async def test_a_program_that_cannot_be_started_is_kept_as_well(box: Box) -> None:
    given = Command(argv=("/nowhere",), claim="a.1/1", detached=True)
    await abandoned(box, given)
    assert (await claimed(box, given)).exit_code == 127


async def test_what_was_claimed_can_be_killed(box: Box) -> None:
    await abandoned(box, command())
    client = await box.connect()
    running = asyncio.create_task(client.run(command()))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not children(box)
    client.close()
    assert not await holds(box)


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_a_stranger_inside_neither_hears_nor_ends_it(box: Box, token: str | None) -> None:
    await abandoned(box, command())
    frames = [] if token is None else [encode_json(wire.HELLO, 0, {"token": token})]
    frames += [
        encode_json(wire.CLAIM, 1, {"claim": "a.1/1"}),
        encode_json(wire.KEEP, 2, {"claim": "", "lasting": False}),
    ]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(box.directory / "s"))
        stranger.sendall(b"".join(frames))
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    assert await holds(box, running=True)


def children(box: Box) -> list[str]:
    """The runner's children."""
    return Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text().split()


# --- sessions


def session_command(session: InteractiveSession) -> Command:
    shell = "echo begun; while read -r line; do echo said $line; done; exit 9"
    return command(shell, session=session, timeout_s=math.inf)


async def heard(session: InteractiveSession, offset: int, data: bytes) -> bytes:
    """What a session says from an offset on, until that was said."""
    found = b""
    async with asyncio.timeout(DEADLINE_S), aclosing(session.read(offset, DEADLINE_S)) as pages:
        async for page in pages:
            found += b"".join(piece.data for piece in page)
            if data in found:
                break
    return found


async def test_a_session_goes_on_without_its_gateway_and_the_next_one_types_on(box: Box) -> None:
    first, client = InteractiveSession(SessionSettings(), None), await box.connect()
    running = asyncio.create_task(client.run(session_command(first)))
    await first.write(b"one\ntw")
    await heard(first, 0, b"said one\n")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    second, client = InteractiveSession(SessionSettings(), None), await box.connect()
    running = asyncio.create_task(client.run(session_command(second)))
    assert await second.write(b"one\ntwo\n", 0) == 8, "what it was sent before is not typed again"
    assert await heard(second, 6, b"two\n") == b"said one\nsaid two\n"
    await second.write(b"", end=True)
    async with asyncio.timeout(DEADLINE_S):
        assert (await running).exit_code == 9
    client.close()


async def test_of_a_session_that_spoke_to_nobody_the_last_is_kept_and_numbered(box: Box) -> None:
    settings, size = SessionSettings(output_bytes=4096), 2**20
    first, client = InteractiveSession(settings, None), await box.connect()
    given = command(f"echo begun; read -r line; head -c {size} /dev/zero; echo end", timeout_s=math.inf, session=first)
    running = asyncio.create_task(client.run(given))
    await heard(first, 0, b"begun\n")
    await first.write(b"go\n")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: holds(box, running=False))
    second, client = InteractiveSession(settings, None), await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        assert (await client.run(command("ignored", session=second))).exit_code == 0
    second.close()
    assert second.end == len("begun\n") + size + len("end\n")
    assert (await heard(second, 0, b"end\n")).endswith(b"\0end\n")
    assert second.end - second.start <= 4096
    client.close()
