"""A gateway on real sockets, whose runtimes do what their input says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import httpx
import pytest

from gateway.app import App
from gateway.app import gateway as opened_gateway
from gateway.config.load import GatewayConfig
from gateway.config.schema import SECTIONS, NodeConfig, ServerConfig
from gateway.runtime_factory import Runtimes, model_settings
from manager.action import UnitSet
from manager.clock import Clock
from manager.config import TaskSpec
from manager.errors import Reason
from manager.function import FunctionSpec, RetrySpec
from manager.resources.pools import ResourceSpec
from runtimes.executor import LocalExecutor
from runtimes.model.runtime import ModelRuntime
from runtimes.runtime import Execution, Runtime
from runtimes.sandbox import process
from runtimes.sandbox.egress import EgressGuard
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.testing import ScriptedRuntime, ScriptStep

#: Nothing in these tests takes so long unless it is broken, on however busy a machine.
DEADLINE_S = 180.0


def step_of(execution: Execution) -> ScriptStep:
    """What the input asks for.

    ``{"log": ..., "held": true, "hangs": true, "overhead_s": ..., "reason": ..., "message": ...}``.
    """
    wanted = execution.call.input
    reason, overhead_s = wanted.get("reason"), wanted.get("overhead_s")
    return ScriptStep(
        result=dict(wanted),
        reason=Reason(str(reason)) if reason in set(Reason) else None,  # a fuzzer may write anything
        message=str(wanted.get("message", "as scripted")),
        held=wanted.get("held") is True,
        hangs=wanted.get("hangs") is True,
        overhead_s=overhead_s if isinstance(overhead_s, float) else 0.0,
        log=str(wanted.get("log", "")),
    )


@dataclass(slots=True)
class RunningGateway:
    """A gateway that serves, a client of it, and the runtime behind its functions."""

    app: App
    http: httpx.AsyncClient
    runtime: ScriptedRuntime
    serving: asyncio.Task[None]

    async def invoke(
        self,
        body: Mapping[str, object],
        *,
        function: str = "echo",
        headers: Mapping[str, str] | None = None,
        **params: str,
    ) -> httpx.Response:
        """One call; query parameters by name."""
        path = f"/v1/functions/{function}/invocations"
        return await self.http.post(path, json=body, params=params, headers=headers)

    async def executing(self, invocation_id: str) -> None:
        """Return when the runtime has begun with it."""
        await until(lambda: invocation_id in self.runtime.running)


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until the condition holds; fails at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            event = asyncio.Event()
            asyncio.get_running_loop().call_later(0.002, event.set)
            await event.wait()


@dataclass(frozen=True, slots=True)
class GatewayBench:
    """What a test may choose before its gateway starts."""

    directory: Path
    functions: Mapping[str, FunctionSpec] = field(default_factory=dict)
    server: Mapping[str, object] = field(default_factory=dict)
    #: Fields of `ServerConfig` that no configuration sets.
    bounds: Mapping[str, float] = field(default_factory=dict)
    scheduler: Mapping[str, object] = field(default_factory=dict)
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)
    resources: Mapping[str, ResourceSpec] = field(default_factory=dict)
    sandboxes: ProviderSettings = field(default_factory=lambda: ProviderSettings(kind="process"))

    def config(self) -> GatewayConfig:
        server = {
            "state_dir": self.directory / "state",
            "port": 0,
            "grpc_port": 0,
            "drain_grace": "200ms",
            "auth": "none",
        }
        made = SECTIONS["server"].validate_python(server | dict(self.server), by_alias=True)
        assert isinstance(made, ServerConfig)
        return GatewayConfig(
            functions=FUNCTIONS | dict(self.functions),
            server=replace(made, **self.bounds),  # type: ignore[arg-type]
            node=NodeConfig(),
            tasks={"default": TaskSpec()} | dict(self.tasks),
            resources=self.resources,
            scheduler=SECTIONS["scheduler"].validate_python(self.scheduler, by_alias=True),
        )


def function(name: str, **given: object) -> FunctionSpec:
    """A handler function of one core that does what its input says."""
    spec = FunctionSpec(name=name, runtime="handler", cost={"cpu": UnitSet.fixed(1)}, timeout_s=30.0)
    return replace(spec, **given)  # type: ignore[arg-type]


FUNCTIONS = {
    "echo": function("echo"),
    "shell": FunctionSpec(name="shell", runtime="exec", cost={"cpu": UnitSet.fixed(1)}),
    "short": function("short", timeout_s=0.05),
    "impatient": function("impatient", queue_timeout_s=0.05),
    "narrow": function("narrow", max_queued=1),
    "again": function("again", idempotent=True),
    "retried": function(
        "retried", retry=RetrySpec(max_attempts=3, backoff_s=0.01, on=(Reason.HANDLER_ERROR,)), idempotent=True
    ),
    "strict": function(
        "strict",
        input_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    ),
}


def scripted_runtimes(
    runtime: ScriptedRuntime, directory: Path, sandboxes: ProviderSettings | None = None
) -> Callable[..., Runtimes]:
    """Runtimes whose handler functions follow the script; everything else is real, in local processes by default."""
    settings = replace(sandboxes or ProviderSettings(kind="process"), state_dir=directory / "sandboxes")

    def make(config: GatewayConfig, clock: Clock) -> Runtimes:
        provider = make_provider(settings)
        environments = Environments(provider, clock=clock)
        runtimes: dict[str, Runtime] = {
            "handler": runtime,
            "exec": ExecRuntime(environments),
        }

        async def open_environment(trajectory: str, task: str, function: FunctionSpec) -> None:
            await environments.ensure(trajectory, function.sandbox, task=task)

        model = ModelRuntime(model_settings(config))
        if any(spec.runtime == "model" for spec in config.functions.values()):
            runtimes["model"] = model
        executor = LocalExecutor(runtimes, clock, open_environment=open_environment)
        return Runtimes(provider=provider, environments=environments, model=model, runtimes=runtimes, executor=executor)

    return make


@asynccontextmanager
async def serving(
    bench: GatewayBench, wall: Callable[[], float] | None = None, runtime: ScriptedRuntime | None = None
) -> AsyncIterator[RunningGateway]:
    """A gateway, from its start to its end."""
    runtime = runtime or ScriptedRuntime(step_of)
    make = scripted_runtimes(runtime, bench.directory, bench.sandboxes)
    async with opened_gateway(bench.config(), paths=[bench.directory], make=make, wall=wall) as app:
        task = asyncio.create_task(app.serve())
        bearer = {} if app.tokens is None else {"Authorization": f"Bearer {app.tokens.admin}"}
        headers = {"Content-Type": "application/json", **bearer}
        address = f"http://127.0.0.1:{app.http_port}"
        try:
            async with httpx.AsyncClient(
                base_url=address, headers=headers, timeout=DEADLINE_S, verify=False
            ) as client:  # it speaks no TLS, and to read the authorities costs more than the gateway's start
                yield RunningGateway(app, client, runtime, task)
        finally:
            app.stop()
            await asyncio.wait_for(task, DEADLINE_S)


def _asked_once(probe: Callable[..., str]) -> Callable[..., str]:
    """Ask again only where something stood in the way."""
    clear: list[bool] = []

    def ask(*given: object) -> str:
        found = "" if clear else probe(*given)
        if not found:
            clear.append(True)
        return found

    return ask


#: What the machine lends sandboxes, looked for once: hundreds of gateways start in a process of these tests, and
#: tests/runtimes/sandbox have it looked for each time.
PROBES = {
    (process, "_working_bubblewrap"): cache(process._working_bubblewrap),
    (process, "_why_no_namespaces"): _asked_once(process._why_no_namespaces),
    (EgressGuard, "_probe"): _asked_once(EgressGuard._probe),
}


@pytest.fixture(autouse=True)
def machine_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for (place, name), known in PROBES.items():
        monkeypatch.setattr(place, name, lambda *given, known=known: known(*given))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with the functions of `FUNCTIONS`, without a token."""
    async with serving(GatewayBench(tmp_path)) as running:
        yield running
