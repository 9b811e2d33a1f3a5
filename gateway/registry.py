"""The registry: the functions as they are now, and how a new configuration takes their place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import orjson
from msgspec.structs import replace

from gateway.config import load as gateway_config
from gateway.config.derive import key_of
from gateway.config.load import ConfigSource, GatewayConfig
from manager.config import NodeSpec
from manager.errors import CodedError, InvalidConfig, NotFound, Unsatisfiable, Unsupported
from manager.formulation import check_satisfiable
from manager.function import FunctionSpec
from manager.setting import settings_of
from tangram.types import ConfigDiff

#: Functions whose preparation runs at once.
PREPARE_CONCURRENCY = 4

#: Checks that a function can run here and warms it up: `runtimes.runtime.Runtime.prepare` of its runtime.
Prepare = Callable[[FunctionSpec], Awaitable[None]]


class Registry:
    """The current functions. Who holds a FunctionSpec keeps it: a change serves new invocations only."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        prepare: Prepare,
        nodes: Callable[[], tuple[NodeSpec, ...]],
        paths: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``paths`` and ``env`` are what the server was started from, for `configure`."""
        self._config = config
        self._prepare = prepare
        self._nodes = nodes
        #: Are told of a new configuration the moment it is current; they must not wait or raise.
        self.on_switch: list[Callable[[GatewayConfig], None]] = []
        self._paths = tuple(paths)
        self._env = dict(env or {})
        self._applying = asyncio.Lock()

    @property
    def config(self) -> GatewayConfig:
        return self._config

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound with the known names."""
        function = self._config.functions.get(name)
        if function is None:
            known = ", ".join(sorted(self._config.functions)) or "none"
            raise NotFound(f"no function {name!r}; registered: {known}", component="registry")
        return function

    def all(self) -> tuple[FunctionSpec, ...]:
        """Every function, by name."""
        return tuple(function for _, function in sorted(self._config.functions.items()))

    async def start(self) -> None:
        """Prepare the functions of the first configuration; raises the typed error of those that cannot run here."""
        async with self._applying:
            await self._make_ready(self._config, self._config.functions.values())

    def plan(self, new: GatewayConfig) -> ConfigDiff:
        """What `apply` would change; changes nothing."""
        old, functions = self._config.functions, new.functions
        changed = {
            name: _changed_keys(old[name], functions[name])
            for name in sorted(old.keys() & functions.keys())
            if old[name] != functions[name]
        }
        return ConfigDiff(
            added=tuple(sorted(functions.keys() - old.keys())),
            changed=changed,
            removed=tuple(sorted(old.keys() - functions.keys())),
            unchanged=tuple(sorted(old.keys() & functions.keys() - changed.keys())),
            tasks=_differing(self._config.tasks, new.tasks),
            resources=_differing(self._config.resources, new.resources),
            needs_restart=tuple(_fixed_differences(self._config, new)),
        )

    async def apply(self, new: GatewayConfig) -> ConfigDiff:
        """Prepare what is new, then switch all of it at once; an error leaves everything as it was.

        Raises InvalidConfig, Unsatisfiable or Unsupported.
        """
        async with self._applying:
            diff = self.plan(new)
            if diff.needs_restart:
                raise InvalidConfig(
                    f"{', '.join(diff.needs_restart)} cannot change while the gateway runs: restart it",
                    component="registry",
                    detail={"needs_restart": list(diff.needs_restart)},
                )
            await self._make_ready(new, [new.functions[name] for name in (*diff.added, *diff.changed)])
            self._config = new
            for switched in self.on_switch:
                switched(new)
            return diff

    async def configure(self, document: bytes, dry_run: bool) -> ConfigDiff:
        """Apply what a door received: nothing (the server's own files again), ``{"files": [...]}``, or YAML text."""
        new = await asyncio.to_thread(self._read, document)
        diff = self.plan(new) if dry_run else await self.apply(new)
        return replace(diff, applied=not dry_run)

    def _read(self, document: bytes) -> GatewayConfig:
        if document.strip():
            return gateway_config.build(self._received(document), self._env, base=self._config)
        if not self._paths:
            raise InvalidConfig("the gateway was not started from files: send them", component="registry")
        sources, problems = gateway_config.read(self._paths)
        return gateway_config.build(sources, self._env, problems=problems)

    def _received(self, document: bytes) -> list[ConfigSource]:
        """The files of a request; relative paths begin where the server's own configuration lies."""
        first = self._paths[0] if self._paths else Path.cwd()
        base = (first if first.is_dir() else first.parent).absolute()
        try:
            body = orjson.loads(document)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict) or "files" not in body:
            return [ConfigSource(path=base / "request.yaml", text=document.decode("utf-8", "replace"))]
        files = body["files"]
        if not isinstance(files, list) or len(files) > gateway_config.FILES_MAX or len(body) > 1:
            raise InvalidConfig('write {"files": [{"path": ..., "text": ...}, ...]}', component="registry")
        return [_source(base, each) for each in files]

    async def _make_ready(self, config: GatewayConfig, functions: Iterable[FunctionSpec]) -> None:
        """Check that each function can ever be served, then prepare them; raises one error for all of them."""
        spec = config.manager_spec(self._nodes())
        errors: list[CodedError] = []
        gate = asyncio.Semaphore(PREPARE_CONCURRENCY)

        async def make_ready(function: FunctionSpec) -> None:
            try:
                check_satisfiable(function, spec)
                async with gate:
                    await self._prepare(function)
            except CodedError as error:
                place = config.origins.get(function.name)
                kind = type(error) if isinstance(error, Unsatisfiable | Unsupported) else InvalidConfig
                told = f"{place}: functions.{function.name}: {error.message}" if place else error.message
                errors.append(kind(told, component=error.component, detail=error.detail))

        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(make_ready(function))
        if len(errors) > 1:
            raise InvalidConfig(
                f"{len(errors)} functions cannot run here:\n" + "\n".join(sorted(error.message for error in errors)),
                component="registry",
            )
        if errors:
            raise errors[0]


def _source(base: Path, file: object) -> ConfigSource:
    if not isinstance(file, dict) or not isinstance(file.get("path"), str) or not isinstance(file.get("text"), str):
        raise InvalidConfig("each of files needs a path and a text", component="registry")
    return ConfigSource(path=base / file["path"], text=file["text"])


def _changed_keys(old: FunctionSpec, new: FunctionSpec) -> tuple[str, ...]:
    names = dict.fromkeys(each.name for spec in (old, new) for each in fields(spec))
    differing = (name for name in names if getattr(old, name, None) != getattr(new, name, None))
    keys = tuple(name for name in differing if name not in ("name", "revision"))
    return keys or ("source",)


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)))


def _fixed_differences(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Key paths that differ among what is read at the start only; the sandbox's defaults only fill in functions."""
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in ("server", "node", "models", "scheduler")]
    pairs.append(("sandbox", old.sandbox.provider, new.sandbox.provider))
    return [
        f"{section}.{key_of(name, setting)}"
        for section, before, after in pairs
        for name, _, setting in settings_of(before.__class__)
        if getattr(before, name) != getattr(after, name)
    ]
