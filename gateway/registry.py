"""Registered functions: revisions, preparation, and what an apply changes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeVar

import msgspec
import orjson
import structlog
from msgspec import ValidationError, convert
from msgspec.structs import replace

from gateway import serialization
from gateway.config import load as gateway_config
from gateway.config.load import ConfigSource, GatewayConfig
from gateway.config.schema import ClusterConfig, key_of, nearest, suggestion
from gateway.store.store import Store
from manager.action import UnitSet
from manager.config import NodeSpec, TaskSpec
from manager.core.outside import OutsideQueue, OutsideWait
from manager.core.state import Cause
from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    FunctionUnavailable,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Unsatisfiable,
    Unsupported,
    exhaustion,
)
from manager.formulation import check_satisfiable
from manager.function import FunctionSpec, settings_of
from runtimes.chores import end_chores
from runtimes.kinds import input_schema, result_schema
from runtimes.secrets import REDACTED, SECRET
from tangram import types

#: Bounds of one handler's files, and of how many handlers' files there may be before a restart removes the unused.
UPLOAD_FILES_MAX, UPLOAD_BYTES_MAX, UPLOADS_MAX = 200, 4 * 2**20, 1000
#: In the state directory: what was registered with its sources.
UPLOADS = "handlers"


class HandlerUploads:
    """Directories that never change once they are there; the name of each is a digest of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def keep(self, sources: Mapping[str, str]) -> Path:
        """Return the directory of these files (relative path -> text); the same files have the same one.

        Raises InvalidConfig for paths and sizes that are not taken, CapacityExceeded, and StorageUnavailable.
        """
        files = _upload_files(sources)
        digest = hashlib.sha256()
        for name, data in files.items():
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        directory = self.root / digest.hexdigest()[:32]
        if directory.is_dir():
            return directory
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            if sum(1 for _ in self.root.iterdir()) >= UPLOADS_MAX:
                raise CapacityExceeded(
                    f"{UPLOADS_MAX} versions of handlers were registered since the start: a restart removes the unused",
                    component="registry",
                )
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".new-") as scratch:
                for name, data in files.items():
                    file = Path(scratch, "files", name)
                    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                    file.write_bytes(data)
                    file.chmod(0o644)
                Path(scratch, "files").rename(directory)
        except OSError as error:
            if directory.is_dir():
                return directory  # another request has made the same
            if short := exhaustion(error, "registry"):
                raise short from None
            raise
        return directory

    def prune(self, documents: Collection[bytes]) -> None:
        """Remove the directories that none of the applied documents names."""
        if not self.root.is_dir():
            return
        for each in self.root.iterdir():
            if not any(each.name.encode() in document for document in documents):
                shutil.rmtree(each, ignore_errors=True)


