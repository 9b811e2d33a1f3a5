"""The relay: connections to the loopback of a sandbox, over the standard streams of one process.

It runs inside, as the sandbox's user. Standard library only, one file, Python 3.8 on. It is frozen with the servers
that it speaks to: what it has not passed on lies in the kernel's buffers until all go on together.

A frame is ``length:u32 kind:u8 connection:u32`` in network order, then ``length`` bytes. Each side may send so many
bytes of a connection as `WINDOW_BYTES` and the CREDIT that came since. END ends one direction, CLOSE the connection,
with a reason where it could not be made or was broken. The gateway chooses the numbers. WORK asks for the processor
time of all else in the sandbox, in ticks of the kernel.
"""

# pathlib and contextlib would cost every relay their import.
# ruff: noqa: PTH123, PTH208, SIM105
from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys

MYPY = False
if MYPY:
    from collections.abc import Iterator

HEADER = struct.Struct("!IBI")
OPEN, DATA, END, CLOSE, CREDIT, WORK = range(1, 7)
NUMBER = struct.Struct("!I")
WINDOW_BYTES = 256 * 2**10
CHUNK_BYTES = 64 * 2**10
FRAME_MAX_BYTES = 1 * 2**20
CONNECTIONS_MAX = 1024
#: Where servers listen that listen on loopback, in this order.
PLACES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class LoopbackConnection:
    """One connection to a server inside."""

    def __init__(self, relay: LoopbackRelay, number: int, port: int) -> None:
        self.relay = relay
        self.number = number
        self.port = port
        self.places = list(PLACES)
        self.refusal = 0  # of the first of them
        self.sock: socket.socket | None = None
        self.connected = False
        #: What the server has not taken yet, and whether nothing follows.
        self.pending = bytearray()
        self.input_ended = self.shut = False
        #: Bytes that the gateway has room for, and whether the server says no more.
        self.room = WINDOW_BYTES
        self.output_ended = False

    def connect(self) -> None:
        """Begin to connect to the next place; none is left if all have refused."""
        family, host = self.places.pop(0)
        try:
            self.sock = sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.relay.watch(self, select.EPOLLOUT)
            number = sock.connect_ex((host, self.port))
        except OSError as error:
            number = error.errno or errno.EIO
        if number not in (0, errno.EINPROGRESS):
            self.refused(number)

    def refused(self, number: int) -> None:
        self.drop()
        self.refusal = self.refusal or number
        if self.places:
            self.connect()
        else:
            self.close(os.strerror(self.refusal))

    def drop(self) -> None:
        if self.sock is not None:
            self.relay.forget(self.sock)
            self.sock.close()
            self.sock = None

    def close(self, reason: str = "") -> None:
        self.drop()
        if self.relay.connections.pop(self.number, None) is not None:
            self.relay.send(CLOSE, self.number, reason.encode())

    def events(self) -> int:
        if not self.connected:
            return select.EPOLLOUT
        reading = select.EPOLLIN if self.room > 0 and not self.output_ended else 0
        return reading | (select.EPOLLOUT if self.pending else 0)

    def on_ready(self, events: int) -> None:
        sock = self.sock
        if sock is None:
            return
        try:
            if not self.connected:
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    self.refused(number)
                    return
                self.connected = True
                self.relay.send(OPEN, self.number)
            self.push(sock)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and self.room > 0:
                self.pull(sock)
        except OSError as error:
            self.close(os.strerror(error.errno or errno.EIO))
            return
        if self.output_ended and self.shut:
            self.close()
        elif self.events():
            self.relay.watch(self, self.events())
        else:  # else a server that has hung up would be told again and again
            self.relay.forget(sock)

    def push(self, sock: socket.socket) -> None:
        """Pass on to the server what it takes; raises OSError."""
        try:
            while self.pending:
                taken = sock.send(memoryview(self.pending)[:CHUNK_BYTES])
                del self.pending[:taken]
                self.relay.send(CREDIT, self.number, NUMBER.pack(taken))
        except BlockingIOError:
            return
        if self.input_ended and not self.shut:
            self.shut = True
            sock.shutdown(socket.SHUT_WR)

    def pull(self, sock: socket.socket) -> None:
        """Pass on one piece of what the server says; raises OSError."""
        if self.output_ended:
            return
        try:
            data = sock.recv(min(CHUNK_BYTES, self.room))
        except BlockingIOError:
            return
        self.room -= len(data)
        self.output_ended = not data
        self.relay.send(DATA if data else END, self.number, data)


class LoopbackRelay:
    """All connections, and the gateway's frames."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self.connections: dict[int, LoopbackConnection] = {}
        self.incoming = bytearray()
        self.epoll = select.epoll()
        self.watched: dict[int, LoopbackConnection] = {}
        self.epoll.register(source, select.EPOLLIN)

    def watch(self, connection: LoopbackConnection, events: int) -> None:
        assert connection.sock is not None
        fd = connection.sock.fileno()
        if fd in self.watched:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
            self.watched[fd] = connection

    def forget(self, sock: socket.socket) -> None:
        if self.watched.pop(sock.fileno(), None) is not None:
            self.epoll.unregister(sock.fileno())

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Send a frame, waiting for the gateway if it does not read."""
        view = memoryview(HEADER.pack(len(payload), kind, number) + payload)
        while view:
            view = view[os.write(self.sink, view) :]

    def serve(self) -> None:
        """Serve until the gateway hangs up."""
        while True:
            for fd, events in self.epoll.poll():
                if fd != self.source:
                    connection = self.watched.get(fd)
                    if connection is not None:
                        connection.on_ready(events)
                    continue
                data = os.read(fd, CHUNK_BYTES)
                if not data:
                    return
                self.incoming += data
                for kind, number, payload in self.frames():
                    self.obey(kind, number, payload)

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        while len(self.incoming) >= HEADER.size:
            length, kind, number = HEADER.unpack_from(self.incoming)
            end = HEADER.size + length
            if len(self.incoming) < end:
                return
            payload = bytes(self.incoming[HEADER.size : end])
            del self.incoming[:end]
            yield kind, number, payload

    def obey(self, kind: int, number: int, payload: bytes) -> None:
        connection = self.connections.get(number)
        if kind == WORK:
            self.send(WORK, number, NUMBER.pack(work_ticks() % 2**32))
        elif kind == OPEN:
            if len(self.connections) >= CONNECTIONS_MAX:
                self.send(CLOSE, number, b"too many connections")
                return
            connection = self.connections[number] = LoopbackConnection(self, number, NUMBER.unpack(payload)[0])
            connection.connect()
        elif connection is None:
            return
        elif kind == CLOSE:
            connection.drop()
            del self.connections[number]
        else:
            if kind == DATA:
                connection.pending += payload
            elif kind == END:
                connection.input_ended = True
            elif kind == CREDIT:
                connection.room += NUMBER.unpack(payload)[0]
            if connection.connected:
                connection.on_ready(0)


def work_ticks() -> int:
    """Return the processor time of the processes of this sandbox that live, but for ours and the runner's."""
    ours, runner = os.getpid(), os.getppid()
    table: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            table[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ticks = 0
    for pid, (parent, used) in table.items():
        above = pid
        while above in table and above != runner:
            above = table[above][0]
        if above == runner and pid not in (ours, runner) and parent != ours:
            ticks += used
    return ticks


if __name__ == "__main__":
    try:
        LoopbackRelay(sys.stdin.fileno(), sys.stdout.fileno()).serve()
    except (BrokenPipeError, KeyboardInterrupt):
        pass
