"""The picture above the list: verdict, numbers, pools as bars, tasks, causes of waiting, and the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tangram.cli.printing import brief
from tangram.cli.printing.columns import cut, padded
from tangram.cli.printing.output import visible
from tangram.cli.top.rows import left
from tangram.cli.top.watched import Watched, WatchedBar

#: Colours of functions as on the page, failures and what waits; what is over its number shares the last.
HUES = ("#4A86E8", "#D99A1C", "#27A586", "#B377B8", "#7FBFEA", "#C4CBD8")
OTHER, FAIL, WAIT, DIM = "#868F9C", "#FF6B57", "#F0B429", "bright_black"
INK = "#0E1116"
#: Verdict -> what stands before it.
BADGES = {
    "stopped": "STOPPED",
    "draining": "DRAINING",
    "unavailable": "UNAVAILABLE",
    "quota": "QUOTA BOUND",
    "memory": "MEMORY BOUND",
    "devices": "GPU BOUND",
    "units": "CPU BOUND",
    "waiting": "WAITING",
    "ok": "OK",
    "idle": "IDLE",
}
#: From so many columns on there are curves, from so many rows on the last minutes.
WIDE, TALL = 120, 32
#: Pools, and rows of the last minutes, that are drawn.
POOLS_MAX, LANES_MAX = 8, 12


@dataclass(frozen=True, slots=True)
class Signs:
    """What is drawn with: block characters, or those of ASCII."""

    ramp: str = "▁▂▃▄▅▆▇█"
    full: str = "█"
    none: str = "░"
    rule: str = "─"


ASCII = Signs(ramp="_.-~=+*#", full="#", none=".", rule="-")


class Palette:
    """The colour and the letters of each function."""

    def __init__(self, functions: Iterable[str]) -> None:
        self._order = {name: at for at, name in enumerate(sorted(functions))}

    def colour(self, function: str) -> str:
        at = self._order.get(function, len(HUES))
        return HUES[at] if at < len(HUES) else OTHER


def letters(function: str) -> str:
    """Return the two letters that stand for a function."""
    function = visible(function)
    for divider in "-.:@":
        function = function.replace(divider, "_")
    parts = [part for part in function.split("_") if part]
    return (parts[0][0] + parts[1][0] if len(parts) > 1 else function[:2]).lower()


def picture(
    watched: Watched, server: str, status: str, width: int, height: int, signs: Signs, timeline: bool = True
) -> list[Text]:
    """Return the lines above the list, at most half of ``height`` and none on a very small terminal."""
    if height < 12 or width < 40:
        return [_title(watched, server, status, width)]
    palette = Palette(watched.section("fns"))
    lines = [_title(watched, server, status, width), _numbers(watched, width, signs)]
    lines += _pools(watched, palette, width, signs)
    if tasks := _tasks(watched, width):
        lines.append(tasks)
    if waits := _waits(watched, width):
        lines.append(waits)
    lines = lines[: max(2, height // 2)]
    room = min(LANES_MAX, height // 2 - len(lines) - 2)
    if timeline and height >= TALL and room > 0:
        lines += _lanes(watched, palette, width, room, signs)
    return lines


def _title(watched: Watched, server: str, status: str, width: int) -> Text:
    code, told = watched.sections.get("verdict") or ("", "")
    up = brief.seconds((watched.now_ms - watched.began_ms) / 1000) if watched.began_ms else "-"
    badge = BADGES.get(code, code.upper())
    place = server.partition("://")[2] or server
    left = f" tangram {place}  up {up}  "
    right = f"  {status} "
    room = max(0, width - len(left) - len(badge) - 2 - len(right))
    colour = FAIL if code in ("stopped", "unavailable") else WAIT if code not in ("ok", "idle", "") else "green"
    line = Text(left)
    if room > 0:
        line.append(f"{badge} ", f"bold {colour}")
        line.append(padded(visible(str(told)), room + 1))
    line.append(padded(right, width - line.cell_len, right=True), "green" if status.startswith("live") else WAIT)
    return line


def _numbers(watched: Watched, width: int, signs: Signs) -> Text:
    rate = watched.sections.get("rate") or [0, 0, 0]
    act = watched.sections.get("act") or [0, 0, 0, None, None]
    oldest = [each[5] for each in watched.sections.get("causes") or ()]
    waited = f", oldest {brief.seconds((watched.now_ms - min(oldest)) / 1000)}" if oldest else ""
    parts = [brief.seconds(each / 1000) for each in act[:3]]
    tail = "" if act[4] is None else f" p50 {brief.seconds(act[3] / 1000)} p99 {brief.seconds(act[4] / 1000)}"
    failed = watched.sections.get("failed_15min", 0)
    line = Text(" ")
    told = [
        ("run", f"run {brief.count(watched.sections.get('run', 0))}"),
        ("wait", f"wait {brief.count(watched.sections.get('wait', 0))}{waited}"),
        ("ended", f"{brief.count(rate[1])}/min"),
        ("failed", f"fail {brief.count(failed)}"),
    ]
    for name, text in told:
        line.append(text, f"bold {FAIL}" if name == "failed" and failed else "bold")
        if width >= WIDE:
            line.append(f" {curve(watched.curves.get(name, ()), 10, signs)}", DIM)
        line.append("  ")
    line.append(f"ACT queue {parts[0]} over {parts[1]} exec {parts[2]}{tail}")
    return _cropped(line, width)


def curve(values: Iterable[int], width: int, signs: Signs) -> str:
    """Return the last values as a small curve, each one sign."""
    last = list(values)[-width:]
    most = max(last, default=0) or 1
    top = len(signs.ramp) - 1
    return "".join(signs.ramp[round(top * value / most)] for value in last)


def _pools(watched: Watched, palette: Palette, width: int, signs: Signs) -> list[Text]:
    pools = list(watched.section("pools").items())
    shown = pools[:POOLS_MAX]
    most = max([len(name) for name, _ in shown], default=0)
    name_width = min(most, max(8, width // 5))
    lines = [_pool(name, pool, watched, palette, width, name_width, signs) for name, pool in shown]
    if len(pools) > len(shown):
        lines.append(Text(f" and {len(pools) - len(shown)} more pools (6)", DIM))
    return lines


def _pool(
    name: str, pool: Mapping[str, Any], watched: Watched, palette: Palette, width: int, name_width: int, signs: Signs
) -> Text:
    total, free = pool["total"], pool["free"]
    line = Text(f" {padded(visible(name), name_width)} ")
    line.append(padded(f"{brief.count(total - free)}/{brief.count(total)}", 9, right=True), "bold")
    line.append(" ")
    tail = ""
    if pool.get("timed") and pool.get("next"):
        tail = f" more in {brief.seconds(max(0.0, pool['next'] - watched.now_ms) / 1000)}"
    node = watched.section("nodes").get(pool.get("node") or "")
    if pool["kind"] == "cpu" and node and width >= 100:
        tail = f" mem {node[2] / 2**30:.1f} of {node[1] / 2**30:.1f} GiB"
    room = max(4, width - line.cell_len - len(tail) - 3)
    line.append("[")
    line.append_text(_cells(pool, palette, room, signs) if "cells" in pool else _shares(pool, palette, room, signs))
    line.append("]")
    line.append(tail, DIM)
    return _cropped(line, width)


def _cells(pool: Mapping[str, Any], palette: Palette, room: int, signs: Signs) -> Text:
    """Return a bar of units: each holder over its units, with the letters of its function."""
    total = max(1, pool["total"])
    width = min(room, max(total, room // total * total) if total <= room else room)
    owners: list[tuple[str, str] | None] = [None] * total
    free = iter(range(total))
    for first, count, holder, function in pool["cells"]:
        places = range(first, first + count) if first >= 0 else [next(free, 0) for _ in range(count)]
        for at in places:
            if 0 <= at < total:
                owners[at] = (holder, function)
    bar, at = Text(), 0
    while at < total:
        end = at + 1
        while end < total and owners[end] == owners[at]:
            end += 1
        size = end * width // total - at * width // total
        owner = owners[at]
        if owner is None:
            bar.append(signs.none * size, DIM)
        elif size > 0:
            label = cut(letters(owner[1]), size)
            bar.append(padded(label, size - 1) + "|" if size > 2 else padded(label, size), _on(palette, owner[1]))
        at = end
    return bar


def _shares(pool: Mapping[str, Any], palette: Palette, room: int, signs: Signs) -> Text:
    """Return a bar of what is in use, by function where that is known."""
    total = max(1, pool["total"])
    used = round(room * (total - pool["free"]) / total)
    bar = Text()
    for function, count in pool.get("by_function") or ():
        size = min(round(room * count / total), used - bar.cell_len)
        if size > 0:
            bar.append(padded(cut(letters(function), size), size), _on(palette, function))
    bar.append(signs.full * max(0, used - bar.cell_len))
    bar.append(signs.none * max(0, room - bar.cell_len), DIM)
    return bar


def _on(palette: Palette, function: str) -> str:
    return f"{INK} on {palette.colour(function)}"


def _tasks(watched: Watched, width: int) -> Text | None:
    rows = sorted(watched.section("tasks").items(), key=lambda item: -(item[1][0] + item[1][1]))
    told = [
        f"{visible(name)} {queued} wait {running} run {brief.count(sum(settled.values()))} done{_step(watched, name)}"
        for name, (queued, running, settled, _) in rows
        if queued or running or settled
    ]
    return _listed("TASKS", told, width)


def _step(watched: Watched, task: str) -> str:
    step = watched.step_of(task)
    if step is None:
        return ""
    ends = "" if step.expected_end_ms is None else f" ends in {left(watched, step)}"
    return f" step {step.number} {step.progress}{ends}"


def _waits(watched: Watched, width: int) -> Text | None:
    counts: dict[str, int] = {}
    for _, _, text, _, count, _ in watched.sections.get("causes") or ():
        counts[text] = counts.get(text, 0) + count
    if rest := watched.sections.get("causes_left_out", 0):
        counts["other causes"] = rest
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return _listed("WAITS FOR", [f"{visible(text)} {count}" for text, count in ordered], width, WAIT)


def _listed(title: str, told: Sequence[str], width: int, style: str = "") -> Text | None:
    if not told:
        return None
    line = Text(f" {title}  ", "bold")
    line.append("   ".join(told), style)
    return _cropped(line, width)


def _lanes(watched: Watched, palette: Palette, width: int, room: int, signs: Signs) -> Iterator[Text]:
    """Yield the last minutes, a sign a second: which function each unit ran, and where it failed."""
    names = [name for name, pool in watched.section("pools").items() if "cells" in pool]
    label_width = min(20, max([len(name) for name in names], default=0) + 8)
    span = max(10, min(120, width - label_width - 2))
    yield Text(padded(f" {signs.rule} LAST {span} S, a sign a second, X failed ", width).replace("  ", " "), DIM)
    drawn = 0
    for name in names:
        units = _lane_cells(watched, name, watched.section("pools")[name]["total"], span)
        for first, last, cells in _merged(units):
            if drawn >= room:
                return
            label = f" {visible(name)} {first}" + ("" if first == last else f"-{last}")
            line = Text(padded(label, label_width))
            for sign, function in cells:
                line.append(sign, FAIL if sign == "X" else palette.colour(function) if function else DIM)
            yield _cropped(line, width)
            drawn += 1


def _lane_cells(watched: Watched, pool: str, total: int, span: int) -> list[list[tuple[str, str]]]:
    units = [[(" ", "")] * span for _ in range(total)]
    begin_ms = watched.now_ms - 1000 * span
    for bar in watched.bars.values():
        end_ms = watched.now_ms if bar.end_ms is None else bar.end_ms
        if end_ms < begin_ms:
            continue
        for place, first, count in bar.places:
            if place == pool and first >= 0:
                _fill(units[first : first + count], bar, begin_ms, end_ms, span)
    return units


def _fill(lanes: Sequence[list[tuple[str, str]]], bar: WatchedBar, begin_ms: float, end_ms: float, span: int) -> None:
    first = max(0, int((bar.start_ms - begin_ms) // 1000))
    last = min(span - 1, int((end_ms - begin_ms) // 1000))
    sign = letters(bar.function)[:1] or "?"
    for lane in lanes:
        for at in range(first, last + 1):
            lane[at] = (sign, bar.function)
        if bar.reason and last >= first:
            lane[last] = ("X", bar.function)


def _merged(units: Sequence[list[tuple[str, str]]]) -> Iterator[tuple[int, int, list[tuple[str, str]]]]:
    """Yield rows of neighbouring units that did the same: first unit, last unit, cells."""
    first = 0
    for at in range(1, len(units) + 1):
        if at == len(units) or units[at] != units[first]:
            yield first, at - 1, units[first]
            first = at


def _cropped(line: Text, width: int) -> Text:
    line.truncate(width)
    return line
