"""Files go into sandboxes and come out of them in pieces, whole trees as one tar."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from manager.errors import CodedError, InvalidInput, NotFound, TooLarge
from manager.function import Capabilities, SandboxSpec
from runtimes.sandbox.command import PIECE_BYTES, Command, FileContent
from runtimes.sandbox.docker.engine import repeatable
from runtimes.sandbox.files import gathered, open_archive, put_archive
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import ON_SHARED_LOOP, RUNNER_ALONE, SHARED_RUNNER_ALONE, say, sh, unique

LIMIT_BYTES = 2**20
MIB = 2**20


def tar_of(*entries: tuple[str, bytes | str | None]) -> bytes:
    """Bytes are a file, None is a directory, text is a link: hard if it begins with ``=``."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o755 if content is None else 0o640
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                info.linkname = content.removeprefix("=")
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return packed.getvalue()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 4096):
        yield data[start : start + 4096]


async def put(sandbox: Sandbox, path: str, data: bytes, user: str = "") -> int:
    return await put_archive(sandbox, path, pieces(data), user=user, limit_bytes=LIMIT_BYTES)


async def got(
    sandbox: Sandbox, path: str, *, base: bool = False, follow: bool = True, user: str = ""
) -> dict[str, str]:
    """Return what a tar of the path holds: contents, targets of links, or nothing, by name."""
    packed = open_archive(sandbox, path, limit_bytes=LIMIT_BYTES, base=base, follow=follow, user=user)
    async with packed as chunks:
        data = b"".join([chunk async for chunk in chunks])
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for entry in tar:
            file = tar.extractfile(entry) if entry.isreg() else None
            found[entry.name] = entry.linkname if file is None else file.read().decode()
    return found


async def file_error(work: object) -> object:
    with pytest.raises(CodedError) as caught:
        await work  # type: ignore[misc]  # any coroutine
    return caught.value.detail.get("file_error")


class Flood:
    """A process that says more than anybody wants to hear."""

    async def chunks(self) -> AsyncIterator[tuple[str, bytes]]:
        for _ in range(1000):
            yield "stderr", b"x" * 1000
            yield "stdout", b"y" * 1000


async def test_of_what_a_sandbox_says_only_the_beginning_is_kept() -> None:
    flood: Any = Flood()
    assert await gathered(flood, "stderr", 1500) == b"x" * 1500


class TestArchives:
    @ON_SHARED_LOOP
    async def test_a_tree_comes_back_as_it_went_in(self, tidy_sandbox: Sandbox) -> None:
        tree = tar_of(("a", None), ("a/deep", None), ("a/deep/f", b"one\n"), ("a/l", "deep/f"), ("a/h", "=a/deep/f"))
        assert await put(tidy_sandbox, "tree", tree) == len(tree)
        assert await say(
            tidy_sandbox, "cd tree/a; cat deep/f l h; stat -c %a deep/f; ls -id h | cut -d' ' -f1 | wc -l"
        ) == ("one\none\none\n640\n1\n")
        found = await got(tidy_sandbox, "tree")
        assert found["./a/deep/f"] == "one\n" or found["./a/h"] == "one\n"
        assert found["./a/l"] == "deep/f"
        assert set(await got(tidy_sandbox, "tree/a/deep", base=True)) == {"deep", "deep/f"}
        assert await got(tidy_sandbox, "tree/a/l") == {"f": "one\n"}, "a link is followed, a file is alone"
        assert await got(tidy_sandbox, "tree/a/l", follow=False) == {"l": "deep/f"}

    @ON_SHARED_LOOP
    async def test_no_entry_leaves_the_directory(self, tidy_sandbox: Sandbox) -> None:
        for entries in [
            (("../out", b"x"),),
            (("/out", b"x"),),
            (("a/../../out", b"x"),),
            (("l", "/tmp"), ("l/out", b"x")),
            (("l", ".."), ("l/out", b"x")),
            (("h", "=../../etc/passwd"),),
        ]:
            assert await file_error(put(tidy_sandbox, "tree", tar_of(*entries))) == "outside"
            assert await say(tidy_sandbox, "ls out /tmp/out tree/../out 2>/dev/null") == ""

    @ON_SHARED_LOOP
    @SHARED_RUNNER_ALONE
    async def test_of_a_broken_archive_no_new_file_is_there_in_part(self, tidy_sandbox: Sandbox) -> None:
        whole = tar_of(("kept", b"before\n"), ("cut", b"x" * 200_000))
        with pytest.raises(InvalidInput):
            await put(tidy_sandbox, "tree", whole[:100_000])
        assert await say(tidy_sandbox, "cd tree; ls -A; cat kept") == "kept\nbefore\n"

    @ON_SHARED_LOOP
    @SHARED_RUNNER_ALONE
    async def test_bounds_and_what_is_no_tar(self, tidy_sandbox: Sandbox) -> None:
        with pytest.raises(TooLarge):
            await put(tidy_sandbox, "tree", tar_of(("f", bytes(LIMIT_BYTES + 1))))
        with pytest.raises(InvalidInput, match="no tar"):
            await put(tidy_sandbox, "tree", b"not a tar" * 1000)
        with pytest.raises(NotFound):
            await got(tidy_sandbox, "nothing")
        await say(tidy_sandbox, f"mkdir big; head -c {LIMIT_BYTES + 1} /dev/zero > big/f")
        with pytest.raises(TooLarge):
            await got(tidy_sandbox, "big")

    @ON_SHARED_LOOP
    async def test_it_has_the_rights_of_its_user(self, tidy_sandbox: Sandbox) -> None:
        assert await file_error(put(tidy_sandbox, "/usr/planted", tar_of(("f", b"x")))) in (
            "permission_denied",
            "read_only",
        )
        await say(tidy_sandbox, "mkdir shut; echo x > shut/f; chmod 000 shut/f")
        assert await file_error(got(tidy_sandbox, "shut")) == "permission_denied"
        with pytest.raises(InvalidInput, match=r"sandbox\.users"):
            await put(tidy_sandbox, "tree", tar_of(("f", b"x")), user="daemon")


