"""Layers: what a handler's requirements install, built once by pip in a sandbox and mounted wherever it is needed.

pip is the gateway's own, run by the Python of the sandbox, whose image is that of the function, so that what it
chooses fits. Nothing of the gateway's environment or of the function's goes into it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from urllib.parse import quote

import structlog

from manager.errors import ActionFailed, CodedError, InvalidConfig, Unsupported, exhaustion
from manager.function import Network, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import PURPOSE
from runtimes.sandbox.files import TreeStore, open_archive, unpack_tree
from runtimes.sandbox.handler.sources import COMPONENT, RequirementSettings
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.secrets import REDACTED, SECRET, Secrets
from tangram.archive import Refused

#: Where a build finds pip and the wheels, and what it leaves.
_PIP, _LINKS, _TARGET = "/installer/pip", "/links", "layer"
#: Bytes that a build may write beside what it downloads, unpacks and installs.
_ROOM_BYTES = 2**28
#: Characters that are told of what pip said, and bytes of it that are kept.
MESSAGE_CHARS, OUTPUT_BYTES = 2000, 64 * 2**10
_LOG = structlog.get_logger("sandbox.layers")

#: Told each line that pip says while it builds.
OnLine = Callable[[str], None]


class LayerStore:
    """The layers in one directory. Use from one event loop."""

    def __init__(
        self,
        provider: Provider,
        settings: RequirementSettings,
        directory: Path,
        secrets: Secrets,
        living: set[str],
        in_use: Callable[[], Collection[Path]],
    ) -> None:
        """The ids of sandboxes that build are among the ``living``; layers ``in_use`` are never removed."""
        self._provider, self._settings, self._trees = provider, settings, TreeStore(directory, settings.max_bytes)
        self._secrets, self._living, self._in_use = secrets, living, in_use
        self._gate = asyncio.Semaphore(settings.builds)
        self._locks: dict[str, asyncio.Lock] = {}

    async def layer(self, lines: Sequence[str], spec: SandboxSpec, on_line: OnLine) -> Path:
        """Return the directory of what these requirements install in a sandbox of ``spec``, built if it is not there.

        Raises InvalidConfig in pip's own words, Unsupported, or what keeps a sandbox from being made.
        """
        self._require_source()
        digest = self._digest(lines, spec)
        lock = self._locks.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                if not self._trees.use(digest):
                    async with self._gate:
                        await self._build(digest, lines, spec, on_line)
        finally:
            if not lock.locked():
                self._locks.pop(digest, None)
        return self._trees.files(digest)

    def _require_source(self) -> None:
        chosen = self._settings
        if refusal := chosen.refusal():
            raise InvalidConfig(refusal, component=COMPONENT)
        if chosen.find_links is not None and not chosen.find_links.is_dir():
            raise InvalidConfig(
                f"sandbox.requirements.find_links: {chosen.find_links} is no directory", component=COMPONENT
            )
        if not chosen.only_binary and not self._isolates:
            raise Unsupported(
                "sandbox.requirements.only_binary: false runs code of packages, which plain processes do not confine",
                component=COMPONENT,
            )

    @property
    def _isolates(self) -> bool:
        return self._provider.info.limits.get("filesystem", True)

    def _digest(self, lines: Sequence[str], spec: SandboxSpec) -> str:
        chosen = self._settings
        values: list[object] = [sorted(lines), self._provider.info.kind, spec.image, chosen.index_url]
        values += [str(chosen.find_links or ""), chosen.only_binary]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]

    # Building

    async def _build(self, digest: str, lines: Sequence[str], spec: SandboxSpec, on_line: OnLine) -> None:
        chosen = self._settings
        pip = _pip()
        mounts = {str(pip): _PIP, **({str(chosen.find_links): _LINKS} if chosen.find_links else {})}
        sandbox = await self._provider.create(
            SandboxSpec(
                image=spec.image,
                runtime=spec.runtime,
                isolation=spec.isolation,
                network=Network.EGRESS if chosen.index_url else Network.NONE,
                allow=chosen.allow if chosen.index_url else (),
                memory_bytes=chosen.memory_bytes,
                disk_bytes=3 * chosen.layer_max_bytes + _ROOM_BYTES,
            ),
            name=secrets.token_hex(8),
            labels={PURPOSE: "requirements"},
            mounts=mounts,
        )
        self._living.add(sandbox.id)
        created = self._trees.new()
        _LOG.info("requirements are installed", requirements=list(lines), image=spec.image)
        try:
            await self._install(sandbox, str(pip), lines, on_line)
            size_bytes = await self._fetch(sandbox, created)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, created, ignore_errors=True)
            raise
        finally:
            try:
                await sandbox.close()
            finally:
                self._living.discard(sandbox.id)
        self._trees.keep(created, digest, size_bytes)
        _LOG.info("requirements are there", requirements=list(lines), size_bytes=size_bytes)
        in_use = {digest, *(path.parent.name for path in self._in_use())}
        await asyncio.to_thread(self._trees.make_room, 0, in_use)

    async def _install(self, sandbox: Sandbox, pip: str, lines: Sequence[str], on_line: OnLine) -> None:
        chosen, workdir = self._settings, sandbox.spec.workdir
        index = SECRET.sub(lambda match: quote(self._secrets.get(match["name"]), safe=""), chosen.index_url)
        # In the file, not in the arguments: an index may name a password.
        where = [f"--index-url {index}"] if index else ["--no-index"]
        if chosen.find_links is not None:
            where.append(f"--find-links {_LINKS if self._isolates else chosen.find_links}")
        where += ["--only-binary :all:"] if chosen.only_binary else []
        await sandbox.write_file("requirements.txt", "\n".join([*where, *lines, ""]).encode())
        options = "--isolated --no-input --no-cache-dir --disable-pip-version-check --progress-bar off --no-color"
        program = _PIP if self._isolates else pip
        command = Command(
            argv=("python3", program, "install", *options.split(), "--target", _TARGET, "-r", "requirements.txt"),
            env={"TMPDIR": workdir} if self._isolates else {},
            merge=True,
            timeout_s=chosen.timeout_s,
            output_limit_bytes=OUTPUT_BYTES,
        )
        rest = b""

        def bare(output: bytes) -> str:
            return output.decode("utf-8", "replace").replace(index or "\0", REDACTED)

        def on_output(stream: str, data: bytes) -> None:
            nonlocal rest
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                on_line(bare(line).strip()[:200])

        result = await sandbox.run(command, on_output)
        if result.timed_out:
            raise InvalidConfig(
                f"its requirements took longer than {chosen.timeout_s:g} s (sandbox.requirements.timeout)",
                component=COMPONENT,
            )
        if result.exit_code != 0:
            how = "out of memory (sandbox.requirements.memory)" if result.out_of_memory else _error(bare(result.stdout))
            raise InvalidConfig(f"its requirements cannot be installed: {how}", component=COMPONENT)

    async def _fetch(self, sandbox: Sandbox, created: Path) -> int:
        """Bring what was installed out of the sandbox; return its bytes."""
        limit = self._settings.layer_max_bytes
        packed = created / "layer.tar"
        target = f"{sandbox.spec.workdir}/{_TARGET}"
        try:
            with packed.open("wb") as file:
                async with open_archive(sandbox, target, limit_bytes=limit) as chunks:
                    async for chunk in chunks:
                        file.write(chunk)
            return await asyncio.to_thread(unpack_tree, packed, created / TreeStore.FILES, limit)
        except Refused as error:
            raise InvalidConfig(f"its requirements are no layer: {error}", component=COMPONENT) from None
        except OSError as error:
            raise exhaustion(error, COMPONENT) or error from None
        except ActionFailed:
            raise
        except CodedError as error:
            message = f"its requirements: {error.message} (sandbox.requirements.layer_max)"
            raise InvalidConfig(message, component=COMPONENT) from error


def _pip() -> Path:
    """Return the directory of the package pip that the gateway has; raises Unsupported."""
    entry = importlib.util.find_spec("pip")
    if entry is None or entry.origin is None:
        raise Unsupported(
            "requirements are installed by the pip of the gateway's own Python, which has none: python -m ensurepip",
            component=COMPONENT,
        )
    return Path(entry.origin).parent


def _error(message: str) -> str:
    """Return what pip says is wrong: its lines of errors, or the last ones."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return " ".join(errors or lines[-5:] or ["pip said nothing"])[:MESSAGE_CHARS]
