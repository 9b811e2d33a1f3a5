"""A suite that interferes with the workers of pytest-xdist: it costs itself its reward, and nobody any time."""

from __future__ import annotations

import textwrap

import pytest

from tests.runtimes.sandbox.pytest.conftest import SuiteBench


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b'{"test": "forged"}\n', id="a verdict"),
        pytest.param(b"[" * 60_000, id="no message", marks=pytest.mark.slow),
        pytest.param(b"\x04\x00\x00\x00\x01\x7f\xff\xff\xff", id="a long message", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("when", ["imported", pytest.param("called", marks=pytest.mark.slow)])
async def test_what_a_suite_writes_between_processes_is_a_crash_and_no_wait(
    bench: SuiteBench, written: bytes, when: str
) -> None:
    """Descriptors that a worker has: on one it speaks with the process that begins it, in messages of its own."""
    said = f"""
        import os
        for fd in range(3, 64):
            try:
                os.write(fd, {written!r})
            except OSError:
                pass
    """
    calc = textwrap.dedent(said) + "def add(a, b): return 99\n"
    if when == "called":
        calc = "def add(a, b):\n" + textwrap.indent(textwrap.dedent(said), "    ") + "    return 99\n"
    test = "from calc import add\ndef test_one(): assert add(1, 1) == 2\ndef test_two(): assert add(1, 2) == 3\n"
    wanted = ["test_calc.py::test_one", "test_calc.py::test_two"]
    value = await bench.run({"calc.py": calc, "test_calc.py": test}, cores=(0, 1), fail_to_pass=wanted)
    assert (value["reward"], value["resolved"]) == (0.0, False)
    assert value["note"]


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
async def test_a_program_that_a_test_starts_reads_nothing_of_its_process(
    bench: SuiteBench, cores: tuple[int, ...]
) -> None:
    test = """
        import multiprocessing, os, subprocess, sys
        def test_program():
            for name in ("mem", "environ", "fd/1"):
                read = f"open('/proc/{os.getpid()}/{name}', 'rb')"
                told = subprocess.run([sys.executable, "-c", read], stderr=subprocess.PIPE)
                assert b"PermissionError" in told.stderr
        def test_itself():
            assert os.listdir("/proc/self/fd") and open("/proc/self/maps").read() and open("/proc/self/status").read()
            with open("/dev/fd/2", "ab"): pass
            child = multiprocessing.get_context("fork").Process(target=print)
            child.start()
            child.join()
            assert child.exitcode == 0
    """
    value = await bench.run({"test_own.py": test}, cores=cores)
    assert value["counts"] == {"passed": 2}, bench.log.text("stdout")
