"""Computation of the model actions."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as functional
from torch import Tensor, nn

from manager.function import ModelAction
from runtimes.model.checkpoint import Layout, Pooling
from runtimes.model.processes import Generated, TokenLogprobs, WorkItem
from runtimes.model.request import Sampling
from runtimes.model.weights import FAMILIES, PADDED, DeviceBackend, plan_of

#: The logits of the next token of each sequence, on its device, of (tokens, mask, positions, cache).
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

    def take(self, token: int) -> Generated | None:
        """Append the next token; return the whole if the sequence has ended with it."""
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
        rows = self._rows[first:]
        for index, (row, token) in enumerate(zip(rows, _choose(logits, rows), strict=True), first):
            whole = row.take(token)
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


def _choose(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """Return the best token of each row, or one drawn by temperature within the smallest set of probability ``top_p``.

    ``logits`` are [row, vocabulary] in float32, and stay on their device: one number a row comes to the host. Every
    rank sees the same logits and the same seeds, so every rank draws the same tokens.
    """
    tokens = logits.argmax(-1)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        samplings = [rows[index].sampling for index in drawn]
        points = [torch.rand((), generator=rows[index].draw) for index in drawn]
        settings = [(each.temperature, each.top_p, float(point)) for each, point in zip(samplings, points, strict=True)]
        temperature, top_p, point = torch.tensor(settings, device=logits.device).T[:, :, None]
        chosen = torch.tensor(drawn, device=logits.device)
        shares, order = (logits[chosen] / temperature).softmax(-1).sort(stable=True, descending=True)
        kept = shares.masked_fill(shares.cumsum(-1) - shares >= top_p, 0)
        edges = kept.cumsum(-1)
        place = torch.searchsorted(edges, point * edges[:, -1:], right=True)
        last = (kept > 0).sum(-1, keepdim=True) - 1  # a point may round up to the very end
        tokens[chosen] = order.gather(1, torch.minimum(place, last))[:, 0]
    numbers: list[int] = tokens.tolist()
    return numbers


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices by batch. A batch costs its longest length times its size, padding included.

    A sequence beyond the budget makes a batch of its own. The result depends on the arguments alone, so that
    every rank of a chunk packs alike.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        # Ascending lengths: the newcomer is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


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


#: Tokens whose next-token distribution exists at once in `logprobs`: [2048, vocabulary / DoP] is the largest tensor.
HEAD_TOKENS = 2048

#: How those say it who do not go through torch's own allocator: the host's, CUDA's runtime, cuBLAS, NCCL.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(slots=True, kw_only=True)
class BoundModel:
    """A model whose weights are in place (or arriving), with the ranks that it is shared with."""

    model: Any
    group: RankGroup
    device: str
    #: Blocks the computation until the last weight has arrived (for heads that are used without their module).
    arrived: Callable[[], None]
    pooling: Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences that are computed together, on the device already."""

    action: ModelAction
    members: tuple[WorkItem, ...]
    #: Where their results belong.
    positions: tuple[int, ...]
    #: [sequence, token], padded; 1 in the mask where a token is real.
    tokens: Tensor
    mask: Tensor
    lengths: Tensor


def stage(model: Any, items: Sequence[WorkItem], budget_tokens: int, device: str) -> list[PackedBatch | Generation]:
    """Pack the sequences, one kind of action at a time, and send them to the device."""
    batches: list[PackedBatch | Generation] = []
    for action in dict.fromkeys(item.action for item in items):
        mine = [index for index, item in enumerate(items) if item.action is action]
        if action is ModelAction.GENERATE and _is_plain(model):
            chosen = [(index, items[index]) for index in mine]
            batches.append(Generation(chosen, budget_tokens=budget_tokens, device=device, filler=0))
            continue
        for batch in _packed(model, action, [len(items[index].ids) for index in mine], budget_tokens):
            positions = tuple(mine[position] for position in batch)
            batches.append(_send(model, action, tuple(items[i] for i in positions), positions, device))
    return batches


