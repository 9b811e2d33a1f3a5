"""Continuations, token by token: a sequence leaves when it ends, and another that waits takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtimes.model.device.messages import Generated, WorkItem
from runtimes.model.request import Sampling

#: The logits of the next token of each sequence, on the host, of (tokens, mask, positions, cache).
NextLogits = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence under way."""

    position: int
    ids: tuple[int, ...]
    sampling: Sampling
    draw: torch.Generator
    made: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.sampling.max_new_tokens - len(self.made)

    def take(self, logits: Tensor) -> Generated | None:
        """Choose the next token; return the whole if the sequence has ended with it."""
        token = choose(logits, self.sampling, self.draw)
        if token in self.sampling.stop_ids:
            return Generated(ids=tuple(self.made), reason="stop")
        self.made.append(token)
        return None if self.left else Generated(ids=tuple(self.made), reason="length")


class Generation:
    """Sequences of which as many are under way as the budget of tokens lets; every rank does the same with them."""

    def __init__(self, items: Sequence[tuple[int, WorkItem]], *, budget_tokens: int, device: str, filler: int) -> None:
        """``items`` are sequences and the positions of their results; the first of them go to the device at once."""
        ordered = sorted(items, key=lambda item: (len(item[1].ids), item[0]))
        self._waiting = [_row(position, item) for position, item in reversed(ordered)]
        self._budget_tokens, self._device, self._filler = budget_tokens, device, filler
        self._rows: list[_Row] = []
        #: Of the rows under way: what is kept of their tokens, padded on the left, and 1 where a token is real.
        self._cache: Any = None
        self._mask = torch.empty(0, 0, dtype=torch.long, device=device)
        self._fresh: list[_Row] = []
        self._prompts = self._mask, self._mask
        self._admit()

    def run(
        self, next_logits: NextLogits, ended: Callable[[int, Generated], None], progress: Callable[[], None]
    ) -> None:
        """Generate all of them; ``ended`` is called with each as it ends, ``progress`` after each token."""
        while self._fresh or self._rows:
            if self._fresh:
                self._begin(next_logits, ended)
            else:
                self._step(next_logits, ended)
            self._admit()
            progress()

    def _admit(self) -> None:
        """Take from those that wait as many as fit beside those under way; the first always, if there are none."""
        fresh: list[_Row] = []
        while self._waiting:
            rows = [*self._rows, *fresh, self._waiting[-1]]
            width = max([self._mask.shape[1], *(len(row.ids) for row in rows[len(self._rows) :])])
            if len(rows) > 1 and len(rows) * (width + max(row.left for row in rows)) > self._budget_tokens:
                break
            fresh.append(self._waiting.pop())
        self._fresh = fresh
        if fresh:
            longest = max(len(row.ids) for row in fresh)
            padded = [[*[self._filler] * (longest - len(row.ids)), *row.ids] for row in fresh]
            real = [[*[0] * (longest - len(row.ids)), *[1] * len(row.ids)] for row in fresh]
            self._prompts = torch.tensor(padded, device=self._device), torch.tensor(real, device=self._device)

    def _begin(self, next_logits: NextLogits, ended: Callable[[int, Generated], None]) -> None:
        """Read the prompts of new sequences, and put them beside those under way."""
        from transformers import DynamicCache

        tokens, mask = self._prompts
        longest = mask.shape[1]
        # Of plain layers: a window is kept by the mask, and rows of any age lie side by side.
        cache: Any = DynamicCache()
        logits = next_logits(tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        if self._rows:
            width = max(longest, self._mask.shape[1])
            for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
                ours.keys = torch.cat([_widened(ours.keys, width), _widened(theirs.keys, width)])
                ours.values = torch.cat([_widened(ours.values, width), _widened(theirs.values, width)])
            self._mask = torch.cat([_left_padded(self._mask, width), _left_padded(mask, width)])
        else:
            self._cache, self._mask = cache, mask
        before = len(self._rows)
        self._rows += self._fresh
        self._take(before, logits, ended)

    def _step(self, next_logits: NextLogits, ended: Callable[[int, Generated], None]) -> None:
        """Read the last token of each sequence, and choose the next."""
        tokens = torch.tensor([[row.made[-1]] for row in self._rows], device=self._device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], -1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        self._take(0, next_logits(tokens, self._mask, positions, self._cache), ended)

    def _take(self, first: int, logits: Tensor, ended: Callable[[int, Generated], None]) -> None:
        """Choose a token for the rows from ``first`` on, and let those go that have ended."""
        over = set()
        for index, row in enumerate(self._rows[first:], first):
            whole = row.take(logits[index - first])
            if whole is not None:
                over.add(index)
                ended(row.position, whole)
        if over:
            self._keep([index for index in range(len(self._rows)) if index not in over])

    def _keep(self, living: list[int]) -> None:
        """Forget all other rows, and the columns that only they had."""
        self._rows = [self._rows[index] for index in living]
        if not living:
            self._cache, self._mask = None, self._mask[:0, :0]
            return
        chosen = torch.tensor(living, device=self._device)
        mask = self._mask.index_select(0, chosen)
        empty = int(mask.any(0).int().argmax())
        self._mask = mask[:, empty:]
        for layer in self._cache.layers:
            # Columns of the cache end with the last token that was read, as those of the mask do.
            layer.keys = layer.keys.index_select(0, chosen)[..., empty:, :].contiguous()
            layer.values = layer.values.index_select(0, chosen)[..., empty:, :].contiguous()


def _row(position: int, item: WorkItem) -> _Row:
    assert item.sampling is not None, "generate needs sampling options"
    return _Row(position, item.ids, item.sampling, torch.Generator().manual_seed(item.sampling.seed))


def _left_padded(mask: Tensor, width: int) -> Tensor:
    return torch.cat([mask.new_zeros(len(mask), width - mask.shape[1]), mask], -1)


def _widened(states: Tensor, width: int) -> Tensor:
    rows, heads, length, size = states.shape
    return torch.cat([states.new_zeros(rows, heads, width - length, size), states], -2)


def choose(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """The best token, or one drawn by temperature within the smallest set of probability ``top_p``.

    Every rank sees the same logits and the same seed, so every rank draws the same token.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    shares, order = (logits / sampling.temperature).softmax(-1).sort(descending=True)
    before = shares.cumsum(-1) - shares
    kept = shares.masked_fill(before >= sampling.top_p, 0)
    return int(order[torch.multinomial(kept, 1, generator=draw)])
