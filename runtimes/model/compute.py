"""The four actions on a bound model: score, logprobs, embed and generate, for one batch or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from manager.function import ModelAction
from runtimes.model.batcher import pack
from runtimes.model.parallel import Group
from runtimes.model.skeleton import FAMILIES
from runtimes.model.work import Generated, Item, Sampling

#: Tokens whose next-token distribution exists at once in `logprobs`: [2048, vocabulary / DoP] is the largest tensor.
HEAD_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class Bound:
    """A model whose weights are in place (or arriving), with the ranks that it is shared with."""

    model: Any
    group: Group
    device: str
    #: Blocks the computation until the last weight has arrived (for heads that are used without their module).
    arrived: Callable[[], None]


def compute(bound: Bound, items: Sequence[Item], budget_tokens: int, progress: Callable[[], None]) -> list[object]:
    """One result for each sequence, in their order; ``progress`` is called as batches (and tokens) are done.

    score: a float, or a list of floats where the head has several labels. logprobs: log p(token | the ones before)
    for every token but the first. embed: a unit vector. generate: a `Generated`.
    """
    results: list[object] = [None] * len(items)
    with torch.inference_mode():
        for action in dict.fromkeys(item.action for item in items):
            mine = [index for index, item in enumerate(items) if item.action is action]
            for batch in _packed([items[index] for index in mine], budget_tokens):
                members = [items[mine[position]] for position in batch]
                for position, value in zip(batch, _batch(bound, action, members, progress), strict=True):
                    results[mine[position]] = value
                progress()
    return results


def _packed(items: Sequence[Item], budget_tokens: int) -> list[list[int]]:
    extra = max((item.sampling.max_new_tokens for item in items if item.sampling), default=0)
    return pack([len(item.ids) for item in items], budget_tokens, extra)


def _batch(
    bound: Bound, action: ModelAction, members: Sequence[Item], progress: Callable[[], None]
) -> Sequence[object]:
    ids = [member.ids for member in members]
    if action is ModelAction.SCORE:
        return _score(bound, ids)
    if action is ModelAction.LOGPROBS:
        return _logprobs(bound, ids)
    if action is ModelAction.EMBED:
        return _embed(bound, ids)
    return _generate(bound, members, progress)


def _score(bound: Bound, ids: Sequence[Sequence[int]]) -> list[object]:
    """The value of the head at the last token of a decoder, or the classifier's own forward elsewhere."""
    model = bound.model
    if model.config.model_type in FAMILIES:
        tokens, lengths = _pad_right(ids, bound.device)
        hidden = _hidden(model, tokens)
        logits = model.score(hidden[torch.arange(len(ids), device=bound.device), lengths - 1])
    else:
        tokens, lengths = _pad_right(ids, bound.device, model.config.pad_token_id or 0)
        logits = model(input_ids=tokens, attention_mask=_mask(tokens, lengths)).logits
    values = logits.float().cpu()
    return [row.item() if row.numel() == 1 else row.tolist() for row in values]


def _logprobs(bound: Bound, ids: Sequence[Sequence[int]]) -> list[object]:
    """Vocabulary-parallel: three scalars a token cross the ranks, and [tokens, vocabulary] is never whole."""
    tokens, lengths = _pad_right(ids, bound.device)
    hidden = _hidden(bound.model, tokens)
    real = torch.arange(tokens.shape[1] - 1, device=bound.device)[None] < (lengths - 1)[:, None]
    states, targets = hidden[:, :-1][real], tokens[:, 1:][real]
    bound.arrived()
    weight = bound.model.get_output_embeddings().weight
    blocks = [
        _block_logprobs(bound.group, states[i : i + HEAD_TOKENS], targets[i : i + HEAD_TOKENS], weight)
        for i in range(0, len(targets), HEAD_TOKENS)
    ]
    flat = torch.cat(blocks).cpu() if blocks else torch.empty(0)
    lengths_out = [len(sequence) - 1 for sequence in ids]
    return [part.tolist() for part in torch.split(flat, lengths_out)]


