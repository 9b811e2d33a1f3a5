"""What the gateway's side of a node asks of it beside executing actions, over as many links as it takes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass

import structlog

from manager.action import Chunk
from manager.errors import ActionFailed, CodedError, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes.node import wire
from runtimes.node.errors import error_of
from runtimes.node.link import NodeLink
from runtimes.node.requests import SERVED
from runtimes.node.wire import COMPONENT

logger = structlog.get_logger("node.remote")

#: Functions that a link keeps in mind as defined; the agent remembers more of them.
DEFINED_MAX = 1024


@dataclass(slots=True, eq=False)
class _Asked:
    """One request that waits for its answer."""

    request: wire.NodeRequest
    function: FunctionSpec | None
    answer: asyncio.Future[bool]


class RemoteRequests:
    """The requests to one node; each is asked again on every new link until it is answered: all are idempotent."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._link: NodeLink | None = None
        #: Functions of this link, the youngest last; and how functions travel, by identity (never changed in place).
        self._defined: dict[str, None] = {}
        self._digests: dict[int, tuple[FunctionSpec, str, bytes]] = {}
        self._asked: dict[int, _Asked] = {}
        #: Random, so that no number is one of a gateway before.
        self._number = secrets.randbits(48)

    # --- the link

    def attach(self, link: NodeLink) -> None:
        """Ask over this link from now on."""
        self._link, self._defined = link, {}

    def ask_again(self) -> None:
        """Ask all that was not answered."""
        for asked in list(self._asked.values()):
            self._ask(asked)

    def detach(self) -> None:
        """There is no link; everything waits."""
        self._link = None

    def lost(self, why: str) -> None:
        """No answer comes any more: whoever waits is told ActionFailed(node_lost)."""
        for asked in list(self._asked.values()):
            if not asked.answer.done():
                message = f"node {self._node}: {why}"
                asked.answer.set_exception(ActionFailed(Reason.NODE_LOST, message, component=COMPONENT))

    def close(self) -> None:
        """Wait for nothing any more."""
        for asked in list(self._asked.values()):
            asked.answer.cancel()

    # --- functions

    def check(self, function: FunctionSpec) -> None:
        """Raise Unsupported for a function of a kind that nodes do not execute."""
        if function.runtime not in SERVED:
            told = f"function {function.name!r}: {function.runtime} functions run on the gateway's own machine alone"
            raise Unsupported(told, component=COMPONENT)

    def digest(self, function: FunctionSpec) -> str:
        """Return the name under which a function travels; raises Unsupported for one of a kind that cannot."""
        return self._travelling(function)[0]

    def define(self, function: FunctionSpec) -> str:
        """Tell the node of the function, unless this link has; return and raise as `digest` does."""
        digest, data = self._travelling(function)
        if digest in self._defined or self._link is None:
            return digest
        while len(self._defined) >= DEFINED_MAX:
            del self._defined[next(iter(self._defined))]
        self._defined[digest] = None
        self._link.send(wire.DefineFunction(digest, data))
        return digest

    def _travelling(self, function: FunctionSpec) -> tuple[str, bytes]:
        known = self._digests.get(id(function))
        if known is not None and known[0] is function:
            return known[1], known[2]
        self.check(function)
        data = wire.function_bytes(function)
        digest = hashlib.sha256(data).hexdigest()[:32]
        while len(self._digests) >= DEFINED_MAX:
            del self._digests[next(iter(self._digests))]
        self._digests[id(function)] = (function, digest, data)
        return digest, data

    # --- questions

    async def answered(
        self,
        verb: str,
        name: str,
        *,
        task: str = "",
        function: FunctionSpec | None = None,
        body: bytes = b"",
        chunk: Chunk | None = None,
    ) -> bool:
        """Ask, and wait for the answer; raises what the node says, ActionFailed(node_lost) if it is given up."""
        asked = self._begin(self._request(verb, name, task, function, body, chunk), function)
        try:
            return await asked.answer
        finally:
            self._asked.pop(asked.request.number, None)

    async def replicated(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        """Ask for a copy of a service on a chunk; return whether it is there now."""
        try:
            return await self.answered("replicate", service, function=function, chunk=chunk)
        except CodedError as error:
            logger.warning("a service was not copied", node=self._node, service=service, why=error.message)
            return False

    def remember(self, verb: str, name: str, *, body: bytes = b"") -> asyncio.Future[bool]:
        """Ask for something now, or as soon as there is a link; a failure is logged."""
        asked = self._begin(self._request(verb, name, body=body), None)
        asked.answer.add_done_callback(lambda answer: self._done(asked, answer))
        return asked.answer

    def take(self, answer: wire.NodeAnswer) -> None:
        """The node has answered."""
        asked = self._asked.get(answer.number)
        if asked is None or asked.answer.done():
            return
        if answer.error is None:
            asked.answer.set_result(answer.done)
        else:
            asked.answer.set_exception(error_of(answer.error))

    def _done(self, asked: _Asked, answer: asyncio.Future[bool]) -> None:
        self._asked.pop(asked.request.number, None)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            logger.warning("a request failed", node=self._node, verb=asked.request.verb, why=str(error))

    def _request(
        self,
        verb: str,
        name: str,
        task: str = "",
        function: FunctionSpec | None = None,
        body: bytes = b"",
        chunk: Chunk | None = None,
    ) -> wire.NodeRequest:
        self._number += 1
        digest = "" if function is None else self.digest(function)
        return wire.NodeRequest(self._number, verb, name, task, digest, body, chunk)

    def _begin(self, request: wire.NodeRequest, function: FunctionSpec | None) -> _Asked:
        asked = _Asked(request, function, self._loop.create_future())
        self._asked[request.number] = asked
        self._ask(asked)
        return asked

    def _ask(self, asked: _Asked) -> None:
        if self._link is not None:
            if asked.function is not None:
                self.define(asked.function)
            self._link.send(asked.request)
