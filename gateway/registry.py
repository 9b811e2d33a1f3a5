"""The registry: the functions as they are now, and how a new configuration takes their place."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeVar

import orjson
import structlog
from msgspec import ValidationError, convert
from msgspec.structs import replace

from gateway import wire
from gateway.applied import KeptFunctions
from gateway.config import load as gateway_config
from gateway.config.derive import key_of
from gateway.config.document import suggestion
from gateway.config.load import ConfigSource, GatewayConfig
from gateway.config.sections import ClusterConfig
from gateway.functions import masked
from gateway.preparation import Preparation, Prepare, Readiness
from gateway.revisions import Revisions
from manager.config import NodeSpec, TaskSpec
from manager.errors import CodedError, Conflict, InvalidConfig, InvalidInput, NotFound, Unsatisfiable, Unsupported
from manager.formulation import check_satisfiable
from manager.function import FunctionSpec, settings_of
from tangram.types import ConfigDiff, ConfigFiles, FunctionUpload, RevisionChange, ValueChange

_Value = TypeVar("_Value")
#: Signs of a value in a diff.
VALUE_MAX = 200
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


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
        kept: KeptFunctions | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``paths`` and ``env`` are what the server was started from, for `configure`, which tells ``kept``."""
        self._config = config
        self.preparation = Preparation(prepare)
        self.preparation.expect(config.functions.values())
        #: What was changed since the start.
        self.revisions = Revisions(config.functions, wall)
        self._nodes = nodes
        #: Are told of a new configuration the moment it is current; they must not wait or raise.
        self.on_switch: list[Callable[[GatewayConfig], None]] = []
        self._paths = tuple(paths)
        self._env = dict(env or {})
        self._applied = None if kept is None else kept.documents
        self._uploads = None if kept is None else kept.uploads
        self._applying = asyncio.Lock()
        self._log = structlog.get_logger("gateway.functions")

    @property
    def config(self) -> GatewayConfig:
        return self._config

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound with the known names."""
        function = self._config.functions.get(name)
        if function is None:
            known = ", ".join(sorted(self._config.functions)) or "none"
            near = get_close_matches(name, self._config.functions, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotFound(f"no function {name!r}{hint}; registered: {known}", component="registry")
        return function

    def task(self, name: str) -> TaskSpec:
        """The task's share and bounds; raises InvalidInput for one that is not declared, where such are refused."""
        found = self._config.tasks.get(name)
        if found is None and self._config.scheduler.undeclared_tasks == "refuse":
            told = f"task {name!r} is not declared{suggestion(name, self._config.tasks)}"
            raise InvalidInput(
                f"{told} (scheduler.undeclared_tasks is refuse)", component="registry", detail={"path": "task"}
            )
        return found or TaskSpec()

    def all(self) -> tuple[FunctionSpec, ...]:
        """Every function, by name."""
        return tuple(function for _, function in sorted(self._config.functions.items()))

    def readiness(self, name: str) -> Readiness:
        """Whether the function's actions may start."""
        return self.preparation.of(name)

    def health(self) -> dict[str, tuple[str, str]]:
        """Return the readiness of every function, and what is wrong with it, by name."""
        return {name: self.readiness(name)[:2] for name in sorted(self._config.functions)}

    def kinds(self) -> set[str]:
        """Return the kinds of resources that functions cost."""
        return {kind for function in self.all() for kind in function.cost}

    def check(self) -> None:
        """Raise the typed error of those functions of the first configuration that this machine can never serve."""
        _raise_all(self._unsatisfiable(self._config, self._config.functions.values()))

    def changes(self, name: str) -> tuple[RevisionChange, ...]:
        """What was changed of a function since the start, the last first."""
        return self.revisions.of(name)

    def source(self, name: str) -> Literal["files", "applied"]:
        """Where a function comes from."""
        return "applied" if self._applied is not None and f"functions.{name}" in self._applied else "files"

    async def take_up(self) -> None:
        """Add what earlier gateways were given; the files win for what they declare. What is wrong is told."""
        if self._applied is None:
            return
        self._applied.take(b"", _names(self._config))
        if self._uploads is not None:
            await self._applied.restore_files(self._uploads)
        for document in self._applied.documents:
            old = self._config
            try:
                new = await asyncio.to_thread(self._read, document.body, old)
                names = _names(new) & set(document.names)
                added = _of("functions", names, new.functions)
                _raise_all(self._unsatisfiable(new, added.values()))
            except CodedError as error:
                self._log.error("what was applied is not taken up", names=document.names, why=error.message)
                continue
            self._config = dataclasses.replace(
                old,
                functions={**old.functions, **added},
                tasks={**old.tasks, **_of("tasks", names, new.tasks)},
                resources={**old.resources, **_of("resources", names, new.resources)},
                needs={**old.needs, **_of("resources", names, new.needs)},
                origins={**old.origins, **_of("functions", names, new.origins)},
            )
        self.revisions.switched(self._config.functions)
        self.preparation.expect(self._config.functions.values())

    async def put(self, name: str, upload: FunctionUpload, dry_run: bool) -> ConfigDiff:
        """Add or change one function, with the files of a handler, as `configure` does.

        Raises Conflict for a function of the server's own files.
        """
        if name in self._config.functions and self.source(name) == "files":
            raise Conflict(
                f"function {name!r} is declared in {self._config.origins.get(name)}: change it there, and apply",
                component="registry",
            )
        directory = self._served()[0]
        if upload.sources:
            if self._uploads is None:
                raise InvalidConfig("this gateway keeps no files of handlers", component="registry")
            directory = await asyncio.to_thread(self._uploads.keep, upload.sources)
            if self._applied is not None and not dry_run:
                self._applied.keep_files(directory.name, upload.sources)
        text = wire.dumps({"functions": {name: upload.definition}}).decode()
        sent = {"files": [{"path": str(directory / "function.yaml"), "text": text}]}
        try:
            return await self.configure(wire.dumps(sent), dry_run)
        except (InvalidConfig, Unsatisfiable, Unsupported) as error:
            raise _as_sent(error, directory) from None

    async def remove(self, name: str) -> ConfigDiff:
        """Remove a function that was applied; raises NotFound, and Conflict for one of the files."""
        async with self._applying:
            self.get(name)
            if self.source(name) == "files":
                place = self._config.origins.get(name)
                raise Conflict(
                    f"function {name!r} is declared in {place}: remove it there, and apply", component="registry"
                )
            if own := await asyncio.to_thread(self._own_place, name):
                told = f"{own} declares function {name!r} too, and the next start would have it again: remove it"
                raise Conflict(f"{told} there first, then here", component="registry")
            left = {other: spec for other, spec in self._config.functions.items() if other != name}
            diff = self._switch(dataclasses.replace(self._config, functions=left))
            await self._keep(b"", diff)
            return replace(diff, applied=True)

    def _own_place(self, name: str) -> str:
        """Return where the server's own files declare a function, as they are now; empty if they do not."""
        if not self._paths:
            return ""
        try:
            return str(self._read(b"", None).origins.get(name, ""))
        except CodedError:  # the next start says what is wrong with them
            return ""

    def start(self) -> None:
        """Begin to prepare the functions of the first configuration."""
        self.preparation.begin(self._config.functions.values())

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
            values={name: _values(old[name], functions[name], keys) for name, keys in changed.items()},
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
            return await self._apply(new)

    async def _apply(self, new: GatewayConfig) -> ConfigDiff:
        diff = self.plan(new)
        if diff.needs_restart:
            raise InvalidConfig(
                f"{', '.join(diff.needs_restart)} cannot change while the gateway runs: restart it",
                component="registry",
                detail={"needs_restart": list(diff.needs_restart)},
            )
        await self._make_ready(new, [new.functions[name] for name in (*diff.added, *diff.changed)])
        return self._switch(new)

    def _switch(self, new: GatewayConfig) -> ConfigDiff:
        """Serve a configuration whose new functions are ready."""
        diff = self.plan(new)
        self._config = new
        self.revisions.switched(new.functions)
        self.preparation.switched({*diff.added, *diff.changed}, new.functions)
        for switched in self.on_switch:
            switched(new)
        return diff

    async def _keep(self, document: bytes, diff: ConfigDiff) -> None:
        """Keep a document for the next gateway; ``diff`` is what it has changed."""
        if self._applied is not None:
            differing = [f"functions.{name}" for name in (*diff.added, *diff.changed, *diff.removed)]
            differing += [f"tasks.{name}" for name in diff.tasks] + [f"resources.{name}" for name in diff.resources]
            living = _names(self._config)
            self._applied.take(document, living & set(differing), set(differing) - living)
            await self._applied.commit()

    async def configure(self, document: bytes, dry_run: bool, prune: bool = False) -> ConfigDiff:
        """Apply what a door received: nothing (the server's own files again), ``{"files": [...]}``, or YAML text.

        What it does not name stays, unless ``prune`` removes it. Raises StorageUnavailable where it cannot be kept.
        """
        async with self._applying:
            new = await asyncio.to_thread(self._read, document, None if prune else self._config)
            if dry_run:
                return self.plan(new)
            if self._applied is not None:
                self._applied.check()
            diff = await self._apply(new)
            await self._keep(document, diff)
        return replace(diff, applied=True)

    def _read(self, document: bytes, keep: GatewayConfig | None) -> GatewayConfig:
        if document.strip():
            sources, variables = self._received(document)
            roots = self._served()
            return gateway_config.build(sources, variables, base=self._config, keep=keep, roots=roots)
        if not self._paths:
            raise InvalidConfig("the gateway was not started from files: send them", component="registry")
        sources, problems = gateway_config.read(self._paths)
        return gateway_config.build(sources, self._env, problems=problems, keep=keep)

    def _served(self) -> list[Path]:
        """The directories of the server's own configuration, absolute; the current one where it was given none."""
        served = [(path if path.is_dir() else path.parent).absolute() for path in self._paths] or [Path.cwd()]
        return served if self._uploads is None else [*served, self._uploads.root]

    def _received(self, document: bytes) -> tuple[list[ConfigSource], dict[str, str]]:
        """The files of a request, and the variables in them: the caller's, for the gateway's are not for callers."""
        base, *_ = served = self._served()
        try:
            body = orjson.loads(document)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict) or "files" not in body:
            return [ConfigSource(path=base / "request.yaml", text=document.decode("utf-8", "replace"))], {}
        try:
            sent = convert(body, ConfigFiles)
        except ValidationError as error:
            told = f'write {{"files": [{{"path": ..., "text": ...}}, ...], "variables": {{...}}}}: {error}'
            raise InvalidConfig(told, component="registry") from None
        if len(sent.files) > gateway_config.FILES_MAX:
            raise InvalidConfig(f"more than {gateway_config.FILES_MAX} files", component="registry")
        sources = [ConfigSource(path=_inside(served, base / each.path), text=each.text) for each in sent.files]
        return sources, dict(sent.variables)

    async def _make_ready(self, config: GatewayConfig, functions: Sequence[FunctionSpec]) -> None:
        """Check that each function can ever be served, then prepare them; raises one error for all of them."""
        errors = self._unsatisfiable(config, functions)

        async def make_ready(function: FunctionSpec) -> None:
            try:
                await self.preparation.one(function)
            except CodedError as error:
                errors.append(_placed(config, function, error))

        async with asyncio.TaskGroup() as group:
            for function in functions if not errors else ():
                group.create_task(make_ready(function))
        _raise_all(errors)

    def _unsatisfiable(self, config: GatewayConfig, functions: Iterable[FunctionSpec]) -> list[CodedError]:
        if config.cluster is not None:
            return []  # whose nodes come and go: what none of them can serve waits, and its cause says for what
        spec = config.manager_spec(self._nodes())
        errors: list[CodedError] = []
        for function in functions:
            try:
                check_satisfiable(function, spec)
            except CodedError as error:
                errors.append(_placed(config, function, error))
        return errors