def _block_logprobs(group: Group, states: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    known = weight.shape[0]
    logits = functional.linear(states, weight).float()
    local = targets - group.rank * known
    mine = (local >= 0) & (local < known)
    chosen = logits.gather(1, local.clamp(0, known - 1)[:, None])[:, 0].masked_fill(~mine, 0)
    highest = group.max(logits.amax(-1))
    total = logits.sub_(highest[:, None]).exp_().sum(-1)
    chosen, total = group.sum(torch.stack([chosen, total]))
    logprobs: Tensor = chosen - highest - total.log()
    return logprobs


def _embed(bound: Bound, ids: Sequence[Sequence[int]]) -> list[object]:
    """Mean of the last hidden states over the real tokens, scaled to length one."""
    model = bound.model
    tokens, lengths = _pad_right(ids, bound.device, getattr(model.config, "pad_token_id", None) or 0)
    mask = _mask(tokens, lengths)
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
    mean = (hidden * mask[..., None]).sum(1) / lengths[:, None]
    return list(functional.normalize(mean, dim=-1).cpu().tolist())


def _generate(bound: Bound, members: Sequence[Item], progress: Callable[[], None]) -> list[object]:
    """Token by token with a key-value cache, left-padded; a sequence stops at an end token or at its bound."""
    from transformers import DynamicCache

    samplings = [_sampling(member) for member in members]
    tokens, mask = _pad_left([member.ids for member in members], bound.device)
    cache = DynamicCache(config=bound.model.config)
    draws = [torch.Generator().manual_seed(sampling.seed) for sampling in samplings]
    made: list[list[int]] = [[] for _ in members]
    reasons = ["length"] * len(members)
    live = set(range(len(members)))
    for step in range(max(sampling.max_new_tokens for sampling in samplings)):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = _next_logits(bound, tokens, mask, positions, cache)
        chosen = [_choose(row, samplings[i], draws[i]) for i, row in enumerate(logits)]
        for index in sorted(live):
            if chosen[index] in samplings[index].stop_ids:
                reasons[index] = "stop"
                live.discard(index)
                continue
            made[index].append(chosen[index])
            if step + 1 >= samplings[index].max_new_tokens:
                live.discard(index)
        progress()
        if not live:
            break
        tokens = torch.tensor(chosen, device=bound.device)[:, None]
        mask = torch.cat([mask, mask.new_ones(len(members), 1)], -1)
    return [Generated(ids=tuple(ids), reason=reason) for ids, reason in zip(made, reasons, strict=True)]


def _next_logits(bound: Bound, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """The distribution of the next token of each sequence, on the host: [batch, vocabulary]."""
    output = bound.model.base_model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    last = output.last_hidden_state[:, -1]
    bound.arrived()
    part = functional.linear(last, bound.model.get_output_embeddings().weight)
    return bound.group.join_last(part).float().cpu()


def _choose(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """The best token, or one drawn by temperature within the smallest set of probability ``top_p``.

    Every rank sees the same logits and the same seed, so every rank draws the same token.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    shares, order = (logits / sampling.temperature).softmax(-1).sort(descending=True)
    before = shares.cumsum(-1) - shares
    kept = shares.masked_fill(before >= sampling.top_p, 0)
    return int(order[torch.multinomial(kept, 1, generator=draw)])


def _sampling(member: Item) -> Sampling:
    assert member.sampling is not None, "generate needs sampling options"
    return member.sampling


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    """Hidden states of a causal decoder. No mask: what is padded on the right is never seen by a real token."""
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden


def _pad_right(ids: Sequence[Sequence[int]], device: str, filler: int = 0) -> tuple[Tensor, Tensor]:
    longest = max(map(len, ids))
    tokens = torch.tensor([[*sequence, *[filler] * (longest - len(sequence))] for sequence in ids])
    return tokens.to(device), torch.tensor([len(sequence) for sequence in ids], device=device)


def _pad_left(ids: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    longest = max(map(len, ids))
    tokens = torch.tensor([[*[0] * (longest - len(sequence)), *sequence] for sequence in ids])
    mask = torch.tensor([[0] * (longest - len(sequence)) + [1] * len(sequence) for sequence in ids])
    return tokens.to(device), mask.to(device)


def _mask(tokens: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]).long()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device (or, on ``cpu``, the allocator) ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
