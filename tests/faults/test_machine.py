"""A machine that goes wrong under a gateway: a full disk, a corrupt file, a stopped process, a killed runner."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.limits import DESCRIPTORS_MAX
from tangram import Client
from tests.e2e.gateway import ROOT, GatewayProcess
from tests.faults.world import HTTP, Deeds, Submitter, at_rest, faulty, record, until
from tests.small_disk import fill, small_disk_at

#: Calls that no such file system could hold.
CALLS_MAX = 400


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes, where the gateway's state is."""
    place = tmp_path / "state"
    with small_disk_at(place, "6m"):
        yield place


def submit(gateway: GatewayProcess, name: str) -> httpx.Response:
    path = f"{gateway.url}/v1/functions/once/invocations"
    return HTTP.post(path, params={"mode": "async"}, json={"name": name, "ballast": "x" * 8192})


@pytest.mark.promise("While the disk refuses, accepted work waits and reads go on.")
def test_a_full_disk_is_a_503_with_its_reason_and_what_was_accepted_is_done_once_there_is_room(
    tmp_path: Path, small_disk: Path, deeds: Deeds
) -> None:
    gateway = faulty(tmp_path, deeds, {"free_min": 0})
    gateway.start()
    try:
        deeds.held.clear()
        accepted = {name: submit(gateway, name).json()["id"] for name in map("before-{}".format, range(8))}
        filler = fill(small_disk)
        answer = submit(gateway, "during-0")
        while answer.status_code == 202 and len(accepted) < CALLS_MAX:
            accepted[answer.json()["input"]["name"]] = answer.json()["id"]
            answer = submit(gateway, f"during-{len(accepted)}")
        assert answer.status_code == 503, answer.text
        assert "disk is full" in answer.text, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert HTTP.get(f"{gateway.url}/readyz").status_code == 503
        for each in ("before-0", "before-7"):
            read = HTTP.get(f"{gateway.url}/v1/invocations/{accepted[each]}")
            assert read.status_code == 200, f"reads work on a full disk: {read.text}"
        listed = HTTP.get(f"{gateway.url}/v1/invocations", params={"limit": 1000})
        assert listed.status_code == 200, listed.text
        deeds.held.set()
        filler.unlink()
        until(lambda: HTTP.get(f"{gateway.url}/readyz").status_code == 200, "it is ready again")
        accepted["after"] = submit(gateway, "after").json()["id"]
        ends = {name: record(gateway, each)["state"] for name, each in accepted.items()}
        assert set(ends.values()) == {"succeeded"}, ends
        assert {deeds.done[name] for name in accepted} == {1}
        refused = {name: count for name, count in deeds.done.items() if name not in accepted}
        assert not refused, "what was refused ran"
        until(lambda: at_rest(gateway), "the gateway is at rest")
    finally:
        gateway.stop()


def test_more_connections_than_descriptors_are_told_503_and_none_is_reset(tmp_path: Path, deeds: Deeds) -> None:
    descriptors = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], DESCRIPTORS_MAX)
    gateway = faulty(tmp_path, deeds, {"descriptors_reserved": descriptors - 64})
    gateway.start()
    try:
        address = (httpx.URL(gateway.url).host, httpx.URL(gateway.url).port or 80)
        with contextlib.ExitStack() as opened:
            connections = [opened.enter_context(socket.create_connection(address, timeout=20)) for _ in range(300)]
            heads = []
            for connection in connections:
                with contextlib.suppress(BrokenPipeError):  # a refused one is closed once it was told
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                heads.append(connection.recv(64).split(b" ")[1])
        assert set(heads) == {b"200", b"503"}, "each was answered"
        assert heads.count(b"200") == 32
        until(lambda: HTTP.get(f"{gateway.url}/healthz").status_code == 200, "there is room again")
    finally:
        gateway.stop()


@pytest.mark.promise("A corrupt database is refused with its file and the remedy.")
def test_a_corrupt_database_is_refused_at_the_start_with_its_file_and_the_remedy(gateway: GatewayProcess) -> None:
    assert gateway.stop() == 0
    file = gateway.directory / "state" / "tangram.sqlite"
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(AssertionError, match="does not serve") as refusal:
        gateway.start()
    assert str(file) in str(refusal.value)
    assert "move it away" in str(refusal.value)
    file.unlink()
    gateway.start()


def test_a_gateway_that_stood_still_goes_on_where_it_was(gateway: GatewayProcess, deeds: Deeds) -> None:
    submitters = [Submitter(lambda: gateway.url, function) for function in ("once", "again")]
    for submitter in submitters:
        submitter.start()
    until(lambda: all(len(submitter.accepted) >= 10 for submitter in submitters), "calls are accepted")
    os.kill(gateway.pid, signal.SIGSTOP)
    done = sum(deeds.done.values())
    with pytest.raises(httpx.TimeoutException):
        HTTP.get(f"{gateway.url}/healthz", timeout=1.0)
    os.kill(gateway.pid, signal.SIGCONT)
    until(lambda: sum(deeds.done.values()) > done + 10, "it works again")
    for submitter in submitters:
        submitter.finish()
        assert submitter.complaints == []
    names = {name: each for submitter in submitters for name, each in submitter.accepted.items()}
    ends = {name: record(gateway, each) for name, each in names.items()}
    assert {(end["state"], end["attempt"]) for end in ends.values()} == {("succeeded", 1)}
    assert set(deeds.done.values()) == {1}
    until(lambda: at_rest(gateway), "the gateway is at rest")


def test_a_gateway_whose_lines_nobody_reads_goes_on(gateway: GatewayProcess) -> None:
    """As after `tangram serve 2>&1 | head`: its standard error is a pipe whose reader has gone."""
    gateway.stop()
    argv = [sys.executable, "-m", "gateway", "serve", str(gateway.directory / "tangram.yaml")]
    served = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert served.stderr is not None
    serving = next(json.loads(line) for line in served.stderr if '"event":"serving"' in line)
    served.stderr.close()
    try:
        with Client(f"http://{serving['http']}") as client:
            ids = [client.submit("shell", {"command": f"echo {n}"}).id for n in range(5)]
            assert [client.wait(each).result["stdout"] for each in ids] == [f"{n}\n" for n in range(5)]
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=60) == 0
