"""The screen of `tangram top`: textual round `draw`. Only lines that changed are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.text import Text
from textual.app import App, ComposeResult
from textual.events import Click, Key, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tangram.cli.top.drawing import draw, listing
from tangram.cli.top.follow import follow
from tangram.cli.top.picture import ASCII, Signs
from tangram.cli.top.rows import Listing
from tangram.cli.top.view import TopView, Wish
from tangram.cli.top.watched import StreamEvent, Watched
from tangram.client.aio.client import AsyncClient
from tangram.errors import TangramError
from tangram.types import QueueEntry

#: Seconds between two drawings, and between two looks at the queue; how many that wait are listed.
DRAW_S, QUEUE_S, WAITING_MAX = 0.5, 1.0, 200
#: A drawing that takes so long goes over a slow line: the next comes later.
SLOW_S = 0.2


class ScreenLines(Widget):
    """Lines of text; `show` writes those that are not as before."""

    DEFAULT_CSS = "ScreenLines { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Text] = []

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines instead."""
        before, self._lines = self._lines, list(lines)
        for at, line in enumerate(self._lines):
            if at >= len(before) or before[at] != line or before[at].spans != line.spans:
                self.refresh(Region(0, at, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else Text("")
        segments = list(line.render(self.app.console))
        return Strip(segments).adjust_cell_length(self.size.width)


class TopScreen(App[str | None]):
    """Follows one gateway until it is left; returns what went wrong, if anything did."""

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False

    def __init__(self, client: AsyncClient, token: str | None, *, ascii_only: bool = False) -> None:
        super().__init__()
        self._client, self._token = client, token
        self._signs = ASCII if ascii_only else Signs()
        self._watched, self._view = Watched(), TopView()
        self._waiting: Sequence[QueueEntry] = ()
        self._rows = Listing((), ())
        self._lost_until_s: float | None = None
        self._heard_s: float | None = None
        self._lines = ScreenLines()
        self._work: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield self._lines

    async def on_mount(self) -> None:
        """Begin to follow."""
        for each in (self._follow(), self._look(), self._draw_again()):
            self._work.append(asyncio.create_task(each))

    async def on_unmount(self) -> None:
        """End what was begun."""
        tasks = [*self._work, *([] if self._following is None else [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        def take(event: StreamEvent) -> None:
            self._watched.take(event)
            self._lost_until_s, self._heard_s = None, time.monotonic()

        def lost(why: str, wait_s: float) -> None:
            self._lost_until_s = time.monotonic() + wait_s
            self._view.message = why

        try:
            await follow(self._client.server, self._token, take, lost, lambda: self._watched.last)
        except TangramError as error:
            self.exit(f"{error.component}: {error.code}: {error.message}")

    async def _look(self) -> None:
        """Ask what waits, while a list shows it; the stream tells its counts only."""
        while True:
            if self._view.pane in ("all", "waiting") and not self._view.paused:
                with suppress(TangramError):  # the stream tells that the gateway cannot be reached
                    self._waiting = await self._client.queue(WAITING_MAX) if self._watched.sections.get("wait") else ()
            await asyncio.sleep(QUEUE_S)

    async def _draw_again(self) -> None:
        while True:
            began_s = time.monotonic()
            if not self._view.paused:
                self._rows = listing(self._watched, self._waiting, self._view)
            self._draw()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(2 * DRAW_S if took_s > SLOW_S else DRAW_S)

    def _draw(self) -> None:
        width, height = self.size
        if width and height:
            self._lines.show(self._drawn(width, height))

    def _drawn(self, width: int, height: int) -> list[Text]:
        server, status = self._client.server, self._status()
        return draw(self._watched, self._rows, self._view, server, status, width, height, self._signs)

    def _status(self) -> str:
        if self._lost_until_s is not None:
            return f"lost, again in {max(0.0, self._lost_until_s - time.monotonic()):.0f}s"
        if self._heard_s is None:
            return "connecting"
        return f"live {time.monotonic() - self._heard_s:.1f}s"

    def on_resize(self, event: Resize) -> None:
        """The cursor stays on its row, whatever the new size shows."""
        self._draw()

    async def on_key(self, event: Key) -> None:
        """Hand every key to the view."""
        event.prevent_default()
        event.stop()
        sign = event.character if event.is_printable else None
        await self._grant(self._view.press(event.key, sign, self._rows))

    async def on_click(self, event: Click) -> None:
        """Move the cursor to the row that was clicked."""
        drawn = self._drawn(*self.size)
        at = next((y for y, line in enumerate(drawn) if line.plain.startswith(">")), None)
        current = next((i for i, row in enumerate(self._rows.rows) if row.key == self._view.selected), None)
        if at is not None and current is not None:
            wanted = current + event.y - at
            if self._view.offset <= wanted < min(len(self._rows.rows), self._view.offset + self._view.drawn):
                self._view.selected = self._rows.rows[wanted].key
                self._draw()

    async def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        await self._grant(self._view.press("down", None, self._rows))

    async def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        await self._grant(self._view.press("up", None, self._rows))

    async def _grant(self, wish: Wish | None) -> None:
        if wish is not None:
            match wish.kind:
                case "quit":
                    self.exit(None)
                    return
                case "log":
                    self._stop_log()
                    self._following = asyncio.create_task(self._follow_log())
                case "close_log":
                    self._stop_log()
                case "copy":
                    self.copy_to_clipboard(wish.ids[0])
                case "cancel":
                    self._work.append(asyncio.create_task(self._cancel(wish.ids)))
        if not self._view.paused:
            self._rows = listing(self._watched, self._waiting, self._view)
        self._draw()

    def _stop_log(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _follow_log(self) -> None:
        log = self._view.log
        assert log is not None
        try:
            async for line in self._client.logs(log.id, follow=True):
                log.told = ""
                mark = "! " if line.stream == "stderr" else ""
                log.lines.extend(f"{mark}{text}" for text in line.data.splitlines())
            log.told = "(its end)"
        except TangramError as error:
            log.told = error.message

    async def _cancel(self, ids: Sequence[str]) -> None:
        ended = 0
        for id in ids:
            try:
                await self._client.cancel(id)
                ended += 1
                self._view.message = f"{ended} of {len(ids)} cancelled"
            except TangramError as error:
                self._view.message = f"{id}: {error.message}"
        self._work = [task for task in self._work if not task.done()]
