"""Egress is the public world and what is named, on both providers, for the user and for root."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from manager.errors import CodedError, InvalidConfig, Unsupported
from manager.function import Network, SandboxSpec
from runtimes.sandbox import process
from runtimes.sandbox.egress import Egress, EgressGuard, Target, attached, parsed
from runtimes.sandbox.process import HostSupport, ProcessProvider
from runtimes.sandbox.sandbox import CreationGate
from tests.network_world import (
    MACHINE,
    NEIGHBOUR,
    NEIGHBOUR_V6,
    PUBLIC,
    PUBLIC_V6,
    NetworkWorld,
    WorldDocker,
    network_world,
)

EGRESS = SandboxSpec(network=Network.EGRESS)


@pytest.fixture(scope="module")
def world() -> Iterator[NetworkWorld]:
    missing = [tool for tool in ("ip", "nsenter", "iptables", "bwrap") if shutil.which(tool) is None]
    why = "only root can make a world" if os.geteuid() != 0 else process.missing_uplink() or " ".join(missing)
    if why:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    with network_world() as made:
        yield made


@pytest.mark.promise("There is no network unless it is granted, and an allow list opens nothing else.")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", pytest.param("container", marks=pytest.mark.docker)])
def test_egress_is_the_public_world(world: NetworkWorld, kind: str, request: pytest.FixtureRequest) -> None:
    docker: WorldDocker | None = None
    with TemporaryDirectory(prefix="tangram-egress-") as place:
        Path(place).chmod(0o755)
        try:
            if kind == "container":
                image = request.getfixturevalue("docker")
                docker = WorldDocker(world)
                docker.start()
                docker.load(image)
            host = "" if docker is None else docker.host
            told = world.python("-m", "tests.runtimes.sandbox.egress_life", kind, place, host)
        finally:
            if docker is not None:
                docker.close()
    outside = [[PUBLIC, PUBLIC_V6], [PUBLIC]]
    assert told == {
        "promised": True,
        "neighbours": 2 if kind == "container" else 0,
        "user": outside,
        "root": outside,
        "meddled": "",
        "named": [[NEIGHBOUR, NEIGHBOUR_V6, MACHINE], []],
        "world": [[PUBLIC, NEIGHBOUR], [PUBLIC]],
        "uplinks": 1 if kind == "process" else 0,
        "adopted": outside,
        "left": 0,
    }


@pytest.mark.parametrize(
    ("entry", "place", "port"),
    [
        ("pypi.org", "pypi.org", 0),
        ("pypi.org:443", "pypi.org", 443),
        ("10.1.2.3", "10.1.2.3/32", 0),
        ("10.1.2.3/8:5432", "10.0.0.0/8", 5432),
        ("fd00::1", "fd00::1/128", 0),
        ("[fd00::/64]:443", "fd00::/64", 443),
    ],
)
def test_what_allow_may_name(entry: str, place: str, port: int) -> None:
    named, at = parsed(entry)
    assert (str(named), at) == (place, port)


@pytest.mark.parametrize(
    "entry",
    ["10.0.0.300", "10.0.0.0/33", "a:0", "a:65536", "fd00::1/129", "[fd00::1]:x", "localhost:80", "a.LOCALHOST."],
)
def test_what_allow_may_not_name(entry: str) -> None:
    with pytest.raises(InvalidConfig, match=r"sandbox\.allow"):
        parsed(entry)


def test_a_block_opens_what_is_private_only_if_it_lies_in_there() -> None:
    named = [Target(ipaddress.ip_network(block)) for block in ("10.1.0.0/16", "8.0.0.0/5")]
    rules = Egress(named=tuple(named), closed=True).rules(4, ()).splitlines()
    order = [rules.index(f"-A OUTPUT -d {rule}") for rule in ("10.1.0.0/16 -j ACCEPT", "10.0.0.0/8 -j REJECT")]
    assert order == sorted(order) and order[1] < rules.index("-A OUTPUT -d 8.0.0.0/5 -j ACCEPT")
    assert rules[-2] == "-A OUTPUT -j REJECT"


def test_the_machine_s_own_addresses_and_links_are_known() -> None:
    assert (ipaddress.ip_network("127.0.0.1/32"), True) in attached(os.getpid())
    assert all(network.prefixlen for network, _ in attached(1, os.getpid()))


@pytest.mark.parametrize(
    ("address", "allowed"), [("1.2.3.4", True), ("10.1.2.3", True), ("169.254.169.254", False), ("127.0.0.1", False)]
)
async def test_a_name_leads_to_no_address_that_only_an_address_may_name(
    monkeypatch: pytest.MonkeyPatch, address: str, allowed: bool
) -> None:
    async def resolved(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    guard = EgressGuard()
    spec = SandboxSpec(network=Network.EGRESS, allow=("mirror.example:80",))
    if allowed:
        egress = await guard.resolve(spec)
        assert egress == Egress((Target(ipaddress.ip_network(address), 80),), True, (), {"mirror.example": address})
    else:
        with pytest.raises(InvalidConfig, match=f"'mirror.example' is {address}, which only an address may allow"):
            await guard.resolve(spec)


@pytest.mark.parametrize("lacking", ["root", "tools", "slirp4netns", "bubblewrap"])
async def test_where_it_cannot_be_held_to_that_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str
) -> None:
    host = HostSupport(bubblewrap=None if lacking == "bubblewrap" else "bwrap", root=True, cgroup=None)
    if lacking == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif lacking != "bubblewrap":
        gone = "nsenter" if lacking == "tools" else lacking
        there = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name == gone else there(name))
    if lacking in ("slirp4netns", "bubblewrap"):
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)  # the probe of the rules: they can be set
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    provider = ProcessProvider(
        state_dir=tmp_path, gate=CreationGate(1), shared_cores=(0,), host=host, name_servers=("192.0.2.53",)
    )
    assert not provider.info.limits["egress"]
    remedy = {
        "root": "only a gateway that is root",
        "tools": "apt-get install iptables",
        "slirp4netns": "apt-get install s",
    }
    with pytest.raises(Unsupported, match=remedy.get(lacking, "apt-get install bubblewrap")):
        await provider.check(EGRESS)


async def test_rules_are_never_set_in_the_gateway_s_own_namespace() -> None:
    guard = EgressGuard()
    with pytest.raises(CodedError, match="no network namespace of its own"):
        await guard.enforce(Egress(), os.getpid())
    assert not await guard.holds(os.getpid())


async def test_a_list_without_egress_is_a_mistake() -> None:
    with pytest.raises(InvalidConfig, match="needs network: egress"):
        await EgressGuard().check(SandboxSpec(allow=("10.0.0.0/8",)))


async def test_a_name_server_that_answers_on_this_machine_only_serves_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.53\nnameserver fe80::1%eth0\n")
    monkeypatch.setattr("runtimes.sandbox.egress.RESOLV_CONF", (resolv,))
    guard = EgressGuard()
    guard.obstacle = ""
    with pytest.raises(Unsupported, match=r"sandbox\.name_servers"):
        await guard.check(EGRESS)
    resolv.write_text("search example\nnameserver 127.0.0.53\nnameserver 192.0.2.53\n")
    assert guard.name_servers() == ("192.0.2.53",)
