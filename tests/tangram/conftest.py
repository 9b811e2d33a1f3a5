"""A gateway on real sockets for what speaks to one."""

from __future__ import annotations

from tests.gateway.conftest import gateway

__all__ = ["gateway"]
