"""The verb ``completion``, and what a shell is offered for functions and ids: asked of the gateway, in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

from tangram import Client, TangramError
from tangram.cli.printing.brief import short_id
from tangram.client.retries import Retries

#: How many ids are offered.
OFFERED = 30
VARIABLE = "_TANGRAM_COMPLETE"
SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command()
@click.argument("shell", type=click.Choice(sorted(SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete verbs, options, functions and ids.

    bash: eval "$(tangram completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: tangram completion fish > ~/.config/fish/completions/tangram.fish
    """
    click.echo(SHELLS[shell](ctx.find_root().command, {}, "tangram", VARIABLE).source())


def function_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the registered functions."""
    return _offered(
        ctx, incomplete, lambda client: [(each.name, each.description or each.runtime) for each in client.functions()]
    )


def invocation_ids(state: str | None = None) -> Completer:
    """Offer the newest invocations, or those in one state, by their short ids."""

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        def found(client: Client) -> Iterable[tuple[str, str]]:
            listed = client.list(state=state, limit=OFFERED)
            return [(short_id(each.id), f"{each.function} {each.state}") for each in listed]

        return _offered(ctx, incomplete, found)

    return offer


def _offered(
    ctx: click.Context, incomplete: str, ask: Callable[[Client], Iterable[tuple[str, str]]]
) -> list[CompletionItem]:
    """Return what begins like ``incomplete``; nothing where no gateway answers at once."""
    with (
        suppress(TangramError),
        Client(ctx.params.get("server"), token=ctx.params.get("token"), retries=Retries(max_attempts=1)) as client,
    ):
        return [CompletionItem(value, help=told) for value, told in ask(client) if value.startswith(incomplete)]
    return []
