"""Many calls of one function: how they are counted while they end, and what is left of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from tangram.client.results import InvocationResult
from tangram.errors import TangramError

#: Calls of one ``map`` that are under way at once.
CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MapProgress:
    """How far a ``map`` has come; told after each end, never twice at once."""

    #: Calls that have an end, and how many of them raised an error.
    done: int
    failed: int
    #: How many there will be, if the inputs can be counted.
    total: int | None
    #: The index of the input whose call has just ended, and its end.
    index: int
    result: InvocationResult | TangramError


OnProgress = Callable[[MapProgress], None]


class MapEnds:
    """The ends of the calls of one ``map``, as they come in: from one event loop, or from many threads."""

    def __init__(self, inputs: Iterable[Mapping[str, Any]], progress: OnProgress | None) -> None:
        self._total = len(inputs) if isinstance(inputs, Sized) else None
        self._progress = progress
        self._by_index: dict[int, InvocationResult | TangramError] = {}
        self._failed = 0
        self._lock = threading.Lock()

    def take(self, index: int, result: InvocationResult | TangramError) -> None:
        """Note how the call of the input at ``index`` has ended, and tell; one at a time."""
        with self._lock:
            self._by_index[index] = result
            self._failed += isinstance(result, TangramError)
            if self._progress is not None:
                done, failed = len(self._by_index), self._failed
                self._progress(MapProgress(done=done, failed=failed, total=self._total, index=index, result=result))

    def ordered(self) -> list[InvocationResult | TangramError]:
        """Return the ends in the order of the inputs."""
        return [self._by_index[index] for index in range(len(self._by_index))]

    def succeeded(self) -> list[InvocationResult] | None:
        """Return the results in the order of the inputs; None if any call raised an error."""
        results = [each for each in self.ordered() if not isinstance(each, TangramError)]
        return results if len(results) == len(self._by_index) else None
