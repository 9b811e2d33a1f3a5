"""Random bytes and bodies almost like a dialect's own: every door answers in its words, and nothing is left."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from runtimes.testing import ScriptStep
from tests.gateway.conftest import RunningGateway, until
from tests.gateway.facades.world import doors

pytestmark = pytest.mark.slow

#: Bodies of each kind, and the seed of all of them.
COUNT, SEED = 25, 15
ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    2**60,
    1e308,
    "",
    "\u0000",
    "x" * 3000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    ["x", 1],
)
#: Words of our own that no stranger is told: a traceback, a path of a module, the token.
SECRETS = ("Traceback", 'File "', "s3cret", "gateway/", "object at 0x")


@dataclass(frozen=True, slots=True)
class FuzzedRoute:
    """One route of a door with a body that it takes."""

    door: str
    path: str
    body: Mapping[str, object]
    facade: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


PYTHON = {"languages": {"python": "shell"}}
TOOL = {"name": "reward", "arguments": {}}
META: Mapping[str, object] = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
SINGLE = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "reward"}
MESSAGE = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
TOOLS = {"functions": ["reward"]}
SWEREX = {"function": "shell"}
ROUTES = [
    FuzzedRoute("rewards", "/rm/reward", {"prompt": "p", "response": "r", "label": "l"}),
    FuzzedRoute("rewards", "/rm/reward", {"query": ["pr"], "prompts": ["p"], "labels": ["l"]}),
    FuzzedRoute("rewards", "/retrieve/reward", {"queries": ["q"], "topk": 3, "return_scores": True}),
    FuzzedRoute("sandboxfusion", "/sandboxfusion/run_code", {"code": "", "language": "python"}, PYTHON),
    FuzzedRoute("swerex", "/swerex/shell/t/run_in_session", {"command": "true", "check": "silent"}, SWEREX),
    FuzzedRoute("swerex", "/swerex/shell/t/write_file", {"path": "p", "content": "c"}, SWEREX),
    FuzzedRoute("mcp", "/mcp", MESSAGE | {"params": TOOL}, TOOLS, {"x-trajectory-id": "mine"}),
    FuzzedRoute("mcp", "/mcp", MESSAGE | {"params": TOOL | {"_meta": META}, "more": 1}, TOOLS, SINGLE),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.door} {route.path} {len(route.body)}")
async def test_odd_bodies_end_in_the_doors_own_error_and_leave_nothing(tmp_path: Path, route: FuzzedRoute) -> None:
    chance = random.Random(SEED)
    async with doors(
        tmp_path,
        {route.door: route.facade},
        lambda _: ScriptStep(result={"reward": 0.5}),
        auth="token",
        token="s3cret",
    ) as running:
        for _ in range(COUNT):
            await sound(running, route, chance.randbytes(chance.randrange(1, 300)))
            await sound(running, route, orjson.dumps(almost(route.body, chance)))
            for whole in (b"", b"{", b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"\xff\xfe", b"null", b"1"):
                if chance.random() < 0.2:
                    await sound(running, route, whole)
        await left_alone(running)


async def sound(running: RunningGateway, route: FuzzedRoute, body: bytes) -> None:
    """Send it, and look at what comes back."""
    answer = await running.http.post(route.path, content=body, headers=dict(route.headers))
    assert answer.status_code != 500, (body[:200], answer.text)
    if answer.status_code == 202 and route.door == "mcp":  # a notification, which is not answered
        assert answer.content == b""
        return
    assert answer.headers["content-type"].startswith("application/json"), body[:200]
    assert answer.text.strip(), body[:200]
    orjson.loads(answer.content)
    told = "" if answer.is_success else answer.text  # a success holds what the caller's own program said
    assert not [word for word in SECRETS if word in told], (body[:200], told)


async def left_alone(running: RunningGateway) -> None:
    """Nothing lives, waits or is held."""
    await until(lambda: not running.app.invocations.living)
    assert running.app.facades.calls is not None
    assert len(running.app.facades.calls.line) == 0
    assert running.app.held.bytes == 0
    assert running.app.admission.queued == 0


def almost(body: Mapping[str, object], chance: random.Random) -> object:
    """A body with one to three things changed: a value, a key more, or one less."""
    odd = copy.deepcopy(dict(body))
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice([*body, "unheard_of"])
        match chance.randrange(3):
            case 0:
                odd[name] = chance.choice(ODD)
            case 1:
                odd.pop(name, None)
            case _:
                value = odd.get(name)
                odd[name] = [value, chance.choice(ODD)] if not isinstance(value, list) else [*value, chance.choice(ODD)]
    return odd