class TestFilesOfUsers:
    @ON_SHARED_LOOP
    async def test_errors_are_told_for_programs(self, tidy_sandbox: Sandbox) -> None:
        await say(tidy_sandbox, "mkdir d; echo x > f; echo x > shut; chmod 400 shut")
        limit = {"limit_bytes": 100}
        assert await file_error(tidy_sandbox.read_file("nothing", **limit)) == "not_found"
        assert await file_error(tidy_sandbox.read_file("d", **limit)) == "is_a_directory"
        assert await file_error(tidy_sandbox.list_files("f")) == "not_a_directory"
        assert await file_error(tidy_sandbox.read_file("f/x", **limit)) == "not_a_directory"
        assert await file_error(tidy_sandbox.write_file("d", b"x")) == "is_a_directory"
        assert await file_error(tidy_sandbox.write_file("shut", b"x")) == "permission_denied"
        assert await say(tidy_sandbox, "cat shut") == "x\n"

    @ON_SHARED_LOOP
    async def test_what_is_there_keeps_its_mode_its_owner_and_its_other_names(self, tidy_sandbox: Sandbox) -> None:
        await say(tidy_sandbox, "echo long enough > f; chmod 750 f; ln f other")
        await tidy_sandbox.write_file("f", b"new\n")
        assert await say(tidy_sandbox, "cat other; stat -c '%a %h' f") == "new\n750 2\n"
        await tidy_sandbox.write_file("f", b"newer\n", mode=0o600)
        await tidy_sandbox.write_file("fresh", b"x")
        assert await say(tidy_sandbox, "stat -c %a f fresh") == "600\n644\n"
        await say(tidy_sandbox, "cp /bin/sleep nap; ./nap 1000 & sleep 0")
        await tidy_sandbox.write_file("nap", b"a program that runs is replaced")
        await tidy_sandbox.sweep()

    async def test_a_file_of_a_user_that_is_allowed(self, provider: Provider, spec: SandboxSpec) -> None:
        given = replace(spec, users=("root", "auto"))
        made = await provider.create(given, name=unique("user"), labels={}, mounts={})
        try:
            await made.write_file("/tmp/root-own/f", b"x", user="root")
            assert await say(made, "stat -c %u /tmp/root-own/f") == "0\n"
            assert await file_error(made.write_file("/tmp/root-own/f", b"y")) == "permission_denied"
            await say(made, "chmod 666 /tmp/root-own/f; chown 7:7 /tmp/root-own/f", user="root")
            await made.write_file("/tmp/root-own/f", b"mine", user="")
            assert await say(made, "stat -c '%u %a' /tmp/root-own/f; cat /tmp/root-own/f") == "7 666\nmine"
            with pytest.raises(InvalidInput, match="nobody"):
                await made.write_file("f", b"x", user="nobody")
        finally:
            await made.close()


