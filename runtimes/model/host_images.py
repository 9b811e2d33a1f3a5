"""Checkpoints in host memory, and their tokenizers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from manager.errors import CodedError, InvalidConfig, InvalidInput, Unsupported
from runtimes.model.checkpoint import Head, Layout, fingerprint, read_small
from runtimes.model.processes import (
    Done,
    EncodedText,
    Fill,
    ImageRef,
    Inspect,
    Inspection,
    ModelProcess,
    RequestRefused,
)
from runtimes.model.request import ModelSettings, host_bytes

_LOG = structlog.get_logger("model")
_COMPONENT = "model.host_images"
#: Threads that read a checkpoint into its image.
READ_THREADS = 4

#: (checkpoint, head, dtype as configured, patterns of weights that may be left over).
ModelKey = tuple[Path, Head, str, tuple[str, ...]]


@dataclass(slots=True)
class KnownImage:
    """A checkpoint as it was last seen."""

    key: ModelKey
    fingerprint: str
    layout: Layout
    #: The tokens that end a generation.
    stop_ids: tuple[int, ...]
    checked_s: float

    @property
    def image_id(self) -> str:
        path, head, dtype, _ = self.key
        return f"{path}:{head}:{dtype or 'as-is'}:{self.fingerprint}"


@dataclass(slots=True)
class _Held:
    """An image in shared memory; the descriptor keeps it alive even if the processes that map it die."""

    reference: ImageRef
    descriptor: int
    reading: asyncio.Task[None]
    users: int = 0


class HostImages:
    """Every image of this node. Bytes in all stay within ``host_bytes``; images in use are never dropped."""

    def __init__(
        self, settings: ModelSettings, tokenizer_process: ModelProcess, on_drop: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._tokenizer_process = tokenizer_process
        self._on_drop = on_drop
        self.bound_bytes = host_bytes(settings)
        self._known: dict[ModelKey, KnownImage] = {}
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._changed = asyncio.Condition()
        self.reads = 0

    @property
    def held_bytes(self) -> int:
        return sum(held.reference.layout.size_bytes for held in self._held.values())

    def ids(self) -> list[str]:
        return list(self._held)

    async def look(self, key: ModelKey) -> KnownImage:
        """Return the checkpoint, inspected again if its files changed; raises InvalidConfig or Unsupported."""
        known = self._known.get(key)
        if known is not None and time.monotonic() - known.checked_s < self._settings.recheck_s:
            return known
        current = await asyncio.to_thread(fingerprint, key[0]) if known is not None else ""
        if known is not None and current == known.fingerprint:
            known.checked_s = time.monotonic()
            return known
        path, head, dtype, ignore = key
        if known is not None:
            _LOG.warning("a checkpoint was replaced on disk: its new weights are served from now on", path=str(path))
        entry = (
            await ask_tokenizer(self._tokenizer_process, Inspect(path=path, head=head, dtype=dtype, ignore=ignore))
        ).value
        assert isinstance(entry, Inspection)
        if entry.layout.size_bytes > self.bound_bytes:
            raise InvalidConfig(
                f"{path}: the model takes {entry.layout.size_bytes} bytes of host memory, more than the bound of "
                f"{self.bound_bytes}; raise models.host_memory",
                component=_COMPONENT,
            )
        created = KnownImage(key, entry.fingerprint, entry.layout, entry.stop_ids, time.monotonic())
        self._known[key] = created
        return created

    @asynccontextmanager
    async def hold(self, known: KnownImage) -> AsyncIterator[ImageRef]:
        """Yield the image, read in if it is not there; it stays for the length of the block."""
        held = await self._acquire(known)
        try:
            yield held.reference
        finally:
            await self._release(held)

    async def close(self) -> None:
        """Free every image; idempotent."""
        held, self._held = list(self._held.values()), OrderedDict()
        for image in held:
            image.reading.cancel()
        await asyncio.gather(*(image.reading for image in held), return_exceptions=True)
        for image in held:
            os.close(image.descriptor)

    async def _acquire(self, known: KnownImage) -> _Held:
        async with self._changed:
            held = self._held.get(known.image_id)
            if held is None:
                await self._make_room(known.layout.size_bytes)
                # Another action may have begun to read it while we waited for room.
                held = self._held.get(known.image_id) or self._reserve(known)
            held.users += 1
            self._held.move_to_end(known.image_id)
        try:
            # Reading goes on when the action that began it is cancelled: others may wait for the same image.
            await asyncio.shield(held.reading)
        except BaseException:
            await self._release(held)
            raise
        return held

    async def _release(self, held: _Held) -> None:
        async with self._changed:
            held.users -= 1
            self._changed.notify_all()

    async def _make_room(self, size_bytes: int) -> None:
        """Drop idle images, least recently used first, and wait for busy ones if that is not enough."""
        while self.held_bytes + size_bytes > self.bound_bytes:
            idle = next((image_id for image_id, held in self._held.items() if not held.users), None)
            if idle is None:
                await self._changed.wait()
            else:
                os.close(self._held.pop(idle).descriptor)
                self._on_drop(idle)

    def _reserve(self, known: KnownImage) -> _Held:
        """Count the image's bytes at once and begin to read it."""
        descriptor = os.memfd_create("tangram-model", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, known.layout.size_bytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        reference = ImageRef(id=known.image_id, path=path, layout=known.layout)
        reading = asyncio.create_task(self._read(known, reference, descriptor), name=f"read {known.key[0]}")
        held = _Held(reference, descriptor, reading)
        self._held[known.image_id] = held
        return held

    async def _read(self, known: KnownImage, reference: ImageRef, descriptor: int) -> None:
        path, layout = known.key[0], known.layout
        try:
            await ask_tokenizer(
                self._tokenizer_process, Fill(path=path, layout=layout, image_path=reference.path, threads=READ_THREADS)
            )
            if await asyncio.to_thread(fingerprint, path) != known.fingerprint:
                raise InvalidConfig(f"{path} was replaced while it was being read; try again", component=_COMPONENT)
            self.reads += 1
        except BaseException:
            self._known.pop(known.key, None)
            if self._held.pop(reference.id, None) is not None:
                os.close(descriptor)
            raise


_ERRORS: dict[str, type[CodedError]] = {error.__name__: error for error in (InvalidConfig, Unsupported, InvalidInput)}


async def ask_tokenizer(tokenizer_process: ModelProcess, message: object) -> Done:
    """Ask, and raise the tokenizer process's refusal as the typed error that it was there."""
    try:
        return await tokenizer_process.ask(message)
    except RequestRefused as refused:
        failed = refused.failed
        error = _ERRORS.get(failed.kind, InvalidConfig)
        raise error(failed.message, component="model.tokenizer_process") from refused


_TOKENS_COMPONENT = "model.tokens"

#: One of these holds the vocabulary. Without any, transformers makes an empty tokenizer and says nothing.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Tokens:
    """One checkpoint's tokenizer; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        if not any((path / name).is_file() for name in _VOCABULARIES):
            raise InvalidInput(
                f"{path} holds no tokenizer; add tokenizer.json, or send token_ids", component=_TOKENS_COMPONENT
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(
                f"{path} holds no usable tokenizer ({error}); add tokenizer.json, or send token_ids",
                component=_TOKENS_COMPONENT,
            ) from error
        self.stop_ids = stop_ids(path, self._tokenizer.eos_token_id)
        self._begin: int | None = self._tokenizer.bos_token_id
        # Fast tokenizers keep truncation as state.
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], limit: int, cut: str) -> EncodedText:
        """Return the ids of each text, special tokens included.

        One that is longer than ``limit`` is cut on a side, ``left`` or ``right``, or raises InvalidInput without one.
        """
        with self._lock:
            ids = [tuple(row) for row in self._tokenizer(list(texts), verbose=False)["input_ids"]]
            long = _overlong(ids, limit, cut)
            if long:
                self._tokenizer.truncation_side = cut
                rows = self._tokenizer([texts[i] for i in long], truncation=True, max_length=limit)["input_ids"]
                for index, row in zip(long, rows, strict=True):
                    ids[index] = tuple(row)
        return EncodedText(ids=tuple(ids), truncated=tuple(long), stop_ids=self.stop_ids)

    def encode_chats(
        self, conversations: Sequence[Sequence[Mapping[str, object]]], limit: int, cut: str, continued: bool
    ) -> EncodedText:
        """Return the ids of each conversation by its template; ``continued`` adds the prompt for the next answer."""
        if not self._tokenizer.chat_template:
            raise InvalidInput("the checkpoint has no chat template: send texts", component=_TOKENS_COMPONENT)
        ids = []
        for conversation in conversations:
            try:
                row = self._tokenizer.apply_chat_template(
                    [dict(message) for message in conversation], add_generation_prompt=continued, return_dict=False
                )
            except Exception as error:  # a template is a program of the checkpoint: it may raise anything
                raise InvalidInput(
                    f"the chat template refuses the conversation: {error}", component=_TOKENS_COMPONENT
                ) from error
            ids.append(tuple(row))
        long = _overlong(ids, limit, cut)
        for index in long:
            ids[index] = _shortened(ids[index], limit, cut, self._begin)
        return EncodedText(ids=tuple(ids), truncated=tuple(long), stop_ids=self.stop_ids)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        with self._lock:
            return [self._tokenizer.decode(list(row), skip_special_tokens=True) for row in ids]


def stop_ids(path: Path, tokenizer_end: int | None = None) -> tuple[int, ...]:
    """The tokens that end a generation: generation_config.json, else config.json, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        try:
            entry = json.loads(read_small(path / name)).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if entry is not None:
            return tuple(entry) if isinstance(entry, list) else (int(entry),)
    return () if tokenizer_end is None else (tokenizer_end,)


def check_ids(ids: Sequence[Sequence[int]], limit: int, cut: str, begin: int | None = None) -> EncodedText:
    """The same bounds for an input that came as ids; ``begin`` is the token with which a sequence begins, if any."""
    rows = [tuple(row) for row in ids]
    long = _overlong(rows, limit, cut)
    for index in long:
        rows[index] = _shortened(rows[index], limit, cut, begin)
    return EncodedText(ids=tuple(rows), truncated=tuple(long), stop_ids=())


def _shortened(row: tuple[int, ...], limit: int, cut: str, begin: int | None) -> tuple[int, ...]:
    """Return a row without what is too much; the token with which it begins stays, as tokenizers keep it of texts."""
    kept = 1 if row[0] == begin else 0
    return row[:limit] if cut == "right" else (*row[:kept], *row[len(row) - limit + kept :])


def _overlong(ids: Sequence[Sequence[int]], limit: int, cut: str) -> list[int]:
    """Return the indices of rows beyond the limit; raises InvalidInput at the first if they may not be cut."""
    long = [index for index, row in enumerate(ids) if len(row) > limit]
    if long and not cut:
        raise InvalidInput(
            f"sequence {long[0]} has {len(ids[long[0]])} tokens, more than {limit}; "
            "shorten it or set model.overlong: truncate",
            component=_TOKENS_COMPONENT,
            detail={"path": f"$[{long[0]}]"},
        )
    return long
