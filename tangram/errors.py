"""What can go wrong, as exceptions: one class for each stable code, all of them safe to pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tangram.types import UNSET, Invocation, Problem, Reason


class TangramError(Exception):
    """A request was refused, or could not be made. The base of everything that this package raises on purpose.

    ``code`` is stable and the same on HTTP, gRPC and in the CLI; ``component`` says who refused.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        component: str = "client",
        invocation_id: str | None = None,
        retry_after_s: float | None = None,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.component = component
        #: The invocation that the error is about, if there is one.
        self.invocation_id = invocation_id
        #: Seconds after which the same request may be accepted, if the gateway named them.
        self.retry_after_s = retry_after_s
        #: More, by name: ``path`` is the JSON path at fault in an input.
        self.detail: Mapping[str, object] = detail or {}

    def __reduce__(self) -> tuple[object, ...]:
        # Not by calling the class: subclasses have arguments of their own, and an error that cannot be rebuilt
        # kills the reader of a worker pool's results, so that the pool waits for ever.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[TangramError], arguments: tuple[object, ...], state: Mapping[str, object]) -> TangramError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class InvalidInputError(TangramError):
    """The input does not fit the function; ``detail["path"]`` is the JSON path at fault."""

    code = "invalid_input"


class InvalidConfigError(TangramError):
    """A configuration or a setting of the client cannot be used; the message names it and the remedy."""

    code = "invalid_config"


class NotFoundError(TangramError):
    """There is no such function, invocation, trajectory or file."""

    code = "not_found"


class ConflictError(TangramError):
    """The thing is in a state that does not allow the request."""

    code = "conflict"


class TrajectoryEndedError(TangramError):
    """The trajectory of this handle has ended: it was closed, ended by somebody else, or idle for too long."""

    code = "trajectory_ended"


class SnapshotLostError(TangramError):
    """The node that has the snapshot is gone, and with it the files."""

    code = "snapshot_lost"


class KeyReusedError(TangramError):
    """An idempotency key came again with another input."""

    code = "idempotency_key_reused"


class TooLargeError(TangramError):
    """A body, file or batch exceeds its configured bound."""

    code = "too_large"


class TooSlowError(TangramError):
    """The body of the request did not reach the gateway in time."""

    code = "too_slow"


class UnauthorizedError(TangramError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"


class ForbiddenError(TangramError):
    """The token does not allow this."""

    code = "forbidden"


class UnsatisfiableError(TangramError):
    """No node could ever satisfy this cost."""

    code = "unsatisfiable"


class QuotaExceededError(TangramError):
    """A bound of the caller, the task or the function is reached."""

    code = "quota_exceeded"


class CapacityExceededError(TangramError):
    """The gateway as a whole is full."""

    code = "capacity_exceeded"


class FunctionUnavailableError(TangramError):
    """The function cannot be made ready: an image, a checkpoint or a package is missing. Nothing was run."""

    code = "function_unavailable"


class DrainingError(TangramError):
    """The gateway is shutting down and takes no new work."""

    code = "draining"


class StorageUnavailableError(TangramError):
    """The gateway cannot write its record: the work was not accepted."""

    code = "storage_unavailable"


class UnsupportedError(TangramError):
    """This sandbox, device or model cannot do what was asked."""

    code = "unsupported"


class MethodNotAllowedError(TangramError):
    """The path exists, but not for this method: the gateway is of another version than the client."""

    code = "method_not_allowed"


class PortFailedError(TangramError):
    """The server on a port of a sandbox cannot be reached, or does not speak what it is spoken to in."""

    code = "port_failed"


class ConnectionFailed(TangramError):
    """The gateway cannot be reached, or went away in the middle of an answer.

    ``detail["sent"]`` says whether the request may have arrived.
    """

    code = "connection_failed"


class UnreadableAnswerError(TangramError):
    """Something answered that is no gateway, or one whose answers this version of the client cannot read."""

    code = "unreadable_answer"


class InvocationFailed(TangramError):
    """An invocation ended without success; ``invocation`` tells its reason, component and partial result."""

    code = "action_failed"

    def __init__(self, invocation: Invocation) -> None:
        super().__init__(
            f"{invocation.function} {invocation.id} {invocation.state} ({invocation.reason}): {invocation.message}",
            component=invocation.component,
            invocation_id=invocation.id,
        )
        self.invocation = invocation
        self.reason: Reason | None = invocation.reason


class MapFailed(TangramError):
    """Some calls of a ``map`` were refused or lost; ``results`` has every call's end, in the order of the inputs."""

    code = "map_failed"

    def __init__(self, results: Sequence[Invocation | TangramError]) -> None:
        self.results: tuple[Invocation | TangramError, ...] = tuple(results)
        failures = self.failures
        first = next(iter(failures.values()))
        super().__init__(
            f"{len(failures)} of {len(self.results)} calls failed, the first with {first.code}: {first.message}",
            component=first.component,
            invocation_id=first.invocation_id,
        )

    @property
    def failures(self) -> Mapping[int, TangramError]:
        """The errors, by the index of their input."""
        return {index: each for index, each in enumerate(self.results) if isinstance(each, TangramError)}


def _subclasses(kind: type[TangramError]) -> list[type[TangramError]]:
    return [subclass for each in kind.__subclasses__() for subclass in (each, *_subclasses(each))]


#: Which class a code of the gateway is raised as; what is missing is raised as TangramError.
BY_CODE: Mapping[str, type[TangramError]] = {
    kind.code: kind for kind in _subclasses(TangramError) if kind not in (InvocationFailed, MapFailed)
}


def from_problem(problem: Problem, retry_after_s: float | None = None) -> TangramError:
    """Return the exception of a problem body; ``retry_after_s`` is that of its header, for a body that names none."""
    kind = BY_CODE.get(problem.code, TangramError)
    return kind(
        problem.detail,
        component=problem.component,
        invocation_id=problem.invocation_id or None,
        retry_after_s=retry_after_s if problem.retry_after_s in (None, UNSET) else problem.retry_after_s,
        detail=problem.errors or None,
    )
