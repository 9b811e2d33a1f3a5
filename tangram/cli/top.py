"""``tangram top`` and ``tangram queue``: what runs, who holds which resources, and what waits for what."""

from __future__ import annotations

import os
import queue as queues
import re
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import click

from tangram import Client, InvocationResult, TangramError, types
from tangram.cli.invocations import INVOCATIONS, invocation_rows
from tangram.cli.options import Duration, connected, json_option, limit_option
from tangram.cli.output import (
    TableColumn,
    cells_of,
    cut,
    is_terminal,
    padded,
    print_json,
    say,
    short_id,
    show,
    show_seconds,
    styled,
    table,
    visible,
)
from tangram.cli.sessions import LocalTerminal
from tangram.cli.state import TASKS, task_rows

#: Waiting actions that causes are counted of, and rows of a list.
QUEUE_MAX, LISTED_MAX = 1000, 200
#: Seconds between two looks at the gateway and between two drawings; a screen that is older than `OLD_S` says so.
LOOK_S, DRAW_S, OLD_S = 1.0, 0.25, 5.0
#: States of what is listed as failed.
FAILED = ("failed", "timed_out", "lost")
BAR = 12
QUEUE = (
    TableColumn("ID"),
    TableColumn("FUNCTION", 10),
    TableColumn("TASK", 6, 3),
    TableColumn("TRAJECTORY", 6, 4),
    TableColumn("AGE", 6, 1),
    TableColumn("UNITS", 8, 2),
    TableColumn("WAITS FOR", 20),
)
CAUSES = (TableColumn("WAITING"), TableColumn("OLDEST", 6, 1), TableColumn("TASKS", 8, 2), TableColumn("FOR", 20))
POOLS = (TableColumn("POOL"), TableColumn("IN USE", None), TableColumn("UNITS", 5), TableColumn("HELD BY", 10, 1))
NODES = ("NODE", "CORES", "DEVICES", "MEMORY", "TRAJECTORIES")
FUNCTIONS = (TableColumn("FUNCTION"), TableColumn("STATUS", 11), TableColumn("RUNNING", 7, 1), TableColumn("PROBLEM"))
DEVICES = (
    TableColumn("DEVICE"),
    TableColumn("STATE", 5),
    TableColumn("COMPUTES", 14),
    TableColumn("HOLDS", 10, 1),
    TableColumn("RESIDENT", 12, 2),
    TableColumn("USED", 5, 4),
    TableColumn("RUNS", 4, 5),
    TableColumn("SWAPS", 5, 6),
    TableColumn("HIT RATE", 8, 3),
)


# --- what is shown of a gateway


class TopState(NamedTuple):
    """What a gateway does, as it told of one look."""

    resources: types.ResourcesInfo
    tasks: Sequence[types.TaskInfo]
    queue: Sequence[types.QueueEntry]
    functions: Sequence[types.FunctionInfo]
    activity: types.ActivityInfo
    running: Sequence[InvocationResult]
    #: Of the last 15 minutes, the newest first.
    failed: Sequence[InvocationResult]

    @property
    def waiting(self) -> int:
        return sum(task.queued for task in self.tasks)


def look(client: Client) -> TopState:
    """Ask a gateway what it does; raises TangramError."""
    tasks = client.tasks()
    failed = [each for state in FAILED for each in client.list(state=state, since="15m", limit=LISTED_MAX)]
    return TopState(
        resources=client.resources(),
        tasks=tasks,
        queue=client.queue(QUEUE_MAX) if any(task.queued for task in tasks) else (),
        functions=client.functions(),
        activity=client.activity(),
        running=list(client.list(state="running", limit=LISTED_MAX)),
        failed=sorted(failed, key=lambda each: each.id, reverse=True)[:LISTED_MAX],
    )


def queue_rows(entries: Iterable[types.QueueEntry], *, short: bool) -> list[tuple[object, ...]]:
    """Return the cells of `QUEUE`, with short or whole ids."""
    return [
        (
            short_id(_invocation(each)) if short else _invocation(each),
            each.function,
            each.task,
            each.trajectory,
            show_seconds(each.age_s),
            each.cost,
            _why(each),
        )
        for each in entries
    ]


