"""Programs that mean harm, or behave as if they did: each ends, typed, and the sandbox and its neighbours live on."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from manager.errors import ActionFailed, InvalidInput, NotFound
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.disk import DiskWatch, image_bytes
from runtimes.sandbox.docker.provider import ContainerProvider
from runtimes.sandbox.process import ProcessProvider
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import sh, unique

DEADLINE_S = 60.0


async def python(sandbox: Sandbox, text: str, *, user: str = "", timeout_s: float = 10.0) -> CommandResult:
    return await sandbox.run(Command(argv=("python3", "-c", text), user=user, timeout_s=timeout_s, kill_grace_s=0.2))


async def assert_well(sandbox: Sandbox) -> None:
    """The sandbox serves, and nothing of earlier actions runs in it."""
    result = await sh(sandbox, "ps -eo comm= --no-headers | grep -cvE '^(python3.*|bash|sh|ps|grep)$'; echo well")
    assert result.stdout == b"0\nwell\n", result


def made_watch(provider: Provider) -> DiskWatch:
    """The watch that would look by itself in a second."""
    assert isinstance(provider, ContainerProvider | ProcessProvider)
    return provider._disk


class TestExhaustion:
    @pytest.mark.parametrize(
        "bomb",
        [
            ":(){ :|:& };:; sleep 100",
            pytest.param("while :; do setsid sleep 100 & done", marks=pytest.mark.slow),
            pytest.param(
                "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'", marks=pytest.mark.slow
            ),
        ],
    )
    async def test_a_fork_bomb_ends_with_its_action(self, provider: Provider, sandbox: Sandbox, bomb: str) -> None:
        if not provider.info.limits["pids"]:
            pytest.skip("this machine's process sandboxes cannot bound processes: no bomb is thrown here")
        assert (await sh(sandbox, bomb, timeout_s=1.0)).timed_out
        await assert_well(sandbox)

    async def test_many_small_memory_hogs_spare_the_runner(self, provider: Provider, sandbox: Sandbox) -> None:
        if not provider.info.limits["memory"]:
            pytest.skip("this machine's process sandboxes cannot bound memory")
        hog = "python3 -c 'import time; x = bytearray(8*2**20); time.sleep(2)'"
        hogs = f"for i in $(seq 40); do {hog} & done; wait; exit 1"
        result = await sh(sandbox, hogs)
        assert result.out_of_memory
        await assert_well(sandbox)

    async def test_endless_output_is_read_dropped_and_ended(self, sandbox: Sandbox) -> None:
        command = Command(shell="yes & yes >&2", timeout_s=2.0, kill_grace_s=0.1, output_limit_bytes=5000)
        result = await sandbox.run(command)
        assert (result.timed_out, result.stdout_truncated, result.stderr_truncated) == (True, True, True)
        for said in (result.stdout, result.stderr):
            kept = re.sub(rb"\n\[\.\.\. [1-9][0-9]* bytes are missing here \.\.\.\]\n", b"", said, count=1)
            assert (len(kept), kept.strip(b"y\n")) == (5000, b"")
        await assert_well(sandbox)

    async def test_a_file_and_shared_memory_are_bounded(self, provider: Provider, spec: SandboxSpec) -> None:
        small = replace(spec, disk_bytes=4 * 2**20, shm_bytes=2**20)
        if provider.info.kind == "plain" and not provider.info.limits["filesystem"]:
            pytest.skip("this machine's process sandboxes share /dev/shm")
        made = await provider.create(small, name=unique("small"), labels={}, mounts={})
        result = await sh(
            made, "head -c 9000000 /dev/zero > file; head -c 9000000 /dev/zero > /dev/shm/file; stat -c %s file"
        )
        assert int(result.stdout) <= image_bytes(small.disk_bytes), "an image has room for its tables too"
        assert b"No space left" in result.stderr
        await made.close()

    async def test_a_sandbox_that_fills_its_disk_is_told_or_ended(self, provider: Provider, spec: SandboxSpec) -> None:
        """Many files, each below the bound of one."""
        small = replace(spec, disk_bytes=16 * 2**20)
        made = await provider.create(small, name=unique("greedy"), labels={}, mounts={})
        await sh(made, "for i in 1 2 3; do head -c 9000000 /dev/zero > file$i; done")
        watch = made_watch(provider)
        await watch.check()
        if provider.info.disk != "walk":
            full = await sh(made, "head -c 9000000 /dev/zero > file4")
            assert b"No space left" in full.stderr
        else:
            assert not made.alive
            with pytest.raises(ActionFailed, match="disk bound of 16777216 bytes"):
                await sh(made, "true")
        await made.close()

    @pytest.mark.promise("An agent cannot turn its 0.0 into no reward by its files, disk, memory or names.")
    async def test_a_sweep_takes_what_was_left_in_memory(self, provider: Provider, spec: SandboxSpec) -> None:
        """A small ``/tmp`` stays, and so does one on the disk."""
        spec = replace(spec, memory_bytes=128 * 2**20, users=("root",))
        sandbox = await provider.create(spec, name=unique("left"), labels={}, mounts={})
        leave = """
            import ctypes, os
            libc, user = ctypes.CDLL(None), str(os.getuid())
            made = libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
            os.makedirs(f"/dev/shm/{user}/below")
            for place in (f"/dev/shm/{user}/below/file", f"/dev/shm/.{user}", f"/tmp/{user}"):
                open(place, "w").close()
            assert min(made) >= 0
        """
        look = """
            import os
            kinds = [len(open(f"/proc/sysvipc/{kind}").readlines()) - 1 for kind in ("shm", "sem", "msg")]
            print(kinds, os.listdir("/dev/shm"), len(os.listdir("/tmp")))
        """
        for user in ("", "root"):
            assert (await python(sandbox, textwrap.dedent(leave), user=user)).exit_code == 0
        await sandbox.sweep()
        assert (await python(sandbox, textwrap.dedent(look))).stdout == b"[0, 0, 0] [] 2\n"
        await sh(sandbox, "head -c 80000000 /dev/zero > /tmp/big")
        await sandbox.sweep()
        left = b"0" if isinstance(provider, ProcessProvider) else b"3"
        assert (await python(sandbox, textwrap.dedent(look))).stdout == b"[0, 0, 0] [] " + left + b"\n"
        await sandbox.close()

    async def test_hundreds_of_open_pipes_left_behind_do_not_stop_the_runner(self, sandbox: Sandbox) -> None:
        for _ in range(20):
            await sh(sandbox, "for i in 1 2; do sleep 50 & done")
        assert (await sh(sandbox, "echo on; pkill sleep")).stdout == b"on\n"


class TestEscape:
    @pytest.mark.promise("Commands cannot kill, trace or read the runner.")
    @pytest.mark.parametrize("user", ["", "root"])
    async def test_killing_everything_kills_not_the_runner(
        self, provider: Provider, sandbox: Sandbox, user: str
    ) -> None:
        if provider.info.kind == "plain" and not provider.info.limits["processes_hidden"]:
            pytest.skip("this machine's process sandboxes share the host's processes")
        await sh(sandbox, "kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1", user=user)
        await assert_well(sandbox)

    async def test_the_start_of_a_command_is_no_moment_to_end_or_stop_the_runner(
        self, provider: Provider, sandbox: Sandbox
    ) -> None:
        """Of the first process of a namespace the real ids are the user's while it starts a command."""
        if provider.info.kind == "plain" and not provider.info.limits["processes_hidden"]:
            pytest.skip("this machine's process sandboxes share the host's processes")
        storm = "while :; do kill -9 $PPID; kill -STOP $PPID; kill -ABRT $PPID; done"
        attackers = [asyncio.create_task(sandbox.run(Command(shell=storm, output_limit_bytes=0))) for _ in range(2)]
        try:
            for _ in range(100):
                assert (await sh(sandbox, "true")).exit_code == 0
        finally:
            for attacker in attackers:
                attacker.cancel()
            await asyncio.gather(*attackers, return_exceptions=True)
        await assert_well(sandbox)

    async def test_a_command_has_its_users_ids_alone_and_no_way_back(
        self, provider: Provider, sandbox: Sandbox
    ) -> None:
        if provider.info.kind == "plain" and not provider.info.limits["processes_hidden"]:
            pytest.skip("this machine's process sandboxes share the host's processes")
        look = (
            "import os\n"
            "ids = [os.getresuid(), os.getresgid()]\n"
            "print([len({*each}) for each in ids], 0 in (*ids[0], *ids[1], *os.getgroups()))\n"
            "held = ('CapPrm', 'CapEff', 'CapAmb')\n"
            "print({line.split()[1] for line in open('/proc/self/status') if line[:6] in held})\n"
            "for change in (os.setuid, os.seteuid, os.setgid, os.setegid):\n"
            "  try: change(0); print('root again')\n"
            "  except OSError: print('refused')\n"
        )
        told = (await python(sandbox, look)).stdout.decode()
        assert told == "[1, 1] False\n{'0000000000000000'}\n" + "refused\n" * 4

    @pytest.mark.parametrize("user", ["", "root"])
    async def test_the_runner_cannot_be_traced_or_read(self, provider: Provider, sandbox: Sandbox, user: str) -> None:
        if provider.info.kind == "plain" and not provider.info.limits["processes_hidden"]:
            pytest.skip("this machine's process sandboxes share the host's processes")
        attempt = (
            "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "print(libc.ptrace(16, 1, 0, 0))\n"
            "for name in ('mem', 'environ', 'maps', 'fd/3'):\n"
            "  try: open(f'/proc/1/{name}', 'rb').read(10); print('read', name)\n"
            "  except OSError: print('refused')\n"
        )
        assert (await python(sandbox, attempt, user=user)).stdout == b"-1\n" + b"refused\n" * 4

    async def test_a_forged_frame_from_inside_ends_nobodys_action(self, provider: Provider, sandbox: Sandbox) -> None:
        """Even root inside, who reaches the socket, is hung up on without the token."""
        if provider.info.kind == "plain" and not provider.info.limits["filesystem"]:
            pytest.skip("this machine's process sandboxes show the host's files")
        forge = (
            "import glob, json, socket, struct\n"
            "H = struct.Struct('!IBI')\n"
            "def frame(kind, number, body): return H.pack(len(body), kind, number) + body\n"
            "greeting = json.dumps({'token': 'guess', 'user': '0', 'workdir': '/', 'env': {}}).encode()\n"
            "ends = [frame(68, n, b'{\"code\":0}') + frame(4, n, b'{\"grace_s\":0}') for n in range(300)]\n"
            "for first in (frame(1, 0, greeting), b''.join(ends), b'\\xff' * 5000):\n"
            "  s = socket.socket(socket.AF_UNIX); s.settimeout(5)\n"
            "  s.connect('/.tangram/run/s'); s.sendall(first)\n"
            "  try: print(s.recv(100))\n"
            "  except ConnectionError: print(b'')\n"
        )
        begun = asyncio.Event()
        victim = asyncio.create_task(
            sandbox.run(
                Command(shell="echo begun; while [ ! -e done ]; do sleep 0.01; done; exit 7"), lambda *_: begun.set()
            )
        )
        attached = (await sh(sandbox, "test -S /.tangram/run/s", user="root")).exit_code != 0
        if attached:  # there is no socket to speak to, and the runner's own streams are out of reach
            forge = (
                "for fd in (0, 1):\n  try: open(f'/proc/1/fd/{fd}', 'wb', 0).write(b'x')\n"
                "  except OSError as error: print(repr(b''))\nraise SystemExit(1)"
            )
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            assert (await python(sandbox, forge, user="root")).stdout == b"b''\n" * (2 if attached else 3)
            assert (await python(sandbox, forge)).exit_code == 1  # the sandbox's user does not even reach it
            await sandbox.write_file("done", b"")
            assert (await victim).exit_code == 7

    async def test_the_kernels_switches_are_out_of_reach(self, provider: Provider, sandbox: Sandbox) -> None:
        if provider.info.kind == "plain" and not provider.info.limits["filesystem"]:
            pytest.skip("this machine's process sandboxes show the host's files")
        attempts = [
            "/proc/sysrq-trigger",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/vm/drop_caches",
            "/sys/power/state",
        ]
        for path in attempts:
            assert (
                await sh(sandbox, f"[ ! -e {path} ] || echo 1 > {path}; [ $? -ne 0 ] || [ ! -e {path} ]")
            ).exit_code == 0
        for attempt in (
            "mount -t tmpfs none /mnt",
            "mount -t proc proc /mnt",
            "mknod /tmp/disk b 8 0",
            "chroot / true",
        ):
            assert (await sh(sandbox, f"{attempt} 2>/dev/null && echo done", user="root")).stdout == b""

    @pytest.mark.promise("One trajectory's files and processes are not another's.")
    async def test_one_trajectorys_files_and_processes_are_not_anothers(
        self, provider: Provider, spec: SandboxSpec
    ) -> None:
        if provider.info.kind == "plain" and not provider.info.limits["filesystem"]:
            pytest.skip("this machine's process sandboxes show the host's files")
        one = await provider.create(spec, name=unique("one"), labels={}, mounts={})
        other = await provider.create(spec, name=unique("other"), labels={}, mounts={})
        await one.write_file("secret-of-one", b"x")
        await sh(one, "echo x > /tmp/secret-of-one; sleep 777 >/dev/null 2>&1 &")
        search = "find / -xdev -name 'secret-of-one' 2>/dev/null; ls /tmp | grep secret; ps ax | grep -c 'sleep 77[7]'"
        assert (await sh(other, search, user="root")).stdout == b"0\n"
        await one.close()
        await other.close()

    async def test_sandboxes_of_one_named_user_do_not_reach_each_other(
        self, provider: Provider, spec: SandboxSpec
    ) -> None:
        """Of two containers it is the same user of the machine: only their namespaces are between them."""
        if provider.info.kind == "plain" and not provider.info.limits["processes_hidden"]:
            pytest.skip("this machine's process sandboxes share the host's processes")
        shared = replace(spec, user="65533", users=("65533", "root"))
        one = await provider.create(shared, name=unique("one"), labels={}, mounts={})
        other = await provider.create(shared, name=unique("other"), labels={}, mounts={})
        await sh(one, "sleep 777 >/dev/null 2>&1 & echo $! > /tmp/pid")
        attempt = (
            "import ctypes, os, signal\nlibc, reached = ctypes.CDLL(None, use_errno=True), []\n"
            "for pid in set(range(2, 2**16)) - {os.getpid(), os.getppid()}:\n"
            "  if libc.ptrace(16, pid, 0, 0) == 0: reached.append(pid)\n"
            "  try: os.kill(pid, signal.SIGKILL); reached.append(pid)\n"
            "  except OSError: pass\n"
            "print(reached)\n"
        )
        assert (await python(other, attempt)).stdout == b"[]\n"
        assert (await python(other, attempt, user="root")).stdout == b"[]\n"
        assert (await sh(one, "kill -0 $(cat /tmp/pid) && id -u")).stdout == b"65533\n"
        await one.close()
        await other.close()

    @pytest.mark.promise("The files of the host are not seen, and no path leads out.")
    async def test_a_planted_link_shows_nothing_of_the_host(self, sandbox: Sandbox, tmp_path: Path) -> None:
        secret = tmp_path / "host-secret"
        secret.write_text("of the host", encoding="ascii")
        await sh(sandbox, f"ln -s {secret} direct; ln -s {'../' * 12}{secret} relative; ln -s / root")
        for path in ("direct", "relative", f"root{secret}", "root/proc/1/root/etc/shadow", "/proc/1/environ"):
            with pytest.raises((NotFound, InvalidInput)):
                await sandbox.read_file(path, limit_bytes=1000)
            with pytest.raises((NotFound, InvalidInput)):
                await sandbox.list_files(path)
        assert secret.read_text(encoding="ascii") == "of the host"
