"""Packing: sequences into batches of a token budget, sorted by length so that little is padding. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget_tokens: int, extra: int = 0) -> list[list[int]]:
    """Indices by batch. A batch costs its longest length (plus ``extra``) times its size, padding included.

    A sequence beyond the budget makes a batch of its own. The result depends on the arguments alone, so that
    every rank of a chunk packs alike.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        # Ascending lengths: the newcomer is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * (lengths[index] + extra) <= budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
