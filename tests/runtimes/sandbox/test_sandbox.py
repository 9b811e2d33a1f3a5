"""What every sandbox does, whatever it is made of."""

from __future__ import annotations

import asyncio
import math
import os
import re
from pathlib import Path

import pytest

from manager.errors import ActionFailed, Conflict, InvalidInput, NotFound, Reason, TooLarge
from manager.function import Isolation, SandboxSpec
from runtimes.sandbox.command import ARGUMENT_MAX_BYTES, Command
from runtimes.sandbox.exec import conclude
from runtimes.sandbox.runner.client import MARKER
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import SHARED_RUNNER_ALONE, sh, unique

#: Most tests share a sandbox; what leaves processes or meets a bound has a fresh one.
pytestmark = pytest.mark.asyncio(loop_scope="module")
DEADLINE_S = 60.0


class TestCommands:
    async def test_a_shell_command_gives_its_output_and_its_exit_code(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out\n", b"err\n", 3, None)

    async def test_an_argument_list_passes_through_no_shell(self, shared_sandbox: Sandbox) -> None:
        result = await shared_sandbox.run(Command(argv=("printf", "%s|", "a b", "$HOME", "*", "")))
        assert result.stdout == b"a b|$HOME|*||"

    @SHARED_RUNNER_ALONE
    async def test_a_script_of_any_length_runs_as_a_short_one_does(self, shared_sandbox: Sandbox) -> None:
        text = "# 'odd' \\ $(false) `x` \"é€\n"
        script = f'{text * 9000}cat; env | grep -c TANGRAM_SCRIPT; echo "$0 $# $TANGRAM_SCRIPT" >&2; exit 7\n'
        assert len(script.encode()) > 2 * ARGUMENT_MAX_BYTES
        result = await shared_sandbox.run(Command(shell=script, stdin=b"given\n"))
        brief = await shared_sandbox.run(Command(shell=script.removeprefix(text * 9000), stdin=b"given\n"))
        assert (result.stdout, result.stderr, result.exit_code) == (b"given\n0\n", brief.stderr, 7)

    @SHARED_RUNNER_ALONE
    async def test_output_is_binary_safe(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, r"printf '\000\377\001\n\r'")
        assert result.stdout == b"\x00\xff\x01\n\r"

    @SHARED_RUNNER_ALONE
    async def test_standard_input_of_any_size_and_content_arrives(self, shared_sandbox: Sandbox) -> None:
        data = os.urandom(1_500_000)
        result = await shared_sandbox.run(Command(argv=("cat",), stdin=data, output_limit_bytes=2**21))
        assert result.stdout == data

    @SHARED_RUNNER_ALONE
    async def test_standard_input_that_nobody_reads_does_not_hang(self, shared_sandbox: Sandbox) -> None:
        result = await shared_sandbox.run(Command(argv=("true",), stdin=b"x" * 2**21))
        assert result.exit_code == 0

    @SHARED_RUNNER_ALONE
    async def test_without_standard_input_a_reader_sees_its_end(self, shared_sandbox: Sandbox) -> None:
        assert (await shared_sandbox.run(Command(argv=("cat",)))).stdout == b""

    async def test_environment_and_working_directory(self, shared_sandbox: Sandbox) -> None:
        await sh(shared_sandbox, "mkdir -p sub")
        result = await sh(shared_sandbox, 'echo "$PWD $GREETING"', cwd="sub", env={"GREETING": "Hallo, 世界\t!"})
        assert result.stdout.decode() == "/workspace/sub Hallo, 世界\t!\n"

    @SHARED_RUNNER_ALONE
    async def test_a_missing_working_directory_is_invalid_input(self, shared_sandbox: Sandbox) -> None:
        with pytest.raises(InvalidInput, match="working directory"):
            await sh(shared_sandbox, "true", cwd="not/there")

    @SHARED_RUNNER_ALONE
    async def test_a_missing_program_is_a_shells_result(self, shared_sandbox: Sandbox) -> None:
        result = await shared_sandbox.run(Command(argv=("no-such-program",)))
        assert (result.exit_code, result.stderr) == (127, b"no-such-program: No such file or directory\n")

    async def test_an_argument_list_that_is_too_long_is_invalid_input(self, shared_sandbox: Sandbox) -> None:
        with pytest.raises(InvalidInput, match="too long"):
            await shared_sandbox.run(Command(argv=("true", "x" * 200_000)))

    @pytest.mark.parametrize(
        "command",
        [
            Command(),
            Command(argv=("a",), shell="b"),
            Command(argv=("a\0b",)),
            Command(argv=("true",), env={"A=B": "c"}),
        ],
    )
    @SHARED_RUNNER_ALONE
    async def test_what_is_no_command_is_invalid_input(self, shared_sandbox: Sandbox, command: Command) -> None:
        with pytest.raises(InvalidInput):
            await shared_sandbox.run(command)

    @SHARED_RUNNER_ALONE
    async def test_a_signal_is_told_from_an_exit_code(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "kill -SEGV $$")
        assert (result.exit_code, result.signal) == (None, 11)

    async def test_output_streams_while_the_command_runs(self, shared_sandbox: Sandbox) -> None:
        first = asyncio.Event()
        seen: list[tuple[str, bytes]] = []

        def on_output(stream: str, data: bytes) -> None:
            seen.append((stream, data))
            first.set()

        running = asyncio.create_task(
            shared_sandbox.run(
                Command(shell="echo first; while [ ! -e go ]; do sleep 0.01; done; echo second"), on_output
            )
        )
        async with asyncio.timeout(DEADLINE_S):
            await first.wait()
            assert seen == [("stdout", b"first\n")]
            await shared_sandbox.write_file("go", b"")
            await running
        assert b"".join(data for _, data in seen) == b"first\nsecond\n"

    @pytest.mark.promise("Output beyond its limit keeps both its ends and counts the missing bytes.")
    @SHARED_RUNNER_ALONE
    async def test_of_long_output_both_ends_are_kept_and_what_is_missing_is_counted(
        self, shared_sandbox: Sandbox
    ) -> None:
        script = "echo begin; head -c 3000000 /dev/zero; echo the end; echo x >&2; exit 5"
        seen: list[bytes] = []
        command = Command(shell=script, output_limit_bytes=1000, shown_limit_bytes=5000)
        result = await shared_sandbox.run(
            command, lambda stream, data: seen.append(data) if stream == "stdout" else None
        )
        head, tail = result.stdout.split(MARKER % (3_000_014 - 1000))
        assert (head, tail) == (b"begin\n".ljust(500, b"\0"), b"the end\n".rjust(500, b"\0"))
        assert (result.stdout_truncated, result.exit_code) == (True, 5)
        assert (result.stderr, result.stderr_truncated) == (b"x\n", False)
        assert (len(b"".join(seen)), result.unshown["stdout"]) == (5000, 3_000_014 - 5000)

    @SHARED_RUNNER_ALONE
    async def test_what_is_kept_of_text_is_text(self, shared_sandbox: Sandbox) -> None:
        for limit_bytes in range(100, 104):
            result = await sh(
                shared_sandbox, "for i in $(seq 99); do printf 'äöü€'; done", output_limit_bytes=limit_bytes
            )
            head, marker, tail = result.stdout.decode().strip().split("\n")
            missing = 99 * 9 - len((head + tail).encode())
            assert (missing < 99 * 9 - limit_bytes + 6, set(head + tail)) == (True, set("äöü€"))
            assert marker == f"[... {missing} bytes are missing here ...]"

    @SHARED_RUNNER_ALONE
    async def test_output_of_exactly_the_limit_is_whole(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "printf 12345", output_limit_bytes=5)
        assert (result.stdout, result.stdout_truncated) == (b"12345", False)

    async def test_use_is_measured(self, shared_sandbox: Sandbox) -> None:
        result = await shared_sandbox.run(
            Command(argv=("python3", "-c", "x = bytearray(40_000_000)\nfor i in range(10**6): pass"))
        )
        assert result.cpu_s > 0.005
        assert result.peak_memory_bytes > 40_000_000
        assert result.duration_s >= result.cpu_s * 0.5

    async def test_files_and_background_processes_survive_the_command(self, fresh_sandbox: Sandbox) -> None:
        await sh(fresh_sandbox, "echo kept > file; sleep 1000 >/dev/null 2>&1 & echo $! > pid")
        result = await sh(fresh_sandbox, "cat file; kill -0 $(cat pid) && echo alive")
        assert result.stdout == b"kept\nalive\n"

    async def test_a_background_process_that_holds_the_pipes_does_not_hold_the_action(
        self, fresh_sandbox: Sandbox
    ) -> None:
        async with asyncio.timeout(DEADLINE_S):
            result = await sh(fresh_sandbox, "(while :; do echo noise; sleep 0.02; done) & echo started", timeout_s=60)
        assert result.stdout.startswith(b"started\n") or b"started\n" in result.stdout
        assert (await sh(fresh_sandbox, "pgrep -c sleep || true")).exit_code == 0

    @SHARED_RUNNER_ALONE
    async def test_commands_may_overlap(self, shared_sandbox: Sandbox) -> None:
        async with asyncio.timeout(DEADLINE_S):
            waiting = asyncio.create_task(sh(shared_sandbox, "while [ ! -e done ]; do sleep 0.01; done; echo saw"))
            await sh(shared_sandbox, "touch done")
            assert (await waiting).stdout == b"saw\n"

    @SHARED_RUNNER_ALONE
    async def test_a_closed_sandbox_says_so(self, fresh_sandbox: Sandbox) -> None:
        await fresh_sandbox.close()
        await fresh_sandbox.close()
        with pytest.raises(Conflict):
            await sh(fresh_sandbox, "true")


class TestTimeouts:
    @SHARED_RUNNER_ALONE
    async def test_a_timeout_is_told_with_what_was_printed(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "echo before; sleep 1000", timeout_s=2, kill_grace_s=10)
        assert (result.timed_out, result.stdout, result.signal) == (True, b"before\n", 15)

    async def test_a_handler_of_sigterm_has_its_grace(self, shared_sandbox: Sandbox) -> None:
        script = "trap 'echo cleaned; exit 0' TERM; echo on; while :; do sleep 0.01; done"
        result = await sh(shared_sandbox, script, timeout_s=2, kill_grace_s=60)
        assert (result.timed_out, result.stdout, result.exit_code) == (True, b"on\ncleaned\n", 0)

    async def test_what_is_stopped_and_makes_no_progress_is_ended_and_told(self, shared_sandbox: Sandbox) -> None:
        script = "sh -c 'echo on; kill -STOP $$; echo never'"
        result = await sh(shared_sandbox, script, timeout_s=60, still_s=0.3)
        assert (result.timed_out, result.stopped, result.stdout) == (True, True, b"on\n")
        with pytest.raises(ActionFailed, match=r"made no progress: a process of it was stopped"):
            conclude(result, Command(shell=script))

    async def test_who_ignores_sigterm_is_killed(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "trap '' TERM; while :; do sleep 0.01; done", timeout_s=2, kill_grace_s=0.2)
        assert (result.timed_out, result.signal) == (True, 9)

    @pytest.mark.promise("`timeout` bounds the execution, and kills every process of it.")
    @pytest.mark.parametrize(
        "escape",
        [
            "(setsid sleep 12321 &)",
            "(trap '' TERM HUP; setsid sleep 12321 </dev/null >/dev/null 2>&1 & disown) 2>/dev/null",
            "python3 -c 'import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
            'os.environ.clear(); os.execv("/bin/sleep", ["sleep", "12321"])\'',
            "env -i setsid sleep 12321 &",
        ],
    )
    async def test_no_process_escapes_a_timeout(self, shared_sandbox: Sandbox, escape: str) -> None:
        result = await sh(shared_sandbox, f"{escape}\nsleep 1000", timeout_s=0.5, kill_grace_s=0.2)
        assert result.timed_out
        assert (await sh(shared_sandbox, "pgrep -f 'sleep 1232[1]' || echo none")).stdout == b"none\n"

    async def test_what_an_earlier_action_left_behind_survives_a_later_timeout(self, fresh_sandbox: Sandbox) -> None:
        await sh(fresh_sandbox, "setsid sleep 3000 >/dev/null 2>&1 & echo $! > pid")
        assert (
            await sh(fresh_sandbox, "(setsid sleep 12321 &); sleep 1000", timeout_s=0.3, kill_grace_s=0.1)
        ).timed_out
        result = await sh(fresh_sandbox, "kill -0 $(cat pid) && echo alive; pgrep -f 'sleep 1232[1]' || echo none")
        assert result.stdout == b"alive\nnone\n"

    async def test_cancelling_kills_the_whole_tree_before_it_returns(self, shared_sandbox: Sandbox) -> None:
        begun = asyncio.Event()
        script = "(setsid sleep 12321 &); echo begun; sleep 1000"
        task = asyncio.create_task(shared_sandbox.run(Command(shell=script), lambda *_: begun.set()))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await sh(shared_sandbox, "pgrep sleep || echo none")).stdout == b"none\n"


