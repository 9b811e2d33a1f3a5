"""What every verb shares: its options, the client, and how values are shown to people and to programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec
import orjson

from gateway.config.quantities import duration_s, show_duration

_FIGURE = re.compile(r"-|[\d.]+[a-zA-Z]{0,2}(\d+[smh])?")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Duration(click.ParamType[float]):
    """A duration such as 500ms, 30s or 2m, as seconds."""

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
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def server_options(command: _Command) -> _Command:
    """Where the gateway is, and the token it wants."""
    command = click.option(
        "--token", envvar="TANGRAM_TOKEN", default="", help="Bearer token [TANGRAM_TOKEN].", show_default=False
    )(command)
    return click.option(
        "--server",
        envvar="TANGRAM_SERVER",
        default="http://127.0.0.1:8080",
        show_default=True,
        help="The gateway [TANGRAM_SERVER].",
    )(command)


def print_json(value: object) -> None:
    click.echo(orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def plain(answer: msgspec.Struct) -> dict[str, Any]:
    """Return an answer of the gateway as JSON values: what was left out stays so."""
    body = msgspec.to_builtins(answer)
    assert isinstance(body, dict)
    return body


def say(text: str) -> None:
    """A line for people, on standard error."""
    click.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[*columns], *([("-" if cell is None else str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    right = [all(_numeric(row[at]) for row in cells[1:]) for at in range(len(columns))]
    for row in cells:
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def show_units(units: Mapping[str, object]) -> str:
    return " ".join(f"{kind}={count}" for kind, count in sorted(units.items())) or "-"


def show_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else show_duration(seconds)


def _numeric(text: str) -> bool:
    return _FIGURE.fullmatch(text) is not None