def _upload_files(sources: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files by path, in order; raises InvalidConfig."""
    if len(sources) > UPLOAD_FILES_MAX:
        raise InvalidConfig(
            f"sources: {len(sources)} files, at most {UPLOAD_FILES_MAX} are taken", component="registry"
        )
    files: dict[str, bytes] = {}
    for name, text in sorted(sources.items()):
        path = PurePosixPath(name)
        plain = name and "\0" not in name and "\\" not in name and str(path) == name
        if not plain or path.is_absolute() or any(part in ("..", ".") for part in path.parts) or len(name) > 255:
            raise _refused_upload(f"{name[:256]!r} is no relative path of a file")
        if not name.endswith((".py", ".json", ".txt", ".yaml", ".toml", ".csv")):
            raise InvalidConfig(
                f"sources: {name!r}: a handler's files are .py, .json, .txt, .yaml, .toml and .csv",
                component="registry",
            )
        files[name] = text.encode("utf-8", "surrogatepass")
    size = sum(map(len, files.values()))
    if size > UPLOAD_BYTES_MAX:
        raise _refused_upload(f"{size} bytes, at most {UPLOAD_BYTES_MAX} are taken")
    return files


def _refused_upload(why: str) -> InvalidConfig:
    return InvalidConfig(f"sources: {why}", component="registry")


# What was applied by a request: kept in the record, so that the next gateway has it beside its files.
#
# The files of registered handlers are in the record too, beside those in the state directory that their instances see:
# a record that is restored, or lies in another directory, has all that it needs.

DOCUMENT = "applied"
#: Begins the names of documents that hold a handler's files; the digest of these follows.
FILES = "handler:"


class AppliedDocument(NamedTuple):
    """A configuration as it was received, and the key paths (``functions.f``) of what is still its own."""

    body: bytes
    names: tuple[str, ...]


class AppliedConfigs:
    """The documents of which something is served, the newest last; a key path belongs to one of them at most."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.documents: tuple[AppliedDocument, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(name in each.names for each in self.documents)

    async def load(self) -> None:
        """Read what earlier gateways were given."""
        result = orjson.loads(await self._store.document(DOCUMENT) or "[]")
        self.documents = tuple(AppliedDocument(base64.b64decode(each["body"]), tuple(each["names"])) for each in result)

    def check(self) -> None:
        """Raise StorageUnavailable while the disk refuses: nothing is applied then that would not be kept."""
        self._store.check()

    def take(self, body: bytes, names: Collection[str], removed: Collection[str] = ()) -> None:
        """Keep a document that has made these key paths; an empty body stands for the gateway's own files.

        Of earlier documents stays what was neither made anew nor removed.
        """
        gone = {*names, *removed}
        kept = [
            AppliedDocument(each.body, tuple(name for name in each.names if name not in gone))
            for each in self.documents
        ]
        documents = (*kept, AppliedDocument(body, tuple(sorted(names))))
        result = tuple(each for each in documents if each.names and each.body.strip())
        if result != self.documents:
            self.documents = result
            saved = [{"body": base64.b64encode(each.body).decode(), "names": each.names} for each in result]
            self._store.save_document(DOCUMENT, orjson.dumps(saved).decode())

    def keep_files(self, digest: str, sources: Mapping[str, str]) -> None:
        """Note the files of a handler, by path; durable with the document that names them."""
        self._store.save_document(FILES + digest, orjson.dumps(sources).decode())

    async def restore_files(self, uploads: HandlerUploads) -> None:
        """Put back what files of handlers the state directory lacks, and remove those that no document names.

        Documents that were applied over another state directory name those of this one from now on.
        """
        names = [str(row["name"]) for row in await self._store.read("document_names", (FILES,))]
        kept = {name.removeprefix(FILES) for name in names}
        bodies = [each.body for each in self.documents]
        for digest in sorted(kept):
            if not any(digest.encode() in body for body in bodies):
                self._store.save_document(FILES + digest, None)
            elif not (uploads.root / digest).is_dir():
                sources = orjson.loads(await self._store.document(FILES + digest) or "{}")
                await asyncio.to_thread(uploads.keep, sources)
        await asyncio.to_thread(uploads.prune, bodies)
        self.documents = tuple(each._replace(body=_moved(each.body, uploads.root)) for each in self.documents)

    async def commit(self) -> None:
        """Return when what was taken is durable; raises StorageUnavailable."""
        await self._store.commit()


def _moved(body: bytes, root: Path) -> bytes:
    """Return a document with the places of registered handlers below this root."""
    try:
        document = orjson.loads(body)
        files = [(file, Path(file["path"])) for file in document["files"]]
    except (ValueError, TypeError, KeyError):
        return body  # one text, which names no place of a handler
    moved = False
    for file, path in files:
        directory = path.parent
        if directory.parent.name == root.name and directory.parent != root and (root / directory.name).is_dir():
            file["path"], moved = str(root / directory.name / path.name), True
    return orjson.dumps(document) if moved else body


class KeptFunctions(NamedTuple):
    """What of registered functions outlives a gateway: the documents, and the files of handlers."""

    documents: AppliedConfigs
    uploads: HandlerUploads


#: Functions whose preparation runs at once.
CONCURRENCY = 4
#: Seconds until one that failed is prepared again, doubled each time, and at most.
AGAIN_S, AGAIN_MAX_S = 1.0, 60.0
#: Tries that must have failed before calls are refused: a disturbance of some seconds is waited out.
FAILURES_MIN = 4

#: Checks that a function can run here and warms it up: `runtimes.runtime.Runtime.prepare` of its runtime.
Prepare = Callable[[FunctionSpec], Awaitable[None]]


class Readiness(NamedTuple):
    """Whether a function's actions may start, and if it is unavailable, why."""

    status: Literal["preparing", "ready", "unavailable"]
    problem: str = ""
    #: Tries that have failed one after the other.
    failures: int = 0
    #: When it is tried again, on the event loop's clock; 0 while a try runs, or waits for room (a node that joins).
    again_s: float = 0.0
    #: What is missing stands in its configuration: a call that waits or asks again changes nothing.
    configured: bool = False

    def check(self, function: FunctionSpec, now_s: float) -> None:
        """Raise FunctionUnavailable where no try that runs or is due may make it ready in time for a call.

        In time is within the function's ``queue_timeout_s``. After ``FAILURES_MIN`` failures, or one of its
        configuration, what is missing is taken to be missing until a try says otherwise, and a call waits only for a
        try that runs. A mistake of the configuration has no time after which to ask again.
        """
        left_s = self.again_s - now_s
        if self.status != "unavailable" or left_s <= 0.0:
            return
        if self.configured or self.failures >= FAILURES_MIN or left_s > function.queue_timeout_s:
            raise FunctionUnavailable(
                f"function {function.name} is unavailable: {self.problem}; it is tried again in {left_s:.0f} s, and "
                "when a configuration is applied",
                component="admission",
                retry_after_s=None if self.configured else left_s,
            )


READY = Readiness("ready")


class Preparation:
    """How ready each function is. Use from one event loop."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.Event] = {}
        #: What the next try of one does in place of preparing it.
        self._instead: dict[str, Prepare] = {}
        self._states: dict[str, Readiness] = {}
        self._log = structlog.get_logger("gateway.registry")
        #: Called when one has become ready, by name; they must not wait or raise.
        self.on_ready: list[Callable[[str], None]] = []

    def of(self, name: str) -> Readiness:
        """How ready it is; one that is not known here is as ready as it will be."""
        return self._states.get(name, READY)

    def expect(self, functions: Iterable[FunctionSpec]) -> None:
        """They will be prepared: until `begin` they wait."""
        self._states |= {function.name: Readiness("preparing") for function in functions}

    def begin(self, functions: Iterable[FunctionSpec]) -> None:
        """Prepare them in the background, again and again where it fails."""
        for function in functions:
            self._states[function.name] = Readiness("preparing")
            self._again[function.name] = asyncio.Event()
            self._tasks[function.name] = asyncio.get_running_loop().create_task(self._until_ready(function))

    def again(self, instead: Prepare | None = None) -> None:
        """Try those again at once that could not be made ready: something has changed.

        ``instead`` is all that the try does, where what has changed is known; not if a whole one is due as well.
        """
        for name, again in self._again.items():
            if instead is None:
                self._instead.pop(name, None)
            elif not again.is_set():
                self._instead[name] = instead
            again.set()

    def note(self, name: str, message: str) -> None:
        """Tell what is done for one that is being prepared."""
        if self._states.get(name, Readiness("ready")).status == "preparing":
            self._states[name] = Readiness("preparing", message)

    async def one(self, function: FunctionSpec, prepare: Prepare | None = None) -> None:
        """Prepare one now; raises CodedError, and changes nothing that is told of it."""
        async with self._gate:
            await (prepare or self._prepare)(function)

    def switched(self, ready: Iterable[str], known: Iterable[str]) -> None:
        """These are ready in their new form, those that are ``known`` no more are forgotten, the others tried again."""
        known = set(known)
        for name in {*ready, *(self._states.keys() - known)}:
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
            self._states.pop(name, None)
            self._report_ready(name)
        self.again()

    async def close(self) -> None:
        """Stop preparing."""
        await end_chores(*self._tasks.values())

    async def _until_ready(self, function: FunctionSpec) -> None:
        name, attempt, failures = function.name, 1, 0
        while (error := await self._error(function, self._instead.pop(name, None))) is not None:
            problem = error.message
            room = isinstance(error, CapacityExceeded)  # nothing is missing for good: a node that joins makes it
            if self._states[name].problem != problem:
                say = self._log.info if room else self._log.error
                say("a function waits for a node" if room else "a function is unavailable", function=name, why=problem)
            again, loop = self._again[name], asyncio.get_running_loop()
            again_s = loop.time() + types.backoff_s(attempt, AGAIN_S, AGAIN_MAX_S)
            failures = 0 if room else failures + 1
            configured = isinstance(error, InvalidConfig)
            self._states[name] = Readiness("unavailable", problem, failures, 0.0 if room else again_s, configured)
            timer = loop.call_at(again_s, again.set)
            await again.wait()
            timer.cancel()
            again.clear()  # before the try: what changes meanwhile is not missed
            self._states[name] = Readiness("unavailable", problem, failures)
            attempt += 1
        self._tasks.pop(name, None)
        self._states[name] = Readiness("ready")
        self._report_ready(name)

    async def _error(self, function: FunctionSpec, instead: Prepare | None) -> CodedError | None:
        try:
            await self.one(function, instead)
        except CodedError as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001  # a bug in one runtime keeps no other function from being served
            self._log.exception("a preparation failed", function=function.name)
            return CodedError(f"its preparation failed: {error!r}", component="functions")
        return None

    def _report_ready(self, name: str) -> None:
        for on_ready in self.on_ready:
            on_ready(name)


#: Fields that functions of every kind have.
_COMMON = {each.name for each in fields(FunctionSpec)}


def function_info(
    spec: FunctionSpec,
    learned: Mapping[str, object] | types.UnsetType = types.UNSET,
    readiness: Readiness | None = None,
    source: str | None = None,
    changes: Sequence[types.RevisionChange] = (),
) -> types.FunctionInfo:
    """Return a registered function. What is not set is left out; secrets are references and stay so."""
    result = msgspec.to_builtins(spec, enc_hook=str)
    if (sandbox := result.get("sandbox")) is not None:
        sandbox["env"] = {name: masked(value) for name, value in sandbox["env"].items()}
    result |= {
        "cost": {kind: units_info(units) for kind, units in spec.cost.items()},
        "input_schema": input_schema(spec),
        "result_schema": result_schema(spec),
        "own": {each.name: result[each.name] for each in fields(spec) if each.name not in _COMMON} or None,
        "learned": None if learned is types.UNSET else msgspec.convert(learned, Mapping[str, types.LearnedInfo]),
        "source": source,
        "changes": list(changes) or None,
        "status": None if readiness is None else readiness.status,
        "problem": (readiness.problem or None) if readiness is not None else None,
    }
    return msgspec.convert({name: value for name, value in result.items() if value is not None}, types.FunctionInfo)


def masked(value: str) -> str:
    """A value of an environment, which may be a secret, for anybody's eyes; a reference to one is none."""
    return value if SECRET.fullmatch(value) else REDACTED


def units_info(units: UnitSet) -> int | types.UnitsInfo:
    """Return unit counts as JSON has them."""
    if units.choices is not None:
        return types.UnitsInfo(choices=units.choices)
    return types.UnitsInfo(min=units.minimum, max=units.maximum) if units.elastic else units.minimum


#: Changes that are kept of a function, keys that are told of one, and characters of a value.
KEPT, KEYS_MAX, VALUE_CHARS = 20, 100, 400
#: What is not of the definition, or differs with it anyway.
_LEFT_OUT = frozenset({"revision"})


class Revisions:
    """The changes of every function that is served. Use from one event loop."""

    def __init__(self, functions: Mapping[str, FunctionSpec], wall: Callable[[], float]) -> None:
        self._functions, self._wall = functions, wall
        self._changes: dict[str, deque[types.RevisionChange]] = {}

    def of(self, name: str) -> tuple[types.RevisionChange, ...]:
        """Return the changes of a function, the last one first."""
        return tuple(self._changes.get(name, ()))

    def switched(self, functions: Mapping[str, FunctionSpec]) -> None:
        """These are served from now on."""
        for name, new in functions.items():
            old = self._functions.get(name)
            if old is not None and old != new:
                change = types.RevisionChange(
                    at=serialization.instant(self._wall()),
                    was=old.revision,
                    now=new.revision,
                    values=_differing(old, new),
                )
                self._changes.setdefault(name, deque(maxlen=KEPT)).appendleft(change)
        self._changes = {name: changes for name, changes in self._changes.items() if name in functions}
        self._functions = functions


def _differing(old: FunctionSpec, new: FunctionSpec) -> dict[str, types.ValueChange]:
    """Return the keys that differ, by their path, with nothing of an environment's values."""
    was, now, environments = dict(_flat(_shown(old))), dict(_flat(_shown(new))), (_environment(old), _environment(new))
    differing = {key for key in was.keys() | now.keys() if was.get(key) != now.get(key)}
    differing |= {name for name, _ in environments[0].items() ^ environments[1].items()}
    keys = sorted(differing)
    return {key: types.ValueChange(was=was.get(key, ""), now=now.get(key, "")) for key in keys[:KEYS_MAX]}


def _environment(function: FunctionSpec) -> dict[str, str]:
    env = {} if function.sandbox is None else function.sandbox.env
    return {f"sandbox.env.{name}": value for name, value in env.items()}


def _shown(function: FunctionSpec) -> dict[str, object]:
    result: dict[str, object] = msgspec.to_builtins(function_info(function))
    return {key: value for key, value in result.items() if key not in _LEFT_OUT}


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
        return
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    yield path, text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 3]}..."