def cause_rows(entries: Iterable[types.QueueEntry]) -> list[tuple[object, ...]]:
    """Return the cells of `CAUSES`, what most wait for first."""
    by_cause: dict[str, list[types.QueueEntry]] = {}
    for each in entries:
        by_cause.setdefault(_why(each), []).append(each)
    return [
        (len(those), show_seconds(max(each.age_s for each in those)), sorted({each.task for each in those}), why)
        for why, those in sorted(by_cause.items(), key=lambda item: -len(item[1]))
    ]


def _why(entry: types.QueueEntry) -> str:
    return entry.cause.text


def _invocation(entry: types.QueueEntry) -> str:
    """Return the id of the invocation whose try waits."""
    return entry.id.partition(".")[0]


def pool_rows(resources: types.ResourcesInfo) -> list[tuple[object, ...]]:
    """Return the cells of `POOLS`: a bar, and the functions that hold most."""
    rows: list[tuple[object, ...]] = []
    for name, pool in resources.pools.items():
        used = pool.total - pool.free
        by_function: dict[str, int] = {}
        for id, holder in (pool.holders or {}).items():
            by_function[holder.function] = by_function.get(holder.function, 0) + pool.held.get(id, 0)
        holders = [f"{function} {units}" for function, units in sorted(by_function.items(), key=lambda each: -each[1])]
        if pool.next_return_s:
            holders.append(f"more in {show_seconds(pool.next_return_s)}")
        full = round(BAR * used / pool.total) if pool.total else 0
        rows.append((name, f"[{'#' * full}{'.' * (BAR - full)}]", f"{used}/{pool.total}", ", ".join(holders) or None))
    return rows


def device_rows(devices: Iterable[types.ModelDevice]) -> list[tuple[object, ...]]:
    """Return the cells of `DEVICES`: the chunk map, and how often each device swapped."""
    return [
        (
            f"{each.index} {each.name}",
            "alive" if each.alive else "dead",
            None if each.running is None else _placed(each.running),
            " ".join(map(_placed, each.resident)) or None,
            f"{types.show_size(each.resident_bytes)} of {types.show_size(each.arena_bytes)}",
            None if each.used_bytes is None else types.show_size(each.used_bytes),
            each.executions,
            each.swaps,
            f"{each.hit_rate:.0%}",
        )
        for each in devices
    ]


def _placed(model: types.PlacedModel) -> str:
    """Return a service and the devices of its chunk: ``teacher:lm@0-3``."""
    start, size = model.chunk
    return f"{PurePath(model.service).name}@{start if size == 1 else f'{start}-{start + size - 1}'}"


def node_rows(resources: types.ResourcesInfo) -> list[tuple[object, ...]]:
    """Return the cells of `NODES`."""
    return [
        (
            each.node,
            each.cores,
            each.devices,
            f"{types.show_size(each.held_bytes)} of {types.show_size(each.memory_bytes)}",
            each.trajectories,
        )
        for each in resources.nodes
    ]


def function_rows(state: TopState) -> list[tuple[object, ...]]:
    """Return the cells of `FUNCTIONS`."""
    running: dict[str, int] = {}
    for each in state.running:
        running[each.function] = running.get(each.function, 0) + 1
    return [
        (each.name, each.status or None, running.get(each.name, 0), each.problem or None) for each in state.functions
    ]


def summary(state: TopState) -> list[str]:
    """Return three lines: how much runs, waits, ended and failed, and the action completion time (ACT)."""
    activity, act = state.activity, state.activity.act
    causes = cause_rows(state.queue)
    waits = f", {causes[0][0]} of them for {visible(str(causes[0][3]))}" if causes else ""
    return [
        f"{sum(task.running for task in state.tasks)} running, {state.waiting} waiting{waits}",
        f"last minute: {activity.ended} ended, {activity.failed} failed; ACT {show_seconds(act.p50_s)} p50, "
        f"{show_seconds(act.p99_s)} p99",
        f"mean: queue {show_seconds(act.queue_s)}, overhead {show_seconds(act.overhead_s)}, execution "
        f"{show_seconds(act.execution_s)}",
    ]