def _names(config: GatewayConfig) -> set[str]:
    """The key paths of what a configuration declares; the task that always is there only if it is not as always."""
    tasks = {name for name, task in config.tasks.items() if (name, task) != ("default", TaskSpec())}
    maps = {"functions": config.functions, "tasks": tasks, "resources": config.resources}
    return {f"{section}.{name}" for section, names in maps.items() for name in names}


def _of(section: str, names: Collection[str], values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Those of a section's values whose key paths are among the names."""
    return {name: value for name, value in values.items() if f"{section}.{name}" in names}


def _placed(config: GatewayConfig, function: FunctionSpec, error: CodedError) -> CodedError:
    """Return the error with the place where the function is defined."""
    place = config.origins.get(function.name)
    kind = type(error) if isinstance(error, Unsatisfiable | Unsupported) else InvalidConfig
    told = f"{place}: functions.{function.name}: {error.message}" if place else error.message
    return kind(told, component=error.component, detail=error.detail)


def _as_sent(error: CodedError, directory: Path) -> CodedError:
    """Return the error of what was sent alone in the sender's words: where it is kept here says nothing to them."""
    told = re.sub(rf"{re.escape(str(directory))}/function\.yaml(:\d+)*", "the function that was sent", error.message)
    told = told.replace(f"{directory}/", "").replace(str(directory), "the files that were sent")
    return type(error)(told, component=error.component, detail=error.detail)


def _raise_all(errors: Sequence[CodedError]) -> None:
    if len(errors) > 1:
        raise InvalidConfig(
            f"{len(errors)} functions cannot run here:\n" + "\n".join(sorted(error.message for error in errors)),
            component="registry",
        )
    if errors:
        raise errors[0]


def _inside(served: Sequence[Path], path: Path) -> Path:
    """Return the path of a file of a request; raises InvalidConfig where it, or what it links to, lies elsewhere."""
    try:
        found = path.resolve()
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{str(path)[:256]!r} is no path: {error}", component="registry") from None
    if not any(found.is_relative_to(each.resolve()) for each in served):
        listed = ", ".join(map(str, served))
        raise InvalidConfig(
            f"{path} is outside of the directories that this gateway serves ({listed}): "
            "send paths below them, absolute or relative to the first",
            component="registry",
        )
    return path


def _changed_keys(old: FunctionSpec, new: FunctionSpec) -> tuple[str, ...]:
    names = dict.fromkeys(each.name for spec in (old, new) for each in fields(spec))
    differing = (name for name in names if getattr(old, name, None) != getattr(new, name, None))
    keys = tuple(name for name in differing if name not in ("name", "revision"))
    return keys or ("source",)


def _values(old: FunctionSpec, new: FunctionSpec, keys: Iterable[str]) -> dict[str, ValueChange]:
    """Return what each key is and becomes, as text, of a mapping what differs in it; nothing of a handler's code."""
    found = {}
    for key in keys:
        if key != "source":
            was, now = _apart(_plain(getattr(old, key, None)), _plain(getattr(new, key, None)))
            found[key] = ValueChange(was=_as_text(_without_secrets(was)), now=_as_text(_without_secrets(now)))
    return found


def _without_secrets(section: object) -> object:
    """Return a section with no value of its environment."""
    if not isinstance(section, dict) or not isinstance(section.get("env"), dict):
        return section
    return {**section, "env": {name: masked(value) for name, value in section["env"].items()}}


def _apart(old: object, new: object) -> tuple[object, object]:
    """Return both without what is the same in them: a long text would be cut before it tells the change."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return old, new
    was, now = dict(old), dict(new)
    for key in old.keys() & new.keys():
        if old[key] == new[key]:
            del was[key], now[key]
        else:
            was[key], now[key] = _apart(old[key], new[key])
    return was, now


def _plain(value: object) -> object:
    found: object = orjson.loads(orjson.dumps(value, default=str, option=_OPTIONS))
    return found


def _as_text(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value, option=_OPTIONS).decode()
    return text if len(text) <= VALUE_MAX else f"{text[: VALUE_MAX - 3]}..."


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)))


def _fixed_differences(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Key paths that differ among what is read at the start only; the sandbox's defaults only fill in functions."""
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in ("server", "node", "models", "scheduler")]
    pairs.append(("cluster", old.cluster or ClusterConfig(), new.cluster or ClusterConfig()))
    pairs.append(("sandbox", old.sandbox.provider, new.sandbox.provider))
    pairs.append(("sandbox.requirements", old.sandbox.requirements, new.sandbox.requirements))
    return [
        f"{section}.{key_of(name, setting)}"
        for section, before, after in pairs
        for name, _, setting in settings_of(before.__class__)
        if getattr(before, name) != getattr(after, name)
    ]
