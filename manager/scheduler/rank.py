"""The order of starts: FCFS, but short rigid actions first, within bounds (docs/SCHEDULING.md 1.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manager.action import Action
from manager.scheduler.drawn import Drawn
from manager.scheduler.durations import UNKNOWN_S
from manager.scheduler.policy import PoolView, RunningView
from manager.scheduler.running import RunningSet


@dataclass(frozen=True, slots=True)
class Ranked:
    """What waits, in two queues, each in FCFS order."""

    #: Rigid and short: they start before the others.
    first: Sequence[Action]
    #: The others, once; lazy, because a decision rarely looks at many.
    rest: Iterable[Action]


def ranked(
    waiting: Sequence[Action],
    kind: str,
    now_s: float,
    short_s: float,
    age_max_s: float,
    rigid: Sequence[Action] | None = None,
) -> Ranked:
    """Split what waits; nothing overtakes once the oldest that could be overtaken has waited ``age_max_s``.

    ``rigid`` are those of them that have no choice of units; None: they are looked for.
    """
    oldest = next((action for action in waiting if not is_short(action, kind, short_s)), None)
    if oldest is not None and now_s - oldest.submitted_s >= age_max_s:
        return Ranked((), waiting)
    rest = (action for action in waiting if not is_short(action, kind, short_s))
    among = waiting if rigid is None else rigid
    return Ranked(Drawn(lambda: (action for action in among if is_short(action, kind, short_s))), rest)


def leader(first: Sequence[Action], next_: Action | None, kind: str) -> Action | None:
    """Return the oldest action that waits if its minimum is more than one unit: it starts first, or others backfill.

    ``next_`` is the first of the others. Single units need no such care: the next one that comes free is theirs.
    """
    if next_ is not None and first and first[0].submitted_s < next_.submitted_s:
        next_ = None
    oldest = next_ or (first[0] if first else None)
    return oldest if oldest is not None and oldest.cost[kind].minimum > 1 else None


def shortest_first(waiting: Sequence[Action], now_s: float, age_max_s: float) -> list[Action]:
    """Within a task the shortest first, by what is known of them; the turns of the tasks stay as they are.

    What has waited for ``age_max_s`` goes before everything else, in FCFS order.
    """
    aged = [action for action in waiting if now_s - action.submitted_s >= age_max_s]
    young = [action for action in waiting if now_s - action.submitted_s < age_max_s] if aged else waiting
    by_task: dict[str, list[Action]] = {}
    for action in young:
        by_task.setdefault(action.task, []).append(action)
    turns = {task: iter(sorted(actions, key=_expected_s)) for task, actions in by_task.items()}
    return [*aged, *(next(turns[action.task]) for action in young)]


def age_bound_s(view: PoolView, waiting: Sequence[Action], ratio: float, age_max_s: float) -> float:
    """Return the seconds after which nothing overtakes an action; ``age_max_s`` at most.

    ``ratio`` mean durations of what runs and waits, with one unit: where actions take a second, two minutes are an
    age. Where more waits than that, the time in which the pool works it off: FCFS would be no sooner either.
    """
    waiting_s = [_expected_s(action) for action in waiting]
    known = [*waiting_s, *(_expected_s(one.action) for one in view.running)]
    if not known:
        return age_max_s
    work_s = sum(waiting_s) / len(waiting_s) * max(view.backlog, len(waiting_s)) if waiting_s else 0.0
    return min(age_max_s, max(ratio * sum(known) / len(known), work_s / view.total))


def _expected_s(action: Action) -> float:
    return UNKNOWN_S if action.t_ori_s is None else action.t_ori_s


def is_short(action: Action, kind: str, short_s: float) -> bool:
    """Whether it has no choice of units and is short; one of unknown duration is taken to be short."""
    return action.key != kind and (action.t_ori_s is None or action.t_ori_s <= short_s)


def head_room(running: Sequence[RunningView], kind: str, scale: float) -> int:
    """Units kept from elastic actions for the short ones that arrive before the next end.

    Arrivals of rigid actions scatter around what runs of them by its square root.
    """
    rigid = RunningSet.of(running, kind).rigid
    return math.ceil(scale * math.sqrt(rigid)) if rigid else 0