def sections(state: TopState, width: int) -> Iterator[str]:
    """Yield everything as lines of at most ``width`` signs: what `top` prints without its screen."""
    models = state.resources.models
    yield from (cut(each, width) for each in summary(state))
    for columns, rows in (
        (POOLS, pool_rows(state.resources)),
        (NODES, node_rows(state.resources)),
        (DEVICES, device_rows(models.devices)),
        (TASKS, task_rows(state.tasks)),
        (CAUSES, cause_rows(state.queue)),
        (INVOCATIONS, invocation_rows(state.running, short=True)),
    ):
        if rows:
            yield ""
            yield from table(columns, rows, width=width)


# --- the verbs


@click.command()
@limit_option("actions")
@json_option
@connected
def queue(client: Client, limit: int, as_json: bool) -> None:
    """What waits, and for what: first how many actions wait for the same, then the actions in order of service.

    \b
    tangram queue            # the first 20
    tangram queue --json     # for programs
    """
    waiting = sum(task.queued for task in client.tasks())
    entries = client.queue(QUEUE_MAX)
    causes = cause_rows(entries)
    if as_json:
        listed = [{"count": count, "waits_for": why, "tasks": tasks} for count, _, tasks, why in causes]
        print_json({"waiting": waiting, "causes": listed, "queue": entries[:limit]})
    elif not entries:
        say("nothing waits")
    else:
        show(table(CAUSES, causes), "", table(QUEUE, queue_rows(entries[:limit], short=is_terminal())))
        if max(waiting, len(entries)) > limit:
            say(f"{max(waiting, len(entries)) - limit} more wait")


@click.command()
@click.option(
    "--interval", "interval_s", type=Duration(), help="Time between two looks; without a terminal: print again."
)
@click.option("--once", is_flag=True, help="Print it once, without the screen.")
@json_option
@connected
def top(client: Client, interval_s: float | None, once: bool, as_json: bool) -> int:
    """What the gateway does now: pools and who holds them, tasks, what runs, what waits for what, what failed.

    On a terminal a screen that follows it (? lists its keys), elsewhere one print of at most COLUMNS (80) signs a line.

    \b
    tangram top
    tangram top --once
    """
    if sys.stdin.isatty() and is_terminal() and not (once or as_json):
        return TopScreen(client, interval_s or LOOK_S).run()
    while True:
        state = look(client)
        if as_json:
            steps = [step for task in state.tasks for step in task.steps]
            snapshot = {"resources": state.resources, "activity": state.activity, "tasks": state.tasks, "steps": steps}
            print_json(
                {**snapshot, "waiting": state.waiting, "queue": state.queue[:LISTED_MAX], "running": state.running}
            )
        else:
            show(sections(state, shutil.get_terminal_size().columns))
        if interval_s is None or once:
            return 0
        time.sleep(interval_s)


# --- the screen

#: The lists, by the key that shows them.
PANES = {"1": "running", "2": "waiting", "3": "failed", "4": "tasks", "5": "functions", "6": "nodes"}
HELP = (
    "1 running   2 waiting   3 failed in 15 minutes   4 tasks   5 functions   6 nodes and devices",
    "up down j k pgup pgdn   move         enter   the log of an invocation, esc closes it",
    "/   filter: any text, or COLUMN:text (task:swe reason:timeout); esc takes it away",
    "c   cancel what the cursor is on     p   pause     q   quit",
)
KEYS = "enter log  c cancel  / filter  p pause  ? help  q quit"
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
_NAMES = {
    "\x1b": "esc",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "back",
    "\x08": "back",
    "\x03": "q",
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "pgup",
    "\x1b[6~": "pgdn",
}
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -10, "pgdn": 10}


@dataclass(slots=True)
class LogTail:
    """The end of one invocation's log."""

    id: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=500))
    #: The next record to ask for.
    offset: int = 0


