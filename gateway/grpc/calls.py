"""What every call of the service has in common: the services behind it, and how its failure is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import clear_frames
from typing import Any

import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gateway.grpc.messages import status_error, trailers
from gateway.services import Services
from manager.errors import CodedError, exhaustion


class ServiceCalls:
    """A part of the service."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._log = structlog.get_logger("gateway.grpc")

    @asynccontextmanager
    async def _answering(self, stream: Stream[Any, Any]) -> AsyncIterator[None]:
        """Turn what fails into a status with its code in the trailers. Any: of whatever messages."""
        try:
            yield
        except CodedError as error:
            self._services.metrics.refused("grpc", error.code)
            clear_frames(error.__traceback__)  # as in `gateway.http.app`
            status = status_error(error)
            await stream.send_trailing_metadata(
                status=status.status, status_message=status.message, metadata=trailers(error)
            )
        except (GRPCError, TimeoutError):
            raise
        except Exception as error:
            if short := exhaustion(error, "grpc"):
                raise status_error(short) from error
            self._log.exception("a call failed", error=str(error))
            self._services.metrics.refused("grpc", "internal")
            raise GRPCError(Status.INTERNAL, "internal: a fault of the gateway: its log tells more") from error