class TestProcesses:
    @SHARED_RUNNER_ALONE
    async def test_a_long_lived_process_converses(self, shared_sandbox: Sandbox) -> None:
        script = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
        process = await shared_sandbox.spawn(Command(argv=("python3", "-c", script), timeout_s=math.inf))
        chunks = process.chunks()
        async with asyncio.timeout(DEADLINE_S):
            for word in (b"abc", b"xyz"):
                await process.write_stdin(word + b"\n")
                assert await anext(chunks) == ("stdout", word[::-1] + b"\n")
            await process.end_input()
            assert [chunk async for chunk in chunks] == []
            assert (await process.wait()).exit_code == 0

    @SHARED_RUNNER_ALONE
    async def test_a_slow_reader_holds_the_process_back_and_loses_nothing(self, shared_sandbox: Sandbox) -> None:
        size = 20_000_000
        process = await shared_sandbox.spawn(
            Command(shell=f"head -c {size} /dev/zero; touch finished", timeout_s=math.inf)
        )
        async with asyncio.timeout(DEADLINE_S):
            assert sum([len(data) async for _, data in process.chunks()]) == size
            assert (await process.wait()).exit_code == 0

    async def test_a_killed_process_is_gone_with_its_children(self, shared_sandbox: Sandbox) -> None:
        process = await shared_sandbox.spawn(Command(shell="(setsid sleep 12321 &); yes", timeout_s=math.inf))
        async with asyncio.timeout(DEADLINE_S):
            await anext(process.chunks())
            await process.kill()
            await process.kill()
            assert (await process.wait()).signal == 9
        assert (await sh(shared_sandbox, "pgrep -f 'sleep 1232[1]|^yes' || echo none")).stdout == b"none\n"

    async def test_it_lives_beside_the_actions_and_their_timeouts(self, shared_sandbox: Sandbox) -> None:
        process = await shared_sandbox.spawn(Command(argv=("cat",), timeout_s=math.inf))
        assert (
            await sh(shared_sandbox, "(setsid sleep 12321 &); sleep 1000", timeout_s=0.2, kill_grace_s=0.1)
        ).timed_out
        async with asyncio.timeout(DEADLINE_S):
            await process.write_stdin(b"still here")
            assert await anext(process.chunks()) == ("stdout", b"still here")
            await process.kill()
        assert (await sh(shared_sandbox, "pgrep sleep || echo none")).stdout == b"none\n"

    async def test_the_sandboxs_end_is_the_processs_end(self, fresh_sandbox: Sandbox) -> None:
        process = await fresh_sandbox.spawn(Command(argv=("cat",), timeout_s=math.inf))
        await fresh_sandbox.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ActionFailed, match="gone"):
                await process.wait()
            with pytest.raises(ActionFailed, match="reads no more"):
                await process.write_stdin(b"x")


