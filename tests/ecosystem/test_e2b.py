"""E2B's SDK, as it is on the registry, against real gateways and real sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import pytest

from tangram import Client
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.ecosystem.environments import ClientEnvironment

pytestmark = [pytest.mark.network, pytest.mark.slow]
PAGE = ROOT / "docs" / "CONNECT.md"


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with tokens and the facade; nothing lives in it when its tests have ended."""
    kind = str(request.param)
    if kind == "container":
        request.getfixturevalue("docker")
    directory = tmp_path_factory.mktemp(f"e2b-{kind}")
    box = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "5m", "output_limit": "16Mi"}
    described = document(kind, directory / "state", box=box)
    described["server"] |= {"body_limit": "16Mi", "facades": {"e2b": {"function": "box"}}}
    process = GatewayProcess(directory, described)
    process.start()
    yield process
    with Client(process.url, token=token_of(process)) as client:
        assert [each.trajectory for each in client.trajectories()] == []
        assert list(client.snapshots()) == []
    assert process.stop() == 0, "\n".join(process.log[-30:])


def token_of(process: GatewayProcess) -> str:
    return (process.directory / "state" / "invoke.token").read_text().strip()


def surface_table(surface: Mapping[str, str]) -> str:
    """Return how each public method of the SDK ended, as the page shows it."""
    lines = ["| part | works | refused by name | not served |", "|---|---|---|---|"]
    for part, names in groupby(surface, key=lambda name: name.partition(".")[0]):
        methods = list(names)
        cells = (
            ", ".join(f"`{name.partition('.')[2]}`" for name in methods if surface[name] == how)
            for how in ("works", "refused", "-")
        )
        lines.append(f"| `{part}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_sdk_works_on_its_whole_surface_but_for_what_the_page_says(
    served: GatewayProcess, client: Callable[[str], ClientEnvironment], mode: str
) -> None:
    address, token = f"{served.url}/e2b", token_of(served)
    told = await client("e2b").run(
        "e2b_sdk", mode, "box", E2B_API_URL=address, E2B_SANDBOX_URL=address, E2B_API_KEY=token
    )
    assert told.pop("run") == {"stdout": "1 2\n", "stderr": "err\n", "exit_code": 0, "error": None}
    assert told.pop("exit") == {"exit": 3, "out": "out\n", "err": ""}
    assert (told.pop("cwd"), told.pop("heard")) == ("/tmp\n", ["/tmp\n"])
    assert (told.pop("no cwd"), told.pop("late"), told.pop("late in time")) == (
        "InvalidArgumentException",
        "TimeoutException",
        True,
    )
    assert (told.pop("beside"), told.pop("listed"), told.pop("killed")) == ("beside\n", [True], [True, False])
    assert (told.pop("waited"), told.pop("cat"), told.pop("handle kill")) == (137, "ab\ufffdcd", True)
    assert (told.pop("many"), told.pop("large")) == ([f"{number}\n" for number in range(8)], 3_000_000)
    assert (told.pop("bytes"), told.pop("written")) == (True, ["/workspace/ü 1", "/workspace/e/2"])
    assert (told.pop("streamed"), told.pop("text")) == (True, "a")
    kinds = {"2": "file", "bytes": "file", "d": "dir", "e": "dir", "streamed": "file", "ü 1": "file"}
    assert dict(told.pop("entries")) == kinds
    assert (told.pop("exists"), told.pop("made"), told.pop("removed")) == ([True, False], [True, False], False)
    assert (told.pop("moved"), told.pop("missing")) == ("/workspace/m/moved", ["FileNotFoundException"] * 2)
    assert (told.pop("pty"), told.pop("pty killed")) == ([5, True], True)
    assert told.pop("info") == [{"who": "me & you"}, "running", True, 1]
    assert (told.pop("found"), told.pop("paused"), told.pop("resumed")) == ([True], [True, False], "kept")
    assert (told.pop("copies"), told.pop("forgotten")) == (["kept"] * 3, [True, False])
    assert (told.pop("ended"), told.pop("gone")) == ([True, False], "SandboxNotRunningException")
    assert told.pop("strangers") == "AuthenticationException"
    table = surface_table(told.pop("surface"))
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of {PAGE.name} is to be:\n{table}"
    if mode == "sync":  # a killed client: the command goes on, to its own time and no longer
        assert (told.pop("after the cut"), told.pop("in its time")) == (1, 0)
    else:
        swarm = ["SandboxNotRunningException" if number % 4 == 0 else f"{number}" for number in range(24)]
        assert told.pop("swarm") == swarm
    assert told == {}
