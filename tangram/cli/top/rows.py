"""The rows of `tangram top`'s lists: actions, functions, tasks, pools; and how they are filtered and sorted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tangram.cli.printing import brief
from tangram.cli.printing.columns import ListColumn
from tangram.cli.printing.output import visible
from tangram.cli.top.watched import Watched, WatchedBar, WatchedStep
from tangram.types import QueueEntry
from tangram.types.values.quantities import show_size

#: How many ended ones are listed at most, and for how long (milliseconds).
ENDED_MAX, ENDED_MS = 200, 15 * 60_000


class ListedRow(NamedTuple):
    """One line of a list."""

    #: What the cursor stays on when lines move: the id of an action, a name otherwise.
    key: str
    #: ``R`` runs, ``w`` waits, ``X`` failed; empty where a row is no action.
    sign: str
    cells: tuple[str, ...]
    #: What it is sorted by, by column.
    order: tuple[float | str, ...]
    #: What a filter finds, by name.
    facts: Mapping[str, str]
    #: Whether it is to be noticed: it failed, or is over its time.
    alarming: bool = False


class Listing(NamedTuple):
    """A list: its columns and its rows in order."""

    columns: Sequence[ListColumn]
    rows: Sequence[ListedRow]


ACTIONS = (
    ListColumn("S", 1, 1),
    ListColumn("ID", 4, 11),
    ListColumn("FUNCTION", 8, 20),
    ListColumn("TASK", 10, 16, rank=5),
    ListColumn("TRAJECTORY", 9, 18, rank=4),
    ListColumn("NODE", 6, 12, rank=8),
    ListColumn("UNITS", 7, 14, rank=3),
    ListColumn("AGE", 5, 6, right=True, rank=1),
    ListColumn("QUEUE", 5, 6, right=True, rank=6),
    ListColumn("EXEC", 5, 6, right=True, rank=7),
    ListColumn("OF / FOR", 8, 40, rank=2),
)
FUNCTIONS = (
    ListColumn("FUNCTION", 10, 30),
    ListColumn("STATE", 8, 12),
    ListColumn("RUNNING", 7, 7, right=True, rank=1),
    ListColumn("FAILED", 6, 6, right=True, rank=3),
    ListColumn("PROBLEM", 10, 80, rank=4),
)
TASKS = (
    ListColumn("TASK", 10, 30),
    ListColumn("WAITING", 7, 7, right=True),
    ListColumn("RUNNING", 7, 7, right=True),
    ListColumn("ENDED", 6, 8, right=True, rank=3),
    ListColumn("FAILED", 6, 8, right=True, rank=4),
    ListColumn("WEIGHT", 6, 6, right=True, rank=5),
    ListColumn("STEP", 4, 10, right=True, rank=1),
    ListColumn("OF IT", 7, 15, right=True, rank=1),
    ListColumn("ENDS IN", 7, 7, right=True, rank=2),
)
POOLS = (
    ListColumn("POOL", 10, 30),
    ListColumn("KIND", 6, 14, rank=2),
    ListColumn("NODE", 6, 20, rank=3),
    ListColumn("USED", 6, 8, right=True),
    ListColumn("OF", 6, 8, right=True),
    ListColumn("MEMORY", 10, 20, rank=1),
)


def actions(watched: Watched, waiting: Iterable[QueueEntry], signs: str) -> Listing:
    """Return what runs, what waits and what failed, as far as ``signs`` names it."""
    expected = {each[0]: each[7] for each in watched.sections.get("long") or ()}
    rows: list[ListedRow] = []
    if "R" in signs:
        rows += [_bar(bar, watched.now_ms, expected.get(bar.id)) for bar in watched.running()]
    if "w" in signs:
        rows += [_waiting(entry) for entry in waiting]
    if "X" in signs:
        recent = [bar for bar in watched.failed() if watched.now_ms - (bar.end_ms or 0.0) < ENDED_MS]
        rows += [_bar(bar, watched.now_ms, None) for bar in recent[:ENDED_MAX]]
    return Listing(ACTIONS, rows)


def _bar(bar: WatchedBar, now_ms: float, expected_ms: float | None) -> ListedRow:
    end_ms = now_ms if bar.end_ms is None else bar.end_ms
    execution_s = max(0.0, end_ms - bar.start_ms - bar.overhead_ms) / 1000
    age_s = max(0.0, end_ms - bar.start_ms + bar.queue_ms) / 1000
    late = expected_ms is not None and now_ms > expected_ms
    note = bar.reason or ""
    if bar.reason is None and expected_ms is not None:
        note = f"~{brief.seconds((expected_ms - bar.start_ms) / 1000)}{' !' if late else ''}"
    pools = sorted({pool for pool, _, _ in bar.places})
    units = sum(each for _, _, each in bar.places)
    kind, _, node = (pools[0] if pools else "").partition(":")
    return _action(
        "X" if bar.reason else "R",
        bar.id,
        bar.function,
        bar.task,
        bar.trajectory,
        node,
        f"{units} {kind}".strip(),
        (age_s, bar.queue_ms / 1000, execution_s),
        note,
        alarming=bool(bar.reason) or late,
    )


def _waiting(entry: QueueEntry) -> ListedRow:
    units = ", ".join(
        f"{least if least == most else f'{least}-{most}'} {kind}" for kind, (least, most) in entry.cost.items()
    )
    why = entry.cause.text
    id = entry.id.partition(".")[0]
    times = (entry.age_s, entry.age_s, None)
    return _action("w", id, entry.function, entry.task, entry.trajectory, "", units, times, why)


def _action(
    sign: str,
    id: str,
    function: str,
    task: str,
    trajectory: str | None,
    node: str,
    units: str,
    times: tuple[float, float, float | None],
    note: str,
    *,
    alarming: bool = False,
) -> ListedRow:
    texts = (function, task, trajectory or "-", node or "-", units or "-")
    age_s, queue_s, execution_s = times
    cells = (sign, brief.short_id(id), *map(visible, texts), *map(brief.seconds, times), visible(note))
    order = ("RwX".index(sign), id, *texts, age_s, queue_s, execution_s or 0.0, note)
    facts = {"fn": function, "task": task, "traj": trajectory or "", "node": node, "id": id}
    facts |= {"state": {"R": "running", "w": "queued", "X": "failed"}[sign], "reason": note if sign == "X" else ""}
    return ListedRow(id, sign, cells, order, facts, alarming)


def functions(watched: Watched) -> Listing:
    """Return the functions, each with its health and what it does."""
    running, failed = _counted(watched.running()), _counted(watched.failed())
    rows = [
        _named(name, (status, running.get(name, 0), failed.get(name, 0), problem or "-"))
        for name, (status, problem) in watched.section("fns").items()
    ]
    return Listing(FUNCTIONS, rows)


def tasks(watched: Watched) -> Listing:
    """Return the tasks that have most to do."""
    rows = []
    for name, (queued, running, settled, weight) in watched.section("tasks").items():
        ended = sum(settled.values())
        step = watched.step_of(name)
        of_step = ("-", "-", "-") if step is None else (step.number, step.progress, left(watched, step))
        failed = ended - settled.get("succeeded", 0) - settled.get("cancelled", 0)
        rows.append(_named(name, (queued, running, ended, failed, weight, *of_step)))
    return Listing(TASKS, rows)


def left(watched: Watched, step: WatchedStep) -> str:
    """Return how long a step is expected to go on; ``-`` if nothing tells."""
    end_ms = step.expected_end_ms
    return brief.seconds(None if end_ms is None else max(0.0, end_ms - watched.now_ms) / 1000)


def pools(watched: Watched) -> Listing:
    """Return the pools of every node, each with what is held of it."""
    nodes = watched.section("nodes")
    rows = []
    for name, pool in watched.section("pools").items():
        node = nodes.get(pool.get("node") or "")
        memory = f"{show_size(node[2])} of {show_size(node[1])}" if node and pool["kind"] == "cpu" else "-"
        used = pool["total"] - pool["free"]
        rows.append(_named(name, (pool["kind"], pool.get("node") or "-", used, pool["total"], memory)))
    return Listing(POOLS, rows)


def _counted(bars: Iterable[WatchedBar]) -> dict[str, int]:
    found: dict[str, int] = {}
    for bar in bars:
        found[bar.function] = found.get(bar.function, 0) + 1
    return found


def _named(name: str, values: tuple[object, ...]) -> ListedRow:
    cells = tuple(brief.count(each) if isinstance(each, int | float) else visible(str(each)) for each in values)
    order = tuple(each if isinstance(each, int | float) else str(each) for each in values)
    return ListedRow(name, "", (visible(name), *cells), (name, *order), {"name": name})


def chosen(listing: Listing, words: str, sort: int | None, descending: bool) -> Listing:
    """Return the rows that pass the filter, sorted by a column; without one in the order in which they came."""
    passes = passing(words)
    rows = [row for row in listing.rows if passes(row)]
    if sort is not None and sort < len(listing.columns):
        rows.sort(key=lambda row: _comparable(row.order[sort]), reverse=descending)
    return Listing(listing.columns, rows)


def passing(words: str) -> Callable[[ListedRow], bool]:
    """Return the test of a filter: ``task:swe fn:pytest state:failed``, and bare words that stand anywhere."""
    wanted = [re.fullmatch(r"(?:(\w+):)?(.*)", word) for word in words.lower().split()]

    def passes(row: ListedRow) -> bool:
        for found in wanted:
            assert found is not None, "every text matches"
            name, text = found[1], found[2]
            if name in row.facts:
                if not row.facts[name].lower().startswith(text):
                    return False
            elif not any((found[0]) in cell.lower() for cell in (*row.cells, *row.facts.values())):
                return False
        return True

    return passes


def _comparable(value: float | str) -> tuple[int, float, str]:
    return (0, value, "") if isinstance(value, int | float) else (1, 0.0, value)