def compute(
    bound: BoundModel,
    batches: Sequence[PackedBatch | Generation],
    progress: Callable[[], None],
    ended: Callable[[int, object], None] = lambda position, result: None,
) -> list[object]:
    """One result for each sequence, in their order; ``progress`` is called as batches (and tokens) are done.

    ``ended`` is called with the position and the result of each sequence that is generated, as it ends.

    score: a float, or a list of floats where the head has several labels. logprobs: log p(token | the ones before)
    for every token but the first, or a `TokenLogprobs`. embed: a vector. generate: a `Generated`. step_scores: a float,
    or a list of them, for each position.
    """
    results: dict[int, object] = {}

    def over(position: int, result: object) -> None:
        results[position] = result
        ended(position, result)

    if not _is_plain(bound.model):
        bound.arrived()  # their modules may use each other's weights without a call that could be held back
    with torch.inference_mode():
        for batch in batches:
            if isinstance(batch, Generation):
                batch.run(partial(_next_logits, bound), over, progress)
            elif batch.action is ModelAction.GENERATE:
                over(batch.positions[0], _continued(bound, batch))
            else:
                results |= dict(zip(batch.positions, _act(bound, batch), strict=True))
            progress()
    return [results[position] for position in range(len(results))]


def _is_plain(model: Any) -> bool:
    """Whether a model is computed layer by layer here, without a mask, and not by its class's own forward."""
    return model.config.model_type in FAMILIES and getattr(model.config, "is_causal", True)


