"""What the user of `tangram top` has chosen, and what each key does; no terminal, no clock, no socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tangram.cli.top.rows import Listing

#: The lists, by the key that shows them.
PANES = {"0": "all", "1": "running", "2": "waiting", "3": "failed", "4": "functions", "5": "tasks", "6": "nodes"}
#: Which actions a list has.
SIGNS = {"all": "RwX", "running": "R", "waiting": "w", "failed": "X"}
LOG_LINES_MAX, TYPED_MAX = 2000, 200
HELP = (
    "0 all   1 running   2 waiting   3 failed   4 functions   5 tasks   6 nodes",
    "up down j k pgup pgdn home end   move       enter   the log of an action (esc closes it)",
    "/   filter: task:swe fn:pytest state:failed traj:t1 reason:timeout, or any text; esc takes it away",
    "< >   sort by the column before, behind     r   the other way round",
    "c   cancel what the cursor is on            C   cancel all that the list shows",
    "p or space   pause     t   timeline on and off     e   its address in the page     y   copy its id",
    "q   quit",
)


class Wish(NamedTuple):
    """What a key asks of the gateway or the terminal."""

    kind: Literal["log", "close_log", "cancel", "copy", "quit"]
    ids: tuple[str, ...] = ()


@dataclass(slots=True)
class LogView:
    """The end of one log."""

    id: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES_MAX))
    #: Lines from the end that are passed over; 0 follows.
    back: int = 0
    told: str = "..."


@dataclass(slots=True)
class TopView:
    """The state of the screen that the user drives."""

    pane: str = "all"
    words: str = ""
    sort: int | None = None
    descending: bool = True
    selected: str | None = None
    #: Whether the cursor was moved: it stays on its row then, and on the first line before.
    held: bool = False
    #: The first row that is drawn, and how many were.
    offset: int = 0
    drawn: int = 1
    paused: bool = False
    timeline: bool = True
    helping: bool = False
    #: What is being typed: a filter, or the answer to a question about these invocations.
    prompt: Literal["filter", "cancel", "cancel_all"] | None = None
    typed: str = ""
    asked: tuple[str, ...] = ()
    log: LogView | None = None
    message: str = ""
    #: The cursor's last place, for when its row has gone.
    _at: int = 0

    def arrange(self, listing: Listing, height: int) -> int:
        """Fit cursor and offset to the rows; return the cursor's place."""
        keys = [row.key for row in listing.rows]
        at = 0
        if self.held:
            at = keys.index(self.selected) if self.selected in keys else min(self._at, max(0, len(keys) - 1))
        self.selected = keys[at] if keys else None
        self._at = at
        self.drawn = max(1, height)
        self.offset = max(0, min(self.offset, at, len(keys) - self.drawn), at - self.drawn + 1)
        return at

    def press(self, key: str, sign: str | None, listing: Listing) -> Wish | None:
        """Take a key by its name, and the sign that it types; return what it asks for."""
        self.message = ""
        if self.helping:
            self.helping = False
            return None
        if self.prompt is not None:
            return self._answer(key, sign, listing)
        if key in ("q", "ctrl+c"):
            return Wish("quit")
        if key in _MOVES:
            self._move(_MOVES[key], listing)
        elif sign is not None and sign in PANES:
            self.pane, self.sort, self.offset, self.held = PANES[sign], None, 0, False
        elif sign in ("<", ">"):
            self._sort_by(1 if sign == ">" else -1, len(listing.columns))
        elif key == "escape":
            return self._escape()
        else:
            return self._act(key, sign, listing)
        return None

    def _act(self, key: str, sign: str | None, listing: Listing) -> Wish | None:
        row = next((row for row in listing.rows if row.key == self.selected), None)
        action = row is not None and bool(row.sign)
        if sign == "/":
            self.prompt, self.typed = "filter", self.words
        elif sign == "r":
            self.descending = not self.descending
        elif sign == "p" or key == "space":
            self.paused = not self.paused
        elif sign == "t":
            self.timeline = not self.timeline
        elif sign == "?":
            self.helping = True
        elif row is None or not action:
            return None
        elif key == "enter":
            self.log, self.held = LogView(row.key), True
            return Wish("log", (row.key,))
        elif sign == "y":
            self.message = f"{row.key} is copied, where the terminal allows it"
            return Wish("copy", (row.key,))
        elif sign == "e":
            self.message = f"/ui/invocations/{row.key}"
        elif sign == "c" and row.sign != "X":
            self.prompt, self.typed, self.asked = "cancel", "", (row.key,)
        elif sign == "C":
            self.asked = tuple([each.key for each in listing.rows if each.sign in ("R", "w")])
            if self.asked:
                self.prompt, self.typed = "cancel_all", ""
        return None

    def _answer(self, key: str, sign: str | None, listing: Listing) -> Wish | None:
        """Take a key of what is being typed."""
        if key == "escape":
            self.prompt = None
        elif self.prompt == "cancel":
            self.prompt = None
            return Wish("cancel", self.asked) if sign in ("y", "Y") else None
        elif key == "enter":
            prompt, self.prompt = self.prompt, None
            if prompt == "filter":
                self.words = self.typed
            elif self.typed == str(len(self.asked)):
                return Wish("cancel", self.asked)
            else:
                self.message = "nothing was cancelled: that is not their number"
        elif key == "backspace":
            self.typed = self.typed[:-1]
        elif sign is not None and sign.isprintable() and len(self.typed) < TYPED_MAX:
            self.typed += sign
        if self.prompt == "filter":
            self.words = self.typed
        return None

    def _escape(self) -> Wish | None:
        if self.log is not None:
            self.log = None
            return Wish("close_log")
        self.words = ""
        return None

    def _move(self, by: str, listing: Listing) -> None:
        if self.log is not None and by in ("page_up", "page_down"):
            back = self.log.back + (10 if by == "page_up" else -10)
            self.log.back = max(0, min(back, len(self.log.lines) - 1))
            return
        last = len(listing.rows) - 1
        step = {"up": -1, "down": 1, "page_up": -self.drawn, "page_down": self.drawn, "home": -last, "end": last}[by]
        at = max(0, min(last, self._at + step))
        if listing.rows:
            self._at, self.selected, self.held = at, listing.rows[at].key, True

    def _sort_by(self, step: int, columns: int) -> None:
        places: list[int | None] = [None, *range(columns)]
        self.sort = places[(places.index(self.sort) + step) % len(places)] if self.sort in places else None


_MOVES = {
    "up": "up",
    "k": "up",
    "down": "down",
    "j": "down",
    "pageup": "page_up",
    "pagedown": "page_down",
    "home": "home",
    "g": "home",
    "end": "end",
    "G": "end",
    "upper_g": "end",
}