class TestCores:
    @pytest.mark.promise("Cores are exclusive while an action runs, and given back after it.")
    async def test_a_sandbox_runs_on_exactly_its_cores(self, shared_sandbox: Sandbox) -> None:
        available = sorted(os.sched_getaffinity(0))
        for cores in ([available[-1]], available):
            await shared_sandbox.set_cores(cores)
            result = await sh(shared_sandbox, "python3 -c 'import os; print(sorted(os.sched_getaffinity(0)))'")
            assert result.stdout.decode().strip() == str(cores)

    async def test_a_running_command_is_moved(self, shared_sandbox: Sandbox) -> None:
        available = sorted(os.sched_getaffinity(0))
        script = "import os, time\nwhile len(os.sched_getaffinity(0)) != 1: time.sleep(0.005)\nprint('moved')"
        await shared_sandbox.set_cores(available)
        process = asyncio.create_task(shared_sandbox.run(Command(argv=("python3", "-c", script))))
        async with asyncio.timeout(DEADLINE_S):
            while not (await sh(shared_sandbox, "pgrep -f 'import o[s]' || true")).stdout:
                pass
            await shared_sandbox.set_cores(available[:1])
            assert (await process).stdout == b"moved\n"


class TestFiles:
    async def test_a_file_goes_in_and_comes_out(self, shared_sandbox: Sandbox) -> None:
        data = os.urandom(300_000)
        await shared_sandbox.write_file("deep/down/data.bin", data, mode=0o755)
        assert await shared_sandbox.read_file("deep/down/data.bin", limit_bytes=2**20) == data
        assert await shared_sandbox.read_file("/workspace/deep/down/data.bin", limit_bytes=2**20) == data
        listing = await shared_sandbox.list_files("deep/down")
        assert [(entry.path, entry.size_bytes, entry.directory, entry.mode) for entry in listing] == [
            ("deep/down/data.bin", 300_000, False, 0o755)
        ]
        owners = (await sh(shared_sandbox, "stat -c %u deep/down/data.bin; id -u")).stdout.split()
        assert owners[0] == owners[1]

    async def test_writing_replaces_and_leaves_no_trace(self, fresh_sandbox: Sandbox) -> None:
        await fresh_sandbox.write_file("file", b"one")
        await fresh_sandbox.write_file("file", b"")
        assert await fresh_sandbox.read_file("file", limit_bytes=10) == b""
        assert [entry.path for entry in await fresh_sandbox.list_files(".")] == ["./file"]

    @SHARED_RUNNER_ALONE
    async def test_odd_names_are_names(self, shared_sandbox: Sandbox) -> None:
        name = "a b\n*'\"\\ 世界"
        await shared_sandbox.write_file(name, b"x")
        assert await shared_sandbox.read_file(name, limit_bytes=1) == b"x"

    @SHARED_RUNNER_ALONE
    async def test_what_is_not_there_is_not_found(self, shared_sandbox: Sandbox) -> None:
        for attempt in (shared_sandbox.read_file("nothing", limit_bytes=1), shared_sandbox.list_files("nothing")):
            with pytest.raises(NotFound):
                await attempt

    @SHARED_RUNNER_ALONE
    async def test_too_much_is_too_large(self, shared_sandbox: Sandbox) -> None:
        await shared_sandbox.write_file("file", b"12345")
        assert await shared_sandbox.read_file("file", limit_bytes=5) == b"12345"
        with pytest.raises(TooLarge):
            await shared_sandbox.read_file("file", limit_bytes=4)
        with pytest.raises(TooLarge):
            await shared_sandbox.read_file("/dev/../proc/../workspace/file", limit_bytes=0)

    @pytest.mark.parametrize("path", ["../../etc/passwd", "../other", "a/../../x", "", "a\0b", "x" * 5000])
    @SHARED_RUNNER_ALONE
    async def test_a_path_that_leaves_the_sandbox_is_invalid_input(self, shared_sandbox: Sandbox, path: str) -> None:
        with pytest.raises(InvalidInput):
            await shared_sandbox.read_file(path, limit_bytes=100)
        with pytest.raises(InvalidInput):
            await shared_sandbox.write_file(path, b"x")
        with pytest.raises(InvalidInput):
            await shared_sandbox.list_files(path)

    @pytest.mark.parametrize(
        "make",
        ["mkfifo thing", "mkdir thing", "ln -s /dev/zero thing", "ln -s /proc/self/mem thing", "ln -s thing thing"],
    )
    async def test_only_regular_files_are_read(self, shared_sandbox: Sandbox, make: str) -> None:
        await sh(shared_sandbox, f"rm -rf thing; {make}")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises((InvalidInput, NotFound)):
                await shared_sandbox.read_file("thing", limit_bytes=100)

    async def test_a_planted_link_is_replaced_and_not_followed_by_a_write(self, shared_sandbox: Sandbox) -> None:
        await sh(shared_sandbox, "echo precious > target; ln -s target link")
        await shared_sandbox.write_file("link", b"new")
        assert (
            await sh(shared_sandbox, "cat target link; test -L link || echo plain")
        ).stdout == b"precious\nnewplain\n"

    async def test_a_users_rights_are_the_file_interfaces_rights(self, shared_sandbox: Sandbox) -> None:
        await sh(shared_sandbox, "install -m 600 /dev/null /workspace/secret; echo hidden > secret", user="root")
        with pytest.raises(InvalidInput):
            await shared_sandbox.write_file("/usr/planted", b"x")
        with pytest.raises((InvalidInput, NotFound)):
            await shared_sandbox.read_file("/.tangram/run/s", limit_bytes=10)


