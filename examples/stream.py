"""Ten calls over one WebSocket, without the client of Tangram (docs/reference/http.md, a stream of calls).

TANGRAM_SERVER=http://127.0.0.1:8080 TANGRAM_TOKEN=$(tangram token) python examples/stream.py
"""

import asyncio
import json
import os
import struct

import msgspec
from websockets.asyncio.client import connect


def frame(kind, *fields):
    body = msgspec.msgpack.encode(fields)
    return struct.pack(">IB", len(body), kind) + body


def frames(message):
    while message:
        length, kind = struct.unpack(">IB", message[:5])
        yield kind, msgspec.msgpack.decode(message[5 : 5 + length])
        message = message[5 + length :]


async def main():
    server, token = os.environ["TANGRAM_SERVER"].replace("http", "ws", 1), os.environ["TANGRAM_TOKEN"]
    headers = {"Authorization": f"Bearer {token}"}
    async with connect(f"{server}/v1/stream", additional_headers=headers, compression=None, max_size=None) as socket:
        inputs = [{"command": f"echo {number}"} for number in range(10)]
        calls = [frame(2, id, "shell", json.dumps(input).encode(), {"task": "a"}) for id, input in enumerate(inputs)]
        await socket.send(b"".join(calls))
        left = set(range(10))
        while left:
            for kind, fields in frames(await socket.recv()):
                if kind == 5:
                    id, status, body = fields[:3]
                    print(id, status, json.loads(body)["result"]["stdout"].strip())
                    left.remove(id)


asyncio.run(main())
