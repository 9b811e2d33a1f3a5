"""The verb ``top``: the screen on a terminal, one print elsewhere."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time

import click

from tangram import AsyncClient, Client
from tangram.cli.options import Duration, connected, json_option
from tangram.cli.printing.output import say
from tangram.cli.top.plain import print_state, repeat

NEEDS = "the screen needs textual: pip install 'tangram-client[top]'"


@click.command()
@click.option("--interval", "interval_s", type=Duration(), help="Print it again and again, without the screen.")
@click.option("--once", is_flag=True, help="Print it once, without the screen; so it is where no terminal is.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII only; so it is in a locale without UTF-8.")
@json_option
@connected
def top(client: Client, interval_s: float | None, once: bool, ascii_only: bool, as_json: bool) -> int:
    """What the gateway does now: pools and who holds them, what runs, what waits for what, what failed.

    On a terminal a screen that follows it (? lists its keys), elsewhere one print. The screen needs the extra `top`.
    """
    if interval_s is not None and not once:
        return repeat(client, interval_s, as_json)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if once or as_json or not is_terminal:
        print_state(client, as_json)
        return 0
    if importlib.util.find_spec("textual") is None:
        print_state(client, as_json=False)
        say(NEEDS)
        return 0
    return asyncio.run(_screen(client, ascii_only or "utf" not in (sys.stdout.encoding or "").lower()))


async def _screen(client: Client, ascii_only: bool) -> int:
    """Follow on the screen until it is left; the terminal is as before then, also after a fault."""
    began_s = time.monotonic()
    from tangram.cli.top.screen import TopScreen

    token = click.get_current_context().params.get("token")
    async with AsyncClient(client.server, token=token) as ours:
        shown = TopScreen(ours, token, ascii_only=ascii_only)
        wrong = await shown.run_async()
    if wrong is None and shown.return_code:
        wrong = f"the screen ended after {time.monotonic() - began_s:.0f} s with a fault"
    if wrong is not None:
        say(wrong)
        return 1
    return 0