#: Forks until that is refused, and leaves no child behind.
FORKS = """
import os, signal, sys, time
made = []
try:
    while True:
        if (child := os.fork()) == 0:
            time.sleep(60)
        made.append(child)
except OSError as error:
    for child in made:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sys.stderr.write(os.strerror(error.errno))
    sys.exit(3)
"""


class TestPromises:
    @pytest.mark.promise("Memory is bounded, and its end is reported with its peak.")
    async def test_memory_is_bounded_and_the_end_is_told_with_its_peak(
        self, shared_provider: Provider, fresh_sandbox: Sandbox
    ) -> None:
        if not shared_provider.info.limits["memory"]:
            pytest.skip("this machine's process sandboxes cannot bound memory")
        result = await fresh_sandbox.run(Command(argv=("python3", "-c", "x = bytearray(10**9)")))
        assert (result.out_of_memory, result.signal) == (True, 9)
        assert result.peak_memory_bytes > 200 * 2**20
        after = await sh(fresh_sandbox, "echo alive; exit 1")
        assert (after.stdout, after.out_of_memory) == (b"alive\n", False)

    async def test_processes_are_bounded_and_who_fails_for_it_is_told_so(
        self, shared_provider: Provider, fresh_sandbox: Sandbox
    ) -> None:
        if not shared_provider.info.limits["pids"]:
            pytest.skip("this machine's process sandboxes cannot bound processes")
        result = await fresh_sandbox.run(Command(argv=("python3", "-c", FORKS)))
        assert (result.exit_code, result.stderr) == (3, b"Resource temporarily unavailable")
        assert result.forks_refused == 1
        assert (await sh(fresh_sandbox, "exit 3")).forks_refused == 0, "it is told of the command that it befell"

    @pytest.mark.promise("There is no network unless it is granted, and an allow list opens nothing else.")
    async def test_there_is_no_network_unless_granted(self, shared_provider: Provider, shared_sandbox: Sandbox) -> None:
        if not shared_provider.info.limits["network"]:
            pytest.skip("this machine's process sandboxes have the host's network")
        interfaces = (await sh(shared_sandbox, "tail -n +3 /proc/net/dev")).stdout.decode()
        assert re.findall(r"^\s*(\w+):", interfaces, re.MULTILINE) == ["lo"]
        loopback = (
            "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
            "socket.create_connection(s.getsockname())\nprint('ok')"
        )
        assert (await shared_sandbox.run(Command(argv=("python3", "-c", loopback)))).stdout == b"ok\n"

    async def test_commands_have_no_privilege_to_return_to(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "grep -E '^(CapPrm|CapEff|CapAmb|NoNewPrivs)' /proc/self/status")
        values = [line.split()[1].lstrip("0") for line in result.stdout.decode().splitlines()]
        assert values == ["", "", "", "1"]
        escape = "import os\ntry: os.setresuid(0, 0, 0); print('root')\nexcept PermissionError: print('refused')"
        assert (await shared_sandbox.run(Command(argv=("python3", "-c", escape)))).stdout == b"refused\n"

    async def test_commands_inherit_nothing_but_their_three_streams(self, shared_sandbox: Sandbox) -> None:
        result = await shared_sandbox.run(
            Command(argv=("python3", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"))
        )
        assert result.stdout == b"[0, 1, 2, 3]\n"  # 3 is the listing itself

    async def test_the_runners_environment_is_the_gateways_secret(self, shared_sandbox: Sandbox) -> None:
        result = await sh(shared_sandbox, "env; cat /proc/1/environ /proc/1/mem 2>/dev/null | head -c 100000")
        assert not [name for name in os.environ if name.startswith("TANGRAM") and name.encode() in result.stdout]

    @pytest.mark.promise("A sandbox reports what it does not hold.")
    async def test_info_is_honest(self, shared_provider: Provider) -> None:
        info = shared_provider.info
        assert info.kind in ("container", "process")
        assert info.isolation
        assert {"memory", "network", "disk", "seccomp", "snapshot"} <= info.limits.keys()

    async def test_a_function_can_require_a_container(self, shared_provider: Provider, spec: SandboxSpec) -> None:
        strict = SandboxSpec(image=spec.image, isolation=Isolation.CONTAINER)
        if shared_provider.info.kind == "container":
            await shared_provider.check(strict)
        else:
            with pytest.raises(Exception, match="isolation: container"):
                await shared_provider.check(strict)


@pytest.mark.asyncio(loop_scope="function")
class TestLoss:
    """Each test has a provider of its own: what is lost here is all that it made."""

    async def test_a_dead_sandbox_ends_the_action_and_never_hangs(self, provider: Provider, sandbox: Sandbox) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(sandbox.run(Command(shell="echo begun; sleep 1000"), lambda *_: begun.set()))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            await provider.reap(())  # from outside, as an administrator's docker rm would
            with pytest.raises(ActionFailed) as caught:
                await task
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert caught.value.result == {"stdout": "begun\n", "stderr": ""}
        assert (sandbox.alive, sandbox.loss_reported) == (False, True)
        with pytest.raises(ActionFailed, match="are lost"):
            await sh(sandbox, "true")

    async def test_a_living_sandbox_is_adopted_with_its_files_and_processes(
        self, provider: Provider, spec: SandboxSpec
    ) -> None:
        first = await provider.create(spec, name=unique("kept"), labels={"tangram.trajectory": "t1"}, mounts={})
        await sh(first, "echo kept > file; sleep 1000 >/dev/null 2>&1 &")
        await first.relabel({"tangram.trajectory": "t2"})
        await first.release()
        [(second, labels)] = await provider.adopt()
        assert (second.id, second.spec, labels) == (first.id, spec, {"tangram.trajectory": "t2"})
        assert (await sh(second, "cat file; pgrep -c sleep")).stdout == b"kept\n1\n"
        await second.close()
        assert await provider.adopt() == []

    async def test_orphans_are_removed_and_the_living_spared(self, provider: Provider, spec: SandboxSpec) -> None:
        kept = await provider.create(spec, name=unique("kept"), labels={}, mounts={})
        await provider.create(spec, name=unique("orphan"), labels={}, mounts={})
        assert await provider.reap({kept.id}) == 1
        assert (await sh(kept, "echo alive")).stdout == b"alive\n"
        await kept.close()
        assert await provider.reap(()) == 0

    async def test_mounts_are_there_to_be_read(self, provider: Provider, spec: SandboxSpec, tmp_path: Path) -> None:
        source = tmp_path / "code"
        source.mkdir()
        (source / "handler.py").write_text("print('imported')", encoding="utf-8")
        if provider.info.kind == "plain" and not provider.info.limits["filesystem"]:
            pytest.skip("this machine's process sandboxes have no mounts")
        made = await provider.create(spec, name=unique("mounted"), labels={}, mounts={str(source): "/function"})
        result = await sh(made, "python3 /function/handler.py; touch /function/x 2>/dev/null || echo read-only")
        assert result.stdout == b"imported\nread-only\n"
        await made.close()
