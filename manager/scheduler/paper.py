"""The policy ``paper``: Algorithm 1, greedy eviction by an approximated objective (docs/SCHEDULING.md 1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from manager.scheduler.arrange import ArrangeItem, Arrangement, arrange
from manager.scheduler.chunk_operator import ChunkOperator, best_fit, take, warm_fit
from manager.scheduler.durations import is_elastic, kind_of
from manager.scheduler.objective import Objective, ends_in_s, item_of
from manager.scheduler.operator import BasicOperator, Operator
from manager.scheduler.policy import ChunkView, Decision, Hold, PoolView, PromptPolicy, Start, WaitingView
from manager.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy(PromptPolicy):
    """Starts a prefix of the candidates with the units that minimise the estimated sum of ACTs."""

    name: str = "paper"
    #: The paper sets 2.
    depth: Annotated[int, Setting("counts of the first action left behind that the estimate tries", ge=1, le=64)] = 2
    #: 1: at least one candidate starts, and what is left behind is taken to start with the units that are free now.
    greedy: Annotated[int, Setting("1: at least one action starts; 0: none may be the better choice", ge=0, le=1)] = 0
    #: Those behind add the same to every choice.
    estimate_window: Annotated[int, Setting("waiting actions that the estimate looks at", ge=0, le=65536)] = 256

    def decide(self, view: PoolView) -> Decision:
        """Keep candidates while evicting the last one does not lower the objective (docs/SCHEDULING.md R3)."""
        candidates = view.candidates
        if not candidates:
            return Decision()
        kind = kind_of(view.name)
        whole = [item_of(candidate.action, kind) for candidate in candidates]
        items = [_limited(item, candidate.limit) for item, candidate in zip(whole, candidates, strict=True)]
        if not any(is_elastic(candidate.action, kind) for candidate in candidates):
            return _decision(view, [item.units[0] for item in items])
        arrangement = arrange(items, _operator(view))
        kept = self._kept(view, arrangement, items if self.greedy else whole, kind)
        return _decision(view, arrangement.units(kept))

    def _kept(self, view: PoolView, arrangement: Arrangement, items: Sequence[ArrangeItem], kind: str) -> int:
        """Number of candidates after the eviction loop; it stops on the first plateau (docs/SCHEDULING.md R10).

        None may be left only where something runs, so that its end asks again.
        """
        chosen = {candidate.action.id for candidate in view.candidates}
        behind = [action for action in view.queued if action.id not in chosen][: self.estimate_window]
        waiting = [item_of(action, kind) for action in behind]
        objective = Objective(arrangement, items, waiting, ends_in_s(view.running), self.depth)
        kept, best = len(items), objective.of(len(items))
        least = 1 if self.greedy or not view.running else 0
        while kept > least:
            fewer = objective.of(kept - 1)
            if fewer >= best:
                break
            kept, best = kept - 1, fewer
        return kept


def _limited(item: ArrangeItem, limit: int) -> ArrangeItem:
    """The item with the counts that the candidate may take now."""
    allowed = sum(1 for units in item.units if units <= limit)
    return (
        item if allowed == len(item.units) else ArrangeItem(item.units[:allowed], item.seconds[:allowed], item.convex)
    )


def _operator(view: PoolView) -> Operator:
    return BasicOperator(view.free) if view.chunks is None else ChunkOperator.of(view.chunks.open)


def _decision(view: PoolView, units: Sequence[int]) -> Decision:
    kept = view.candidates[: len(units)]
    starts = (
        [Start(action_id=waiting.action.id, units=count) for waiting, count in zip(kept, units, strict=True)]
        if view.chunks is None
        else placed(view.chunks, kept, units)
    )
    holds = [
        Hold(action_id=waiting.action.id, waits_for="evicted: the estimate is better if the others take its units")
        for waiting in view.candidates[len(units) :]
    ]
    return Decision(starts=starts, holds=holds)


def placed(chunks: ChunkView, candidates: Sequence[WaitingView], units: Sequence[int]) -> list[Start]:
    """Chunks for the chosen sizes: the largest first, warm places preferred, else the smallest chunk that fits."""
    free = list(chunks.open)
    starts: dict[str, Start] = {}
    order = sorted(range(len(units)), key=lambda index: (-units[index], index))
    for index in order:
        action, size = candidates[index].action, units[index]
        warm, places = chunks.resident.get(action.service or "", ()), chunks.allowed(action, free)
        place = warm_fit(places, size, warm) or best_fit(places, size)
        assert place is not None or len(places) < len(free), f"{size} devices of {free} were promised to {action.id}"
        if place is not None:  # else those of the nodes that are right for it are fewer: the core finds what is left
            take(free, place)
        starts[action.id] = Start(action_id=action.id, units=size, chunk=place)
    return [starts[candidate.action.id] for candidate in candidates[: len(units)]]
