"""The requests that speak of machines."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from tangram.client.answers import reader
from tangram.client.requests import JSON_BODY, ApiRequest, get
from tangram.types.nodes import DrainWanted, NodeStatus, NodeStatusList, NodeTicket, TicketWanted


def list_nodes() -> ApiRequest[NodeStatusList]:
    return get("/v1/nodes", NodeStatusList)


def drain_node(name: str, why: str = "") -> ApiRequest[NodeStatus]:
    """Return the request that has a machine take no new work."""
    content = msgspec.json.encode(DrainWanted(why=why) if why else DrainWanted())
    path = f"/v1/nodes/{quote(name, safe='')}/drain"
    return ApiRequest(method="POST", path=path, read=reader(NodeStatus), headers=JSON_BODY, content=content)


def issue_ticket(name: str) -> ApiRequest[NodeTicket]:
    """Return the request for what admits a machine."""
    content = msgspec.json.encode(TicketWanted(name=name))
    return ApiRequest(
        method="POST", path="/v1/node-tickets", read=reader(NodeTicket), headers=JSON_BODY, content=content
    )