_Value = TypeVar("_Value")


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
        outside: OutsideQueue | None = None,
        pulled: Callable[[str], bool] = lambda image: False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``paths`` and ``env`` are what the server was started from, for `configure`, which tells ``kept``.

        Who registers stands in ``outside`` meanwhile. ``pulled`` tells whether an image is just being pulled.
        """
        self.config = config
        self.preparation = Preparation(prepare)
        self.preparation.expect(config.functions.values())
        #: What was changed since the start.
        self.revisions = Revisions(config.functions, wall)
        self._nodes = nodes
        self._outside, self._pulled = OutsideQueue(time.monotonic) if outside is None else outside, pulled
        #: Are told of a new configuration the moment it is current; they must not wait or raise.
        self.on_switch: list[Callable[[GatewayConfig], None]] = []
        self._paths = tuple(paths)
        self._env = dict(env or {})
        self._applied = None if kept is None else kept.documents
        self._uploads = None if kept is None else kept.uploads
        self._applying = asyncio.Lock()
        self._log = structlog.get_logger("gateway.registry")

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound with the known names."""
        function = self.config.functions.get(name)
        if function is None:
            known = ", ".join(sorted(self.config.functions)) or "none"
            hint = nearest(name, self.config.functions)
            raise NotFound(f"no function {name!r}{hint}; registered: {known}", component="registry")
        return function

    def task(self, name: str) -> TaskSpec:
        """The task's share and bounds; raises InvalidInput for one that is not declared, where such are refused."""
        result = self.config.tasks.get(name)
        if result is None and self.config.scheduler.undeclared_tasks == "refuse":
            message = f"task {name!r} is not declared{suggestion(name, self.config.tasks)}"
            raise InvalidInput(
                f"{message} (scheduler.undeclared_tasks is refuse)", component="registry", detail={"path": "task"}
            )
        return result or TaskSpec()

    def all(self) -> tuple[FunctionSpec, ...]:
        """Every function, by name."""
        return tuple(function for _, function in sorted(self.config.functions.items()))

    def missing(self, function: FunctionSpec) -> Cause:
        """Return what a function that is not ready waits for."""
        known = self.preparation.of(function.name)
        if known.status == "unavailable" and self.config.functions.get(function.name) == function:
            return Cause(kind="function", text=f"function {function.name}, which is unavailable: {known.problem}")
        image = "" if function.sandbox is None else function.sandbox.image
        if image and self._pulled(image):
            return Cause(kind="image", text=f"image {image}")
        if function.handler is not None and function.handler.requirements:
            return Cause(kind="requirements", text=f"requirements of function {function.name}")
        return Cause(kind="function", text=f"function {function.name}, which is being prepared")

    def health(self) -> dict[str, tuple[str, str]]:
        """Return the readiness of every function, and what is wrong with it, by name."""
        return {name: self.preparation.of(name)[:2] for name in sorted(self.config.functions)}

    def kinds(self) -> set[str]:
        """Return the kinds of resources that functions cost."""
        return {kind for function in self.all() for kind in function.cost}

    def check(self) -> None:
        """Raise the typed error of those functions of the first configuration that this machine can never serve."""
        _raise_all(self._unsatisfiable(self.config, self.config.functions.values()))

    def source(self, name: str) -> Literal["files", "applied"]:
        """Where a function comes from."""
        return "applied" if self._applied is not None and f"functions.{name}" in self._applied else "files"

    async def take_up(self) -> None:
        """Add what earlier gateways were given; the files win for what they declare. What is wrong is told."""
        if self._applied is None:
            return
        self._applied.take(b"", _names(self.config))
        if self._uploads is not None:
            await self._applied.restore_files(self._uploads)
        for document in self._applied.documents:
            old = self.config
            try:
                new = await asyncio.to_thread(self._read, document.body, old)
                names = _names(new) & set(document.names)
                added = _of("functions", names, new.functions)
                _raise_all(self._unsatisfiable(new, added.values()))
            except CodedError as error:
                self._log.error("what was applied is not taken up", names=document.names, why=error.message)
                continue
            self.config = dataclasses.replace(
                old,
                functions={**old.functions, **added},
                tasks={**old.tasks, **_of("tasks", names, new.tasks)},
                resources={**old.resources, **_of("resources", names, new.resources)},
                origins={**old.origins, **_of("functions", names, new.origins)},
            )
        self.revisions.switched(self.config.functions)
        self.preparation.expect(self.config.functions.values())

    async def put(self, name: str, upload: types.FunctionUpload, dry_run: bool) -> types.ConfigDiff:
        """Add or change one function, with the files of a handler, as `configure` does.

        Raises Conflict for a function of the server's own files.
        """
        if name in self.config.functions and self.source(name) == "files":
            raise Conflict(
                f"function {name!r} is declared in {self.config.origins.get(name)}: change it there, and apply",
                component="registry",
            )
        directory = self._served()[0]
        if upload.sources:
            if self._uploads is None:
                raise InvalidConfig("this gateway keeps no files of handlers", component="registry")
            directory = await asyncio.to_thread(self._uploads.keep, upload.sources)
            if self._applied is not None and not dry_run:
                self._applied.keep_files(directory.name, upload.sources)
        text = serialization.dumps({"functions": {name: upload.definition}}).decode()
        sent = {"files": [{"path": str(directory / "function.yaml"), "text": text}]}
        try:
            return await self.configure(serialization.dumps(sent), dry_run)
        except (InvalidConfig, Unsatisfiable, Unsupported) as error:
            raise _as_sent(error, directory) from None

    async def remove(self, name: str, dry_run: bool = False) -> types.ConfigDiff:
        """Remove a function that was applied; raises NotFound, and Conflict for one of the files.

        With ``dry_run`` nothing is removed, and all that would be is told.
        """
        async with self._applying:
            self.get(name)
            if self.source(name) == "files":
                place = self.config.origins.get(name)
                raise Conflict(
                    f"function {name!r} is declared in {place}: remove it there, and apply", component="registry"
                )
            if own := await asyncio.to_thread(self._own_place, name):
                message = f"{own} declares function {name!r} too, and the next start would have it again: remove it"
                raise Conflict(f"{message} there first, then here", component="registry")
            left = {other: spec for other, spec in self.config.functions.items() if other != name}
            new = dataclasses.replace(self.config, functions=left)
            if dry_run:
                return self.plan(new)
            diff = self._switch(new)
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
        self.preparation.begin(self.config.functions.values())

    def plan(self, new: GatewayConfig) -> types.ConfigDiff:
        """What `apply` would change; changes nothing."""
        old, functions = self.config.functions, new.functions
        changed = {
            name: _changed_keys(old[name], functions[name])
            for name in sorted(old.keys() & functions.keys())
            if old[name] != functions[name]
        }
        return types.ConfigDiff(
            added=tuple(sorted(functions.keys() - old.keys())),
            changed=changed,
            values={name: _differing(old[name], functions[name]) for name in changed},
            removed=tuple(sorted(old.keys() - functions.keys())),
            unchanged=tuple(sorted(old.keys() & functions.keys() - changed.keys())),
            tasks=_changed_names(self.config.tasks, new.tasks),
            resources=_changed_names(self.config.resources, new.resources),
            needs_restart=tuple(_fixed_differences(self.config, new)),
        )

    async def apply(self, new: GatewayConfig) -> types.ConfigDiff:
        """Prepare what is new, then switch all of it at once; an error leaves everything as it was.

        Raises InvalidConfig, Unsatisfiable or Unsupported.
        """
        async with self._applying:
            return await self._apply(new)

    async def _apply(self, new: GatewayConfig) -> types.ConfigDiff:
        diff = self.plan(new)
        if diff.needs_restart:
            raise InvalidConfig(
                f"{', '.join(diff.needs_restart)} cannot change while the gateway runs: restart it",
                component="registry",
                detail={"needs_restart": list(diff.needs_restart)},
            )
        await self._make_ready(new, [new.functions[name] for name in (*diff.added, *diff.changed)])
        return self._switch(new)

    def _switch(self, new: GatewayConfig) -> types.ConfigDiff:
        """Serve a configuration whose new functions are ready."""
        diff = self.plan(new)
        self.config = new
        self.revisions.switched(new.functions)
        self.preparation.switched({*diff.added, *diff.changed}, new.functions)
        for switched in self.on_switch:
            switched(new)
        return diff

    async def _keep(self, document: bytes, diff: types.ConfigDiff) -> None:
        """Keep a document for the next gateway; ``diff`` is what it has changed."""
        if self._applied is not None:
            differing = [f"functions.{name}" for name in (*diff.added, *diff.changed, *diff.removed)]
            differing += [f"tasks.{name}" for name in diff.tasks] + [f"resources.{name}" for name in diff.resources]
            living = _names(self.config)
            self._applied.take(document, living & set(differing), set(differing) - living)
            await self._applied.commit()

    async def configure(self, document: bytes, dry_run: bool, prune: bool = False) -> types.ConfigDiff:
        """Apply what was received: nothing (the server's own files again), ``{"files": [...]}``, or YAML text.

        What it does not name stays, unless ``prune`` removes it. Raises StorageUnavailable where it cannot be kept.
        """
        async with self._applying:
            new = await asyncio.to_thread(self._read, document, None if prune else self.config)
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
            return gateway_config.build(sources, variables, base=self.config, keep=keep, roots=roots)
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
            sent = convert(body, types.ConfigFiles)
        except ValidationError as error:
            message = f'write {{"files": [{{"path": ..., "text": ...}}, ...], "variables": {{...}}}}: {error}'
            raise InvalidConfig(message, component="registry") from None
        if len(sent.files) > gateway_config.FILES_MAX:
            raise InvalidConfig(f"more than {gateway_config.FILES_MAX} files", component="registry")
        sources = [ConfigSource(path=_inside(served, base / each.path), text=each.text) for each in sent.files]
        return sources, dict(sent.variables)

    async def _make_ready(self, config: GatewayConfig, functions: Sequence[FunctionSpec]) -> None:
        """Check that each function can ever be served, then prepare them; raises one error for all of them."""
        errors = self._unsatisfiable(config, functions)

        async def make_ready(function: FunctionSpec) -> None:
            wait = OutsideWait(
                id=f"registration-{function.name}",
                function="(registration)",
                task="",
                since_s=self._outside.now(),
                what=("function", function.name),
                why=partial(self.missing, function),
            )
            try:
                with self._outside.waiting(wait):
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
    message = f"{place}: functions.{function.name}: {error.message}" if place else error.message
    return kind(message, component=error.component, detail=error.detail)


def _as_sent(error: CodedError, directory: Path) -> CodedError:
    """Return the error of what was sent alone in the sender's words: where it is kept here says nothing to them."""
    message = re.sub(rf"{re.escape(str(directory))}/function\.yaml(:\d+)*", "the function that was sent", error.message)
    message = message.replace(f"{directory}/", "").replace(str(directory), "the files that were sent")
    return type(error)(message, component=error.component, detail=error.detail)


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
        result = path.resolve()
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{str(path)[:256]!r} is no path: {error}", component="registry") from None
    if not any(result.is_relative_to(each.resolve()) for each in served):
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


def _changed_names(old: Mapping[str, object], new: Mapping[str, object]) -> tuple[str, ...]:
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
