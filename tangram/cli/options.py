"""What the verbs share: their options, and the client that those of a gateway are given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from tangram import Client, ConnectionFailed, Retries
from tangram.cli.global_options import inherit
from tangram.client.address import DEFAULT, SERVER, TOKEN
from tangram.types.values.quantities import duration_s

#: Seconds for which a gateway that cannot be reached is waited for; it is said at once that it cannot.
OUTAGE_S = 60.0
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in click 8.5 only
    """A duration such as 500ms, 30s or 1h30m, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return duration_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def json_option(command: _Command) -> _Command:
    """``--json``: one JSON value on standard output instead of text for people."""
    return click.option("--json", "as_json", is_flag=True, callback=inherit, help="Print JSON.")(command)


def connected(command: Callable[Concatenate[Client, _P], _R]) -> Callable[_P, _R]:
    """``--server``, ``--token``, ``--retry-connrefused``: the command's first argument is a client, closed after it."""

    @click.option("--server", callback=inherit, help=f"The gateway [{SERVER}, or {DEFAULT}].")
    @click.option("--token", callback=inherit, help=f"Bearer token [{TOKEN}].")
    @click.option("--retry-connrefused", is_flag=True, help=f"Wait {OUTAGE_S:g} s for a gateway that starts.")
    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        server, token = kwargs.pop("server"), kwargs.pop("token")
        retries = Retries(outage_s=OUTAGE_S, refused_s=None if kwargs.pop("retry_connrefused") else 0.0)
        with Client(server, token=token, retries=retries) as client:  # type: ignore[arg-type]  # text, or None
            try:
                return command(client, *args, **kwargs)
            except ConnectionFailed as error:
                if error.detail.get("refused") and retries.refused_s is not None:
                    told = f"{error.message}; --retry-connrefused waits for one that starts"
                    raise ConnectionFailed(told, detail=error.detail) from None
                raise

    return run


def limit_option(what: str) -> Callable[[_Command], _Command]:
    """``--limit``: most of them that are shown."""
    return click.option(
        "-n", "--limit", default=20, show_default=True, type=click.IntRange(min=1), help=f"Most {what}."
    )