def _packed(model: Any, action: ModelAction, lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Return indices by batch, so that no number depends on who shares the batch."""
    if _is_plain(model):
        return pack(lengths, budget_tokens)
    if action is ModelAction.GENERATE or (action is ModelAction.SCORE and _pad_token(model) is None):
        return [[index] for index in range(len(lengths))]  # without a padding token a classifier reads one at a time
    if action is ModelAction.LOGPROBS:
        budget_tokens = min(budget_tokens, HEAD_TOKENS)  # its logits are whole: [tokens, vocabulary]
    if model.config.model_type in PADDED:
        return pack(lengths, budget_tokens)
    alike = [[index for index, length in enumerate(lengths) if length == size] for size in sorted(set(lengths))]
    return [
        [group[index] for index in batch]
        for group in alike
        for batch in pack([lengths[index] for index in group], budget_tokens)
    ]


def _pad_token(model: Any) -> int | None:
    """Return the token that is no part of a sequence, as the configuration has it."""
    text = model.config.get_text_config()
    token = getattr(model.config, "pad_token_id", None)
    return getattr(text, "pad_token_id", None) if token is None else token


def _send(
    model: Any, action: ModelAction, members: tuple[WorkItem, ...], positions: tuple[int, ...], device: str
) -> PackedBatch:
    """Pad on the right."""
    filler = _pad_token(model) or 0
    longest = max(len(member.ids) for member in members)
    tokens, mask = [], []
    for member in members:
        ids, gap = member.ids, longest - len(member.ids)
        tokens.append([*ids, *[filler] * gap])
        mask.append([*[1] * len(ids), *[0] * gap])
    return PackedBatch(
        action=action,
        members=members,
        positions=positions,
        tokens=torch.tensor(tokens, device=device),
        mask=torch.tensor(mask, device=device),
        lengths=torch.tensor([len(member.ids) for member in members], device=device),
    )


def _act(bound: BoundModel, batch: PackedBatch) -> Sequence[object]:
    if batch.action is ModelAction.SCORE:
        return _score(bound, batch)
    if batch.action is ModelAction.STEP_SCORES:
        return _step_scores(bound, batch)
    if batch.action is ModelAction.LOGPROBS:
        return _logprobs(bound, batch)
    return _embed(bound, batch)


def _score(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """The value of the head, at the token where transformers' classifiers of decoders read it.

    That is the last one that is no padding token, even where padding and end are the same token; and the last one of
    all if there is no padding token.
    """
    model = bound.model
    if _is_plain(model):
        hidden = _hidden(model, batch.tokens)
        pad = _pad_token(model)
        real = batch.mask if pad is None else batch.mask * (batch.tokens != pad)
        last = (real * torch.arange(real.shape[1], device=bound.device)).argmax(-1)
        logits = model.score(hidden[torch.arange(len(batch.members), device=bound.device), last])
    else:
        logits = _forward(model, batch).logits
    values = logits.float().cpu()
    return [row.item() if row.numel() == 1 else row.tolist() for row in values]


def _step_scores(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """The values of a head over each token, at the positions that are asked for."""
    values = _forward(bound.model, batch).logits.float().cpu()
    found = [values[index, list(member.positions)] for index, member in enumerate(batch.members)]
    return [rows[:, 0].tolist() if rows.shape[1] == 1 else rows.tolist() for rows in found]


def _forward(model: Any, batch: PackedBatch) -> Any:
    """Return what a class of transformers says of a batch."""
    known = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in known else {}
    return model(input_ids=batch.tokens, attention_mask=batch.mask, **options)


class _Chosen:
    """Chooses the tokens of one sequence in transformers' own loop, which knows the cache of every model."""

    def __init__(self, row: _Row) -> None:
        self._row = row
        self.whole: Generated | None = None

    def process(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Leave only the token that is taken."""
        self.whole = self._row.take(*_choose(logits.float(), [self._row]))
        token = self._row.made[-1] if self.whole is None else 0
        return torch.full_like(logits, -torch.inf).index_fill_(1, torch.tensor([token], device=logits.device), 0.0)

    def ended(self, tokens: Tensor, logits: object, **options: object) -> Tensor:
        return torch.full((len(tokens),), self.whole is not None, device=tokens.device)


def _continued(bound: BoundModel, batch: PackedBatch) -> Generated:
    """Continue one sequence by the loop of transformers."""
    from transformers import GenerationConfig

    (member,) = batch.members
    chosen = _Chosen(_row(batch.positions[0], member))
    assert member.sampling is not None
    untyped: Any = GenerationConfig
    options = untyped(max_new_tokens=member.sampling.max_new_tokens, do_sample=False)
    bound.model.generate(
        batch.tokens,
        attention_mask=batch.mask,
        generation_config=options,
        logits_processor=[chosen.process],
        stopping_criteria=[chosen.ended],
    )
    assert chosen.whole is not None, "the loop ended before the sequence"
    return chosen.whole


def _logprobs(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """Vocabulary-parallel: a few numbers a token cross the ranks, and [tokens, vocabulary] is never whole."""
    plain = _is_plain(bound.model)
    real = batch.mask[:, 1:].bool()
    targets = batch.tokens[:, 1:][real]
    found = _hidden(bound.model, batch.tokens) if plain else _forward(bound.model, batch).logits
    states = found[:, :-1][real]
    bound.arrived()
    head = partial(functional.linear, weight=bound.model.get_output_embeddings().weight) if plain else _same
    tops = [member.top for member in batch.members if member.top is not None]
    top = max(tops) if tops else None
    blocks = [
        _block_logprobs(bound.group, head(states[i : i + HEAD_TOKENS]).float(), targets[i : i + HEAD_TOKENS], top)
        for i in range(0, len(targets), HEAD_TOKENS)
    ]
    lengths_out = [len(member.ids) - 1 for member in batch.members]
    flat = torch.cat([block.logprobs for block in blocks]).cpu() if blocks else torch.empty(0)
    numbers: list[Any] = [part.tolist() for part in torch.split(flat, lengths_out)]
    if top is None:
        return numbers
    ranks = [rank for block in blocks for rank in block.ranks.cpu().tolist()]
    ids = [row for block in blocks for row in block.top_ids.cpu().tolist()]
    values = [row for block in blocks for row in block.top_logprobs.cpu().tolist()]
    results: list[object] = []
    start = 0
    for member, logprobs in zip(batch.members, numbers, strict=True):
        mine = slice(start, start := start + len(logprobs))
        if member.top is None:
            results.append(logprobs)
            continue
        rows = zip(ids[mine], values[mine], strict=True)
        likeliest = [_pairs(row[: member.top], value[: member.top]) for row, value in rows]
        results.append(TokenLogprobs(logprobs=logprobs, ranks=ranks[mine], top=likeliest))
    return results


def _same(logits: Tensor) -> Tensor:
    """Return logits that are whole already."""
    return logits


def _pairs(ids: list[int], values: list[float]) -> list[list[int | float]]:
    return [[token, value] for token, value in zip(ids, values, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Of some tokens: log-probability [token], rank [token], likeliest ids and their log-probabilities [token, top]."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def _block_logprobs(group: RankGroup, logits: Tensor, targets: Tensor, top: int | None) -> _Block:
    known = logits.shape[1]
    local = targets - group.rank * known
    mine = (local >= 0) & (local < known)
    chosen = logits.gather(1, local.clamp(0, known - 1)[:, None])[:, 0].masked_fill(~mine, 0)
    highest = group.max(logits.amax(-1))
    ranks = top_ids = targets.new_empty(0)
    top_logits = logits.new_empty(0)
    if top is not None:
        chosen = group.sum(chosen)
        ranks = 1 + group.sum((logits > chosen[:, None]).sum(-1))
        top_ids, top_logits = _likeliest(group, logits, top)
    total = logits.sub_(highest[:, None]).exp_().sum(-1)
    if top is None:
        chosen, total = group.sum(torch.stack([chosen, total]))
    else:
        total = group.sum(total)
    scale = highest + total.log()
    top_logprobs = top_logits if top is None else top_logits - scale[:, None]
    return _Block(logprobs=chosen - scale, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)


def _likeliest(group: RankGroup, logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the ids and logits of the likeliest tokens of the whole vocabulary, of which this rank knows a part."""
    known = logits.shape[1]
    values, ids = logits.topk(min(top, known), dim=-1)
    values, ids = group.join_last(values), group.join_last(ids + group.rank * known)
    values, order = values.topk(min(top, values.shape[1]), dim=-1)
    return ids.gather(1, order), values


def _embed(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """One vector of the last hidden states over the real tokens, as the checkpoint declares it."""
    hidden = _forward(bound.model, batch).last_hidden_state.float()
    real = batch.mask[..., None]
    match bound.pooling.mode:
        case "cls":
            vectors = hidden[:, 0]
        case "lasttoken":
            vectors = hidden[torch.arange(len(hidden), device=bound.device), batch.lengths - 1]
        case "max":
            vectors = hidden.masked_fill(real == 0, -torch.inf).amax(1)
        case "weightedmean":
            weights = real * torch.arange(1, hidden.shape[1] + 1, device=bound.device)[:, None]
            vectors = (hidden * weights).sum(1) / weights.sum(1)
        case mode:
            count = batch.lengths[:, None]
            vectors = (hidden * real).sum(1) / (count if mode == "mean" else count.sqrt())
    return list((functional.normalize(vectors, dim=-1) if bound.pooling.normalized else vectors).cpu().tolist())


def _next_logits(bound: BoundModel, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """The logits of the next token of each sequence: [batch, vocabulary] in float32."""
    output = bound.model.base_model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    last = output.last_hidden_state[:, -1]
    bound.arrived()
    part = functional.linear(last, bound.model.get_output_embeddings().weight)
    return bound.group.join_last(part).float()


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    """Hidden states of a causal decoder. No mask: what is padded on the right is never seen by a real token."""
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device (or, on ``cpu``, the allocator) ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)
