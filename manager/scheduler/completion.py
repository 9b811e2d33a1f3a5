"""The completion heap: when units come back, and what the waiting actions would then take (paper, Algorithm 2)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class CompletionHeap:
    """Seconds from now at which executing actions end.

    It holds times and no units, as the paper has it: an action of 32 units that ends admits one action
    (docs/SCHEDULING.md R8, a known bias of the paper's policy).
    """

    def __init__(self, ends_in_s: Iterable[float]) -> None:
        self._ends = list(ends_in_s)
        heapq.heapify(self._ends)

    def estimate(self, first_s: Sequence[float], rest_s: Sequence[float]) -> float:
        """Sum of the ACTs of the waiting actions, each started when one executing action ends, in order.

        ``first_s`` holds the first one's durations at its d-th smallest admissible counts, d = 1 .. depth
        (docs/SCHEDULING.md R5); the best d counts. ``rest_s`` holds the durations of the others at their minimum. The
        popped time is the wait; a heap that runs empty means no wait (docs/SCHEDULING.md R4).
        """
        if not first_s:
            return 0.0
        return min(self._run([duration, *rest_s]) for duration in first_s)

    def _run(self, durations_s: Sequence[float]) -> float:
        heap = self._ends.copy()
        total = 0.0
        for duration_s in durations_s:
            end_s = duration_s
            if heap:
                end_s = heap[0] + duration_s
                heapq.heapreplace(heap, end_s)
            else:
                heap.append(end_s)
            total += end_s
        return total