class TestWhatCommandsMay:
    @RUNNER_ALONE
    async def test_merged_output_is_in_order(self, sandbox: Sandbox) -> None:
        shown: list[tuple[str, bytes]] = []
        text = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
        ended = await sandbox.run(Command(shell=text, merge=True), lambda *said: shown.append(said))
        assert (ended.stdout, ended.stderr) == (b"o1\ne1\no2\ne2\no3\ne3\n", b"")
        assert {stream for stream, _ in shown} == {"stdout"}
        vector = Command(argv=("/bin/sh", "-c", "echo o; echo e >&2"), merge=True)
        assert (await sandbox.run(vector)).stdout == b"o\ne\n"

    async def test_root_with_the_default_capabilities_writes_where_others_own(
        self, provider: Provider, spec: SandboxSpec
    ) -> None:
        power = "cat /proc/self/status | grep CapEff; echo x > /workspace/new && echo wrote"
        told = []
        for capabilities in Capabilities:
            given = replace(spec, capabilities=capabilities, users=("root",))
            made = await provider.create(
                replace(given, users=("root", "auto")), name=unique("caps"), labels={}, mounts={}
            )
            told.append(await say(made, power, user="root"))
            await made.write_file("/workspace/mine", b"x")
            told.append(await say(made, "grep CapEff /proc/self/status"))
            await made.close()
        minimal, ours, default, ours_again = told
        assert "wrote" not in minimal and "wrote" in default
        mask = int(default.split()[1], 16)
        assert mask & (1 << 1), "DAC_OVERRIDE"
        assert not mask & (1 << 13) and not mask & (1 << 27), "neither NET_RAW nor MKNOD"
        assert int(ours.split()[1], 16) == int(ours_again.split()[1], 16) == 0, "other users have none"


@ON_SHARED_LOOP
@SHARED_RUNNER_ALONE
async def test_a_download_that_nobody_ends_holds_nothing(tidy_sandbox: Sandbox) -> None:
    await sh(tidy_sandbox, f"head -c {8 * MIB} /dev/zero > file")
    for _ in range(70):  # more than may be on their way at once
        async with tidy_sandbox.open_file("file", limit_bytes=8 * MIB) as file:
            await anext(file.chunks())
    assert len(await tidy_sandbox.read_file("file", limit_bytes=8 * MIB)) == 8 * MIB


@ON_SHARED_LOOP
@SHARED_RUNNER_ALONE
async def test_a_file_that_becomes_shorter_while_it_is_read_is_no_shorter_file(tidy_sandbox: Sandbox) -> None:
    await sh(tidy_sandbox, f"head -c {8 * MIB} /dev/zero > file")
    async with tidy_sandbox.open_file("file", limit_bytes=8 * MIB) as file:
        chunks = file.chunks()
        await anext(chunks)
        await sh(tidy_sandbox, ": > file")
        with pytest.raises(InvalidInput, match="became shorter"):
            async for _ in chunks:
                pass


@pytest.mark.promise("Files are written as they arrive, and a transfer that breaks off leaves nothing.")
@ON_SHARED_LOOP
@SHARED_RUNNER_ALONE
async def test_each_piece_is_written_before_the_next_is_asked_for(tidy_sandbox: Sandbox) -> None:
    await tidy_sandbox.run(Command(shell="mkdir in"))
    sizes: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * PIECE_BYTES
            parts = [file for file in await tidy_sandbox.list_files("in") if ".tangram-" in file.path]
            sizes.extend(part.size_bytes for part in parts)

    assert await tidy_sandbox.write_file("in/file", pieces()) == 3 * PIECE_BYTES
    assert sizes == [PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]
    assert [(file.path, file.size_bytes) for file in await tidy_sandbox.list_files("in")] == [
        ("in/file", 3 * PIECE_BYTES)
    ]


@ON_SHARED_LOOP
@SHARED_RUNNER_ALONE
async def test_of_one_that_breaks_off_nothing_stays(tidy_sandbox: Sandbox) -> None:
    await tidy_sandbox.run(Command(shell="mkdir in"))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * PIECE_BYTES
        raise ConnectionError("the client has gone")

    with pytest.raises(ConnectionError):
        await tidy_sandbox.write_file("in/file", pieces())
    assert await tidy_sandbox.list_files("in") == []


async def test_one_that_is_larger_than_the_disk_is_refused_as_it_comes(provider: Provider, spec: SandboxSpec) -> None:
    small = replace(spec, disk_bytes=16 * 2**20)
    sandbox = await provider.create(small, name=unique("small"), labels={}, mounts={})
    given = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal given
        while given < 2**30:
            given += 2**20
            yield bytes(2**20)

    with pytest.raises(TooLarge):
        await sandbox.write_file("file", pieces())
    assert given <= 17 * 2**20
    with pytest.raises(NotFound):
        await sandbox.read_file("file", limit_bytes=2**30)


async def test_what_an_engine_may_have_to_be_given_again_waits_on_the_disk() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    content = FileContent(pieces(), 100)
    async with repeatable(content) as kept:
        for _ in range(2):
            assert b"".join([piece async for piece in kept.pieces()]) == b"one two"
    assert content.size_bytes == 7
