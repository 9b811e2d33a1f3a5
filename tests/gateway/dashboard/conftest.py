"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ViewportSize, async_playwright

from tests.gateway.dashboard.shown import ShownPage

WIDE = ViewportSize(width=1440, height=900)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where chromium is. Without it the test is skipped with the reason, but fails where ``CI=true``."""
    found = shutil.which("chromium")
    if found is None:
        told = "no chromium: scripts/setup --with chromium installs it where it is root on Debian"
        if os.environ.get("CI") == "true":
            pytest.fail(told)
        pytest.skip(told)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """One browser for all tests, which run in its loop (`shown.IN_BROWSER`); each opens contexts of its own."""
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def shown(browser: Browser) -> AsyncIterator[ShownPage]:
    """A page, which must come through the test without an error of its own."""
    context = await browser.new_context(viewport=WIDE, color_scheme="light")
    page = ShownPage(await context.new_page())
    yield page
    await context.close()
    assert page.errors == []
