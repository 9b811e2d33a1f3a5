"""Tensor parallelism: the collectives of one chunk, and the few forwards that differ when weights are shared out."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as functional
from torch import Tensor, nn

from runtimes.model.checkpoint.layout import Layout
from runtimes.model.checkpoint.sharding import plan_of
from runtimes.model.device.backend import DeviceBackend

#: torch leaves most of its low-level collectives untyped.
dist: Any = torch.distributed


class RankGroup:
    """The ranks of one chunk, on a raw process group: no global world, so a crash touches this chunk alone."""

    def __init__(self, rank: int, size: int, process_group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = process_group

    @classmethod
    def join(cls, file: Path, rank: int, size: int, backend: DeviceBackend, timeout_s: float) -> RankGroup:
        """Meet the peers at a rendezvous file (made for this set of processes only); blocks until all are there."""
        store = dist.FileStore(str(file), size)
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        return cls(rank, size, backend.group(store, rank, size, timeout_s))

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def join_last(self, value: Tensor) -> Tensor:
        """Concatenate the ranks' parts along the last dimension."""
        if self.size == 1:
            return value
        parts = [torch.empty_like(value) for _ in range(self.size)]
        self._group.allgather([parts], [value.contiguous()]).wait()
        return torch.cat(parts, -1)

    def _reduce(self, value: Tensor, operation: Any) -> Tensor:
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            self._group.allreduce([value], options).wait()
        return value


class Team:
    """Names the group that a sharded skeleton uses now: skeletons outlive groups."""

    def __init__(self) -> None:
        self.group = RankGroup(0, 1)


def install(model: nn.Module, layout: Layout, team: Team, rank: int, dop: int) -> None:
    """Make a skeleton compute its rank's share: row-parallel layers and the embedding sum over the ranks."""
    if dop == 1:
        return
    config: Any = model.config
    plan = plan_of(model)
    heads, kv_heads = config.num_attention_heads // dop, max(layout.kv_heads // dop, 1)
    for name, module in model.named_modules():
        if plan.is_rowwise(name):
            _share_rows(module, team)
        elif name == plan.embedding:
            _share_vocabulary(module, team, rank)
        elif hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // kv_heads


def _share_rows(module: Any, team: Team) -> None:
    """A linear layer whose inputs are shared out: partial products are summed, the bias is added once."""

    def forward(value: Tensor) -> Tensor:
        total = team.group.sum(functional.linear(value, module.weight))
        return total if module.bias is None else total + module.bias

    module.forward = forward


def _share_vocabulary(module: Any, team: Team, rank: int) -> None:
    """An embedding of which this rank knows the tokens [rank * n, (rank + 1) * n): the others come as zeros."""

    def forward(ids: Tensor) -> Tensor:
        known = module.weight.shape[0]
        local = ids - rank * known
        foreign = (local < 0) | (local >= known)
        value = functional.embedding(local.masked_fill(foreign, 0), module.weight)
        return team.group.sum(value.masked_fill_(foreign.unsqueeze(-1), 0))

    module.forward = forward
