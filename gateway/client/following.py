"""Following a log: records in, lines out, and where to resume when the connection breaks; no I/O."""

from __future__ import annotations

import orjson

from gateway.client.results import LogLine


class Following:
    """The state of one reader of a log, across its connections."""

    def __init__(self, offset: int, attempts_max: int) -> None:
        #: The first record not yet seen.
        self.offset = offset
        #: Whether the end of the log was seen.
        self.ended = False
        self._attempts_max = attempts_max
        self._fruitless = 0

    def feed(self, line: str) -> LogLine | None:
        """The line of one NDJSON record, or None for a heartbeat, an end, or one that was seen before."""
        if not line:
            return None
        record = orjson.loads(line)
        self._fruitless = 0
        if record["stream"] == "eof":
            self.ended = True
        if "next_offset" in record:
            # The gateway dropped this reader: it was too slow.
            self.offset = int(record["next_offset"])
            return None
        if record["stream"] in ("eof", "heartbeat") or int(record["offset"]) < self.offset:
            return None
        self.offset = int(record["offset"]) + 1
        return LogLine.from_json(record)

    def lost(self) -> bool:
        """The connection ended before the log did; whether to connect again."""
        self._fruitless += 1
        return self._fruitless < self._attempts_max
