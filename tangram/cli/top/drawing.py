"""The whole screen of `tangram top` as lines of exactly the terminal's size; pure, so that every size can be tested."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tangram.cli.printing.columns import fit, line, padded
from tangram.cli.printing.output import visible
from tangram.cli.top.picture import FAIL, WAIT, Signs, picture
from tangram.cli.top.rows import Listing, actions, chosen, functions, pools, tasks
from tangram.cli.top.view import HELP, PANES, SIGNS, TopView
from tangram.cli.top.watched import Watched
from tangram.types import QueueEntry

#: From so many columns on the log stands at the right of the list, else below it.
BESIDE = 140
KEYS = "enter log  c cancel  / filter  <> sort  t timeline  e address  p pause  ? help  q quit"


def listing(watched: Watched, waiting: Sequence[QueueEntry], view: TopView) -> Listing:
    """Return the rows of the list that was chosen."""
    if view.pane in SIGNS:
        found = actions(watched, waiting, SIGNS[view.pane])
    else:
        found = {"functions": functions, "tasks": tasks, "nodes": pools}[view.pane](watched)
    return chosen(found, view.words, view.sort, view.descending)


def draw(
    watched: Watched, rows: Listing, view: TopView, server: str, status: str, width: int, height: int, signs: Signs
) -> list[Text]:
    """Return ``height`` lines of at most ``width`` signs."""
    head = picture(watched, server, status, width, height, signs, view.timeline)
    foot = _foot(rows, view, width) if height >= 8 else _foot(rows, view, width)[:1]
    if height >= 12:
        head.append(Text(signs.rule * width, "bright_black"))
    room = max(1, height - len(head) - len(foot))
    if view.helping:
        body = [Text(f" {each}") for each in HELP]
    elif view.log is None:
        body = _list(rows, view, width, room)
    elif width >= BESIDE:
        left = width // 2
        pairs = zip(_list(rows, view, left - 1, room), _log(view, width - left - 2, room), strict=True)
        body = [_beside(one, other, left) for one, other in pairs]
    else:
        above = max(2, room // 2)
        body = _list(rows, view, width, above) + _log(view, width, room - above)
    body = (body + [Text("")] * room)[:room]
    lines = [*head, *body, *foot][:height]
    for each in lines:
        each.truncate(width)
    return lines


def _list(rows: Listing, view: TopView, width: int, room: int) -> list[Text]:
    at = view.arrange(rows, room - 1)
    fitted = fit(rows.columns, [row.cells for row in rows.rows[view.offset : view.offset + room]], width - 1)
    titles = [
        each.title + (("v" if view.descending else "^") if view.sort == index else "")
        for index, each in enumerate(rows.columns)
    ]
    lines = [Text(" " + line(rows.columns, fitted, titles), "bold")]
    if not rows.rows:
        lines.append(Text("  nothing passes the filter" if view.words else "  nothing here now", "bright_black"))
    for index, row in enumerate(rows.rows[view.offset : view.offset + room - 1], view.offset):
        text = (">" if index == at else " ") + line(rows.columns, fitted, row.cells)
        style = FAIL if row.alarming else WAIT if row.sign == "w" else ""
        lines.append(Text(padded(text, width), f"{style} reverse".strip()) if index == at else Text(text, style))
    return (lines + [Text("")] * room)[:room]


def _log(view: TopView, width: int, room: int) -> list[Text]:
    assert view.log is not None
    shown = list(view.log.lines)
    end = len(shown) - view.log.back
    body = shown[max(0, end - room + 1) : end]
    title = f" log of {view.log.id}  {view.log.told}" + (f"  {view.log.back} lines below" if view.log.back else "")
    lines = [Text(padded(title, width), "bold reverse"), *(Text(padded(visible(each), width)) for each in body)]
    return (lines + [Text("")] * room)[:room]


def _beside(left: Text, right: Text, at: int) -> Text:
    made = left.copy()
    made.truncate(at - 1, pad=True)
    made.append("| ", "bright_black")
    made.append_text(right)
    return made


def _foot(rows: Listing, view: TopView, width: int) -> list[Text]:
    below = max(0, len(rows.rows) - view.offset - view.drawn)
    tabs = Text(" ")
    for key, name in PANES.items():
        tabs.append(f"{key} {name}", "bold reverse" if name == view.pane else "")
        tabs.append(" " if width < 100 else "   ")
    more = f"{below} more " if below else ""
    tabs.append(padded(more, max(len(more), width - tabs.cell_len), right=True), "bright_black")
    tabs.truncate(width)
    last = Text(" ")
    if view.prompt == "filter":
        last.append(f"/{view.typed}_", "bold")
    elif view.prompt == "cancel":
        last.append(f"cancel {view.asked[0]}? y/n", f"bold {WAIT}")
    elif view.prompt == "cancel_all":
        last.append(f"cancel all {len(view.asked)}? type their number: {view.typed}_", f"bold {WAIT}")
    elif view.message:
        last.append(visible(view.message), "bold")
    else:
        told = f"filter {view.words}   " if view.words else ""
        last.append(told, "bold")
        last.append(("PAUSED   " if view.paused else "") + KEYS, "bright_black")
    last.truncate(width)
    return [tabs, last]
