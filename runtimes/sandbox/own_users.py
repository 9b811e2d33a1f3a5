"""A user of its own for each sandbox: the kernel counts inotify instances, keys and pending signals by user id."""

from __future__ import annotations

import secrets
from pathlib import Path

from manager.errors import CapacityExceeded, InvalidConfig
from runtimes.sandbox.record import read_records

COMPONENT = "sandbox"
#: Below are the machine's own users.
LOWEST = 1000
#: Where a range begins that nobody has set: above what machines give to users, and below what archives can hold.
FIRST = 1_000_000


class OwnUsers:
    """Gives out the ids of a range; one is free again when its sandbox's directory is gone."""

    def __init__(self, first: int, count: int, root: Path) -> None:
        """Know the ids of the sandboxes that have a directory in ``root``. Raises InvalidConfig."""
        if first < LOWEST:
            raise InvalidConfig(f"sandbox.uids.first: {first} is below {LOWEST}, among the machine's own users")
        self._range = range(first, first + count)
        self._root = root
        self._held = {path.name: record.uid for path, record in read_records(root) if record is not None}

    def take(self, name: str, wanted: int = 0) -> int:
        """Return an id for a sandbox: the ``wanted`` one if it is of the range (its files are), else a free one.

        Raises CapacityExceeded if all are taken.
        """
        if len(self._held) >= len(self._range):
            self._held = {one: uid for one, uid in self._held.items() if (self._root / one).is_dir()}
        if wanted not in self._range:
            taken = set(self._held.values())
            start = secrets.randbelow(len(self._range))  # beside another gateway that has the same range
            ids = (self._range[(start + step) % len(self._range)] for step in range(len(self._range)))
            wanted = next((uid for uid in ids if uid not in taken), 0)
        if not wanted:
            message = f"all {len(self._range)} user ids of sandboxes are taken: raise sandbox.uids.count"
            raise CapacityExceeded(message, component=COMPONENT)
        self._held[name] = wanted
        return wanted
