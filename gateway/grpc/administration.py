"""The gateway itself: functions, configuration, images, machines, and how it stands."""

from __future__ import annotations

from typing import Any

from grpclib.server import Stream
from msgspec.structs import replace as replaced

from gateway import wire
from gateway.grpc.calls import ServiceCalls
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.messages import function_message, given, node_message, read_request, read_upload, seconds
from gateway.grpc.pieces import portions
from gateway.operations.images import list_images, pull_images
from gateway.operations.lists import list_functions, list_queue
from gateway.operations.state import READY, get_function, get_readiness, get_resources
from tangram.types import ImageList, ImagesWanted
from tangram.types.nodes import DrainWanted, TicketWanted
from tangram.types.requests import QueueQuery


class AdministrationCalls(ServiceCalls):
    """The methods on what the gateway has, and on how it stands."""

    async def ListFunctions(  # noqa: N802
        self, stream: Stream[pb.ListFunctionsRequest, pb.ListFunctionsResponse]
    ) -> None:
        async with self._answering(stream):
            await read_request(stream)
            functions = [function_message(each) for each in list_functions(self._services)]
            await stream.send_message(pb.ListFunctionsResponse(functions=functions))

    async def GetFunction(self, stream: Stream[pb.GetFunctionRequest, pb.Function]) -> None:  # noqa: N802
        async with self._answering(stream):
            found = get_function(self._services, (await read_request(stream)).name)
            await stream.send_message(function_message(found))

    async def PutFunction(self, stream: Stream[pb.PutFunctionRequest, pb.ApplyConfigResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            name = wire.name(request.name, "function")
            differences = await self._services.put(name, read_upload(request), request.dry_run)
            await stream.send_message(pb.ApplyConfigResponse(json=wire.encode(differences)))

    async def RemoveFunction(  # noqa: N802
        self, stream: Stream[pb.RemoveFunctionRequest, pb.ApplyConfigResponse]
    ) -> None:
        async with self._answering(stream):
            name = wire.name((await read_request(stream)).name, "function")
            await stream.send_message(pb.ApplyConfigResponse(json=wire.encode(await self._services.remove(name))))

    async def ApplyConfig(self, stream: Stream[pb.ApplyConfigRequest, pb.ApplyConfigResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            differences = await self._services.configure(request.document, request.dry_run, request.prune)
            await stream.send_message(pb.ApplyConfigResponse(json=wire.encode(differences)))

    async def ListImages(self, stream: Stream[pb.ListImagesRequest, pb.ImageList]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            await _send_images(stream, await list_images(self._services))

    async def PullImages(self, stream: Stream[pb.PullImagesRequest, pb.ImageList]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            wanted = wire.read({"images": list(request.images)}, ImagesWanted).images
            wait_s = min(seconds(request.wait_s, "wait_s") or 0.0, self._services.bounds.wait_max_s)
            await _send_images(stream, await pull_images(self._services, wanted, wait_s))

    async def ListNodes(self, stream: Stream[pb.ListNodesRequest, pb.ListNodesResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            found = self._services.machines.info()
            nodes = [node_message(each) for each in found.nodes]
            await stream.send_message(pb.ListNodesResponse(nodes=nodes, json=wire.encode(found)))

    async def DrainNode(self, stream: Stream[pb.DrainNodeRequest, pb.Node]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "why"), DrainWanted)
            drained = self._services.machines.drain(wire.name(request.node, "node"), asked.why)
            await stream.send_message(node_message(drained))

    async def IssueTicket(self, stream: Stream[pb.IssueTicketRequest, pb.NodeTicket]) -> None:  # noqa: N802
        async with self._answering(stream):
            asked = wire.read({"name": (await read_request(stream)).node}, TicketWanted)
            issued = self._services.machines.ticket(asked.name)
            told = pb.NodeTicket(
                node=issued.name,
                ticket=issued.ticket,
                expires_in_s=issued.expires_in_s,
                gateway=issued.gateway,
                fingerprint=issued.fingerprint,
            )
            await stream.send_message(told)

    async def ListQueue(self, stream: Stream[pb.ListQueueRequest, pb.QueuePage]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "cursor", "limit"), QueueQuery)
            while True:
                page = list_queue(self._services, asked)
                await stream.send_message(pb.QueuePage(json=wire.encode(page), next_cursor=page.next_cursor or ""))
                if page.next_cursor is None or not request.all:
                    return
                asked = replaced(asked, cursor=page.next_cursor)

    async def GetResources(self, stream: Stream[pb.GetResourcesRequest, pb.Resources]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            await stream.send_message(pb.Resources(json=wire.encode(get_resources(self._services))))

    async def GetActivity(self, stream: Stream[pb.GetActivityRequest, pb.Activity]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            await stream.send_message(pb.Activity(json=wire.encode(self._services.activity.whole_info())))

    async def GetReadiness(self, stream: Stream[pb.GetReadinessRequest, pb.Readiness]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            found = get_readiness(self._services)
            told = pb.Readiness(ready=found.status == READY, status=found.status, json=wire.encode(found))
            await stream.send_message(told)


async def _send_images(stream: Stream[Any, pb.ImageList], found: ImageList) -> None:
    """Send them. Any: whatever asked for them."""
    images = (pb.Image(image=each.image, state=each.state, json=wire.encode(each)) for each in found.images)
    for portion, _ in portions(images):
        await stream.send_message(pb.ImageList(images=portion, bound_bytes=found.bound_bytes))
