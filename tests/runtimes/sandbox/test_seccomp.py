"""The filter of system calls: in real sandboxes of each kind, and its program for each machine, interpreted."""

from __future__ import annotations

import json
import os
import struct

import pytest

from manager.errors import Unsupported
from runtimes.sandbox.command import Command
from runtimes.sandbox.linux import ENOSYS, EPERM, ERRNO, MACHINES, compiled
from runtimes.sandbox.sandbox import Sandbox

#: What commands try, each with the error's name or "ok" as its answer.
ATTEMPTS = """
import ctypes, errno, json, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (425, 250, 248, 41, 272, 302), "aarch64": (425, 219, 217, 198, 97, 261)}[os.uname().machine]
io_uring_setup, keyctl, add_key, raw_socket, unshare, prlimit64 = numbers

def call(*arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return "ok" if libc.syscall(*words) >= 0 else errno.errorcode[ctypes.get_errno()]

def opened(family, kind, protocol=0):
    try:
        socket.socket(family, kind, protocol).close()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]

threads = []
thread = threading.Thread(target=threads.append, args=("ok",))
thread.start(); thread.join()
print(json.dumps({
    "io_uring": call(io_uring_setup, 1, ctypes.create_string_buffer(120)),
    "keyctl": call(keyctl, 0, -3, 1),
    "add_key": call(add_key, b"user", b"name", b"x", 1, -3),
    "vsock": opened(40, socket.SOCK_STREAM),
    "vsock, more bits": call(raw_socket, 40 | 1 << 32, 1, 0),
    "netfilter": opened(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "netfilter, more bits": call(raw_socket, 16 | 1 << 40, 3, 12 | 1 << 32),
    "user namespace": call(unshare, 0x10000000),
    "the runner's limits": call(prlimit64, 1, 7, (ctypes.c_ulong * 2)(3, 3), 0),
    "the runner's limits, more bits": call(prlimit64, 1 | 1 << 32, 7, (ctypes.c_ulong * 2)(3, 3), 0),
    "its own limits": call(prlimit64, 0, 7, (ctypes.c_ulong * 2)(99, 99), 0),
    "call of tomorrow": call(1000),
    "routes": opened(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "inet": opened(socket.AF_INET, socket.SOCK_STREAM),
    "unix": opened(socket.AF_UNIX, socket.SOCK_STREAM),
    "thread": threads[0],
}))
"""
REFUSED = (
    "io_uring",
    "keyctl",
    "add_key",
    "vsock",
    "vsock, more bits",
    "netfilter",
    "netfilter, more bits",
    "user namespace",
    "the runner's limits",
    "the runner's limits, more bits",
)
#: Machine code for a call by the kernel's 32-bit entry: socket(AF_VSOCK, SOCK_STREAM, 0).
BY_32_BITS = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("53 b867010000 bb28000000 b901000000 31d2 cd80 5b c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
#: Tools that the sandbox has (the base image is without compiler and git) do their work.
TOOLS = """
if command -v git >/dev/null
then git init -q . && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m one && git log --oneline | wc -l
else echo 1
fi
if command -v gcc >/dev/null
then echo 'int main(void) { return 7; }' > a.c && gcc -o a a.c && ./a; echo $?
else echo 7
fi
python3 -c 'import concurrent.futures as f; print(sum(f.ThreadPoolExecutor(4).map(abs, range(9))))'
"""


async def test_refused_calls_are_not_permitted_and_ordinary_ones_work(sandbox: Sandbox) -> None:
    done = await sandbox.run(Command(argv=("python3", "-c", ATTEMPTS)))
    assert done.exit_code == 0, done.stderr
    answers = json.loads(done.stdout)
    wanted = {**dict.fromkeys(answers, "ok"), **dict.fromkeys(REFUSED, "EPERM"), "call of tomorrow": "ENOSYS"}
    assert answers == wanted


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the machine code is of x86")
async def test_the_32_bit_entry_is_no_way_around(sandbox: Sandbox) -> None:
    done = await sandbox.run(Command(argv=("python3", "-c", BY_32_BITS)))
    assert done.exit_code != 0 or int(done.stdout) < 0, done.stdout


async def test_tools_work(sandbox: Sandbox) -> None:
    done = await sandbox.run(Command(shell=TOOLS))
    assert done.stdout.split() == [b"1", b"7", b"36"], done.stderr


def verdict(program: bytes, token: int, call: int, *arguments: int) -> int:
    """What the kernel's interpreter would return for a call."""
    data = struct.pack("=IIQ6Q", call, token, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    steps = list(struct.iter_unpack("=HBBI", program))
    at, held = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            held &= value
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return int(value)
        else:
            true = {0x15: held == value, 0x25: held > value, 0x35: held >= value, 0x45: held & value != 0}[code]
            at += yes if true else no


#: socket, keyctl, io_uring_setup, ptrace, getpid, clone on each machine.
NUMBERS = {"x86_64": (41, 250, 425, 101, 39, 56), "aarch64": (198, 219, 425, 117, 172, 220)}
ALLOWED, REFUSED_BY = 0x7FFF0000, ERRNO | EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_of_each_machine_means_the_same(machine: str) -> None:
    program, token = compiled("default", machine), MACHINES[machine][0]
    socket, keyctl, io_uring, ptrace, getpid, clone = NUMBERS[machine]
    assert len(program) <= 4096 * 8
    for call in ((keyctl,), (io_uring,), (socket, 40), (socket, 1 << 32 | 40), (socket, 16, 3, 12), (clone, 1 << 28)):
        assert verdict(program, token, *call) == REFUSED_BY, call
    for call in ((getpid,), (ptrace,), (socket, 1), (socket, 2), (socket, 16, 3, 0), (clone, 0x1200011)):
        assert verdict(program, token, *call) == ALLOWED, call
    assert verdict(program, token, 435) == verdict(program, token, 2000) == ERRNO | ENOSYS
    assert verdict(program, 0x40000003, getpid) == 0, "another architecture's calls end the thread"
    assert verdict(compiled("no-ptrace", machine), token, ptrace) == REFUSED_BY


def test_a_machine_without_a_program_is_told() -> None:
    with pytest.raises(Unsupported, match=r"sandbox\.seccomp: none"):
        compiled("default", "riscv64")
