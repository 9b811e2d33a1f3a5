"""What a client may do with functions: see, register, apply, remove."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tangram.client import requests
from tangram.client.handlers import captured, definition_of
from tangram.client.requests import ApiRequest
from tangram.types import ConfigDiff, FunctionInfo

_T = TypeVar("_T")


class AsyncFunctions(ABC):
    """The part of a client that speaks of functions."""

    @abstractmethod
    async def _send(self, request: ApiRequest[_T]) -> _T:
        """Send, and send again where that is safe."""

    async def functions(self) -> Sequence[FunctionInfo]:
        """Return every registered function."""
        return (await self._send(requests.list_functions())).functions

    async def function(self, name: str) -> FunctionInfo:
        """Return one registered function, with what was learned of it; raises NotFoundError."""
        return await self._send(requests.get_function(name))

    async def remove_function(self, name: str) -> ConfigDiff:
        """Remove a function that was applied; raises NotFoundError, and ConflictError for one of the server's files."""
        return await self._send(requests.remove_function(name))

    async def apply(
        self,
        files: Mapping[str, str] | None = None,
        *,
        dry_run: bool = False,
        prune: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> ConfigDiff:
        """Apply configuration files (path -> text), or the server's own files read again; return the differences.

        What they do not name stays, unless ``prune`` removes it. ``variables`` are what ``${NAME}`` stands for in
        ``files``.
        """
        return await self._send(requests.apply(files, dry_run, prune, variables))

    async def put_function(
        self,
        name: str,
        definition: Mapping[str, Any],
        *,
        sources: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> ConfigDiff:
        """Add or change one function, with the keys of its YAML; return the differences. Needs the admin token.

        ``sources`` are the files of a handler, path -> text; they are kept by the gateway, as is the function, until
        it is removed. Raises InvalidConfigError, and ConflictError for a function of the server's own files.
        """
        return await self._send(requests.put_function(name, definition, sources or {}, dry_run))

    async def register(
        self, handler: Callable[..., Any], name: str | None = None, *, dry_run: bool = False, **definition: Any
    ) -> ConfigDiff:
        """Register a Python function of this script as a handler, and return the differences. Needs the admin token.

        Sent are the function and what it names of its module's top level (`tangram.client.handlers`), no more.
        ``definition`` has the keys of a handler in YAML, over those of its decorator. Raises InvalidInputError if it
        cannot stand by itself, else as `put_function`.
        """
        sent = captured(handler)
        keys = {**definition_of(handler, definition), "runtime": "handler", "handler": sent.place}
        return await self.put_function(name or handler.__name__, keys, sources=sent.sources, dry_run=dry_run)
