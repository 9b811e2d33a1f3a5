"""What the verbs share: options, ids as people write them, completion, and the client they are given."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from tangram import (
    Client,
    ConnectionFailed,
    InvalidInputError,
    InvocationResult,
    NotFoundError,
    Retries,
    Trajectory,
)
from tangram.cli.main import inherit
from tangram.cli.output import short_id
from tangram.client.requests import DEFAULT, SERVER, TOKEN
from tangram.types import duration_s

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
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=inherit, help="Print JSON.")(command)


def connected(command: Callable[Concatenate[Client, _P], _R]) -> Callable[_P, _R]:
    """``--server``, ``--token``, ``--retry-connrefused``: the command's first argument is a client, closed after it."""

    @click.option("--server", metavar="URL", callback=inherit, help=f"The gateway [{SERVER}, or {DEFAULT}].")
    @click.option("--token", metavar="TOKEN", callback=inherit, help=f"Bearer token [{TOKEN}].")
    @click.option("--retry-connrefused", is_flag=True, help=f"Wait {OUTAGE_S:g} s for a gateway that starts.")
    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        server, token = kwargs.pop("server"), kwargs.pop("token")
        retries = Retries(outage_s=OUTAGE_S, refused_s=None if kwargs.pop("retry_connrefused") else 0.0)
        # What a command opens stays when the command has ended: it has its idle_ttl.
        with Client(server, token=token, retries=retries, lease_s=None) as client:  # type: ignore[arg-type]  # text, or None
            try:
                return command(client, *args, **kwargs)
            except ConnectionFailed as error:
                if error.detail.get("refused") and retries.refused_s is not None:
                    message = f"{error.message}; --retry-connrefused waits for one that starts"
                    raise ConnectionFailed(message, detail=error.detail) from None
                raise

    return run


def new_option(command: _Command) -> _Command:
    """``--new``: a trajectory that does not live yet gets a sandbox."""
    return click.option("--new", is_flag=True, help="Make the trajectory's sandbox if there is none.")(command)


def living(client: Client, name: str, function: str = "shell", task: str | None = None, *, new: bool) -> Trajectory:
    """Return a trajectory that lives, or with ``new`` may begin; raises NotFoundError."""
    if not new:
        try:
            client.trajectory_info(name)
        except NotFoundError as error:
            message = f"{error.message}; --new, before any command, makes its sandbox"
            raise NotFoundError(message, component="cli") from None
    return client.trajectory(name, function=function, task=task)


def limit_option(what: str) -> Callable[[_Command], _Command]:
    """``--limit``: most of them that are shown."""
    return click.option(
        "-n", "--limit", default=20, show_default=True, type=click.IntRange(min=1), help=f"Most {what}."
    )


_PATHS_HELP = (
    "PATHS are YAML files or directories (tangram.yaml, functions/*/function.yaml); the current one by default."
)


def paths_argument(command: _Command) -> _Command:
    """PATHS of configuration files; the command's help says what they are, before its examples."""
    text, mark, examples = (command.__doc__ or "").partition("\b")
    command.__doc__ = f"{text.rstrip()} {_PATHS_HELP}\n\n    {mark}{examples}"
    return click.argument("paths", nargs=-1, type=click.Path(path_type=Path))(command)


#: Digits of the number that an id begins with, and candidates that are told.
DIGITS, CANDIDATES = 11, 5
_WHOLE = re.compile(r"[0-9a-f]{11}-[0-9a-f]{12}")
_PART = re.compile(r"[0-9a-f]{1,11}|[0-9a-f]{11}-[0-9a-f]{0,11}")


def whole_id(client: Client, text: str) -> str:
    """Return the id that ``text`` stands for.

    Zeros before the number may be left out, as ``tangram ps`` does on a narrow terminal; a number that is an
    invocation's own stands for it, also where others begin alike. What looks like no id is left to the gateway.
    Raises NotFoundError, and InvalidInputError with the candidates where there are several.
    """
    prefix = text.lower()
    if _WHOLE.fullmatch(prefix) or not _PART.fullmatch(prefix):
        return text
    number, dash, _ = prefix.partition("-")
    if dash or len(number) == DIGITS:
        candidates = _in_range(client, int(number, 16), int(number, 16) + 1)
        matching = [each for each in candidates if each.id.startswith(prefix)]
    else:
        matching = _beginning(client, number)
    if not matching:
        raise NotFoundError(f"no invocation's id begins with {text}", component="client")
    if len(matching) > 1:
        listing = ", ".join(f"{short_id(each.id)} ({each.function}, {each.state})" for each in matching[:CANDIDATES])
        more = ", ..." if len(matching) > CANDIDATES else ""
        raise InvalidInputError(f"{text} begins several ids: {listing}{more}; write more of it", component="client")
    return matching[0].id


def whole_ids(client: Client, texts: Iterable[str]) -> list[str]:
    """Return each id in full, before anything is done with one of them."""
    return [whole_id(client, text) for text in texts]


def _beginning(client: Client, digits: str) -> list[InvocationResult]:
    """Return invocations whose number, without zeros before it, is ``digits``; else those that it begins."""
    number = int(digits, 16)
    if digits.startswith("0"):
        rest = 4 * (DIGITS - len(digits))
        return _in_range(client, number << rest, (number + 1) << rest)
    if exact := _in_range(client, number, number + 1):
        return exact
    candidates: list[InvocationResult] = []
    for more in range(1, DIGITS - len(digits) + 1):
        wider = number << (4 * more)
        candidates += _in_range(client, wider, wider + (1 << (4 * more)))
        if len(candidates) > CANDIDATES:
            break
    return candidates


def _in_range(client: Client, low: int, high: int) -> list[InvocationResult]:
    """Return the newest few invocations with a number from ``low`` to before ``high``."""
    cursor = f"{high:011x}-{0:012x}" if high < 16**DIGITS else None
    listed = client.list(before=cursor, limit=CANDIDATES + 1)
    return [each for each in listed if low <= int(each.id.partition("-")[0], 16) < high]


VARIABLE = "_TANGRAM_COMPLETE"
SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(sorted(SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete verbs and options.

    bash: eval "$(tangram completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: tangram completion fish > ~/.config/fish/completions/tangram.fish
    """
    click.echo(SHELLS[shell](ctx.find_root().command, {}, "tangram", VARIABLE).source())
