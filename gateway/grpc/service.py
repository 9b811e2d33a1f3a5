"""The service ``tangram.v1.Gateway``: the same operations as HTTP, the same errors."""

from __future__ import annotations

from gateway.grpc.administration import AdministrationCalls
from gateway.grpc.files import FileCalls
from gateway.grpc.generated.tangram_grpc import GatewayBase
from gateway.grpc.invocations import InvocationCalls
from gateway.grpc.trajectories import TrajectoryCalls


class GatewayService(InvocationCalls, TrajectoryCalls, FileCalls, AdministrationCalls, GatewayBase):
    """One method for each rpc, by what they are about."""
