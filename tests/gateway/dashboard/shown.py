"""A page in the browser, and what went wrong in it."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import ConsoleMessage, Locator, Page, expect

#: Marks of a module whose tests need the browser.
IN_BROWSER = [pytest.mark.slow, pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]
#: What a browser says of an answer that is no success: the page tells it itself.
_ANSWER = re.compile(r"Failed to load resource")
DEADLINE_MS = 15_000.0
expect.set_options(timeout=DEADLINE_MS)


class ShownPage:
    """The page under test."""

    def __init__(self, page: Page) -> None:
        self.page = page
        #: Errors of scripts, and what the content policy refused.
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not _ANSWER.search(message.text):
            self.errors.append(message.text)

    def find(self, selector: str, has_text: str | None = None) -> Locator:
        return self.page.locator(selector, has_text=has_text).first

    async def sees(self, selector: str, has_text: str | None = None) -> Locator:
        """Wait until it is there, and return it."""
        found = self.find(selector, has_text)
        await expect(found).to_be_visible()
        return found

    async def says(self, selector: str, text: str | re.Pattern[str]) -> None:
        await expect(self.page.locator(selector).first).to_contain_text(text)

    async def holds(self, expression: str) -> None:
        """Wait, frame by frame, until an expression of the page's is true; its policy lets no other way."""
        async with asyncio.timeout(DEADLINE_MS / 1000):
            while not await self.page.evaluate(expression):
                await self.page.evaluate("new Promise((done) => requestAnimationFrame(done))")
