"""The four actions on a bound model: score, logprobs, embed and generate, for one batch or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from manager.function import ModelAction
from runtimes.model.checkpoint.skeleton import FAMILIES
from runtimes.model.device.messages import TokenLogprobs, WorkItem
from runtimes.model.engine.generation import Generation
from runtimes.model.engine.packing import pack
from runtimes.model.engine.parallel import RankGroup

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
        if action is ModelAction.GENERATE:
            asked = [(index, items[index]) for index in mine]
            batches.append(Generation(asked, budget_tokens=budget_tokens, device=device, filler=_filler(model)))
            continue
        for batch in _packed([items[index] for index in mine], budget_tokens):
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
    for every token but the first, or a `TokenLogprobs`. embed: a unit vector. generate: a `Generated`.
    """
    results: dict[int, object] = {}

    def over(position: int, result: object) -> None:
        results[position] = result
        ended(position, result)

    with torch.inference_mode():
        for batch in batches:
            if isinstance(batch, Generation):
                batch.run(partial(_next_logits, bound), over, progress)
            else:
                results |= dict(zip(batch.positions, _act(bound, batch), strict=True))
            progress()
    return [results[position] for position in range(len(results))]


def _packed(items: Sequence[WorkItem], budget_tokens: int) -> list[list[int]]:
    return pack([len(item.ids) for item in items], budget_tokens)


def _filler(model: Any) -> int:
    """Return the token with which sequences are padded."""
    return 0 if model.config.model_type in FAMILIES else getattr(model.config, "pad_token_id", None) or 0


def _send(
    model: Any, action: ModelAction, members: tuple[WorkItem, ...], positions: tuple[int, ...], device: str
) -> PackedBatch:
    """Pad on the right."""
    filler = _filler(model)
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
    if batch.action is ModelAction.LOGPROBS:
        return _logprobs(bound, batch)
    return _embed(bound, batch)


def _score(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """The value of the head at the last token of a decoder, or the classifier's own forward elsewhere."""
    model = bound.model
    if model.config.model_type in FAMILIES:
        hidden = _hidden(model, batch.tokens)
        last = torch.arange(len(batch.members), device=bound.device)
        logits = model.score(hidden[last, batch.lengths - 1])
    else:
        logits = model(input_ids=batch.tokens, attention_mask=batch.mask).logits
    values = logits.float().cpu()
    return [row.item() if row.numel() == 1 else row.tolist() for row in values]


def _logprobs(bound: BoundModel, batch: PackedBatch) -> list[object]:
    """Vocabulary-parallel: a few numbers a token cross the ranks, and [tokens, vocabulary] is never whole."""
    hidden = _hidden(bound.model, batch.tokens)
    real = batch.mask[:, 1:].bool()
    states, targets = hidden[:, :-1][real], batch.tokens[:, 1:][real]
    bound.arrived()
    weight = bound.model.get_output_embeddings().weight
    asked = [member.top for member in batch.members if member.top is not None]
    top = max(asked) if asked else None
    blocks = [
        _block_logprobs(bound.group, states[i : i + HEAD_TOKENS], targets[i : i + HEAD_TOKENS], weight, top)
        for i in range(0, len(targets), HEAD_TOKENS)
    ]
    lengths_out = [len(member.ids) - 1 for member in batch.members]
    flat = torch.cat([block.logprobs for block in blocks]).cpu() if blocks else torch.empty(0)
    plain: list[Any] = [part.tolist() for part in torch.split(flat, lengths_out)]
    if top is None:
        return plain
    ranks = [rank for block in blocks for rank in block.ranks.cpu().tolist()]
    ids = [row for block in blocks for row in block.top_ids.cpu().tolist()]
    values = [row for block in blocks for row in block.top_logprobs.cpu().tolist()]
    results: list[object] = []
    start = 0
    for member, logprobs in zip(batch.members, plain, strict=True):
        mine = slice(start, start := start + len(logprobs))
        if member.top is None:
            results.append(logprobs)
            continue
        rows = zip(ids[mine], values[mine], strict=True)
        likeliest = [_pairs(row[: member.top], value[: member.top]) for row, value in rows]
        results.append(TokenLogprobs(logprobs=logprobs, ranks=ranks[mine], top=likeliest))
    return results


def _pairs(ids: list[int], values: list[float]) -> list[list[int | float]]:
    return [[token, value] for token, value in zip(ids, values, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Of some tokens: log-probability [token], rank [token], likeliest ids and their log-probabilities [token, top]."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def _block_logprobs(group: RankGroup, states: Tensor, targets: Tensor, weight: Tensor, top: int | None) -> _Block:
    known = weight.shape[0]
    logits = functional.linear(states, weight).float()
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
    """Mean of the last hidden states over the real tokens, scaled to length one."""
    hidden = bound.model(input_ids=batch.tokens, attention_mask=batch.mask).last_hidden_state.float()
    mean = (hidden * batch.mask[..., None]).sum(1) / batch.lengths[:, None]
    return list(functional.normalize(mean, dim=-1).cpu().tolist())


def _next_logits(bound: BoundModel, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """The distribution of the next token of each sequence, on the host: [batch, vocabulary]."""
    output = bound.model.base_model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    last = output.last_hidden_state[:, -1]
    bound.arrived()
    part = functional.linear(last, bound.model.get_output_embeddings().weight)
    return bound.group.join_last(part).float().cpu()


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    """Hidden states of a causal decoder. No mask: what is padded on the right is never seen by a real token."""
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device (or, on ``cpu``, the allocator) ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)