@dataclass(slots=True)
class TopView:
    """What the user of the screen has chosen; no terminal and no socket, so that every key and size can be tested."""

    #: Has an invocation cancelled.
    cancel: Callable[[str], None]
    pane: str = "running"
    words: str = ""
    #: The row that the cursor is on: it stays on it when others come and go.
    selected: str | None = None
    prompt: str = ""
    paused: bool = False
    helping: bool = False
    log: LogTail | None = None
    message: str = ""

    def press(self, key: str, state: TopState) -> bool:
        """Take a key, by its sign or its name; return whether to go on."""
        keys = [each for each, _ in self.rows(state)]
        at = keys.index(self.selected) if self.selected in keys else 0
        current = keys[at] if keys else None
        self.message = ""
        if self.helping:
            self.helping = False
        elif self.prompt == "filter":
            self._type(key)
        elif self.prompt:
            id, self.prompt = self.prompt, ""
            if key in ("y", "Y"):
                self.cancel(id)
        elif key == "q":
            return False
        elif key in PANES:
            self.pane, self.selected = PANES[key], None
        elif key in _MOVES and keys:
            self.selected = keys[max(0, min(len(keys) - 1, at + _MOVES[key]))]
        elif key == "esc":
            self.log, self.words = None, self.words if self.log else ""
        elif key == "/":
            self.prompt = "filter"
        elif key == "p":
            self.paused = not self.paused
        elif key == "?":
            self.helping = True
        elif key == "enter" and current and self.pane in ("running", "waiting", "failed"):
            self.selected, self.log = current, LogTail(current)
        elif key == "c" and current and self.pane in ("running", "waiting"):
            self.selected = self.prompt = current
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "esc"):
            self.prompt, self.words = "", self.words if key == "enter" else ""
        elif key == "back":
            self.words = self.words[:-1]
        elif len(key) == 1 and key.isprintable():
            self.words += key

    def rows(self, state: TopState) -> list[tuple[str, tuple[object, ...]]]:
        """Return the rows that pass the filter, each with what the cursor knows it by."""
        columns, rows = self._list(state)
        titles = [each if isinstance(each, str) else each.title for each in columns]
        return [(key, cells) for key, cells in rows if self._passes(dict(zip(titles, cells, strict=True)))]

    def _list(self, state: TopState) -> tuple[Sequence[str | TableColumn], list[tuple[str, tuple[object, ...]]]]:
        columns: Sequence[str | TableColumn]
        match self.pane:
            case "waiting":
                waiting = state.queue[:LISTED_MAX]
                return QUEUE, list(zip(map(_invocation, waiting), queue_rows(waiting, short=True), strict=True))
            case "tasks":
                columns, rows = TASKS, task_rows(state.tasks)
            case "functions":
                columns, rows = FUNCTIONS, function_rows(state)
            case "nodes":
                if state.resources.models.devices:
                    columns, rows = DEVICES, device_rows(state.resources.models.devices)
                else:
                    return NODES, [(str(row[0]), row) for row in node_rows(state.resources)]
            case _:
                shown = state.running if self.pane == "running" else state.failed
                return INVOCATIONS, list(
                    zip([each.id for each in shown], invocation_rows(shown, short=True), strict=True)
                )
        return columns, [(str(row[0]), row) for row in rows]

    def _passes(self, cells: Mapping[str, object]) -> bool:
        for word in self.words.lower().split():
            name, colon, text = word.partition(":")
            named = [value for title, value in cells.items() if colon and title.lower() == name]
            if not any((text if named else word) in str(value).lower() for value in named or cells.values()):
                return False
        return True

    def draw(self, state: TopState, server: str, status: str, width: int, height: int) -> list[str]:
        """Return ``height`` lines of at most ``width`` signs, styles aside."""
        place = server.partition("://")[2]
        title = f"tangram {place}  up {show_seconds(state.activity.uptime_s)}  {'PAUSED' if self.paused else status}"
        lines = [styled(padded(title, width), reverse=True)]
        lines += summary(state)
        if height >= 16:
            lines += table(POOLS, pool_rows(state.resources), width=width)[: height // 3]
        tabs = "  ".join(f"[{each}]" if each == self.pane else f"{key} {each}" for key, each in PANES.items())
        lines += ["", tabs]
        room = max(1, height - len(lines) - 1)
        if self.helping:
            lines += HELP
        elif self.log is not None and room > 4:
            lines += self._drawn_rows(state, width, room // 2)
            lines.append(styled(padded(f"log of {self.log.id}", width), bold=True))
            lines += map(visible, list(self.log.lines)[-(room - room // 2 - 1) :])
        else:
            lines += self._drawn_rows(state, width, room)
        lines = [*[*lines, *[""] * height][: height - 1], self._foot()]
        return [each if cells_of(plain := click.unstyle(each)) <= width else cut(plain, width) for each in lines]

    def _drawn_rows(self, state: TopState, width: int, room: int) -> list[str]:
        """Return the titles and as many rows as there is room for, the one with the cursor among them."""
        rows = self.rows(state)
        at = next((at for at, (key, _) in enumerate(rows) if key == self.selected), 0)
        first = max(0, at - room + 2)
        shown = rows[first : first + room - 1]
        drawn = table(self._list(state)[0], [cells for _, cells in shown], width=width - 2)
        if not rows:
            drawn.append("nothing passes the filter" if self.words else "nothing here now")
        lines = [f"  {each}" for each in drawn]
        if shown:
            lines[at - first + 1] = styled(f"> {click.unstyle(drawn[at - first + 1])}", reverse=True)
        return [*lines, *[""] * room][:room]

    def _foot(self) -> str:
        if self.prompt == "filter":
            return f"/{self.words}_"
        if self.prompt:
            return f"cancel {short_id(self.prompt)}? y/n"
        return visible(self.message) or (f"filter {self.words}   {KEYS}" if self.words else KEYS)


class TopScreen:
    """The screen: this thread draws and reads keys, another asks the gateway."""

    def __init__(self, client: Client, interval_s: float) -> None:
        self._client, self._interval_s = client, interval_s
        self._state = look(client)
        self._looked_s = time.monotonic()
        self._view = TopView(cancel=lambda id: self._errands.put(lambda: self._cancel(id)))
        #: What the other thread is to do before its next look; None ends it.
        self._errands: queues.SimpleQueue[Callable[[], None] | None] = queues.SimpleQueue()

    def run(self) -> int:
        """Show it until the user leaves; the terminal is as before then, also after a fault."""
        thread = threading.Thread(target=self._follow, name="tangram-top", daemon=True)
        with LocalTerminal(raw=True) as terminal:
            _write("\x1b[?1049h\x1b[?25l")
            thread.start()
            try:
                while self._keys():
                    height, width = terminal.size()
                    status = _status(time.monotonic() - self._looked_s)
                    lines = self._view.draw(self._state, self._client.server, status, width, height)
                    _write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines))
            finally:
                _write("\x1b[?25h\x1b[?1049l")
                self._errands.put(None)
        thread.join(1.0)
        return 0

    def _keys(self) -> bool:
        """Hand what is typed to the view; return whether to go on."""
        stdin = sys.stdin.fileno()
        if not select.select([stdin], [], [], DRAW_S)[0]:
            return True
        typed = os.read(stdin, 1024).decode(errors="replace")
        went_on = bool(typed)
        for key in _KEY.findall(typed):
            log = self._view.log
            went_on = went_on and self._view.press(_NAMES.get(key, key), self._state)
            if self._view.log is not log:
                self._errands.put(self._read_log)
        return went_on

    def _follow(self) -> None:
        """Look again and again, and do errands; what goes wrong is told at the foot."""
        while True:
            with suppress(queues.Empty):
                errand = self._errands.get(timeout=self._interval_s)
                if errand is None:
                    return
                self._try(errand)
            if not self._view.paused:
                self._try(self._look)
                self._try(self._read_log)

    def _try(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        except TangramError as error:
            self._view.message = error.message

    def _look(self) -> None:
        self._state = look(self._client)
        self._looked_s = time.monotonic()

    def _read_log(self) -> None:
        log = self._view.log
        for line in self._client.logs(log.id, offset=log.offset) if log is not None else ():
            assert log is not None
            log.offset = line.offset + 1
            mark = "! " if line.stream == "stderr" else ""
            log.lines.extend(f"{mark}{text}" for text in line.data.splitlines())

    def _cancel(self, id: str) -> None:
        self._client.cancel(id)
        self._view.message = f"{short_id(id)} is cancelled"


def _status(age_s: float) -> str:
    return "live" if age_s < OLD_S else f"nothing heard for {show_seconds(age_s)}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
